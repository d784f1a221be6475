"""Many small events in, few batches out, so that the screen is drawn at its own pace and not at the engine's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator
from typing import TypeVar

T = TypeVar("T")

SHORTEST_PAUSE = 0.1    # seconds between two drawings: ten a second read as continuous
LONGEST_PAUSE = 0.4
DRAWING_SHARE = 0.08    # of one core, at most: the engine computes on all of them, and its slowest thread sets the pace


def pause_after(cpu_seconds: float) -> float:
    """How long to collect before drawing again, when the last round cost ``cpu_seconds`` of processor time."""
    return min(max(SHORTEST_PAUSE, cpu_seconds / DRAWING_SHARE), LONGEST_PAUSE)


async def batches(events: AsyncIterable[T]) -> AsyncIterator[list[T]]:
    """Yield all events that arrived since the last batch, in order, none empty.

    The first comes at once; after that the pause between two follows from the processor time that this thread (all drawing included) spent on the last.
    """
    arrived: list[T] = []
    something, reading = asyncio.Event(), asyncio.Event()

    async def collect() -> None:
        try:
            async for event in events:
                arrived.append(event)
                something.set()
                # Closed while the screen is drawn: events wait in their queue, and the engine's thread need not wake this one for each.
                await reading.wait()
        finally:
            something.set()

    collector = asyncio.ensure_future(collect())
    try:
        while True:
            reading.set()
            await asyncio.sleep(0)           # lets the collector take all that is queued, not just the event it stopped at
            await something.wait()
            something.clear()
            reading.clear()
            batch, arrived[:] = arrived[:], []
            if batch:
                before = time.thread_time()
                yield batch
                # Layout and paint happen in the event loop after the yield returns; the shortest pause is enough to see their cost.
                await asyncio.sleep(SHORTEST_PAUSE)
                await asyncio.sleep(pause_after(time.thread_time() - before) - SHORTEST_PAUSE)
            elif collector.done():
                collector.result()
                return
            if collector.done():
                something.set()
    finally:
        collector.cancel()
