"""Rotary embedding settings of a config.json, in the two layouts Hugging Face has used.

Old: ``rope_theta`` and ``rope_scaling`` ({"type" or "rope_type": ..., ...}) at the top level. New (transformers 5): one ``rope_parameters``, either
flat or, where layer kinds differ (Gemma 3), one such dict for each kind: {"full_attention": {...}, "sliding_attention": {...}}.
An unknown type or key is noted as a problem, never read as "no scaling".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeinfer.models.config_reader import ConfigReader
from edgeinfer.models.spec import RopeSpec

LAYER_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")
TYPES = {"default": "none", "linear": "linear", "dynamic": "dynamic", "yarn": "yarn", "llama3": "llama3", "longrope": "longrope", "su": "longrope"}
KEYS = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    "attention_factor", "beta_fast", "beta_slow", "short_factor", "long_factor",
}
HARMLESS = {"finetuned"}                                 # written by some trainers, read by nobody


def rope_dicts(reader: ConfigReader) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """(settings of full attention layers, settings of sliding-window layers or None when they have none of their own)."""
    merged: dict[str, Any] = {}
    local: dict[str, Any] | None = None
    for key in ("rope_parameters", "rope_scaling"):
        value = reader.config.get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            reader.wrong.append(f"'{key}' must be an object, not {value!r}.")
            continue
        nested = {kind: value[kind] for kind in LAYER_KINDS if value.get(kind) is not None}
        if nested:
            if set(value) - set(LAYER_KINDS) or not all(isinstance(item, dict) for item in nested.values()):
                reader.wrong.append(f"'{key}' mixes layer kinds and settings: {', '.join(map(repr, value))}.")
                continue
            for kind in set(nested) - {"full_attention", "sliding_attention"}:
                reader.unknown.append(f"'{key}' names the layer kind {kind!r}; known are 'full_attention' and 'sliding_attention'.")
            local = nested.get("sliding_attention", local)
            value = nested.get("full_attention") or nested.get("sliding_attention") or {}
        for name, item in value.items():
            if name in merged and merged[name] != item:
                reader.wrong.append(f"'rope_parameters' and 'rope_scaling' disagree about '{name}': {merged[name]!r} and {item!r}.")
            merged[name] = item
    return merged, local


def rope_type(reader: ConfigReader, settings: Mapping[str, Any], aliases: Mapping[str, str] | None = None) -> Any:
    """Our name of the settings' rope type; an unknown one is noted and read as "none"."""
    name = settings.get("rope_type") or settings.get("type") or "default"
    if settings.get("rope_type") and settings.get("type") and settings["rope_type"] != settings["type"]:
        reader.wrong.append(f"The rope settings name two types: rope_type {settings['rope_type']!r} and type {settings['type']!r}.")
    known = {**TYPES, **(aliases or {})}
    if not isinstance(name, str) or name not in known:
        reader.unknown.append(f"The rope type {name!r} is unknown; known are {', '.join(TYPES)}.")
        return "none"
    return known[name]


def read_rope(
    reader: ConfigReader,
    *,
    head_dim: int,
    max_context: int,
    default_theta: float = 10000.0,
    default_original: int | None = None,
    aliases: Mapping[str, str] | None = None,
    default_local_theta: float | None = None,
    may_be_partial: bool = False,
) -> RopeSpec:
    """The `RopeSpec` of a config. ``default_*`` are transformers' for the family; ``default_local_theta`` is set for families with local layers.

    aliases: further names of types in this family. may_be_partial: the family's models can rotate a part of each head only.
    """
    settings, local = rope_dicts(reader)
    kind = rope_type(reader, settings, aliases)
    unknown = [key for key in settings if key not in KEYS and key not in HARMLESS]
    if unknown and kind != "none":
        reader.unknown.append(f"The rope settings have the unknown key{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, unknown))}.")

    def value(key: str, *default: Any) -> Any:
        return reader.number(key, *default, source=settings, label=f"rope {key}")

    theta = value("rope_theta", reader.number("rope_theta", default_theta))
    part = value("partial_rotary_factor", reader.number("partial_rotary_factor", 1.0))
    if part != 1 and not may_be_partial:
        reader.unknown.append(f"'partial_rotary_factor' is {part:g}; models of this family rotate whole heads.")
        part = 1.0
    rotary_dim = int(head_dim * part)
    sized = reader.sound("hidden_size", "num_attention_heads", "head_dim")
    if (part > 1 or rotary_dim < 2 or rotary_dim % 2) and sized:
        rotates = f"A head of {head_dim} channels with partial_rotary_factor {part:g} rotates {rotary_dim}"
        reader.wrong.append(f"{rotates}; that must be even, from 2 to {head_dim}.")
        rotary_dim, sized = head_dim, False
    fields: dict[str, Any] = {}
    beside = reader.number("original_max_position_embeddings", None)
    original = value("original_max_position_embeddings", beside)
    said = reader.sound("original_max_position_embeddings", "rope original_max_position_embeddings")
    if said and beside is not None and original != beside:
        reader.wrong.append(f"'original_max_position_embeddings' is {beside:g} in the config and {original:g} in its rope settings.")
    original = original or default_original
    if kind in ("linear", "dynamic", "yarn", "llama3"):
        fields["factor"] = value("factor")
        if fields["factor"] < 1:
            reader.wrong.append(f"The rope factor is {fields['factor']:g}; it must be 1 or more.")
    if kind == "yarn":
        fields |= {"beta_fast": value("beta_fast", 32.0), "beta_slow": value("beta_slow", 1.0), "attention_factor": value("attention_factor", None)}
        original = original or max_context               # as transformers does
    if kind == "llama3":
        fields |= {key: value(key) for key in ("low_freq_factor", "high_freq_factor")}
        frequencies = reader.sound("rope low_freq_factor", "rope high_freq_factor")
        if fields["low_freq_factor"] >= fields["high_freq_factor"] and frequencies:
            reader.wrong.append("The rope low_freq_factor must be below high_freq_factor.")
    if kind == "longrope":
        fields |= {"attention_factor": value("attention_factor", None)}
        fields |= {key: _factors(reader, settings.get(key), key, rotary_dim // 2 if sized else None) for key in ("short_factor", "long_factor")}
        if settings.get("factor") is not None:
            fields["factor"] = value("factor")
    if kind in ("llama3", "longrope") and original is None and said:
        reader.wrong.append(f"The rope type {kind!r} needs 'original_max_position_embeddings', which is missing.")
    if original is not None and original != int(original):
        reader.wrong.append(f"'original_max_position_embeddings' must be a whole number, not {original:g}.")
    return RopeSpec(
        theta=theta,
        rotary_dim=rotary_dim,
        type=kind,
        original_context=int(original) if original is not None and kind in ("yarn", "llama3", "longrope") else None,
        local_theta=_local_theta(reader, local, theta, default_local_theta),
        **fields,
    )


def _local_theta(reader: ConfigReader, local: dict[str, Any] | None, theta: float, default: float | None) -> float | None:
    if default is None:
        if local is not None and local.get("rope_theta", theta) != theta:
            reader.unknown.append("Sliding-window layers have a rope of their own, which this family is not known with.")
        return None
    if local is not None:
        if rope_type(reader, local) != "none":
            reader.unknown.append("The rope of the sliding-window layers is scaled; it is known unscaled only.")
        default = reader.number("rope_theta", default, source=local, label="rope_parameters.sliding_attention.rope_theta")
        return default
    return reader.number("rope_local_base_freq", default)


def _factors(reader: ConfigReader, value: Any, key: str, count: int | None) -> tuple[float, ...]:
    """A list of ``count`` numbers; any number of them where the head's size is not known."""
    if value is None:
        reader.wrong.append(f"The rope type 'longrope' needs '{key}', which is missing.")
        return ()
    ok = isinstance(value, list) and all(isinstance(item, (int, float)) and not isinstance(item, bool) and 0 < item < 1e30 for item in value)
    if not ok or count not in (None, len(value)):
        size = f"a list of {len(value)}" if isinstance(value, list) else repr(value)
        wanted = "" if count is None else f"{count} "
        reader.wrong.append(f"The rope '{key}' must be a list of {wanted}numbers above 0 (one for each rotated pair), not {size}.")
        return ()
    return tuple(float(item) for item in value)
