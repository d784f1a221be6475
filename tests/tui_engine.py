"""A scripted engine with the public shape of the real one, for tests of the terminal application: no model, no clock, no threads but its own."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from edgeinfer.errors import EngineClosed
from edgeinfer.runtime.values import BackendInfo, Event, Failed, Finished, FinishReason, PrefillProgress, TextDelta, Timings, Usage

INFO = BackendInfo(
    engine="fake", device="cpu", model="Scripted-1B", quantization="Q4_K_M", n_vocab=1000, n_ctx=4096, n_ctx_train=8192, max_slots=4, max_batch=512,
    kv_type="f16", kv_bytes_per_token=23040, weight_bytes=105_000_000, layers=30,
)


@dataclass
class Answer:
    """One scripted answer: pieces of text, then the end. Playing waits for `release` before piece number ``hold_at``."""

    pieces: Iterable[str] = ()
    error: Exception | None = None         # ends the answer in place of Finished
    refuse: Exception | None = None        # raised by chat() itself
    hold_at: int | None = None
    reason: FinishReason = FinishReason.STOP
    cached: int = 0
    cache_miss: str | None = None
    delay: float = 0.0                     # seconds between pieces; only for pictures and people
    release: threading.Event = field(default_factory=threading.Event)


class ScriptedStream:
    def __init__(self, answer: Answer, prompt_tokens: int):
        self._answer, self._prompt_tokens = answer, prompt_tokens
        self._items: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.cancelled = threading.Event()
        self.usage, self.timings, self.progress = Usage(), Timings(), None
        threading.Thread(target=self._play, daemon=True).start()

    def _play(self) -> None:
        answer, n = self._answer, 0
        total = self._prompt_tokens
        self.usage = Usage(total, min(answer.cached, total - 1), 0, 7, answer.cache_miss)
        self.progress = PrefillProgress(total, total, self.usage.cached_tokens, 120.0)
        self._items.put(self.progress)
        for index, piece in enumerate(answer.pieces):
            if index == answer.hold_at:
                while not (answer.release.wait(0.01) or self.cancelled.is_set()):
                    pass
            if self.cancelled.wait(answer.delay) if answer.delay else self.cancelled.is_set():
                break
            n += 1
            self.usage = Usage(total, self.usage.cached_tokens, n, 7, answer.cache_miss)
            self.timings = Timings(
                cache_n=self.usage.cached_tokens, prompt_n=total - self.usage.cached_tokens, prompt_ms=120.0, predicted_n=n, predicted_ms=25.0 * (n - 1),
                first_token_ms=180.0, last_second_per_second=40.0,
            )
            self._items.put(TextDelta(piece))
        if answer.hold_at is not None and n <= answer.hold_at:
            while not (answer.release.wait(0.01) or self.cancelled.is_set()):
                pass
        if self.cancelled.is_set():
            self._items.put(Finished(FinishReason.CANCELLED, self.usage, self.timings))
        elif answer.error is not None:
            self._items.put(Failed(answer.error, self.usage, self.timings))
        else:
            self._items.put(Finished(answer.reason, self.usage, self.timings))

    async def aevents(self) -> AsyncIterator[Event]:
        while True:
            try:
                event = self._items.get_nowait()
            except queue.Empty:
                event = await asyncio.get_running_loop().run_in_executor(None, self._items.get)
            yield event
            if isinstance(event, (Finished, Failed)):
                return

    def cancel(self) -> None:
        self.cancelled.set()


class ScriptedEngine:
    """Plays its answers in order and keeps the requests it got in `requests`."""

    info = INFO

    def __init__(self, *answers: Answer | str):
        self._answers = [Answer(words(answer)) if isinstance(answer, str) else answer for answer in answers]
        self.requests: list[tuple[list[dict[str, str]], object]] = []
        self.streams: list[ScriptedStream] = []
        self.closed = False

    def chat(self, messages, params=None, **_):
        if self.closed:
            raise EngineClosed("The engine was closed.")
        self.requests.append((messages, params))
        answer = self._answers.pop(0)
        if answer.refuse is not None:
            raise answer.refuse
        self.streams.append(ScriptedStream(answer, sum(len(m["content"].split()) + 4 for m in messages)))
        return self.streams[-1]

    def close(self) -> None:
        self.closed = True
        for stream in self.streams:
            stream.cancel()


def words(text: str) -> list[str]:
    """The text in pieces of about one token."""
    return [text[i : i + 4] for i in range(0, len(text), 4)]
