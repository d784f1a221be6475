"""Drafts by a small model of the same family: it reads what the large one reads, and says what it would say.

The draft model has slots of its own. Before it drafts, each slot is cut back to what the sequence really became and reads what is new: one or two
tokens as a rule. Then all sequences advance together, one forward for each drafted position.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

import numpy as np

from edgeinfer.errors import BadRequest
from edgeinfer.runtime.backend import Backend
from edgeinfer.runtime.slots import common_prefix
from edgeinfer.runtime.speculative import Draft
from edgeinfer.runtime.step_cost import StepCost
from edgeinfer.runtime.values import Chunk, StepPlan, StepResult

if TYPE_CHECKING:
    from edgeinfer.runtime.sequence import Sequence

_SIZE_TOLERANCE = 128                     # vocabularies are padded differently; llama.cpp allows as much
_COMPARED = 2000                          # tokens of the vocabularies that are compared
_FEW = 8                                  # tokens behind which a sequence still drafts at once


@dataclass
class _Slot:
    """``tokens`` are in the draft model's KV."""

    index: int
    tokens: list[int] = field(default_factory=list)
    owner: ReferenceType[Sequence] | None = None
    last_used: int = 0


@dataclass
class _Run:
    """One sequence of the present call."""

    slot: _Slot
    pending: list[int]                   # to be computed before the next guess
    limit: int
    drafted: list[int] = field(default_factory=list)


class DraftModel:
    """Drafter with a model. See `edgeinfer.runtime.speculative.Drafter`. Owns ``draft`` from here on.

    threshold: a draft ends where the draft model gives its own likeliest token less probability.
    read_ahead: tokens of prompts that it reads in one call at most, so that no answer waits long; a sequence further behind drafts later.
    Raises `BadRequest`, and does not own ``draft``, where the two models do not share their vocabulary.
    """

    costly = True
    chance = 0.8                          # of what passes the threshold

    def __init__(
        self, draft: Backend, target: Backend, *, threshold: float = 0.45, read_ahead: int = 512, clock: Callable[[], float] = time.perf_counter,
    ):
        if not 0 <= threshold <= 1:
            raise BadRequest(f"The threshold of a draft model is a probability from 0 to 1, not {threshold!r}.")
        _check_vocabularies(draft, target)
        self._backend = draft
        self._n_vocab = target.info.n_vocab
        self._end_ids = target.vocab.end_ids | draft.vocab.end_ids
        self._threshold = threshold
        self._read_ahead = max(1, read_ahead)
        self._clock = clock
        self._costs = StepCost()
        self._slots = [_Slot(index) for index in range(draft.info.max_slots)]
        self._width = min(draft.info.max_seqs or draft.info.max_slots, draft.info.max_logits or draft.info.max_slots)
        self._tick = 0

    def draft(self, sequences: Seq[Sequence], limits: Seq[int]) -> list[Draft]:
        self._tick += 1
        runs = self._runs(sequences, limits)
        self._read(runs.values())
        ready = [run for run in runs.values() if len(run.pending) <= _FEW]
        while ready:
            ready = self._advance(ready)
        return [Draft(runs[at].drafted if at in runs else [], 0, self.chance) for at in range(len(sequences))]

    def seconds(self, width: int) -> float:
        return self._costs.seconds(width) if width else 0.0

    def forget(self, seq: Sequence) -> None:
        for slot in self._slots:
            if slot.owner is not None and slot.owner() is seq:
                slot.owner = None                        # its tokens stay: the next turn of the conversation starts with them

    def close(self) -> None:
        self._backend.close()

    # ---------------------------------------------------------------------------------------------------------------- slots

    def _runs(self, sequences: Seq[Sequence], limits: Seq[int]) -> dict[int, _Run]:
        """The sequences that can be drafted now, by their place in ``sequences``, each in its slot and the slot cut back to what it shares."""
        n_ctx = self._backend.info.n_ctx
        wanted = {at: seq for at, (seq, limit) in enumerate(zip(sequences, limits, strict=True)) if limit > 0 and len(seq.tokens) + limit <= n_ctx}
        held: dict[int, _Slot] = {}
        for slot in self._slots:
            owner = slot.owner() if slot.owner is not None else None
            at = next((at for at, seq in wanted.items() if seq is owner), None) if owner is not None else None
            if at is not None:
                held[at] = slot
        free = [slot for slot in self._slots if slot not in held.values()]
        runs: dict[int, _Run] = {}
        for at, seq in wanted.items():
            if len(runs) == self._width:
                break
            chosen = held.get(at) or self._take(free, seq)
            if chosen is not None:
                chosen.last_used = self._tick
                shared = self._cut(chosen, common_prefix(chosen.tokens, seq.tokens, len(seq.tokens) - 1))
                runs[at] = _Run(chosen, seq.tokens[shared:], limits[at])
        return runs

    def _take(self, free: list[_Slot], seq: Sequence) -> _Slot | None:
        """The slot of nobody present that shares most with the sequence; else the least recently used."""
        if not free:
            return None
        def worth(slot: _Slot) -> tuple[int, int]:
            unowned = slot.owner is None or slot.owner() is None
            return common_prefix(slot.tokens, seq.tokens, len(seq.tokens)) if unowned else 0, -slot.last_used

        slot = max(free, key=worth)
        free.remove(slot)
        slot.owner = ref(seq)
        return slot

    def _cut(self, slot: _Slot, length: int) -> int:
        """Keep the first ``length`` tokens, or none where the memory cannot; returns how many are left."""
        if length < len(slot.tokens):
            length = self._backend.reusable(slot.index, len(slot.tokens), length)
            if not self._backend.truncate(slot.index, length):
                self._backend.truncate(slot.index, 0)
                length = 0
            del slot.tokens[length:]
        return length

    # ------------------------------------------------------------------------------------------------------------ computing

    def _read(self, runs: Iterable[_Run]) -> None:
        """Let those that are far behind read, as many tokens as one call may."""
        budget = self._read_ahead
        for run in runs:
            while len(run.pending) > _FEW and budget > 0:
                size = min(budget, self._backend.info.max_batch, len(run.pending) - 1)
                budget -= size
                chunk = Chunk(run.slot.index, len(run.slot.tokens), run.pending[:size], n_logits=0)
                if not self._done(run, chunk, self._forward(StepPlan((), (chunk,)))):
                    return                               # no room or a fault: try again in a later step

    def _advance(self, ready: list[_Run]) -> list[_Run]:
        """One more guess for each; returns those that may go on."""
        going: list[_Run] = []
        began, tokens, forwards = self._clock(), sum(len(run.pending) for run in ready), 0
        for group in self._groups(ready):
            forwards += 1
            chunks = tuple(Chunk(run.slot.index, len(run.slot.tokens), run.pending, n_logits=1) for run in group)
            result = self._forward(StepPlan(chunks, ()))
            for run, chunk in zip(group, chunks, strict=True):
                if self._done(run, chunk, result) and self._guess(run, result.logits[run.slot.index][0]):
                    going.append(run)
        if forwards == 1:
            self._costs.add(tokens, self._clock() - began)
        return going

    def _groups(self, ready: list[_Run]) -> Iterator[list[_Run]]:
        """As few forwards as their batches allow."""
        group: list[_Run] = []
        size = 0
        for run in ready:
            if group and size + len(run.pending) > self._backend.info.max_batch:
                yield group
                group, size = [], 0
            group.append(run)
            size += len(run.pending)
        yield group

    def _forward(self, plan: StepPlan) -> StepResult:
        result = self._backend.forward(plan)
        if result.no_room:
            for slot in self._slots:                     # what nobody uses now gives way; who found no room tries again in the next step
                if slot.last_used < self._tick and slot.tokens:
                    self._cut(slot, 0)
        return result

    def _done(self, run: _Run, chunk: Chunk, result: StepResult) -> bool:
        """Whether the chunk was computed; then its tokens are in the KV."""
        if chunk.slot in result.failed:
            self._cut(run.slot, 0)
            return False
        if chunk.slot in result.no_room or chunk.slot in result.aborted:
            return False
        run.slot.tokens += chunk.tokens
        run.pending = run.pending[len(chunk.tokens) :]
        return True

    def _guess(self, run: _Run, row: np.ndarray) -> bool:
        """Append the likeliest token, where the model is sure enough; whether another may follow."""
        token = int(row.argmax())
        top = row[token]
        if not np.isfinite(top) or token >= self._n_vocab or token in self._end_ids:
            return False
        if self._threshold > 0 and float(np.exp(row - top).sum()) * self._threshold > 1:
            return False
        run.drafted.append(token)
        run.pending = [token]
        return len(run.drafted) < run.limit


def _check_vocabularies(draft: Backend, target: Backend) -> None:
    """Token ids must mean the same to both."""
    small, large = draft.vocab, target.vocab
    if draft is target:
        raise BadRequest(f"{target.info.model} cannot draft for itself with one backend; load the draft model separately.")
    common = min(draft.info.n_vocab, target.info.n_vocab)
    reason = None
    if abs(draft.info.n_vocab - target.info.n_vocab) > _SIZE_TOLERANCE:
        reason = f"they have {draft.info.n_vocab:,} and {target.info.n_vocab:,} tokens"
    elif small.bos_id != large.bos_id and None not in (small.bos_id, large.bos_id):
        reason = f"their BOS tokens are {small.bos_id} and {large.bos_id}"
    else:
        special = {token for token in (*small.end_ids, *large.end_ids, small.bos_id, large.bos_id) if token is not None and token < common}
        for token in sorted(special.union(range(0, common, max(1, common // _COMPARED)))):
            if small.token_text(token) != large.token_text(token) or small.token_bytes(token) != large.token_bytes(token):
                reason = f"token {token} is {small.token_text(token)!r} in one and {large.token_text(token)!r} in the other"
                break
    if reason is not None:
        names = f"{draft.info.model} cannot draft for {target.info.model}"
        raise BadRequest(f"{names}: their vocabularies differ ({reason}); choose a draft model of the same family.")
