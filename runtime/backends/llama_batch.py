"""What goes into one native call each, and the ``llama_batch`` that carries it."""

from __future__ import annotations

import ctypes
from operator import attrgetter

import numpy as np

from edgeinfer.models.native import llama
from edgeinfer.runtime.values import Chunk, StepPlan

Group = tuple[Chunk, ...]


def groups(plan: StepPlan, current: str | None = None) -> list[Group]:
    """The decoders together, those that must be alone and every prompt chunk by themselves; one adapter a group.

    Decoders go by ascending slot: where each has KV cells of its own, llama.cpp computes only neighbours of ascending ids in one piece, and sixteen
    in another order take almost twice as long.

    current: the adapter that is set in llama.cpp; its decoders go first, since setting another takes time.
    """
    if not plan.prefills and len(plan.decodes) == 1:
        return [plan.decodes]
    together: dict[str | None, list[Chunk]] = {}
    for chunk in sorted(plan.decodes, key=_slot):
        if not chunk.alone:
            together.setdefault(chunk.adapter, []).append(chunk)
    ordered = sorted(together, key=lambda adapter: (adapter != current, adapter or "")) if len(together) > 1 else together
    return [tuple(together[adapter]) for adapter in ordered] + [(chunk,) for chunk in plan.decodes if chunk.alone] + [(chunk,) for chunk in plan.prefills]


_slot = attrgetter("slot")


class Batch:
    """A ``llama_batch`` over numpy arrays of our own, so that filling it is a few array assignments and allocates nothing."""

    def __init__(self, capacity: int):
        lib = llama()
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(capacity, np.int32)
        self._counts = np.ones(capacity, np.int32)
        self._sequences = np.zeros(capacity, np.int32)
        # seq_id is an array of pointers, one per token; ours point at consecutive elements of one array for good.
        self._pointers = self._sequences.ctypes.data + np.arange(capacity, dtype=np.uintp) * self._sequences.itemsize
        self._wanted = np.zeros(capacity, np.int8)
        self.native = lib.llama_batch(
            n_tokens=0,
            token=self._tokens.ctypes.data_as(ctypes.POINTER(lib.llama_token)),
            embd=None,
            pos=self._positions.ctypes.data_as(ctypes.POINTER(lib.llama_pos)),
            n_seq_id=self._counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=ctypes.cast(self._pointers.ctypes.data, ctypes.POINTER(ctypes.POINTER(lib.llama_seq_id))),
            logits=self._wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def fill(self, chunks: Group) -> None:
        """Make the native batch hold the chunks, one after the other."""
        end = 0
        for chunk in chunks:
            if len(chunk.tokens) == 1:                   # a decoder: single elements are set several times faster than slices
                self._tokens[end] = chunk.tokens[0]
                self._positions[end] = chunk.start
                self._sequences[end] = chunk.slot
                self._wanted[end] = chunk.n_logits
                end += 1
                continue
            begin, end = end, end + len(chunk.tokens)
            self._tokens[begin:end] = chunk.tokens
            self._positions[begin:end] = range(chunk.start, chunk.start + len(chunk.tokens))
            self._sequences[begin:end] = chunk.slot
            self._wanted[begin : end - chunk.n_logits] = 0
            self._wanted[end - chunk.n_logits : end] = 1
        self.native.n_tokens = end
