"""Tensor data from the checkpoint into the file, in blocks of rows on several threads.

A block is read, reordered, converted and written at its own offset; nothing depends on the order in which blocks finish, and the memory in use is a
few megabytes a thread whatever the size of a tensor.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgeinfer.convert.ggml_types import PLAIN, from_float32, quantize_rows, tensor_bytes, to_float32
from edgeinfer.convert.gguf_write import padded
from edgeinfer.convert.plan import Plan, PlannedTensor
from edgeinfer.convert.weights import BLOCK_ELEMENTS, NUMPY, Buffers, Files

BLOCKS_AHEAD = 4                                         # handed to the pool for each thread


@dataclass(frozen=True)
class Block:
    """Rows ``start .. stop`` of a tensor, to be written at ``offset`` of the file."""

    tensor: PlannedTensor
    start: int
    stop: int
    offset: int
    last: bool                                           # of its tensor


def write_tensors(path: Path, plan: Plan, threads: int, progress: Callable[[int], None]) -> None:
    """Create ``path`` with all that ``plan`` says. ``progress`` gets the bytes of each tensor written, in order, on the calling thread.

    All space is claimed first, so a full disk shows before any work. Raises OSError (disk full, file size limit) and `ConversionFailed` (a block that
    does not fit its type).
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        claim(descriptor, plan.size)
        write_at(descriptor, plan.header, 0)
        with Files() as files:
            worker = Worker(descriptor, plan, files)
            pool = ThreadPoolExecutor(threads)
            try:
                waiting: deque[tuple[Block, Future[None]]] = deque()
                for block in blocks(plan):
                    waiting.append((block, pool.submit(worker.run, block)))
                    if len(waiting) > threads * BLOCKS_AHEAD:
                        _finish(waiting, progress)
                while waiting:
                    _finish(waiting, progress)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
    finally:
        os.close(descriptor)


def _finish(waiting: deque[tuple[Block, Future[None]]], progress: Callable[[int], None]) -> None:
    block, future = waiting.popleft()
    future.result()
    if block.last:
        progress(block.tensor.nbytes)


def claim(descriptor: int, size: int) -> None:
    """Reserve ``size`` bytes of disk for the file, zeros until written."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def write_at(descriptor: int, data: bytes | np.ndarray, offset: int) -> None:
    """All of the contiguous ``data`` at ``offset``."""
    view = memoryview(data).cast("B")
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def blocks(plan: Plan) -> Iterator[Block]:
    """The whole file's blocks, in file order. Reordered tensors are cut between heads."""
    offset = len(plan.header)
    for tensor in plan.tensors:
        *outer, columns = tensor.mapped.shape
        rows = math.prod(outer)
        unit = plan.head_dim if tensor.mapped.change in ("heads_q", "heads_k") else 1
        step = max(1, BLOCK_ELEMENTS // (columns * unit)) * unit
        row_bytes = tensor_bytes(tensor.type, (columns,))
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            yield Block(tensor, start, stop, offset + start * row_bytes, last=stop == rows)
        offset += padded(tensor.nbytes)


class Worker:
    """Does one block at a time; shared by the pool's threads, each with buffers of its own."""

    def __init__(self, descriptor: int, plan: Plan, files: Files):
        self._descriptor, self._plan, self._files = descriptor, plan, files
        self._buffers = Buffers()

    def run(self, block: Block) -> None:
        """Read, convert, write."""
        write_at(self._descriptor, self._convert(block), block.offset)

    def _convert(self, block: Block) -> np.ndarray:
        tensor = block.tensor
        if tensor.stored is None:
            return np.array(tensor.mapped.values, np.float32)
        raw = self._read(block)
        offset = self._plan.norm_offset if tensor.mapped.change == "offset" else 0.0
        if tensor.type == tensor.stored.dtype and not offset:
            return raw
        values = self._buffers.get("values", np.float32, raw.size).reshape(raw.shape)
        to_float32(raw, tensor.stored.dtype, values)
        if offset:
            values += np.float32(offset)
        if tensor.type in PLAIN:
            return from_float32(values, tensor.type)
        out = self._buffers.get("out", np.uint8, tensor_bytes(tensor.type, raw.shape))
        return out[: quantize_rows(tensor.type, values, out, tensor.mapped.source)]

    def _read(self, block: Block) -> np.ndarray:
        stored, change = block.tensor.stored, block.tensor.mapped.change
        columns, count = block.tensor.mapped.shape[-1], block.stop - block.start
        dtype = NUMPY[stored.dtype]
        raw = self._buffers.get("raw", dtype, count * columns)
        self._files.read(stored, block.start * columns, raw)
        if change not in ("heads_q", "heads_k"):
            return raw.reshape(count, columns)
        # (heads, half, pair, D) -> (heads, pair, half, D): channel 2i + p of a head is what was channel i of half p.
        halves = raw.reshape(-1, 2, self._plan.head_dim // 2, columns)
        reordered = self._buffers.get("reordered", dtype, count * columns)
        np.copyto(reordered.reshape(halves.shape[0], -1, 2, columns), halves.swapaxes(1, 2))
        return reordered.reshape(count, columns)
