"""A batch under way: so many requests at a time, each ending as one line of the output."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from edgeinfer.errors import ServerFailed, ServerUnreachable
from edgeinfer.runtime.batch.requests import BatchRequest, RequestFile
from edgeinfer.runtime.batch.results import ResultFile
from edgeinfer.runtime.batch.senders import Sender

TRIES = 8                                # of one request, where its answerer is busy or gone: it may be starting anew
BROKEN_TRIES = 3                         # where it breaks off or goes silent: the request itself may be what it does not bear
_BUSY = (429, 503)
_LONGEST_PAUSE_S = 60.0

Sleep = Callable[[float], Awaitable[None]]


async def answer(
    source: RequestFile, todo: Iterable[BatchRequest], sender: Sender, output: ResultFile, *, concurrency: int,
    ended: Callable[[], None] = lambda: None, sleep: Sleep = asyncio.sleep,
) -> None:
    """Answer ``todo`` in its order, ``concurrency`` at a time; ``ended`` is called after each. A request that fails is a line, not the end.

    What concerns all requests (nobody answers any more, the key is refused, the disk is full) is raised; what was done until then stays.
    """
    queue = deque(todo)

    async def worker() -> None:
        while queue:
            request = queue.popleft()
            response, error = await _outcome(source, request, sender, sleep)
            output.add(request, response, error)
            ended()

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(concurrency, len(queue))):
                workers.create_task(worker())
    except BaseExceptionGroup as group:                  # the first failure ended the others
        raise group.exceptions[0] from None


async def _outcome(source: RequestFile, request: BatchRequest, sender: Sender, sleep: Sleep) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Response and error of the line."""
    url, body = source.body(request)
    broken = 0
    for turn in itertools.count():
        last = turn == TRIES - 1
        pause = None
        try:
            reply = await sender.send(url, body)
        except ServerUnreachable:
            if last:
                raise
        except ServerFailed as error:
            broken += 1
            if last or broken == BROKEN_TRIES:
                return None, {"code": error.code, "message": str(error)}
        else:
            if reply.status not in _BUSY or last:
                return {"status_code": reply.status, "request_id": reply.request_id, "body": reply.body}, None
            pause = reply.retry_after_s
        await sleep(min(2.0**turn / 2 if pause is None else pause, _LONGEST_PAUSE_S))
