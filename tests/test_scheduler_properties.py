"""Whatever comes in whatever order, with whatever faults: the promises of the engine, step by step, on the scripted backend and without threads."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from random import Random

import numpy as np
from engine_runs import PROFILE, Recorded
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edgeinfer.errors import BackendFailed
from edgeinfer.runtime.backends.fake import END, ScriptedBackend
from edgeinfer.runtime.engine import EngineCore
from edgeinfer.runtime.scheduler import SchedulerOptions
from edgeinfer.runtime.sequence import Status
from edgeinfer.runtime.slots import common_prefix
from edgeinfer.runtime.values import Failed, Finished, FinishReason, StepPlan, StepResult

N_CTX = 48
HEADS = ["", "You are ", "You are a helpful as", "You are a helpful assistant."]


# --------------------------------------------------------------------------------------------------------- the scripted model


def _rows() -> np.ndarray:
    random = np.random.default_rng(1)
    rows = np.full((97, 258), -30, np.float32)
    rows[:, [*b"abcY", 0xC3, 0xA9, END]] = random.normal(0, 2, (97, 7))          # two of them are the bytes of one character
    return rows


ROWS = _rows()


class Model(ScriptedBackend):
    """Its logits are a function of the tokens so far, and spread: what is sampled depends on every one of them.

    fault: what to do wrong in the next step, and to which of its chunks: "failed", "aborted", "nan", or "raise" before or after it ran.
    """

    def __init__(self, **fields):
        super().__init__(lambda tokens: 0, n_ctx=N_CTX, adapters=("x",), **fields)
        self.fault: tuple[str, int] | None = None
        self.plan: StepPlan | None = None
        self.done: dict[int, int] = {}                   # tokens that the last step really computed, by slot
        self.hurt: int | None = None                     # the slot that the last step failed

    def row(self, tokens: list[int]) -> np.ndarray:
        return ROWS[hash(tuple(tokens)) % len(ROWS)]

    def forward(self, plan: StepPlan) -> StepResult:
        self.plan, self.done, self.hurt = plan, {}, None
        kind, at = self.fault or ("", 0)
        self.fault = None
        victim = plan.chunks[at % len(plan.chunks)]
        if kind == "raise" and at % 2:
            raise RuntimeError("before the step")
        lost = kind in ("failed", "aborted")
        kept = [tuple(chunk for chunk in chunks if not (lost and chunk is victim)) for chunks in plan]
        result = super().forward(StepPlan(*kept))
        if kind == "raise":
            raise RuntimeError("after the step")
        self.done = {chunk.slot: len(chunk.tokens) for chunks in kept for chunk in chunks if chunk.slot not in result.no_room}
        logits = dict(result.logits)
        for chunk in plan.chunks:
            if chunk.slot in logits:
                held = self._slots[chunk.slot]
                first = len(held) - chunk.n_logits + 1
                logits[chunk.slot] = np.stack([self.row(held[:count]) for count in range(first, len(held) + 1)])
        if kind == "nan" and victim.slot in logits:
            logits[victim.slot][0, 5] = np.nan
            self.hurt = victim.slot
        if kind == "failed":
            self.hurt = victim.slot
        return StepResult(
            logits, result.no_room, (victim.slot,) if kind == "aborted" else (), {victim.slot: "broken"} if kind == "failed" else {},
        )


class Guesser:
    """Drafts that are right, wrong, or right up to a place, by its own random numbers."""

    def __init__(self, model: Model, seed: int):
        self._model = model
        self._random = Random(seed)
        self.drafted = self.accepted = 0
        self.wasted: dict[Recorded, int] = {}            # computed and taken back again
        self.forgotten: list[Recorded] = []

    def propose(self, sequences, room: int, *, n_ctx: int, others: int = 0) -> None:
        for seq in sequences:
            assert seq.is_decoding and not seq.reproducible and seq.options.speculative and n_ctx == N_CTX
            size = max(0, min(room, seq.draft_limit(n_ctx), self._random.randrange(6)))
            room -= size
            tokens = list(seq.tokens)
            for _ in range(size):
                right = int(self._model.row(tokens).argmax())
                tokens.append(right if self._random.random() < 0.8 else self._random.choice(b"abc"))
            seq.draft = tokens[len(seq.tokens):]

    def settle(self, seq, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted and drafted > 0
        self.drafted += drafted
        self.accepted += accepted
        self.wasted[seq] = self.wasted.get(seq, 0) + drafted - accepted

    def measured(self, rows: int, seconds: float) -> None:
        assert rows > 0 and seconds >= 0

    def forget(self, seq) -> None:
        self.forgotten.append(seq)

    def close(self) -> None:
        pass


class Request(Recorded):
    """Keeps books: ``reused`` and ``lost`` tokens of KV, over all its admissions."""

    reused = lost = computed = 0
    fair_game = False                                    # hit by an injected fault, so that it may fail

    def admitted(self, lease) -> None:
        super().admitted(lease)
        self.reused += lease.reused

    def preempted(self) -> None:
        self.lost += self.num_computed
        super().preempted()

    def shifted(self, keep: int, drop: int, *held: int) -> None:
        before = self.num_computed
        super().shifted(keep, drop, *held)
        self.lost += before - drop - self.num_computed   # where cells were shared, what could not be moved is computed again


@dataclass(frozen=True)
class Asked:
    """What a request asks for, as a value: the same again must be answered the same."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int | None
    sampler_seed: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    context_policy: str
    keep: int
    adapter: str | None

    def on(self, model: Model, **more) -> Request:
        return Request(
            model, self.prompt, keep=self.keep, sampler_seed=self.sampler_seed, max_tokens=self.max_tokens, temperature=self.temperature,
            seed=self.seed, stop=self.stop, ignore_eos=self.ignore_eos, context_policy=self.context_policy, adapter=self.adapter, top_k=0, min_p=0,
            **more,
        )


_ALONE: dict[Asked, Request] = {}


def alone(asked: Asked) -> Request:
    """The same request on a fresh engine that has nothing else to do."""
    if asked not in _ALONE:
        model = Model(max_slots=1)
        core = EngineCore(model)
        seq = _ALONE[asked] = asked.on(model)
        core.submit(seq)
        while core.has_work:
            core.step()
    return _ALONE[asked]


ASKED = st.builds(
    lambda head, tail, how, **fields: Asked((HEADS[head] + tail)[:N_CTX] or "a", temperature=how[0], seed=how[1], sampler_seed=how[2], **fields),
    head=st.integers(0, 3), tail=st.text("ab", max_size=24), max_tokens=st.integers(0, 30),
    how=st.sampled_from([(0, None, None), (0, 3, None), (1, 3, None), (1, 4, None), (1, None, 5), (1, None, 6)]),
    stop=st.sampled_from([(), (), ("ab",), ("é", "ca")]), ignore_eos=st.booleans(),
    context_policy=st.sampled_from(["error", "shift", "truncate_middle"]), adapter=st.sampled_from([None, None, "x"]),
    keep=st.sampled_from([4, 9, 44, 47]),                # case 70: next to nothing may go, so that the answer ends instead of shifting for ever
)


# --------------------------------------------------------------------------------------------------------------- the engine


class Engines(RuleBasedStateMachine):
    @initialize(
        slots=st.integers(1, 5), seqs=st.integers(0, 5), batch=st.integers(5, 40), rows=st.sampled_from([0, 0, 1, 6]),
        cells=st.sampled_from([None, N_CTX, 70, 120]), chunk=st.integers(1, 24), busy=st.integers(1, 12), cache=st.sampled_from([0, 0, 20, 70]),
        policy=st.sampled_from(["shortest", "shortest", "fcfs"]), guess=st.one_of(st.none(), st.integers(0, 99)),
    )
    def load(self, slots, seqs, batch, rows, cells, chunk, busy, cache, policy, guess) -> None:
        width = min(seqs, slots) or slots
        self.model = Model(max_slots=slots, max_seqs=min(seqs, slots), max_batch=batch, max_logits=rows and rows - 1 + width, kv_cells=cells)
        self.guesser = None if guess is None else Guesser(self.model, guess)
        options = SchedulerOptions(prefill_chunk=chunk, prefill_chunk_busy=busy, cache_bytes=cache, policy=policy)
        self.core = EngineCore(self.model, options, self.guesser)
        self.asked: dict[Request, Asked] = {}
        self.read = 0                                    # prompt tokens computed
        self.preempted = 0
        scheduler, table = self.core.scheduler, self.core.slots
        self._schedule, scheduler.schedule = scheduler.schedule, self._watched_schedule
        self._acquire, table.acquire = table.acquire, self._watched_acquire

    # ------------------------------------------------------------------------------------------------------------- what happens

    @rule(asked=ASKED, priority=st.sampled_from(["interactive", "batch"]), speculative=st.booleans())
    def submit(self, asked: Asked, priority: str, speculative: bool) -> None:
        seq = asked.on(self.model, priority=priority, speculative=speculative)
        self.asked[seq] = asked
        self.core.counters.submitted += 1
        self.core.submit(seq)

    @rule(asked=ASKED, count=st.integers(2, 4), tails=st.text("ab", min_size=4, max_size=4))
    def submit_several_that_begin_alike(self, asked: Asked, count: int, tails: str) -> None:
        for tail in tails[:count]:
            self.submit(Asked(**{**vars(asked), "prompt": (HEADS[3] + asked.prompt[:10] + tail)[:N_CTX]}), "interactive", True)

    @precondition(lambda self: self.core.has_work)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        inside = [seq for seq in self.asked if seq.end is None]
        self.core.cancel(data.draw(st.sampled_from(inside)))

    @precondition(lambda self: self.core.has_work)
    @rule(kind=st.sampled_from(["failed", "aborted", "nan", "raise"]), at=st.integers(0, 5))
    def fault(self, kind: str, at: int) -> None:
        self.model.fault = (kind, at)
        self.step(1)

    @precondition(lambda self: self.core.has_work)
    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()
            self.slots_are_what_the_table_says()

    def _step(self) -> None:
        core, model = self.core, self.model
        before, faulty = {seq: seq.status for seq in self.asked}, model.fault is not None
        model.plan = None
        try:
            core.step()
        except RuntimeError as error:
            assert faulty and str(error) in ("before the step", "after the step")
            for seq in self._inside():
                seq.fair_game = True
            core.fail_all(BackendFailed("The step failed."))
            return
        if model.plan is None:
            assert all(status is not Status.RUNNING for status in before.values()) and not core.scheduler.running
            return
        if model.hurt is not None:
            self.by_slot[model.hurt].fair_game = True
            assert self.by_slot[model.hurt].status is Status.FAILED
        for slot, size in model.done.items():
            self.by_slot[slot].computed += size
        self.read += sum(len(chunk.tokens) for chunk in model.plan.prefills if chunk.slot in model.done)
        # The rule: at most one is put out in a step, and only somebody who shares the engine.
        preempted = [seq for seq in self.asked if before[seq] is Status.RUNNING and seq.status is Status.PREEMPTED]
        assert len(preempted) <= 1 and (not preempted or core.scheduler.running)

    def _inside(self) -> list[Request]:
        return [seq for seq in self.asked if seq.end is None]

    # ------------------------------------------------------------------------------------------------- watched from within a step

    def _watched_schedule(self) -> StepPlan:
        scheduler = self.core.scheduler
        clock, closed = scheduler.clock, scheduler._full
        plan = self._schedule()
        self.by_slot = {seq.slot: seq for seq in scheduler.running}
        # Though a slot is free, one waits only for a leader, no longer than was set when it began, or for cells, behind which everybody waits.
        if not closed and len(scheduler.running) < scheduler.width:
            for seq in scheduler.waiting:
                if seq.leader is None:
                    assert not self.core.slots.fits(seq.tokens, seq.options.adapter)
                    break
                assert clock < seq.gives_up and seq.leader.status is Status.RUNNING
        self._check_plan(plan)
        return plan

    def _check_plan(self, plan: StepPlan) -> None:
        options, scheduler = self.core.options, self.core.scheduler
        decoding = [seq for seq in scheduler.running if seq.is_decoding]
        assert [self.by_slot[chunk.slot] for chunk in plan.decodes] == decoding                     # decoders first, all of them
        assert len({chunk.slot for chunk in plan.chunks}) == len(plan.chunks) <= scheduler.width
        assert sum(len(chunk.tokens) for chunk in plan.chunks) <= min(options.max_num_batched_tokens, self.model.info.max_batch)
        assert sum(len(chunk.tokens) for chunk in plan.prefills) <= (options.prefill_chunk_busy if plan.decodes else options.prefill_chunk)
        assert sum(chunk.n_logits for chunk in plan.chunks) <= (self.model.info.max_logits or sys.maxsize)
        assert bool(plan.chunks) == bool(scheduler.running)                                          # whoever runs gets on, as a whole
        assert plan.prefills or len(decoding) == len(scheduler.running)                              # and prompts are read, whoever decodes
        for chunk in plan.chunks:
            seq = self.by_slot[chunk.slot]
            assert chunk.start == seq.num_computed and chunk.adapter == seq.options.adapter and chunk.alone == seq.reproducible
            assert list(chunk.tokens) == (seq.tokens + seq.draft)[chunk.start : chunk.start + len(chunk.tokens)]
        for chunk in plan.prefills:
            end = chunk.start + len(chunk.tokens)
            assert chunk.n_logits == (end == len(self.by_slot[chunk.slot].tokens))
            if chunk.alone and not self.by_slot[chunk.slot].shifts:                                  # of one size, from multiples of it
                steady = min(options.prefill_chunk, options.prefill_chunk_busy, options.max_num_batched_tokens - scheduler.width)
                assert chunk.start % max(1, steady) == 0 and (len(chunk.tokens) == max(1, steady) or chunk.n_logits)

    def _watched_acquire(self, tokens, owner, *, adapter=None, multiple=1, tidy=False):
        """What a new sequence gets is the best there is, and it was worth no longer wait."""
        table = self.core.slots
        wanted = (len(tokens) - 1) // multiple * multiple
        same = [slot for slot in table.slots if slot.adapter == adapter]
        there = max([common_prefix(slot.tokens, tokens, min(wanted, slot.shareable)) for slot in same], default=0) // multiple * multiple
        coming = [
            common_prefix(slot.tokens, tokens, wanted) // multiple * multiple
            for slot in same if slot.owner is not None and not slot.owner.is_decoding and slot.owner.shifts == 0
        ]
        if owner.patient and owner.awaited == 0:                     # neither gave up waiting nor has waited: nobody reads 8 tokens of it just now
            assert max(coming, default=0) < there + 8
        alone = tidy and all(slot.owner is None for slot in table.slots)
        lease = self._acquire(tokens, owner, adapter=adapter, multiple=multiple, tidy=tidy)
        assert lease is not None                                     # the table has as many slots as may run
        assert lease.reused == there or (alone and lease.reused < there)
        assert lease.reused < len(tokens) and lease.reused % multiple == 0
        assert (lease.miss is None) <= (lease.reused > 0 or wanted == 0)
        return lease

    # ------------------------------------------------------------------------------------------------------------ what must hold

    @invariant()
    def slots_are_what_the_table_says(self) -> None:
        table, scheduler = self.core.slots, self.core.scheduler
        owned = [slot.owner for slot in table.slots if slot.owner is not None]
        assert len(set(owned)) == len(owned) and set(owned) == set(scheduler.running)
        for slot in table.slots:
            assert self.model._slots[slot.index] == slot.tokens[: slot.length] and slot.length <= len(slot.tokens)
            assert not slot.length or self.model._adapter[slot.index] == slot.adapter
        for seq in scheduler.running:
            slot = table.slots[seq.slot]
            assert seq.status is Status.RUNNING and slot.owner is seq and slot.tokens is seq.tokens and slot.length == seq.num_computed
            assert 0 <= seq.num_computed < len(seq.tokens) <= N_CTX and slot.adapter == seq.options.adapter
            wasted = self.guesser.wasted.get(seq, 0) if self.guesser else 0
            assert seq.num_computed == seq.reused + seq.computed - seq.lost - seq.dropped - wasted   # nothing was computed twice without reason
        for seq in scheduler.waiting:
            assert seq.slot is None and seq.num_computed == 0 and seq.status in (Status.WAITING, Status.PREEMPTED)
        assert sorted(scheduler.waiting + scheduler.running, key=id) == sorted(self._inside(), key=id)
        assert not self.core.options.cache_bytes or table.idle_tokens <= self.core.options.cache_bytes
        assert self.model._cells is None or self.model._used() <= self.model._cells

    @invariant()
    def counters_add_up(self) -> None:
        counters, ended = self.core.counters, [seq for seq in self.asked if seq.end is not None]
        failed = [seq for seq in ended if isinstance(seq.end, Failed)]
        cancelled = [seq for seq in ended if seq.status is Status.CANCELLED]
        assert counters.submitted == len(self.asked) and counters.inside == len(self._inside())
        assert counters.failed == len(failed) and counters.cancelled == len(cancelled)
        assert counters.finished == len(ended) - len(failed) - len(cancelled)
        assert counters.prompt_tokens == sum(seq.prompt_len for seq in ended)
        assert counters.cached_tokens == sum(seq.cached for seq in ended) and counters.prefix_hits == sum(seq.cached > 0 for seq in ended)
        assert counters.generated_tokens == sum(len(seq.sampled) for seq in self.asked)
        assert counters.prefill_tokens == self.read
        assert counters.preemptions == sum(seq.preemptions for seq in self.asked) and counters.shifts == sum(seq.shifts for seq in self.asked)
        if self.guesser is not None:
            assert (counters.draft_tokens, counters.draft_tokens_accepted) == (self.guesser.drafted, self.guesser.accepted)
            assert set(ended) <= set(self.guesser.forgotten)

    @invariant()
    def answers_are_those_given_alone(self) -> None:
        for seq, asked in self.asked.items():
            right = alone(asked)
            assert seq.sampled == right.sampled[: len(seq.sampled)]
            if seq.end is None:
                assert right.text.startswith(seq.text)
                continue
            assert sum(isinstance(event, Finished | Failed) for event in seq.events) == 1 and seq.end is seq.events[-1]
            if isinstance(seq.end, Failed):
                assert seq.fair_game and isinstance(seq.end.error, BackendFailed)
            elif seq.end.reason is not FinishReason.CANCELLED:
                assert (seq.text, seq.sampled, seq.end.reason) == (right.text, right.sampled, right.end.reason)
                assert (seq.shifts, seq.dropped) == (right.shifts, right.dropped)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        # Everything ends in a bounded number of steps: each computes something, or makes room for it once.
        work = sum(seq.prompt_len + (seq.params.max_tokens or 0) for seq in self._inside())
        for _ in range(4 * work + 20 * len(self.asked)):
            if not self.core.has_work:
                break
            self._step()
        assert not self.core.has_work
        self.slots_are_what_the_table_says()
        self.counters_add_up()
        self.answers_are_those_given_alone()
        assert all(seq.end is not None for seq in self.asked)


TestEngines = Engines.TestCase
TestEngines.settings = PROFILE
