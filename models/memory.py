"""How much memory a model will take in llama.cpp: weights + KV cache + compute buffers.

The KV cache is exact: cells x layers x (bytes of a row of K + of V), where the context is rounded up to 256 cells. Weights are exact for a GGUF.
Compute buffers follow the largest step of the graph (logits, or a layer's activations, plus the attention mask): within a factor of 1.5 either way
for the dense architectures of `edgeinfer.models.families` (tests hold SmolLM2-135M to it). Rows of logits dominate them unless few are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgeinfer.errors import BadRequest, ModelDamaged
from edgeinfer.models.families import expected_tensors
from edgeinfer.models.ggml_types import BY_NAME, TensorType
from edgeinfer.models.gguf_header import GGUFHeader
from edgeinfer.models.spec import ModelSpec

CELLS = 256                                              # llama.cpp rounds a context up to a multiple of this
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
WINDOW_PATTERNS = {"gemma2": 2, "gemma3": 6}             # every n-th layer sees everything; what llama.cpp assumes when the file does not say


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes. ``notes`` says, a sentence each, where the truth may be lower."""

    weights: int
    kv: int
    compute: int
    kv_bytes_per_token: int
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.compute


@dataclass(frozen=True)
class _Shape:
    vocab: int
    hidden: int
    intermediate: int
    heads: int
    kv_rows: tuple[tuple[int, int], ...]                 # values in a row of (K, V), layer by layer
    windowed: tuple[bool, ...]
    window: int


def kv_type(name: str) -> TensorType:
    """The storage type behind a KV cache type as users write it ("f16", "q8_0"). Raises `BadRequest`."""
    if name.lower() not in KV_TYPES:
        raise BadRequest(f"{name!r} is no KV cache type; known are {', '.join(KV_TYPES)}.")
    return BY_NAME[name.upper()]


def kv_bytes_per_token(source: GGUFHeader | ModelSpec, *, type_k: str = "f16", type_v: str = "f16") -> int:
    """Bytes one token takes in the KV cache, over all layers."""
    return sum(_layer_bytes(_shape(source), type_k, type_v))


def estimate(
    source: GGUFHeader | ModelSpec,
    *,
    ctx: int,
    n_seq: int = 1,
    kv_type_k: str = "f16",
    kv_type_v: str = "f16",
    n_ubatch: int = 512,
    n_outputs: int | None = None,
    flash_attention: bool = True,
    swa_full: bool = True,
    weight_type: str = "F16",
) -> MemoryEstimate:
    """Memory of ``source`` loaded with a context of ``ctx`` tokens that ``n_seq`` sequences share.

    n_outputs: rows of logits one step may return (llama.cpp's default: n_ubatch). swa_full: sliding-window layers keep the whole context, as
    llama.cpp does unless told otherwise. weight_type: for a `ModelSpec`, the type its matrices will have. Raises `BadRequest` for impossible
    arguments and `ModelDamaged` for a GGUF that lacks its dimensions.
    """
    for name, value in (("ctx", ctx), ("n_seq", n_seq), ("n_ubatch", n_ubatch)):
        if value < 1:
            raise BadRequest(f"{name} must be 1 or more, not {value}.")
    shape = _shape(source)
    cells = _padded(ctx)
    n_ubatch = min(n_ubatch, ctx)
    window_cells = _padded(min(cells, shape.window * n_seq + n_ubatch))
    per_layer = _layer_bytes(shape, kv_type_k, kv_type_v)
    notes: list[str] = []
    if any(shape.windowed) and window_cells < cells:
        which = f"{sum(shape.windowed)} of {len(per_layer)} layers"
        if swa_full:
            notes.append(f"{which} see {shape.window:,} tokens only; without full-size windows they would keep {window_cells:,} cells.")
        else:
            notes.append(f"{which} keep {window_cells:,} cells; what slides out of the window cannot be reused by another turn.")
    kv = sum(size * (window_cells if windowed and not swa_full else cells) for size, windowed in zip(per_layer, shape.windowed, strict=True))
    if isinstance(source, GGUFHeader):
        weights = source.weight_bytes
    else:
        weights = _spec_weights(source, weight_type)
    outputs = min(n_ubatch if n_outputs is None else n_outputs, n_ubatch)
    return MemoryEstimate(
        weights=weights,
        kv=kv,
        compute=_compute(shape, cells, n_ubatch, outputs, flash_attention),
        kv_bytes_per_token=sum(per_layer),
        notes=tuple(notes),
    )


def _padded(tokens: int) -> int:
    return -(-tokens // CELLS) * CELLS


def _compute(shape: _Shape, cells: int, n_ubatch: int, outputs: int, flash: bool) -> int:
    head = 4 * (outputs * shape.vocab + 2 * n_ubatch * shape.hidden)
    layer = 4 * n_ubatch * (4 * shape.hidden + 3 * shape.intermediate)
    attention = 0 if flash else 4 * n_ubatch * (shape.heads * cells + 4 * shape.hidden)
    mask = n_ubatch * cells * (2 if flash else 4)
    return max(head, layer, attention) + mask


def _layer_bytes(shape: _Shape, type_k: str, type_v: str) -> list[int]:
    k, v = kv_type(type_k), kv_type(type_v)
    for kind, sizes in ((k, {row[0] for row in shape.kv_rows}), (v, {row[1] for row in shape.kv_rows})):
        for size in sizes:
            if size % kind.block:
                raise BadRequest(f"This model's KV rows have {size} values, and the KV cache type {kind.name.lower()} stores {kind.block} at a time.")
    return [k.nbytes(row_k) + v.nbytes(row_v) for row_k, row_v in shape.kv_rows]


def _spec_weights(spec: ModelSpec, weight_type: str) -> int:
    if weight_type not in BY_NAME:
        raise BadRequest(f"{weight_type!r} is no tensor type; known are {', '.join(BY_NAME)}.")
    kind = BY_NAME[weight_type]
    # Norms and biases stay F32. A row that does not fill whole blocks will be stored in a somewhat larger type: count it as full blocks.
    shapes = expected_tensors(spec).values()
    return sum(4 * shape[0] if len(shape) == 1 else shape[0] * -(-shape[1] // kind.block) * kind.block_bytes for shape in shapes)


def _shape(source: GGUFHeader | ModelSpec) -> _Shape:
    if isinstance(source, GGUFHeader):
        return _gguf_shape(source)
    row = source.kv_heads * source.head_dim
    return _Shape(
        vocab=source.vocab_rows,
        hidden=source.hidden,
        intermediate=source.intermediate,
        heads=source.heads,
        kv_rows=((row, row),) * source.layers,
        windowed=source.window_layers or (False,) * source.layers,
        window=source.sliding_window or 0,
    )


def _gguf_shape(header: GGUFHeader) -> _Shape:
    arch = header.architecture

    def integer(key: str, default: int | None = None) -> int:
        value = header.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise ModelDamaged(f"{header.path} has no usable '{arch or '?'}.{key}': it is {value!r}.")
        return value

    def per_layer(key: str, default: int | None = None) -> list[int]:
        value = header.get(key, default)
        if isinstance(value, np.ndarray):
            if len(value) < layers:
                raise ModelDamaged(f"{header.path} has {len(value)} values in '{arch}.{key}' for {layers} layers.")
            return [int(item) for item in value[:layers]]
        return [integer(key, default)] * layers

    layers, hidden = integer("block_count"), integer("embedding_length")
    if not 1 <= layers <= 10_000:
        raise ModelDamaged(f"{header.path} says it has {layers:,} layers.")
    heads = per_layer("attention.head_count")
    groups = per_layer("attention.head_count_kv", max(heads))
    head_dim = hidden // max(1, max(heads))
    k, v = integer("attention.key_length", head_dim), integer("attention.value_length", head_dim)
    embedding = header.tensors.get("token_embd.weight")
    window = integer("attention.sliding_window", 0)
    return _Shape(
        vocab=embedding.shape[-1] if embedding is not None else header.vocab_size,
        hidden=hidden,
        intermediate=max(per_layer("feed_forward_length", 0)),
        heads=max(heads),
        kv_rows=tuple((count * k, count * v) for count in groups),
        windowed=_window_layers(header, layers, window),
        window=window,
    )


def _window_layers(header: GGUFHeader, layers: int, window: int) -> tuple[bool, ...]:
    """Which layers are windowed; none when the file does not say and we do not know, which overestimates."""
    pattern: Any = header.get("attention.sliding_window_pattern", WINDOW_PATTERNS.get(header.architecture))
    if not window or pattern is None:
        return (False,) * layers
    if isinstance(pattern, (np.ndarray, Sequence)) and len(pattern) >= layers:
        return tuple(bool(item) for item in pattern[:layers])
    if isinstance(pattern, int) and pattern > 0:
        return tuple((index + 1) % pattern != 0 for index in range(layers))
    return (False,) * layers
