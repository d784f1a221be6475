"""Phi-3 and Phi-4-mini: packed qkv and gate/up matrices, longrope, part of a head rotated (Phi-4-mini), windows on every layer (Phi-3-mini-4k)."""

from __future__ import annotations

from typing import Any

from edgeinfer.models.config_reader import ConfigReader
from edgeinfer.models.families.common import NO_BIAS, dimensions, layer_prefixes, outer_tensors, windows
from edgeinfer.models.rope import read_rope
from edgeinfer.models.spec import ModelSpec

ARCHITECTURES = ("Phi3ForCausalLM",)


def read(reader: ConfigReader, architecture: str) -> dict[str, Any]:
    """The `ModelSpec` fields of a Phi-3 config."""
    reader.refuse_flag("attention_bias", NO_BIAS)
    sizes = dimensions(reader, max_context=4096, norm_eps=1e-5)
    return {
        **sizes,
        **windows(reader, sizes["layers"], None, (True,) * sizes["layers"]),
        "activation": reader.activation("hidden_act", "silu", {"silu": "silu", "swish": "silu"}),
        # The first Phi-3 configs called their longrope "su" or "yarn".
        "rope": read_rope(
            reader, head_dim=sizes["head_dim"], max_context=sizes["max_context"], default_original=4096, aliases={"yarn": "longrope"},
            may_be_partial=True,
        ),
        "tied_embeddings": reader.flag("tie_word_embeddings", False),
        "attention_scale": sizes["head_dim"] ** -0.5,
        "packed_qkv": True,
        "packed_gate_up": True,
    }


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of a Phi-3 checkpoint. Rows of qkv_proj: q, k, v; of gate_up_proj: gate, up."""
    D, F, H, G, h = spec.hidden, spec.intermediate, spec.heads, spec.kv_heads, spec.head_dim
    tensors = outer_tensors(spec)
    for prefix in layer_prefixes(spec):
        tensors |= {
            prefix + "input_layernorm.weight": (D,),
            prefix + "self_attn.qkv_proj.weight": ((H + 2 * G) * h, D),
            prefix + "self_attn.o_proj.weight": (D, H * h),
            prefix + "post_attention_layernorm.weight": (D,),
            prefix + "mlp.gate_up_proj.weight": (2 * F, D),
            prefix + "mlp.down_proj.weight": (D, F),
        }
    return tensors
