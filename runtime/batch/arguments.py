"""The flags of `edgeinfer batch`. Light: the parser is made for every command."""

from __future__ import annotations

import argparse
from pathlib import Path

from edgeinfer.errors import BadRequest

SEQUENCES = 16                           # that run at once unless -np says otherwise
HTTP_CONCURRENCY = 16
SHARED_FLAGS = frozenset({"concurrency", "retry_failed"})        # that mean something for a model loaded here and for a server


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from edgeinfer.runtime.bench.arguments import add_server_arguments

    parser.usage = "edgeinfer batch (MODEL | --url URL) INPUT OUTPUT [options]"
    parser.add_argument("first", metavar="MODEL", help="a .gguf file, a store or catalogue name, or a hub id; leave it out with --url")
    parser.add_argument("second", metavar="INPUT", help='JSON lines: {"custom_id", "method": "POST", "url": "/v1/chat/completions", "body"}')
    parser.add_argument("third", metavar="OUTPUT", nargs="?", help="a line for each reply, appended; what is there is not asked again")
    group = parser.add_argument_group("work")
    group.add_argument("--concurrency", type=int, default=0, metavar="N", help=f"requests at once (default: twice -np; {HTTP_CONCURRENCY} with --url)")
    group.add_argument("--retry-failed", action="store_true", help="ask again what failed in an earlier run; without it, failures count as done")
    group.add_argument("-np", "--parallel", type=int, default=0, metavar="N", help=f"sequences that run at once (default: {SEQUENCES})")
    add_server_arguments(parser.add_argument_group("a server instead of a model loaded here"), default="what each line names")


def places(args: argparse.Namespace) -> tuple[str | None, Path, Path]:
    """MODEL (None with --url), INPUT and OUTPUT. Raises `BadRequest`."""
    if args.concurrency < 0:
        raise BadRequest(f"--concurrency must be a whole number from 1, not {args.concurrency}.")
    if args.url is not None and args.third is not None:
        raise BadRequest("Give either MODEL, which is loaded here, or --url URL, a server that is running, not both.")
    if args.url is None and args.third is None:
        raise BadRequest("Three names are needed: MODEL, INPUT and OUTPUT; or --url URL, INPUT and OUTPUT.")
    if args.url is not None:
        return None, Path(args.first), Path(args.second)
    return args.first, Path(args.second), Path(args.third)
