"""What is wrong with a request is said in OpenAI's shape, with the right status, by a server that lives on."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import openai
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from server_process import Server, serving

from edgeinfer.errors import BackendFailed
from edgeinfer.runtime.backends.fake import CHATML, ByteVocab, ScriptedBackend
from edgeinfer.runtime.scheduler import SchedulerOptions
from edgeinfer.runtime.server.bodies import ChatBody, CompletionBody
from edgeinfer.runtime.service import Engine

JSON = {"Content-Type": "application/json"}
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Engine(ScriptedBackend([b"o", b"k"], n_ctx=256, max_slots=4)), max_body_bytes=100_000, max_messages=50, max_choices=8) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
        assert client.get("/health").json() == {"status": "ok"}


@pytest.fixture(scope="module")
def lenient() -> Iterator[httpx.Client]:
    with serving(Engine(ScriptedBackend([b"o", b"k"])), lenient=True) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def refused(response: httpx.Response, status: int, *, code: str | None = None, param: str | None = None) -> str:
    """The message of a refusal, whose shape is checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json" and response.headers["x-request-id"]
    error = response.json()
    assert error.keys() == {"error"} and error["error"].keys() == {"message", "type", "param", "code"}
    error = error["error"]
    assert error["message"].endswith((".", ")")) and "Traceback" not in error["message"]
    if code is not None:
        assert error["code"] == code
    if param is not None:
        assert error["param"] == param
    return error["message"]


# ---------------------------------------------------------------------------------------------------------------- no JSON


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize", "/apply-template"])
@pytest.mark.parametrize("body", [
    b"{:", b"", b" ", b"[]", b"5", b'"x"', b"true", b"null", b"\xff\xfe", b'{"messages": "\xc3"}', b'{"a": NaN}', b'{"a": Infinity}', b'{"a": -Infinity}',
    b'{"a": 1e999}', b'{"a": ' + b"9" * 5000 + b"}", b'{"a": 123456789012345678901}', b"[" * 5000, b'{"a":' * 2000, b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}",
    b'{"messages": [{"role": "user", "content": "\\ud800"}], "prompt": "\\udfff", "content": "\\ud800"}', b'{"a": 1} x', b'{"a": 1,}', b"\xef\xbb\xbf{}", b'{"a": "\x00"}',
])
def test_a_body_that_is_no_json_object(http: httpx.Client, path: str, body: bytes) -> None:
    refused(http.post(path, content=body, headers=JSON), 400, code="invalid_json")


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/json"])
def test_another_content_type(http: httpx.Client, kind: str | None) -> None:
    """A page can send these without asking first."""
    response = http.post("/v1/chat/completions", content=json.dumps({"messages": USER}).encode(), headers={"Content-Type": kind} if kind else {})
    refused(response, 415)


def test_compressed(http: httpx.Client) -> None:
    refused(http.post("/v1/chat/completions", content=b"{}", headers=JSON | {"Content-Encoding": "gzip"}), 415)


@pytest.mark.parametrize("chunked", [False, True])
def test_too_long(http: httpx.Client, chunked: bool) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 200_000}]}).encode()
    content = (body[at : at + 1000] for at in range(0, len(body), 1000)) if chunked else body
    refused(http.post("/v1/chat/completions", content=content, headers=JSON), 413, code="body_too_large")


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/v1/chat/completions", 405), ("DELETE", "/v1/models", 405), ("POST", "/health", 405), ("GET", "/", 404), ("GET", "/v1", 404),
    ("POST", "/v1/chat/completions/", 404), ("GET", "/v1/models/nobody", 404), ("GET", "/../etc/passwd", 404), ("PATCH", "/%ff%00", 404),
])
def test_addresses_and_methods(http: httpx.Client, method: str, path: str, status: int) -> None:
    response = http.request(method, path)
    refused(response, status)
    assert status != 405 or response.headers["allow"]


# ------------------------------------------------------------------------------------------------------------- wrong fields


@pytest.mark.parametrize("messages", [
    ..., None, [], {}, "hi", 5, ["hi"], [None], [5], [[]], [{}], [{"role": "user", "content": 5}], [{"content": "hi"}], [{"role": None, "content": "hi"}],
    [{"role": 5, "content": "hi"}], [{"role": "wizard", "content": "hi"}], [{"role": ["user"], "content": "hi"}], [{"role": "user", "content": {"a": 1}}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], [{"role": "user", "content": [5]}], [{"role": "user", "content": [[]]}],
    [{"role": "assistant", "tool_calls": 5}], [{"role": "assistant", "tool_calls": [5]}], [{"role": "assistant", "tool_calls": [{}]}], USER * 51,
])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/apply-template"])
def test_bad_messages(http: httpx.Client, path: str, messages: object) -> None:
    refused(http.post(path, json={} if messages is ... else {"messages": messages}), 400)


@pytest.mark.parametrize("field", [
    {"temperature": "1"}, {"temperature": -1}, {"temperature": 999999}, {"temperature": True}, {"temperature": [1]}, {"top_p": -1}, {"top_p": 0}, {"top_p": 1.1},
    {"min_p": 2}, {"top_k": -1}, {"top_k": 1.5}, {"repeat_penalty": 0}, {"repeat_penalty": 1.1, "repetition_penalty": 1.2}, {"presence_penalty": 11},
    {"frequency_penalty": "x"}, {"seed": 1.5}, {"seed": "1"}, {"seed": True}, {"max_tokens": -2}, {"max_tokens": "5"}, {"max_tokens": 1.0}, {"max_tokens": True},
    {"max_tokens": 5, "max_completion_tokens": 6}, {"stop": ""}, {"stop": [""]}, {"stop": [1]}, {"stop": 5}, {"stop": ["x"] * 65}, {"n": 0}, {"n": -1}, {"n": 9}, {"n": 1.5},
    {"stream": "true"}, {"stream": 1}, {"stream_options": True}, {"stream_options": {"include_usage": 1}}, {"stream_options": {"what": True}},
    {"logit_bias": []}, {"logit_bias": {"a": 1}}, {"logit_bias": {"-1": 1}}, {"logit_bias": {"1": "x"}}, {"logit_bias": {"1": 101}}, {"logit_bias": {"99999": 1}},
    {"logit_bias": {"1.5": 1}}, {"logit_bias": {"\u0661": 1}}, {"logit_bias": {"9" * 400: 1}}, {"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21},
    {"logprobs": 1}, {"logprobs": True, "top_logprobs": -1}, {"priority": "high"}, {"priority": 1}, {"context_policy": "forget"}, {"response_format": "json"},
    {"response_format": {}}, {"response_format": {"type": "xml"}}, {"response_format": {"type": "json_schema"}}, {"response_format": {"type": "json_schema", "json_schema": {}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}}, {"response_format": {"type": "json_object"}, "grammar": "root ::= [a]"},
    {"tools": {}}, {"tools": ["x"]}, {"tools": [{}]}, {"tool_choice": "required"}, {"tool_choice": 5}, {"reasoning_effort": "huge"}, {"chat_template_kwargs": []},
    {"chat_template_kwargs": {"messages": []}}, {"chat_template_kwargs": {"enable_thinking": "no"}}, {"model": 5}, {"user": 5}, {"metadata": "x"},
])
def test_wrong_types_and_values_name_the_field(http: httpx.Client, field: dict) -> None:
    message = refused(http.post("/v1/chat/completions", json={"messages": USER, **field}), 400)
    names = [*field, *(str(name) for value in field.values() if isinstance(value, dict) for name in value), "repeat", "token"]
    assert any(name in message or name.split("_")[0] in message for name in names), message


@pytest.mark.parametrize("prompt", [..., None, 5, [], [[]], "", [5, "x"], ["x", 5], [[1], "x"], [1.5], [-1], [[-1]], [10**6], {}, [True], [[True]], ["a"] * 9, [""], [["x"]]])
def test_bad_prompts(http: httpx.Client, prompt: object) -> None:
    refused(http.post("/v1/completions", json={} if prompt is ... else {"prompt": prompt}), 400)


@pytest.mark.parametrize(("path", "body"), [
    ("/tokenize", {}), ("/tokenize", {"content": 5}), ("/tokenize", {"content": "a", "add_special": "yes"}), ("/detokenize", {}), ("/detokenize", {"tokens": "a"}),
    ("/detokenize", {"tokens": [-1]}), ("/detokenize", {"tokens": [10**9]}), ("/detokenize", {"tokens": [True]}),
])
def test_bad_texts_and_tokens(http: httpx.Client, path: str, body: dict) -> None:
    refused(http.post(path, json=body), 400)


def test_what_does_not_fit_is_refused_with_both_numbers(http: httpx.Client) -> None:
    message = refused(http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x" * 500}]}), 400, code="context_length_exceeded")
    assert "256" in message and "5" in message


# ---------------------------------------------------------------------------------------------------- what cannot be honoured


@pytest.mark.parametrize("field", [
    {"frobnicate": 1}, {"typical_p": 0.9}, {"mirostat": 2}, {"id_slot": 3}, {"cache_prompt": False}, {"lora": "nobody"}, {"reasoning_effort": "high"},
    {"functions": [{"name": "x"}]}, {"audio": {}}, {"x" * 100: 1},
])
def test_a_field_that_cannot_be_honoured_is_named(http: httpx.Client, lenient: httpx.Client, field: dict) -> None:
    name = next(iter(field))
    message = refused(http.post("/v1/chat/completions", json={"messages": USER, **field}), 400, code="unsupported_parameter", param=name if len(name) < 64 else "a field")
    assert len(message) < 300
    answer = lenient.post("/v1/chat/completions", json={"messages": USER, **field}).json()
    assert answer["choices"][0]["message"]["content"] == "ok" and len(answer["warnings"]) == 1
    streamed = lenient.post("/v1/chat/completions", json={"messages": USER, "stream": True, **field}).text
    assert json.loads(streamed.split("\n\n")[0].removeprefix("data: "))["warnings"] == answer["warnings"] and streamed.count("warnings") == 1


def test_warnings_are_bounded(lenient: httpx.Client) -> None:
    body = {"messages": USER, **{f"unknown_{number}": 1 for number in range(1000)}}
    assert len(lenient.post("/v1/chat/completions", json=body).json()["warnings"]) == 20


@pytest.mark.parametrize("field", [
    {"user": "me"}, {"metadata": {"a": "b"}}, {"store": True}, {"service_tier": "auto"}, {"typical_p": 1.0}, {"mirostat": 0}, {"id_slot": -1}, {"temperature": None},
    {"stop": None}, {"frobnicate": None}, {"cache_prompt": True}, {"stop": []}, {"tools": []}, {"logit_bias": {}}, {"seed": -1}, {"reasoning_effort": "none"},
    {"response_format": {"type": "text"}}, {"seed": 2**63 - 1}, {"top_k": 2**62}, {"max_tokens": 2**62}, {"model": ""}, {"model": None},
])
def test_fields_that_ask_for_nothing_special(http: httpx.Client, field: dict) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": USER, **field}).json()
    assert answer["choices"][0]["message"]["content"] == "ok" and "warnings" not in answer


# ------------------------------------------------------------------------------------------------------------------ classes


def test_the_openai_package_raises_its_own_classes(server: Server) -> None:
    client = openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="scripted", messages=USER, temperature=1000)
    assert "temperature" in bad.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=USER)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"


def test_a_full_queue_says_when_to_come_back() -> None:
    engine = Engine(ScriptedBackend(lambda tokens: ord("x"), n_ctx=100_000, max_slots=1), options=SchedulerOptions(max_waiting=1))
    with serving(engine) as server, httpx.Client(base_url=server.v1, timeout=60) as http:
        with http.stream("POST", "/chat/completions", json={"messages": USER, "stream": True}) as running:
            lines = running.iter_lines()                 # kept: httpx hangs up when it is dropped
            next(lines)
            response = http.post("/chat/completions", json={"messages": USER})
            refused(response, 429, code="engine_busy")
            assert int(response.headers["retry-after"]) >= 1
            with pytest.raises(openai.RateLimitError):
                openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0).chat.completions.create(model="scripted", messages=USER)
        assert server.metrics.refusals == [("scripted", "engine_busy")] * 2


def test_a_closed_engine() -> None:
    engine = Engine(ScriptedBackend())
    with serving(engine) as server:
        engine.close()
        response = httpx.post(server.v1 + "/chat/completions", json={"messages": USER})
        refused(response, 503, code="engine_closed")
        assert response.headers["retry-after"]


def broken(plan: object) -> None:
    raise BackendFailed("The backend met its end.")


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_has_a_status(stream: bool) -> None:
    with serving(Engine(ScriptedBackend(before_forward=broken))) as server:
        refused(httpx.post(server.v1 + "/chat/completions", json={"messages": USER, "stream": stream}), 500, code="backend_failed")
        health = httpx.get(server.url + "/health")
        assert health.status_code in (200, 503)


def test_a_failure_in_a_stream_is_its_last_event() -> None:
    steps = iter(range(3))

    def fails(plan: object) -> None:
        if next(steps, None) is None:
            raise BackendFailed("The backend met its end.")

    with serving(Engine(ScriptedBackend([b"a"] * 20, before_forward=fails))) as server:
        events = httpx.post(server.v1 + "/chat/completions", json={"messages": USER, "stream": True}).text.strip().split("\n\n")
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "backend_failed"
        assert all("error" not in event for event in events[:-1]) and "[DONE]" not in events
        client = openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)
        with pytest.raises(openai.APIError):
            list(client.chat.completions.create(model="scripted", messages=USER, stream=True))


def test_what_nobody_planned_says_nothing_of_itself(monkeypatch, caplog) -> None:
    engine = Engine(ScriptedBackend())
    monkeypatch.setattr(engine, "tokenize", lambda *_args, **_kwargs: 1 / 0)
    with serving(engine) as server:
        message = refused(httpx.post(server.url + "/tokenize", json={"content": "my secret"}), 500, code="internal_error")
        assert "zero" not in message and "secret" not in message
        assert "ZeroDivisionError" in caplog.text


def test_a_template_that_refuses(http: httpx.Client) -> None:
    template = "{{ raise_exception('Roles must alternate.') }}" + CHATML
    with serving(Engine(ScriptedBackend([b"k"], vocab=ByteVocab(chat_template=template)))) as server:
        message = refused(httpx.post(server.v1 + "/chat/completions", json={"messages": USER}), 400, code="chat_template_error")
        assert "Roles must alternate" in message
    with serving(Engine(ScriptedBackend([b"k"], vocab=ByteVocab(chat_template=None)))) as server:
        refused(httpx.post(server.v1 + "/chat/completions", json={"messages": USER}), 400, code="chat_template_error")
        assert httpx.post(server.v1 + "/completions", json={"prompt": "a"}).status_code == 200


# ---------------------------------------------------------------------------------------------------------------- anything

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(st.characters(codec="utf-8"), max_size=8)
    | st.sampled_from(["user", "text", "json_schema", "required", "none", "1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=5) | st.sampled_from(["type", "role", "content", "schema", "function"]), inner, max_size=3,
    ),
    max_leaves=8,
)


def bodies(kind: type, **valid: object) -> st.SearchStrategy[dict]:
    names = st.sampled_from([*kind.model_fields, "frobnicate"])
    return st.dictionaries(names, _VALUES, max_size=4).map(lambda fields: {**valid, **fields})


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(bodies(ChatBody, messages=USER, max_tokens=2))
@example({"messages": USER, "chat_template_kwargs": {"tools": 5}})
@example({"messages": USER, "tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": 5}}}], "tool_choice": "required"})
def test_no_chat_body_is_a_fault_of_the_server(http: httpx.Client, body: dict) -> None:
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code in (200, 400, 404), (response.status_code, response.text)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(bodies(CompletionBody, prompt="a", max_tokens=2))
def test_no_completion_body_is_a_fault_of_the_server(http: httpx.Client, body: dict) -> None:
    response = http.post("/v1/completions", json=body)
    assert response.status_code in (200, 400, 404), (response.status_code, response.text)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=40), st.sampled_from(["/v1/chat/completions", "/tokenize"]))
def test_no_bytes_are_a_fault_of_the_server(http: httpx.Client, data: bytes, path: str) -> None:
    refused(http.post(path, content=data, headers=JSON), 400)
