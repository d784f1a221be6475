"""One message of the conversation: what the reader wrote, what the model answers, what the application says."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from edgeinfer.tui.text import displayable
from edgeinfer.tui.widgets.markdown import AnswerMarkdown

_FOLDED_LINES = 12
_FOLDED_CHARACTERS = 2_000


class UserMessage(Static):
    """The reader's words exactly as written. A long one shows its beginning until it is clicked."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.folded = True
        super().__init__(self._shown(), markup=False, classes="user")

    def _shown(self) -> Content:
        text = displayable(self.text)
        lines = text.split("\n")
        if len(lines) <= _FOLDED_LINES + 2 and len(text) <= _FOLDED_CHARACTERS + 200:
            return Content(text)
        if not self.folded:
            return Content.assemble(text, "\n", ("click to fold", "dim"))
        head = "\n".join(lines[:_FOLDED_LINES])[:_FOLDED_CHARACTERS]
        return Content.assemble(head, "\n", (f"… {len(lines):,} lines, {len(text):,} characters; click to see all", "dim"))

    def on_click(self) -> None:
        if self.screen.get_selected_text():
            return
        self.folded = not self.folded
        self.update(self._shown())


class AnswerMessage(Vertical):
    """The model's answer: Markdown that grows, and a line below it once it has ended."""

    def __init__(self) -> None:
        super().__init__(classes="answer")
        self.markdown = AnswerMarkdown()
        self._footnote = Static(Content("…"), markup=False, classes="footnote")

    def compose(self) -> ComposeResult:
        yield self.markdown
        yield self._footnote

    def extend(self, text: str) -> None:
        """Add ``text`` to the answer."""
        if text:
            self._footnote.display = False
            self.markdown.extend(text)

    def end(self, footnote: str) -> None:
        """The answer is complete, or will not be; ``footnote`` says which."""
        self._footnote.update(Content(displayable(footnote)))
        self._footnote.display = True


class Notice(Static):
    """A word from the application itself. ``kind`` is "info" or "error"."""

    def __init__(self, text: str, kind: str = "info") -> None:
        super().__init__(Content(displayable(text)), markup=False, classes=f"notice {kind}")
