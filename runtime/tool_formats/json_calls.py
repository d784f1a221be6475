"""Calls written as JSON: ``{"name": "f", "arguments": {...}}``, between tags, after a tag, or alone as the whole answer.

The arguments stream while they are written. From their first character on they are a call, and run to the end of their JSON value; before it
everything may still turn out to be content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from edgeinfer.runtime.tool_formats.base import SPACE, CallParser, new_call_id, read_json
from edgeinfer.runtime.tool_formats.json_span import JsonSpan

# The usual order of keys, seen within the first characters of an object; any other order is read when the object is complete.
_HEAD = 512
_HEADER = re.compile(
    r'\{\s*(?:"(?:type|id)"\s*:\s*"[^"\\]*"\s*,\s*)*"name"\s*:\s*"([^"\\\x00-\x1f]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)'
)
_FIRST_KEY = re.compile(r'\{\s*(?:"((?:[^"\\]|\\.)*)"|[^\s"])')
_CALL_KEYS = frozenset({"name", "arguments", "parameters", "type", "function", "id"})
_FENCE = re.compile(r"```(json|tool_call|tool_code|)[ \t]*\n")
_FENCE_LINE = 24
# After "[TOOL_CALLS]" in newer Mistral models: name[ARGS]{...}, with [CALL_ID]... between or without [ARGS].
_NAMED = re.compile(r"\s*([\w.:/-]{1,128})\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_MAY_BE_NAMED = re.compile(r"\s*[\w.:/-]{0,128}\s*(?:\[(?:CALL_ID|CALL_I|CALL_|CALL|CAL|CA|C)?(?:\]\s*\w*\s*)?)?(?:\[(?:ARGS|ARG|AR|A)?(?:\]\s*)?)?")


class JsonCalls(CallParser):
    """Parser of calls in JSON.

    sections: the tags that open calls, each with the one that closes them ("" where nothing does). A section holds one call, several, or a list.
    bare: an answer that begins with a call, in a code fence or not, is one without any tag.
    named: a tag may also be followed by the function's name and the bare arguments.
    """

    def __init__(self, sections: Mapping[str, str], *, bare: bool = False, named: bool = False, new_id: Callable[[], str] = new_call_id):
        super().__init__(tuple(sections), new_id)
        self._sections = sections
        self._named = named
        self._close = ""
        self._calls_before = 0
        self._is_bare = False
        self._scanned = 0                                # characters of `_text` that the span has seen
        self._span = JsonSpan()
        if bare:
            self._state = self._start

    # --------------------------------------------------------------------------------------------------------------- states

    def _start(self) -> bool:
        """Nothing was said yet."""
        text = self._text.lstrip(SPACE)
        if not text and not self._ended:
            return False
        fence = _FENCE.match(text)
        if fence or text[:1] in ("{", "["):
            self._content(self._take(len(self._text) - len(text)))
            self._raw = self._take(fence.end()) if fence else ""
            self._is_bare = True
            self._state = self._enter("```" if fence else "")
            return True
        if not self._ended and "```".startswith(text[:3]) and "\n" not in text and len(text) < _FENCE_LINE:
            return False
        self._state = self._outside
        return True

    def _after_calls(self) -> tuple[Callable[[], bool], ...]:
        return self._outside, self._section

    def _opened_by(self, tag: str) -> Callable[[], bool]:
        self._is_bare = False
        return self._enter(self._sections[tag])

    def _enter(self, close: str) -> Callable[[], bool]:
        self._close = close
        self._calls_before = self.calls
        return self._section

    def _section(self) -> bool:
        """Between the calls of a section."""
        called = self.calls > self._calls_before
        rest = self._text.lstrip(SPACE + (",;[]}" if called else "["))
        skipped = self._text[: len(self._text) - len(rest)]
        if rest.startswith("{"):
            self._raw = "" if called else self._raw + skipped
            self._text = rest
            self._scanned = 0
            self._span = JsonSpan()
            self._state = self._object
            return True
        if called and self._close and rest.startswith(self._close):
            self._text = rest[len(self._close):]
            self._state = self._outside
            return True
        if self._named and not called and not skipped.strip(SPACE) and self._may_be_named():
            return self._name()
        if not rest or (called and self._close.startswith(rest)):
            if self._ended and called:
                self._text = ""                          # a closing tag cut short
            if called or not self._ended:
                return False
        # Where a call came, brackets that closed its list and braces too many are part of it.
        self._take(len(skipped) - len(skipped.lstrip(SPACE + "]}")) if called else 0)
        return self._no_call()

    def _may_be_named(self) -> bool:
        return bool(_NAMED.match(self._text) or _MAY_BE_NAMED.fullmatch(self._text)) and bool(self._text.strip(SPACE))

    def _name(self) -> bool:
        found = _NAMED.match(self._text)
        if found:
            self._begin(found[1])
            self._take(found.end())
            self._span = JsonSpan()
            self._state = self._bare_arguments
            return True
        return self._no_call() if self._ended else False

    def _object(self) -> bool:
        """At "{": a call, or something else in braces."""
        head = self._text[:_HEAD]
        header = _HEADER.match(head)
        if header:
            self._begin(header[1])
            self._take(header.end())
            self._span = JsonSpan()
            self._state = self._arguments
            return True
        first = _FIRST_KEY.match(head)
        if first and first[1] not in _CALL_KEYS:
            return self._no_call()
        end = self._span.feed(self._text[self._scanned:])
        if end is None:
            self._scanned = len(self._text)
            return self._no_call() if self._ended else False
        text = self._take(self._scanned + end)
        call = _call_in(text, needs_arguments=self._is_bare)
        if call is None:
            return self._no_call(text)
        self._begin(*call)
        self._state = self._section
        return True

    def _arguments(self) -> bool:
        if self._text[:1] in ("{", "["):
            self._state = self._streamed_arguments
        else:
            self._scanned = 0
            self._state = self._other_arguments
        return True

    def _streamed_arguments(self) -> bool:
        return self._stream(self._after_arguments)

    def _bare_arguments(self) -> bool:
        return self._stream(self._outside)

    def _stream(self, then: Callable[[], bool]) -> bool:
        end = self._span.feed(self._text)
        self._more(self._take(len(self._text) if end is None else end))
        if end is not None:
            self._scanned = 0
            self._span = JsonSpan(depth=1)
            self._state = then
        return end is not None

    def _other_arguments(self) -> bool:
        """Arguments that are no object: null, or JSON within a string."""
        end = self._span.feed(self._text[self._scanned:])
        if end is None and not self._ended:
            self._scanned = len(self._text)
            return False
        self._more(_unwrapped(self._take(len(self._text) if end is None else self._scanned + end)))
        self._scanned = 0
        self._span = JsonSpan(depth=1)
        self._state = self._after_arguments
        return True

    def _after_arguments(self) -> bool:
        """What remains of the call's object: its brace, perhaps more keys."""
        rest = self._text.lstrip(SPACE)
        if rest and rest[0] not in ",}":
            self._state = self._section
            return True
        end = self._span.feed(self._text[self._scanned:])
        if end is None:
            self._scanned = len(self._text)
            if self._ended:
                self._text = ""                          # an object cut short, its arguments complete
                self._state = self._outside
            return self._ended
        text = self._take(self._scanned + end)
        if _members(text):
            self._state = self._section
            return True
        return self._no_call(text)


def _members(text: str) -> bool:
    """Whether ``text`` ends an object after a member of it."""
    text = text.lstrip(SPACE)
    if text == "}":
        return True
    try:
        read_json("{" + text[1:])
    except ValueError:
        return False
    return True


def _unwrapped(text: str) -> str:
    try:
        value = read_json(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else "{}" if value is None else text


def _call_in(text: str, *, needs_arguments: bool) -> tuple[str, str] | None:
    """Name and arguments of a call that is one whole JSON object; None when it is none."""
    try:
        value: Any = read_json(text)
    except ValueError:
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name or (needs_arguments and "arguments" not in value and "parameters" not in value):
        return None
    return name, arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments, ensure_ascii=False)
