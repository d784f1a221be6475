"""What a model's answers look like, told from its template, and thinking split from what is said."""

from __future__ import annotations

import pytest
from answers import THINK, answers, call, cut, parse, said, thought
from chat_templates import CHATML, GEMMA, LLAMA3, MISTRAL, QWEN3
from hypothesis import given, settings, strategies as st

from edgeinfer.errors import BadRequest, UnsupportedParameter
from edgeinfer.models.chat_template import ChatTemplate
from edgeinfer.runtime.answer_format import AnswerFormat, detect_format, opens_thinking, template_kwargs_for, thinking_at_start
from edgeinfer.runtime.answer_parser import ContentDelta, ReasoningDelta
from edgeinfer.runtime.tool_formats.table import GENERIC, HERMES

# ------------------------------------------------------------------------------------------------------------------ templates

TOOLS = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ messages[0].tool_calls }}"
SAYS = {
    "hermes": "<tool_call>\\n{\"name\": \"",
    "mistral": "[TOOL_CALLS][",
    "mistral_named": "[TOOL_CALLS]' + name + '[ARGS]",
    "qwen_xml": "<tool_call>\\n<function=' + name + '>\\n<parameter=",
    "seed_xml": "<seed:tool_call>\\n<function=' + name + '>\\n<parameter=",
    "tool_calls_list": "<tool_calls>[",
    "tool_calls_lines": "<tool_calls>\\n",
    "nemotron": "<TOOLCALL>[",
    "granite": "<|tool_call|>[",
    "gemma4": "<|tool_call>call:",
    "function_gemma": "<start_function_call>call:",
    "lfm2": "<|tool_call_start|>[",
    "json": "<function_calls>",
}


@pytest.mark.parametrize("name", sorted(SAYS))
def test_a_family_is_known_by_what_its_template_writes(name):
    source = TOOLS + "{{ '" + SAYS[name].replace("'", "\\'") + "' }}"
    format = detect_format(source)
    assert format.tools.name == name and format.renders_tools == (name != "json")
    # A template that shows the model no tools, or not what was called, has no place for them, whatever it mentions.
    for missing in ("tools", "tool_calls"):
        assert detect_format(source.replace(f"{missing} ", "things ").replace(f".{missing}", "")) == AnswerFormat(
            GENERIC, renders_tools=False, reasoning=None
        )


def test_real_templates():
    assert detect_format(LLAMA3).tools.name == "llama3" and detect_format(LLAMA3).renders_tools
    for source in (CHATML, GEMMA, MISTRAL, None, ""):
        assert detect_format(source) == AnswerFormat(GENERIC, renders_tools=False, reasoning=None)
    qwen = detect_format(QWEN3 + TOOLS)
    assert qwen == AnswerFormat(HERMES, renders_tools=True, reasoning=THINK, switches=frozenset({"enable_thinking"}))


@pytest.mark.parametrize(
    ("source", "switches"),
    [
        ("{% if enable_thinking is defined %}x{% endif %}", {"enable_thinking"}),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}", {"thinking"}),
        ("{{ message.thinking }}{{ 'thinking' }}thinking", set()),
        ("{# enable_thinking #}{{ '{{ thinking }}' }}", set()),
        ("{{- 'Reasoning: ' + reasoning_effort }}", {"reasoning_effort"}),
        ('{{ x["thinking"] }}{{ "it\'s" }}{{ thinking_budget }}', {"thinking_budget"}),
    ],
)
def test_switches_are_variables_of_the_template(source, switches):
    assert detect_format(source).switches == switches


def format_with(*switches: str, reasoning: tuple[str, str] | None = THINK) -> AnswerFormat:
    return AnswerFormat(GENERIC, renders_tools=False, reasoning=reasoning, switches=frozenset(switches))


@pytest.mark.parametrize(
    ("format", "effort", "on", "expected"),
    [
        (format_with("enable_thinking"), None, None, {}),
        (format_with("enable_thinking"), None, False, {"enable_thinking": False}),
        (format_with("enable_thinking"), "none", None, {"enable_thinking": False}),
        (format_with("enable_thinking"), "low", None, {"enable_thinking": True}),
        (format_with("thinking"), "high", True, {"thinking": True}),
        (format_with("thinking_budget"), None, False, {"thinking_budget": 0}),
        (format_with("reasoning_effort", reasoning=None), "high", None, {"reasoning_effort": "high"}),
        (format_with("reasoning_effort", reasoning=None), "none", None, {"reasoning_effort": "none"}),
        (format_with("reasoning_effort", "thinking"), "high", None, {"reasoning_effort": "high", "thinking": True}),
        (format_with("reasoning_effort", "thinking"), "none", None, {"thinking": False}),
        (format_with(reasoning=None), "none", None, {}),
        (format_with(reasoning=None), None, False, {}),
        (format_with(), "medium", None, {}),
    ],
)
def test_what_is_asked_of_thinking(format, effort, on, expected):
    assert template_kwargs_for(format, effort, on) == expected


@pytest.mark.parametrize(
    ("format", "effort", "on", "words"),
    [
        (format_with(reasoning=None), None, True, "does not think.*leave enable_thinking out"),
        (format_with(reasoning=None), "high", None, "does not think.*leave reasoning_effort out"),
        (format_with(), "none", None, "thinks before every answer.*leave reasoning_effort out"),
        (format_with(), None, False, "thinks before every answer"),
    ],
)
def test_what_a_template_has_no_switch_for_is_refused(format, effort, on, words):
    with pytest.raises(UnsupportedParameter, match=words):
        template_kwargs_for(format, effort, on)


def test_what_means_nothing_is_refused():
    format = format_with("enable_thinking")
    for effort, on, words in (("huge", None, "one of none, minimal"), (None, "yes", "true or false"), ("none", True, "contradicts")):
        with pytest.raises(BadRequest, match=words):
            template_kwargs_for(format, effort, on)


def test_where_an_answer_begins():
    format = detect_format(QWEN3)
    template = ChatTemplate(QWEN3)
    user = {"role": "user", "content": "What does <think> mean? <think>"}
    assert thinking_at_start(format, template.render([user])) == "free"
    assert thinking_at_start(format, template.render([user], enable_thinking=False)) == "closed"
    assert thinking_at_start(format, template.render([user]) + "<think>\n") == "open" and opens_thinking(format, "<think>\n")
    assert not opens_thinking(format, template.render([user])) and not opens_thinking(detect_format(CHATML), "<think>")


# ------------------------------------------------------------------------------------------------------------------- thinking


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nHello", False, "hm", "Hello"),
        ("\n <think>hm</think>Hello ", False, "hm", "Hello "),
        ("hm\n</think>\n\nHello", True, "hm", "Hello"),
        ("<think>\nhm\n</think>Hello", True, "hm", "Hello"),        # again what the prompt had already
        ("<think>\n\n</think>\n\nHello", False, "", "Hello"),
        ("</think>Hello", True, "", "Hello"),
        ("<think>hm", False, "hm", ""),
        ("hm </thi", True, "hm </thi", ""),
        ("hm \n", True, "hm \n", ""),
        ("<thi", False, "", "<thi"),
        ("Hello <think>hm</think>", False, "", "Hello <think>hm</think>"),
        ("<thinking>hm", False, "", "<thinking>hm"),
        ("<think>a <think> b</think>c</think>d", False, "a <think> b", "c</think>d"),
        ("\n\n", False, "", "\n\n"),
        ("<think>\n", False, "", ""),
    ],
)
def test_thinking_is_split_off(text, thinking, reasoning, content):
    for pieces in ((text,), tuple(text)):
        deltas = parse(answers("hermes"), *pieces, tools=False, thinking=thinking)
        assert (thought(deltas), said(deltas)) == (reasoning, content)


def test_thinking_stays_content_where_nobody_wants_it_split():
    text = "<think>\nhm\n</think>\n\nHello"
    assert parse(answers("hermes"), *text, tools=False, reasoning=False) == [ContentDelta(text)]
    assert parse(answers("hermes", reasoning=None), *text, tools=False) == [ContentDelta(text)]


def test_thinking_then_words_then_a_call():
    text = '<think>\nI need <tool_call>.\n</think>\n\nLet me look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    expected = [ReasoningDelta("I need <tool_call>."), ContentDelta("Let me look."), call(0, "f", '{"a": 1}')]
    assert parse(answers("hermes"), *text) == expected == parse(answers("hermes"), text)


@pytest.mark.parametrize("tags", [("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>"), ("◁think▷", "◁/think▷")])
def test_tags_of_other_families(tags):
    text = f"{tags[0]}\nhm\n{tags[1]}Hello"
    assert parse(answers("hermes", reasoning=tags), *text) == [ReasoningDelta("hm"), ContentDelta("Hello")]


def test_only_what_may_be_a_tag_is_held_back():
    from edgeinfer.runtime.answer_parser import AnswerParser

    parser = AnswerParser(answers("hermes"), tools=True, reasoning=True, thinking=True)
    assert parser.push("hm <") == [ReasoningDelta("hm")]
    assert parser.push("b> ") == [ReasoningDelta(" <b>")]
    assert parser.push("</think>") == []
    assert parser.push("\n\nHi <tool") == [ContentDelta("Hi")]
    assert parser.push("box>") == [ContentDelta(" <toolbox>")]
    assert parser.finish() == []


PLAIN = st.text(st.characters(exclude_characters="<[{`"), max_size=40)


@settings(max_examples=200, deadline=None)
@given(PLAIN, st.lists(st.integers(0, 100), max_size=5), st.booleans())
def test_plain_text_passes_as_it_is(text, places, tools):
    for name in ("hermes", "json", "llama3", "mistral_named", "qwen_xml", "gemma4"):
        assert said(parse(answers(name), *cut(text, places), tools=tools)) == text


@settings(max_examples=200, deadline=None)
@given(PLAIN.map(str.strip), PLAIN.map(str.strip), st.lists(st.integers(0, 100), max_size=5), st.sampled_from(["", "\n", "\n\n", " "]))
def test_thinking_and_answer_come_out_whole(reasoning, content, places, space):
    text = f"<think>{space}{reasoning}{space}</think>{space}{content}"
    deltas = parse(answers("hermes"), *cut(text, places))
    assert (thought(deltas), said(deltas)) == (reasoning, content)
