"""The scrolling list of messages."""

from __future__ import annotations

from textual.containers import VerticalScroll
from textual.widget import Widget

from edgeinfer.tui.widgets.message import AnswerMessage, Notice, UserMessage


class ConversationView(VerticalScroll, can_focus=False):
    """Follows the newest text while the reader is at the bottom and stays put when they have scrolled up."""

    def on_mount(self) -> None:
        self.anchor()

    async def _add(self, message: Widget) -> None:
        await self.mount(message)
        self.anchor()

    async def add_user(self, text: str) -> None:
        """Show a message of the reader and go to the bottom."""
        await self._add(UserMessage(text))

    async def add_answer(self) -> AnswerMessage:
        """Show an empty answer and return it, to be filled."""
        answer = AnswerMessage()
        await self._add(answer)
        return answer

    async def add_notice(self, text: str, kind: str = "info") -> None:
        """Show a word from the application; ``kind`` is "info" or "error"."""
        await self._add(Notice(text, kind))

    async def drop_last_answer(self) -> None:
        """Take away the last answer, and what the application said after it."""
        for child in reversed(list(self.children)):
            if isinstance(child, UserMessage):
                break
            await child.remove()

    async def clear(self) -> None:
        """Take away everything."""
        await self.remove_children()

    def scroll_pages(self, pages: int) -> None:
        """Scroll by whole pages, negative upwards."""
        for _ in range(abs(pages)):
            self.scroll_page_down(animate=False) if pages > 0 else self.scroll_page_up(animate=False)
