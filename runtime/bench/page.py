"""A report as one HTML page that needs nothing else: no script, no font, no link. It is well-formed XML, too."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from edgeinfer.runtime.bench import svg
from edgeinfer.runtime.bench.comparison import Comparison
from edgeinfer.runtime.bench.table import duration, here, kinds, known, size
from edgeinfer.runtime.bench.values import Report, Spread

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #5b6570; --paper: #fdfdfc; --card: #f3f4f5; --rule: #d5d9dd;
  --c0: #2463b4; --c1: #b3541e; --c2: #2f7d4f; --c3: #8a4fa3; --c4: #a08215; --c5: #4c7f8c; --good: #1d7a43; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --dim: #9aa4ae; --paper: #14171a; --card: #1e2226; --rule: #363c42;
  --c0: #6aa5ef; --c1: #e79462; --c2: #6cc18d; --c3: #c495da; --c4: #d6bb55; --c5: #85bccb; --good: #6cc18d; --bad: #f2857d; } }
body { margin: 2rem auto; max-width: 58rem; padding: 0 1rem; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; } p { margin: .3rem 0; } .dim { color: var(--dim); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; background: var(--card); padding: .8rem 1rem; border-radius: .4rem; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; } svg { width: 100%; height: auto; margin: .4rem 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; } th:first-child, td:first-child { text-align: left; }
text { fill: var(--ink); font: 13px system-ui, sans-serif; } .v { text-anchor: start; } .n { text-anchor: end; } .m { text-anchor: middle; } .grid { stroke: var(--rule); }
.a { fill: var(--c0); } .b { fill: var(--c2); } .l0 { fill: var(--c0); } .l1 { fill: var(--c0); opacity: .5; } .l2 { fill: var(--c0); opacity: .25; }
.s0 { fill: var(--c0); } .s1 { fill: var(--c1); } .s2 { fill: var(--c2); } .s3 { fill: var(--c3); } .s4 { fill: var(--c4); } .s5 { fill: var(--c5); } 
.line { fill: none; stroke-width: 2.5; } .line.c0 { stroke: var(--c0); } .line.c1 { stroke: var(--c1); } .dot.c0 { fill: var(--c0); } .dot.c1 { fill: var(--c1); }
.key { display: inline-block; margin-right: 1rem; } .key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; border-radius: .15em; }
.better { color: var(--good); } .worse { color: var(--bad); } .warn { border-left: .3rem solid var(--bad); padding-left: .7rem; }
"""


def render(report: Report, comparison: Comparison | None = None) -> str:
    """The page as text."""
    model = report.model
    sections = [_facts(report), _rates(report), _batched(report), _scenarios(report), _latencies(report), _profile(report)]
    if comparison is not None:
        sections.append(_comparison(comparison))
    warning = '<p class="warn">Interrupted: only the parts that were finished are shown.</p>' if report.interrupted else ""
    title = escape(" ".join(filter(None, (model.name, model.quantization))) + ": edgeinfer bench")
    measured = escape(", ".join(filter(None, (model.quantization, "measured by edgeinfer bench", report.started))))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body><h1>{escape(model.name)}</h1>"
        f'<p class="dim">{measured}</p>{warning}\n{"".join(sections)}</body></html>\n'
    )


def _facts(report: Report) -> str:
    facts = _server(report) if report.model.url else _engine(report)
    facts["notes"] = " ".join(report.notices)
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items() if value) + "</dl>"


def _server(report: Report) -> dict[str, str]:
    return {"server": report.model.url, "says": "; ".join(known(report.model)), "clients": here(report.machine)}


def _engine(report: Report) -> dict[str, str]:
    model, machine = report.model, report.machine
    return {
        "engine": f"{model.engine} on {model.device}" + (f", {model.layers_offloaded} layers there" if model.layers_offloaded else ""),
        "weights": size(model.weight_bytes),
        "KV cache": f"{model.kv_type}, {model.kv_bytes_per_token:,} bytes a token",
        "context": f"{model.n_ctx:,} tokens; {model.max_seqs} sequences at once, KV for {model.kv_cells:,} tokens",
        "threads": str(machine.threads) if machine.threads else "chosen by the engine",
        "machine": f"{machine.processor or 'unknown processor'}, {machine.cores} cores usable; {machine.system}",
        "versions": f"edgeinfer {machine.edgeinfer}, Python {machine.python}",
        "build": machine.build,
    }


def _rates(report: Report) -> str:
    if not report.rates:
        return ""
    rows = [(rate.name, rate.mean, f"{rate.mean:,.1f} ± {rate.sd:.1f}") for rate in report.rates]
    return _section("Tokens a second", svg.bars("tokens a second", rows), note="One sequence; pp: reading a prompt, tg: generating. Mean ± standard deviation.")


def _batched(report: Report) -> str:
    if not report.batched:
        return ""
    each = sorted(report.batched, key=lambda batch: batch.sequences)
    drawing = svg.lines(
        "tokens a second of all sequences together", [batch.sequences for batch in each],
        [("S_PP", [batch.s_pp for batch in each]), ("S_TG", [batch.s_tg for batch in each])], x_label="sequences",
    )
    rows = [(str(batch.sequences), f"{batch.s_pp:,.1f}", f"{batch.s_tg:,.1f}", f"{batch.s:,.1f}") for batch in each]
    note = f"Tokens a second of all together: {each[0].n_prompt} prompt tokens (S_PP) and {each[0].n_gen} new tokens (S_TG) each, and both (S)."
    return _section("Sequences at once", drawing, _table(("sequences", "S_PP", "S_TG", "S"), rows), note=note)


def _scenarios(report: Report) -> str:
    if not report.scenarios:
        return ""
    bars = [(each.name, each.output_tokens_per_second, f"{each.output_tokens_per_second:,.1f} tok/s") for each in report.scenarios]
    drawing = svg.bars("output tokens a second by scenario", bars, css="b")
    rows = [(each.name, str(each.clients), str(each.requests), str(each.failed), f"{each.output_tokens:,}", f"{each.wall_s:,.1f} s") for each in report.scenarios]
    errors = "".join(f'<p class="warn">{escape(f"{each.name}: {times} failed: {message}")}</p>' for each in report.scenarios for message, times in each.errors.items())
    rounds = max(len(each.samples) for each in report.scenarios)
    return _section(
        "Serving", drawing, _table(("scenario", "clients", "requests", "failed", "output tokens", "wall"), rows), errors,
        note="Output tokens a second over the whole run" + (f", medians of {rounds} rounds." if rounds > 1 else "."),
    )


def _latencies(report: Report) -> str:
    charts = []
    for title, field in (("Time to first token", "ttft_ms"), ("Inter-token latency", "itl_ms"), ("Whole request", "latency_ms")):
        rows = [
            (name, (spread.p50, spread.p90, spread.p99), f"{duration(spread.p50)} / {duration(spread.p99)}")
            for name, found in kinds(report) if (spread := getattr(found, field)) is not None
        ]
        if rows:
            charts.append(_section(title, svg.layers(title, rows), note="Dark to p50, lighter to p90, lightest to p99; the figures are p50 and p99."))
    if not charts:
        return ""
    table = [
        (name, *_cells(found.ttft_ms), *_cells(found.itl_ms), *_cells(found.latency_ms), f"{found.prompt_tokens_mean:,.0f}", f"{found.cached_tokens_mean:,.0f}")
        for name, found in kinds(report)
    ]
    header = ("", "TTFT p50", "p90", "p99", "ITL p50", "p90", "p99", "whole p50", "p90", "p99", "prompt tokens", "cached")
    return "".join(charts) + _section("Latencies in figures", _table(header, table))


def _profile(report: Report) -> str:
    if not report.profile:
        return ""
    parts = list(report.profile[0].python_ms)
    rows = [
        (
            f"{each.sequences} sequence{'s' if each.sequences > 1 else ''}",
            [(part, 100 * spent / each.step_ms) for part, spent in each.python_ms.items()],
            f"{each.python_percent:.1f} % of {each.step_ms:.1f} ms",
        )
        for each in report.profile
    ]
    keys = "".join(f'<span class="key"><i style="background: var(--c{number})"></i>{escape(part)}</span>' for number, part in enumerate(parts))
    cells = [
        (
            str(each.sequences), str(each.steps), f"{each.step_ms:.3f}", f"{each.native_ms:.3f}", *(f"{each.python_ms[part]:.3f}" for part in parts),
            f"{each.python_percent:.1f} %", f"{each.python_percent_p50:.1f} %",
        )
        for each in report.profile
    ]
    drawing = svg.stacks("Python side of a decode step in percent", rows)
    return _section(
        "The Python side of a decode step", drawing, f"<p>{keys}</p>", _table(("sequences", "steps", "step, ms", "native", *parts, "Python", "median step"), cells),
        note=f"What is not spent in the native library, mean over steps; {report.profile[0].sampling}. The table is in milliseconds.",
    )


def _comparison(comparison: Comparison) -> str:
    rows = [
        (row.name, f"{row.before:,.2f}", f"{row.now:,.2f}", row.unit, f"{row.ratio:.3f}" if row.ratio is not None else "", row.verdict) for row in comparison.rows
    ]
    notes = [f"Not the same: {difference}." for difference in comparison.differences]
    notes += [f"{title}: {', '.join(names)}." for title, names in (("Only before", comparison.only_before), ("Only now", comparison.only_now)) if names]
    return _section(
        f"Compared with the run of {comparison.before_started}",
        _table(("figure", "before", "now", "", "now / before", ""), rows, classes=[row.verdict for row in comparison.rows]),
        *(f'<p class="dim">{escape(note)}</p>' for note in notes),
    )


# --------------------------------------------------------------------------------------------------------------------- pieces


def _section(title: str, *parts: str, note: str = "") -> str:
    return f"<h2>{escape(title)}</h2>" + (f'<p class="dim">{escape(note)}</p>' if note else "") + "".join(parts) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], classes: Sequence[str] = ()) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(
        f'<tr class="{classes[index] if classes else "row"}">' + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for index, row in enumerate(rows)
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cells(spread: Spread | None) -> tuple[str, str, str]:
    return ("", "", "") if spread is None else (duration(spread.p50), duration(spread.p90), duration(spread.p99))
