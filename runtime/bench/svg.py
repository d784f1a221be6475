"""The charts of the report page as SVG text. Colours are CSS classes, so that one drawing serves light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH = 860
_LABEL = 150                             # room for names left of the drawing
_VALUE = 140                             # and for figures right of it
_ROW = 30
_AXIS = 26


def bars(title: str, rows: Sequence[tuple[str, float, str]], *, css: str = "a") -> str:
    """Horizontal bars: (name, length, what to write behind it)."""
    longest = max((value for _, value, _ in rows), default=0.0)
    body = []
    for index, (name, value, text) in enumerate(rows):
        width = _scaled(value, longest)
        body.append(_name(index, name) + _rect(_LABEL, index, width, css) + _text(_LABEL + width + 8, _middle(index), text, "v"))
    return _svg(title, _ROW * len(rows), body)


def layers(title: str, rows: Sequence[tuple[str, Sequence[float], str]]) -> str:
    """Horizontal bars with layers from 0 to each of the ascending values (percentiles), strongest first."""
    longest = max((max(values) for _, values, _ in rows), default=0.0)
    body = []
    for index, (name, values, text) in enumerate(rows):
        widths = [_scaled(value, longest) for value in values]
        drawn = [_rect(_LABEL, index, width, f"l{layer}") for layer, width in reversed(list(enumerate(widths)))]
        body.append(_name(index, name) + "".join(drawn) + _text(_LABEL + max(widths) + 8, _middle(index), text, "v"))
    return _svg(title, _ROW * len(rows), body)


def stacks(title: str, rows: Sequence[tuple[str, Sequence[tuple[str, float]], str]]) -> str:
    """Horizontal bars made of parts: (part, length)."""
    longest = max((sum(length for _, length in parts) for _, parts, _ in rows), default=0.0)
    body = []
    for index, (name, parts, text) in enumerate(rows):
        left = float(_LABEL)
        drawn = []
        for number, (part, length) in enumerate(parts):
            width = _scaled(length, longest)
            drawn.append(_rect(left, index, width, f"s{number}", tip=f"{part}: {length:.2f}"))
            left += width
        body.append(_name(index, name) + "".join(drawn) + _text(left + 8, _middle(index), text, "v"))
    return _svg(title, _ROW * len(rows), body)


def lines(title: str, xs: Sequence[float], series: Sequence[tuple[str, Sequence[float]]], *, x_label: str) -> str:
    """Lines with a point at each x; x on a scale of its logarithm, y from 0."""
    height = 220
    top = _nice(max((max(ys) for _, ys in series), default=0.0))
    low, high = math.log(min(xs)), math.log(max(xs))
    span = high - low or 1.0
    right = WIDTH - _VALUE

    def x_of(x: float) -> float:
        return 60 + (right - 60) * (math.log(x) - low) / span

    def y_of(y: float) -> float:
        return height - (height - 14) * y / top if top else float(height)

    body = []
    for y in (0.0, top / 2, top):
        body.append(f'<line class="grid" x1="60" x2="{right}" y1="{y_of(y):.1f}" y2="{y_of(y):.1f}"/>' + _text(54, y_of(y) + 4, f"{y:g}", "n"))
    body += [_text(x_of(x), height + 18, f"{x:g}", "m") for x in xs] + [_text(right + 24, height + 18, x_label, "v")]
    for number, (name, ys) in enumerate(series):
        points = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in zip(xs, ys, strict=True))
        body.append(f'<polyline class="line c{number}" points="{points}"/>')
        for x, y in zip(xs, ys, strict=True):
            tip = escape(f"{name} {y:.1f} at {x:g}")
            body.append(f'<circle class="dot c{number}" cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="4"><title>{tip}</title></circle>')
        body.append(_text(x_of(xs[-1]) + 12, y_of(ys[-1]) + 4, name, "v"))
    return _svg(title, height + _AXIS, body)


# --------------------------------------------------------------------------------------------------------------------- pieces


def _svg(title: str, height: float, body: Sequence[str]) -> str:
    return f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {WIDTH} {height:g}"><title>{escape(title)}</title>{"".join(body)}</svg>'


def _scaled(value: float, longest: float) -> float:
    return (WIDTH - _LABEL - _VALUE) * value / longest if longest > 0 else 0.0


def _middle(index: int) -> float:
    return index * _ROW + _ROW / 2 + 4


def _rect(left: float, index: int, width: float, css: str, tip: str = "") -> str:
    shape = f'class="{css}" x="{left:.1f}" y="{index * _ROW + 5}" width="{width:.1f}" height="{_ROW - 10}"'
    return f"<rect {shape}><title>{escape(tip)}</title></rect>" if tip else f"<rect {shape}/>"


def _name(index: int, name: str) -> str:
    return _text(_LABEL - 10, _middle(index), name, "n")


def _text(x: float, y: float, text: str, css: str) -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _nice(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... at or above ``value``."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))
