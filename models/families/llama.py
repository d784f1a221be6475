"""Llama 2 and 3.x, Mistral, SmolLM2, TinyLlama: separate q/k/v without bias, SwiGLU, two norms a layer."""

from __future__ import annotations

from typing import Any

from edgeinfer.models.config_reader import ConfigReader
from edgeinfer.models.families.common import NO_BIAS, dimensions, layer_prefixes, outer_tensors, windows
from edgeinfer.models.rope import read_rope
from edgeinfer.models.spec import ModelSpec

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")


def read(reader: ConfigReader, architecture: str) -> dict[str, Any]:
    """The `ModelSpec` fields of a Llama or Mistral config."""
    mistral = architecture == "MistralForCausalLM"
    reader.refuse_flag("attention_bias", NO_BIAS)
    reader.refuse_flag("mlp_bias", NO_BIAS)
    reader.refuse_flag("rope_interleaved", "Hugging Face's Llama rotates the halves of a head, not neighbouring channels")
    sizes = dimensions(reader, kv_heads=8 if mistral else None, max_context=131072 if mistral else 2048)
    # Every layer of Mistral 0.1 is windowed; later ones write null. Llama has no window, whatever its config says.
    window = windows(reader, sizes["layers"], 4096, (True,) * sizes["layers"]) if mistral else {}
    return {
        **sizes,
        **window,
        "activation": reader.activation("hidden_act", "silu", {"silu": "silu", "swish": "silu"}),
        "rope": read_rope(reader, head_dim=sizes["head_dim"], max_context=sizes["max_context"]),
        "tied_embeddings": reader.flag("tie_word_embeddings", False),
        "attention_scale": sizes["head_dim"] ** -0.5,
    }


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of a Llama checkpoint."""
    D, F, H, G, h = spec.hidden, spec.intermediate, spec.heads, spec.kv_heads, spec.head_dim
    tensors = outer_tensors(spec)
    for prefix in layer_prefixes(spec):
        tensors |= {
            prefix + "input_layernorm.weight": (D,),
            prefix + "self_attn.q_proj.weight": (H * h, D),
            prefix + "self_attn.k_proj.weight": (G * h, D),
            prefix + "self_attn.v_proj.weight": (G * h, D),
            prefix + "self_attn.o_proj.weight": (D, H * h),
            prefix + "post_attention_layernorm.weight": (D,),
            prefix + "mlp.gate_proj.weight": (F, D),
            prefix + "mlp.up_proj.weight": (F, D),
            prefix + "mlp.down_proj.weight": (D, F),
        }
    return tensors
