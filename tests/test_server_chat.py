"""Chat completions over HTTP, with the openai package as the client."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from server_process import Server, serving

from edgeinfer.runtime.backends.fake import END, ScriptedBackend
from edgeinfer.runtime.scheduler import SchedulerOptions
from edgeinfer.runtime.service import Engine

SCRIPT = [b"Hel", b"lo ", b"\xf0\x9f", b"\x98\x80", b" wor", b"ld", b"?\n"]
TEXT = "Hello 😀 world?\n"


def user(text: str = "hi") -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def echo(tokens: list[int]) -> int:
    """Says back what stood between "<" and ">" of the prompt: the answer depends on the prompt alone."""
    head, _, said = bytes(token for token in tokens if token < 256).rpartition(b"assistant\n")
    marker = head[head.rindex(b"<") : head.rindex(b">") + 1]
    return marker[len(said)] if len(said) < len(marker) else END


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    backend = ScriptedBackend(SCRIPT, n_ctx=2048, max_slots=8, adapters=("tone",))
    with serving(Engine(backend, options=SchedulerOptions(prefill_chunk=16))) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)


def create(client: Any, **fields: Any) -> Any:
    return client.chat.completions.create(model="scripted", **{"messages": user(), **fields})


def joined(chunks: list[Any], index: int = 0) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices if choice.index == index)


def events(response: httpx.Response) -> list[Any]:
    """What a stream said, event by event; comments as they are."""
    parts = response.text.strip().split("\n\n")
    return [part if part.startswith(":") else "[DONE]" if part == "data: [DONE]" else json.loads(part.removeprefix("data: ")) for part in parts]


# ------------------------------------------------------------------------------------------------------------------ the shape


def test_an_answer_has_everything_that_clients_read(client: openai.OpenAI) -> None:
    answer = create(client)
    choice, = answer.choices
    assert choice.message.content == TEXT and choice.message.role == "assistant" and choice.finish_reason == "stop" and choice.logprobs is None
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.created > 1e9 and answer.model == "scripted"
    assert answer.system_fingerprint and choice.seed >= 0
    assert answer.usage.completion_tokens == 8 and answer.usage.total_tokens == 8 + answer.usage.prompt_tokens
    assert answer.timings["predicted_n"] == 8 and {"cache_n", "prompt_n", "prompt_ms", "prompt_per_second", "predicted_ms", "predicted_per_second"} <= answer.timings.keys()


def test_a_stream_is_role_first_one_reason_usage_and_done(server: Server) -> None:
    body = {"messages": user(), "stream": True, "stream_options": {"include_usage": True}}
    response = httpx.post(server.v1 + "/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    first, *pieces, last, usage, done = events(response)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""} and done == "[DONE]"
    assert all(piece["choices"][0]["finish_reason"] is None and piece["choices"][0]["delta"].keys() == {"content"} for piece in pieces)
    assert "".join(piece["choices"][0]["delta"]["content"] for piece in pieces) == TEXT
    assert last["choices"][0]["finish_reason"] == "stop" and last["choices"][0]["delta"] == {} and last["timings"]["predicted_n"] == 8
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 8
    assert all(event["usage"] is None for event in (first, *pieces, last))
    everything = (first, *pieces, last, usage)
    assert len({event["id"] for event in everything}) == 1 and {event["object"] for event in everything} == {"chat.completion.chunk"}
    without = events(httpx.post(server.v1 + "/chat/completions", json={"messages": user(), "stream": True}))
    assert not any("usage" in event for event in without[:-1])


def test_streamed_equals_whole_sync_and_async(server: Server, client: openai.OpenAI) -> None:
    async def collect() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=server.v1, api_key="none", max_retries=0) as other:
            whole = (await create(other)).choices[0].message.content
            return whole, joined([chunk async for chunk in await create(other, stream=True)])

    assert {create(client).choices[0].message.content, joined(list(create(client, stream=True))), *asyncio.run(collect())} == {TEXT}


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_to_one_prompt(client: openai.OpenAI, stream: bool) -> None:
    if stream:
        chunks = list(create(client, n=3, stream=True, stream_options={"include_usage": True}))
        assert [joined(chunks, index) for index in range(3)] == [TEXT] * 3
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
        assert reasons == ["stop"] * 3 and sum(choice.delta.role == "assistant" for chunk in chunks for choice in chunk.choices) == 3
        usage = chunks[-1].usage
    else:
        answer = create(client, n=3)
        assert [choice.index for choice in answer.choices] == [0, 1, 2] and {choice.message.content for choice in answer.choices} == {TEXT}
        usage = answer.usage
    assert usage.completion_tokens == 24 and usage.prompt_tokens == create(client).usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "text"), [("lo 😀 w", "Hel"), (["world", "😀"], "Hello "), ("?\n", "Hello 😀 world"), ("never", TEXT)])
def test_stop(client: openai.OpenAI, stream: bool, stop: Any, text: str) -> None:
    if stream:
        chunks = list(create(client, stop=stop, stream=True))
        assert joined(chunks) == text and chunks[-1].choices[0].finish_reason == "stop"
    else:
        assert create(client, stop=stop).choices[0].message.content == text


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("stream", [False, True])
def test_length(client: openai.OpenAI, field: str, stream: bool) -> None:
    if stream:
        chunks = list(create(client, stream=True, **{field: 2}))
        assert joined(chunks) == "Hello " and chunks[-1].choices[0].finish_reason == "length"
    else:
        answer = create(client, **{field: 2})
        assert answer.choices[0].message.content == "Hello " and answer.choices[0].finish_reason == "length"


# ------------------------------------------------------------------------------------------------------------------ log-probs


def test_logprobs_tell_every_token_once_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = create(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    chunks = list(create(client, logprobs=True, top_logprobs=3, stream=True))
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert [entry.bytes for entry in whole] == [entry.bytes for entry in streamed] == [list(piece) for piece in SCRIPT]
    assert b"".join(bytes(entry.bytes) for entry in whole).decode() == TEXT
    assert all(len(entry.top_logprobs) == 3 and entry.logprob == entry.top_logprobs[0].logprob <= 0 for entry in whole)
    assert [(entry.logprob, entry.token) for entry in whole] == [(entry.logprob, entry.token) for entry in streamed]


def test_logprobs_alone_and_with_stops(client: openai.OpenAI) -> None:
    assert all(entry.top_logprobs == [] for entry in create(client, logprobs=True).choices[0].logprobs.content)
    for stream in (False, True):
        answer = create(client, logprobs=True, stop="wor", stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
        assert [bytes(entry.bytes) for entry in entries][:4] == SCRIPT[:4] and b"ld" not in [bytes(entry.bytes) for entry in entries]


# ------------------------------------------------------------------------------------------------------------------ extensions


def test_timings_and_progress_on_request(server: Server) -> None:
    body = {"messages": user("x" * 100), "stream": True, "timings_per_token": True, "return_progress": True}
    said = [event for event in events(httpx.post(server.v1 + "/chat/completions", json=body)) if event != "[DONE]"]
    progress = [event["prompt_progress"] for event in said if "prompt_progress" in event]
    assert progress[-1]["processed"] == progress[-1]["total"] > 100 and len(progress) > 3
    assert [one["processed"] for one in progress] == sorted(one["processed"] for one in progress) and progress[0].keys() == {"total", "cache", "processed", "time_ms"}
    timed = [event["timings"]["predicted_n"] for event in said if event["choices"][0]["delta"].get("content")]
    assert timed and timed == sorted(timed)


def test_what_was_cached_and_why_not(server: Server) -> None:
    with serving(Engine(ScriptedBackend(SCRIPT, n_ctx=2048))) as server:
        first, second = (httpx.post(server.v1 + "/chat/completions", json={"messages": user("a question")}).json()["usage"] for _ in range(2))
        details = first["prompt_tokens_details"]
        assert details["cached_tokens"] == 0 and "cached" in details["cache_miss"]
        assert second["prompt_tokens_details"] == {"cached_tokens": second["prompt_tokens"] - 1, "cache_miss": None}


def test_seeds_repeat_and_choices_differ(server: Server) -> None:
    """Several answers with one seed are several answers, the same each time."""
    flat = ScriptedBackend(lambda tokens: ord("a"), n_ctx=512, max_slots=4)
    flat.forward = _flattened(flat.forward)
    with serving(Engine(flat)) as server:
        client = openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)
        answers = [[choice.message.content for choice in create(client, n=2, seed=7, temperature=1.0, max_tokens=20).choices] for _ in range(2)]
        assert answers[0] == answers[1] and answers[0][0] != answers[0][1]
        free = [create(client, temperature=1.0, max_tokens=20).choices[0] for _ in range(2)]
        assert free[0].message.content != free[1].message.content
        again = create(client, temperature=1.0, max_tokens=20, seed=free[0].seed).choices[0]
        assert again.message.content == free[0].message.content and again.seed == free[0].seed


def _flattened(forward: Any) -> Any:
    """Every letter equally likely."""
    def flat(plan: Any) -> Any:
        result = forward(plan)
        for rows in result.logits.values():
            rows[:] = -30.0
            rows[:, ord("a") : ord("z") + 1] = 0.0
        return result
    return flat


def test_biases_penalties_and_the_rest_reach_the_engine(client: openai.OpenAI) -> None:
    # The script's first token is 258; the letter x is likelier only because of its bias.
    assert create(client, logit_bias={"258": -100, "120": 100}, max_tokens=2).choices[0].message.content == "xx"
    extra = {
        "top_k": 5, "min_p": 0.1, "repeat_penalty": 1.1, "repeat_last_n": 8, "priority": "batch", "context_policy": "truncate_middle", "lora": "tone",
        "cache_prompt": True, "speculative": False, "ignore_eos": False,
    }
    answer = create(client, temperature=0.0, top_p=0.9, presence_penalty=0.1, frequency_penalty=0.1, user="me", extra_body=extra)
    assert answer.choices[0].message.content == TEXT
    assert create(client, max_tokens=12, extra_body={"ignore_eos": True}).choices[0].finish_reason == "length"
    assert create(client, temperature=0.0, extra_body={"repetition_penalty": 1.1}).choices[0].message.content == TEXT


def test_a_conversation_that_was_cut_says_so(client: openai.OpenAI) -> None:
    messages = [message for _ in range(20) for message in (*user("x" * 120), {"role": "assistant", "content": "y" * 40})] + user()
    answer = create(client, messages=messages, extra_body={"context_policy": "shift"})
    assert answer.choices[0].message.content == TEXT and answer.usage.prompt_tokens_details.dropped_tokens > 0


def test_everybody_gets_their_own() -> None:
    with serving(Engine(ScriptedBackend(echo, n_ctx=2048, max_slots=4))) as server:
        async def one(client: openai.AsyncOpenAI, index: int) -> str:
            answer = await create(client, messages=user(f"<marker {index}>"), stream=bool(index % 2))
            return joined([chunk async for chunk in answer]) if index % 2 else answer.choices[0].message.content

        async def all_of_them() -> list[str]:
            async with openai.AsyncOpenAI(base_url=server.v1, api_key="none", max_retries=0) as client:
                return await asyncio.gather(*(one(client, index) for index in range(60)))

        assert asyncio.run(all_of_them()) == [f"<marker {index}>" for index in range(60)]
        assert len(server.metrics.ends) == 60 and not server.pool.used


# ---------------------------------------------------------------------------------------------------------------------- pings


def test_a_long_prefill_is_kept_alive_by_comments() -> None:
    release = threading.Event()

    def waits(plan: Any) -> None:
        assert release.wait(60)

    with serving(Engine(ScriptedBackend(SCRIPT, before_forward=waits)), ping_seconds=0.02) as server:
        with httpx.stream("POST", server.v1 + "/chat/completions", json={"messages": user(), "stream": True}, timeout=60) as response:
            lines = response.iter_lines()
            assert [line for line in (next(lines) for _ in range(4)) if line] == [": ping"] * 2
            release.set()
            rest = [line for line in lines if line.startswith("data:")]
        assert json.loads(rest[0].removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant" and rest[-1] == "data: [DONE]"


# ------------------------------------------------------------------------------------------------------------ structured output


@pytest.mark.parametrize("body", [
    {"response_format": {"type": "json_object"}}, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}}},
    {"json_schema": {"type": "object"}}, {"grammar": 'root ::= "{" "}"'}, {"regex": r"\{\}"}, {"lark": 'start: "{" "}"'},
])
def test_an_answer_that_is_bound(server: Server, body: dict) -> None:
    """The script wants words; what it may say is an object, and nothing follows it."""
    answer = httpx.post(server.v1 + "/chat/completions", json={"messages": user(), "logit_bias": {str(ord("}")): 50}, "max_tokens": 50, **body}, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == "{}" and answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("body", [
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {"name": {"type": "string", "pattern": "(?=x)y"}}}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}, {"grammar": "root ::= ("}, {"regex": "("}, {"lark": "start: %%"},
])
def test_what_cannot_be_compiled_is_refused(server: Server, body: dict) -> None:
    response = httpx.post(server.v1 + "/chat/completions", json={"messages": user(), **body}, timeout=60)
    assert response.status_code == 400 and response.json()["error"]["param"] == next(iter(body))
