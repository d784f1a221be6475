"""What a decoder-only language model *is*, free of any file format.

``ModelSpec`` is the value every converter and the memory estimate work from. Letters used for shapes, here and in the converters:
V vocabulary rows, D hidden size, F intermediate size, H query heads, G key/value heads, h head size, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["none", "linear", "dynamic", "yarn", "llama3", "longrope"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (rotate-half layout, as Hugging Face stores it)."""

    theta: float                                   # base frequency
    rotary_dim: int                                # leading channels of a head that rotate (h unless partial)
    type: RopeType = "none"
    factor: float = 1.0                            # linear, dynamic, yarn, llama3
    original_context: int | None = None            # context before extension: yarn, llama3, longrope
    low_freq_factor: float | None = None           # llama3
    high_freq_factor: float | None = None          # llama3
    attention_factor: float | None = None          # yarn, longrope: explicit multiplier of cos/sin
    beta_fast: float | None = None                 # yarn
    beta_slow: float | None = None                 # yarn
    short_factor: tuple[float, ...] = ()           # longrope: one per rotated pair, below original_context
    long_factor: tuple[float, ...] = ()            # longrope: above it
    local_theta: float | None = None               # Gemma 3: base frequency of the sliding-window layers (never scaled)


@dataclass(frozen=True)
class ModelSpec:
    """Hyper-parameters of one checkpoint. Every field says what the source said; nothing here is a default of ours."""

    family: str                                    # "llama", "qwen2", "qwen3", "gemma3", "phi3"
    architecture: str                              # class name in config.json, e.g. "LlamaForCausalLM"
    name: str                                      # for people: from config or the folder's name
    vocab_rows: int                                # V: rows of the embedding, which may exceed the tokenizer
    layers: int                                    # L
    hidden: int                                    # D
    intermediate: int                              # F
    heads: int                                     # H
    kv_heads: int                                  # G
    head_dim: int                                  # h; H*h need not equal D
    max_context: int                               # positions the source was trained or extended for
    norm_eps: float
    activation: Literal["silu", "gelu_tanh"]
    rope: RopeSpec
    tied_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False                          # RMSNorm over each head of q and k, before rope
    packed_qkv: bool = False                       # one qkv_proj matrix (Phi-3)
    packed_gate_up: bool = False                   # one gate_up_proj matrix (Phi-3)
    sandwich_norms: bool = False                   # extra norms after attention and MLP (Gemma 3)
    norm_offset: float = 0.0                       # stored norm weights are (w - offset): 1.0 for Gemma
    embedding_scale: float = 1.0                   # sqrt(D) for Gemma
    attention_scale: float = 0.0                   # multiplier of q·k; h ** -0.5 unless the source says otherwise
    attention_softcap: float | None = None
    final_softcap: float | None = None
    sliding_window: int | None = None              # tokens a windowed layer sees, itself included
    window_layers: tuple[bool, ...] = ()           # length L: True where the layer is windowed; () when none is
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()                  # union of config.json and generation_config.json
