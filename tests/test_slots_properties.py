"""The slot table against a naive model of it: which tokens live where, who gets what, and what has to go."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from engine_runs import PROFILE
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edgeinfer.runtime.backends.fake import ScriptedBackend
from edgeinfer.runtime.slots import SlotTable, common_prefix
from edgeinfer.runtime.values import Chunk, StepPlan

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=20)
ADAPTERS = st.sampled_from([None, None, "x"])


class Owner:
    """Stands for a sequence: the table only hands it back."""

    def __init__(self, tokens: list[int]):
        self.tokens = tokens


@dataclass
class Held:
    """What a slot should hold, kept as naively as possible."""

    tokens: list[int]
    owner: Owner | None = None
    adapter: str | None = None
    used: int = 0
    exact: int = sys.maxsize

    def shares(self, tokens: list[int]) -> int:
        count = 0
        while count < min(len(self.tokens), len(tokens), self.exact) and self.tokens[count] == tokens[count]:
            count += 1
        return count


class Slots(RuleBasedStateMachine):
    """Longest match wins over running and idle, nothing is lost but the least recently used, and idle cache stays within its bytes."""

    @initialize(count=st.integers(1, 5), budget=st.sampled_from([0, 0, 8, 20]))
    def make(self, count: int, budget: int) -> None:
        self.model = ScriptedBackend(lambda tokens: 0, n_ctx=64, max_slots=count, adapters=("x",))
        self.table = SlotTable(self.model, budget)           # a token is one byte on this backend
        self.budget = budget
        self.held = [Held([]) for _ in range(count)]
        self.clock = self.dropped = 0

    def _idle(self) -> list[Held]:
        return [held for held in self.held if held.owner is None]

    def _touch(self, held: Held) -> None:
        self.clock += 1
        held.used = self.clock

    @rule(tokens=TOKENS, adapter=ADAPTERS, multiple=st.sampled_from([1, 1, 2, 5]))
    def acquire(self, tokens: list[int], adapter: str | None, multiple: int) -> None:
        self._acquire(tokens, adapter, multiple)

    def _acquire(self, tokens: list[int], adapter: str | None, multiple: int) -> int | None:
        idle, before = self._idle(), [list(held.tokens) for held in self.held]
        wanted = (len(tokens) - 1) // multiple * multiple
        best = max([held.shares(tokens[:wanted]) // multiple * multiple for held in self.held if held.adapter == adapter], default=0)
        owner = Owner(tokens)
        lease = self.table.acquire(tokens, owner, adapter=adapter, multiple=multiple)
        assert (lease is None) == (not idle)
        if lease is None:
            return None
        assert lease.reused == best <= len(tokens) - 1
        target = self.held[lease.slot]
        assert target.owner is None
        if lease.reused < len(target.tokens):
            # Something was lost. The slot that gave the prefix is spared where there is another; no empty one was left, and the oldest had to go.
            givers = [held for held in self.held if held.adapter == adapter and held.shares(tokens[:wanted]) >= lease.reused > 0]
            assert any(self._had_to_go(target, idle, giver) for giver in givers or [None])
        target.tokens, target.owner, target.adapter, target.exact = tokens[: lease.reused], owner, adapter, sys.maxsize
        self._touch(target)
        assert [list(held.tokens) for held in self.held if held is not target] == [old for at, old in enumerate(before) if at != lease.slot]
        return lease.slot

    def _had_to_go(self, target: Held, idle: list[Held], giver: Held | None) -> bool:
        others = [held for held in idle if held is not giver]
        if not others:
            return target is giver
        return all(held.tokens for held in others) and target is min(others, key=lambda held: held.used)

    @rule(tokens=TOKENS, adapter=ADAPTERS, count=st.integers(1, 4))
    def serve(self, tokens: list[int], adapter: str | None, count: int) -> None:
        """One whole life, several times: the next continues or repeats this one."""
        for number in range(count):
            index = self._acquire(tokens[number % 2 :] + [number % 2] * number, adapter, 1)
            if index is None:
                return
            self._compute(index, 99)
            self._release(index, keep=True)

    def _running(self) -> list[int]:
        return [index for index, held in enumerate(self.held) if held.owner]

    @precondition(lambda self: self._running())
    @rule(data=st.data(), size=st.integers(1, 9))
    def compute(self, data, size: int) -> None:
        self._compute(data.draw(st.sampled_from(self._running())), size)

    def _compute(self, index: int, size: int) -> None:
        held = self.held[index]
        start = len(held.tokens)
        tokens = held.owner.tokens
        if start == len(tokens):
            tokens.append(size % 2)
        chunk = tokens[start : start + size]
        self.model.forward(StepPlan(prefills=(Chunk(index, start, chunk, 0, adapter=held.adapter),)))
        self.table.grown(index, start + len(chunk))
        held.tokens = tokens[: start + len(chunk)]

    @precondition(lambda self: any(len(held.tokens) > 1 for held in self.held if held.owner))
    @rule(data=st.data(), keep=st.integers(0, 6), drop=st.integers(1, 9))
    def shift(self, data, keep: int, drop: int) -> None:
        index = data.draw(st.sampled_from([at for at, held in enumerate(self.held) if held.owner and len(held.tokens) > 1]))
        held = self.held[index]
        keep = min(keep, len(held.tokens) - 2)
        drop = min(drop, len(held.tokens) - keep - 1)        # something newer is always left
        left = self.table.shift(index, keep, drop)
        del held.owner.tokens[keep : keep + drop]
        # What may share its cells with another is computed again; what was moved is nobody else's prefix.
        assert left in (keep, len(held.tokens) - drop)
        if left > keep:
            held.exact = min(held.exact, keep)
        held.tokens = held.owner.tokens[:left]

    @precondition(lambda self: self._running())
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data, keep: bool) -> None:
        self._release(data.draw(st.sampled_from(self._running())), keep)

    def _release(self, index: int, keep: bool) -> None:
        held = self.held[index]
        self.table.release(index, len(held.tokens), keep=keep)
        held.tokens = held.tokens[: held.exact] if keep else []
        held.owner, held.exact = None, sys.maxsize
        self._touch(held)
        while self.budget and sum(len(held.tokens) for held in self._idle()) > self.budget:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        min((held for held in self._idle() if held.tokens), key=lambda held: held.used).tokens = []
        self.dropped += 1

    @rule()
    def evict(self) -> None:
        any_idle = any(held.tokens for held in self._idle())
        assert self.table.evict_idle() == any_idle
        if any_idle:
            self._drop_oldest()

    @rule(tokens=TOKENS, adapter=ADAPTERS)
    def being_read(self, tokens: list[int], adapter: str | None) -> None:
        limit = tokens[: len(tokens) - 1]
        there = max([held.shares(limit) for held in self.held if held.adapter == adapter], default=0)
        coming = {
            held.owner: common_prefix(held.owner.tokens, limit, len(limit)) for held in self.held
            if held.owner and held.adapter == adapter and common_prefix(held.owner.tokens, limit, len(limit)) > len(held.tokens)
        }
        found = self.table.being_read(tokens, adapter=adapter)
        if max(coming.values(), default=0) <= there:
            assert found is None
        else:
            assert found is not None and found.shared == max(coming.values()) == coming[found.leader] and found.gain == found.shared - there

    @invariant()
    def the_table_says_what_the_backend_holds(self) -> None:
        for slot, held in zip(self.table.slots, self.held, strict=True):
            assert self.model._slots[slot.index] == held.tokens == slot.tokens[: slot.length] and slot.owner is held.owner
        assert self.table.used_tokens == sum(len(held.tokens) for held in self.held)
        assert self.table.idle_tokens == sum(len(held.tokens) for held in self._idle())
        assert not self.budget or self.table.idle_tokens <= self.budget
        assert self.table.evictions == self.dropped


TestSlots = Slots.TestCase
TestSlots.settings = PROFILE
