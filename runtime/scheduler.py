"""What to compute next.

There is no prefill phase and no decode phase. The one rule: each step lets every running sequence's ``num_computed`` catch up with its tokens, under
a token budget. Decoders (one token behind) go first; what budget is left reads prompts, and less of it while anybody decodes, so that the gap
between two tokens of one answer does not depend on the length of somebody else's prompt.

A request with a seed of its own should repeat exactly, and kernels round differently by the number of rows in a batch. So its prompt is always read
in chunks of one size that begin at multiples of it, whatever is cached, and its tokens are decoded in a batch of their own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from edgeinfer.errors import BadRequest
from edgeinfer.runtime.sequence import Sequence, Status
from edgeinfer.runtime.slots import SlotTable
from edgeinfer.runtime.values import Chunk, StepPlan


@dataclass(frozen=True)
class SchedulerOptions:
    """max_num_batched_tokens: of one step. prefill_chunk: prompt tokens of one step when nobody decodes; prefill_chunk_busy: when somebody does."""

    max_num_batched_tokens: int = 2048
    prefill_chunk: int = 512
    prefill_chunk_busy: int = 128
    max_waiting: int = 256

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadRequest(f"{name} must be a whole number from 1, not {value!r}.")


class Scheduler:
    """Holds the waiting and the running sequences; decides, computes nothing. Deterministic for given arrivals."""

    def __init__(self, slots: SlotTable, options: SchedulerOptions):
        width = len(slots.slots)
        if options.max_num_batched_tokens < width:
            raise BadRequest(f"A step of {options.max_num_batched_tokens} tokens cannot serve {width} sequences; raise batch_size to {width} or lower parallel.")
        self._slots = slots
        self._options = options
        # The chunk of requests with a seed: one that always fits, whoever decodes beside it.
        self._steady_chunk = max(1, min(options.prefill_chunk, options.prefill_chunk_busy, options.max_num_batched_tokens - width))
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []                # in order of admission: the last is the youngest
        # After a preemption nobody is let in until a sequence leaves: the one just put out would come straight back, and the two could take the
        # last cells from each other for ever.
        self._full = False

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> StepPlan:
        """Admit what fits, then plan one step over all running sequences. Empty when there is nothing to run."""
        self._admit()
        decoding = [seq for seq in self.running if seq.is_decoding]
        budget = self._options.max_num_batched_tokens - len(decoding)
        budget = min(budget, self._options.prefill_chunk_busy if decoding else self._options.prefill_chunk)
        prefills = []
        for seq in self.running:
            if seq.is_decoding or budget <= 0:
                continue
            size = min(self._steady_chunk if seq.reproducible else budget, seq.num_uncomputed)
            if size > budget:            # of a fixed size and not fitting any more: next step
                break
            budget -= size
            prefills.append(_chunk(seq, size))
        return StepPlan(tuple(_chunk(seq, 1) for seq in decoding), tuple(prefills))

    def _admit(self) -> None:
        while self.waiting and not self._full:
            seq = self.waiting[0]
            lease = self._slots.acquire(seq.tokens, multiple=self._steady_chunk if seq.reproducible else 1)
            if lease is None:
                return
            self.waiting.popleft()
            seq.admitted(lease)
            self.running.append(seq)

    def advance(self, seq: Sequence, count: int) -> None:
        """``count`` more of the sequence's tokens are in the KV."""
        assert seq.slot is not None
        seq.num_computed += count
        self._slots.slots[seq.slot].length = seq.num_computed

    def preempt_youngest(self) -> Sequence | None:
        """Take the youngest sequence's KV away; it goes to the head of the queue and is recomputed later. None when fewer than two run."""
        if len(self.running) < 2:
            return None
        seq = self.running.pop()
        assert seq.slot is not None      # a running sequence always has one
        self._slots.release(seq.slot, 0, keep=False)
        seq.preempted()
        self._full = True
        self.waiting.appendleft(seq)
        return seq

    def remove(self, sequence: Sequence, *, keep: bool) -> None:
        """The sequence is over, wherever it was. ``keep`` leaves its KV as cache."""
        self._full = False
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            assert sequence.slot is not None
            self._slots.release(sequence.slot, sequence.num_computed if keep else 0, keep=keep)
            sequence.slot = None
        else:
            self.waiting.remove(sequence)


def _chunk(seq: Sequence, size: int) -> Chunk:
    assert seq.slot is not None
    start = seq.num_computed
    end = start + size
    return Chunk(seq.slot, start, seq.tokens[start:end], wants_logits=end == len(seq.tokens), alone=seq.reproducible)
