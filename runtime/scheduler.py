"""What to compute next.

There is no prefill phase and no decode phase. The one rule: each step lets every running sequence's ``num_computed`` catch up with its tokens, under
a token budget. Decoders (one token behind) go first; what budget is left reads prompts, and less of it while anybody decodes, so that the gap
between two tokens of one answer does not depend on the length of somebody else's prompt. A prompt's tokens take longer the further in they are, so the
pieces get smaller: `affordable`.

Whose prompt is read first follows from one number, the deadline: the engine's clock at arrival plus what the prompt itself takes, in tokens. Short
prompts are due before long ones that came at the same time, and a long one is overtaken only by what arrives before it is due, so nobody starves.
The clock counts planned tokens, not seconds: the same arrivals give the same plans.

Prefixes that are being read right now are not read twice: a request that shares one with a running sequence waits until it is there (`_follows`).

A request with a seed of its own should repeat exactly, and kernels round differently by the number of rows in a batch. So its prompt is always read
in chunks of one size that begin at multiples of it, whatever is cached, and its tokens are decoded in a batch of their own.
"""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass, replace

from edgeinfer.errors import BadRequest
from edgeinfer.runtime.sequence import Sequence, Status
from edgeinfer.runtime.slots import SlotTable
from edgeinfer.runtime.values import Chunk, StepPlan

POLICIES = ("shortest", "fcfs")
MAX_SEQS = 32                            # sequences that may run at once
_PATIENCE = 4                            # a prompt of n tokens is due after so many times n tokens of other work
_BATCH_DELAY = 1 << 16                   # how much later, in tokens of other work, a batch request is due than an interactive one
_WORTH_WAITING = 8                       # tokens of shared prefix under which computing them again is as quick as waiting
_STEADY_CHUNK = 128                      # prompt tokens of one step of a request with a seed, at most: it stays the same at any depth
_TILE = 64                               # kernels compute attention for so many prompt tokens together, wanted or not


@dataclass(frozen=True)
class SchedulerOptions:
    """Sizes are tokens unless they say otherwise."""

    max_num_seqs: int = 0                # sequences that run at once, 1 .. 32; 0: as many as the backend was made for
    max_num_batched_tokens: int = 2048   # of one step
    prefill_chunk: int = 512             # prompt tokens of one step when nobody decodes
    prefill_chunk_busy: int = 256        # and when somebody does, at the start of a prompt; further in fewer, which take as long
    batch_wait_ms: float = 0             # an idle engine gathers requests for so long before its first step
    max_waiting: int = 256               # requests inside, beyond which new ones are refused as busy
    policy: str = "shortest"             # "shortest": by deadline; "fcfs": first come, first served
    cache_bytes: int = 0                 # KV that idle conversations may keep; 0: all there is room for

    def __post_init__(self) -> None:
        for name, low in (("max_num_seqs", 0), ("max_num_batched_tokens", 1), ("prefill_chunk", 1), ("prefill_chunk_busy", 1), ("max_waiting", 1), ("cache_bytes", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise BadRequest(f"{name} must be a whole number from {low}, not {value!r}.")
        if self.max_num_seqs > MAX_SEQS:
            raise BadRequest(f"max_num_seqs must be at most {MAX_SEQS}, not {self.max_num_seqs}.")
        wait = self.batch_wait_ms
        if not isinstance(wait, (int, float)) or isinstance(wait, bool) or not 0 <= wait <= 10_000:
            raise BadRequest(f"batch_wait_ms must be a number from 0 to 10000, not {wait!r}.")
        if self.policy not in POLICIES:
            raise BadRequest(f"policy must be one of {', '.join(POLICIES)}, not {self.policy!r}.")


class Scheduler:
    """Holds the waiting and the running sequences; decides, computes nothing. Deterministic for given arrivals."""

    def __init__(self, slots: SlotTable, options: SchedulerOptions, attention_depth: int = 0):
        self.width = slots.width(options.max_num_seqs)
        if options.max_num_batched_tokens < self.width:
            raise BadRequest(
                f"A step of {options.max_num_batched_tokens} tokens cannot serve {self.width} sequences; raise batch_size to {self.width} or lower parallel."
            )
        self._slots = slots
        self._options = options
        self._attention_depth = attention_depth
        self._max_logits = slots.max_logits or options.max_num_batched_tokens
        # The chunk of prompts of which every row of logits is wanted: one that always fits. With a seed its size must not depend on who else runs.
        self._scored_chunk = max(1, self._max_logits - self.width + 1)
        # The chunk of requests with a seed: one that always fits, whoever decodes beside it.
        self.steady_chunk = max(1, min(options.prefill_chunk, options.prefill_chunk_busy, _STEADY_CHUNK, options.max_num_batched_tokens - self.width))
        self.waiting: list[Sequence] = []                # sorted by urgency
        self.running: list[Sequence] = []                # in order of admission: the last is the youngest
        self.clock = 0                                   # tokens planned since the engine started
        self._arrivals = 0
        # After a preemption nobody is let in until a sequence leaves: the one just put out would come straight back, and the two could take the
        # last cells from each other for ever.
        self._full = False

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        self._arrivals += 1
        seq.order = self._arrivals
        allowed = 0 if self._options.policy == "fcfs" else min(_PATIENCE * len(seq.tokens), _BATCH_DELAY)
        seq.due = self.clock + allowed + (_BATCH_DELAY if seq.options.priority == "batch" else 0)
        insort(self.waiting, seq, key=_urgency)

    def schedule(self) -> StepPlan:
        """Admit what fits, then plan one step over all running sequences. Empty when there is nothing to run."""
        if self.waiting:
            self._admit()
        options = self._options
        decodes = tuple(_decode(seq) for seq in self.running if seq.is_decoding)
        used = sum(chunk.n_logits for chunk in decodes)
        prefills: tuple[Chunk, ...] = ()
        if len(decodes) < len(self.running):
            budget = min(options.max_num_batched_tokens - used, options.prefill_chunk_busy if decodes else options.prefill_chunk)
            prefills = self._prefills(budget, self._max_logits - used, self._attention_depth if decodes else 0)
            used += sum(len(chunk.tokens) for chunk in prefills)
        self.clock += used
        return StepPlan(decodes, prefills)

    def _prefills(self, budget: int, rows: int, attention_depth: int) -> tuple[Chunk, ...]:
        """``budget``: tokens that may be read in this step; ``rows``: logits that it can still give."""
        chunks: list[Chunk] = []
        time = _time(budget, 0, attention_depth)
        reading = sorted((seq for seq in self.running if not seq.is_decoding), key=_urgency)
        rows -= len(reading)             # each may come to the end of its prompt
        for seq in reading:
            room = min(budget, affordable(time, seq.num_computed, attention_depth))
            if room <= 0:
                break
            most = self.steady_chunk if seq.reproducible else room
            if seq.scoring:
                most = min(most, self._scored_chunk if seq.reproducible else rows + 1)
                if most > rows + 1:
                    continue
            size = min(most, seq.num_uncomputed)
            if size > room and (chunks or size > budget):        # of a fixed size and not fitting any more: next step
                break
            budget -= size
            rows -= size - 1 if seq.scoring else 0
            time -= _time(size, seq.num_computed, attention_depth)
            chunks.append(_prefill(seq, size))
        return tuple(chunks)

    # --------------------------------------------------------------------------------------------------------- coming and going

    def _admit(self) -> None:
        if self._full or len(self.running) >= self.width:
            return
        for seq in list(self.waiting):
            if self._follows(seq):
                continue
            if not self._slots.fits(seq.tokens, seq.options.adapter):
                return                   # let in, it would only take the cells of those who run, or lose its own to them
            lease = self._slots.acquire(seq.tokens, seq, adapter=seq.options.adapter, multiple=self._multiple(seq), tidy=seq.reproducible)
            if lease is None:
                return
            if seq.scoring:
                lease = replace(lease, miss="every prompt token's log-probability was asked for, so all are computed")
            self.waiting.remove(seq)
            seq.admitted(lease)
            self.running.append(seq)
            if len(self.running) >= self.width:
                return

    def _follows(self, seq: Sequence) -> bool:
        """True while ``seq`` should wait for a running sequence that is just reading a prefix of its prompt."""
        leader = seq.leader
        if leader is None:
            if not seq.patient or seq.scoring:
                return False
            found = self._slots.being_read(seq.tokens, adapter=seq.options.adapter, multiple=self._multiple(seq))
            if found is None or found.gain < _WORTH_WAITING or found.shared < self._slots.copy_tokens:
                return False
            leader, seq.awaited = found.leader, found.shared
            # Long enough for the leader to get there beside others, but bounded, whatever becomes of it.
            seq.leader, seq.gives_up = leader, self.clock + 8 * found.gain + 2 * self._options.prefill_chunk
        if leader.status is not Status.RUNNING or leader.num_computed >= seq.awaited:
            seq.leader = None            # there, or it will never be: look again, perhaps there is another one
            return self._follows(seq) if leader.status is not Status.RUNNING else False
        if self.clock >= seq.gives_up:
            seq.leader, seq.patient = None, False
            return False
        if _urgency(seq) < _urgency(leader):
            leader.due = min(leader.due, seq.due)        # it now reads for somebody more urgent than itself
        return True

    def _multiple(self, seq: Sequence) -> int:
        if seq.scoring:
            return len(seq.tokens)       # nothing that is cached will do: every row of logits is wanted
        return self.steady_chunk if seq.reproducible else 1

    def advance(self, seq: Sequence, count: int) -> None:
        """``count`` more of the sequence's tokens are in the KV."""
        assert seq.slot is not None
        seq.num_computed += count
        self._slots.grown(seq.slot, seq.num_computed)

    def preempt_youngest(self) -> Sequence | None:
        """Take the youngest sequence's KV away, of batch requests first; it is recomputed later. None when fewer than two run."""
        if len(self.running) < 2:
            return None
        index = max(range(len(self.running)), key=lambda index: (self.running[index].options.priority == "batch", index))
        seq = self.running.pop(index)
        assert seq.slot is not None      # a running sequence always has one
        self._slots.release(seq.slot, 0, keep=False)
        seq.preempted()
        self._full = True
        insort(self.waiting, seq, key=_urgency)
        return seq

    def remove(self, seq: Sequence, *, keep: bool) -> None:
        """The sequence is over, wherever it was. ``keep`` leaves its KV as cache."""
        if seq.status is Status.RUNNING:
            assert seq.slot is not None
            self._slots.release(seq.slot, seq.num_computed if keep else 0, keep=keep)
            # Only now: were the backend's fault to lose it here, nobody would ever tell its client.
            self._full = False
            self.running.remove(seq)
            seq.slot = None
        else:
            self.waiting.remove(seq)
            self._full = self._full and any(other.status is Status.PREEMPTED for other in self.waiting)


def _time(count: int, start: int, attention_depth: int) -> float:
    """How long ``count`` tokens from position ``start`` on take to read, in tokens at position 0: one at ``attention_depth`` takes twice as long."""
    return count + count * (2 * start + count) / (2 * attention_depth) if attention_depth else count


def affordable(time: float, start: int, attention_depth: int) -> int:
    """Prompt tokens from position ``start`` on that are read in ``time`` (of `_time`): the nearest whole number of tiles, fewer than one as they are."""
    if not attention_depth or time <= 0:
        return int(time)
    deep = attention_depth + start
    count = max(1, int(math.sqrt(deep * deep + 2 * attention_depth * time) - deep + 1e-6))
    return (count + _TILE // 2) // _TILE * _TILE if count > _TILE else count


def _urgency(seq: Sequence) -> tuple[bool, int, int]:
    """Sorts the most urgent first. What was preempted has waited before and holds a reader in the middle of an answer."""
    return (seq.status is not Status.PREEMPTED and not seq.token_times, seq.due, seq.order)


def _prefill(seq: Sequence, size: int) -> Chunk:
    assert seq.slot is not None
    start = seq.num_computed
    end = start + size
    rows = size if seq.scoring else int(end == len(seq.tokens))
    return Chunk(seq.slot, start, seq.tokens[start:end], rows, seq.reproducible, seq.options.adapter)


def _decode(seq: Sequence) -> Chunk:
    assert seq.slot is not None
    tokens = seq.tokens[-1:]
    if seq.draft:
        tokens += seq.draft
    return Chunk(seq.slot, seq.num_computed, tokens, len(tokens), seq.reproducible, seq.options.adapter)
