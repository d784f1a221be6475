"""From a Hugging Face config.json to a `ModelSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeinfer.models.config_reader import ConfigReader, token_ids
from edgeinfer.models.families import ARCHITECTURES, FAMILIES
from edgeinfer.models.spec import ModelSpec


def spec_from_config(
    config: Mapping[str, Any], *, generation_config: Mapping[str, Any] | None = None, name: str = "", where: str = "config.json"
) -> ModelSpec:
    """The spec of a checkpoint from its config, both the old rope keys and ``rope_parameters``.

    Keys a config may leave out take transformers' defaults. ``name`` is for people (default: the config's own); ``where`` names the config in
    messages. Raises `UnsupportedModel` (unknown architecture, rope type, activation) or `ConversionFailed` (missing or impossible values), with all
    problems listed.
    """
    reader = ConfigReader(config, where)
    architecture = _architecture(reader)
    if config.get("quantization_config") is not None:
        method = config["quantization_config"]
        method = method.get("quant_method", "an unnamed method") if isinstance(method, dict) else method
        reader.unknown.append(f"The weights are already quantised ({method}); use the original checkpoint in F32, F16 or BF16.")
    if architecture is None:
        reader.finish()
    family = ARCHITECTURES[architecture]
    fields = FAMILIES[family].read(reader, architecture)
    bos = token_ids(reader, "bos_token_id", config, generation_config)
    eos = token_ids(reader, "eos_token_id", config, generation_config)
    reader.finish()
    return ModelSpec(
        family=family,
        architecture=architecture,
        name=name or str(config.get("_name_or_path") or "").rstrip("/").split("/")[-1] or family,
        bos_id=bos[0] if bos else None,
        eos_ids=eos,
        **fields,
    )


def _architecture(reader: ConfigReader) -> str | None:
    """The one architecture the config names, or None with the problem noted."""
    names = reader.config.get("architectures")
    known = ", ".join(ARCHITECTURES)
    if not isinstance(names, list) or not names or not all(isinstance(item, str) for item in names):
        kind = f" (model_type is {reader.config['model_type']!r})" if reader.has("model_type") else ""
        what = "is missing" if names is None else f"must be a list with one class name, not {names!r}"
        reader.wrong.append(f"The key 'architectures' {what}{kind}; known are {known}.")
        return None
    for name in names:
        if name in ARCHITECTURES:
            return name
    reader.unknown.append(f"The architecture {names[0]!r} is unknown; known are {known}.")
    return None
