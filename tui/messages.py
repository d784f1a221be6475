"""What the widgets tell the application. Data goes down to widgets as attributes; events come up as these messages."""

from __future__ import annotations

from dataclasses import dataclass

from textual.message import Message


@dataclass
class PromptSubmitted(Message):
    """The reader pressed Enter on a draft that is not blank, and the draft left the editor. `text` is the draft as it was."""

    text: str


@dataclass
class ScrollRequested(Message):
    """Page keys were pressed in an editor that had no use for them. ``pages`` is negative upwards."""

    pages: int
