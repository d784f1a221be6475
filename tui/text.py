"""Text made fit for a terminal screen, and numbers made fit for people."""

from __future__ import annotations

# Control characters would reach the terminal as commands, and every line separator besides \n would break the line counting that
# streamed Markdown depends on. They are shown as the symbols Unicode has for them. Bidirectional overrides could make text read as something else.
_SYMBOLS: dict[int, str] = {code: chr(0x2400 + code) for code in range(0x20) if code not in (0x09, 0x0A)}
_SYMBOLS |= {0x7F: "\u2421", 0x2028: "\n", 0x2029: "\n", 0x85: "\n"}
_SYMBOLS |= {code: "\ufffd" for code in (*range(0x80, 0x85), *range(0x86, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000))}


def displayable(text: str) -> str:
    """``text`` with control characters, lone surrogates and bidirectional overrides replaced by visible signs, and only ``\\n`` as line end."""
    return text.translate(_SYMBOLS)


def normalise_newlines(text: str) -> str:
    """CRLF and CR as LF. Terminals send CR for the line ends of a paste."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def rate(tokens_per_second: float) -> str:
    """``38.2 tok/s``; three digits need no fraction."""
    return f"{tokens_per_second:,.0f} tok/s" if tokens_per_second >= 100 else f"{tokens_per_second:.1f} tok/s"


def duration(milliseconds: float) -> str:
    """``85 ms``, ``1.24 s``, ``2 min 05 s``."""
    if milliseconds < 999.5:
        return f"{milliseconds:.0f} ms"
    seconds = milliseconds / 1e3
    if seconds < 99.5:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"
