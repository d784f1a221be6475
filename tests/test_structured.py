"""Answers that follow schemas, regular expressions and grammars: what is accepted is kept to, and what is not is refused by name."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

import edgeinfer
from edgeinfer.errors import BackendFailed, BadRequest, EngineBusy
from edgeinfer.runtime import grammar_check, structured
from edgeinfer.runtime.backends.fake import END, ByteVocab, ScriptedBackend
from edgeinfer.runtime.constraint import Constraint
from edgeinfer.runtime.gbnf import gbnf_to_lark
from edgeinfer.runtime.service import Engine
from edgeinfer.runtime.structured import Grammars
from edgeinfer.runtime.values import FinishReason


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    vocab = ByteVocab()
    return Grammars(vocab, vocab.size)


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether the whole text may be said byte by byte, and the answer may end there."""
    state = constraint.start()
    for byte in text.encode():
        if state.complete or not state.allowed()[byte >> 3] >> (byte & 7) & 1:
            return False
        state.accept(byte)
    return state.complete or bool(state.allowed()[END >> 3] >> (END & 7) & 1)


def wander(constraint: Constraint, rng: random.Random, most: int = 400) -> str | None:
    """A random answer; None when it did not come to an end."""
    state = constraint.start()
    said = bytearray()
    while len(said) < most:
        if state.complete:
            return said.decode()
        possible = np.flatnonzero(np.unpackbits(state.allowed(), count=258, bitorder="little")).tolist()
        assert possible, f"a dead end after {said!r}"
        if END in possible and (rng.random() < 0.5 or len(possible) == 1):
            return said.decode()
        ends = [token for token in possible if token < 128 and chr(token) in '"}],']
        plain = [token for token in possible if token < 128 and chr(token) not in " \n\t"] or [token for token in possible if token != END]
        token = rng.choice(ends if ends and rng.random() < 0.4 else plain)
        said.append(token)
        state.accept(token)
    return None


# ------------------------------------------------------------------------------------------------------------------ schemas

SCHEMAS: dict[str, Any] = {
    "anything": {},
    "object": {"type": "object"},
    "all required": {**obj(a={"type": "integer"}, b={"type": "string"}), "required": ["a", "b"], "additionalProperties": False},
    "others typed": {**obj(a={"type": "integer"}, aa={"type": "null"}), "additionalProperties": {"type": "boolean"}},
    "pattern properties": {"type": "object", "patternProperties": {"^a": {"type": "string"}}, "additionalProperties": {"type": "integer"}},
    "counted properties": {"type": "object", "minProperties": 1, "maxProperties": 2},
    "odd names": {**obj(**{'a"b\\\n': {"type": "integer"}, "é😀": {"type": "null"}}), "required": ['a"b\\\n', "é😀"], "additionalProperties": False},
    "no type": {"properties": {"a": {"type": "string"}}, "required": ["a"]},
    "types": {"type": ["string", "integer", "null"], "minLength": 2, "minimum": 5},
    "bounds": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25},
    "old bounds": {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 5},
    "multiples": {"type": "integer", "multipleOf": 7, "minimum": -20, "maximum": 50},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 4},
    "a pattern": {"type": "string", "pattern": r"^\d\w\s[^a]$"},
    "pattern and length": {"type": "string", "pattern": "^a*$", "minLength": 2, "maxLength": 3},
    "a date": {"type": "string", "format": "date"},
    "an address": {"type": "string", "format": "ipv6"},
    "a tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": {"type": "null"}, "minItems": 1, "maxItems": 4},
    "a list": {"type": "array", "items": {"enum": [1, "two", None, {"a": [1.5]}]}, "minItems": 2, "maxItems": 3},
    "any of": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
    "all of": {"allOf": [{**obj(a={"type": "integer"}), "required": ["a"]}, {**obj(b={"type": "string"}), "required": ["b"]}]},
    "one of": {"oneOf": [{**obj(k={"const": "a"}), "required": ["k"]}, {**obj(k={"const": "b"}), "required": ["k"]}]},
    "a tree": {"$defs": {"t": {**obj(c={"type": "array", "items": {"$ref": "#/$defs/t"}}), "additionalProperties": False}}, "$ref": "#/$defs/t"},
    "a reference and more": {"$ref": "#/$defs/a", "maxLength": 2, "$defs": {"a": {"type": "string", "minLength": 1}}},
    "a constant": {"const": {"a": [1, 2.5, None, 'é"\\']}},
    "annotations": {"type": "boolean", "title": "t", "description": "d", "default": 1, "examples": [2], "$comment": "c", "x-more": {}},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_is_said_parses_and_satisfies_the_schema(grammars: Grammars, name: str) -> None:
    schema = SCHEMAS[name]
    constraint = grammars.json_schema(schema)
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    rng = random.Random(name)
    ended = [text for text in (wander(constraint, rng) for _ in range(25)) if text is not None]
    assert ended
    for text in ended:
        assert text == text.strip()
        assert validator.is_valid(json.loads(text)), text


REFUSED: dict[str, tuple[Any, str]] = {
    "look-ahead": (obj(a=obj(b={"type": "string", "pattern": "^(?=a)b$"})), "at '/properties/a/properties/b': .*look-ahead"),
    "back-reference": ({"type": "string", "pattern": r"(a)\1"}, r"at its root: .*\(a\)\\1: backreferences"),
    "illegal escape": ({"items": {"type": "string", "pattern": r"^\y$"}}, r"at '/items': .*\^\\y\$: unrecognized escape"),
    "word boundary": ({"type": "string", "pattern": r"\bfoo\b"}, "lookarounds not supported"),
    "open group": ({"type": "string", "pattern": "(a"}, "unclosed group"),
    "not": (obj(a={"anyOf": [{"type": "null"}, {"not": {"type": "string"}}]}), r"at '/properties/a/anyOf/1': .*\"not\""),
    "in a definition": ({"$defs": {"x": obj(y={"$ref": "#/$defs/z"}), "z": {"items": {"not": {}}}}, "$ref": "#/$defs/x"}, r"at '/\$defs/z/items': .*\"not\""),
    "if": ({"if": {"type": "string"}, "then": {"maxLength": 3}}, '"if"'),
    "unique": (obj(a={"type": "array", "uniqueItems": True}), "at '/properties/a': .*uniqueItems"),
    "contains": ({"type": "array", "contains": {"type": "string"}}, "contains"),
    "property names": ({"propertyNames": {"maxLength": 2}}, "propertyNames"),
    "dependencies": ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "unevaluated": ({"unevaluatedProperties": False}, "unevaluatedProperties"),
    "overlapping oneOf": ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
    "unknown format": (obj(a={"type": "string", "format": "zip"}), "at '/properties/a': Unknown format: zip"),
    "unknown type": (obj(a={"type": "strin"}), "at '/properties/a': Invalid type: strin"),
    "dangling reference": ({"$ref": "#/$defs/a"}, r"\$defs/a"),
    "remote reference": ({"$ref": "http://example.com/x"}, "example.com"),
    "circle": ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "admits no text"),
    "contradiction": ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
    "nothing": (False, "admits no value"),
    "bad value": ({"type": "string", "minLength": -1}, "minLength"),
    "a list": ([1], "must be an object or true"),
    "infinity": ({"maximum": float("inf")}, "is not JSON"),
    "a set": ({"enum": {1}}, "is not JSON"),
    "too large": ({"enum": ["x" * 300_000]}, "at most 262,144"),
    "too wide": (obj(**{f"p{at}": {} for at in range(401)}), "400 properties"),
    "too deep a chain": (
        {"$defs": {f"d{at}": obj(a={"$ref": f"#/$defs/d{at + 1}"}) for at in range(2000)} | {"d2000": {}}, "$ref": "#/$defs/d0"}, "too deep or too large",
    ),
    "too much": ({"type": "string", "pattern": "^((a{100}){100}){10}$"}, "too complex"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_to_is_refused_by_name(grammars: Grammars, name: str) -> None:
    schema, message = REFUSED[name]
    with pytest.raises(BadRequest, match=message):
        grammars.json_schema(schema)


def test_a_schema_may_be_deep_but_not_without_bound(grammars: Grammars) -> None:
    def nested(depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "null"}
        for _ in range(depth):
            schema = {"type": "array", "items": schema}
        return schema

    assert accepts(grammars.json_schema(nested(20)), "[" * 20 + "null" + "]" * 20)
    for depth in (65, 100_000):
        with pytest.raises(BadRequest, match="levels deep"):
            grammars.json_schema(nested(depth))


def test_a_compiler_that_takes_for_ever_is_stopped(grammars: Grammars, monkeypatch) -> None:
    monkeypatch.setattr(grammar_check, "TIMEOUT_S", 0.4)
    monkeypatch.setattr(grammar_check.first_failure, "__defaults__", (0.4,))
    with pytest.raises(BadRequest, match="takes more than 0.4 s"):
        grammars.json_schema({"allOf": [{"type": "integer", "multipleOf": prime} for prime in (101, 103, 107, 109)]})
    assert accepts(grammars.json_schema({"type": "null"}), "null")


def test_a_schema_cannot_change_how_schemas_are_read(grammars: Grammars) -> None:
    loose = {"type": "null", "x-guidance": {"lenient": True, "whitespace_pattern": "x+", "item_separator": ";"}}
    assert grammars.json_schema(loose) is grammars.json_schema({"type": "null"})
    with pytest.raises(BadRequest, match='"not"'):
        grammars.json_schema({"not": {}, "x-guidance": {"lenient": True}})


def test_white_space_is_possible_between_tokens_bounded_and_never_at_the_end(grammars: Grammars) -> None:
    pretty = json.dumps({"a": [1, {"b": "c"}], "d": {}}, indent=4)
    anything = grammars.json_object()
    assert accepts(anything, pretty) and accepts(anything, '{"a":[1,{"b":"c"}],"d":{}}')
    assert accepts(anything, "{" + " " * 32 + '"a": 1}') and not accepts(anything, "{" + " " * 33 + '"a": 1}')
    for text in (' {"a": 1}', '{"a": 1} ', '{"a": 1}\n', '{"a": 1', "[1]", "1", ""):
        assert not accepts(anything, text), text


def test_properties_come_in_the_order_of_the_schema(grammars: Grammars) -> None:
    both = grammars.json_schema({**obj(b={"type": "null"}, a={"type": "null"}), "required": ["a", "b"], "additionalProperties": False})
    assert accepts(both, '{"b": null, "a": null}') and not accepts(both, '{"a": null, "b": null}')


# ----------------------------------------------------------------------------------------------- regular expressions, grammars


def test_a_regular_expression_is_matched_whole(grammars: Grammars) -> None:
    assert [accepts(grammars.regex(r"\d{4}-\d\d"), text) for text in ("2024-05", "2024-5", "x2024-05", "2024-050")] == [True, False, False, False]
    assert [accepts(grammars.regex("(yes|no)!*"), text) for text in ("yes", "no!!", "yesno", "")] == [True, True, False, False]
    assert accepts(grammars.regex(""), "") and accepts(grammars.regex("[é😀]+"), "é😀é")
    for pattern, message in (("(?=a)b", "look-around"), (r"(a)\1", "backreferences"), ("(a", "unclosed"), (r"\y", "escape"), (r"[^\x00-\x{10FFFF}]", "no text")):
        with pytest.raises(BadRequest, match=message):
            grammars.regex(pattern)


def test_lark_grammars(grammars: Grammars) -> None:
    sums = grammars.lark('start: term ("+" term)*\nterm: /[0-9]{1,3}/ | "(" start ")"')
    assert [accepts(sums, text) for text in ("1", "1+22", "(1+2)+3", "(1", "1+", "1234")] == [True, True, True, False, False, False]
    for source, message in (("foo: /a/", "start"), ("start: bar", "bar"), ("start: <|im_end|>", "special token"), ('start: "a', "cannot be used"), ("start: " + "(" * 70 + '"a"' + ")" * 70, "deep")):
        with pytest.raises(BadRequest, match=message):
            grammars.lark(source)


JSON_GBNF = r'''
# JSON, the usual way
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
'''


def test_gbnf_grammars(grammars: Grammars) -> None:
    anything = grammars.gbnf(JSON_GBNF)
    for text, right in (('{"a": [1, -2.5e3, {"b": "x\\u00e9\\n"}], "c": true}', True), ("{}", True), ('{"a"}', False), ("[1]", False), ('{"a": "\\x"}', False)):
        assert accepts(anything, text) is right, text
    rng = random.Random(0)
    assert all(isinstance(json.loads(text), dict) for _ in range(20) if (text := wander(anything, rng)) is not None)


@pytest.mark.parametrize(
    "source, right, wrong",
    [
        ('root ::= [a-z]* "z"', ["z", "abz", "zzz"], ["", "ab"]),                    # the last z is not swallowed by the set
        ('root ::= "(" root ")" | [a-z]* "z"', ["z", "(abz)", "((z))"], ["(ab)", "(z"]),
        ('root ::= ("a" | "bc"){2,3}\n', ["aa", "abc", "bcbcbc"], ["a", "aaaa"]),
        ('root ::= a{2} b{0,1} c{1,}\na ::= "a"\nb ::= "b"\nc-1 ::= "x"\nc ::= c-1', ["aax", "aabxx"], ["ax", "aab"]),
        (r'root ::= "\u00e9\x41\U0001F600\n\"\\" [\u0041-C\]\[^/&.-]', ['éA😀\n"\\B', 'éA😀\n"\\]', 'éA😀\n"\\-', 'éA😀\n"\\&', 'éA😀\n"\\^'], ['éA😀\n"\\D']),
        (r'root ::= [^a-c\n] . "x"?', ["d\n", "é😀x"], ["a1", "\n1", "d"]),
        ('root ::= "a" | # one\n  "b" # two\n', ["a", "b"], ["c"]),
        ('root ::= x | y\nx ::= "1" y?\ny ::= "2" x?', ["1", "2", "12", "2121"], ["11", ""]),
        ('root ::= "" | "a" root', ["", "aaa"], ["b"]),
    ],
)
def test_gbnf_means_what_it_says(grammars: Grammars, source: str, right: list[str], wrong: list[str]) -> None:
    constraint = grammars.gbnf(source)
    assert [text for text in right if not accepts(constraint, text)] == []
    assert [text for text in wrong if accepts(constraint, text)] == []


@pytest.mark.parametrize(
    "source, message",
    [
        ("root ::= x", "no such rule"), ('a ::= "b"', "no rule 'root'"), ("", "no rule 'root'"), ('root ::= "a\n', "line 1, .*no end"), ("root ::= [a", "no end"),
        ('root ::= ("a"', r"'\)' is expected"), ('root ::= "a" )', "unexpected"), ('root ::= "a"\nx ::= "\\q"', r"line 2, \\q"), ('root := "a"', "::="),
        ('root ::= "a"\nroot ::= "b"', "twice"), ('root ::= "a"{3,1}', "repetition"), ('root ::= "a"{99999}', "repetition"), ('root ::= "\\', "escape"),
        ("root ::= <foo>", "unexpected"), ("root ::= [z-a]", "empty"), ('root ::= "\\ud800"', "no character"), ("root ::= []", "no character"), ("::=", "name"),
    ],
)
def test_gbnf_that_is_wrong_is_refused_by_line(source: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        gbnf_to_lark(source)


def test_a_grammar_that_grows_without_bound_is_refused(grammars: Grammars) -> None:
    doubling = "root ::= a0\n" + "".join(f"a{at} ::= a{at + 1} a{at + 1}\n" for at in range(60)) + 'a60 ::= "x"'
    with pytest.raises(BadRequest, match="too big"):
        grammars.gbnf(doubling)
    with pytest.raises(BadRequest, match="at most 65,536"):
        grammars.gbnf("#" * 70_000)


def test_an_answer_that_is_too_costly_to_follow_ends_alone(monkeypatch) -> None:
    monkeypatch.setattr(structured, "_MASKS", -1e9)          # as if all had been used up
    monkeypatch.setattr(Grammars, "_try_out", lambda *_: None)
    with Engine(ScriptedBackend([b"a"] * 20)) as engine:
        bad = engine.generate("p", constraint=engine.grammars.regex("a*"))
        with pytest.raises(BackendFailed, match="too long to follow"):
            bad.text()
        assert engine.generate("q", temperature=0).text() == "a" * 20


# ----------------------------------------------------------------------------------------------------------------- remembering


def test_what_was_compiled_is_remembered_within_bounds(monkeypatch) -> None:
    vocab = ByteVocab()
    grammars = Grammars(vocab, vocab.size)
    monkeypatch.setattr(structured, "MAX_REMEMBERED", 3)
    first = grammars.json_schema({"const": 0})
    for at in range(1, 3):
        grammars.json_schema({"const": at})
    assert grammars.json_schema({"const": 0}) is first       # and is the newest now
    for at in range(3, 5):
        grammars.json_schema({"const": at})
    assert len(grammars._compiled) == 3
    assert grammars.json_schema({"const": 0}) is first
    assert grammars.json_object() is not grammars.regex('{"type": "object"}'.replace("{", r"\{"))


def test_many_threads_compile_and_follow_at_once(grammars: Grammars) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            rng = random.Random(seed)
            for at in range(6):
                constraint = grammars.json_schema({**obj(a={"const": rng.randrange(8)}, b={"type": "boolean"}), "required": ["a", "b"]})
                text = wander(constraint, rng)
                assert text is None or {"a", "b"} <= json.loads(text).keys()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_who_waits_too_long_for_the_compiler_is_told_to_come_again(grammars: Grammars, monkeypatch) -> None:
    monkeypatch.setattr(structured, "_PATIENCE", 0.01)
    with grammars._trying, pytest.raises(EngineBusy, match="again"):
        grammars.regex("never seen before")
    assert accepts(grammars.regex("never seen before"), "never seen before")


# ------------------------------------------------------------------------------------------------------------------- engines


def test_the_scripted_model_is_kept_to_a_schema_it_does_not_want() -> None:
    schema = {**obj(name={"type": "string", "maxLength": 5}, age={"type": "integer", "minimum": 0, "maximum": 150}), "required": ["name", "age"], "additionalProperties": False}
    with Engine(ScriptedBackend([b"I'd rather not", b" say so."], n_ctx=2048)) as engine:
        constraint = engine.grammars.json_schema(schema)
        for temperature in (0, 1.5):
            for seed in range(10):
                stream = engine.generate("p", constraint=constraint, temperature=temperature, seed=seed, top_k=0, top_p=1, min_p=0)
                value = json.loads(stream.text())
                assert jsonschema_rs.is_valid(schema, value) and stream.finish_reason is FinishReason.STOP


@pytest.fixture(scope="module")
def engine(smollm2_gguf) -> Iterator[edgeinfer.Engine]:
    with edgeinfer.load(smollm2_gguf, ctx_size=512, parallel=4) as loaded:
        yield loaded


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colours": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}


def test_a_real_model_answers_with_what_the_schema_admits(engine) -> None:
    constraint = engine.grammars.json_schema(PERSON)
    messages = [{"role": "user", "content": "Describe a person as JSON."}]
    streams = [engine.chat(messages, constraint=constraint, temperature=temperature, top_k=0, top_p=1, min_p=0) for temperature in (0, 1.5, 1.5)]
    for stream in streams:
        text = stream.text()
        assert stream.finish_reason is FinishReason.STOP, text
        assert jsonschema_rs.is_valid(PERSON, json.loads(text), validate_formats=True), text
        assert text == text.strip()


def test_a_real_model_and_the_other_ways_to_say_it(engine) -> None:
    messages = [{"role": "user", "content": "Is the sky blue?"}]
    said = {
        "regex": engine.chat(messages, constraint=engine.grammars.regex("(Yes|No), [a-z ]{3,9}[.]"), temperature=1.5),
        "lark": engine.chat(messages, constraint=engine.grammars.lark('start: "The sky is " COLOUR\nCOLOUR: "blue" | "grey"'), temperature=0),
        "gbnf": engine.chat(messages, constraint=engine.grammars.gbnf('root ::= "(" root ")" | "blue" | "grey"'), temperature=0, max_tokens=20),
    }
    assert said["regex"].text().split(",")[0] in ("Yes", "No") and said["regex"].text().endswith(".")
    assert said["lark"].text() in ("The sky is blue", "The sky is grey")
    assert said["gbnf"].text().strip("()") in ("blue", "grey")
    cut = engine.chat(messages, constraint=engine.grammars.json_schema({"type": "array", "items": {"const": "blue"}, "minItems": 50}), max_tokens=10)
    assert cut.text().startswith("[") and cut.finish_reason is FinishReason.LENGTH


def test_all_end_of_turn_tokens_may_end_an_answer_and_no_other_control_token_is_ever_allowed(engine) -> None:
    state = engine.grammars.regex("a*").start()
    possible = set(np.flatnonzero(np.unpackbits(state.allowed(), count=engine.info.n_vocab, bitorder="little")).tolist())
    control = {token for token in range(engine.info.n_vocab) if not engine.vocab.token_bytes(token)}
    assert possible & control == engine.vocab.end_ids
    spelled = engine.grammars.lark('start: "<|im_start|>" /.*/').start()
    first = np.flatnonzero(np.unpackbits(spelled.allowed(), count=engine.info.n_vocab, bitorder="little")).tolist()
    assert not control & set(first)                          # the text of a marker, by ordinary tokens
