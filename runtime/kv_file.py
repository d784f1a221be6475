"""One saved conversation as a file: whose KV it is, its tokens, the KV.

    head      magic, format, sizes of what follows, digest of the KV, digest of everything before the KV
    key       JSON of a `KVKey`
    tokens    int32, little-endian
    KV        what `Backend.export_slot` gave

Whatever the bytes say, no read takes more memory than the file is long, and nothing damaged is returned: what goes into a native library unchecked
could end the process.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

FORMAT = 1
_MAGIC = b"edgeKV\r\n"                                   # the line end tells a file that went through a text conversion
_SIZES = struct.Struct("<8sIIQQ16s")                     # magic, format, bytes of the key, tokens, bytes of the KV, digest of the KV
_DIGEST = 16
_MAX_KEY_BYTES = 1 << 16


class Damaged(Exception):
    """The file is not what was once written. The text says what is wrong."""


class OtherFormat(Exception):
    """A saved conversation, but of another version of this program; none of our business."""


@dataclass(frozen=True)
class KVKey:
    """All that must be equal for a saved KV to mean the same: equal keys and equal tokens, and the KV may be used."""

    model: str                           # BackendInfo.fingerprint
    kv_type: str                         # BackendInfo.kv_type
    adapter: str | None = None           # identity of the LoRA adapter it was computed with
    layout: str = ""                     # how the backend lays a slot out, and what its positions depend on
    library: str = ""                    # who wrote the bytes: "llama-cpp-python 0.3.36"
    format: int = FORMAT                 # of the file

    @cached_property
    def as_json(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @cached_property
    def digest(self) -> str:
        """A name for files and folders: 16 hexadecimal digits."""
        return hashlib.blake2b(self.as_json, digest_size=8).hexdigest()


class Head(NamedTuple):
    """What a file says about its KV. ``tokens`` is a read-only int32 array; ``data_start`` and ``data_bytes`` say where the KV is."""

    key: bytes                           # JSON
    tokens: np.ndarray
    data_start: int
    data_bytes: int
    data_digest: bytes


def file_size(key: KVKey, tokens: int, data: int) -> int:
    """Bytes of the file for so many tokens and bytes of KV."""
    return _SIZES.size + _DIGEST + len(key.as_json) + 4 * tokens + data


def write(file: BinaryIO, key: KVKey, tokens: np.ndarray, data: bytes) -> None:
    """Write everything and have it on the disk. Raises `OSError`."""
    name, ids = key.as_json, tokens.astype("<i4").tobytes()
    sizes = _SIZES.pack(_MAGIC, FORMAT, len(name), len(tokens), len(data), _digest(data))
    for part in (sizes, _digest(sizes, name, ids), name, ids, data):
        file.write(part)
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The file for reading. A link is not followed. Raises `OSError`."""
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)), "rb") as file:
        yield file


def read_head(file: BinaryIO) -> Head:
    """All but the KV, checked; only the length of the KV is. Raises `Damaged`, `OtherFormat` or `OSError`."""
    length = os.fstat(file.fileno()).st_size
    sizes = file.read(_SIZES.size)
    if len(sizes) < _SIZES.size:
        raise Damaged("it ends within its head")
    magic, version, key_bytes, count, data_bytes, data_digest = _SIZES.unpack(sizes)
    if magic != _MAGIC:
        raise Damaged("it does not begin as a saved conversation does")
    if version != FORMAT:
        raise OtherFormat
    start = _SIZES.size + _DIGEST + key_bytes + 4 * count
    if key_bytes > _MAX_KEY_BYTES or start + data_bytes != length:
        raise Damaged(f"it has {length:,} bytes and should have {start + data_bytes:,}")
    digest, name, ids = (file.read(size) for size in (_DIGEST, key_bytes, 4 * count))
    if _digest(sizes, name, ids) != digest:
        raise Damaged("the checksum of its head is wrong")
    return Head(name, np.frombuffer(ids, "<i4"), start, data_bytes, data_digest)


def read_data(file: BinaryIO, head: Head) -> bytes:
    """The KV, checked. Raises `Damaged` or `OSError`."""
    file.seek(head.data_start)
    data = file.read(head.data_bytes)
    if _digest(data) != head.data_digest:
        raise Damaged("the checksum of its KV is wrong")
    return data


def _digest(*parts: bytes) -> bytes:
    state = hashlib.blake2b(digest_size=_DIGEST)
    for part in parts:
        state.update(part)
    return state.digest()
