"""What all families read alike: dimensions, windows, the tensors outside the layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.models.config_reader import ConfigReader
from edgeinfer.models.spec import ModelSpec

NO_BIAS = "biases of this kind are not supported in this family"


def dimensions(
    reader: ConfigReader, *, head_dim: int | None = None, kv_heads: int | None = None, max_context: int, norm_eps: float = 1e-6
) -> dict[str, Any]:
    """The `ModelSpec` fields that are sizes. The arguments are transformers' defaults; None: hidden // heads, and as many as heads."""
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    # An explicit null means "as many as heads", an absent key the family's default.
    if "num_key_value_heads" in reader.config or kv_heads is None:
        kv_heads = heads
    groups = reader.integer("num_key_value_heads", kv_heads)
    if head_dim is None and not reader.has("head_dim"):
        head_dim = max(1, hidden // heads)
        if hidden % heads and reader.sound("hidden_size", "num_attention_heads"):
            reader.reject("head_dim", f"'hidden_size' {hidden} is not a multiple of 'num_attention_heads' {heads}, and 'head_dim' is not given.")
    if heads % groups and reader.sound("num_attention_heads", "num_key_value_heads"):
        reader.wrong.append(f"'num_attention_heads' {heads} is not a multiple of 'num_key_value_heads' {groups}.")
    return {
        "vocab_rows": reader.integer("vocab_size"),
        "layers": reader.integer("num_hidden_layers", high=10_000),
        "hidden": hidden,
        "intermediate": reader.integer("intermediate_size"),
        "heads": heads,
        "kv_heads": groups,
        "head_dim": reader.integer("head_dim", head_dim),
        "max_context": reader.integer("max_position_embeddings", max_context),
        "norm_eps": reader.number("rms_norm_eps", norm_eps),
    }


def windows(reader: ConfigReader, layers: int, default: int | None, sliding: tuple[bool, ...]) -> dict[str, Any]:
    """``sliding_window`` and ``window_layers``; ``sliding`` says which layers are windowed when ``layer_types`` does not."""
    window = None
    if reader.has("sliding_window"):
        window = reader.integer("sliding_window")
    elif "sliding_window" not in reader.config:
        window = default
    kinds = reader.config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or (len(kinds) != layers and reader.sound("num_hidden_layers")):
            size = f"a list of {len(kinds)}" if isinstance(kinds, list) else repr(kinds)
            reader.wrong.append(f"'layer_types' must be a list of {layers} names (one for each layer), not {size}.")
        else:
            for kind in sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"}):
                reader.unknown.append(f"'layer_types' has {kind!r}; known are 'full_attention' and 'sliding_attention'.")
            sliding = tuple(kind == "sliding_attention" for kind in kinds)
            if any(sliding) and window is None:
                reader.wrong.append("'layer_types' has 'sliding_attention' and 'sliding_window' is missing.")
    if window is None or not any(sliding):
        return {"sliding_window": None, "window_layers": ()}
    return {"sliding_window": window, "window_layers": sliding}


def outer_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Embedding, last norm and, unless tied, the head."""
    V, D = spec.vocab_rows, spec.hidden
    head = {} if spec.tied_embeddings else {"lm_head.weight": (V, D)}
    return {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), **head}


def layer_prefixes(spec: ModelSpec) -> Iterator[str]:
    """"model.layers.0." and so on."""
    return (f"model.layers.{index}." for index in range(spec.layers))
