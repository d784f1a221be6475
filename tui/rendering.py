"""Markdown that grows, as lines of styled text: what streaming needs, without a widget for every block.

The one rule: a top-level block is final as soon as a later one has begun on a complete line. Final blocks are laid out once per width; only the
text after them, usually one paragraph, is parsed again when more arrives. So an update costs the length of the open block, not of the answer.

    source:  | final block | final block | ... | open block ........|
             '---------- _blocks ----------'   '------ _tail -------'
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.markdown import CodeBlock, Heading, HorizontalRule, Markdown, MarkdownElement
from rich.rule import Rule
from rich.segment import Segment
from rich.style import Style
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

from edgeinfer.tui.text import displayable

Line = list[Segment]

# HTML would be parsed and then dropped; as text it stays visible.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
_NARROWEST = 24               # columns a block is laid out for at least; nested quotes need some room to stand in
_LONGEST_COLOURED = 20_000    # characters of one code block; it is coloured anew while it grows, so the cost must end somewhere


@dataclass(frozen=True)
class Palette:
    """Colours of an answer, as ``#rrggbb``."""

    heading: str
    accent: str
    code: str
    code_background: str
    muted: str
    code_theme: str          # a pygments style

    def theme(self) -> Theme:
        """The Rich theme with these colours."""
        heading = Style.parse(f"bold {self.heading}")
        return Theme({
            **{f"markdown.h{level}": heading for level in range(1, 7)},
            "markdown.code": f"{self.code} on {self.code_background}",
            "markdown.code_block": f"on {self.code_background}",
            "markdown.item.bullet": self.accent, "markdown.item.number": self.accent,
            "markdown.block_quote": f"italic {self.muted}", "markdown.hr": self.muted,
            "markdown.table.header": f"bold {self.heading}", "markdown.table.border": self.muted,
            "markdown.link": f"underline {self.accent}", "markdown.link_url": f"underline {self.accent}",
        })


class _Code(CodeBlock):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip("\n")
        lexer = self.lexer_name if len(code) <= _LONGEST_COLOURED else "text"
        background = console.get_style("markdown.code_block").bgcolor
        yield Syntax(
            code, lexer, theme=self.theme, word_wrap=True, padding=(0, 1), tab_size=4, background_color=background.name if background else None,
        )


class _Rule(HorizontalRule):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Rule(style="markdown.hr", characters="─")


class _Heading(Heading):
    LEVEL_ALIGN: ClassVar[dict[str, JustifyMethod]] = {}          # all at the left, the first level too


class _Document(Markdown):
    """Rich's Markdown over tokens that are parsed already."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "heading_open": _Heading, "fence": _Code, "code_block": _Code, "hr": _Rule}

    def __init__(self, tokens: list[Token], code_theme: str) -> None:
        # Links show their address: an answer's link may say one thing and lead elsewhere.
        super().__init__("", code_theme=code_theme, hyperlinks=False)
        self.parsed = tokens


def _keep_line_ends(tokens: Iterable[Token]) -> None:
    """A line end that the model wrote stays one: verse and lists without markers are common in answers."""
    for token in tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"


@dataclass(frozen=True)
class Block:
    """One top-level block: its tokens, none when it is only link definitions, and the source they came from."""

    tokens: list[Token]
    source: str


def _starts(tokens: Iterable[Token]) -> list[int]:
    """The first lines of the top-level blocks after the first, which begins at 0 with whatever stands before it."""
    return [token.map[0] for token in tokens if token.level == 0 and token.nesting >= 0 and token.map][1:]


def _split(source: str, starts: Sequence[int]) -> list[str]:
    lines = source.splitlines(keepends=True)
    return ["".join(lines[start:end]) for start, end in zip([0, *starts], [*starts, len(lines)], strict=True)]


def _parse(source: str, environment: dict[str, object]) -> Block:
    tokens = _PARSER.parse(source, environment)
    _keep_line_ends(tokens)
    return Block(tokens, source)


class GrowingMarkdown:
    """A Markdown document that is extended at its end and laid out as lines of a given width."""

    def __init__(self) -> None:
        self.source = ""
        """All text so far, as the model wrote it."""
        self._environment: dict[str, object] = {}    # link definitions, which may stand blocks before their use
        self._blocks: list[Block] = []               # final
        self._tail = ""
        self._final_lines: list[Line] = []
        self._laid_out = 0                           # how many of _blocks are in _final_lines
        self._tail_lines: list[Line] | None = None
        self._console: Console | None = None
        self._shape: tuple[int, Palette] | None = None

    def extend(self, text: str) -> None:
        """Add ``text`` at the end."""
        self.source += text
        self._tail += displayable(text)
        self._tail_lines = None
        self._settle()

    def _settle(self) -> None:
        """Move the blocks of the tail that can no longer change to the final ones."""
        complete = self._tail[: self._tail.rfind("\n") + 1]
        if complete.count("\n") < 2:
            return
        *final, open_block = _split(complete, _starts(_PARSER.parse(complete, copy.deepcopy(self._environment))))
        # Each by itself, so that its links know the definitions before it and not those after it, however the text came in.
        self._blocks += [_parse(source, self._environment) for source in final]
        self._tail = open_block + self._tail[len(complete):]

    def lines(self, width: int, palette: Palette) -> tuple[list[Line], list[Line]]:
        """The document at this width: lines that will not change while width and palette stay, and those of the open block.

        Both are valid until the next call of any method.
        """
        if self._shape != (width, palette):
            self._shape = (width, palette)
            self._console = Console(
                file=io.StringIO(), force_terminal=True, color_system="truecolor", width=max(width, _NARROWEST), theme=palette.theme(), legacy_windows=False,
            )
            self._final_lines, self._laid_out, self._tail_lines = [], 0, None
        while self._laid_out < len(self._blocks):
            self._append(self._final_lines, self._blocks[self._laid_out], palette)
            self._laid_out += 1
        if self._tail_lines is None:
            self._tail_lines = []
            # A copy: what looks like a link definition may still grow into another one.
            environment = copy.deepcopy(self._environment)
            for source in _split(self._tail, _starts(_PARSER.parse(self._tail, copy.deepcopy(environment)))):
                self._append(self._tail_lines, _parse(source, environment), palette)
            if self._final_lines and self._tail_lines:
                self._tail_lines.insert(0, [])
        return self._final_lines, self._tail_lines

    def _append(self, lines: list[Line], block: Block, palette: Palette) -> None:
        """Lay a block out below ``lines``, one empty line between the two."""
        width = self._console.width
        depth = max((token.level for token in block.tokens), default=0)
        # Quotes and lists nested deeper than there are columns for would vanish: they are shown as they were written.
        shown = _Document(block.tokens, palette.code_theme) if depth <= width // 6 else Text(block.source.rstrip("\n"))
        new = self._console.render_lines(shown, pad=False)
        while new and _is_blank(new[0]):
            new.pop(0)
        while new and _is_blank(new[-1]):
            new.pop()
        if lines and new:
            lines.append([])
        lines += new


def _is_blank(line: Line) -> bool:
    """Nothing to see: only spaces, and none of them coloured."""
    return all(not segment.text.strip() and not (segment.style and segment.style.bgcolor) for segment in line)
