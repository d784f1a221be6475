"""A report as plain text for a terminal: aligned tables, and bars where lengths say more than digits."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from edgeinfer.runtime.bench.comparison import Comparison
from edgeinfer.runtime.bench.values import KindFigures, Machine, Model, Report, Spread

_BAR = 32                                # characters of the longest bar
_WIDTH = 120                             # of lines that can be broken


def render(report: Report, comparison: Comparison | None = None, *, encoding: str = "utf-8") -> str:
    """The whole report. Where ``encoding`` has no block characters, bars are drawn with ASCII and other characters replaced."""
    parts = [_facts(report), _rates(report), _batched(report), _scenarios(report), _latencies(report), _first_token(report), _profile(report)]
    if comparison is not None:
        parts.append(_comparison(comparison))
    if report.interrupted:
        parts.append(["Interrupted: only the parts that were finished are shown."])
    text = "\n\n".join("\n".join(part) for part in parts if part) + "\n"
    return text if _can_draw(encoding) else text.translate(_ASCII).encode(encoding, "replace").decode(encoding)


_ASCII = str.maketrans({"█": "#", "▓": "=", "░": "-", "±": "~", **dict.fromkeys("▏▎▍▌", " "), **dict.fromkeys("▋▊▉", "#")})


def _can_draw(encoding: str) -> bool:
    try:
        "█▓░▏±".encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


# ----------------------------------------------------------------------------------------------------------------- the parts


def _facts(report: Report) -> list[str]:
    lines = _server(report) if report.model.url else _engine(report)
    lines += [f"note: {notice}" for notice in report.notices]
    return [part for line in lines for part in _wrapped(line)]


def _engine(report: Report) -> list[str]:
    model, machine = report.model, report.machine
    layers = f", {model.layers_offloaded} layers there" if model.layers_offloaded else ""
    threads = f"{machine.threads} thread{'s' if machine.threads > 1 else ''}" if machine.threads else "threads chosen by the engine"
    lines = [
        f"{model.name}, {model.quantization}, {model.engine} on {model.device}{layers}",
        f"weights {size(model.weight_bytes)}; KV {model.kv_type}, {model.kv_bytes_per_token:,} bytes a token; "
        f"context {model.n_ctx:,} tokens; {model.max_seqs} sequences at once, KV for {model.kv_cells:,} tokens",
        f"{threads}; {here(machine)}",
    ]
    if machine.build:
        lines.append(f"build {machine.build}")
    return lines


def _server(report: Report) -> list[str]:
    return [f"{report.model.name} at {report.model.url}", *filter(None, ["; ".join(known(report.model))]), f"clients: {here(report.machine)}"]


def _rates(report: Report) -> list[str]:
    if not report.rates:
        return []
    longest = max(rate.mean for rate in report.rates)
    rows = [(rate.name, f"{rate.mean:,.2f}", "±", f"{rate.sd:.2f}", bar(rate.mean, longest)) for rate in report.rates]
    repetitions = max(len(rate.samples) for rate in report.rates)
    return [f"tokens a second, mean and standard deviation of {repetitions}", *_aligned(rows, "<><><")]


def _batched(report: Report) -> list[str]:
    if not report.batched:
        return []
    longest = max(each.s_tg for each in report.batched)
    first = report.batched[0]
    header = ("sequences", "S_PP", "S_TG", "S", "")
    rows = [(str(each.sequences), f"{each.s_pp:,.1f}", f"{each.s_tg:,.1f}", f"{each.s:,.1f}", bar(each.s_tg, longest)) for each in report.batched]
    title = f"tokens a second of all sequences together: {first.n_prompt} prompt (PP) and {first.n_gen} new tokens (TG) each; bars: S_TG"
    return [title, *_aligned([header, *rows], ">>>><")]


def _scenarios(report: Report) -> list[str]:
    if not report.scenarios:
        return []
    longest = max(each.output_tokens_per_second for each in report.scenarios)
    header = ("scenario", "clients", "requests", "failed", "output tok/s", "")
    rows = [
        (each.name, str(each.clients), str(each.requests), str(each.failed), f"{each.output_tokens_per_second:,.1f}", bar(each.output_tokens_per_second, longest))
        for each in report.scenarios
    ]
    rounds = max(len(each.samples) for each in report.scenarios)
    title = f"serving, medians of {rounds} rounds" if rounds > 1 else "serving"
    failures = [part for each in report.scenarios for message, times in each.errors.items() for part in _wrapped(f"{each.name}: {times} failed: {message}")]
    return [title, *_aligned([header, *rows], "<>>>><"), *failures]


def _latencies(report: Report) -> list[str]:
    rows = []
    for name, found in kinds(report):
        spreads = [each for spread in (found.ttft_ms, found.itl_ms, found.latency_ms) for each in _spread(spread)]
        rows.append((name, *spreads, f"{found.prompt_tokens_mean:,.0f}", f"{found.cached_tokens_mean:,.0f}"))
    if not rows:
        return []
    header = ("", "TTFT p50", "p90", "p99", "ITL p50", "p90", "p99", "whole p50", "p90", "p99", "prompt", "cached")
    return _aligned([header, *rows], "<" + ">" * 11)


def _first_token(report: Report) -> list[str]:
    spreads = [(name, found.ttft_ms) for name, found in kinds(report) if found.ttft_ms is not None]
    if not spreads:
        return []
    longest = max(spread.p99 for _, spread in spreads)
    rows = [(name, layered(spread, longest), duration(spread.p99)) for name, spread in spreads]
    return ["time to first token: █ p50 ▓ p90 ░ p99", *_aligned(rows, "<<>")]


def _profile(report: Report) -> list[str]:
    if not report.profile:
        return []
    parts = list(report.profile[0].python_ms)
    header = ("sequences", "steps", "step", "native", *parts, "Python", "p50")
    rows = [
        (
            str(each.sequences), str(each.steps), f"{each.step_ms:.3f}", f"{each.native_ms:.3f}", *(f"{each.python_ms[part]:.3f}" for part in parts),
            f"{each.python_percent:.1f} %", f"{each.python_percent_p50:.1f} %",
        )
        for each in report.profile
    ]
    shares = [
        ("", "", "", *(f"{100 * spent / each.step_ms:.1f} %" for spent in (each.native_ms, *(each.python_ms[part] for part in parts))), "", "")
        for each in report.profile
    ]
    lines = [line for pair in zip(rows, shares, strict=True) for line in pair]
    return [f"a decode step in milliseconds, {report.profile[0].sampling}", *_aligned([header, *lines], ">" * len(header))]


def _comparison(comparison: Comparison) -> list[str]:
    rows = [("figure", "before", "now", "", "now/before", "")]
    rows += [
        (row.name, f"{row.before:,.2f}", f"{row.now:,.2f}", row.unit, f"{row.ratio:.3f}" if row.ratio is not None else "", row.verdict)
        for row in comparison.rows
    ]
    lines = [f"compared with the run of {comparison.before_started}", *_aligned(rows, "<>><><")]
    lines += [f"not the same: {difference}" for difference in comparison.differences]
    for title, names in (("only before", comparison.only_before), ("only now", comparison.only_now)):
        if names:
            lines.append(f"{title}: {', '.join(names)}")
    return [part for line in lines for part in _wrapped(line)]


# ------------------------------------------------------------------------------------------------------------------- helpers


def kinds(report: Report) -> Iterator[tuple[str, KindFigures]]:
    """Every kind of request, with the name of its row."""
    for scenario in report.scenarios:
        for kind, found in scenario.kinds.items():
            yield scenario.label(kind), found


def here(machine: Machine) -> str:
    return f"{machine.processor or 'unknown processor'}, {machine.cores} cores usable; edgeinfer {machine.edgeinfer}, Python {machine.python}, {machine.system}"


def known(model: Model) -> list[str]:
    """What a server says of its model; servers say more or less."""
    facts = {
        "server": model.engine, "quantization": model.quantization, "weights": size(model.weight_bytes) if model.weight_bytes else "",
        "context": f"{model.n_ctx:,} tokens" if model.n_ctx else "",
    }
    return [f"{name} {value}" for name, value in facts.items() if value]


def duration(milliseconds: float) -> str:
    """Three significant digits: "8.31 ms", "184 ms", "2.41 s", "33.0 s"."""
    value, unit = (milliseconds, "ms") if milliseconds < 999.5 else (milliseconds / 1e3, "s")
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{digits}f} {unit}"


def size(count: int) -> str:
    """Bytes in decimal units, three significant digits."""
    value = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def bar(value: float, longest: float) -> str:
    """A bar of `_BAR` characters for ``longest``, to an eighth of a character."""
    eighths = round(8 * _BAR * value / longest) if longest > 0 else 0
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def layered(spread: Spread, longest: float) -> str:
    """Solid to p50, shaded to p90 and p99."""
    ends = [round(_BAR * min(value / longest, 1.0)) if longest > 0 else 0 for value in (spread.p50, spread.p90, spread.p99)]
    return "█" * ends[0] + "▓" * (ends[1] - ends[0]) + "░" * (ends[2] - ends[1])


def _spread(spread: Spread | None) -> tuple[str, str, str]:
    return ("", "", "") if spread is None else (duration(spread.p50), duration(spread.p90), duration(spread.p99))


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, _WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _aligned(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(align))]
    return ["  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)).rstrip() for row in rows]
