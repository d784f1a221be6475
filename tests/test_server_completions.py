"""Raw completions over HTTP: every shape of prompt, echoes, and log-probabilities as evaluation harnesses read them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from server_process import Server, serving

from edgeinfer.runtime.backends.fake import END, ByteVocab, ScriptedBackend
from edgeinfer.runtime.service import Engine


def counting(tokens: list[int]) -> int:
    """After a prompt: the next letter of the alphabet, up to z."""
    return tokens[-1] + 1 if tokens[-1] < ord("z") else END


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    backend = ScriptedBackend(counting, n_ctx=512, max_slots=8, vocab=ByteVocab(adds_bos=True))
    with serving(Engine(backend)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)


def create(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    return client.completions.create(model="scripted", prompt=prompt, temperature=0, **fields)


@pytest.mark.parametrize(("prompt", "texts"), [
    ("a", ["bcd"]), (["a", "m"], ["bcd", "nop"]), ([97], ["bcd"]), ([[97], [98, 99]], ["bcd", "def"]),
])
@pytest.mark.parametrize("n", [1, 2])
def test_every_shape_of_prompt(client: openai.OpenAI, prompt: Any, texts: list[str], n: int) -> None:
    answer = create(client, prompt, max_tokens=3, n=n)
    assert [choice.text for choice in answer.choices] == [text for text in texts for _ in range(n)]
    assert [choice.index for choice in answer.choices] == list(range(n * len(texts))) and {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage.completion_tokens == 3 * n * len(texts) and answer.object == "text_completion" and answer.id.startswith("cmpl-")
    chunks = list(create(client, prompt, max_tokens=3, n=n, stream=True, stream_options={"include_usage": True}))
    joined = ["".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == index) for index in range(n * len(texts))]
    assert joined == [choice.text for choice in answer.choices] and chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens
    assert sum(choice.finish_reason is not None for chunk in chunks for choice in chunk.choices) == n * len(texts)


def test_sixteen_tokens_unless_said_otherwise(client: openai.OpenAI) -> None:
    assert len(create(client, "A").choices[0].text) == 16
    assert create(client, "a", max_tokens=-1).choices[0].text == "bcdefghijklmnopqrstuvwxyz"


def test_stop_and_end(client: openai.OpenAI) -> None:
    assert create(client, "a", stop=["de"]).choices[0].text == "bc"
    answer = create(client, "x")
    assert answer.choices[0].text == "yz" and answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
def test_echo(client: openai.OpenAI, stream: bool, prompt: Any) -> None:
    answer = create(client, prompt, max_tokens=2, echo=True, stream=stream)
    assert ("".join(chunk.choices[0].text for chunk in answer) if stream else answer.choices[0].text) == "abcde"


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_scores_of_a_prompt(client: openai.OpenAI, max_tokens: int, stream: bool) -> None:
    prompt = [97, 98, 99, 120]
    answer = create(client, prompt, max_tokens=max_tokens, echo=True, logprobs=2, stream=stream)
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for part in answer if stream else [answer]:
        for choice in part.choices:
            for name, values in (choice.logprobs.to_dict() if choice.logprobs else {}).items():
                found[name] += values
    said = ["y", "z", ""][:max_tokens] if max_tokens < 3 else ["y", "z"]
    assert found["tokens"] == ["a", "b", "c", "x", *said]
    assert found["text_offset"] == list(range(4 + len(said))) and {len(values) for values in found.values()} == {4 + len(said)}
    first, b, c, x, *rest = found["token_logprobs"]
    assert first is None and found["top_logprobs"][0] is None
    # The alphabet goes on as the model expects; "x" after "c" it does not.
    assert b == c == max(found["top_logprobs"][1].values()) and x < c and x != max(found["top_logprobs"][3].values())
    assert all(len(top) in (2, 3) for top in found["top_logprobs"][1:]) and all(value <= 0 for value in (b, c, x, *rest))


def test_the_entry_after_a_scored_text_is_there_even_where_the_turn_ends(client: openai.OpenAI) -> None:
    """lm-evaluation-harness cuts the last entry off: that must be the generated token, never the text's own last one."""
    for prompt in ([97, 98], [121, 122]):                # goes on with c; ends
        choice = create(client, prompt, max_tokens=1, echo=True, logprobs=1).choices[0]
        assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.top_logprobs) == 3


def test_scores_do_not_depend_on_company_or_cache(client: openai.OpenAI) -> None:
    prompts = [[97, 98, 99, 120, 121], [97, 98, 99], [97, 98, 99, 120, 121]]
    together = create(client, prompts, max_tokens=1, echo=True, logprobs=1).choices
    alone = [create(client, prompt, max_tokens=1, echo=True, logprobs=1).choices[0] for prompt in prompts]
    assert [choice.logprobs for choice in together] == [choice.logprobs for choice in alone]


def test_probabilities_are_those_of_the_logits(client: openai.OpenAI, server: Server) -> None:
    """The backend gives one token a logit of 10 and all others -10."""
    size = 258
    norm = math.log(math.exp(10) + (size - 1) * math.exp(-10))
    choice = create(client, [97, 98, 120], max_tokens=0, echo=True, logprobs=1).choices[0]
    assert choice.text == "abx" and choice.logprobs.token_logprobs[1:] == pytest.approx([10 - norm, -10 - norm], abs=1e-4)


def test_half_characters_keep_their_names_apart(server: Server) -> None:
    data = "é".encode()
    body = {"prompt": [97, *data], "max_tokens": 0, "echo": True, "logprobs": 1}
    choice = httpx.post(server.v1 + "/completions", json=body).json()["choices"][0]
    assert choice["text"] == "aé" and choice["logprobs"]["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"] and choice["logprobs"]["text_offset"] == [0, 1, 1]


def test_a_prompt_gets_its_beginning_of_text(server: Server) -> None:
    """One mark at the start of a text; token ids are taken as they are."""
    counts = [httpx.post(server.v1 + "/completions", json={"prompt": prompt, "max_tokens": 1}).json()["usage"]["prompt_tokens"] for prompt in ("abc", [97, 98, 99], "<|im_start|>abc")]
    assert counts == [4, 3, 4]


def test_a_seed_of_its_own_for_each_choice(server: Server) -> None:
    body = {"prompt": "a", "n": 3, "seed": 5, "max_tokens": 1}
    assert [choice["seed"] for choice in httpx.post(server.v1 + "/completions", json=body).json()["choices"]] == [5, 6, 7]


@pytest.mark.parametrize("field", [{"suffix": "x"}, {"best_of": 3}, {"echo": True, "context_policy": "truncate_middle"}, {"logprobs": 21}, {"logprobs": True}])
def test_what_is_not_done_is_refused(server: Server, field: dict) -> None:
    response = httpx.post(server.v1 + "/completions", json={"prompt": "a", **field})
    assert response.status_code == 400 and response.json()["error"]["param"] in field


def test_progress_and_timings_in_a_stream(server: Server) -> None:
    body = {"prompt": "a" * 300, "max_tokens": 3, "stream": True, "return_progress": True, "timings_per_token": True}
    events = [json.loads(part.removeprefix("data: ")) for part in httpx.post(server.v1 + "/completions", json=body).text.strip().split("\n\n")[:-1]]
    assert any(event.get("prompt_progress", {}).get("processed") == 301 for event in events)
    assert events[-1]["timings"]["predicted_n"] == 3 and any("timings" in event and event["choices"][0]["text"] for event in events)


# ------------------------------------------------------------------------------------------------------------------- helpers


def test_tokens_and_texts(server: Server) -> None:
    def post(path: str, **body: Any) -> Any:
        return httpx.post(server.url + path, json=body).json()

    assert post("/tokenize", content="aé") == {"tokens": [97, 195, 169]}
    assert post("/tokenize", content="a", add_special=True) == {"tokens": [256, 97]}
    assert post("/tokenize", content="<|im_end|>") == {"tokens": [257]} and len(post("/tokenize", content="<|im_end|>", parse_special=False)["tokens"]) == 10
    assert post("/tokenize", content="aé", with_pieces=True)["tokens"] == [{"id": 97, "piece": "a"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    assert post("/detokenize", tokens=[97, 195, 169, 257]) == {"content": "aé<|im_end|>"}
    rendered = post("/apply-template", messages=[{"role": "user", "content": "hi"}])
    assert rendered == {"prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"}


def test_models_and_capabilities(server: Server, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["scripted"] and client.models.retrieve("scripted").meta["n_ctx"] == 512
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
    found, = httpx.get(server.v1 + "/capabilities").json()["data"]
    assert found["id"] == "scripted" and "logprobs" in found["parameters"]["chat"] and "lora" not in found["parameters"]["chat"]
    assert found["context_policies"] == ["error", "truncate_middle", "shift"] and found["reasoning"] is None


def test_health_is_red_when_an_engine_is_stuck(server: Server, monkeypatch) -> None:
    engine = server.pool.loaded()[0].engine
    assert httpx.get(server.url + "/health").status_code == 200
    stuck = type(engine.health)("stalled", "A step has been running for 200.0 s.", 200.0)
    monkeypatch.setattr(type(engine), "health", property(lambda self: stuck))
    response = httpx.get(server.url + "/health")
    assert response.status_code == 503 and response.json()["status"] == "stalled"
