"""What an answer's text turned out to be, piece by piece: words for the user, thinking, or a call of a tool."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ContentDelta:
    """More of what is said to the user."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class ToolCallDelta:
    """More of the call number ``index`` (from 0). The first delta of a call has its id and name; the arguments of all joined are its JSON text."""

    index: int
    id: str | None
    name: str | None
    arguments: str


Delta = ContentDelta | ReasoningDelta | ToolCallDelta
