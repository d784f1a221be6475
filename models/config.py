"""From a Hugging Face config.json to a `ModelSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeinfer.errors import EdgeInferError
from edgeinfer.models.config_reader import ConfigReader, token_ids
from edgeinfer.models.families import ARCHITECTURES, FAMILIES, MODEL_TYPES
from edgeinfer.models.rope import rope_dicts, rope_type
from edgeinfer.models.spec import ModelSpec

# What names and shapes of tensors follow from.
SHAPE_KEYS = (
    "vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "tie_word_embeddings", "attention_bias", "mlp_bias", "quantization_config",
)


@dataclass(frozen=True)
class ConfigReading:
    """A config as far as it could be read.

    ``problems`` are the sentences that ``error`` lists. ``spec`` is whole when there is no error; with one it is good for names and shapes of
    tensors only, and None where the config does not say even those.
    """

    spec: ModelSpec | None
    problems: tuple[str, ...] = ()
    error: EdgeInferError | None = None


def spec_from_config(
    config: Mapping[str, Any], *, generation_config: Mapping[str, Any] | None = None, name: str = "", where: str = "config.json"
) -> ModelSpec:
    """The spec of a checkpoint from its config, both the old rope keys and ``rope_parameters``.

    Keys a config may leave out take transformers' defaults. ``name`` is for people (default: the config's own); ``where`` names the config in
    messages. Raises `UnsupportedModel` (unknown architecture, rope type, activation) or `ConversionFailed` (missing or impossible values), with all
    problems listed.
    """
    reading = read_config(config, generation_config=generation_config, name=name, where=where)
    if reading.error is not None:
        raise reading.error
    return reading.spec


def read_config(
    config: Mapping[str, Any], *, generation_config: Mapping[str, Any] | None = None, name: str = "", where: str = "config.json"
) -> ConfigReading:
    """As `spec_from_config`, and what is wrong is returned, for lists that hold the problems of other files too."""
    reader = ConfigReader(config, where)
    architecture = _architecture(reader)
    if config.get("quantization_config") is not None:
        method = config["quantization_config"]
        method = method.get("quant_method", "an unnamed method") if isinstance(method, dict) else method
        reader.unknown.append(f"The weights are already quantised ({method}); use the original checkpoint in F32, F16 or BF16.")
        reader.bad.add("quantization_config")
    if architecture is None:
        rope_type(reader, rope_dicts(reader)[0])         # which other keys there should be, the architecture would say
        return ConfigReading(None, tuple(reader.problems), reader.error())
    family = ARCHITECTURES[architecture]
    fields = FAMILIES[family].read(reader, architecture)
    bos = token_ids(reader, "bos_token_id", config, generation_config)
    eos = token_ids(reader, "eos_token_id", config, generation_config)
    if not reader.sound(*SHAPE_KEYS):
        return ConfigReading(None, tuple(reader.problems), reader.error())
    spec = ModelSpec(
        family=family,
        architecture=architecture,
        name=name or str(config.get("_name_or_path") or "").rstrip("/").split("/")[-1] or family,
        bos_id=bos[0] if bos else None,
        eos_ids=eos,
        **fields,
    )
    return ConfigReading(spec, tuple(reader.problems), reader.error())


def _architecture(reader: ConfigReader) -> str | None:
    """The one architecture the config names. Else the problem is noted, and it is what the model type stands for, or None."""
    names = reader.config.get("architectures")
    known = ", ".join(ARCHITECTURES)
    if not isinstance(names, list) or not names or not all(isinstance(item, str) for item in names):
        kind = f" (model_type is {reader.config['model_type']!r})" if reader.has("model_type") else ""
        what = "is missing" if names is None else f"must be a list with one class name, not {names!r}"
        reader.wrong.append(f"The key 'architectures' {what}{kind}; known are {known}.")
        return MODEL_TYPES.get(str(reader.config.get("model_type")))
    for name in names:
        if name in ARCHITECTURES:
            return name
    reader.unknown.append(f"The architecture {names[0]!r} is unknown; known are {known}.")
    return None
