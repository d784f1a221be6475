"""Tensor types of ggml: names, sizes, and float32 rows turned into them.

Sizes and quantisation kernels are llama.cpp's own (through `edgeinfer.models.native.ggml`), so that no table can drift from what loads the file.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from edgeinfer.errors import ConversionFailed
from edgeinfer.models.native import ggml, llama

# Smallest magnitudes that round to infinity. Block formats keep their scales in float16.
OVERFLOW = {"F32": math.inf, "BF16": float.fromhex("0x1.ffp+127")}
F16_OVERFLOW = 65520.0
PLAIN = ("F32", "F16", "BF16")


def holds(type_name: str, magnitude: float) -> bool:
    """False when a finite weight of this magnitude would come out infinite, or spoil the scale of its block."""
    return magnitude < OVERFLOW.get(type_name, F16_OVERFLOW)


@cache
def type_ids() -> dict[str, int]:
    """Every type llama.cpp can hold, by its name in capitals: {"F32": 0, "F16": 1, ..., "Q4_K": 12, ...}."""
    # "No type given" is how the parameters spell the number of types; numbers that were given up have a block size of 0.
    count = llama().llama_model_quantize_default_params().output_tensor_type
    return {ggml().ggml_type_name(number).decode().upper(): number for number in range(count) if ggml().ggml_blck_size(number) > 0}


def block_size(type_name: str) -> int:
    """Elements in one block: a row must be a multiple of it."""
    return ggml().ggml_blck_size(type_ids()[type_name])


def tensor_bytes(type_name: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor whose last dimension is the row."""
    *outer, row = shape
    return int(np.prod(outer, dtype=np.int64)) * ggml().ggml_row_size(type_ids()[type_name], row)


def bytes_if_divisible(type_name: str, shape: tuple[int, ...]) -> int:
    """What the tensor would take if its rows did divide into blocks: the yardstick for the cost of a fallback."""
    block = block_size(type_name)
    return int(np.prod(shape, dtype=np.int64)) * ggml().ggml_row_size(type_ids()[type_name], block) // block


def quantize_rows(type_name: str, rows: np.ndarray, out: np.ndarray, tensor: str) -> int:
    """Quantise contiguous float32 ``rows`` (rows, elements) into the start of the uint8 buffer ``out``; returns the bytes written.

    The same kernels in the same order as llama.cpp's quantiser, without an importance matrix. Raises `ConversionFailed` naming ``tensor`` when a
    block cannot hold its values (a scale that overflows half precision).
    """
    count, elements = rows.shape
    number = type_ids()[type_name]
    size = ggml().ggml_quantize_chunk(number, rows.ctypes.data, out.ctypes.data, 0, count, elements, None)
    if not ggml().ggml_validate_row_data(number, out.ctypes.data, size):
        raise ConversionFailed(f"The weights of {tensor} are too large for {type_name}; convert to gguf-bf16 or gguf-f32.")
    return size


def to_float32(raw: np.ndarray, dtype: str, out: np.ndarray) -> np.ndarray:
    """``raw`` (BF16 as uint16) into the float32 array ``out`` of the same shape; exact."""
    if dtype == "BF16":
        np.left_shift(raw, 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        np.copyto(out, raw)
    return out


def from_float32(values: np.ndarray, dtype: str) -> np.ndarray:
    """F32, F16 or BF16 (as uint16), rounded to nearest, ties to even. Values are finite and fit: the scan saw to it."""
    if dtype == "F16":
        return values.astype(np.float16)
    if dtype == "BF16":
        bits = values.view(np.uint32)
        return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    return values
