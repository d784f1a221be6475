"""How much memory a model will take in llama.cpp: weights + KV cache + compute buffers.

The KV cache is exact: cells x layers x (bytes of a row of K + of V), where the context is rounded up to 256 cells. Weights are exact for a GGUF.
Compute buffers follow the largest step of the graph (logits, or a layer's activations, plus the attention mask): within a factor of 1.5 either way
for the dense architectures of `edgeinfer.models.families` (tests hold SmolLM2-135M to it). Rows of logits dominate them unless few are asked for.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
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
    head_dims: tuple[int, int]                           # values of one head in a row of (K, V)
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


def attention_depth(header: GGUFHeader) -> int:
    """The context at which a prompt token spends as much time on attention as on everything else; 0 when every layer is windowed.

    By operations 4 x heads x head size a layer for each token of context, against 2 for each parameter that is multiplied; attention kernels do
    about two thirds as many of them in a second as matrix products do (SmolLM2-135M: 3,070 by operations, 2,000 by the clock).
    """
    shape = _shape(header)
    embeddings = {"token_embd.weight", "output.weight"}  # looked up, or only multiplied for the last token of a prompt
    multiplied = sum(tensor.elements for name, tensor in header.tensors.items() if name not in embeddings)
    per_token = 2 * shape.heads * sum(shape.head_dims) * sum(not windowed for windowed in shape.windowed)
    return 2 * multiplied * 2 // (3 * per_token) if per_token else 0


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
    kv_unified: bool = True,
    weight_type: str = "F16",
) -> MemoryEstimate:
    """Memory of ``source`` loaded with a context of ``ctx`` tokens that ``n_seq`` sequences share (not ``kv_unified``: of which each has its part).

    n_outputs: rows of logits one step may return (llama.cpp's default: n_ubatch). swa_full: sliding-window layers keep the whole context, as
    llama.cpp does unless told otherwise. weight_type: for a `ModelSpec`, the type its matrices will have. Raises `BadRequest` for impossible
    arguments and `ModelDamaged` for a GGUF that lacks its dimensions.
    """
    for name, value in (("ctx", ctx), ("n_seq", n_seq), ("n_ubatch", n_ubatch)):
        if value < 1:
            raise BadRequest(f"{name} must be 1 or more, not {value}.")
    shape = _shape(source)
    visible = _padded(ctx if kv_unified else -(-ctx // n_seq))
    cells = visible if kv_unified else visible * n_seq
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
        compute=_compute(shape, visible, n_ubatch, outputs, flash_attention),
        kv_bytes_per_token=sum(per_layer),
        notes=tuple(notes),
    )


_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)(B?)", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """A size as users write it: a number of bytes, "512MiB", "2G" (both of 1024), "1.5GB" (of 1000). Raises `BadRequest`."""
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    match = _BYTES.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or (match[3] and not match[2]):
        raise BadRequest(f"{text!r} is no amount of memory; write bytes or something like 512MiB or 2GiB.")
    decimal = match[2] and match[4] and not match[3]
    size = int(float(match[1]) * (1000 if decimal else 1024) ** " KMGT".index(match[2].upper() or " "))
    if size < 1:
        raise BadRequest(f"{text!r} is no amount of memory; write bytes or something like 512MiB or 2GiB.")
    return size


def format_bytes(size: int) -> str:
    """For people: "1.3 GiB", "512 MiB"."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            value = size / (1 << power)
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{size} bytes"


def available_memory() -> int:
    """Bytes this process can still get without anybody swapping: what the system has available, or its control group (a container) allows."""
    import psutil

    return min(int(psutil.virtual_memory().available), _group_memory(Path("/sys/fs/cgroup")))


def _group_memory(root: Path) -> int:
    """Bytes that the control group at ``root`` may still take; what its file cache holds can be taken back."""
    rooms = [sys.maxsize]
    for limit, usage, cache in (("memory.max", "memory.current", "inactive_file"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file")):
        try:
            allowed, used = (root / limit).read_text().strip(), int((root / usage).read_text())
            stat = (root / limit).with_name("memory.stat").read_text()
        except (OSError, ValueError):
            continue
        if allowed.isdigit():
            held = re.search(rf"^{cache} (\d+)$", stat, re.MULTILINE)
            rooms.append(max(0, int(allowed) - used + (int(held[1]) if held else 0)))
    return min(rooms)


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
    for flag, kind, size in (("-ctk", k, shape.head_dims[0]), ("-ctv", v, shape.head_dims[1])):
        if size % kind.block:                            # attention reads a row head by head
            raise BadRequest(f"This model's heads have {size} values, and the KV cache type {kind.name.lower()} stores {kind.block} at a time; use {flag} f16.")
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
        head_dims=(source.head_dim, source.head_dim),
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
        head_dims=(k, v),
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
