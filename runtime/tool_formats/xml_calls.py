"""Calls written like XML, as Qwen's coders do: ``<tool_call><function=f><parameter=x>...</parameter></function></tool_call>``.

Values are raw text; what they are as JSON follows from the tool's own schema. Strings stream, other values come when they are complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgeinfer.runtime.tool_formats.base import SPACE, CallParser, first_tag, new_call_id, open_start, read_json

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_END_FUNCTION, _END_PARAMETER = "</function>", "</parameter>"
# What may end a streamed text, the line end before it included.
_ENDS = (_END_PARAMETER, *(line + tag for line in ("\n", "\r\n") for tag in (_END_PARAMETER, _END_FUNCTION)))
_NAME = re.compile(r"\s*([^<>\n]{1,128}?)\s*>")
_MAY_BE_NAME = re.compile(r"\s*[^<>\n]{0,128}\s*")
_JSON_TYPES: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object"}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class XmlCalls(CallParser):
    """wrapper: the tag around a call, which models leave out at times. tools: the request's tools, for the types of their parameters."""

    def __init__(self, wrapper: str, tools: Sequence[Mapping[str, Any]] = (), *, new_id: Callable[[], str] = new_call_id):
        super().__init__((wrapper, _FUNCTION), new_id)
        self._end_wrapper = f"</{wrapper[1:]}"
        self._parameters = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        self._schema: Mapping[str, Any] = {}
        self._any = self._streams = self._trim = False
        self._key = ""

    def _after_calls(self) -> tuple[Callable[[], bool], ...]:
        return self._outside, self._after_function

    def _opened_by(self, tag: str) -> Callable[[], bool]:
        return self._function if tag == _FUNCTION else self._in_wrapper

    def _in_wrapper(self) -> bool:
        rest = self._text.lstrip(SPACE)
        if rest.startswith(_FUNCTION):
            self._raw += self._take(len(self._text) - len(rest) + len(_FUNCTION))
            self._state = self._function
            return True
        return False if not self._ended and _FUNCTION.startswith(rest) else self._no_call()

    def _function(self) -> bool:
        found = _NAME.match(self._text)
        if not found:
            return False if not self._ended and _MAY_BE_NAME.fullmatch(self._text) else self._no_call()
        self._take(found.end())
        self._begin(found[1], "{")
        schema = self._parameters.get(found[1])
        self._schema = schema if isinstance(schema, Mapping) else {}
        self._any = False
        self._state = self._between
        return True

    def _between(self) -> bool:
        """Inside a function, outside its parameters."""
        tags = (_PARAMETER, _END_FUNCTION, self._end_wrapper)
        found = first_tag(self._text, tags)
        if found is None:
            self._content(self._take(open_start(self._text, tags)))
            return False                                 # a tag cut short is no content
        at, tag = found
        self._content(self._take(at))
        if tag == _PARAMETER:
            self._state = self._parameter
            return self._parameter()
        self._more("}")
        self._space = ""
        self._beside_call = True
        if tag == _END_FUNCTION:
            self._take(len(tag))
        self._state = self._after_function
        return True

    def _parameter(self) -> bool:
        name = _NAME.match(self._text, len(_PARAMETER))
        if not name:
            if _MAY_BE_NAME.fullmatch(self._text, len(_PARAMETER)):
                return False
            self._content(self._take(len(_PARAMETER)))
            self._state = self._between
            return True
        self._take(name.end())
        self._key = name[1]
        self._streams = json_types(_property(self._schema, self._key)) <= {"string"}
        self._trim = True
        self._state = self._value
        return True

    def _value(self) -> bool:
        """A value runs to its closing tag, or to that of the function, on a line of its own, where the model forgot the first."""
        if self._trim:
            # One line end at each side is layout.
            if self._text in ("", "\r") and not self._ended:
                return False
            self._take(len(self._text) - len(re.sub(r"^\r?\n", "", self._text)))
            self._trim = False
            if self._streams:
                self._open_value('"')
        found = first_tag(self._text, (_END_PARAMETER, "\n" + _END_FUNCTION))
        if found is not None:
            at, tag = found
            value = re.sub(r"\r?\n\Z", "", self._text[: at if tag == _END_PARAMETER else at + 1])
            self._take(at + (len(tag) if tag == _END_PARAMETER else 1))
            self._more(_escaped(value) + '"') if self._streams else self._open_value(_as_json(value, _property(self._schema, self._key)))
            self._state = self._between
            return True
        if self._streams:
            self._more(_escaped(self._take(len(self._text) if self._ended else open_start(self._text, _ENDS))))
        elif self._ended:
            self._open_value(json.dumps(self._take(len(self._text)), ensure_ascii=False)[:-1])
        return False

    def _open_value(self, value: str) -> None:
        self._more(f"{', ' if self._any else ''}{json.dumps(self._key, ensure_ascii=False)}: {value}")
        self._any = True

    def _after_function(self) -> bool:
        rest = self._text.lstrip(SPACE)
        if rest.startswith(self._end_wrapper):
            self._text = rest[len(self._end_wrapper):]
        elif rest.startswith(_FUNCTION):                 # the next call in the same wrapper
            self._text = rest[len(_FUNCTION):]
            self._raw = _FUNCTION
            self._state = self._function
            return True
        elif self._end_wrapper.startswith(rest) or _FUNCTION.startswith(rest):
            return False                                 # a closing tag cut short is no content
        self._state = self._outside
        return True


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _property(schema: Mapping[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None


def json_types(schema: Any) -> set[str]:
    """The JSON types that a schema names; empty where it names none."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else {one for one in named if isinstance(one, str)} if isinstance(named, list) else set()
    for key in ("anyOf", "oneOf"):
        for one in schema.get(key) or ():
            types |= json_types(one)
    return types


def _as_json(value: str, schema: Any) -> str:
    """The JSON text of a raw value: what it spells where the schema allows that type, else a string."""
    types = json_types(schema)
    text = _PYTHON_WORDS.get(value.strip(), value.strip())
    try:
        parsed = read_json(text)
    except ValueError:
        return json.dumps(value, ensure_ascii=False)
    kind = _JSON_TYPES[type(parsed)]
    fits = kind in types or (kind == "integer" and "number" in types) or (kind == "number" and types == {"integer"})
    return text if fits and kind != "string" else json.dumps(value, ensure_ascii=False)
