"""The streams of one request, told apart by their index, and what they add up to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from edgeinfer.runtime.stream import Stream
from edgeinfer.runtime.values import Event, Failed, Usage


class Choices:
    """One stream for each answer asked for. `close` ends what still runs and reports every stream once, whatever happened before."""

    def __init__(self, ended: Callable[[Stream], None]):
        self.streams: list[Stream] = []
        self._ended = ended
        self._submitting: asyncio.Future[None] | None = None
        self._reading: AsyncGenerator[tuple[int, Event], None] | None = None

    async def submit(self, submit: Callable[[], Iterator[Stream]]) -> None:
        """Take the streams that ``submit`` yields, made in a thread: templates and tokenizers are slow. Raises what it raises."""

        def take() -> None:
            for stream in submit():
                self.streams.append(stream)

        self._submitting = asyncio.ensure_future(asyncio.to_thread(take))
        # A thread cannot be cancelled: whoever leaves now, `close` waits for it and finds all that it made.
        await asyncio.shield(self._submitting)

    def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Whatever happens in any of them. Raises the error of the first that fails."""
        self._reading = self._events()
        return self._reading

    async def _events(self) -> AsyncGenerator[tuple[int, Event], None]:
        source = _numbered(self.streams[0]) if len(self.streams) == 1 else _merged(self.streams)
        async with aclosing(source) as numbered:
            async for index, event in numbered:
                if isinstance(event, Failed):
                    raise event.error.with_traceback(None)
                yield index, event

    async def close(self) -> None:
        if self._submitting is not None and not self._submitting.done():
            await asyncio.wait((self._submitting,))
        for stream in self.streams:
            stream.cancel()
        if self._reading is not None:
            # Who read `events` may have been cancelled between two of them and left it open: a stream has one reader at a time.
            await self._reading.aclose()
        for stream in self.streams:
            try:
                async with aclosing(stream.aevents()) as rest:
                    async for _ in rest:
                        pass
            finally:
                self._ended(stream)

    @property
    def usages(self) -> list[Usage]:
        return [stream.usage for stream in self.streams]


async def _numbered(stream: Stream) -> AsyncGenerator[tuple[int, Event], None]:
    async with aclosing(stream.aevents()) as events:
        async for event in events:
            yield 0, event


async def _merged(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Event], None]:
    queue: asyncio.Queue[tuple[int, Event] | None] = asyncio.Queue()

    async def pump(index: int, stream: Stream) -> None:
        async with aclosing(stream.aevents()) as events:
            async for event in events:
                queue.put_nowait((index, event))
        queue.put_nowait(None)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def usage_object(usages: Sequence[Usage], *, prompts: int = 1, reasoning_tokens: int | None = None) -> dict[str, Any]:
    """OpenAI's ``usage``. ``usages`` holds the choices prompt by prompt; a prompt counts once however many answers it gets."""
    per_prompt = max(1, len(usages) // prompts)
    firsts = usages[::per_prompt]
    prompt_tokens = sum(usage.prompt_tokens for usage in firsts)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    details: dict[str, Any] = {"cached_tokens": sum(usage.cached_tokens for usage in firsts), "cache_miss": firsts[0].cache_miss}
    dropped = sum(usage.dropped_tokens for usage in usages)
    if dropped:
        details["dropped_tokens"] = dropped
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": details,
    }
    if reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return usage
