"""The parts of a SentencePiece ``tokenizer.model`` that a vocabulary needs, read straight from its protobuf (sentencepiece_model.proto).

The published Python package does not say which pieces are user-defined, nor how the model was trained; both decide what can be converted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.errors import ModelDamaged

MAX_BYTES = 64 << 20                                     # Gemma's, the largest around, is 4.7 MB
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)          # the same numbers as llama.cpp's token types
KINDS = {1: "unigram", 2: "BPE", 3: "word", 4: "char"}


@dataclass(frozen=True)
class Piece:
    text: str
    score: float
    type: int                                            # NORMAL .. BYTE


@dataclass(frozen=True)
class SentencePieceModel:
    """A read tokenizer.model. An id of -1 means there is no such token."""

    pieces: tuple[Piece, ...]
    kind: str                                            # "BPE", "unigram", ...
    byte_fallback: bool
    unk_id: int
    bos_id: int
    eos_id: int
    pad_id: int
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    normalizes: bool                                     # has a character map (nmt_nfkc and the like)


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Read ``tokenizer.model``. Raises `ModelDamaged` for anything that is not one."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelDamaged(f"{path} is {path.stat().st_size:,} bytes, too large for a SentencePiece model.")
        data = path.read_bytes()
    except OSError as error:
        raise ModelDamaged(f"{path} cannot be read: {error.strerror or error}.") from error
    try:
        return _model(data)
    except (ValueError, IndexError, struct.error) as error:
        raise ModelDamaged(f"{path} is not a SentencePiece model: {error}.") from error


def _model(data: bytes) -> SentencePieceModel:
    pieces: list[Piece] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(data):
        if number == 1:
            entry = dict(_fields(_bytes(value)))
            score = struct.unpack("<f", _bytes(entry[2]))[0] if 2 in entry else 0.0
            pieces.append(Piece(_bytes(entry.get(1, b"")).decode("utf-8"), score, _int(entry.get(3, NORMAL))))
        elif number == 2:
            trainer = dict(_fields(_bytes(value)))
        elif number == 3:
            normalizer = dict(_fields(_bytes(value)))
    if not pieces:
        raise ValueError("it holds no pieces")
    kind = _int(trainer.get(3, 1))
    return SentencePieceModel(
        pieces=tuple(pieces),
        kind=KINDS.get(kind, f"kind {kind}"),
        byte_fallback=bool(_int(trainer.get(35, 0))),
        unk_id=_id(trainer.get(40, 0)),
        bos_id=_id(trainer.get(41, 1)),
        eos_id=_id(trainer.get(42, 2)),
        pad_id=_id(trainer.get(43, -1)),
        add_dummy_prefix=bool(_int(normalizer.get(3, 1))),
        remove_extra_whitespaces=bool(_int(normalizer.get(4, 1))),
        normalizes=bool(_bytes(normalizer.get(2, b""))),
    )


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of one protobuf message: an int for varints, bytes for the rest."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"unknown wire type {wire} at byte {at}")
        if at + size > len(data):
            raise ValueError(f"it ends at byte {len(data)} in the middle of a field")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        if at >= len(data):
            raise ValueError("it ends in the middle of a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError(f"a number at byte {at} is too long")


def _int(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("a number was expected and bytes were found")
    return value


def _id(value: int | bytes) -> int:
    """int32 as protobuf writes it: negative numbers as 64-bit two's complement."""
    number = _int(value)
    return number - (1 << 64) if number >= 1 << 63 else number


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("bytes were expected and a number was found")
    return value
