"""The live dashboard of a running server."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import ClassVar

from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Footer

from edgeinfer.errors import EdgeInferError
from edgeinfer.runtime.readings import ServerReadings, Snapshot
from edgeinfer.tui import themes
from edgeinfer.tui.monitor_history import History
from edgeinfer.tui.monitor_text import Row, server_rows
from edgeinfer.tui.text import displayable

_STYLES = {"title": "bold $foreground", "row": "", "alarm": "bold $text-error"}


class ConnectionLine(Widget):
    """Whose figures these are, and whether they are fresh."""

    ALLOW_SELECT = False

    url: reactive[str] = reactive("", layout=True)
    problem: reactive[str] = reactive("", layout=True)
    """Why the server did not answer the last time; empty when it did."""
    connected: reactive[bool] = reactive(False, layout=True)
    """It has answered at least once."""
    age: reactive[int] = reactive(0, layout=True)
    """Seconds since it last did."""

    def render(self) -> Content:
        if not self.problem:
            return Content.assemble((displayable(self.url), "bold $foreground"), "  connected" if self.connected else "  connecting")
        last = f" The figures are {self.age:,} s old." if self.connected else ""
        return Content.assemble((f"! {displayable(self.problem)}", "$text-error"), f"{last} Trying again.")


class Block(Widget):
    """The rows of one model, or of the machine."""

    rows: reactive[tuple[Row, ...]] = reactive(())

    def __init__(self, rows: tuple[Row, ...]) -> None:
        super().__init__()
        self.set_reactive(Block.rows, rows)
        self.watch_rows(rows)

    def watch_rows(self, rows: tuple[Row, ...]) -> None:
        """As tall as there are rows."""
        self.styles.height = max(1, len(rows))

    def render(self) -> Content:
        return Content("\n").join(Content.styled(text, _STYLES[kind]) if _STYLES[kind] else Content(text) for kind, text in self.rows)


class MonitorApp(App[None]):
    """Shows what ``look`` returns, about every ``interval`` seconds. A look that raises an `EdgeInferError` is said and tried again."""

    CSS_PATH = "monitor.tcss"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("ctrl+q", "quit", show=False, priority=True),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]

    def __init__(self, look: Callable[[], Awaitable[Snapshot]], *, url: str, interval: float = 1.0, theme: str | None = None) -> None:
        super().__init__()
        for known in (themes.DARK, themes.LIGHT):
            self.register_theme(known)
        self.theme = theme if theme in self.available_themes else themes.preferred(os.environ)
        self._look = look
        self._url = url
        self._interval = interval
        self._history = History()
        self._readings: ServerReadings | None = None
        self._seen = 0.0
        self._showing = asyncio.Lock()                   # a look and a change of the window's size may meet

    def compose(self) -> ComposeResult:
        yield ConnectionLine()
        yield VerticalScroll()
        yield Footer()

    def on_mount(self) -> None:
        self._line.url = self._url
        self.query_one(VerticalScroll).focus()
        self._watch()

    @property
    def _line(self) -> ConnectionLine:
        return self.query_one(ConnectionLine)

    @work
    async def _watch(self) -> None:
        while True:
            began = time.monotonic()
            try:
                snapshot = await self._look()
            except EdgeInferError as error:
                self._history.miss()
                self._line.problem = str(error)
                self._line.age = round(time.monotonic() - self._seen)
            else:
                self._seen = time.monotonic()
                self._readings = self._history.add(snapshot)
                self._line.problem, self._line.connected = "", True
            await self._show()
            await asyncio.sleep(max(0.05, self._interval - (time.monotonic() - began)))

    async def on_resize(self) -> None:
        await self._show()

    async def _show(self) -> None:
        """Put the newest readings on the screen; blocks are kept, so that a reader's place in a long list is too."""
        async with self._showing:
            view = self.query_one(VerticalScroll)
            view.set_class(bool(self._line.problem), "stale")
            if self._readings is None:
                return
            blocks = server_rows(self._readings, max(20, self.size.width - 5), self._history)
            shown = list(view.query(Block))
            for widget in shown[len(blocks):]:
                await widget.remove()
            await view.mount_all(Block(tuple(rows)) for rows in blocks[len(shown):])
            for widget, rows in zip(shown, blocks):
                widget.rows = tuple(rows)
