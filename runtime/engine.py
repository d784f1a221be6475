"""The engine: a loop that reads as one sentence. Draft, schedule, forward, sample, update, emit.

`EngineCore` is single-threaded and owns the backend; `edgeinfer.runtime.service.Engine` gives it a thread and a public face.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from edgeinfer.errors import BackendFailed, EdgeInferError, EngineClosed, OutOfMemory
from edgeinfer.runtime.backend import Backend
from edgeinfer.runtime.context_policy import plan_shift
from edgeinfer.runtime.scheduler import Scheduler, SchedulerOptions
from edgeinfer.runtime.sequence import FINISH_REASON, Sequence, Status
from edgeinfer.runtime.slots import SlotTable
from edgeinfer.runtime.values import Chunk, Failed, Finished, PromptLogprobs, StepPlan, StepResult, TextDelta, TokenLogprob

if TYPE_CHECKING:
    from edgeinfer.runtime.kv_spill import KVPersistence
    from edgeinfer.runtime.speculative import Speculator


@dataclass
class EngineCounters:
    """Monotonic totals since the engine started. submitted = finished + cancelled + failed + those still inside."""

    submitted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    steps: int = 0
    busy_seconds: float = 0.0            # spent in forwards
    decode_steps: int = 0                # steps in which anybody decoded; decode_rows / decode_steps is how full their batches were
    decode_rows: int = 0
    prompt_tokens: int = 0               # of requests that ended
    cached_tokens: int = 0
    prefix_hits: int = 0                 # requests that reused anything
    generated_tokens: int = 0            # by running requests too
    prefill_tokens: int = 0              # prompt tokens computed, by running requests too, again after preemptions
    preemptions: int = 0
    shifts: int = 0
    draft_tokens: int = 0
    draft_tokens_accepted: int = 0

    @property
    def inside(self) -> int:
        """Requests queued or running."""
        return self.submitted - self.finished - self.cancelled - self.failed


class EngineCore:
    """Everything between the queue of requests and the backend. Call from one thread only."""

    def __init__(
        self,
        backend: Backend,
        options: SchedulerOptions = SchedulerOptions(),
        speculator: Speculator | None = None,
        persistence: KVPersistence | None = None,
    ):
        self.backend = backend
        # The plan must never be larger than what one forward accepts, however the two were configured.
        self.options = replace(options, max_num_batched_tokens=min(options.max_num_batched_tokens, backend.info.max_batch))
        self.slots = SlotTable(backend, self.options.cache_bytes, persistence)
        self.scheduler = Scheduler(self.slots, self.options, backend.info.attention_depth)
        self.speculator = speculator
        self.counters = EngineCounters()
        self.inside: set[Sequence] = set()               # every request from its submission, by whatever thread, to its end
        self.overdue: EdgeInferError | None = None       # the step that runs now was given up: what its requests were told meanwhile

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(self, seq: Sequence) -> None:
        """Queue a sequence whose prompt is known to fit the context; whoever calls has counted it."""
        self.inside.add(seq)
        self.scheduler.add(seq)
        if seq.params.max_tokens == 0 and not seq.scoring:
            self._end(seq, Status.EXHAUSTED)

    def cancel(self, seq: Sequence) -> None:
        """End a sequence wherever it is; its text so far has been delivered and its KV stays as cache. Too late is harmless."""
        if seq.ended is None:
            self._end(seq, Status.CANCELLED)

    def step(self) -> None:
        """Let every running sequence catch up by one step."""
        if self.speculator is not None:
            self._draft(self.speculator)
        plan = self.scheduler.schedule()
        if not plan.decodes and not plan.prefills:
            return
        by_slot = {seq.slot: seq for seq in self.scheduler.running}
        began = time.perf_counter()
        result = self.backend.forward(plan)
        self._count(plan, time.perf_counter() - began)
        if self.overdue is not None:                     # too late: nobody is to get another token, or a better end than the one they were told
            raise self.overdue
        for chunk in plan.decodes:
            self._update(by_slot[chunk.slot], chunk, result)
        for chunk in plan.prefills:
            self._update(by_slot[chunk.slot], chunk, result)
        if result.no_room:
            self._make_room(len(by_slot))

    def drop_cache(self) -> None:
        """Unless anybody is inside: save the idle conversations where that was asked for, forget them, and give back the memory of their KV."""
        if self.inside or self.has_work:
            return
        self.slots.save_all()
        while self.slots.evict_idle():
            pass
        self.backend.drop_kv()

    def fail_all(self, error: EdgeInferError) -> None:
        """Nothing can run any more: every sequence inside ends with ``error``."""
        self.fail_running(error)
        for seq in list(self.scheduler.waiting):
            self._fail(seq, error)

    def fail_running(self, error: EdgeInferError) -> None:
        """What is being computed ends with ``error``; who waits for a slot gets one."""
        for seq in list(self.scheduler.running):
            self._fail(seq, error)

    def abandon(self, error: EdgeInferError) -> None:
        """Like `fail_all`, without touching a backend that can no longer be trusted to answer."""
        for seq in list(self.inside):
            self._account(seq, Status.FAILED)
            seq.emit(Failed(error, seq.usage(), seq.timings()))
        self.scheduler.running.clear()
        self.scheduler.waiting.clear()
        if self.slots.persistence is not None:
            self.slots.persistence.abandon()
            self.slots.persistence = None                # what this backend holds is not to be saved

    def close(self) -> None:
        """Save the conversations where that was asked for, end what is inside and free the backend."""
        try:
            self._save_all()
            self.fail_all(EngineClosed("The engine was closed while the request was running."))
            if self.speculator is not None:
                self.speculator.close()
        finally:
            self.backend.close()

    def _save_all(self) -> None:
        persistence = self.slots.persistence
        if persistence is not None:
            try:
                self.slots.save_all()
            finally:
                persistence.close()
                self.slots.persistence = None            # what fails from here on frees slots that need no saving

    # ------------------------------------------------------------------------------------------------------------ one step

    def _draft(self, speculator: Speculator) -> None:
        """Let answers that decode be guessed ahead, as far as one forward has room."""
        decoding = [seq for seq in self.scheduler.running if seq.is_decoding]
        together = [seq for seq in decoding if not seq.reproducible]     # the others run in batches of their own
        drafted = [seq for seq in together if seq.options.speculative and seq.constraint is None]
        info, most = self.backend.info, self.options.max_num_batched_tokens
        room = min(most, info.max_logits or most) - self.scheduler.width
        if len(decoding) < len(self.scheduler.running) or self.scheduler.waiting:
            # Guesses never take the place of somebody's prompt.
            room = min(room, most - self.scheduler.width - self.scheduler.steady_chunk)
            if any(seq.scoring for seq in self.scheduler.running):
                room = 0                                 # nor its rows of logits
        if info.kv_cells:                                # nor anybody's cells
            room = min(room, info.kv_cells - self.slots.running_tokens - self.scheduler.width)
        speculator.propose(drafted, room, n_ctx=info.n_ctx, others=len(together) - len(drafted))

    def _count(self, plan: StepPlan, seconds: float) -> None:
        counters = self.counters
        counters.steps += 1
        counters.busy_seconds += seconds
        if plan.decodes:
            rows = sum(chunk.n_logits for chunk in plan.decodes)
            counters.decode_steps += 1
            counters.decode_rows += rows
            if self.speculator is not None and not plan.prefills and not any(chunk.alone for chunk in plan.decodes):
                self.speculator.measured(rows, seconds)

    def _update(self, seq: Sequence, chunk: Chunk, result: StepResult) -> None:
        draft, seq.draft = seq.draft, []
        if chunk.slot in result.failed:
            self._fail(seq, BackendFailed(result.failed[chunk.slot]))
            return
        if chunk.slot in result.no_room or chunk.slot in result.aborted:
            return                                       # the chunk did not happen: it is planned again
        was_prefill = not seq.is_decoding
        self.scheduler.advance(seq, len(chunk.tokens) - len(draft))
        if was_prefill:
            self.counters.prefill_tokens += len(chunk.tokens)
            if not seq.token_times:
                seq.emit(seq.progress())
        if not chunk.n_logits:
            return
        rows = result.logits[chunk.slot]
        if seq.scoring and not self._score(seq, chunk, rows):
            return
        # A drafted token that the sampler chooses too makes the next row valid; the first that it does not ends the run. So every token is drawn from
        # the model's own distribution, whatever was drafted.
        right = 0
        status = None
        try:
            for row in rows if not was_prefill else rows[-1:]:
                token = seq.sampler.sample(row, None if seq.constraint is None else seq.constraint.allowed())
                status = self._accept(seq, token, row)
                if status is not None or right == len(draft) or token != draft[right]:
                    break
                right += 1
        except EdgeInferError as error:                  # logits that are no numbers, a constraint that fails: this sequence's fault alone
            self._fail(seq, error)
            return
        if draft and not self._settle(seq, len(draft), right):
            return
        if status is None and len(seq.tokens) > self.backend.info.n_ctx and not self._shift(seq):
            status = Status.EXHAUSTED
        if status is not None:
            self._end(seq, status)

    def _score(self, seq: Sequence, chunk: Chunk, rows: np.ndarray) -> bool:
        """Of a prompt that is to be scored these tokens were read. True when it is complete and the answer may begin."""
        assert seq.scores is not None
        try:
            seq.scores.add(chunk.start + len(chunk.tokens) - len(rows), rows)
        except EdgeInferError as error:                  # logits that are no numbers
            self._fail(seq, error)
            return False
        if seq.num_uncomputed:
            return False
        seq.emit(PromptLogprobs(seq.scores.entries))
        if seq.params.max_tokens == 0:
            self._end(seq, Status.EXHAUSTED)
            return False
        return True

    def _accept(self, seq: Sequence, token: int, row: np.ndarray) -> Status | None:
        """The newest token, drawn from ``row``: deliver its text. Returns how the answer ended, if it ends with it."""
        seq.token_times.append(time.perf_counter())
        self.counters.generated_tokens += 1
        seq.sampler.accept(token)
        seq.tokens.append(token)
        if token in self.backend.vocab.end_ids and not seq.params.ignore_eos:
            return Status.STOPPED
        piece = seq.detokenizer.push(token)
        text, stopped = seq.stops.push(piece)
        entries: tuple[TokenLogprob, ...] = ()
        if seq.logprobs is not None:
            seq.logprobs.add(row, token, piece)
            entries = seq.logprobs.released(text) if text else ()
        if text:
            seq.emit(TextDelta(text, entries))
        if stopped:
            return Status.STOPPED
        if seq.constraint is not None:
            seq.constraint.accept(token)
            if seq.constraint.complete:
                return Status.STOPPED
        return Status.EXHAUSTED if len(seq.token_times) == seq.params.max_tokens else None

    def _settle(self, seq: Sequence, drafted: int, right: int) -> bool:
        """Keep the KV of drafted tokens that were right and drop the rest. False when that cannot be done and the sequence failed."""
        assert seq.slot is not None and self.speculator is not None
        self.scheduler.advance(seq, right)
        seq.drafted += drafted
        seq.accepted += right
        self.counters.draft_tokens += drafted
        self.counters.draft_tokens_accepted += right
        self.speculator.settle(seq, drafted, right)
        if right == drafted or self.backend.truncate(seq.slot, seq.num_computed):
            return True
        self._fail(seq, BackendFailed("This model's memory cannot take drafted tokens back; load it without speculative decoding."))
        return False

    def _shift(self, seq: Sequence) -> bool:
        """The context is full: let go of old tokens, where the request asked for that. False when nothing can go."""
        if seq.options.context_policy != "shift":
            return False
        drop = plan_shift(seq.num_computed, seq.keep, self.backend.info.n_ctx)
        if drop <= 0:
            return False
        assert seq.slot is not None
        held = self.slots.shift(seq.slot, seq.keep, drop)
        seq.shifted(seq.keep, drop, held)
        if self.speculator is not None:
            self.speculator.forget(seq)                  # its tokens are others now
        self.counters.shifts += 1
        return True

    # ------------------------------------------------------------------------------------------------------------- endings

    def _end(self, seq: Sequence, status: Status) -> None:
        self.scheduler.remove(seq, keep=True)
        text = ""
        if not seq.stops.stopped:
            # What was held back as half a character or half a stop string turned out to be neither.
            text, _ = seq.stops.push(seq.detokenizer.flush())
            text += seq.stops.flush()
            if seq.stops.stopped and status is Status.EXHAUSTED:
                status = Status.STOPPED                  # with several stop strings, only the end decided that one was complete
        entries = seq.logprobs.rest(text, stopped=seq.stops.stopped) if seq.logprobs is not None else ()
        if text or entries:
            seq.emit(TextDelta(text, entries))
        self._account(seq, status)
        seq.emit(Finished(FINISH_REASON[status], seq.usage(), seq.timings()))

    def _fail(self, seq: Sequence, error: EdgeInferError) -> None:
        # What a failed step left in the KV is not to be trusted, let alone shared.
        self.scheduler.remove(seq, keep=False)
        self._account(seq, Status.FAILED)
        seq.emit(Failed(error, seq.usage(), seq.timings()))

    def _account(self, seq: Sequence, status: Status) -> None:
        seq.status = status
        seq.ended = time.perf_counter()
        self.inside.discard(seq)
        if self.speculator is not None:
            self.speculator.forget(seq)
        counters = self.counters
        counters.prompt_tokens += seq.prompt_len
        counters.cached_tokens += seq.cached
        counters.prefix_hits += seq.cached > 0
        if status is Status.CANCELLED:
            counters.cancelled += 1
        elif status is Status.FAILED:
            counters.failed += 1
        else:
            counters.finished += 1

    # ------------------------------------------------------------------------------------------------------------ pressure

    def _make_room(self, shared_by: int) -> None:
        """The KV was too full for a step of ``shared_by`` sequences: idle cache goes first, then the youngest waits. Who fits alone never fails."""
        if self.slots.evict_idle() or len(self.scheduler.running) < shared_by:
            return                                       # one that ended in this very step has made room too
        preempted = self.scheduler.preempt_youngest()
        if preempted is not None:
            self.counters.preemptions += 1
            if self.speculator is not None:
                self.speculator.forget(preempted)
            return
        for seq in list(self.scheduler.running):
            held = len(seq.tokens)
            self._fail(seq, OutOfMemory(f"The KV cache has no room for this conversation of {held:,} tokens even alone; load the model with more."))
