"""The files of a Hugging Face model folder besides the tensors: JSON, chat templates, which files hold weights."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from edgeinfer.errors import ConversionFailed, ModelDamaged, UnsupportedModel

MAX_JSON = 64 << 20                                      # bytes; real ones are a few KB, an index of a huge model a few MB
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_text(path: Path) -> str:
    """A bounded UTF-8 text file. Raises `ModelDamaged`."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise ModelDamaged(f"{path} is {path.stat().st_size:,} bytes, too large for what it should be.")
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ModelDamaged(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ModelDamaged(f"{path} is not UTF-8 text (byte {error.start}).") from error


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None when there is no such file. Raises `ModelDamaged` for anything else."""
    if not path.exists() and not path.is_symlink():
        return None
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelDamaged(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelDamaged(f"{path} must hold a JSON object, not a {type(value).__name__}.")
    return value


def chat_templates(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name. Files win over tokenizer_config.json, chat_template.jinja over chat_template.json."""
    found: dict[str, str] = {}
    stored = read_json(folder / "chat_template.json") or {}
    for value, where in ((tokenizer_config.get("chat_template"), "tokenizer_config.json"), (stored.get("chat_template"), "chat_template.json")):
        if value is None:
            continue
        entries = [{"name": "default", "template": value}] if isinstance(value, str) else value
        if isinstance(entries, dict):
            entries = [{"name": name, "template": template} for name, template in entries.items()]
        if not isinstance(entries, list) or not all(
            isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str) for entry in entries
        ):
            raise ModelDamaged(f"'chat_template' in {folder / where} must be a text or a list of named templates.")
        found |= {entry["name"]: entry["template"] for entry in entries}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = read_text(path)
    if (folder / "chat_template.jinja").exists():
        found["default"] = read_text(folder / "chat_template.jinja")
    return found


def weight_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """(safetensors files of the model, tensor name -> shard name where an index says so). Files named by an index need not exist."""
    if (folder / "model.safetensors").exists() or (folder / "model.safetensors").is_symlink():
        return [folder / "model.safetensors"], None
    document = read_json(folder / INDEX)
    if document is not None:
        index = document.get("weight_map")
        if not isinstance(index, dict) or not index or not all(isinstance(shard, str) for shard in index.values()):
            raise ModelDamaged(f"{folder / INDEX} has no 'weight_map' of tensor names to file names.")
        shards = sorted(set(index.values()))
        for shard in shards:
            inside = shard and not PurePosixPath(shard).is_absolute() and ".." not in PurePosixPath(shard).parts
            if not inside or any(character in shard for character in "\\:\0"):
                raise ModelDamaged(f"{folder / INDEX} names the weight file {shard!r}, which is not inside the folder.")
        return [folder / shard for shard in shards], index
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        if pickles:
            raise UnsupportedModel(
                f"{folder} has its weights only as pickle ({pickles[0]}), which can run code when opened; "
                "get a version with .safetensors files, or save one with save_pretrained."
            )
        raise ConversionFailed(f"{folder} has no .safetensors files.")
    return files, None
