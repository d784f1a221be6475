"""Which tokens live in which slot, and which slot a new prompt should get.

The one rule: a finished sequence leaves its tokens behind as cache, and a new prompt starts from the slot, idle or running, that shares its longest
prefix. At least one prompt token is always recomputed, because somebody has to produce the logits of the first answer token.

The slots are the index: a few dozen token lists, compared block by block in C, take less time to search than a tree takes to keep.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edgeinfer.errors import BadRequest
from edgeinfer.runtime.backend import Backend

if TYPE_CHECKING:
    from edgeinfer.runtime.kv_spill import KVPersistence
    from edgeinfer.runtime.sequence import Sequence


@dataclass
class Slot:
    """``tokens[:length]`` are in the KV. While a sequence owns the slot, ``tokens`` is that sequence's own list."""

    index: int
    tokens: list[int] = field(default_factory=list)
    length: int = 0
    exact: int = sys.maxsize             # how many have the KV that a fresh computation would give; a context shift lowers it
    adapter: str | None = None
    tidy: bool = False                   # the KV lies where it would in an empty cache, and was computed as in one
    owner: Sequence | None = None        # the running sequence; None: idle
    last_used: int = 0

    @property
    def shareable(self) -> int:
        return min(self.length, self.exact)


@dataclass(frozen=True)
class Lease:
    """A slot that now belongs to the caller and already holds the first ``reused`` tokens of its prompt."""

    slot: int
    reused: int
    miss: str | None                     # why less than the whole prompt (but one) was reused; None when nothing was missed


@dataclass(frozen=True)
class BeingRead:
    """``leader`` will hold the first ``shared`` tokens of a prompt: ``gain`` more than any slot holds now."""

    leader: Sequence
    shared: int
    gain: int


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
    """Owns the mapping from slots to tokens and keeps the backend's KV in step with it.

    ``cache_bytes``: KV that idle slots may keep in all, counted per slot even where slots share cells; 0: no limit.
    ``persistence``: where conversations go that lose their slot, and come back from; None: nowhere.
    """

    def __init__(self, backend: Backend, cache_bytes: int = 0, persistence: KVPersistence | None = None):
        self._backend = backend
        self.persistence = persistence
        per_token = max(1, backend.info.kv_bytes_per_token)
        self._idle_tokens = cache_bytes // per_token if cache_bytes else None
        self.slots = [Slot(index) for index in range(backend.info.max_slots)]
        self.copy_tokens = backend.info.copy_tokens      # prefixes shorter than this are not copied
        self.max_logits = backend.info.max_logits        # rows of logits of one step; 0: one a token
        self.evictions = 0
        self._tick = 0

    def width(self, asked: int) -> int:
        """Sequences that may run at once: ``asked``, or what the backend was made for. Raises `BadRequest` when it was made for fewer."""
        made_for = self._backend.info.max_seqs or len(self.slots)
        if asked > made_for:
            raise BadRequest(f"max_num_seqs is {asked} and the model was loaded for {made_for} sequences at once; raise parallel (-np) to {asked}.")
        return asked or made_for

    @property
    def used_tokens(self) -> int:
        """Tokens whose KV is held, running and idle."""
        return sum(slot.length for slot in self.slots)

    @property
    def running_tokens(self) -> int:
        return sum(slot.length for slot in self.slots if slot.owner is not None)

    @property
    def idle_tokens(self) -> int:
        return sum(slot.length for slot in self.slots if slot.owner is None)

    def acquire(self, tokens: list[int], owner: Sequence, *, adapter: str | None = None, multiple: int = 1, tidy: bool = False) -> Lease | None:
        """A slot for ``tokens`` with as much of their prefix as can be had; None, and nothing changed, when every slot is busy.

        ``multiple``: reuse a multiple of so many tokens. ``adapter``: only KV computed with the same one counts. ``tidy``: where slots share cells and
        nobody else runs, compute as in an empty cache: attention rounds differently by where among others' cells a sequence lies.
        """
        idle = [slot for slot in self.slots if slot.owner is None]
        if not idle:
            return None
        tidy = tidy and self._backend.info.shared_cells and len(idle) == len(self.slots)
        if tidy:
            self._tidy(tokens, adapter, multiple)
        wanted = (len(tokens) - 1) // multiple * multiple
        donor, usable, shared = self._donor(tokens, wanted, adapter, multiple)
        if self.persistence is not None and not tidy and self._restore(self.persistence, idle, tokens[:wanted], adapter, usable):
            donor, usable, shared = self._donor(tokens, wanted, adapter, multiple)
        miss = self._miss(donor, wanted, shared, usable, adapter)
        target = self._target(idle, donor, usable)
        if target is not donor and 0 < usable < self.copy_tokens:
            miss = f"the {usable} shared tokens are computed sooner than copied"
            donor, usable = None, 0
        reused = self._fill(target, donor, usable)
        if reused < usable:
            miss = "this model's memory cannot be cut back to a prefix"
        self._tick += 1
        for slot in self.slots:
            slot.tidy = slot.tidy and slot.owner is None             # whoever runs has company from here on
        target.tokens, target.length, target.exact, target.tidy = tokens, reused, sys.maxsize, tidy
        target.adapter, target.owner, target.last_used = adapter, owner, self._tick
        return Lease(target.index, reused, miss)

    def fits(self, tokens: list[int], adapter: str | None) -> bool:
        """Whether beside those who run there are cells for all of ``tokens``; idle cache does not count. Always true where nobody runs."""
        running = [(slot.tokens, slot.adapter) for slot in self.slots if slot.owner is not None]
        cells = self._backend.info.kv_cells
        if not running or not cells or not self._backend.info.shared_cells or len(tokens) + sum(len(held) for held, _ in running) <= cells:
            return True
        needed = 0
        counted: list[tuple[list[int], str | None]] = []
        for held, kind in [*running, (tokens, adapter)]:             # a shared prefix takes its cells once
            needed += len(held) - max((common_prefix(held, other, len(held)) for other, same in counted if same == kind), default=0)
            counted.append((held, kind))
        return needed <= cells

    def being_read(self, tokens: list[int], *, adapter: str | None = None, multiple: int = 1) -> BeingRead | None:
        """The running sequence whose own prompt shares the longest prefix with ``tokens`` beyond what is in the KV by now, if there is one."""
        if not self._backend.info.can_copy_prefix:
            return None
        wanted = (len(tokens) - 1) // multiple * multiple
        best: Slot | None = None
        there = coming = 0
        for slot in self.slots:
            if slot.adapter != adapter:
                continue
            shared = common_prefix(slot.tokens, tokens, wanted)
            there = max(there, min(shared, slot.shareable))
            if slot.owner is not None and shared > max(coming, slot.length):
                best, coming = slot, shared
        there -= there % multiple
        coming -= coming % multiple
        if best is None or best.owner is None or coming <= there:
            return None
        return BeingRead(best.owner, coming, coming - there)

    def grown(self, index: int, length: int) -> None:
        """The owner's first ``length`` tokens are in the KV now."""
        self.slots[index].length = length

    def shift(self, index: int, keep: int, drop: int) -> int:
        """Let go of ``drop`` tokens after the first ``keep`` of a running slot. Returns how many of those left are in the KV.

        All of them, moved down; what was computed when the lost ones were still there is then no cache for others. Where the cells to be moved may be
        another slot's too, moving them would move them for that one: then only the first ``keep``, and the owner computes the rest again.
        """
        slot = self.slots[index]
        if self._backend.info.shared_cells and self._shared_beyond(slot, keep + drop):
            if not self._backend.truncate(index, keep):
                self._backend.truncate(index, 0)
                keep = 0
            slot.length = keep
            return keep
        self._backend.shift(index, keep, drop)
        slot.length -= drop
        slot.exact = min(slot.exact, keep)
        return slot.length

    def release(self, index: int, length: int, *, keep: bool = True) -> None:
        """The owner is done. Its first ``length`` tokens stay as cache unless ``keep`` is False."""
        slot = self.slots[index]
        self._tick += 1
        # The list belongs to the sequence, which may be read after it ended: keep our own.
        slot.tokens, slot.length, slot.owner, slot.last_used = slot.tokens[:length], length, None, self._tick
        if keep and slot.exact < length:                 # what nobody may share only takes room
            keep = self._backend.truncate(index, slot.exact)
            slot.tokens, slot.length = slot.tokens[: slot.exact], slot.exact
        slot.exact = sys.maxsize
        if not keep:
            self._clear(slot)
        while self._idle_tokens is not None and self.idle_tokens > self._idle_tokens and self.evict_idle():
            pass

    def evict_idle(self) -> bool:
        """Drop the least recently used idle cache. False when there is none."""
        idle = [slot for slot in self.slots if slot.owner is None and slot.length]
        if not idle:
            return False
        victim = min(idle, key=lambda slot: slot.last_used)
        self._spill(victim)
        self._clear(victim)
        self.evictions += 1
        return True

    def save_all(self) -> None:
        """Save every conversation, running ones too, the least recently used first, and empty its slot: the end of all of them."""
        if self.persistence is None:
            return
        for slot in sorted(self.slots, key=lambda slot: slot.last_used):
            if slot.shareable < slot.length:
                if not self._backend.truncate(slot.index, slot.shareable):
                    continue
                slot.length = slot.shareable
            self.persistence.drain()                     # nobody computes any more: all of them may wait for the disk
            self._spill(slot)
            self._clear(slot)                            # or of two with the same tokens each would be left to the other

    # ----------------------------------------------------------------------------------------------------------- internals

    def _shared_beyond(self, slot: Slot, end: int) -> bool:
        """Whether any other slot begins with more than ``end`` of the same tokens, so that it may have been copied from this one, or this one from it."""
        return any(common_prefix(other.tokens, slot.tokens, end + 1) > end for other in self.slots if other is not slot)

    def _clear(self, slot: Slot) -> None:
        self._backend.truncate(slot.index, 0)
        slot.tokens, slot.length = [], 0

    def _tidy(self, tokens: list[int], adapter: str | None, multiple: int) -> None:
        """Leave nothing in the cache but what a tidy slot holds of ``tokens``."""
        wanted = (len(tokens) - 1) // multiple * multiple
        best, shared = None, 0
        for slot in self.slots:
            length = common_prefix(slot.tokens, tokens, min(wanted, slot.length)) if slot.tidy and slot.adapter == adapter else 0
            length -= length % multiple
            if length > shared:
                best, shared = slot, length
        for slot in self.slots:
            self._spill(slot, kept=shared if slot is best else 0)
            if slot is not best:
                self._clear(slot)
            elif self._backend.truncate(slot.index, shared):
                slot.tokens, slot.length = slot.tokens[:shared], shared
            else:
                self._clear(slot)

    def _spill(self, slot: Slot, kept: int = 0) -> None:
        """Save a slot that is about to lose all but its first ``kept`` tokens, unless another slot holds them too."""
        if self.persistence is None or not slot.length:
            return
        others = [other for other in self.slots if other is not slot and other.adapter == slot.adapter and other.shareable >= slot.length]
        if not any(common_prefix(slot.tokens, other.tokens, slot.length) == slot.length for other in others):
            self.persistence.spill(slot.index, slot.tokens[: slot.length], slot.adapter, kept)

    def _restore(self, persistence: KVPersistence, idle: list[Slot], tokens: list[int], adapter: str | None, held: int) -> bool:
        """Fill an idle slot from the disk, when that gives clearly more of ``tokens`` than the ``held`` ones there are."""
        found = persistence.find(tokens, adapter, held)
        if found is None:
            return False
        target = min(idle, key=lambda slot: (slot.length > 0, slot.last_used if slot.length else slot.index))
        self._spill(target)
        self._clear(target)
        length = persistence.restore(found, target.index, self._make_room)
        target.tokens, target.length, target.exact, target.adapter, target.tidy = tokens[:length], length, sys.maxsize, adapter, False
        return length > 0

    def _make_room(self, tokens: int) -> bool:
        cells = self._backend.info.kv_cells
        return bool(cells) and self.used_tokens + tokens > cells and self.evict_idle()

    def _donor(self, tokens: list[int], wanted: int, adapter: str | None, multiple: int) -> tuple[Slot | None, int, int]:
        """The slot that gives the longest prefix, how long that is, and how long any slot's would be if its window still held it."""
        best: Slot | None = None
        usable = longest = 0
        for slot in self.slots:
            if slot.adapter != adapter or (slot.owner is not None and not self._backend.info.can_copy_prefix):
                continue
            shared = common_prefix(slot.tokens, tokens, min(wanted, slot.shareable))
            shared -= shared % multiple
            if not shared or shared < usable:
                continue
            longest = max(longest, shared)
            held = self._backend.reusable(slot.index, slot.length, shared)
            held -= held % multiple
            # On a tie the idle one, whose KV can be taken over instead of copied.
            if best is None or held > usable or (held == usable and best.owner is not None and slot.owner is None):
                best, usable = slot, held
        return best, usable, longest

    def _target(self, idle: list[Slot], donor: Slot | None, usable: int) -> Slot:
        """The donor itself when it loses nothing by it or is the only choice; else the first empty slot; else the least recently used."""
        others = [slot for slot in idle if slot is not donor]
        if donor is not None and donor.owner is None and usable and (usable == donor.length or not others or not self._backend.info.can_copy_prefix):
            return donor
        return min(others or idle, key=lambda slot: (slot.length > 0, slot.last_used if slot.length else slot.index))

    def _fill(self, target: Slot, donor: Slot | None, usable: int) -> int:
        if target is donor:
            self._spill(target, kept=usable)
            if self._backend.truncate(target.index, usable):
                return usable
            self._clear(target)
            return 0
        self._spill(target)
        self._clear(target)
        if donor is None or not usable or not self._backend.info.can_copy_prefix:
            return 0
        self._backend.copy_prefix(donor.index, target.index, usable)
        return usable

    def _miss(self, donor: Slot | None, wanted: int, shared: int, usable: int, adapter: str | None) -> str | None:
        """Why the KV will not be reused as far as one might hope; None when the prompt just continues what is cached."""
        if usable == wanted:
            return None
        held = [slot for slot in self.slots if slot.length]
        if not held:
            return "nothing is cached yet"
        if donor is None:
            if not any(slot.adapter == adapter for slot in held):
                return f"nothing is cached yet for {'the base model' if adapter is None else f'the adapter {adapter}'}"
            return "no cached conversation starts with these tokens"
        if usable < shared:
            return f"the sliding window has moved past the {shared} shared tokens"
        return f"the cached conversation differs from token {shared} on" if shared < donor.length else None
