"""Calls of tools in every family's way of writing them: whole, streamed, cut short, and what only looks like one."""

from __future__ import annotations

import json

import pytest
from answers import FORMATS, answers, call, cut, parse, said
from hypothesis import given, settings, strategies as st

from edgeinfer.runtime.answer_parser import AnswerParser, ContentDelta, ToolCallDelta
from edgeinfer.runtime.tool_formats.json_span import JsonSpan

WRITTEN = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": ["x"]}}\n</tool_call>',
    "llama3": '{"name": "f", "parameters": {"a": 1, "b": ["x"]}}',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1, "b": ["x"]}}]',
    "mistral_named": '[TOOL_CALLS]f[ARGS]{"a": 1, "b": ["x"]}',
    "tool_calls_lines": '<tool_calls>\n{"name": "f", "arguments": {"a": 1, "b": ["x"]}}\n</tool_calls>',
    "tool_calls_list": '<tool_calls>[{"name": "f", "arguments": {"a": 1, "b": ["x"]}, "id": "1"}]</tool_calls>',
    "nemotron": '<TOOLCALL>[{"name": "f", "arguments": {"a": 1, "b": ["x"]}}]</TOOLCALL>',
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"a": 1, "b": ["x"]}}]',
    "json": '```json\n{"name": "f", "arguments": {"a": 1, "b": ["x"]}}\n```',
    "qwen_xml": '<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n["x"]\n</parameter>\n</function>\n</tool_call>',
    "seed_xml": '<seed:tool_call>\n<function=f>\n<parameter=a>1</parameter>\n<parameter=b>["x"]</parameter>\n</function>\n</seed:tool_call>',
    "gemma4": '<|tool_call>call:f{a:1,b:[<|"|>x<|"|>]}<tool_call|>',
    "function_gemma": "<start_function_call>call:f{a:1,b:[<escape>x<escape>]}<end_function_call>",
    "lfm2": '<|tool_call_start|>[f(a=1, b=["x"])]<|tool_call_end|>',
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "array"}}}}}
NAMES = sorted(FORMATS)
ALONE = ("llama3", "json")                              # a call without tags is one only where nothing else was said before


@pytest.mark.parametrize("name", NAMES)
def test_each_family_writes_a_call(name):
    for answer in (WRITTEN[name], "\n" + WRITTEN[name] + "\n"):
        whole = parse(answers(name), answer, tools=[TOOL])
        assert whole == [call(0, "f", '{"a": 1, "b": ["x"]}')]
        assert parse(answers(name), *answer, tools=[TOOL]) == whole


@pytest.mark.parametrize("name", NAMES)
def test_words_around_calls_and_calls_after_calls(name):
    text = WRITTEN[name]
    before = "" if name in ALONE else "Let me see.\n\n"
    deltas = parse(answers(name), f"{before}{text}\nDone.", tools=[TOOL])
    assert [delta for delta in deltas if isinstance(delta, ToolCallDelta)] == [call(0, "f", '{"a": 1, "b": ["x"]}')]
    assert said(deltas) == before.strip() + "Done."
    if name != "json":
        two = parse(answers(name), f"{text}\n{text}", tools=[TOOL])
        assert two == [call(index, "f", '{"a": 1, "b": ["x"]}') for index in (0, 1)]


@pytest.mark.parametrize("name", NAMES)
def test_without_tools_nothing_is_a_call(name):
    assert parse(answers(name), WRITTEN[name], tools=False) == [ContentDelta(WRITTEN[name])]


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_cut_anywhere_loses_nothing(name):
    text = WRITTEN[name]
    whole = parse(answers(name), text, tools=[TOOL])[0]
    for end in range(len(text)):
        deltas = parse(answers(name), *text[:end], tools=[TOOL])
        calls = [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
        assert deltas == parse(answers(name), text[:end], tools=[TOOL])
        if calls:
            # What came of the arguments stays; only XML has to guess a value's type before it is complete.
            assert calls[0].name == "f" and (whole.arguments.startswith(calls[0].arguments) or name.endswith("xml"))
            assert said(deltas) == ""
        else:
            assert said(deltas) == text[:end]


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"gemma4", "function_gemma", "lfm2", "tool_calls_list"}))
def test_arguments_stream(name):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"b": {"type": "string"}}}}}
    text = WRITTEN[name].replace('"a": 1, ', "").replace("<parameter=a>\n1\n</parameter>\n", "").replace("<parameter=a>1</parameter>\n", "")
    text = text.replace('["x"]', "Once upon a time" if name.endswith("xml") else '"Once upon a time"')
    parser = AnswerParser(answers(name), tools=[tool], reasoning=False)
    counts = [sum(isinstance(delta, ToolCallDelta) for delta in parser.push(character)) for character in text]
    parser.finish()
    assert sum(counts) > len("upon a time")             # a delta for nearly every character of the value
    assert sum(counts[: text.index("Once")]) >= 1       # the name first


# ---------------------------------------------------------------------------------------------------------- what is no call

FRAGMENTS = st.one_of(
    st.sampled_from(
        [tag for format in FORMATS.values() for tag in format.tags]
        + [
            "<function=", "</function>", "<parameter=", "</parameter>", "<function=f>", "<parameter=a>", "[", "]", "{", "}", '"', ":", ",", ";", "\\",
            '{"name": "f", "arguments": ', '{"name": "f"', '"parameters"', '{"a": 1}', "f", "null", "1", "call:f{", "f(a=1)", "```", "```json\n",
            "<tool", "_call>", "<", ">", "\n", " ", "\r\n", "<think>", "</think>", "<thi", "nk>", "é😀",
        ]
        + list(WRITTEN.values())
    ),
    st.text(max_size=6),
)
TEXTS = st.lists(FRAGMENTS, max_size=12).map("".join)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(NAMES), TEXTS, st.lists(st.integers(0, 10_000), max_size=12), st.booleans(), st.booleans())
def test_it_does_not_matter_how_the_text_was_divided(name, text, places, thinking, typed):
    tools = [TOOL] if typed else True
    whole = parse(answers(name), text, tools=tools, thinking=thinking)
    assert parse(answers(name), *cut(text, places), tools=tools, thinking=thinking) == whole
    assert parse(answers(name), *text, tools=tools, thinking=thinking) == whole


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(NAMES), TEXTS)
def test_a_text_without_a_call_passes_unchanged(name, text):
    deltas = parse(answers(name, reasoning=None), text)
    if not any(isinstance(delta, ToolCallDelta) for delta in deltas):
        assert said(deltas) == text


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(set(NAMES) - {"gemma4", "function_gemma", "lfm2", "qwen_xml", "seed_xml"})), TEXTS)
def test_all_that_comes_out_was_said_in_that_order(name, text):
    at = 0
    for delta in parse(answers(name, reasoning=None), text):
        pieces = (delta.text,) if isinstance(delta, ContentDelta) else (delta.name, delta.arguments)
        for piece in pieces:
            if piece == "{}" or (isinstance(delta, ToolCallDelta) and piece not in text):
                continue                                # arguments that were null or JSON within a string
            for character in piece:
                at = text.index(character, at) + 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>f()</tool_call>"), ("hermes", '<tool_call>{"title": 1}</tool_call>'), ("hermes", "a <tool_call"),
        ("llama3", '{"title": "x", "name": "f"}'), ("llama3", '{"name": "Ann", "age": 5}'), ("llama3", "<|python_tag|>print(1)"),
        ("json", '{"name": "Ann"}'), ("json", '["a", "b"]'), ("json", "[1] says so"), ("json", '```python\n{"name": "f", "arguments": {}}\n```'),
        ("json", 'Say {"name": "f", "arguments": {}}'), ("mistral", "[TOOL_CALLS] hello, you"), ("mistral_named", "[TOOL_CALLS]f[ARGS]x"),
        ("qwen_xml", "<tool_call>x</tool_call>"), ("qwen_xml", "<function=>"), ("gemma4", "<|tool_call>call:f{a:<tool_call|>"),
        ("lfm2", "<|tool_call_start|>[__import__('os').system('x')]<|tool_call_end|>"), ("lfm2", "<|tool_call_start|>[f(a=g())]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>x = 1<|tool_call_end|>"), ("gemma4", "<|tool_call>call:f{a:NaN}<tool_call|>"),
        ("lfm2", "<|tool_call_start|>[f(a=1e999)]<|tool_call_end|>"), ("hermes", '<tool_call>{"arguments": {"a": NaN}, "name": "f"}</tool_call>'),
        ("lfm2", "<|tool_call_start|>[f(a=" + "[" * 100_000 + ")]<|tool_call_end|>"),
        ("gemma4", "<|tool_call>call:f{a:" + "[" * 9_999 + "}<tool_call|>"),
    ],
)
def test_what_only_looks_like_a_call_is_content(name, text):
    assert parse(answers(name), *(text if len(text) < 999 else cut(text, [100, 50_000]))) == [ContentDelta(text)]


# --------------------------------------------------------------------------------------------------- how models really write


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', '{"a": 1}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', '{"a": 1}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "{}"),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "{}"),
        ("hermes", '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}</tool_call>', '{"a": 1}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>}"}}</tool_call>', '{"a": "</tool_call>}"}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>', '{"a": 1}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', '{"a": 1}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\"}"}}</tool_call>', '{"a": "\\"}"}'),
        ("llama3", '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]', '{"a": 1}'),
        ("mistral_named", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', '{"a": 1}'),
        ("mistral_named", '[TOOL_CALLS]f{"a": 1}', '{"a": 1}'),
        ("mistral_named", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', '{"a": 1}'),
        ("json", '[{"name": "f", "arguments": {"a": 1}}]', '{"a": 1}'),
        ("json", '```tool_code\n{"name": "f", "parameters": {"a": 1}}```', '{"a": 1}'),
        ("qwen_xml", "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", '{"a": 1}'),
        ("qwen_xml", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>", '{"a": 1}'),
        ("qwen_xml", "<tool_call>\n<function=f>\n<parameter=a>\nmany\n</parameter>\n</function>\n</tool_call>", '{"a": "many"}'),
        ("qwen_xml", '<tool_call>\n<function=f>\n<parameter=c>\n\n "x"\n\n</parameter>\n</function>\n</tool_call>', '{"c": "\\n \\"x\\"\\n"}'),
        ("qwen_xml", "<tool_call>\n<function=f>\n</function>\n</tool_call>", "{}"),
        ("qwen_xml", "<function=f>\n<parameter=a>\n-Infinity\n</parameter>\n</function>", '{"a": "-Infinity"}'),
        ("gemma4", '<|tool_call>call:f{a:{<|"|>k<|"|>:true,n:null},b:[],c:-1.5}<tool_call|>', '{"a": {"k": true, "n": null}, "b": [], "c": -1.5}'),
        ("lfm2", "<|tool_call_start|>[f(a='x', b=True, c=None)]<|tool_call_end|>", '{"a": "x", "b": true, "c": null}'),
    ],
)
def test_variants(name, text, arguments):
    assert parse(answers(name), *text, tools=[TOOL]) == [call(0, "f", arguments)] == parse(answers(name), text, tools=[TOOL])


def test_several_calls_in_one_section():
    one, two = '{"name": "f", "arguments": {}}', '{"name": "g", "arguments": {"x": [1, 2]}}'
    expected = [call(0, "f", "{}"), call(1, "g", '{"x": [1, 2]}')]
    assert parse(answers("mistral"), f"[TOOL_CALLS] [{one}, {two}]") == expected
    assert parse(answers("llama3"), f"{one}; {two}") == expected
    assert parse(answers("json"), f"{one}\n{two}") == expected
    assert parse(answers("tool_calls_lines"), f"<tool_calls>\n{one}\n{two}\n</tool_calls>") == expected
    assert parse(answers("lfm2"), "<|tool_call_start|>[f(), g(x=[1, 2])]<|tool_call_end|>") == expected
    assert parse(answers("mistral_named"), '[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{"x": [1, 2]}') == expected


def test_what_follows_broken_syntax_is_not_lost():
    assert said(parse(answers("hermes"), '<tool_call>{"name": "f", "arguments": {}} and so on</tool_call>')) == "and so on</tool_call>"
    assert said(parse(answers("hermes"), '<tool_call>{"name": "f", "arguments": {}, oops}</tool_call>!')) == ", oops}</tool_call>!"
    assert said(parse(answers("mistral"), '[TOOL_CALLS] [{"name": "f", "arguments": {}}]\n[1] is a source.')) == "[1] is a source."
    assert said(parse(answers("qwen_xml"), "<tool_call>\n<function=f>\nhm\n</function>\n</tool_call>")) == "hm"


def test_ids_are_new_and_as_mistral_wants_them():
    for name, length in (("hermes", 29), ("mistral", 9), ("mistral_named", 9)):
        parser = AnswerParser(answers(name), tools=True, reasoning=False)
        ids = [delta.id for delta in [*parser.push(WRITTEN[name] * 5), *parser.finish()] if isinstance(delta, ToolCallDelta) and delta.id]
        assert len(set(ids)) == 5 == parser.calls and {len(id) for id in ids} == {length}
        assert name == "hermes" or all(id.isalnum() for id in ids)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)


@settings(max_examples=200, deadline=None)
@given(JSON, st.sampled_from([",x", "}", "] ", "\n"]), st.lists(st.integers(0, 1000), max_size=5), st.sampled_from([None, 1]))
def test_where_json_ends(value, rest, places, indent):
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    span, seen = JsonSpan(), 0
    for piece in cut(text + rest, places):
        end = span.feed(piece)
        if end is not None:
            assert seen + end == len(text)
            return
        seen += len(piece)
    raise AssertionError("the end was missed")


@pytest.mark.parametrize("name", NAMES)
def test_it_is_known_when_a_call_has_ended(name):
    parser = AnswerParser(answers(name), tools=[TOOL], reasoning=False)
    before = "" if name in ALONE else "Hm. "
    ends = []
    for character in f"{before}{WRITTEN[name]}":
        parser.push(character)
        ends.append(parser.call_ended)
    first = ends.index(True)
    assert all(ends[first:]) and parser.calls == 1
    whole = parse(answers(name), f"{before}{WRITTEN[name]}"[: first + 1], tools=[TOOL])
    assert whole[-1] == call(0, "f", '{"a": 1, "b": ["x"]}')    # nothing of it is missing where the answer ends there


def test_a_closing_tag_within_a_string_closes_nothing():
    text = '<|tool_call>call:f{a:<|"|>see <tool_call|>}<|"|>}<tool_call|>!'
    assert parse(answers("gemma4"), *text) == [call(0, "f", '{"a": "see <tool_call|>}"}'), ContentDelta("!")] == parse(answers("gemma4"), text)
