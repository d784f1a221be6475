"""Hugging Face tensor -> GGUF tensor, as data. What is done to the rows on the way is one word a line.

    copy     as it is
    heads_q  rows of each query head reordered from rotate-half (x1 x2 x3 | y1 y2 y3) to interleaved (x1 y1 x2 y2 x3 y3), as llama.cpp's llama is
    heads_k  the same for key heads
    offset   the norm's offset added: Gemma stores w and multiplies by 1 + w
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from edgeinfer.convert.rope_divisors import divisors, needs_divisors
from edgeinfer.models.spec import ModelSpec

Change = Literal["copy", "heads_q", "heads_k", "offset"]


@dataclass(frozen=True)
class Mapped:
    """One GGUF tensor. ``shape`` is numpy's order, rows first. ``values`` is set where the tensor comes from the config instead of the checkpoint."""

    name: str
    source: str
    shape: tuple[int, ...]
    change: Change = "copy"
    values: tuple[float, ...] = ()


NORMS: tuple[tuple[str, str, Change], ...] = (
    ("attn_norm.weight", "input_layernorm.weight", "offset"),
    ("ffn_norm.weight", "post_attention_layernorm.weight", "offset"),
)
SANDWICH_NORMS: tuple[tuple[str, str, Change], ...] = (
    ("attn_norm.weight", "input_layernorm.weight", "offset"),
    ("post_attention_norm.weight", "post_attention_layernorm.weight", "offset"),
    ("ffn_norm.weight", "pre_feedforward_layernorm.weight", "offset"),
    ("post_ffw_norm.weight", "post_feedforward_layernorm.weight", "offset"),
)
HEAD_NORMS: tuple[tuple[str, str, Change], ...] = (
    ("attn_q_norm.weight", "self_attn.q_norm.weight", "offset"),
    ("attn_k_norm.weight", "self_attn.k_norm.weight", "offset"),
)
ATTENTION: tuple[tuple[str, str, Change], ...] = (
    ("attn_q.weight", "self_attn.q_proj.weight", "copy"),
    ("attn_k.weight", "self_attn.k_proj.weight", "copy"),
    ("attn_v.weight", "self_attn.v_proj.weight", "copy"),
    ("attn_output.weight", "self_attn.o_proj.weight", "copy"),
)
INTERLEAVED_ATTENTION: tuple[tuple[str, str, Change], ...] = (
    ("attn_q.weight", "self_attn.q_proj.weight", "heads_q"),
    ("attn_k.weight", "self_attn.k_proj.weight", "heads_k"),
    ("attn_v.weight", "self_attn.v_proj.weight", "copy"),
    ("attn_output.weight", "self_attn.o_proj.weight", "copy"),
)
PACKED_ATTENTION: tuple[tuple[str, str, Change], ...] = (
    ("attn_qkv.weight", "self_attn.qkv_proj.weight", "copy"),
    ("attn_output.weight", "self_attn.o_proj.weight", "copy"),
)
BIASES: tuple[tuple[str, str, Change], ...] = (
    ("attn_q.bias", "self_attn.q_proj.bias", "copy"),
    ("attn_k.bias", "self_attn.k_proj.bias", "copy"),
    ("attn_v.bias", "self_attn.v_proj.bias", "copy"),
)
MLP: tuple[tuple[str, str, Change], ...] = (
    ("ffn_gate.weight", "mlp.gate_proj.weight", "copy"),
    ("ffn_up.weight", "mlp.up_proj.weight", "copy"),
    ("ffn_down.weight", "mlp.down_proj.weight", "copy"),
)
PACKED_MLP: tuple[tuple[str, str, Change], ...] = (
    ("ffn_up.weight", "mlp.gate_up_proj.weight", "copy"),
    ("ffn_down.weight", "mlp.down_proj.weight", "copy"),
)
LAYER = {
    "llama": NORMS + INTERLEAVED_ATTENTION + MLP,
    "qwen2": NORMS + ATTENTION + BIASES + MLP,
    "qwen3": NORMS + ATTENTION + HEAD_NORMS + MLP,
    "gemma3": SANDWICH_NORMS + ATTENTION + HEAD_NORMS + MLP,
    "phi3": NORMS + PACKED_ATTENTION + PACKED_MLP,
}
OUTER: tuple[tuple[str, str, Change], ...] = (
    ("token_embd.weight", "model.embed_tokens.weight", "copy"),
    ("output_norm.weight", "model.norm.weight", "offset"),
)
HEAD: tuple[tuple[str, str, Change], ...] = (("output.weight", "lm_head.weight", "copy"),)


def map_tensors(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], *, own_head: bool) -> list[Mapped]:
    """All tensors of the GGUF file in file order. ``shapes`` are by Hugging Face name; without ``own_head`` the embedding serves as the head."""
    def mapped(gguf: str, source: str, change: Change) -> Mapped:
        return Mapped(gguf, source, shapes[source], "copy" if change == "offset" and not spec.norm_offset else change)

    outer = OUTER + HEAD if own_head else OUTER
    tensors = [mapped(*row) for row in outer] + rope_tensors(spec)
    for layer in range(spec.layers):
        for gguf, source, change in LAYER[spec.family]:
            tensors.append(mapped(f"blk.{layer}.{gguf}", f"model.layers.{layer}.{source}", change))
    return tensors


def rope_tensors(spec: ModelSpec) -> list[Mapped]:
    """Divisors of the rotation frequencies, one for each rotated pair, where the scaling is not a single factor."""
    rope = spec.rope
    if needs_divisors(rope):
        return [Mapped("rope_freqs.weight", "", (rope.rotary_dim // 2,), values=divisors(rope))]
    if rope.type == "longrope":
        return [
            Mapped("rope_factors_long.weight", "", (len(rope.long_factor),), values=rope.long_factor),
            Mapped("rope_factors_short.weight", "", (len(rope.short_factor),), values=rope.short_factor),
        ]
    return []
