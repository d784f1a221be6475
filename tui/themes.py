"""The colours: one calm theme for dark terminals, one for light ones."""

from __future__ import annotations

from collections.abc import Mapping

from textual.theme import Theme

DARK = Theme(
    name="edgeinfer-dark", dark=True,
    primary="#7aa2c8", secondary="#8fb6a0", accent="#8fb6a0", warning="#d8b573", error="#d98080", success="#8fb6a0",
    foreground="#d7dbe0", background="#15181c", surface="#1c2025", panel="#22272d",
    variables={"footer-background": "#15181c", "footer-key-foreground": "#7aa2c8", "footer-description-foreground": "#8b929b", "border-blurred": "#3a4149"},
)
LIGHT = Theme(
    name="edgeinfer-light", dark=False,
    primary="#2f5f8f", secondary="#3d6b52", accent="#3d6b52", warning="#8a6410", error="#a83a3a", success="#3d6b52",
    foreground="#22262b", background="#fbfaf7", surface="#f3f1ec", panel="#ebe8e1",
    variables={"footer-background": "#fbfaf7", "footer-key-foreground": "#2f5f8f", "footer-description-foreground": "#666c74", "border-blurred": "#c9c5bb"},
)


def preferred(environ: Mapping[str, str]) -> str:
    """The theme for this terminal. ``COLORFGBG`` ("0;15": black on white) is the one hint that terminals leave in the environment."""
    background = environ.get("COLORFGBG", "").rpartition(";")[2]
    return LIGHT.name if background in ("7", "15") else DARK.name
