"""Grammar for Gemma's own way of writing a call's arguments: ``{city:<q>Paris<q>,days:3}``, where ``<q>`` marks strings.

Only what can be followed exactly is taken: anything else in a schema is refused by its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from edgeinfer.errors import UnsupportedParameter

# JSON's own has exponents beyond any number that a client could read.
_NUMBER = r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][-+]?[0-9]{1,2})?/"
_LITERALS = ("integer", "number", "boolean", "null")
_KNOWN = {
    "string": {"type", "enum", "const", "minLength", "maxLength"}, "array": {"type", "items", "minItems", "maxItems"},
    "object": {"type", "properties", "required", "additionalProperties"},
}
_ANNOTATIONS = {"description", "title", "default", "examples", "nullable", "$schema", "strict"}


class GemmaGrammar:
    """Rules of Lark for values. ``write`` makes terminals of literal text, the string marker ``quote`` among it."""

    def __init__(self, quote: str, write: Callable[[str], str]):
        self._quote = quote
        self._write = write
        self.rules: list[str] = []

    def value(self, rule: str, schema: Any, place: str) -> str:
        """The name of a rule for values that fit ``schema``. Raises `UnsupportedParameter` that names the place of what it cannot follow."""
        if not isinstance(schema, Mapping) or not isinstance(schema.get("type"), str):
            raise _unsupported(place, "a value without a single type")
        kind = schema["type"]
        bounds = {key for key in schema if key not in _ANNOTATIONS}
        if kind == "number" and bounds == {"type"}:
            body = _NUMBER
        elif kind in _LITERALS:
            body = f"%json {json.dumps({key: value for key, value in schema.items() if key not in _ANNOTATIONS})}"
        elif kind in _KNOWN:
            unknown = sorted(set(schema) - _KNOWN[kind] - _ANNOTATIONS)
            if unknown:
                raise _unsupported(f"{place}.{unknown[0]}", unknown[0])
            make = {"string": self._string, "array": self._array, "object": self._object}[kind]
            body = make(rule, schema, place)
        else:
            raise _unsupported(f"{place}.type", repr(kind))
        self.rules.append(f"{rule}: {body}")
        return rule

    def _string(self, rule: str, schema: Mapping[str, Any], place: str) -> str:
        texts = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if texts is not None:
            if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and self._quote not in text for text in texts):
                raise _unsupported(f"{place}.enum", "such a choice")
            return " | ".join(self._write(self._quote + text + self._quote) for text in texts)
        quote = self._write(self._quote)
        if quote.startswith("<["):                       # a token: what it looks like must not be spelled in letters either
            text = f"{rule}_text".upper()
            self.rules.append(f"{text}: /{any_text(schema)}/ & ~/(?s:.*){re.escape(self._quote)}(?s:.*)/")
            return f"{quote} {text} {quote}"
        self.rules.append(f"{rule}_text[suffix={quote}]: /{any_text(schema)}/")
        return f"{quote} {rule}_text"

    def _array(self, rule: str, schema: Mapping[str, Any], place: str) -> str:
        item = self.value(f"{rule}_item", schema.get("items"), f"{place}.items")
        least, most = schema.get("minItems", 0), schema.get("maxItems", "")
        if most == 0:
            return '"[" "]"'
        more = f'({item} ("," {item}){{{max(0, least - 1)},{most - 1 if most != "" else ""}}})'
        return f'"[" {more}{"" if least else "?"} "]"'

    def _object(self, rule: str, schema: Mapping[str, Any], place: str) -> str:
        required = schema.get("required", [])
        members: dict[str, str] = {}
        for number, (key, value) in enumerate(schema.get("properties", {}).items()):
            if not key or set(key) & set(":,{}[]<> \n"):
                raise _unsupported(f"{place}.properties", f"the name {key!r}")
            inner = self.value(f"{rule}_{number}", value, f"{place}.properties.{key}")
            members[key] = f"{self._write(key + ':')} {inner}"
        if isinstance(schema.get("additionalProperties"), Mapping) or not set(required) <= set(members):
            raise _unsupported(place, "properties without names")
        needed = [members[key] for key in members if key in required]
        optional = [members[key] for key in members if key not in required]
        return f'"{{" {_separated(needed, optional)} "}}"'


def _separated(needed: list[str], optional: list[str]) -> str:
    if needed:
        return ' "," '.join(needed) + "".join(f' ("," {one})?' for one in optional)
    # Whichever comes first has no comma.
    begun = [one + "".join(f' ("," {later})?' for later in optional[at + 1:]) for at, one in enumerate(optional)]
    return f"({' | '.join(begun)})?" if begun else ""


def any_text(schema: Mapping[str, Any]) -> str:
    """A regular expression for any text of the length that ``schema`` allows."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return f"(?s:.{{{least},{most}}})" if least or most != "" else "(?s:.*)"


def _unsupported(place: str, what: str) -> UnsupportedParameter:
    return UnsupportedParameter(f"{place}: {what} cannot be demanded in the way this model writes calls; use tool_choice auto.")
