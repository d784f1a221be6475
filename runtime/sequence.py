"""One request inside the engine: its tokens, how many of them are in the KV, and its clock."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable

from edgeinfer.runtime.detokenizer import Detokenizer
from edgeinfer.runtime.sampling import Sampler
from edgeinfer.runtime.slots import Lease
from edgeinfer.runtime.stops import StopMatcher
from edgeinfer.runtime.values import Event, FinishReason, PrefillProgress, SamplingParams, Timings, Usage


class Status(enum.Enum):
    """Where a sequence is. PREEMPTED waits like WAITING, but its answer has begun."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    STOPPED = "stopped"                  # end-of-turn token or stop string
    EXHAUSTED = "exhausted"              # max_tokens or context used up
    CANCELLED = "cancelled"
    FAILED = "failed"


FINISH_REASON = {
    Status.STOPPED: FinishReason.STOP,
    Status.EXHAUSTED: FinishReason.LENGTH,
    Status.CANCELLED: FinishReason.CANCELLED,
}


class Sequence:
    """Mutable state of one request. Only the engine's thread writes it; `usage` and `timings` may be read from any thread.

    ``tokens`` is prompt + answer. The invariant of the engine::

        0 ........ num_computed ........ len(tokens)
        |  in the KV of `slot`  | to be computed  |          the last sampled token is never in the KV yet
    """

    def __init__(
        self,
        prompt: Iterable[int],
        params: SamplingParams,
        *,
        sampler: Sampler,
        detokenizer: Detokenizer,
        emit: Callable[[Event], None],
    ):
        self.tokens = list(prompt)
        self.prompt_len = len(self.tokens)
        self.params = params
        self.sampler = sampler
        self.detokenizer = detokenizer
        self.stops = StopMatcher(params.stop)
        self.emit = emit
        self.status = Status.WAITING
        self.slot: int | None = None
        self.num_computed = 0
        self.cached = 0                                  # prompt tokens reused at first admission
        self.cache_miss: str | None = None
        self.submitted = time.perf_counter()
        self.scheduled: float | None = None
        self.token_times: list[float] = []               # one per sampled token
        self.ended: float | None = None

    # ------------------------------------------------------------------------------------------- what the scheduler tells it

    def admitted(self, lease: Lease) -> None:
        """It got a slot that already holds the first ``lease.reused`` tokens."""
        self.slot = lease.slot
        self.num_computed = lease.reused
        self.status = Status.RUNNING
        if self.scheduled is None:                       # a preempted sequence keeps its first clock and its first cache report
            self.scheduled = time.perf_counter()
            self.cached = lease.reused
            self.cache_miss = lease.miss

    def preempted(self) -> None:
        """Its KV was taken; all its tokens will be computed again."""
        self.slot = None
        self.num_computed = 0
        self.status = Status.PREEMPTED

    # ---------------------------------------------------------------------------------------------------------- questions

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Exactly the newest sampled token is missing from the KV."""
        return len(self.tokens) > self.prompt_len and self.num_uncomputed == 1

    @property
    def reproducible(self) -> bool:
        """The caller named a seed and will expect the same answer again, whoever else is being served then."""
        return self.params.seed is not None and self.params.temperature > 0

    @property
    def generated(self) -> int:
        return len(self.token_times)

    def usage(self) -> Usage:
        return Usage(self.prompt_len, self.cached, self.generated, self.sampler.seed, self.cache_miss)

    def timings(self) -> Timings:
        """A snapshot; while the request runs, open intervals end now."""
        now = self.ended if self.ended is not None else time.perf_counter()
        times = self.token_times
        count = len(times)
        first = times[0] if count else None
        scheduled = self.scheduled if self.scheduled is not None else now
        newest = times[count - 1] if count else now
        recent = count
        while recent > 0 and times[recent - 1] > newest - 1.0:
            recent -= 1
        window = newest - times[recent] if count - recent > 1 else 0.0
        return Timings(
            queue_ms=1e3 * (scheduled - self.submitted),
            cache_n=self.cached,
            prompt_n=max(0, (self.prompt_len if first is not None else self.num_computed) - self.cached),
            prompt_ms=1e3 * ((first if first is not None else now) - scheduled),
            predicted_n=count,
            predicted_ms=1e3 * (newest - first) if first is not None else 0.0,
            first_token_ms=None if first is None else 1e3 * (first - self.submitted),
            last_second_per_second=(count - recent - 1) / window if window > 0 else 0.0,
        )

    def progress(self) -> PrefillProgress:
        scheduled = self.scheduled if self.scheduled is not None else time.perf_counter()
        return PrefillProgress(min(self.num_computed, self.prompt_len), self.prompt_len, self.cached, 1e3 * (time.perf_counter() - scheduled))
