"""One request inside the engine: its tokens, how many of them are in the KV, and its clock."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable

from edgeinfer.runtime.constraint import ConstraintState
from edgeinfer.runtime.detokenizer import Detokenizer
from edgeinfer.runtime.logprobs import AnswerLogprobs, PromptScores
from edgeinfer.runtime.sampling import Sampler
from edgeinfer.runtime.slots import Lease
from edgeinfer.runtime.stops import StopMatcher
from edgeinfer.runtime.values import Event, FinishReason, PrefillProgress, RequestOptions, SamplingParams, Timings, Usage


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
        options: RequestOptions = RequestOptions(),
        constraint: ConstraintState | None = None,
        keep: int = 0,
        dropped: int = 0,
    ):
        self.tokens = list(prompt)
        self.prompt_len = len(self.tokens)
        self.params = params
        self.options = options
        self.constraint = constraint
        self.keep = keep                                 # leading tokens that a context shift must leave: the system turn
        self.dropped = dropped                           # tokens that the context policy let go so far
        self.sampler = sampler
        self.detokenizer = detokenizer
        self.stops = StopMatcher(params.stop)
        self.logprobs = AnswerLogprobs(params.logprobs) if params.logprobs is not None else None
        self.scores = PromptScores(self.tokens, options.prompt_logprobs) if options.prompt_logprobs is not None else None
        self.emit = emit
        self.status = Status.WAITING
        self.slot: int | None = None
        self.num_computed = 0
        self.cached = 0                                  # prompt tokens reused at first admission
        self.cache_miss: str | None = None
        self.draft: list[int] = []                       # guesses at what follows the newest token, to be checked in the next step
        self.drafted = 0
        self.accepted = 0
        self.preemptions = 0
        self.shifts = 0
        # The scheduler's notes: place in the queue, and the running sequence whose prefix it waits for.
        self.order = 0
        self.due = 0
        self.leader: Sequence | None = None
        self.awaited = 0
        self.gives_up = 0
        self.patient = True
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
        self.draft = []
        self.preemptions += 1
        self.status = Status.PREEMPTED

    def shifted(self, keep: int, drop: int, held: int) -> None:
        """``drop`` tokens after the first ``keep`` left its context; ``held`` of the others are in the KV."""
        del self.tokens[keep : keep + drop]              # in place: the slot table holds the same list
        self.num_computed = held
        self.dropped += drop
        self.shifts += 1

    # ---------------------------------------------------------------------------------------------------------- questions

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Exactly the newest sampled token is missing from the KV."""
        return bool(self.token_times) and len(self.tokens) - self.num_computed == 1

    @property
    def scoring(self) -> bool:
        """Of its prompt every row of logits is wanted, and not all have been seen yet."""
        return self.scores is not None and not self.scores.complete

    @property
    def reproducible(self) -> bool:
        """The caller named a seed and will expect the same answer again, whoever else is being served then."""
        return self.params.seed is not None and self.params.temperature > 0

    @property
    def generated(self) -> int:
        return len(self.token_times)

    def draft_limit(self, n_ctx: int) -> int:
        """Tokens that may be drafted now without overrunning max_tokens or the context; the step itself gives one more."""
        left = n_ctx - len(self.tokens)
        if self.params.max_tokens is not None:
            left = min(left, self.params.max_tokens - len(self.token_times) - 1)
        return max(0, left)

    def usage(self) -> Usage:
        return Usage(self.prompt_len, self.cached, self.generated, self.sampler.seed, self.cache_miss, self.dropped)

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
        # Of a running answer only the newest: whoever watches asks several times a second.
        since = 0 if self.ended is not None else max(0, count - 256)
        gaps = sorted(after - before for before, after in zip(times[since : count - 1], times[since + 1 : count]))
        return Timings(
            queue_ms=1e3 * (scheduled - self.submitted),
            cache_n=self.cached,
            prompt_n=max(0, (self.prompt_len if first is not None else self.num_computed) - self.cached),
            prompt_ms=1e3 * ((first if first is not None else now) - scheduled),
            predicted_n=count,
            predicted_ms=1e3 * (newest - first) if first is not None else 0.0,
            first_token_ms=None if first is None else 1e3 * (first - self.submitted),
            last_second_per_second=(count - recent - 1) / window if window > 0 else 0.0,
            itl_p50_ms=_percentile(gaps, 0.5),
            itl_p99_ms=_percentile(gaps, 0.99),
            itl_max_ms=_percentile(gaps, 1),
            draft_n=self.drafted,
            draft_n_accepted=self.accepted,
            preemptions=self.preemptions,
            shifts=self.shifts,
        )

    def progress(self) -> PrefillProgress:
        scheduled = self.scheduled if self.scheduled is not None else time.perf_counter()
        return PrefillProgress(min(self.num_computed, self.prompt_len), self.prompt_len, self.cached, 1e3 * (time.perf_counter() - scheduled))


def _percentile(ascending: list[float], share: float) -> float:
    """In milliseconds, of seconds; the nearest rank. 0 of nothing."""
    return 1e3 * ascending[round(share * (len(ascending) - 1))] if ascending else 0.0
