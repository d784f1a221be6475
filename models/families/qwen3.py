"""Qwen3 (dense): Llama with RMSNorm over each head of q and k, and a head size of its own."""

from __future__ import annotations

from typing import Any

from edgeinfer.models.config_reader import ConfigReader
from edgeinfer.models.families import llama
from edgeinfer.models.families.common import NO_BIAS, dimensions, layer_prefixes
from edgeinfer.models.families.qwen2 import upper_windows
from edgeinfer.models.rope import read_rope
from edgeinfer.models.spec import ModelSpec

ARCHITECTURES = ("Qwen3ForCausalLM",)


def read(reader: ConfigReader, architecture: str) -> dict[str, Any]:
    """The `ModelSpec` fields of a Qwen3 config."""
    reader.refuse_flag("attention_bias", NO_BIAS)
    sizes = dimensions(reader, head_dim=128, kv_heads=32, max_context=32768)
    return {
        **sizes,
        **upper_windows(reader, sizes["layers"]),
        "activation": reader.activation("hidden_act", "silu", {"silu": "silu", "swish": "silu"}),
        "rope": read_rope(reader, head_dim=sizes["head_dim"], max_context=sizes["max_context"]),
        "tied_embeddings": reader.flag("tie_word_embeddings", False),
        "attention_scale": sizes["head_dim"] ** -0.5,
        "qk_norm": True,
    }


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of a Qwen3 checkpoint."""
    tensors = llama.expected_tensors(spec)
    for prefix in layer_prefixes(spec):
        tensors |= {
            prefix + "self_attn.q_norm.weight": (spec.head_dim,),
            prefix + "self_attn.k_norm.weight": (spec.head_dim,),
        }
    return tensors
