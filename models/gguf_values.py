"""Bounded reading of GGUF's primitive values from a buffer, and lists of strings that are decoded only when somebody looks."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np

STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", BOOL: "<B", 10: "<Q", 11: "<q", 12: "<d"}
MAX_STRING = 64 << 20                                    # bytes of one value; chat templates reach some 20 KB
MAX_STRINGS = 1 << 23                                    # in one array; vocabularies and merge lists reach half a million
MAX_ARRAY_BYTES = 256 << 20
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_READERS = {kind: struct.Struct(code) for kind, code in SCALARS.items()}


class Malformed(Exception):
    """The bytes break a rule of the format."""


class Short(Exception):
    """The buffer ends before the value does. ``needed`` counts bytes from the start of the file."""

    def __init__(self, needed: int):
        super().__init__(needed)
        self.needed = needed


class Strings(Sequence[str]):
    """A list of strings kept as the bytes of the file. Iterating decodes as it goes; the first indexing decodes all of them once."""

    def __init__(self, data: bytes, count: int):
        self._data = data                                # length-prefixed strings, nothing else
        self._count = count
        self._decoded: list[str] | None = None

    def __len__(self) -> int:
        return self._count

    def raw(self) -> Iterator[bytes]:
        """The strings as stored."""
        data, at, unpack = self._data, 0, _U64.unpack_from
        for _ in range(self._count):
            (size,) = unpack(data, at)
            at += 8 + size
            yield data[at - size : at]

    def __iter__(self) -> Iterator[str]:
        if self._decoded is not None:
            return iter(self._decoded)
        return (text.decode("utf-8", "replace") for text in self.raw())

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if self._decoded is None:
            self._decoded = list(self)
        return self._decoded[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Strings):
            return self._count == other._count and self._data == other._data
        return isinstance(other, (list, tuple)) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self._count:,} strings>"


class Cursor:
    """Walks a buffer forward. Raises `Short` at its end and `Malformed` for values no writer produces."""

    def __init__(self, buffer: Any, position: int = 0):
        self.buffer = buffer
        self.size = len(buffer)
        self.position = position

    def _advance(self, count: int) -> int:
        start = self.position
        if count > self.size - start:
            raise Short(start + count)
        self.position = start + count
        return start

    def u32(self) -> int:
        return _U32.unpack_from(self.buffer, self._advance(4))[0]

    def u64(self) -> int:
        return _U64.unpack_from(self.buffer, self._advance(8))[0]

    def text(self, what: str, limit: int) -> str:
        """A string that must be UTF-8 (a key, a name) and no longer than ``limit`` bytes."""
        size = self.u64()
        if size > limit:
            raise Malformed(f"{what} is {size:,} bytes long; at most {limit:,} are possible")
        start = self._advance(size)
        try:
            return bytes(self.buffer[start : start + size]).decode("utf-8")
        except UnicodeDecodeError as error:
            raise Malformed(f"{what} is not UTF-8 text") from error

    def value(self, key: str) -> Any:
        """A typed value: int, float, bool, str, a read-only numpy array or `Strings`."""
        kind = self.u32()
        if kind in _READERS:
            reader = _READERS[kind]
            (value,) = reader.unpack_from(self.buffer, self._advance(reader.size))
            return bool(value) if kind == BOOL else value
        if kind == STRING:
            size = self.u64()
            if size > MAX_STRING:
                raise Malformed(f"the value of {key!r} is {size:,} bytes long; at most {MAX_STRING:,} are possible")
            start = self._advance(size)
            return bytes(self.buffer[start : start + size]).decode("utf-8", "replace")
        if kind == ARRAY:
            return self._array(key)
        raise Malformed(f"the value of {key!r} has the unknown type {kind}")

    def _array(self, key: str) -> Any:
        kind, count = self.u32(), self.u64()
        if kind == STRING:
            return self._strings(key, count)
        if kind not in SCALARS:
            raise Malformed(f"the array {key!r} has elements of the {'nested' if kind == ARRAY else 'unknown'} type {kind}")
        dtype = np.dtype(SCALARS[kind])
        size = count * dtype.itemsize
        if size > MAX_ARRAY_BYTES:
            raise Malformed(f"the array {key!r} has {count:,} elements, more than any model has")
        start = self._advance(size)
        values = np.frombuffer(bytes(self.buffer[start : start + size]), dtype)
        return values != 0 if kind == BOOL else values

    def _strings(self, key: str, count: int) -> Strings:
        if count > MAX_STRINGS:
            raise Malformed(f"the array {key!r} has {count:,} strings, more than any model has")
        start = at = self.position
        if count * 8 > self.size - start:
            raise Short(start + count * 8)
        # The hot loop of opening a model: a vocabulary and its merges are 100,000 strings and more, so their bytes are skipped, not decoded.
        buffer, last, unpack = self.buffer, self.size - 8, _U64.unpack_from
        for _ in range(count):
            if at > last:
                raise Short(at + 8)
            at += 8 + unpack(buffer, at)[0]
        if at > self.size:
            raise Short(at)
        if at - start > MAX_ARRAY_BYTES:
            raise Malformed(f"the strings of {key!r} take {at - start:,} bytes, more than any model has")
        self.position = at
        return Strings(bytes(buffer[start:at]), count)
