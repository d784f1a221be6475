"""Calls that are demanded: whatever the grammar lets through, the family's parser reads as calls that fit the functions."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from answers import FORMATS, TagVocab, answers, parse

from edgeinfer.errors import BadRequest, UnsupportedParameter
from edgeinfer.runtime.answer_parser import ToolCallDelta
from edgeinfer.runtime.backends.fake import ByteVocab, ScriptedBackend
from edgeinfer.runtime.service import Engine
from edgeinfer.runtime.structured import Grammars
from edgeinfer.runtime.thinking import thinking_constraint
from edgeinfer.runtime.tool_choice import call_grammar, control_tokens, tool_choice_constraint

KINDS = ["x", 'y "é" \\\n\u20ac']
PARAMETERS = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 99}, "text": {"type": "string", "maxLength": 8},
        "kind": {"type": "string", "enum": KINDS}, "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "nothing": {"$ref": "#/$defs/nothing"},
    },
    "required": ["count", "kind"], "additionalProperties": False, "$defs": {"nothing": {"type": "null"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "g.h-1"}},
]
DEMANDED = sorted(name for name, format in FORMATS.items() if format.syntax or format.wrapper or format.quote)
# Gemma's own syntax has a grammar of its own, for less than all of JSON Schema.
FLAT = {**PARAMETERS, "properties": {**PARAMETERS["properties"], "nothing": {"type": "null"}}}
del FLAT["$defs"]
NESTED = {
    "type": "object", "properties": {
        "list": {"type": "array", "minItems": 1, "items": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "boolean"}}}},
        "none": {"type": "array", "items": {"type": "string"}, "maxItems": 0},
    },
}
FLAT_TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": FLAT}}, {"type": "function", "function": {"name": "g.h-1"}},
    {"type": "function", "function": {"name": "nested", "parameters": NESTED}},
]
XML = ("qwen_xml", "seed_xml")


def walk(constraint, vocab, rng: random.Random, mark: bytes = b"\n</parameter>\n") -> str:
    """A text that the constraint admits, with a liking for ends."""
    state, said = constraint.start(), b""
    while not state.complete and len(said) < 20_000:
        allowed = np.flatnonzero(np.unpackbits(state.allowed(), bitorder="little")[: vocab.size])
        ends = [token for token in allowed if token in vocab.end_ids]
        if ends and (len(ends) == len(allowed) or rng.random() < 0.3):
            break
        plain = [int(token) for token in allowed if 32 <= token < 127 or token == 10 or token >= 258] or list(allowed)
        # A text ends with its mark only: follow that once begun.
        end = next((count for count in range(len(mark) - 1, 0, -1) if said.endswith(mark[:count])), 0)
        forced = mark[end]
        likely = [token for token in plain if token < 256 and chr(token) in '"}]']
        if forced in plain and (end or rng.random() < 0.3):
            token = forced
        else:
            token = rng.choice(likely if likely and rng.random() < 0.4 else plain)
        said += vocab.token_text(token).encode() if token >= 258 else bytes([token])
        state.accept(token)
    return said.decode()


@pytest.mark.parametrize("tags", [False, True], ids=["text", "control"])
@pytest.mark.parametrize("name", DEMANDED)
def test_whatever_is_allowed_is_a_call_that_fits(name, tags):
    format = answers(name)
    vocab = TagVocab(format.tools.tags if tags else ())
    grammars = Grammars(vocab, vocab.size)
    rng = random.Random(name)
    constraint = tool_choice_constraint(format, FLAT_TOOLS if "gemma" in name else TOOLS, "required", grammars, vocab=vocab)
    for _ in range(6):
        text = walk(constraint, vocab, rng, format.tools.quote.encode() or b"\n</parameter>\n")
        calls = parse(format, text, tools=TOOLS)
        assert calls and all(isinstance(call, ToolCallDelta) for call in calls), text
        for call in calls:
            arguments = json.loads(call.arguments)
            if call.name == "f":
                assert set(arguments) <= set(PARAMETERS["properties"]) and 0 <= arguments["count"] <= 99 and arguments["kind"] in KINDS
                assert isinstance(arguments.get("text", ""), str) and arguments.get("nothing") is None and len(arguments.get("flags", [])) <= 2
                assert len(arguments.get("text", "")) <= 8
            elif call.name == "nested":
                assert set(arguments) <= {"list", "none"} and arguments.get("none", []) == [] and arguments.get("list", [{}]) != []
                assert all(set(one) <= {"x", "y"} and isinstance(one.get("y", True), bool) for one in arguments.get("list", []))
            else:
                assert (call.name, arguments) == ("g.h-1", {})


@pytest.mark.parametrize("name", DEMANDED)
def test_a_named_function_is_called_once(name):
    format, vocab = answers(name), ByteVocab()
    choice = {"type": "function", "function": {"name": "g.h-1"}}
    constraint = tool_choice_constraint(format, TOOLS, choice, Grammars(vocab, vocab.size), vocab=vocab)
    text = walk(constraint, vocab, random.Random(1))
    (call,) = parse(format, text, tools=TOOLS)
    assert (call.name, call.arguments) == ("g.h-1", "{}")


@pytest.mark.parametrize("name", DEMANDED)
def test_one_call_where_calls_may_not_be_parallel(name):
    format, vocab = answers(name), ByteVocab()
    rng = random.Random(2)
    tools = FLAT_TOOLS if "gemma" in name else TOOLS
    constraint = tool_choice_constraint(format, tools, "required", Grammars(vocab, vocab.size), vocab=vocab, parallel=False)
    mark = format.tools.quote.encode() or b"\n</parameter>\n"
    assert {len(parse(format, walk(constraint, vocab, rng, mark), tools=TOOLS)) for _ in range(5)} == {1}


def test_nothing_is_demanded_by_auto_or_none():
    vocab = ByteVocab()
    for choice in (None, "auto", "none"):
        assert tool_choice_constraint(answers("hermes"), TOOLS, choice, Grammars(vocab, vocab.size), vocab=vocab) is None


@pytest.mark.parametrize("name", sorted(set(FORMATS) - set(DEMANDED)))
def test_formats_without_a_grammar_refuse(name):
    with pytest.raises(UnsupportedParameter, match=f"format {name}.*tool_choice auto"):
        call_grammar(answers(name), TOOLS, vocab=ByteVocab(), single=False)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}, {"type": "object", "properties": {"a": {"type": "thing"}}},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/nowhere"}}},
    ],
)
def test_a_schema_that_no_grammar_can_follow_is_named(schema):
    vocab = ByteVocab()
    tools = [TOOLS[0], {"type": "function", "function": {"name": "bad", "parameters": schema}}]
    for name in ("hermes", "qwen_xml"):
        with pytest.raises(BadRequest, match=r"^tools\[1\]\.function\.parameters: "):
            tool_choice_constraint(answers(name), tools, "required", Grammars(vocab, vocab.size), vocab=vocab)


def test_names_that_xml_cannot_write_are_refused():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a>b": {}}}}}]
    with pytest.raises(BadRequest, match="a>b"):
        call_grammar(answers("qwen_xml"), tools, vocab=ByteVocab(), single=False)


def test_control_tokens_are_told_from_text():
    vocab = TagVocab(["[TOOL_CALLS]"])
    assert control_tokens(("[TOOL_CALLS]", "[ARGS]", "<|im_end|>"), vocab) == {"[TOOL_CALLS]": 258, "<|im_end|>": 257}
    assert "<[258]>" in call_grammar(answers("mistral"), TOOLS, vocab=vocab, single=True)


def test_thinking_comes_before_a_demanded_call():
    format, vocab = answers("hermes"), ByteVocab()
    call = tool_choice_constraint(format, TOOLS, {"type": "function", "function": {"name": "g.h-1"}}, Grammars(vocab, vocab.size), vocab=vocab)
    state = thinking_constraint(format, "open", vocab, vocab.size, limit=4, inner=call).start()
    said = b""
    while not state.complete:
        allowed = np.flatnonzero(np.unpackbits(state.allowed(), bitorder="little"))
        token = ord("h") if ord("h") in allowed else int(allowed[0])
        state.accept(token)
        said += bytes([token])
    assert parse(format, said.decode(), tools=TOOLS, thinking=True)[-1].name == "g.h-1" and said.startswith(b"hhhh</think><tool_call>")


def test_the_engine_follows(monkeypatch):
    """A model that wants to say something else calls all the same, and stops after the call."""
    format = answers("json")
    with Engine(ScriptedBackend(lambda tokens: ord("z"), n_ctx=2048)) as engine:
        choice = {"type": "function", "function": {"name": "g.h-1"}}
        constraint = tool_choice_constraint(format, TOOLS, choice, engine.grammars, vocab=engine.vocab)
        text = engine.chat([{"role": "user", "content": "hi"}], constraint=constraint, temperature=0).text()
    (call,) = parse(format, text)
    assert (call.name, call.arguments) == ("g.h-1", "{}")


@pytest.mark.parametrize(
    ("name", "schema", "words"),
    [
        ("gemma4", {"a": {"type": "string", "pattern": "x"}}, r"properties\.a\.pattern"), ("gemma4", {"a": {}}, "without a single type"),
        ("gemma4", {"a": {"$ref": "#"}}, "without a single type"), ("gemma4", {"a:b": {"type": "null"}}, "a:b"),
        ("gemma4", {"a": {"type": "array"}}, r"properties\.a\.items"), ("gemma4", {"a": {"type": "string", "enum": ['<|"|>']}}, r"a\.enum"),
        ("gemma4", {"a": {"type": "array", "items": {"type": "object", "patternProperties": {}}}}, r"a\.items\.patternProperties"),
        ("gemma4", {"a": {"type": ["string", "null"]}}, "without a single type"), ("gemma4", {"a": {"type": "thing"}}, r"a\.type"),
        ("qwen_xml", {"a": {"type": "string", "pattern": "x"}}, "pattern of the parameter 'a'"),
        ("seed_xml", {"a": {"type": "string", "format": "date"}}, "format"),
    ],
)
def test_what_a_familys_own_syntax_cannot_be_held_to_is_refused(name, schema, words):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": schema}}}]
    with pytest.raises(UnsupportedParameter, match=words):
        call_grammar(answers(name), tools, vocab=ByteVocab(), single=False)
