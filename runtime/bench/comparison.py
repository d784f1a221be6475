"""Two reports side by side, figure by figure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from edgeinfer.runtime.bench.values import Report, Spread

NOISE = 0.03                             # ratios closer to 1 than this are called the same


class Figure(NamedTuple):
    """One number that can be compared. ``noise`` is relative: how far repetitions of it lay apart."""

    value: float
    unit: str
    higher_is_better: bool
    noise: float = 0.0


@dataclass(frozen=True)
class Row:
    """``ratio`` is now over before; None where before is zero."""

    name: str
    unit: str
    before: float
    now: float
    ratio: float | None
    verdict: str                         # "better", "worse", "same"


@dataclass(frozen=True)
class Comparison:
    """``differences``: what was not equal between the two runs besides the engine, so that ratios may have other causes."""

    before_started: str
    differences: tuple[str, ...]
    rows: tuple[Row, ...]
    only_before: tuple[str, ...]         # figures that one of the two lacks
    only_now: tuple[str, ...]


def compare(before: Report, now: Report) -> Comparison:
    old, new = dict(figures(before)), dict(figures(now))
    return Comparison(
        before_started=before.started,
        differences=tuple(_differences(before, now)),
        rows=tuple(_row(name, old[name], new[name]) for name in new if name in old),
        only_before=tuple(name for name in old if name not in new),
        only_now=tuple(name for name in new if name not in old),
    )


def figures(report: Report) -> Iterator[tuple[str, Figure]]:
    """Every figure of a report by its name, in the order of the report."""
    for rate in report.rates:
        yield rate.name, Figure(rate.mean, "tok/s", True, rate.sd / rate.mean if rate.mean else 0.0)
    for batch in report.batched:
        for field in ("s_pp", "s_tg", "s"):
            yield f"{batch.sequences} sequence{'s' if batch.sequences > 1 else ''} {field.upper()}", Figure(getattr(batch, field), "tok/s", True)
    for scenario in report.scenarios:
        yield f"{scenario.name} output", Figure(scenario.output_tokens_per_second, "tok/s", True)
        yield f"{scenario.name} failed", Figure(scenario.failed, "requests", False)
        for kind, found in scenario.kinds.items():
            name = scenario.label(kind)
            for label, spread in (("TTFT", found.ttft_ms), ("ITL", found.itl_ms), ("latency", found.latency_ms)):
                yield from _of_spread(f"{name} {label}", spread)
            yield f"{name} cached", Figure(found.cached_tokens_mean, "tokens", True)
    for step in report.profile:
        yield f"Python share at {step.sequences}", Figure(step.python_percent, "%", False)
        yield f"Python share at {step.sequences} p50", Figure(step.python_percent_p50, "%", False)


def _of_spread(name: str, spread: Spread | None) -> Iterator[tuple[str, Figure]]:
    if spread is not None:
        for part in ("p50", "p90", "p99"):
            yield f"{name} {part}", Figure(getattr(spread, part), "ms", False)


def _row(name: str, before: Figure, now: Figure) -> Row:
    ratio = now.value / before.value if before.value else None
    if before.value == now.value or (ratio is not None and abs(ratio - 1) <= max(NOISE, before.noise + now.noise)):
        verdict = "same"
    else:
        verdict = "better" if (now.value > before.value) == now.higher_is_better else "worse"
    return Row(name, now.unit, before.value, now.value, ratio, verdict)


def _differences(before: Report, now: Report) -> Iterator[str]:
    for part, names in (
        ("model", ("name", "quantization", "engine", "device", "n_ctx", "max_seqs", "kv_cells", "kv_type", "kv_bytes_per_token", "weight_bytes", "url")),
        ("machine", ("edgeinfer", "python", "processor", "cores", "threads", "build")),
        ("settings", ("batched_prompt", "batched_gen", "quick", "seed", "rounds", "engine_options")),
    ):
        for name in names:
            old, new = getattr(getattr(before, part), name), getattr(getattr(now, part), name)
            if old != new:
                yield f"{name.replace('_', ' ')}: {'none' if old == '' else old} before, {'none' if new == '' else new} now"
