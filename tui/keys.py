"""Keys that Textual does not tell apart by itself."""

from __future__ import annotations

from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
from textual.keys import Keys


def distinguish_alt_enter() -> None:
    """Make Alt+Enter, which most terminals send as ESC CR, arrive as Ctrl+J; Textual would take it for a plain Enter, and send the draft."""
    for sequence in ("\x1b\r", "\x1b\n"):
        ANSI_SEQUENCES_KEYS[sequence] = (Keys.ControlJ,)
