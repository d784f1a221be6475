"""One answer on its way to its reader."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType

from edgeinfer.runtime.sequence import Sequence
from edgeinfer.runtime.values import Event, Failed, Finished, FinishReason, PrefillProgress, TextDelta, Timings, Usage


class Stream:
    """Iterate it, ``for`` or ``async for``, to get the answer's text piece by piece; or `events` for all that happens.

    The pieces joined are exactly `text`. A failed request raises its `EdgeInferError` where it is read. Dropping the stream, leaving its ``with``
    block, or calling `cancel` frees the engine within about a token; a cancelled stream just ends, its text so far kept.
    One reader at a time; every other attribute may be read from any thread while it runs.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._over = threading.Event()                   # for those who wait for the end only: waking them at every token would slow the engine
        self._events: deque[Event] = deque()
        self._pieces: list[str] = []
        self._end: Finished | Failed | None = None
        self._wake: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self._sequence: Sequence | None = None
        self._cancel: Callable[[], None] = _nothing
        self._engine: object = None

    def _bind(self, sequence: Sequence, cancel: Callable[[], None], engine: object) -> None:
        with self._changed:
            self._sequence = sequence
            if self._end is None:
                self._cancel = cancel
                self._engine = engine                    # an engine lives as long as somebody reads from it

    def _put(self, event: Event) -> None:
        """Called by the engine's thread, or by its watchdog's with an end; nothing comes after an end."""
        with self._changed:
            if self._end is not None:
                return
            self._events.append(event)
            if isinstance(event, TextDelta):
                self._pieces.append(event.text)
            elif isinstance(event, Finished | Failed):
                self._end = event
            self._changed.notify_all()
            if self._end is not None:
                self._over.set()
            wake, self._wake = self._wake, None
        if wake is not None:
            loop, future = wake
            try:
                loop.call_soon_threadsafe(_resolve, future)
            except RuntimeError:                         # the reader's event loop is gone, and so is the reader
                self._cancel()
        if self._end is not None:
            # Outside the lock: this may be the last that is known of the engine, which closes then.
            self._cancel, self._engine = _nothing, None

    # ------------------------------------------------------------------------------------------------------------- reading

    def events(self) -> Iterator[Event]:
        """`TextDelta`, `PrefillProgress` and `PromptLogprobs`, then one `Finished` or `Failed`. Blocks while nothing is there."""
        while True:
            with self._changed:
                while not self._events:
                    if self._end is not None:
                        return
                    self._changed.wait()
                event = self._events.popleft()
            yield event

    async def aevents(self) -> AsyncIterator[Event]:
        """The same for asyncio."""
        while True:
            with self._changed:
                event = self._events.popleft() if self._events else None
                if event is None:
                    if self._end is not None:
                        return
                    loop = asyncio.get_running_loop()
                    future = loop.create_future()
                    self._wake = (loop, future)
            if event is None:
                await future
            else:
                yield event

    def __iter__(self) -> Iterator[str]:
        for event in self.events():
            if isinstance(event, TextDelta):
                yield event.text
        self._raise_if_failed()

    async def __aiter__(self) -> AsyncIterator[str]:
        async for event in self.aevents():
            if isinstance(event, TextDelta):
                yield event.text
        self._raise_if_failed()

    def text(self) -> str:
        """The whole answer; waits for its end. Raises the request's error."""
        self.wait()
        self._raise_if_failed()
        return self.text_so_far

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; True when it has come."""
        return self._over.wait(timeout)

    # ------------------------------------------------------------------------------------------------------------ snapshots

    @property
    def text_so_far(self) -> str:
        with self._changed:
            return "".join(self._pieces)

    @property
    def done(self) -> bool:
        return self._end is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while it runs, and when it failed."""
        return self._end.reason if isinstance(self._end, Finished) else None

    @property
    def error(self) -> Exception | None:
        return self._end.error if isinstance(self._end, Failed) else None

    @property
    def usage(self) -> Usage:
        return self._end.usage if self._end is not None else self._sequence.usage() if self._sequence else Usage()

    @property
    def timings(self) -> Timings:
        return self._end.timings if self._end is not None else self._sequence.timings() if self._sequence else Timings()

    @property
    def progress(self) -> PrefillProgress | None:
        """How far the prompt has been read; None before the request was queued."""
        return self._sequence.progress() if self._sequence else None

    @property
    def submitted(self) -> float:
        """When the request was made, in `time.perf_counter`'s seconds."""
        return self._sequence.submitted if self._sequence else 0.0

    @property
    def token_times(self) -> tuple[float, ...]:
        """When each token of the answer so far was there, in `time.perf_counter`'s seconds."""
        return tuple(self._sequence.token_times) if self._sequence else ()

    # --------------------------------------------------------------------------------------------------------------- ending

    def cancel(self) -> None:
        """Stop generating. Returns at once; the end arrives as an event. Harmless when it already ended."""
        if self._end is None:
            self._cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()

    def __del__(self) -> None:
        if "_engine" in self.__dict__:                   # an interrupt may come while it is being made
            self.cancel()

    def _raise_if_failed(self) -> None:
        if isinstance(self._end, Failed):
            # Without the traceback of whoever raised it before: several streams may share one error.
            raise self._end.error.with_traceback(None)


def _nothing() -> None:
    """How to cancel what has ended, or was never asked for."""


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
