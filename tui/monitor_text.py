"""A server's readings as lines of text that fit a width; what they say does not depend on colour."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from edgeinfer.runtime.readings import SHARES, Alarm, GPUReadings, ModelReadings, ServerReadings
from edgeinfer.tui.monitor_history import History
from edgeinfer.tui.readings import fit
from edgeinfer.tui.text import displayable, duration, rate

_LABEL = 13           # cells of the name of an instrument
_FIGURES = 34         # and of its figures, before the history line
_PEAK = 12            # and of the highest figure of that line, after it; where there is room, with a word before it
_PEAK_WORD = "max "
_BLOCKS = "▁▂▃▄▅▆▇█"
_NOTHING = "–"
MODELS_SHOWN = 30

Row = tuple[str, str]
"""A kind ("title", "row", "alarm") and a line of text."""


def server_rows(readings: ServerReadings, width: int, history: History | None = None) -> list[list[Row]]:
    """One block of rows for each model, and one for the machine."""
    blocks = [list(model_rows(model, width, history)) for model in readings.models[:MODELS_SHOWN]]
    if len(readings.models) > MODELS_SHOWN:
        blocks.append([("row", f"and {len(readings.models) - MODELS_SHOWN:,} more models")])
    if not readings.models:
        blocks.append([("row", "No model has been loaded yet.")])
    machine = [("row", _cut(line, width)) for line in _machine(readings)]
    return [*blocks, machine] if machine else blocks


def model_rows(model: ModelReadings, width: int, history: History | None = None) -> Iterator[Row]:
    """The title, the instruments with their history lines, the alarms."""
    facts = [_plain(model.model) or "(no name)", _plain(model.engine), _plain(model.device), _plain(model.quantization)]
    state = "" if model.loaded and model.healthy else "NOT WORKING" if model.loaded else "not loaded"
    room = width - len(state) - 2 if state else width
    title = _cut(fit([_cut(facts[0], max(8, room)), *filter(None, facts[1:])], room, " · "), room)
    yield "title", f"{title.ljust(room)}  {state}" if state else title
    if model.loaded:
        for label, figures, traced, show in _instruments(model):
            line = f"{label:<{_LABEL}}{figures:<{_FIGURES}}"
            if traced and history is not None:
                line += _trace(history.line(model, traced), width - len(line), show, top=1.0 if traced in SHARES else None)
            yield "row", _cut(line.rstrip(), width)
    if model.requests:
        counts = " · ".join(f"{count:,.0f} {_plain(reason)}" for reason, count in sorted(model.requests.items()))
        yield "row", _cut(f"{'answers':<{_LABEL}}{counts}", width)
    raised = [alarm for alarm in model.alarms if alarm.raised]
    for alarm in raised:
        yield "alarm", _cut(f"{'! ALARM':<{_LABEL}}{alarm_text(alarm)}", width)
    if model.alarms and not raised:
        yield "row", _cut(f"{'alarms':<{_LABEL}}none of {len(model.alarms)} is raised", width)


def alarm_text(alarm: Alarm) -> str:
    """``first_token_slow: 1,204, raised at 800``."""
    value = "" if alarm.value is None else f": {alarm.value:,.4g}"
    return _plain(alarm.name) + value + ("" if alarm.threshold is None else f", raised at {alarm.threshold:,.4g}")


def _instruments(model: ModelReadings) -> Iterator[tuple[str, str, str | None, Callable[[float], str]]]:
    """(name, figures, whose history, how its highest figure is written)"""
    yield "first token", _pairs(("p50", model.first_token_p50_ms, duration), ("p99", model.first_token_p99_ms, duration)), "first_token_ms", duration
    gaps = _pairs(("gap", model.itl_p50_ms, duration), ("p99", model.itl_p99_ms, duration)) if model.itl_p50_ms is not None else ""
    yield "decode", f"{_or_nothing(model.decode_tokens_per_second, rate):<12}{gaps}", "decode_tokens_per_second", rate
    reuse = f"reused {_percent(model.prefix_hit_share)}" if model.prefix_hit_share is not None else ""
    yield "prompt", f"{_or_nothing(model.prompt_tokens_per_second, rate):<12}{reuse}", "prompt_tokens_per_second", rate
    yield "utilisation", _or_nothing(model.utilisation, _percent), "utilisation", _percent
    drafts = f"  guesses right {_percent(model.accept_rate)}" if model.accept_rate is not None else ""
    most = f" of {model.max_seqs:.0f}" if model.max_seqs else ""
    yield "batch", _or_nothing(model.batch_fill, _tenths) + (most if model.batch_fill is not None else "") + drafts, "batch_fill", _tenths
    yield "requests", f"{_or_nothing(model.running, _whole)} running  {_or_nothing(model.waiting, _whole)} waiting", "running", _whole
    yield "KV cache", f"{_or_nothing(model.kv_fill, _percent)} in use  {_or_nothing(model.kv_idle, _percent)} kept", "kv_fill", _percent
    if model.memory:
        yield "memory", "  ".join(f"{_plain(kind)} {size(count)}" for kind, count in sorted(model.memory.items(), reverse=True)), None, size


def _machine(readings: ServerReadings) -> Iterator[str]:
    if readings.resident_bytes is not None:
        yield f"{'server':<{_LABEL}}{size(readings.resident_bytes)} in memory"
    for gpu in readings.gpus:
        yield f"{'GPU ' + _plain(gpu.index):<{_LABEL}}{_gpu(gpu)}"


def _gpu(gpu: GPUReadings) -> str:
    memory = f"{_or_nothing(gpu.memory_used, size)} of {_or_nothing(gpu.memory_total, size)}"
    return f"{_or_nothing(gpu.utilisation, _percent)} busy  {memory}  {_plain(gpu.name)}"


def _trace(values: Sequence[float | None], width: int, show: Callable[[float], str], *, top: float | None) -> str:
    """A history line and its highest figure; nothing where there is no room for one."""
    word = _PEAK_WORD if width >= 36 else ""
    cells = width - _PEAK - len(word)
    known = [value for value in list(values)[-cells:] if value is not None] if cells >= 4 else []
    return f"{sparkline(values, cells, top=top)}  {word}{show(max(known))}" if known else ""


def sparkline(values: Sequence[float | None], cells: int, *, top: float | None = None) -> str:
    """The last ``cells`` values as blocks, right-aligned; ``top`` is the value of a full block, by default the highest. A gap stays blank."""
    shown = list(values)[-cells:]
    full = top or max((value for value in shown if value is not None), default=0.0)
    blocks = (" " if value is None else _BLOCKS[round(min(1.0, max(0.0, value / full)) * 7)] if full > 0 else _BLOCKS[0] for value in shown)
    return "".join(blocks).rjust(cells)


def size(count: float) -> str:
    """Bytes for people: ``105 MB``."""
    unit = "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:,.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"


def _pairs(*parts: tuple[str, float | None, Callable[[float], str]]) -> str:
    return "  ".join(f"{name} {_or_nothing(value, show)}" for name, value, show in parts)


def _or_nothing(value: float | None, show: Callable[[float], str]) -> str:
    return _NOTHING if value is None else show(value)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _tenths(value: float) -> str:
    return f"{value:.1f}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _plain(text: str) -> str:
    """What a server says, as one harmless line."""
    return displayable(text).replace("\n", " ").replace("\t", " ")


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"
