"""The one door to the ``gguf`` package: everything of a GGUF file before its tensor data.

Tensor data is written by offset (`edgeinfer.convert.stream`), since the package's own path wants each tensor whole in memory.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.convert.gguf_metadata import KeyValue
from edgeinfer.models.gguf_header import MAX_KEY_BYTES
from edgeinfer.models.gguf_values import Cursor

COUNT_OFFSET = 16                                        # of the number of metadata entries, after magic, version and number of tensors
ALIGNMENT = 32                                           # the format's default


@dataclass(frozen=True)
class Metadata:
    """All metadata of a file. ``copied`` are whole entries of another file, as bytes (`read_entries`); ``values`` follow them."""

    architecture: str
    values: tuple[KeyValue, ...]
    copied: tuple[bytes, ...] = ()


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


def render_header(metadata: Metadata, tensors: Sequence[TensorEntry]) -> bytes:
    """Magic, metadata and tensor table, padded to where tensor data begins. Tensors follow in order, each padded."""
    import gguf
    import numpy as np

    types = gguf.GGUFValueType
    scalars = {"str": types.STRING, "u32": types.UINT32, "f32": types.FLOAT32, "bool": types.BOOL}
    items = {"str[]": types.STRING, "i32[]": types.INT32, "f32[]": types.FLOAT32, "bool[]": types.BOOL}
    with tempfile.TemporaryDirectory(prefix="edgeinfer-") as folder:         # the package writes to named files only
        path = Path(folder) / "header.gguf"
        writer = gguf.GGUFWriter(path, metadata.architecture)
        try:
            for entry in metadata.values:
                if entry.kind in items:
                    writer.add_key_value(entry.key, entry.value, types.ARRAY, sub_type=items[entry.kind])
                else:
                    writer.add_key_value(entry.key, entry.value, scalars[entry.kind])
            for tensor in tensors:
                # The element type is given by number: the package may know fewer types than llama.cpp.
                writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=tensor.type)
            writer.write_header_to_file()
            (file,) = writer.fout
            file.write(b"".join(metadata.copied))
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            file.seek(COUNT_OFFSET)
            file.write((len(metadata.copied) + 1 + len(metadata.values)).to_bytes(8, "little"))     # 1: general.architecture, the writer's own
        finally:
            writer.close()
        header = path.read_bytes()
    return header + bytes(padded(len(header)) - len(header))


def read_entries(path: Path, skipped: Callable[[str], bool]) -> tuple[bytes, ...]:
    """The metadata entries of a GGUF file that `models.gguf_header` has found sound, each with key and type, but those ``skipped`` by key."""
    entries = []
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
        cursor = Cursor(buffer, COUNT_OFFSET)
        for _ in range(cursor.u64()):
            start = cursor.position
            key = cursor.text("a metadata key", MAX_KEY_BYTES)
            cursor.value(key)
            if not skipped(key):
                entries.append(bytes(buffer[start : cursor.position]))
    return tuple(entries)
