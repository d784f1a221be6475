"""Definitions of tools and the choice among them, and tools told in words to models that know none."""

from __future__ import annotations

import json

import pytest
from chat_templates import GEMMA, MISTRAL, QWEN3, SYSTEM, USER

from edgeinfer.errors import BadRequest
from edgeinfer.models.chat_template import ChatTemplate
from edgeinfer.runtime.tool_prompt import told_in_words
from edgeinfer.runtime.tools import chosen, parameters_of, validate_tools


def tool(name: str, **function) -> dict:
    return {"type": "function", "function": {"name": name, **function}}


GOOD = tool("f", description="Does it.", parameters={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


def test_good_definitions_pass_unchanged():
    tools = [GOOD, tool("g"), tool("a.b-c_d", parameters={}), tool("h", parameters=None, strict=True)]
    assert validate_tools(tools) == tuple(tools)
    assert validate_tools(None) == validate_tools([]) == ()
    assert parameters_of(GOOD) is GOOD["function"]["parameters"]
    assert parameters_of(tool("g"))["additionalProperties"] is False


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("f", r"tools\[1\] must be an object, not str"),
        ({"function": {"name": "f"}}, r"tools\[1\]\.type"),
        ({"type": "web_search"}, r"tools\[1\]\.type.*'web_search'"),
        ({"type": "function"}, r"tools\[1\]\.function must be"),
        (tool(""), r"tools\[1\]\.function\.name"),
        (tool("a b"), r"tools\[1\]\.function\.name.*'a b'"),
        (tool("x" * 129), r"tools\[1\]\.function\.name"),
        (tool('f", "arguments": {}}'), r"tools\[1\]\.function\.name"),
        (tool(5), r"tools\[1\]\.function\.name.*5"),
        (tool("f"), r"tools\[1\]\.function\.name 'f' names an earlier"),
        (tool("g", description=5), r"tools\[1\]\.function\.description"),
        (tool("g", parameters=[]), r"tools\[1\]\.function\.parameters must be"),
        (tool("g", parameters={"type": "string"}), r"tools\[1\]\.function\.parameters\.type"),
        (tool("g", parameters={"properties": []}), r"tools\[1\]\.function\.parameters\.properties must"),
        (tool("g", parameters={"properties": {"a": "int"}}), r"tools\[1\]\.function\.parameters\.properties\.a must"),
        (tool("g", parameters={"required": "a"}), r"tools\[1\]\.function\.parameters\.required"),
        (tool("g", parameters={"required": [1]}), r"tools\[1\]\.function\.parameters\.required"),
    ],
)
def test_a_bad_definition_is_named_by_its_place(bad, words):
    with pytest.raises(BadRequest, match=words):
        validate_tools([GOOD, bad])


@pytest.mark.parametrize("tools", ["f", 5, {"type": "function"}, [GOOD] * 257])
def test_tools_are_a_list_of_bounded_length(tools):
    with pytest.raises(BadRequest, match="tools "):
        validate_tools(tools)


def test_choices():
    tools = (GOOD, tool("g"))
    named = {"type": "function", "function": {"name": "g"}}
    assert chosen((), None).mode == chosen((), "auto").mode == chosen(tools, "none").mode == chosen((), "none").mode == "none"
    assert (chosen(tools, None).mode, chosen(tools, None).tools) == ("auto", tools) == (chosen(tools, "auto").mode, tools)
    assert chosen(tools, "required").tools == tools and not chosen(tools, "required").single
    assert chosen(tools, named).mode == "required" and chosen(tools, named).tools == tools[1:] and chosen(tools, named).single
    allowed = chosen(tools, {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}})
    assert (allowed.mode, allowed.tools) == ("auto", tools[1:])


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("sometimes", "tool_choice must be"), (5, "tool_choice must be"), ([], "tool_choice must be"), ({"type": "x"}, "tool_choice must be"),
        ({"type": "function"}, "tool_choice must name"), ({"type": "function", "function": {"name": "nobody"}}, "'nobody', which is not among"),
        ({"type": "allowed_tools"}, "allowed_tools must have"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "must have"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [5]}}, r"allowed_tools\.tools\[0\] must name"),
    ],
)
def test_choices_that_mean_nothing(choice, words):
    with pytest.raises(BadRequest, match=words):
        chosen([GOOD], choice)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_nothing_can_be_demanded_without_tools(choice):
    with pytest.raises(BadRequest, match="no tools"):
        chosen([], choice)


# ----------------------------------------------------------------------------------------------------------- told in words

CALLS = [
    {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
    {"id": "2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
]
RESULTS = [
    {"role": "tool", "tool_call_id": "1", "content": "one"},
    {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "two"}]},
]


def test_definitions_join_the_system_turn():
    told = told_in_words([SYSTEM, USER], [GOOD])
    assert [message["role"] for message in told] == ["system", "user"] and told[1] == USER
    assert told[0]["content"].startswith("Be brief.\n\n") and json.dumps(GOOD["function"]) in told[0]["content"]
    assert [message["role"] for message in told_in_words([USER], [GOOD])] == ["system", "user"]
    assert told_in_words([SYSTEM, USER], []) == [SYSTEM, USER]


@pytest.mark.parametrize("content", [None, "", "Let me see."])
def test_calls_and_results_become_turns(content):
    chat = [USER, {"role": "assistant", "content": content, "tool_calls": CALLS}, *RESULTS]
    said = [*([content] if content else []), '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "arguments": {}}']
    expected = [
        USER, {"role": "assistant", "content": "\n".join(said)}, {"role": "user", "content": "Result of f: one\n\nResult of g: two"},
    ]
    assert told_in_words(chat, []) == expected
    assert told_in_words([*chat, {"role": "user", "content": "And?"}], [])[-1]["content"].endswith("Result of g: two\n\nAnd?")
    assert chat[1]["tool_calls"] is CALLS               # the caller's own is unchanged
    # What comes out suits templates that know no tools and want turns to alternate.
    for source in (GEMMA, MISTRAL, QWEN3):
        text = ChatTemplate(source, bos_text="<s>", eos_text="</s>").render(told_in_words([SYSTEM, *chat], [GOOD]))
        assert all(piece in text for piece in ("Result of f: one", '"arguments": {"a": 1}', "Does it."))


def test_a_result_of_nobody_knows_what():
    assert told_in_words([USER, {"role": "tool", "content": "x"}], [])[-1]["content"] == "Result of the function: x"


def test_malformed_messages_are_refused():
    with pytest.raises(BadRequest, match="Message 1"):
        told_in_words([5], [GOOD])
