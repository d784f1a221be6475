"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and optionally windowed upper layers."""

from __future__ import annotations

from typing import Any

from edgeinfer.models.config_reader import ConfigReader
from edgeinfer.models.families import llama
from edgeinfer.models.families.common import dimensions, layer_prefixes, windows
from edgeinfer.models.rope import read_rope
from edgeinfer.models.spec import ModelSpec

ARCHITECTURES = ("Qwen2ForCausalLM",)


def upper_windows(reader: ConfigReader, layers: int) -> dict[str, Any]:
    """Qwen's windows: off unless ``use_sliding_window``, then on from layer ``max_window_layers`` up."""
    if not reader.flag("use_sliding_window", False):
        return {}
    first = reader.integer("max_window_layers", 28, low=0)
    return windows(reader, layers, 4096, tuple(index >= first for index in range(layers)))


def read(reader: ConfigReader, architecture: str) -> dict[str, Any]:
    """The `ModelSpec` fields of a Qwen2 config."""
    sizes = dimensions(reader, kv_heads=32, max_context=32768)
    return {
        **sizes,
        **upper_windows(reader, sizes["layers"]),
        "activation": reader.activation("hidden_act", "silu", {"silu": "silu", "swish": "silu"}),
        "rope": read_rope(reader, head_dim=sizes["head_dim"], max_context=sizes["max_context"]),
        "tied_embeddings": reader.flag("tie_word_embeddings", False),
        "attention_scale": sizes["head_dim"] ** -0.5,
        "qkv_bias": True,
    }


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of a Qwen2 checkpoint."""
    H, G, h = spec.heads, spec.kv_heads, spec.head_dim
    tensors = llama.expected_tensors(spec)
    for prefix in layer_prefixes(spec):
        tensors |= {
            prefix + "self_attn.q_proj.bias": (H * h,),
            prefix + "self_attn.k_proj.bias": (G * h,),
            prefix + "self_attn.v_proj.bias": (G * h,),
        }
    return tensors
