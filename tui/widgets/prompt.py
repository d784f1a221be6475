"""The editor for the next message."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import TextArea

from edgeinfer.tui.messages import PromptSubmitted, ScrollRequested
from edgeinfer.tui.text import normalise_newlines


class PromptEditor(TextArea):
    """Enter sends, Ctrl+J makes a new line, a paste of any size is part of the draft. Up in an empty draft recalls what was sent before."""

    BINDINGS: ClassVar[list[BindingType]] = [
        # For the footer; the keys are taken in `_on_key`. A priority binding would run in the application's queue and overtake the characters
        # typed just before it, which are still in this widget's.
        Binding("enter", "submit", "Send", key_display="⏎"),
        Binding("ctrl+j,alt+enter,shift+enter", "newline", "New line", key_display="^J"),
    ]

    def __init__(self) -> None:
        super().__init__(
            soft_wrap=True, show_line_numbers=False, tab_behavior="focus", highlight_cursor_line=False, compact=True,
            placeholder=Content("Ask something, or /help"),
        )
        # A blinking cursor redraws for ever, which costs the engine's cores.
        self.cursor_blink = False
        self.sent: list[str] = []
        """Messages that Up recalls, oldest first."""
        self._recalled: int | None = None

    async def _on_key(self, event: events.Key) -> None:
        action = {"enter": self.action_submit, **dict.fromkeys(("ctrl+j", "alt+enter", "shift+enter"), self.action_newline)}.get(event.key)
        if action is not None:
            event.stop()
            event.prevent_default()
            action()

    def action_submit(self) -> None:
        """Take the draft out and offer it. What is typed from now on belongs to the next one; `give_back` undoes it."""
        if self.text.strip():
            text = self.text
            self._recalled = None
            self.load_text("")
            self.post_message(PromptSubmitted(text))

    def action_newline(self) -> None:
        self.insert("\n", maintain_selection_offset=False)
        self.scroll_cursor_visible()

    def remember(self, text: str) -> None:
        """Let Up recall this message."""
        if not self.sent or self.sent[-1] != text:
            self.sent.append(text)

    def give_back(self, text: str) -> None:
        """The offer was declined: the draft is as if Enter had not been pressed."""
        self._show(text + self.text)

    def restore(self, text: str) -> None:
        """Put a text back that could not be answered, unless something else has been begun meanwhile."""
        if not self.text.strip():
            self._show(text)

    def _show(self, text: str) -> None:
        self.load_text(text)
        self.move_cursor(self.document.end)

    @property
    def _browsing(self) -> bool:
        """Whether the draft is an unchanged recalled message (or empty, where browsing starts)."""
        return not self.text or (self._recalled is not None and self.text == self.sent[self._recalled])

    def action_cursor_up(self, select: bool = False) -> None:
        if select or not self._browsing or not self.sent or (self.text and self.cursor_location[0] > 0):
            super().action_cursor_up(select)
            return
        self._recalled = len(self.sent) - 1 if self._recalled is None or not self.text else max(0, self._recalled - 1)
        self._show(self.sent[self._recalled])
        self.move_cursor((0, 0))

    def action_cursor_down(self, select: bool = False) -> None:
        if select or not self.text or not self._browsing or self.cursor_location[0] < self.document.line_count - 1:
            super().action_cursor_down(select)
            return
        place = self._recalled or 0
        self._recalled = place + 1 if place + 1 < len(self.sent) else None
        self._show(self.sent[self._recalled] if self._recalled is not None else "")

    def action_cursor_page_up(self) -> None:
        self._page(-1)

    def action_cursor_page_down(self) -> None:
        self._page(1)

    def _page(self, pages: int) -> None:
        if self.virtual_size.height > self.size.height:
            super().action_cursor_page_up() if pages < 0 else super().action_cursor_page_down()
        else:
            self.post_message(ScrollRequested(pages))

    async def _on_paste(self, event: events.Paste) -> None:
        # The base class inserts what the terminal sent, and that has CR for line ends.
        event.text = normalise_newlines(event.text)
        await super()._on_paste(event)
        event.prevent_default()
        event.stop()
