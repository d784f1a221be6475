"""What the live line shows, as a value, and how it is put into words that fit the width at hand."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from edgeinfer.runtime.values import BackendInfo, PrefillProgress, Timings, Usage
from edgeinfer.tui.text import displayable, duration, rate


class Phase(enum.Enum):
    """What the engine is doing for this conversation."""

    LOADING = "loading"
    IDLE = "idle"
    WAITING = "waiting"          # submitted, nothing computed yet
    PREFILL = "prefill"          # reading the prompt
    DECODE = "decode"            # answering
    STOPPING = "stopping"


@dataclass(frozen=True)
class Readings:
    """One reading of the instruments; every figure is the engine's own."""

    phase: Phase = Phase.LOADING
    loading_ms: float = 0.0
    progress: PrefillProgress | None = None
    usage: Usage = Usage()
    timings: Timings = Timings()
    n_ctx: int = 0

    @property
    def context_used(self) -> int:
        """Tokens that the conversation occupies in the context: no more than it holds, also where an answer goes on by dropping old ones."""
        total = self.usage.total_tokens
        if self.phase is Phase.PREFILL and self.progress is not None:
            total = max(self.progress.done, total)
        return min(total, self.n_ctx) if self.n_ctx else total


def _bar(share: float, cells: int) -> str:
    full = round(min(max(share, 0.0), 1.0) * cells)
    return "━" * full + "─" * (cells - full)


def activity(readings: Readings) -> str:
    """The leading words of the line: what happens now."""
    timings = readings.timings
    match readings.phase:
        case Phase.LOADING:
            return f"loading the model  {readings.loading_ms / 1e3:.0f} s"
        case Phase.WAITING:
            return "waiting for the engine"
        case Phase.STOPPING:
            return "stopping"
        case Phase.PREFILL if readings.progress is not None:
            done, total, cached = readings.progress.done, readings.progress.total, readings.progress.cached
            speed = 1e3 * (done - cached) / readings.progress.elapsed_ms if readings.progress.elapsed_ms > 0 else 0.0
            return f"reading {_bar(done / total if total else 0.0, 10)} {done:,}/{total:,}" + (f"  {rate(speed)}" if speed else "")
        case Phase.PREFILL:
            return "reading the prompt"
        case Phase.DECODE:
            return rate(timings.last_second_per_second)
        case _:
            return "ready"


def details(readings: Readings) -> list[str]:
    """The rest of the line, most important first: average decode rate, first token, KV reuse with the reason of a miss, prompt rate."""
    usage, timings = readings.usage, readings.timings
    parts: list[str] = []
    if timings.predicted_per_second:
        average = timings.predicted_per_second
        parts.append(f"{average:.1f} avg" if readings.phase is Phase.DECODE else f"{rate(average)}")
    if timings.first_token_ms is not None:
        parts.append(f"first {duration(timings.first_token_ms)}")
    if usage.prompt_tokens:
        miss = f" ({displayable(usage.cache_miss)})" if usage.cache_miss else ""
        parts.append(f"KV {usage.cached_tokens:,}/{usage.prompt_tokens:,} reused{miss}")
    if timings.prompt_per_second and readings.phase is not Phase.PREFILL:
        parts.append(f"prompt {rate(timings.prompt_per_second)}")
    return parts


def fit(parts: Sequence[str], width: int, gap: str = "  ") -> str:
    """As many of the leading ``parts`` as ``width`` cells hold, joined by ``gap``; the first is always there."""
    line = parts[0] if parts else ""
    for part in parts[1:]:
        if len(line) + len(gap) + len(part) > width:
            break
        line += gap + part
    return line


def context_gauge(used: int, n_ctx: int) -> str:
    """``412/2,048 tokens 20%``; empty while there is no engine."""
    return f"{used:,}/{n_ctx:,} tokens {100 * used / n_ctx:.0f}%" if n_ctx else ""


def engine_parts(info: BackendInfo | None) -> list[str]:
    """Engine, device, quantisation, kv type, for the title line."""
    return [info.quantization, f"{info.engine} {info.device}", f"kv {info.kv_type}"] if info else []


def summary(usage: Usage, timings: Timings) -> str:
    """The line under a finished answer."""
    parts = [f"{usage.completion_tokens:,} token{'' if usage.completion_tokens == 1 else 's'}"]
    if timings.predicted_per_second:
        parts.append(rate(timings.predicted_per_second))
    if timings.first_token_ms is not None:
        parts.append(f"first token {duration(timings.first_token_ms)}")
    if usage.dropped_tokens:
        parts.append(f"{usage.dropped_tokens:,} older tokens dropped")
    return " · ".join(parts)


def cut_short(usage: Usage, max_tokens: int | None, n_ctx: int) -> str:
    """Why an answer ended before its end."""
    if max_tokens is not None and usage.completion_tokens >= max_tokens:
        return "cut short: max_tokens reached"
    # Only an answer that shifts can be so long: without max_tokens, the engine ends it there.
    return f"cut short after {usage.completion_tokens:,} tokens" if usage.completion_tokens >= n_ctx else "cut short: the context is full"
