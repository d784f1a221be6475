"""Gemma 3 text: four norms a layer stored as w - 1, scaled embedding, GeGLU, q/k norms, five windowed layers to one full one with a rope each."""

from __future__ import annotations

import math
from typing import Any

from edgeinfer.models.config_reader import ConfigReader
from edgeinfer.models.families import qwen3
from edgeinfer.models.families.common import NO_BIAS, dimensions, layer_prefixes, windows
from edgeinfer.models.rope import read_rope
from edgeinfer.models.spec import ModelSpec

ARCHITECTURES = ("Gemma3ForCausalLM",)


def read(reader: ConfigReader, architecture: str) -> dict[str, Any]:
    """The `ModelSpec` fields of a Gemma 3 text config."""
    reader.refuse_flag("attention_bias", NO_BIAS)
    reader.refuse_flag("use_bidirectional_attention", "only causal models generate text")
    sizes = dimensions(reader, head_dim=256, kv_heads=4, max_context=131072)
    pattern = reader.integer("sliding_window_pattern", reader.integer("_sliding_window_pattern", 6))
    scalar = reader.number("query_pre_attn_scalar", 256.0)
    activation = "hidden_activation" if reader.has("hidden_activation") else "hidden_act"
    return {
        **sizes,
        **windows(reader, sizes["layers"], 4096, tuple((index + 1) % pattern != 0 for index in range(sizes["layers"]))),
        "activation": reader.activation(activation, "gelu_pytorch_tanh", {"gelu_pytorch_tanh": "gelu_tanh"}),
        "rope": read_rope(
            reader, head_dim=sizes["head_dim"], max_context=sizes["max_context"], default_theta=1_000_000.0, default_local_theta=10_000.0
        ),
        "tied_embeddings": reader.flag("tie_word_embeddings", True),
        "attention_scale": scalar**-0.5 if reader.sound("query_pre_attn_scalar") else 0.0,
        "attention_softcap": reader.number("attn_logit_softcapping", None),
        "final_softcap": reader.number("final_logit_softcapping", None),
        "qk_norm": True,
        "sandwich_norms": True,
        "norm_offset": 1.0,
        "embedding_scale": math.sqrt(sizes["hidden"]),
    }


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of a Gemma 3 text checkpoint."""
    tensors = qwen3.expected_tensors(spec)
    for prefix in layer_prefixes(spec):
        tensors |= {
            prefix + "pre_feedforward_layernorm.weight": (spec.hidden,),
            prefix + "post_feedforward_layernorm.weight": (spec.hidden,),
        }
    return tensors
