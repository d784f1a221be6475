"""The engine: a loop that reads as one sentence. Schedule, forward, sample, update, emit.

`EngineCore` is single-threaded and owns the backend; `edgeinfer.runtime.service.Engine` gives it a thread and a public face.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from edgeinfer.errors import BackendFailed, EdgeInferError, EngineClosed, OutOfMemory
from edgeinfer.runtime.backend import Backend
from edgeinfer.runtime.scheduler import Scheduler, SchedulerOptions
from edgeinfer.runtime.sequence import FINISH_REASON, Sequence, Status
from edgeinfer.runtime.slots import SlotTable
from edgeinfer.runtime.values import Chunk, Failed, Finished, StepResult, TextDelta


@dataclass
class EngineCounters:
    """Monotonic totals since the engine started. submitted = finished + cancelled + failed + those still inside."""

    submitted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0

    @property
    def inside(self) -> int:
        """Requests queued or running."""
        return self.submitted - self.finished - self.cancelled - self.failed


class EngineCore:
    """Everything between the queue of requests and the backend. Call from one thread only."""

    def __init__(self, backend: Backend, options: SchedulerOptions = SchedulerOptions()):
        self.backend = backend
        # The plan must never be larger than what one forward accepts, however the two were configured.
        self.options = replace(options, max_num_batched_tokens=min(options.max_num_batched_tokens, backend.info.max_batch))
        self._slots = SlotTable(backend)
        self._scheduler = Scheduler(self._slots, self.options)
        self.counters = EngineCounters()

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def submit(self, seq: Sequence) -> None:
        """Queue a sequence whose prompt is known to fit the context; whoever calls has counted it."""
        if seq.params.max_tokens == 0:
            self._scheduler.add(seq)
            self._end(seq, Status.EXHAUSTED)
        else:
            self._scheduler.add(seq)

    def cancel(self, seq: Sequence) -> None:
        """End a sequence wherever it is; its text so far has been delivered and its KV stays as cache. Too late is harmless."""
        if seq.ended is None:
            self._end(seq, Status.CANCELLED)

    def step(self) -> None:
        """Let every running sequence catch up by one step."""
        plan = self._scheduler.schedule()
        if not plan.chunks:
            return
        by_slot = {seq.slot: seq for seq in self._scheduler.running}
        result = self.backend.forward(plan)
        self.counters.steps += 1
        for chunk in plan.chunks:
            self._update(by_slot[chunk.slot], chunk, result)
        if result.no_room:
            self._make_room()

    def fail_all(self, error: EdgeInferError) -> None:
        """Nothing can run any more: every sequence inside ends with ``error``."""
        for seq in [*self._scheduler.running, *self._scheduler.waiting]:
            self._fail(seq, error)

    def abandon(self, error: EdgeInferError) -> None:
        """Like `fail_all`, without touching a backend that can no longer be trusted to answer."""
        for seq in [*self._scheduler.running, *self._scheduler.waiting]:
            self._account(seq, Status.FAILED)
            seq.emit(Failed(error, seq.usage(), seq.timings()))
        self._scheduler.running.clear()
        self._scheduler.waiting.clear()

    def close(self) -> None:
        """End what is inside and free the backend."""
        self.fail_all(EngineClosed("The engine was closed while the request was running."))
        self.backend.close()

    # ----------------------------------------------------------------------------------------------------------- one chunk

    def _update(self, seq: Sequence, chunk: Chunk, result: StepResult) -> None:
        if chunk.slot in result.failed:
            self._fail(seq, BackendFailed(result.failed[chunk.slot]))
            return
        if chunk.slot in result.no_room or chunk.slot in result.aborted:
            return                                       # the chunk did not happen: it is planned again
        was_prefill = not seq.is_decoding
        self._scheduler.advance(seq, len(chunk.tokens))
        if was_prefill and not seq.token_times:
            seq.emit(seq.progress())
        if chunk.wants_logits:
            try:
                token = seq.sampler.sample(result.logits[chunk.slot])
            except EdgeInferError as error:              # logits that are no numbers: this sequence's fault alone
                self._fail(seq, error)
                return
            self._accept(seq, token)

    def _accept(self, seq: Sequence, token: int) -> None:
        """The newest token: deliver its text, and see whether the answer ends with it."""
        seq.token_times.append(time.perf_counter())
        seq.sampler.accept(token)
        seq.tokens.append(token)
        vocab = self.backend.vocab
        if token in vocab.end_ids and not seq.params.ignore_eos:
            self._end(seq, Status.STOPPED)
            return
        text, stopped = seq.stops.push(seq.detokenizer.push(token))
        if text:
            seq.emit(TextDelta(text))
        if stopped:
            self._end(seq, Status.STOPPED)
        elif seq.generated == seq.params.max_tokens or len(seq.tokens) > self.backend.info.n_ctx:
            self._end(seq, Status.EXHAUSTED)

    # ------------------------------------------------------------------------------------------------------------- endings

    def _end(self, seq: Sequence, status: Status) -> None:
        self._scheduler.remove(seq, keep=True)
        if not seq.stops.stopped:
            # What was held back as half a character or half a stop string turned out to be neither.
            text, _ = seq.stops.push(seq.detokenizer.flush())
            text += seq.stops.flush()
            if text:
                seq.emit(TextDelta(text))
            if seq.stops.stopped and status is Status.EXHAUSTED:
                status = Status.STOPPED                  # with several stop strings, only the end decided that one was complete
        self._account(seq, status)
        seq.emit(Finished(FINISH_REASON[status], seq.usage(), seq.timings()))

    def _fail(self, seq: Sequence, error: EdgeInferError) -> None:
        # What a failed step left in the KV is not to be trusted, let alone shared.
        self._scheduler.remove(seq, keep=False)
        self._account(seq, Status.FAILED)
        seq.emit(Failed(error, seq.usage(), seq.timings()))

    def _account(self, seq: Sequence, status: Status) -> None:
        seq.status = status
        seq.ended = time.perf_counter()
        counters = self.counters
        counters.prompt_tokens += seq.prompt_len
        counters.cached_tokens += seq.cached
        counters.generated_tokens += seq.generated
        if status is Status.CANCELLED:
            counters.cancelled += 1
        elif status is Status.FAILED:
            counters.failed += 1
        else:
            counters.finished += 1

    # ------------------------------------------------------------------------------------------------------------ pressure

    def _make_room(self) -> None:
        """The KV is full: idle cache goes first, then the youngest sequence waits. A full cache never fails a request that fits alone."""
        if self._slots.evict_idle():
            return
        if self._scheduler.preempt_youngest() is not None:
            self.counters.preemptions += 1
            return
        for seq in list(self._scheduler.running):
            held = len(seq.tokens)
            self._fail(seq, OutOfMemory(f"The KV cache has no room for this conversation of {held:,} tokens even alone; load the model with more."))
