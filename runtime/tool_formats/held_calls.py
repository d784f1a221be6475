"""Calls that are read when their closing tag has come: Python's syntax (LFM2) and Gemma's own. Nothing of them streams."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from typing import Any

from edgeinfer.runtime.tool_formats.base import SPACE, CallParser, new_call_id, open_start, read_json

Call = tuple[str, str]                                   # name, and arguments as JSON text
Reader = Callable[[str], list[Call] | None]              # the calls between two tags; None where it is no call


class HeldCalls(CallParser):
    """Holds what follows an opening tag until the closing one, and lets ``read`` say what it is. Content where it is nothing, or cut short.

    quote: a marker around strings; a closing tag within a string closes nothing.
    """

    def __init__(self, sections: Mapping[str, str], read: Reader, *, quote: str = "", new_id: Callable[[], str] = new_call_id):
        super().__init__(tuple(sections), new_id)
        self._sections = sections
        self._read = read
        self._quote = quote
        self._close = ""
        self._searched = 0                               # characters of `_text` in which no closing tag begins

    def _opened_by(self, tag: str) -> Callable[[], bool]:
        self._close = self._sections[tag]
        self._searched = 0
        return self._body

    def _body(self) -> bool:
        at = self._text.find(self._close, self._searched)
        while at >= 0 and self._quote and self._text.count(self._quote, 0, at) % 2:
            self._searched = at + 1
            at = self._text.find(self._close, self._searched)
        if at < 0:
            self._searched = max(self._searched, open_start(self._text, (self._close,)))
            return self._no_call() if self._ended else False
        calls = self._read(self._text[:at])
        if not calls:
            return self._no_call()
        for call in calls:
            self._begin(*call)
        self._take(at + len(self._close))
        self._state = self._outside
        return True


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def python_calls(text: str) -> list[Call] | None:
    """``[f(a=1, b="x"), g()]``: names with literal keyword arguments. Nothing is executed."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, (ast.List, ast.Tuple)) else [tree]
        calls = []
        for node in nodes:
            if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
                return None
            calls.append((ast.unparse(node.func), _json({keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords})))
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None
    return calls


def gemma_calls(quote: str) -> Reader:
    """``call:f{city:<q>Paris<q>,days:3}``, where ``quote`` is the marker around strings."""

    def read(text: str) -> list[Call] | None:
        text = text.strip(SPACE)
        name, brace, _ = text.removeprefix("call:").partition("{")
        if not text.startswith("call:") or not brace or not name.strip():
            return None
        try:
            value, end = _Gemma(text, quote).value(len("call:") + len(name))
        except (ValueError, IndexError, RecursionError):
            return None
        return [(name.strip(), _json(value))] if not text[end:].strip(SPACE) else None

    return read


class _Gemma:
    """Recursive descent over one value: objects with bare or quoted keys, lists, quoted strings, and JSON's other literals."""

    def __init__(self, text: str, quote: str):
        self._text = text
        self._quote = quote

    def value(self, at: int) -> tuple[Any, int]:
        text = self._text
        at = self._space(at)
        if text.startswith(self._quote, at):
            return self._string(at)
        if text[at] == "{":
            return self._object(at + 1)
        if text[at] == "[":
            return self._list(at + 1)
        end = at
        while end < len(text) and text[end] not in ",}]":
            end += 1
        return read_json(text[at:end].strip()), end

    def _object(self, at: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        at = self._space(at)
        while self._text[at] != "}":
            if self._text.startswith(self._quote, at):
                key, at = self._string(at)
                at = self._text.index(":", at)
            else:
                colon = self._text.index(":", at)
                key, at = self._text[at:colon].strip(), colon
            found[key], at = self.value(at + 1)
            at = self._next(at, "}")
        return found, at + 1

    def _list(self, at: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        at = self._space(at)
        while self._text[at] != "]":
            value, at = self.value(at)
            found.append(value)
            at = self._next(at, "]")
        return found, at + 1

    def _string(self, at: int) -> tuple[str, int]:
        start = at + len(self._quote)
        end = self._text.index(self._quote, start)
        return self._text[start:end], end + len(self._quote)

    def _next(self, at: int, close: str) -> int:
        at = self._space(at)
        if self._text[at] == ",":
            return self._space(at + 1)
        if self._text[at] != close:
            raise ValueError(at)
        return at

    def _space(self, at: int) -> int:
        while at < len(self._text) and self._text[at] in SPACE:
            at += 1
        return at
