"""`edgeinfer batch`: check everything, answer what is not answered yet, say what became of it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeinfer.errors import Cancelled, EdgeInferError
from edgeinfer.runtime.batch import arguments
from edgeinfer.runtime.batch.requests import RequestFile, ordered
from edgeinfer.runtime.batch.results import ResultFile
from edgeinfer.runtime.batch.senders import OverHttp, Sender
from edgeinfer.runtime.batch.work import answer
from edgeinfer.runtime.bench import event_loop
from edgeinfer.runtime.bench.arguments import check_flags

Progress = Callable[[str, int, int], None]               # (stage, done, of)


@dataclass(frozen=True)
class Outcome:
    """Where the batch stands when the command ends."""

    output: Path
    requests: int
    answered: int
    failed: int
    earlier: int                         # done by earlier runs
    seconds: float
    interrupted: bool
    error: EdgeInferError | None         # what ended it early


def run(args: argparse.Namespace, resolve: Callable[[str], tuple[str, Path]], options: dict[str, Any], progress: Progress) -> Outcome:
    """``resolve`` gives a model's name and file.

    Raises `BadRequest` before a model is loaded or a server is asked; whatever ends the work later is in the outcome.
    """
    model, input_path, output_path = arguments.places(args)
    check_flags(args, arguments.SHARED_FLAGS)
    parallel = args.parallel or arguments.SEQUENCES
    with RequestFile(input_path) as source, ResultFile(output_path, source.requests, retry_failed=args.retry_failed) as output:
        earlier = len(output.done)
        todo = ordered(request for request in source.requests if request.custom_id not in output.done)

        def ended() -> None:
            progress("answering", len(output.done), len(source.requests))

        def sender_of() -> AbstractAsyncContextManager[Sender]:
            if model is None:
                return _server(args)
            from edgeinfer.runtime.batch.local import local_sender

            return local_sender(*resolve(model), {**options, "parallel": parallel}, progress)

        async def work() -> None:
            async with sender_of() as sender:
                ended()
                concurrency = args.concurrency or (arguments.HTTP_CONCURRENCY if model is None else 2 * parallel)
                await answer(source, todo, sender, output, concurrency=concurrency, ended=ended)

        begin = time.monotonic()
        interrupted, failure = False, None
        try:
            if todo:
                event_loop.run(work())
        except KeyboardInterrupt:
            interrupted = True
        except EdgeInferError as error:
            if len(output.done) == earlier:              # it never began
                raise
            failure = error
        failed = sum(not answered for answered in output.done.values())
        return Outcome(
            output_path, len(source.requests), len(output.done) - failed, failed, earlier, time.monotonic() - begin, interrupted, failure,
        )


def show(outcome: Outcome) -> int:
    """Print the outcome. The exit status: 0, 1 when any request failed or the work broke off, 130 when interrupted."""
    parts = [f"{outcome.answered:,} answered", f"{outcome.failed:,} failed"]
    left = outcome.requests - outcome.answered - outcome.failed
    if left:
        parts.append(f"{left:,} left")
    before = f" ({outcome.earlier:,} of them by earlier runs)" if outcome.earlier else ""
    requests = f"{outcome.requests:,} request{'s' if outcome.requests != 1 else ''}"
    print(f"{outcome.output}: {requests}: {', '.join(parts)}{before}; {outcome.seconds:,.1f} s")
    if outcome.error is not None:
        print(f"edgeinfer: {outcome.error}", file=sys.stderr)
    if left:
        print("edgeinfer: the same command goes on where this one stopped.", file=sys.stderr)
    if outcome.interrupted:
        return Cancelled.exit_status
    return outcome.error.exit_status if outcome.error is not None else 1 if outcome.failed else 0


@asynccontextmanager
async def _server(args: argparse.Namespace) -> AsyncIterator[Sender]:
    from edgeinfer.runtime.http_client import Address, HttpClient
    from edgeinfer.runtime.remote_models import find_model

    async with HttpClient(Address.of(args.url), api_key=args.api_key, timeout_s=3600.0) as client:
        # The lines name their models; which one is asked for here matters only where the command names one.
        found = await find_model(client, args.model_name, any_of_them=True)
        changes = {} if args.model_name is None else {"model": args.model_name}
        yield OverHttp(client, changes=changes, ours=found.owner == "edgeinfer")
