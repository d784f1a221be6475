"""The one door to the ``gguf`` package: everything of a GGUF file before its tensor data.

Tensor data is written by offset (`edgeinfer.convert.stream`), since the package's own path wants each tensor whole in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.convert.gguf_metadata import KeyValue

ALIGNMENT = 32                                           # the format's default


@dataclass(frozen=True)
class TensorEntry:
    """One line of the tensor table. ``shape`` in numpy's order; ``type`` is ggml's number."""

    name: str
    shape: tuple[int, ...]
    type: int
    nbytes: int


def padded(size: int) -> int:
    """``size`` rounded up to the alignment of tensor data."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def write_header(path: Path, architecture: str, values: Sequence[KeyValue], tensors: Sequence[TensorEntry]) -> int:
    """Create ``path`` with magic, metadata and tensor table; returns the offset where tensor data begins. Tensors follow in order, each padded."""
    import gguf
    import numpy as np

    types = gguf.GGUFValueType
    scalars = {"str": types.STRING, "u32": types.UINT32, "f32": types.FLOAT32, "bool": types.BOOL}
    items = {"str[]": types.STRING, "i32[]": types.INT32, "f32[]": types.FLOAT32, "bool[]": types.BOOL}
    writer = gguf.GGUFWriter(path, architecture)
    try:
        for entry in values:
            if entry.kind in items:
                writer.add_key_value(entry.key, entry.value, types.ARRAY, sub_type=items[entry.kind])
            else:
                writer.add_key_value(entry.key, entry.value, scalars[entry.kind])
        for tensor in tensors:
            # The element type is given by number: the package may know fewer types than llama.cpp.
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=tensor.type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
    return padded(path.stat().st_size)
