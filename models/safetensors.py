"""A bounded reader of safetensors headers: eight bytes of length, JSON with names, types, shapes and offsets, then the data.

Nothing of the data is touched; every offset is checked against the file's size, so that later reads cannot leave the file.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeinfer.errors import ModelDamaged
from edgeinfer.models.sniff import describe

MAX_HEADER = 100_000_000                                 # the format's own limit
MAX_DIMS = 8
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor. ``offset`` counts from the start of ``file``; ``dtype`` is the file's word ("F32", "BF16", ...)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one file, in file order. Raises `ModelDamaged` with what is wrong and, for a short file, both sizes."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or not 2 <= length <= MAX_HEADER:
                raise ModelDamaged(f"{path} is not a safetensors file: it is {describe(start + file.read(512))}.")
            if 8 + length > size:
                raise ModelDamaged(f"{path} is incomplete: expected more than {8 + length:,} bytes, has {size:,}. Download it again.")
            raw = file.read(length)
    except OSError as error:
        raise ModelDamaged(f"{path} cannot be read: {error.strerror or error}.") from error
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelDamaged(f"{path} has a damaged header: {error}.") from error
    if not isinstance(header, dict):
        raise ModelDamaged(f"{path} has a damaged header: it is no JSON object.")
    header.pop("__metadata__", None)
    tensors = [_tensor(path, name, entry, 8 + length) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    end = 8 + length
    for tensor in tensors:
        if tensor.offset != end:
            kind = "overlaps the tensor before it" if tensor.offset < end else "leaves a gap before it"
            raise ModelDamaged(f"{path} has a damaged header: {tensor.name!r} {kind}.")
        end = tensor.offset + tensor.nbytes
    if end > size:
        raise ModelDamaged(f"{path} is incomplete: expected {end:,} bytes, has {size:,}. Download it again.")
    if end < size:
        raise ModelDamaged(f"{path} is damaged: its header describes {end:,} bytes, it has {size:,}.")
    return {tensor.name: tensor for tensor in tensors}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result


def _tensor(path: Path, name: str, entry: Any, data: int) -> TensorInfo:
    def whole(values: Any, limit: int) -> bool:
        return isinstance(values, list) and len(values) <= limit and all(type(v) is int and 0 <= v < 2**63 for v in values)

    ok = isinstance(entry, dict) and isinstance(entry.get("dtype"), str) and whole(entry.get("shape"), MAX_DIMS)
    if not ok or not whole(entry.get("data_offsets"), 2) or len(entry["data_offsets"]) != 2:
        raise ModelDamaged(f"{path} has a damaged header: the entry of {name!r} is malformed.")
    begin, end = entry["data_offsets"]
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    item = ITEM_BYTES.get(dtype)
    if end < begin or (item is not None and end - begin != item * math.prod(shape)):
        raise ModelDamaged(f"{path} has a damaged header: {name!r} is {dtype} of shape {list(shape)}, which does not take {end - begin:,} bytes.")
    return TensorInfo(name=name, dtype=dtype, shape=shape, file=path, offset=data + begin, nbytes=end - begin)
