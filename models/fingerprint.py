"""The identity of a model's weights, without reading them all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from edgeinfer.models.gguf_header import GGUFHeader, GGUFTensor

_SAMPLED = 4 << 20                       # bytes of tensor data looked at, shared out among the tensors
_LEAST, _MOST = 1 << 10, 64 << 10        # of one tensor


def fingerprint(header: GGUFHeader) -> str:
    """32 hexadecimal digits; different for models that differ in metadata, vocabulary, shapes, types or weights, equal for copies of one file.

    Reads the header and some bytes from the middle of every tensor: a fine-tune of which most is the base model differs somewhere in the tensors it
    changed. Takes some milliseconds. Raises `OSError`.
    """
    state = hashlib.blake2b(digest_size=16)
    share = min(_MOST, max(_LEAST, _SAMPLED // max(1, len(header.tensors))))
    for part in header.parts:
        tensors = sorted((tensor for tensor in header.tensors.values() if tensor.file == part), key=lambda tensor: tensor.offset)
        with open(part, "rb") as file:
            for piece in _pieces(file, part, header, tensors, share):
                state.update(len(piece).to_bytes(8, "little"))
                state.update(piece)
    return state.hexdigest()


def _pieces(file: BinaryIO, part: Path, header: GGUFHeader, tensors: list[GGUFTensor], share: int) -> Iterator[bytes]:
    yield str(part.stat().st_size).encode()
    yield file.read(tensors[0].offset if tensors else header.data_offset)
    for tensor in tensors:
        size = min(share, tensor.nbytes)
        file.seek(tensor.offset + (tensor.nbytes - size) // 2)
        yield file.read(size)
