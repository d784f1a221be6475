"""The flags of `edgeinfer bench`, and what they mean. Light: the parser is made for every command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Container
from pathlib import Path
from typing import Any

from edgeinfer.errors import BadRequest

SEQUENCES = 16                           # that run at once unless -np or -npl says otherwise
KV_TOKENS = 16384                        # that their shared KV cache holds, at least
STREAM_CONTEXT = 4096                    # context of each sequence where every one has a cache of its own: the scenarios need about 3,500


def counts(text: str) -> tuple[int, ...]:
    """"1,4,16" -> (1, 4, 16); "0" and "none" -> ()."""
    if text in ("0", "none"):
        return ()
    found = tuple(int(part) for part in text.split(","))
    if min(found) < 1:
        raise ValueError(text)
    return tuple(dict.fromkeys(found))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to measure")
    group.add_argument("-p", "--n-prompt", type=counts, default=(512,), metavar="N,..", help="read a prompt of N tokens: pp512; 0 leaves it out (default: 512)")
    group.add_argument("-n", "--n-gen", type=counts, default=(128,), metavar="N,..", help="generate N tokens: tg128; 0 leaves it out (default: 128)")
    group.add_argument("-r", "--repetitions", type=int, default=0, metavar="N", help="of each pp and tg figure (default: 5, with --quick 2)")
    group.add_argument("-npl", "--n-parallel", type=counts, default=(1, 4, 16), metavar="N,..", help="sequences at once; 0 leaves it out (default: 1,4,16)")
    group.add_argument("-npp", "--n-prompt-each", type=int, default=128, metavar="N", help="prompt tokens of each of them (default: 128)")
    group.add_argument("-ntg", "--n-gen-each", type=int, default=64, metavar="N", help="new tokens of each of them (default: 64)")
    group.add_argument("--scenario", default="all", metavar="NAME,..", help="serving scenarios: single, burst, shared, mixed, turns, all or none (default: all)")
    group.add_argument("--rounds", type=int, default=1, metavar="N", help="measure sequences at once and scenarios N times and report medians (default: 1)")
    group.add_argument("--quick", action="store_true", help="a short look: fewer and shorter requests; compare only with other quick runs")
    group.add_argument("--profile", action="store_true", help="also what the Python side of a decode step costs, at 1 and at 16 sequences")
    group.add_argument("--seed", type=int, default=7, metavar="N", help="of the prompts (default: 7)")
    group = parser.add_argument_group("a server instead of a model loaded here")
    add_server_arguments(group)
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON document")
    group.add_argument("--html", type=Path, metavar="FILE", help="also write the report as a page with charts")
    group.add_argument("--compare", type=Path, metavar="FILE", help="show the ratios to an earlier --json run")
    group = parser.add_argument_group("engine")
    group.add_argument("-np", "--parallel", type=int, default=0, metavar="N", help=f"sequences that run at once (default: {SEQUENCES}, or the most of -npl)")
    group.add_argument("--kv-size", type=int, default=0, metavar="N", help=f"tokens in the KV cache that all share (default: {KV_TOKENS}, or what -c and -npl need)")
    group.add_argument("--no-kv-unified", action="store_true", help=f"a KV cache of its own for every sequence, of -c tokens (default: {STREAM_CONTEXT}) each")
    group.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any other option of edgeinfer.load, such as prefill_chunk=256; may be repeated")


def add_server_arguments(group: argparse._ArgumentGroup, *, default: str = "its only one") -> None:
    group.add_argument("--url", metavar="URL", help="an OpenAI-compatible server that is running, such as http://127.0.0.1:8080, in place of MODEL")
    group.add_argument("--api-key", metavar="KEY", help="where the server asks for one; better in EDGEINFER_API_KEY")
    group.add_argument("--model-name", metavar="NAME", help=f"which of the models at --url (default: {default})")


SERVER_FLAGS = frozenset({"url", "api_key", "model_name"})
SHARED_FLAGS = frozenset({"scenario", "rounds", "quick", "seed", "json", "html", "compare"})     # that mean something for both


def check_place(args: argparse.Namespace) -> None:
    """MODEL or --url, and no flag that concerns the other. Raises `BadRequest`."""
    if args.model is not None and args.url is not None:
        raise BadRequest("Give either MODEL, which is loaded here, or --url URL, a server that is running, not both.")
    if args.model is None and args.url is None:
        raise BadRequest("Give MODEL, which is loaded here, or --url URL, a server that is running.")
    check_flags(args, SHARED_FLAGS)


def check_flags(args: argparse.Namespace, shared: Container[str]) -> None:
    """Refuse what was written on the command line and would be ignored: engine flags with --url, server flags without. Raises `BadRequest`."""
    for name, flag in args.given(args).items():
        if args.url is not None and name not in SERVER_FLAGS and name not in shared:
            raise BadRequest(f"{flag} is about a model that is loaded here and changes nothing at the server of --url; leave it out.")
        if args.url is None and name in SERVER_FLAGS:
            raise BadRequest(f"{flag} is about a server and needs --url.")


def settings(args: argparse.Namespace) -> Any:
    """What to measure, checked. Raises `BadRequest`."""
    from edgeinfer.runtime.bench.scenarios import NAMES
    from edgeinfer.runtime.bench.values import Settings

    for flag, value in (("-r", args.repetitions or 1), ("-npp", args.n_prompt_each), ("-ntg", args.n_gen_each), ("--rounds", args.rounds)):
        if value < 1:
            raise BadRequest(f"{flag} must be a whole number from 1, not {value}.")
    names: tuple[str, ...] = {"all": NAMES, "none": ()}.get(args.scenario, tuple(args.scenario.split(",")))
    unknown = next((name for name in names if name not in NAMES), None)
    if unknown is not None:
        raise BadRequest(f"There is no scenario {unknown!r}; known are {', '.join(NAMES)}, all and none.")
    if args.url is not None:
        if not names:
            raise BadRequest("Nothing is left to measure: of a server at --url there are the scenarios only.")
        return Settings(
            n_prompt=(), n_gen=(), parallel=(), scenarios=tuple(name for name in NAMES if name in names), rounds=args.rounds, quick=args.quick,
            seed=args.seed,
        )
    if not (args.n_prompt or args.n_gen or args.n_parallel or names or args.profile):
        raise BadRequest("Nothing is left to measure; give one of -p, -n, -npl, --scenario or --profile.")
    return Settings(
        n_prompt=args.n_prompt, n_gen=args.n_gen, repetitions=args.repetitions or (2 if args.quick else 5), parallel=args.n_parallel,
        batched_prompt=args.n_prompt_each, batched_gen=args.n_gen_each, scenarios=tuple(name for name in NAMES if name in names), rounds=args.rounds,
        quick=args.quick, profile=args.profile, seed=args.seed, engine_options=tuple(args.set),
    )


def engine_options(args: argparse.Namespace, common: dict[str, Any]) -> dict[str, Any]:
    """Options of `edgeinfer.load`: ``common`` ones of every command, and room for what is to be measured. Raises `BadRequest`."""
    options = dict(common)
    options["parallel"] = args.parallel or max((SEQUENCES, *args.n_parallel))
    if args.no_kv_unified:
        options["kv_unified"] = False
        options["ctx_size"] = args.ctx_size or STREAM_CONTEXT
    else:
        each = args.n_prompt_each + args.n_gen_each + 1
        options["kv_size"] = args.kv_size or max(KV_TOKENS, args.ctx_size, each * max(args.n_parallel, default=0))
    for setting in args.set:
        name, sign, value = setting.partition("=")
        if not sign or not name:
            raise BadRequest(f"--set takes NAME=VALUE, not {setting!r}.")
        options[name.strip().replace("-", "_")] = _value(value.strip())
    return options


def _value(text: str) -> Any:
    """A number, true or false where it is one, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
