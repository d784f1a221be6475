"""Model families: one small module each, made to be diffed.

A family module has ``ARCHITECTURES`` (class names in config.json it answers to), ``read(reader, architecture) -> dict`` (the `ModelSpec` fields that
are the family's own; problems go into the reader) and ``expected_tensors(spec) -> dict`` (Hugging Face tensor names with their stored shapes).
"""

from __future__ import annotations

from types import ModuleType

from edgeinfer.models.families import gemma3, llama, phi3, qwen2, qwen3
from edgeinfer.models.spec import ModelSpec

FAMILIES: dict[str, ModuleType] = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3, "gemma3": gemma3, "phi3": phi3}
ARCHITECTURES: dict[str, str] = {architecture: family for family, module in FAMILIES.items() for architecture in module.ARCHITECTURES}
# model_type in config.json -> the class that such a language model has, for a config without ``architectures``
MODEL_TYPES: dict[str, str] = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM", "phi3": "Phi3ForCausalLM",
}


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this spec must hold, by Hugging Face name, with its stored shape. ``lm_head.weight`` is absent when tied."""
    return FAMILIES[spec.family].expected_tensors(spec)
