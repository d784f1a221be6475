"""Textual's Markdown, made safe and cheap for text that a model is writing at this moment."""

from __future__ import annotations

from markdown_it import MarkdownIt
from textual.content import Content
from textual.highlight import highlight
from textual.widgets import Markdown
from textual.widgets._markdown import MarkdownFence, MarkdownTable, MarkdownTableContent

from edgeinfer.tui.messages import LinkChosen
from edgeinfer.tui.text import displayable

# HTML would be parsed and then dropped; as text it stays visible. One parser for all: it keeps no state between documents.
_PARSER = MarkdownIt("gfm-like", {"html": False, "linkify": False})
_LONGEST_COLOURED = 20_000    # characters of one code block; colouring repeats while it grows, so its cost must end somewhere


class _Fence(MarkdownFence):
    """Code block that colours only a language it was told: guessing tries every lexer there is, on each update."""

    @classmethod
    def highlight(cls, code: str, language: str, ansi: bool = False, dark: bool = False) -> Content:
        words = language.split()
        if not words or len(code) > _LONGEST_COLOURED:
            return Content("\n".join(line.expandtabs(4) for line in code.split("\n")))
        return highlight(code, language=words[0], tab_size=4)


class _TableContent(MarkdownTableContent):
    """Table cells without tooltips: those would send the cell's text through markup."""

    def on_mount(self) -> None:
        super().on_mount()
        self._drop_tooltips()

    async def _update_rows(self, updated_rows: list[list[Content]]) -> None:
        if updated_rows:
            await super()._update_rows(updated_rows)
            self._drop_tooltips()

    def _drop_tooltips(self) -> None:
        for cell in self.children:
            cell.tooltip = None


class _Table(MarkdownTable):
    def compose(self):
        self._headers, self._rows = self._get_headers_and_rows()
        yield _TableContent(self._headers, self._rows)


class AnswerMarkdown(Markdown):
    """A Markdown document that grows. Only its last block is parsed again on `append`."""

    BLOCKS = {**Markdown.BLOCKS, "fence": _Fence, "code_block": _Fence, "table_open": _Table}

    def __init__(self) -> None:
        super().__init__(parser_factory=lambda: _PARSER, open_links=False)
        self.updates = 0
        """How many times the document was changed: what keeps drawing cheap is that this stays far below the number of tokens."""

    async def extend(self, text: str) -> None:
        """Add ``text`` at the end."""
        if text:
            self.updates += 1
            await self.append(displayable(text))

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        event.stop()
        self.post_message(LinkChosen(event.href))
