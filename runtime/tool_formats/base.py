"""What all parsers of tool calls share: text outside calls, tags that may still become whole, and text that only looked like a call.

One rule keeps streaming and whole parsing equal: a decision is taken as soon as the text so far decides it, and on that text alone, never on how it
was divided on its way. Text that is not decided yet is held back. White space beside a call belongs to the call.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from edgeinfer.runtime.deltas import ContentDelta, ToolCallDelta

SPACE = " \t\r\n"


def open_start(text: str, tags: tuple[str, ...]) -> int:
    """Where the longest tail of ``text`` starts that is the beginning of a tag, yet not a whole one; len(text) when there is none."""
    longest, firsts = _shape(tags)
    for start in range(max(0, len(text) - longest + 1), len(text)):
        if text[start] in firsts and any(len(tag) > len(text) - start and tag.startswith(text[start:]) for tag in tags):
            return start
    return len(text)


@lru_cache(maxsize=256)
def _shape(tags: tuple[str, ...]) -> tuple[int, frozenset[str]]:
    return max(map(len, tags), default=0), frozenset(tag[0] for tag in tags)


def first_tag(text: str, tags: Iterable[str]) -> tuple[int, str] | None:
    """The place and name of the tag that starts first in ``text``."""
    return min(((at, tag) for tag in tags if (at := text.find(tag)) >= 0), default=None)


def read_json(text: str) -> Any:
    """The value that ``text`` spells. Raises `ValueError` for anything else, "NaN" and numbers beyond all bounds too."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except RecursionError as error:
        raise ValueError("too deep") from error
    return value


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class CallParser:
    """A machine over one answer's text. ``push`` and ``finish`` return what has become certain.

    tags: texts that may open a call, none the beginning of another. A subclass gives `_opened_by` and further states: methods that take from
    ``_text`` what they can decide and return whether another state should look at the rest; where ``_ended`` is set they must decide.
    """

    def __init__(self, tags: tuple[str, ...], new_id: Callable[[], str] = new_call_id):
        self.calls = 0
        self._tags = tags
        self._new_id = new_id
        self._text = ""                                  # has come, is not decided
        self._raw = ""                                   # of a call that is not certain yet: what was taken since its tag
        self._space = ""                                 # content, unless a call follows
        self._beside_call = False
        self._ended = False
        self._state: Callable[[], bool] = self._outside
        self._deltas: list[ContentDelta | ToolCallDelta] = []

    @property
    def call_ended(self) -> bool:
        """A call is complete, and no other has begun."""
        return self.calls > 0 and self._state in self._after_calls()

    def _after_calls(self) -> tuple[Callable[[], bool], ...]:
        return (self._outside,)

    def push(self, text: str) -> list[ContentDelta | ToolCallDelta]:
        self._text += text
        return self._run()

    def finish(self) -> list[ContentDelta | ToolCallDelta]:
        """The answer is over: what was held back comes out, as content or as more of a call that had begun."""
        self._ended = True
        deltas = self._run()
        if self._space:
            deltas.append(ContentDelta(self._space))
            self._space = ""
        return deltas

    def _run(self) -> list[ContentDelta | ToolCallDelta]:
        while self._state():
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    # --------------------------------------------------------------------------------------------------------------- states

    def _outside(self) -> bool:
        found = first_tag(self._text, self._tags) if self._text else None
        if found is None:
            start = len(self._text) if self._ended else open_start(self._text, self._tags)
            self._content(self._take(start))
            return False
        at, tag = found
        self._content(self._take(at))
        self._raw = self._take(len(tag))
        self._state = self._opened_by(tag)
        return True

    def _opened_by(self, tag: str) -> Callable[[], bool]:
        raise NotImplementedError

    # --------------------------------------------------------------------------------------------------------- for subclasses

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        return taken

    def _no_call(self, more: str = "") -> bool:
        """What began like a call was none: it and ``more`` are content. The rest of the text may still hold calls."""
        raw, self._raw = self._raw, ""
        self._content(raw + more)
        self._state = self._outside
        return True

    def _content(self, text: str) -> None:
        if self._beside_call:
            text = text.lstrip(SPACE)
            self._beside_call = not text
        text = self._space + text
        said = text.rstrip(SPACE)
        self._space = text[len(said):]
        if said:
            self._deltas.append(ContentDelta(said))

    def _begin(self, name: str, arguments: str = "") -> None:
        """A call is certain."""
        self._raw = self._space = ""
        self._beside_call = True
        self.calls += 1
        self._deltas.append(ToolCallDelta(self.calls - 1, self._new_id(), name, arguments))

    def _more(self, arguments: str) -> None:
        """More arguments of the newest call."""
        if arguments:
            self._deltas.append(ToolCallDelta(self.calls - 1, None, None, arguments))
