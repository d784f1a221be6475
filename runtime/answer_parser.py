"""An answer's text, split into thinking, calls of tools, and content while it comes.

Every character of the text comes out: as content, as reasoning, or as the name, arguments and syntax of a call. Only the tags themselves and the
white space beside them go, and only where they are what they look like. See `edgeinfer.runtime.tool_formats.base` for the rule of streaming.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from edgeinfer.runtime.answer_format import AnswerFormat, detect_format
from edgeinfer.runtime.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from edgeinfer.runtime.tool_formats.base import SPACE, open_start

__all__ = ["AnswerFormat", "AnswerParser", "ContentDelta", "Delta", "ReasoningDelta", "ToolCallDelta", "detect_format"]


class _Parser(Protocol):
    calls: int

    @property
    def call_ended(self) -> bool: ...

    def push(self, text: str) -> Sequence[Delta]: ...

    def finish(self) -> Sequence[Delta]: ...


class _Plain:
    """No tools were offered: nothing is a call."""

    calls = 0
    call_ended = False

    def push(self, text: str) -> list[Delta]:
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[Delta]:
        return []


class AnswerParser:
    """For one answer in ``format``.

    tools: the request's tools (True where they are not at hand: parameters in XML are strings then); False: nothing is taken for a call.
    reasoning: split thinking off; otherwise it stays content, with its tags.
    thinking: the prompt ended inside an opened block of thinking.

    An answer cut short: what looks like a call whose arguments have not begun is content, a call that has begun keeps the arguments it got,
    and thinking without an end is thinking.
    """

    def __init__(
        self, format: AnswerFormat, *, tools: bool | Sequence[Mapping[str, Any]], reasoning: bool, thinking: bool = False
    ):
        definitions = () if isinstance(tools, bool) else tools
        self._answer: _Parser = format.tools.parser(definitions) if tools else _Plain()
        self._text = ""
        if format.reasoning is None or not reasoning:
            self._open = self._close = ""
            self._state = "answer"
        else:
            self._open, self._close = format.reasoning
            self._state = "opened" if thinking else "start"

    @property
    def calls(self) -> int:
        """Calls of tools so far."""
        return self._answer.calls

    @property
    def call_ended(self) -> bool:
        """A call is complete, and no other has begun."""
        return self._answer.call_ended

    def push(self, text: str) -> list[Delta]:
        """What ``text`` makes certain."""
        self._text += text
        return self._split(ended=False)

    def finish(self) -> list[Delta]:
        """What was held back. Afterwards nothing may be pushed."""
        return [*self._split(ended=True), *self._answer.finish()]

    def _split(self, ended: bool) -> list[Delta]:
        deltas: list[Delta] = []
        while self._state != "answer":
            before = self._state
            getattr(self, f"_{before}")(deltas, ended)
            if self._state == before:
                return deltas
        text, self._text = self._text, ""
        return [*deltas, *self._answer.push(text)]

    # Each looks at the text and leaves the state it is in, unless more text is needed for that.

    def _start(self, deltas: list[Delta], ended: bool) -> None:
        """Thinking comes first or not at all."""
        text = self._text.lstrip(SPACE)
        if text.startswith(self._open):
            self._text = text[len(self._open):]
            self._state = "opened"
        elif ended or not self._open.startswith(text):
            self._state = "answer"

    def _opened(self, deltas: list[Delta], ended: bool) -> None:
        """White space, or the tag that the prompt had already."""
        text = self._text.lstrip(SPACE)
        if text.startswith(self._open):
            self._text = text[len(self._open):]
            self._state = "begun"
        elif ended or (text and not self._open.startswith(text)):
            self._state = "begun"

    def _begun(self, deltas: list[Delta], ended: bool) -> None:
        """Nothing but white space was thought yet."""
        self._text = self._text.lstrip(SPACE)
        if self._text or ended:
            self._state = "thinking"

    def _thinking(self, deltas: list[Delta], ended: bool) -> None:
        at = self._text.find(self._close)
        if at >= 0:
            thought, self._text = self._text[:at].rstrip(SPACE), self._text[at + len(self._close):]
            self._state = "thought"
        else:
            keep = len(self._text) if ended else open_start(self._text, (self._close,))
            thought = self._text[:keep] if ended else self._text[:keep].rstrip(SPACE)
            self._text = self._text[len(thought):]
            if ended:
                self._state = "answer"
        if thought:
            deltas.append(ReasoningDelta(thought))

    def _thought(self, deltas: list[Delta], ended: bool) -> None:
        """White space after the closing tag belongs to it."""
        self._text = self._text.lstrip(SPACE)
        if self._text or ended:
            self._state = "answer"
