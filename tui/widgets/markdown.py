"""An answer on the screen: one widget, however long the answer is, because the cost of a layout grows with the number of widgets."""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Size
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget

from edgeinfer.tui.rendering import GrowingMarkdown, Palette


class AnswerMarkdown(Widget):
    """Markdown that grows. Its text can be selected with the mouse."""

    COMPONENT_CLASSES = {"markdown--heading", "markdown--accent", "markdown--code", "markdown--muted"}

    def __init__(self) -> None:
        super().__init__()
        self._document = GrowingMarkdown()
        self._height = 0
        self._palette: Palette | None = None
        # A strip that is kept also keeps what Textual computed from it, so lines that cannot change are made into strips once.
        self._strips: dict[int, Strip] = {}
        self._strips_shape: tuple[int, Style] | None = None
        self.updates = 0
        """How many times the document was changed: what keeps drawing cheap is that this stays far below the number of tokens."""

    @property
    def source(self) -> str:
        """The Markdown so far, as the model wrote it."""
        return self._document.source

    def extend(self, text: str) -> None:
        """Add ``text`` at the end."""
        if not text:
            return
        self.updates += 1
        self._document.extend(text)
        height = self._measure(self.size.width) if self.size.width else -1
        # A new layout only when the height changes; otherwise a repaint of this widget does.
        self.refresh(layout=height != self._height)

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._palette = None
        self._strips.clear()

    def _lines(self, width: int) -> tuple[list[list[Segment]], list[list[Segment]]]:
        if self._palette is None:
            def colour(name: str) -> str:
                return self.get_component_styles(f"markdown--{name}").color.hex6

            self._palette = Palette(
                heading=colour("heading"), accent=colour("accent"), code=colour("code"), muted=colour("muted"),
                code_background=self.get_component_styles("markdown--code").background.hex6,
                code_theme="nord" if self.app.current_theme.dark else "friendly",
            )
        return self._document.lines(width, self._palette)

    def _measure(self, width: int) -> int:
        return sum(map(len, self._lines(width)))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        self._height = self._measure(width)
        return self._height

    def _strip(self, y: int, width: int, style: Style) -> Strip:
        if self._strips_shape != (width, style):
            self._strips_shape = (width, style)
            self._strips.clear()
        final, tail = self._lines(width)
        if y >= len(final):
            line = tail[y - len(final)] if y - len(final) < len(tail) else []
            return Strip(line).apply_style(style).crop_extend(0, width, style).apply_offsets(0, y)
        strip = self._strips.get(y)
        if strip is None:
            strip = self._strips[y] = Strip(final[y]).apply_style(style).crop_extend(0, width, style).apply_offsets(0, y)
        return strip

    def render_line(self, y: int) -> Strip:
        strip = self._strip(y, self.size.width, self.rich_style)
        selection = self.text_selection
        span = selection.get_span(y) if selection is not None else None
        if span is None:
            return strip
        # Cells and characters part at wide characters; the mark may then be a little off, the copied text is not.
        start, end = span[0], span[1] if span[1] >= 0 else strip.cell_length
        chosen = Style.from_color(bgcolor=self.screen.get_component_rich_style("screen--selection").bgcolor)
        return Strip.join([strip.crop(0, start), _mark(strip.crop(start, end), chosen), strip.crop(end)])

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        text = "\n".join("".join(segment.text for segment in line).rstrip() for lines in self._lines(self.size.width) for line in lines)
        return selection.extract(text), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()


def _mark(strip: Strip, style: Style) -> Strip:
    """The strip with ``style`` over its own."""
    return Strip([Segment(text, (own or Style()) + style, control) for text, own, control in strip])
