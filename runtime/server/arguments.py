"""The flags of `edgeinfer serve`. Light: the parser is made for every command."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("serving")
    group.add_argument("-np", "--parallel", type=int, default=4, metavar="N", help="requests of a model that run at once (default: 4)")
    group.add_argument(
        "--max-waiting", type=int, default=256, metavar="N", help="requests of a model inside at once; more are told to come back later (default: 256)",
    )
    group.add_argument(
        "--lora", action="append", default=[], metavar="[NAME=]PATH[:SCALE]", help="a LoRA adapter that requests may name; may be repeated",
    )
    group.add_argument(
        "-a", "--alias", action="append", default=[], metavar="NAME[=MODEL]", help="another name for a model (default: for the first); may be repeated",
    )
    group.add_argument("--lenient", action="store_true", help="what cannot be honoured becomes a warning in the answer instead of a refusal")
    group.add_argument("--metrics", action=argparse.BooleanOptionalAction, default=True, help="serve /metrics (default: on)")
    group.add_argument("--metrics-compat", action="store_true", help="export metrics under the names of vLLM and llama-server too")

    group = parser.add_argument_group("address and access")
    group.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1, this machine only)")
    group.add_argument("--port", type=int, default=8080, metavar="N", help="port to listen on; 0: any that is free (default: 8080)")
    group.add_argument("--api-key", action="append", default=[], metavar="KEY", help="ask for this key; better in EDGEINFER_API_KEY; may be repeated")
    group.add_argument("--allow-unauthenticated", action="store_true", help="listen beyond this machine without a key")
    group.add_argument(
        "--allowed-host", action="append", default=[], metavar="NAME", help="a name that clients may call this server by; may be repeated",
    )
    group.add_argument(
        "--allow-origin", action="append", default=[], metavar="ORIGIN", help="web pages that may ask: https://app.example; may be repeated",
    )
    group.add_argument("--max-body", default="8MiB", metavar="SIZE", help="longest request body (default: 8MiB)")
    group.add_argument("--access-log", metavar="FILE", help="append one JSON line a request; - is standard output")
    group.add_argument("--log-prompts", action="store_true", help="with the prompts in it")
    group.add_argument(
        "--drain-timeout", type=float, default=30.0, metavar="S", help="seconds that running requests get when the server is stopped (default: 30)",
    )

    group = parser.add_argument_group("several models")
    group.add_argument("--pin", action="append", default=[], metavar="NAME", help="load this model at the start and keep it; may be repeated")
    group.add_argument("--max-loaded", type=int, metavar="N", help="models loaded at once (default: as many as memory holds)")
    group.add_argument("--load-wait", type=float, default=120.0, metavar="S", help="a request waits so long for its model (default: 120)")
    group.add_argument("--rest-after", type=float, default=0.0, metavar="S", help="drop the cache of a model idle for so long (default: never)")
    group.add_argument("--unload-after", type=float, default=0.0, metavar="S", help="unload a model idle for so long (default: never)")
