"""A `ModelSpec` as the key/value pairs llama.cpp's loader reads, and what of it llama.cpp cannot honour."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from edgeinfer.convert.rope_divisors import needs_divisors, yarn_attention_factor, yarn_betas
from edgeinfer.models.spec import ModelSpec

Kind = Literal["str", "u32", "f32", "bool", "str[]", "i32[]", "f32[]", "bool[]"]
QUANTIZATION_VERSION = 2                                 # of ggml's block formats

# What llama.cpp's graph of each family computes; anything else in a config is refused.
ROPE_TYPES = {
    "llama": {"none", "linear", "dynamic", "yarn", "llama3", "longrope"},
    "qwen2": {"none", "linear", "dynamic", "yarn"},
    "qwen3": {"none", "linear", "dynamic", "yarn"},
    "gemma3": {"none", "linear"},
    "phi3": {"none", "linear", "dynamic", "yarn", "longrope"},
}
PARTIAL_ROPE = {"phi3", "qwen2", "qwen3"}
ROPE_DIVISORS = {"llama"}                                # families whose graph reads rope_freqs.weight
WINDOWED = {"gemma3"}
GEMMA3_WINDOW_PERIOD = 6                                 # every sixth layer is a full one unless the file says otherwise
GEMMA3_27B_LAYERS = 62                                   # the one size whose queries llama.cpp scales by (D / H) ** -0.5


@dataclass(frozen=True)
class KeyValue:
    """One metadata entry; ``kind`` is its GGUF type."""

    key: str
    kind: Kind
    value: Any


def general(name: str, *, file_type: int, parameters: int) -> list[KeyValue]:
    """Who the model is. ``file_type`` is llama.cpp's number; general.architecture is written by the writer itself."""
    return [
        KeyValue("general.type", "str", "model"),
        KeyValue("general.name", "str", name),
        KeyValue("general.size_label", "str", size_label(parameters)),
        KeyValue("general.file_type", "u32", file_type),
        KeyValue("general.quantization_version", "u32", QUANTIZATION_VERSION),
    ]


def size_label(parameters: int) -> str:
    """"135M", "1.1B": two digits at least, as file names carry it."""
    for unit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if parameters > unit:
            break
    else:
        unit, suffix = 1e3, "K"
    scaled = parameters / unit
    return f"{scaled:.0f}{suffix}" if round(scaled) >= 10 else f"{scaled:.1f}{suffix}"


def hyperparameters(spec: ModelSpec) -> list[KeyValue]:
    """The <architecture>.* keys."""
    arch = spec.family
    keys = [
        KeyValue("vocab_size", "u32", spec.vocab_rows),
        KeyValue("context_length", "u32", spec.max_context),
        KeyValue("embedding_length", "u32", spec.hidden),
        KeyValue("block_count", "u32", spec.layers),
        KeyValue("feed_forward_length", "u32", spec.intermediate),
        KeyValue("attention.head_count", "u32", spec.heads),
        KeyValue("attention.head_count_kv", "u32", spec.kv_heads),
        KeyValue("attention.key_length", "u32", spec.head_dim),
        KeyValue("attention.value_length", "u32", spec.head_dim),
        KeyValue("attention.layer_norm_rms_epsilon", "f32", spec.norm_eps),
        KeyValue("rope.dimension_count", "u32", spec.rope.rotary_dim),
        KeyValue("rope.freq_base", "f32", spec.rope.theta),
        *_rope_scaling(spec),
        *_windows(spec),
    ]
    if spec.final_softcap:
        keys.append(KeyValue("final_logit_softcapping", "f32", spec.final_softcap))
    return [KeyValue(f"{arch}.{key.key}", key.kind, key.value) for key in keys]


def _rope_scaling(spec: ModelSpec) -> list[KeyValue]:
    rope = spec.rope
    keys: list[KeyValue] = []
    if rope.local_theta is not None:
        keys.append(KeyValue("rope.freq_base_swa", "f32", rope.local_theta))
    if needs_divisors(rope):
        # The tensor of divisors says it all but the multiplier.
        return keys if rope.type == "llama3" else [*keys, KeyValue("rope.scaling.attn_factor", "f32", yarn_attention_factor(rope))]
    if rope.type in ("linear", "yarn"):
        keys += [KeyValue("rope.scaling.type", "str", rope.type), KeyValue("rope.scaling.factor", "f32", rope.factor)]
    if rope.type == "longrope":
        keys += [KeyValue("rope.scaling.type", "str", "longrope"), KeyValue("rope.scaling.attn_factor", "f32", longrope_attention_factor(spec))]
    if rope.type in ("yarn", "longrope"):
        keys.append(KeyValue("rope.scaling.original_context_length", "u32", rope.original_context))
    if rope.type == "yarn" and rope.attention_factor is not None:
        # llama.cpp always multiplies by yarn's usual 1 + 0.1 ln(factor); the key holds what is left.
        keys.append(KeyValue("rope.scaling.attn_factor", "f32", yarn_attention_factor(rope) / (1.0 + 0.1 * math.log(rope.factor))))
    return keys


def longrope_attention_factor(spec: ModelSpec) -> float:
    """Multiplier of cos and sin: the config's own, or sqrt(1 + ln(extension) / ln(original context))."""
    rope = spec.rope
    if rope.attention_factor is not None:
        return rope.attention_factor
    extension = rope.factor if rope.factor > 1.0 else spec.max_context / rope.original_context
    return math.sqrt(1 + math.log(extension) / math.log(rope.original_context)) if extension > 1.0 else 1.0


def _windows(spec: ModelSpec) -> list[KeyValue]:
    if spec.sliding_window is None:
        # The phi3 loader tells Phi-4 from Phi-3 by a window of zero.
        return [KeyValue("attention.sliding_window", "u32", 0)] if spec.family == "phi3" else []
    keys = [KeyValue("attention.sliding_window", "u32", spec.sliding_window)]
    usual = tuple((layer + 1) % GEMMA3_WINDOW_PERIOD != 0 for layer in range(spec.layers))
    if spec.family in WINDOWED and spec.window_layers != usual:
        keys.append(KeyValue("attention.sliding_window_pattern", "bool[]", spec.window_layers))
    return keys if spec.family in WINDOWED or spec.family == "phi3" else []


def problems(spec: ModelSpec) -> list[str]:
    """What llama.cpp would compute differently from the source, one sentence each: reasons not to convert."""
    found = []
    rope, arch = spec.rope, spec.family
    if rope.type not in ROPE_TYPES[arch]:
        found.append(f"llama.cpp has no {rope.type} rope for {arch} models; known are {', '.join(sorted(ROPE_TYPES[arch]))}.")
    if rope.rotary_dim != spec.head_dim and arch not in PARTIAL_ROPE:
        found.append(f"llama.cpp rotates whole heads in {arch} models, and this one rotates {rope.rotary_dim} of {spec.head_dim} channels.")
    if rope.type == "yarn" and needs_divisors(rope) and arch not in ROPE_DIVISORS:
        fast, slow = yarn_betas(rope)
        found.append(f"llama.cpp computes yarn in {arch} models with beta_fast 32 and beta_slow 1, and this one has {fast:g} and {slow:g}.")
    if arch == "phi3" and spec.heads * spec.head_dim != spec.hidden:
        found.append(f"llama.cpp's phi3 needs head_dim x heads = hidden size, and {spec.head_dim} x {spec.heads} is not {spec.hidden}.")
    if spec.attention_softcap:
        found.append(f"llama.cpp's {arch} has no soft cap on attention scores, and this model has {spec.attention_softcap:g}.")
    if spec.final_softcap and arch != "gemma3":
        found.append(f"llama.cpp's {arch} has no soft cap on logits, and this model has {spec.final_softcap:g}.")
    scale = _attention_scale(spec)
    if spec.attention_scale and not math.isclose(spec.attention_scale, scale, rel_tol=1e-5):
        found.append(f"llama.cpp scales attention scores of this model by {scale:.6g}, and the checkpoint by {spec.attention_scale:.6g}.")
    return found


def _attention_scale(spec: ModelSpec) -> float:
    if spec.family == "gemma3" and spec.layers == GEMMA3_27B_LAYERS:
        return (spec.hidden // spec.heads) ** -0.5
    return spec.head_dim**-0.5


def warnings(spec: ModelSpec) -> list[str]:
    """Differences that begin only beyond some length, one sentence each."""
    found = []
    if spec.rope.type == "dynamic":
        found.append(f"llama.cpp has no dynamic rope scaling: answers match the source up to {spec.max_context:,} tokens.")
    if spec.sliding_window is not None and spec.family not in WINDOWED and spec.sliding_window < spec.max_context:
        found.append(f"llama.cpp computes full attention for {spec.family}: answers match the source up to {spec.sliding_window:,} tokens.")
    if spec.rope.type == "longrope":
        found.append(
            f"llama.cpp takes the long rope factors when opened with a context above {spec.rope.original_context:,} tokens, else the short ones."
        )
    return found
