"""The two lines of instruments: the title above the conversation and the live line below it."""

from __future__ import annotations

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from edgeinfer.runtime.values import BackendInfo
from edgeinfer.tui.readings import Phase, Readings, activity, context_gauge, details, engine_parts, fit
from edgeinfer.tui.text import displayable

class TitleLine(Widget):
    """Model, engine, device, quantisation and kv type; at the right how full the context is."""

    ALLOW_SELECT = False

    model: reactive[str] = reactive("")
    """The model's name."""
    info: reactive[BackendInfo | None] = reactive(None)
    """The loaded engine, once there is one."""
    context_used: reactive[int] = reactive(0)
    """Tokens of the context that are taken."""

    def render(self) -> Content:
        width = self.size.width
        gauge = context_gauge(self.context_used, self.info.n_ctx if self.info else 0)
        parts = list(map(displayable, engine_parts(self.info)))
        room = max(width - len(gauge) - 2, 8)
        # A long name gives way to what runs it, down to a quarter of the line.
        longest = max(room - sum(len(part) + 3 for part in parts), width // 4)
        name = displayable(self.model).replace("\n", " ")
        name = name if len(name) <= longest else name[: longest - 1] + "…"
        rest = fit([name, *parts], room, " · ")[len(name):]
        padding = " " * max(width - len(name) - len(rest) - len(gauge), 0)
        return Content.assemble((name, "bold $foreground"), rest, padding, gauge)


class StatusLine(Widget):
    """The live line. It shows `readings` and computes nothing."""

    ALLOW_SELECT = False

    readings: reactive[Readings] = reactive(Readings())
    """The figures to show."""

    def render(self) -> Content:
        readings = self.readings
        resting = readings.phase is Phase.IDLE
        head = ("○ " if resting else "● ") + activity(readings)
        line = fit([head, *details(readings)], self.size.width, "  ·  " if self.size.width >= 100 else " · ")
        return Content.assemble((line[: len(head)], "" if resting else "$accent"), line[len(head):])
