"""Which tokens live in which slot, and which slot a new prompt should get.

The one rule: a finished sequence leaves its tokens behind as cache, and a new prompt starts from the slot, idle or running, that shares its longest
prefix. At least one prompt token is always recomputed, because somebody has to produce the logits of the first answer token.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from edgeinfer.runtime.backend import Backend


@dataclass
class Slot:
    """``tokens[:length]`` are in the KV. While a sequence owns the slot, ``tokens`` is that sequence's own list."""

    index: int
    tokens: list[int] = field(default_factory=list)
    length: int = 0
    busy: bool = False
    last_used: int = 0


@dataclass(frozen=True)
class Lease:
    """A slot that now belongs to the caller and already holds the first ``reused`` tokens of its prompt."""

    slot: int
    reused: int
    miss: str | None                     # why less than the whole prompt (but one) was reused; None when nothing was missed


def common_prefix(a: Seq[int], b: Seq[int], limit: int) -> int:
    """Number of leading tokens that are equal, at most ``limit``."""
    limit = min(limit, len(a), len(b))
    done = 0
    while done < limit:                  # whole blocks compare in C; only the block that differs is walked
        step = min(256, limit - done)
        if a[done : done + step] != b[done : done + step]:
            return done + next(i for i in range(step) if a[done + i] != b[done + i])
        done += step
    return limit


class SlotTable:
    """Owns the mapping from slots to tokens and keeps the backend's KV in step with it."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self.slots = [Slot(index) for index in range(backend.info.max_slots)]
        self._tick = 0

    def acquire(self, tokens: list[int], *, multiple: int = 1) -> Lease | None:
        """A slot for ``tokens`` with as much of their prefix as can be had; None, and nothing changed, when every slot is busy.

        ``multiple``: reuse a multiple of so many tokens.
        """
        idle = [slot for slot in self.slots if not slot.busy]
        if not idle:
            return None
        wanted = (len(tokens) - 1) // multiple * multiple
        donor, shared = self._donor(tokens, wanted)
        usable = self._backend.reusable(donor.index, donor.length, shared) if donor else 0
        usable -= usable % multiple
        miss = self._miss(donor, wanted, shared - shared % multiple, usable)
        target = self._target(idle, donor, usable)
        reused = self._fill(target, donor, usable)
        if reused < usable:
            miss = "this model's memory cannot be cut back to a prefix"
        self._tick += 1
        target.tokens, target.length, target.busy, target.last_used = tokens, reused, True, self._tick
        return Lease(target.index, reused, miss)

    def release(self, index: int, length: int, *, keep: bool = True) -> None:
        """The owner is done. Its first ``length`` tokens stay as cache unless ``keep`` is False."""
        slot = self.slots[index]
        self._tick += 1
        # The list belongs to the sequence, which may be read after it ended: keep our own.
        slot.tokens, slot.length, slot.busy, slot.last_used = slot.tokens[:length], length, False, self._tick
        if not keep:
            self._clear(slot)

    def evict_idle(self) -> bool:
        """Drop the least recently used idle cache. False when there is none."""
        idle = [slot for slot in self.slots if not slot.busy and slot.length]
        if not idle:
            return False
        self._clear(min(idle, key=lambda slot: slot.last_used))
        return True

    # ----------------------------------------------------------------------------------------------------------- internals

    def _clear(self, slot: Slot) -> None:
        self._backend.truncate(slot.index, 0)
        slot.tokens, slot.length = [], 0

    def _donor(self, tokens: list[int], wanted: int) -> tuple[Slot | None, int]:
        best, shared = None, 0
        for slot in self.slots:
            length = common_prefix(slot.tokens, tokens, min(wanted, slot.length))
            # On a tie the idle one, whose KV can be taken over instead of copied.
            if length > shared or (length == shared and length and best is not None and best.busy and not slot.busy):
                best, shared = slot, length
        return best, shared

    def _target(self, idle: list[Slot], donor: Slot | None, usable: int) -> Slot:
        """The donor itself when it loses nothing by it or is the only choice; else an empty slot; else the least recently used."""
        others = [slot for slot in idle if slot is not donor]
        if donor is not None and not donor.busy and usable and (usable == donor.length or not others or not self._backend.info.can_copy_prefix):
            return donor
        return min(others or idle, key=lambda slot: (slot.length > 0, slot.last_used))

    def _fill(self, target: Slot, donor: Slot | None, usable: int) -> int:
        if target is donor:
            if self._backend.truncate(target.index, usable):
                return usable
            self._clear(target)
            return 0
        self._clear(target)
        if donor is None or not usable or not self._backend.info.can_copy_prefix:
            return 0
        self._backend.copy_prefix(donor.index, target.index, usable)
        return usable

    def _miss(self, donor: Slot | None, wanted: int, shared: int, usable: int) -> str | None:
        """Why the KV will not be reused as far as one might hope; None when the prompt just continues what is cached."""
        if usable == wanted:
            return None
        if not any(slot.length for slot in self.slots):
            return "nothing is cached yet"
        if donor is None:
            return "no cached conversation starts with these tokens"
        if usable < shared:
            return f"the sliding window has moved past the {shared} shared tokens"
        return f"the cached conversation differs from token {shared} on" if shared < donor.length else None
