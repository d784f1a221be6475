"""`edgeinfer bench`: load, measure, show."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgeinfer.errors import Cancelled
from edgeinfer.runtime.bench import arguments, page, report_file, table
from edgeinfer.runtime.bench.comparison import Comparison, compare
from edgeinfer.runtime.bench.session import Progress, Session
from edgeinfer.runtime.bench.values import Report


def measure(args: argparse.Namespace, resolve: Callable[[], Path], options: dict[str, Any], progress: Progress, version: str) -> tuple[Report, Comparison | None]:
    """Everything that can be wrong with the request is said before the model is loaded."""
    settings = arguments.settings(args)
    options = arguments.engine_options(args, options)
    before = report_file.read(args.compare) if args.compare is not None else None
    if args.html is not None:
        report_file.check_writable(args.html)
    from edgeinfer.runtime.load import load

    with load(resolve(), **options) as engine:
        for notice in engine.info.notices:
            print(f"edgeinfer: {notice}", file=sys.stderr)
        session = Session(engine, settings, threads=args.threads, version=version, progress=progress)
        session.run()
        report = session.report()
    return report, None if before is None else compare(before, report)


def show(report: Report, comparison: Comparison | None, *, as_json: bool, html: Path | None) -> int:
    """Print the report, write the page; the exit status says whether it was interrupted."""
    if html is not None:
        report_file.write_text(html, page.render(report, comparison))
    if as_json:
        document = report_file.as_document(report)
        if comparison is not None:
            document["comparison"] = dataclasses.asdict(comparison)
        print(json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False))
    else:
        sys.stdout.write(table.render(report, comparison, encoding=sys.stdout.encoding or "utf-8"))
    return Cancelled.exit_status if report.interrupted else 0
