"""Tools and thinking over HTTP, with the openai package as the client and scripted answers."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from answers import TagVocab
from chat_templates import QWEN3
from server_process import serving

import edgeinfer
from edgeinfer.runtime.backends.fake import CHATML, ByteVocab, ScriptedBackend
from edgeinfer.runtime.service import Engine

# Shows tools, and what was called and answered before.
TEMPLATE = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}" + QWEN3
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather", "description": "The weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "time"}},
]
USER = [{"role": "user", "content": "What is the weather?"}]


class Script(ScriptedBackend):
    """Says ``text`` byte by byte and remembers the prompt."""

    def __init__(self, text: str, template: str = TEMPLATE, extra: tuple[bytes, ...] = ()):
        super().__init__([bytes([byte]) for byte in text.encode()], n_ctx=4096, vocab=ByteVocab(extra, chat_template=template))

    @property
    def prompt(self) -> str:
        return bytes(token for plan in self.plans for chunk in plan.prefills for token in chunk.tokens if token < 256).decode()


class Client:
    """The same request whole and streamed: what the package makes of both must be equal."""

    def __init__(self, url: str):
        self._client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)

    def ask(self, messages=USER, **fields):
        whole = self._client.chat.completions.create(model="scripted", messages=messages, **fields)
        chunks = list(self._client.chat.completions.create(model="scripted", messages=messages, stream=True, **fields))
        one, deltas = whole.choices[0], [chunk.choices[0].delta for chunk in chunks]
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [one.finish_reason]
        assert "".join(delta.content or "" for delta in deltas) == (one.message.content or "")
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == (getattr(one.message, "reasoning_content", None) or "")
        calls: list[list[str]] = []
        for delta in deltas:
            for part in delta.tool_calls or ():
                if part.id:
                    assert part.index == len(calls) and part.type == "function"
                    calls.append([part.function.name, part.function.arguments])
                else:
                    calls[part.index][1] += part.function.arguments
        assert calls == [[call.function.name, call.function.arguments] for call in one.message.tool_calls or ()]
        return one, chunks


def ask(text: str, messages=USER, template: str = TEMPLATE, **fields):
    backend = Script(text, template)
    with serving(Engine(backend)) as server:
        choice, chunks = Client(server.v1).ask(messages, **fields)
    return choice, chunks, backend


def test_a_call_whole_and_streamed() -> None:
    choice, chunks, backend = ask(CALL, tools=TOOLS)
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather") and json.loads(call.function.arguments) == {"city": "Paris", "days": 3}
    deltas = [chunk.choices[0].delta.tool_calls for chunk in chunks if chunk.choices[0].delta.tool_calls]
    assert deltas[0][0].id and deltas[0][0].function.name == "weather" and len(deltas) > 20
    assert all(delta[0].id is None and delta[0].index == 0 for delta in deltas[1:])
    assert "The weather." in backend.prompt


def test_calls_in_parallel_after_words_and_thinking() -> None:
    choice, _, _ = ask(f"<think>\nBoth.\n</think>\n\nLet me see.\n{CALL}\n" + CALL.replace("Paris", "Rome"), tools=TOOLS)
    assert choice.message.reasoning_content == "Both." and choice.message.content == "Let me see."
    assert [json.loads(call.function.arguments)["city"] for call in choice.message.tool_calls] == ["Paris", "Rome"]
    assert len({call.id for call in choice.message.tool_calls}) == 2 and choice.finish_reason == "tool_calls"


def test_a_call_cut_short_ends_for_its_length() -> None:
    choice, _, _ = ask(CALL, tools=TOOLS, max_tokens=60)
    assert choice.finish_reason == "length" and choice.message.tool_calls[0].function.arguments == '{"city": "Paris'
    choice, _, _ = ask(CALL, tools=TOOLS, max_tokens=20)
    assert choice.finish_reason == "length" and choice.message.content == CALL[:20] and choice.message.tool_calls is None


def test_without_tools_or_with_none_a_call_is_text() -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice, _, backend = ask(CALL, **fields)
        assert choice.message.content == CALL and choice.finish_reason == "stop" and "The weather." not in backend.prompt


def test_results_go_back() -> None:
    asked = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    chat = [*USER, {"role": "assistant", "content": None, "tool_calls": [asked]}, {"role": "tool", "tool_call_id": "call_1", "content": "Rain."}]
    choice, _, backend = ask("It rains.", chat, tools=TOOLS)
    assert choice.message.content == "It rains." and choice.finish_reason == "stop"
    assert '{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>' in backend.prompt and "<tool_response>\nRain." in backend.prompt


def test_a_model_without_tools_is_told_in_words() -> None:
    asked = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    chat = [*USER, {"role": "assistant", "content": None, "tool_calls": [asked]}, {"role": "tool", "tool_call_id": "call_1", "content": "Rain."}]
    choice, _, backend = ask('{"name": "weather", "arguments": {"city": "Paris"}}', chat, CHATML, tools=TOOLS)
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Paris"}'
    assert "The weather." in backend.prompt and "Result of weather: Rain." in backend.prompt
    choice, _, _ = ask('{"title": "weather"}', chat, CHATML, tools=TOOLS)
    assert choice.message.content == '{"title": "weather"}' and choice.message.tool_calls is None


def test_thinking_apart_or_not() -> None:
    text = "<think>\nhm\n</think>\n\nHello"
    choice, _, _ = ask(text)
    assert (choice.message.reasoning_content, choice.message.content) == ("hm", "Hello")
    choice, _, _ = ask(text, extra_body={"reasoning_format": "none"})
    assert choice.message.content == text
    choice, _, backend = ask("Hello", reasoning_effort="none")
    assert choice.message.content == "Hello" and "assistant\n<think>\n\n</think>\n\n" in backend.prompt


def test_a_prompt_that_opens_the_thinking() -> None:
    choice, _, _ = ask("hm\n</think>\n\nHello", template=CHATML.replace("assistant\n{%", "assistant\n<think>\n{%"))
    assert (choice.message.reasoning_content, choice.message.content) == ("hm", "Hello")


def test_usage_counts_thinking() -> None:
    with serving(Engine(Script("<think>\nabc\n</think>\n\nHello"))) as server:
        client = openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)
        usage = client.chat.completions.create(model="scripted", messages=USER).usage
        assert usage.completion_tokens_details.reasoning_tokens == 3


def test_control_tokens_that_open_a_call_are_seen() -> None:
    template = (
        "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '[TOOL_CALLS][' }}"
        "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    )
    tag = "[TOOL_CALLS]"
    script = [tag.encode(), *(bytes([byte]) for byte in b'[{"name": "time", "arguments": {}}]')]
    with serving(Engine(ScriptedBackend(script, n_ctx=4096, vocab=TagVocab([tag], chat_template=template)))) as server:
        choice, _ = Client(server.v1).ask(tools=TOOLS)
        assert choice.message.tool_calls[0].function.name == "time" and len(choice.message.tool_calls[0].id) == 9


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [TOOLS[0], {"type": "function", "function": {"name": "a b"}}]}, "tools", "tools[1].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice", "nobody"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "must be"),
        ({"thinking_budget": -2}, "thinking_budget", "from 0"),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "enable_thinking", "true or false"),
    ],
)
def test_what_is_wrong_is_named(fields, param, words) -> None:
    with serving(Engine(Script("x"))) as server:
        client = openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="scripted", messages=USER, extra_body=fields)
        assert refused.value.param == param and words in refused.value.message


def test_a_switch_that_the_model_lacks_is_refused_or_named_in_a_warning() -> None:
    for lenient in (False, True):
        with serving(Engine(Script("Hello", CHATML)), lenient=lenient) as server:
            client = openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)
            if lenient:
                answer = client.chat.completions.create(model="scripted", messages=USER, reasoning_effort="high")
                assert answer.choices[0].message.content == "Hello" and "reasoning_effort" in answer.warnings[0]
            else:
                with pytest.raises(openai.BadRequestError) as refused:
                    client.chat.completions.create(model="scripted", messages=USER, reasoning_effort="high")
                assert (refused.value.param, refused.value.code) == ("reasoning_effort", "unsupported_parameter")


def test_a_budget_ends_the_thinking() -> None:
    """The script would think for ever."""
    for budget, thoughts in ((0, ""), (5, "z" * 5)):
        backend = ScriptedBackend(lambda tokens: ord("z"), n_ctx=512, vocab=ByteVocab(chat_template=TEMPLATE + "<think>"))
        with serving(Engine(backend)) as server:
            fields = {"thinking_budget": budget, "temperature": 0}
            answer = openai.OpenAI(base_url=server.v1, api_key="none").chat.completions.create(
                model="scripted", messages=USER, max_tokens=budget + 8 + 3, extra_body=fields
            )
            message = answer.choices[0].message
            assert (getattr(message, "reasoning_content", ""), message.content) == (thoughts, "zzz")


def test_a_call_is_demanded_after_a_budget_of_thinking() -> None:
    backend = ScriptedBackend(lambda tokens: ord("z"), n_ctx=512, vocab=ByteVocab(chat_template=TEMPLATE + "<think>"))
    with serving(Engine(backend)) as server:
        choice, _ = Client(server.v1).ask(
            tools=TOOLS, tool_choice={"type": "function", "function": {"name": "time"}}, temperature=0, extra_body={"thinking_budget": 3}
        )
        assert choice.message.reasoning_content == "zzz" and choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("time", "{}")


def test_a_schema_binds_what_follows_the_thinking() -> None:
    backend = ScriptedBackend(lambda tokens: ord("z"), n_ctx=512, vocab=ByteVocab(chat_template=TEMPLATE + "<think>"))
    schema = {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"], "additionalProperties": False}
    with serving(Engine(backend)) as server:
        choice, _ = Client(server.v1).ask(
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, temperature=0, extra_body={"thinking_budget": 3}
        )
        assert choice.message.reasoning_content == "zzz" and json.loads(choice.message.content) == {"ok": True}


def test_a_schema_of_a_function_that_no_grammar_follows_is_named() -> None:
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"properties": {"a": {"type": "string", "pattern": "(?=x)"}}}}}
    with serving(Engine(Script("x"))) as server:
        client = openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="scripted", messages=USER, tools=[TOOLS[0], bad], tool_choice="required")
        assert refused.value.param == "tools" and "tools[1].function.parameters" in refused.value.message


@pytest.mark.parametrize("wish", ["{", "<"])
def test_an_answer_fits_the_format_or_calls(wish) -> None:
    """The model wants one character; where it may not have it, it says the least that may follow."""
    schema = {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"], "additionalProperties": False}
    backend = ScriptedBackend(lambda tokens: ord(wish), n_ctx=1024, vocab=ByteVocab(chat_template=TEMPLATE + "<think></think>"))
    with serving(Engine(backend)) as server:
        choice, _ = Client(server.v1).ask(
            tools=TOOLS[1:], response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, temperature=0,
            parallel_tool_calls=False,
        )
    if wish == "{":
        assert json.loads(choice.message.content) == {"ok": True} and choice.message.tool_calls is None
    else:
        assert choice.message.tool_calls[0].function.name == "time" and choice.message.content is None


def test_every_token_has_its_log_probability_whatever_it_turned_out_to_be() -> None:
    text = f"<think>\nhm\n</think>\n\nSo.\n{CALL}"
    with serving(Engine(Script(text))) as server:
        choice, chunks = Client(server.v1).ask(tools=TOOLS, logprobs=True)
        whole = [entry.token for entry in choice.logprobs.content]
        streamed = [entry.token for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
        assert "".join(whole[: len(text)]) == text and streamed == whole


def test_async_streaming() -> None:
    async def run(url: str) -> tuple[str, str]:
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        stream = await client.chat.completions.create(model="scripted", messages=USER, tools=TOOLS, stream=True)
        name, arguments = "", ""
        async for chunk in stream:
            for part in chunk.choices[0].delta.tool_calls or ():
                name += part.function.name or ""
                arguments += part.function.arguments or ""
        return name, arguments

    with serving(Engine(Script(CALL))) as server:
        assert asyncio.run(run(server.v1)) == ("weather", '{"city": "Paris", "days": 3}')


def test_a_real_model_calls_when_it_must_and_answers_with_the_result(smollm2_gguf) -> None:
    weather = {"type": "object", "properties": {"city": {"enum": ["Paris", "Zürich"]}}, "required": ["city"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "weather", "description": "The weather of a city.", "parameters": weather}}]
    with serving(edgeinfer.load(str(smollm2_gguf), ctx_size=1024, parallel=2)) as server:
        client = Client(server.v1)
        choice, _ = client.ask(tools=tools, tool_choice="required", parallel_tool_calls=False, temperature=0)
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and call.function.name == "weather"
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Zürich")
        chat = [*USER, choice.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "Rain."}]
        choice, _ = client.ask(chat, tools=tools, temperature=0, max_tokens=8)
        assert choice.message.content or choice.message.tool_calls


@pytest.mark.parametrize("template", [TEMPLATE, CHATML])
def test_one_call_where_calls_may_not_be_parallel(template) -> None:
    single = CALL if template is TEMPLATE else '{"name": "weather", "arguments": {"city": "Paris", "days": 3}}'
    text = f"{single}\n{single}" if template is CHATML else f"<think>\n{CALL}\n</think>\n\nOne.\n{single}\n{single}"
    for parallel, count in ((False, 1), (True, 2), (None, 2)):
        fields = {} if parallel is None else {"parallel_tool_calls": parallel}
        choice, _, _ = ask(text, template=template, tools=TOOLS, **fields)
        assert len(choice.message.tool_calls) == count and choice.finish_reason == "tool_calls"
        assert all(json.loads(call.function.arguments)["days"] == 3 for call in choice.message.tool_calls)
