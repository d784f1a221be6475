"""A slot's KV as bytes.

llama.cpp's own serialisation trusts the sizes and positions it reads, some of them to the point of ending the process: ours goes in front and makes
sure that what is given back is, byte by byte, what was once taken from a model of the same kind.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import zlib
from typing import Any

import numpy as np

from edgeinfer.models.native import llama

_MAGIC, _FORMAT = b"EIKV", 1
_HEAD = struct.Struct("<4sI16sQII")                      # magic, format, digest of the layout, bytes that follow, tokens, their CRC-32


def layout_digest(*parts: object) -> bytes:
    """16 bytes that are equal where the KV means the same."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def read_slot(context: Any, slot: int) -> bytearray:
    """llama.cpp's serialisation of a sequence, with room for our header in front. Empty when llama.cpp failed."""
    lib = llama()
    size = lib.llama_state_seq_get_size(context, slot)
    buffer = bytearray(_HEAD.size + size)
    if lib.llama_state_seq_get_data(context, (ctypes.c_uint8 * size).from_buffer(buffer, _HEAD.size), size, slot) != size:
        return bytearray()
    return buffer


def write_slot(context: Any, slot: int, data: bytes | bytearray) -> bool:
    """Give a sequence what `read_slot` returned. False when there is no room or the state is of another kind; the sequence may then hold a part."""
    state = np.frombuffer(data, np.uint8, offset=_HEAD.size)
    return bool(llama().llama_state_seq_set_data(context, state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)), state.size, slot) == state.size)


def seal(buffer: bytearray, layout: bytes, tokens: int) -> bytes:
    """What `read_slot` returned, under our header."""
    body = memoryview(buffer)[_HEAD.size :]
    _HEAD.pack_into(buffer, 0, _MAGIC, _FORMAT, layout, len(body), tokens, zlib.crc32(body))
    return bytes(buffer)


def sealed_tokens(data: bytes, layout: bytes) -> int | None:
    """How many tokens ``data`` holds, if `seal` made it for the same layout and nothing was changed since; else None."""
    if len(data) < _HEAD.size:
        return None
    magic, version, digest, size, tokens, checksum = _HEAD.unpack_from(data)
    body = memoryview(data)[_HEAD.size :]
    if (magic, version, digest, size) != (_MAGIC, _FORMAT, layout, len(body)) or zlib.crc32(body) != checksum:
        return None
    return int(tokens)
