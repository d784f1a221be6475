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
from edgeinfer.runtime.bench.session import Progress
from edgeinfer.runtime.bench.values import Report, Settings


def measure(
    args: argparse.Namespace, resolve: Callable[[], Path], options: dict[str, Any], progress: Progress, version: str,
) -> tuple[Report, Comparison | None]:
    """Everything that can be wrong with the request is said before a model is loaded or a server is asked."""
    arguments.check_place(args)
    settings = arguments.settings(args)
    options = arguments.engine_options(args, options)
    before = report_file.read(args.compare) if args.compare is not None else None
    if args.html is not None:
        report_file.check_writable(args.html)
    report = _of_engine(args, settings, resolve, options, progress, version) if args.url is None else _of_server(args, settings, progress, version)
    return report, None if before is None else compare(before, report)


def _of_engine(
    args: argparse.Namespace, settings: Settings, resolve: Callable[[], Path], options: dict[str, Any], progress: Progress, version: str,
) -> Report:
    from edgeinfer.runtime.bench.session import Session
    from edgeinfer.runtime.load import load

    with load(resolve(), **options) as engine:
        for notice in engine.info.notices:
            print(f"edgeinfer: {notice}", file=sys.stderr)
        session = Session(engine, settings, threads=args.threads, version=version, progress=progress)
        session.run()
        return session.report()


def _of_server(args: argparse.Namespace, settings: Settings, progress: Progress, version: str) -> Report:
    from edgeinfer.runtime.bench import http_clients
    from edgeinfer.runtime.bench.url_session import UrlSession

    session = UrlSession(http_clients.find(args.url, args.api_key, args.model_name), settings, version=version, progress=progress)
    session.run()
    return session.report()


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
