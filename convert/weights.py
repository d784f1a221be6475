"""Stored weights, read by rows straight from their files and scanned for what no output may hold.

Files are read with ``pread`` into buffers that are used again, not mapped: a mapped file counts as memory of the process, page by page.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgeinfer.errors import ConversionFailed, ModelDamaged
from edgeinfer.models.safetensors import TensorInfo

NUMPY = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
# dtype -> (integer view, mask of all but the sign, smallest bits that are no number)
BITS = {"F32": (np.uint32, 0x7FFFFFFF, 0x7F800000), "F16": (np.uint16, 0x7FFF, 0x7C00), "BF16": (np.uint16, 0x7FFF, 0x7F80)}
BLOCK_ELEMENTS = 1 << 18                                 # handled at a time by one thread: about 1 MB as float32


@dataclass(frozen=True)
class Scan:
    """What one look at a tensor found. ``largest`` is the largest magnitude; meaningless unless ``finite``."""

    finite: bool
    largest: float


class Files:
    """Open handles by path, shared by all threads: reads carry their own offset."""

    def __init__(self) -> None:
        self._handles: dict[Path, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def read(self, tensor: TensorInfo, start: int, out: np.ndarray) -> None:
        """Fill the contiguous array ``out`` with the tensor's elements from ``start`` on. Raises `ModelDamaged` when the file has become shorter."""
        with self._lock:
            handle = self._handles.get(tensor.file)
            if handle is None:
                handle = self._handles[tensor.file] = os.open(tensor.file, os.O_RDONLY)
        view = memoryview(out).cast("B")
        offset = tensor.offset + start * out.itemsize
        while view:
            count = os.preadv(handle, [view], offset)
            if count == 0:
                raise ModelDamaged(f"{tensor.file} ended in the middle of {tensor.name}. Download it again.")
            view, offset = view[count:], offset + count


class Buffers(threading.local):
    """Arrays that a thread uses again from block to block."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, np.dtype], np.ndarray] = {}

    def get(self, use: str, dtype: np.dtype | type, size: int) -> np.ndarray:
        """A flat array of ``size``, holding anything. Valid until the same thread asks for the same use."""
        key = (use, np.dtype(dtype))
        if key not in self._arrays or self._arrays[key].size < size:
            self._arrays[key] = np.empty(size, dtype)
        return self._arrays[key][:size]


def scan(tensor: TensorInfo, files: Files, buffers: Buffers) -> Scan:
    """Largest magnitude of a tensor, found on the stored bits: ordered as integers they are ordered as magnitudes."""
    integer, mask, no_number = BITS[tensor.dtype]
    total = tensor.nbytes // NUMPY[tensor.dtype].itemsize
    largest = 0
    for start in range(0, total, BLOCK_ELEMENTS):
        bits = buffers.get("scan", integer, min(BLOCK_ELEMENTS, total - start))
        files.read(tensor, start, bits)
        np.bitwise_and(bits, integer(mask), out=bits)
        largest = max(largest, int(bits.max()))
    return Scan(finite=largest < no_number, largest=_magnitude(largest, tensor.dtype))


def _magnitude(bits: int, dtype: str) -> float:
    if dtype == "BF16":
        return float(np.array([bits << 16], np.uint32).view(np.float32)[0])
    return float(np.array([bits], BITS[dtype][0]).view(NUMPY[dtype])[0])


def scan_all(tensors: list[TensorInfo], threads: int, progress: Callable[[int], None]) -> dict[str, Scan]:
    """Every tensor by name; ``progress`` gets the bytes of each as it is done. Raises `ConversionFailed` listing each tensor with NaN or infinity."""
    buffers = Buffers()
    found: dict[str, Scan] = {}
    with Files() as files, ThreadPoolExecutor(threads) as pool:
        for tensor, result in zip(tensors, pool.map(lambda tensor: scan(tensor, files, buffers), tensors), strict=True):
            found[tensor.name] = result
            progress(tensor.nbytes)
    broken = [f"{name} has NaN or infinite values." for name, result in found.items() if not result.finite]
    if broken:
        raise ConversionFailed("The checkpoint's weights are not all numbers, so nothing was written:", broken)
    return found
