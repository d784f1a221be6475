"""From what a user calls a model to files on disk.

Tried in this order: a .gguf file, a folder, a name in the store, a name in the catalogue, a hub id. Only the last two may use the network.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgeinfer.errors import ModelNotFound, UnsupportedModel
from edgeinfer.models import hub, store
from edgeinfer.models.catalogue import ENTRIES
from edgeinfer.models.gguf_choice import choose
from edgeinfer.models.hub_id import HubId

Kind = Literal["gguf", "checkpoint", "onnx"]


@dataclass(frozen=True)
class ResolvedModel:
    """``path`` is the (first) GGUF file, or the folder of a checkpoint or ONNX model. ``source`` says where it was found."""

    path: Path
    kind: Kind
    name: str
    source: str


def resolve(model: str, *, offline: bool = False, progress: hub.Progress | None = None, prefer: Kind = "gguf") -> ResolvedModel:
    """Find ``model``, downloading from the hub when it is a catalogue name or hub id that is not here yet (never with ``offline``).

    prefer: what to take from a hub repository that holds both a GGUF and a checkpoint.
    Raises `ModelNotFound` with what was tried and near misses; `UnsupportedModel` for a folder or file of no known kind.
    """
    text = str(model)
    path = Path(text).expanduser()
    if path.is_file():
        return ResolvedModel(path, _file_kind(path), path.stem, str(path))
    if path.is_dir():
        return _folder(path)
    if not _is_path(text):
        entry = store.find(text)
        if entry is not None:
            kind: Kind = "gguf" if entry.kind == "gguf" else "onnx" if entry.kind == "onnx" else "checkpoint"
            return ResolvedModel(entry.model_path, kind, entry.name, f"store entry {entry.name}")
        if text in ENTRIES:
            return _from_catalogue(text, offline, progress)
        wanted = HubId.parse(text)
        if wanted is not None:
            return _from_hub(wanted, wanted.repo.split("/")[1], offline, progress, prefer)
    raise ModelNotFound(_not_found(text, path))


def _is_path(text: str) -> bool:
    """Written as a path, so that no name or hub id can be meant."""
    return text.endswith(".gguf") or text.startswith((".", "/", "~", "\\")) or text.count("/") > 1 and "@" not in text or "\\" in text


def _file_kind(path: Path) -> Kind:
    if path.suffix.lower() == ".gguf":
        return "gguf"
    with open(path, "rb") as file:
        if file.read(4) == b"GGUF":
            return "gguf"
    what = "give the folder it is in" if path.suffix in (".safetensors", ".json", ".onnx") else "a model is a .gguf file or a folder"
    raise UnsupportedModel(f"{path} is not a model that can be opened: {what}.")


def _folder(folder: Path) -> ResolvedModel:
    name = folder.absolute().name
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if (folder / "edgeinfer.json").is_file() or any(folder.glob("*.onnx")):
        return ResolvedModel(folder, "onnx", name, str(folder))
    if (folder / "config.json").exists() and not ggufs:
        return ResolvedModel(folder, "checkpoint", name, str(folder))
    if ggufs:
        choice = choose(ggufs, None, str(folder))
        return ResolvedModel(folder / choice.first, "gguf", Path(choice.first).stem, str(folder / choice.first))
    raise UnsupportedModel(f"The folder {folder} holds no model: no .gguf file, no config.json, no .onnx file.")


def _from_catalogue(name: str, offline: bool, progress: hub.Progress | None) -> ResolvedModel:
    entry = ENTRIES[name]
    packaged = entry.packaged_file()
    if packaged is not None:
        return ResolvedModel(packaged, "gguf", name, f"package {entry.package}")
    return _from_hub(HubId(entry.hub, entry.quantization), name, offline, progress)


def _from_hub(wanted: HubId, name: str, offline: bool, progress: hub.Progress | None, prefer: Kind = "gguf") -> ResolvedModel:
    listing = hub.list_files(wanted.repo, wanted.revision, offline=offline)
    names = [file.name for file in listing.files]
    source = f"hub {wanted.repo}@{listing.commit}"
    checkpoint = "config.json" in names and any(file.endswith(".safetensors") for file in names)
    if wanted.quantization or any(file.endswith(".gguf") for file in names) and not (prefer == "checkpoint" and checkpoint):
        choice = choose(names, wanted.quantization, wanted.repo)
        folder = hub.download(wanted.repo, wanted.revision, offline=offline, patterns=hub.exactly(choice.files), progress=progress, listing=listing)
        return ResolvedModel(folder / choice.first, "gguf", name, source)
    if "config.json" not in names:
        raise UnsupportedModel(f"{wanted.repo} holds no model that can be opened: no .gguf file and no config.json.")
    folder = hub.download(wanted.repo, wanted.revision, offline=offline, patterns=hub.CHECKPOINT_PATTERNS, progress=progress, listing=listing)
    return ResolvedModel(folder, "checkpoint", name, source)


def _not_found(text: str, path: Path) -> str:
    names = sorted({*(entry.name for entry in store.list_entries()), *ENTRIES})
    near = difflib.get_close_matches(text.lower(), names, n=3, cutoff=0.5)
    if _is_path(text):
        tried = f"The file or folder {text} does not exist."
        neighbours = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
        near = [str(path.parent / name) for name in difflib.get_close_matches(path.name, neighbours, n=3, cutoff=0.5)]
    else:
        catalogue = ", ".join(ENTRIES)
        tried = f"No model {text!r}: not a .gguf file or folder here, not in the store, not in the catalogue ({catalogue}), not a hub id (user/repo)."
    return f"{tried} Did you mean {' or '.join(near)}?" if near else tried
