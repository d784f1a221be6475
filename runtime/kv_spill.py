"""Conversations that outlive their slot: saved when it is about to be lost, brought back when a prompt continues them.

`SlotTable` says when (`spill` before it overwrites a slot, `find` and `restore` before it looks for a donor); what is worth it is decided here.
Exporting and importing happen on the engine's thread, since they touch the backend; writing happens on a thread of its own, so that no answer waits
for a disk. Whatever goes wrong becomes a notice and the tokens are computed again.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from edgeinfer.errors import EdgeInferError, UnsupportedParameter
from edgeinfer.runtime.backend import Backend
from edgeinfer.runtime.kv_store import KVKey, KVStore, SavedKV
from edgeinfer.runtime.values import BackendInfo

MIN_TOKENS = 256                         # a conversation shorter than this is computed again as quickly as it is read
MIN_GAIN = 64                            # tokens that must be won by reading one, or lost without saving it
_MOST_UNUSED = 16                        # a file is read for at least 1/16 of its tokens: reading is some fifty times as fast as computing
_PENDING_BYTES = 256 << 20               # exported and not yet written; beyond that, what is evicted is let go
_LIBRARY = {"llamacpp": "llama-cpp-python", "onnxruntime": "onnxruntime"}


class Found(NamedTuple):
    """A saved conversation, and its KV as read from the disk."""

    saved: SavedKV
    data: bytes


class KVPersistence:
    """Saves and restores slots of one backend. All calls come from the engine's thread; ``notices`` may be read from any.

    layout: what an export depends on that `BackendInfo` does not tell.
    adapters: identity (of the weights, with their scale) of each LoRA adapter; conversations with one that is not named are not saved.
    Raises `UnsupportedParameter` when the backend cannot export, or cannot say which model it runs.
    """

    def __init__(self, backend: Backend, store: KVStore, *, layout: str = "", adapters: Mapping[str, str] = MappingProxyType({})):
        info = backend.info
        if not info.can_export or not info.fingerprint:
            raise UnsupportedParameter(f"Conversations of {info.model} cannot be saved: this engine cannot export their KV; load it without kv_cache_dir.")
        self._backend = backend
        self._store = store
        self._writer = KVStore(store.folder, max_bytes=store.max_bytes)      # the writing thread's own: stores share a folder, not a thread
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="edgeinfer-kv")
        self._pending: list[tuple[Future[bool], int]] = []
        self._adapters = adapters
        self._key = key_of(info, layout)
        self._only_whole: set[str] = set()               # files whose KV cannot be cut back to fewer tokens
        self._refused: set[str] = set()                  # files that this backend did not take
        self._notices: tuple[str, ...] = ()
        self.spilled = 0                                 # conversations handed to the disk, and how many came back
        self.restored = 0

    @property
    def notices(self) -> tuple[str, ...]:
        """What went wrong so far, one sentence each."""
        return self._notices + self._store.notices + self._writer.notices

    def spill(self, slot: int, tokens: Sequence[int], adapter: str | None, kept: int = 0) -> None:
        """Save an exact slot that holds ``tokens`` and will lose all but ``kept`` of them, unless that is little or the disk has them.

        The slot is unchanged, and may change as soon as this returns.
        """
        key = self._key_for(adapter)
        size = len(tokens) * self._backend.info.kv_bytes_per_token
        if key is None or len(tokens) < max(MIN_TOKENS, kept + MIN_GAIN) or size > self._store.max_bytes or self._store.holds(key, tokens):
            return
        self._settle([item for item in self._pending if item[0].done()])
        if self._pending and sum(held for _, held in self._pending) + size > _PENDING_BYTES:
            self._notice("A conversation was not saved: the disk is slower than conversations are evicted.")
            return
        try:
            data = self._backend.export_slot(slot)
        except (EdgeInferError, MemoryError) as error:
            self._notice(f"A conversation of {len(tokens):,} tokens was not saved: {error or 'too little memory'}.")
            return
        self.spilled += 1
        kept = tuple(tokens)                             # the list belongs to the slot
        try:
            self._pending.append((self._pool.submit(self._writer.save, key, kept, data), len(data)))
        except RuntimeError:                             # the interpreter is ending and starts no more threads
            self._writer.save(key, kept, data)

    def find(self, tokens: Sequence[int], adapter: str | None, held: int) -> Found | None:
        """The saved conversation that gives clearly more of ``tokens`` than the ``held`` leading ones some slot has already."""
        key = self._key_for(adapter)
        if key is None or len(tokens) < held + MIN_GAIN:
            return None
        saved = self._store.best(key, tokens)
        if saved is None or saved.shared < held + MIN_GAIN or saved.shared * _MOST_UNUSED < len(saved.tokens):
            return None
        name, whole = saved.path.name, saved.shared == len(saved.tokens)
        if name in self._refused or (name in self._only_whole and not whole):
            return None
        try:
            data = self._store.read(saved)
        except MemoryError:
            self._notice(f"A saved conversation of {len(saved.tokens):,} tokens was not read: too little memory.")
            return None
        return None if data is None else Found(saved, data)

    def restore(self, found: Found, slot: int, make_room: Callable[[int], bool]) -> int:
        """Fill an empty slot with what was found, cut back to what was asked for. The tokens it holds then: ``saved.shared`` or fewer, or 0.

        make_room: called with the tokens that need room when the slot could not be filled; True when another try is worth it.
        """
        saved, backend = found.saved, self._backend
        total = len(saved.tokens)
        try:
            while not backend.import_slot(slot, found.data):
                if not make_room(total):
                    self._refuse(saved, "there is no room for it, or it was saved under other options")
                    return 0
        except EdgeInferError as error:
            self._refuse(saved, str(error))
            return 0
        usable = backend.reusable(slot, total, saved.shared)
        if usable < total and not (usable and backend.truncate(slot, usable)):
            backend.truncate(slot, 0)
            self._only_whole.add(saved.path.name)
            return 0
        self.restored += 1
        return usable

    def drain(self) -> None:
        """Wait until everything is written."""
        self._settle(self._pending)

    def close(self) -> None:
        """Write what is pending and end the thread."""
        self.drain()
        self._pool.shutdown()

    def abandon(self) -> None:
        """End without waiting for a disk that may be what everything waits for."""
        self._pool.shutdown(wait=False)

    def _settle(self, written: list[tuple[Future[bool], int]]) -> None:
        for future, _ in written:
            error = future.exception()                   # a disk's troubles are the store's notices; this is a fault of ours
            if error is not None:
                self._notice(f"A conversation was not saved: {type(error).__name__}: {error}.")
        self._pending = [item for item in self._pending if item not in written]

    def _refuse(self, saved: SavedKV, reason: str) -> None:
        self._refused.add(saved.path.name)
        self._notice(f"A saved conversation of {len(saved.tokens):,} tokens was not taken back: {reason}.")

    def _key_for(self, adapter: str | None) -> KVKey | None:
        if adapter is None:
            return self._key
        identity = self._adapters.get(adapter)
        return None if identity is None else replace(self._key, adapter=identity)

    def _notice(self, text: str) -> None:
        if text not in self._notices:
            self._notices = (*self._notices, text)[-20:]


def key_of(info: BackendInfo, layout: str = "") -> KVKey:
    """What a KV of this backend and the base model depends on beside its tokens."""
    library = _LIBRARY.get(info.engine, "")
    version = f"{library} {importlib.metadata.version(library)}" if library else info.engine
    return KVKey(model=info.fingerprint, kv_type=info.kv_type, layout=layout, library=version)
