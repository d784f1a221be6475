"""The store: models kept under a name, each a folder with its files and a manifest.

    <home>/models/<name>/manifest.json      source, revision, kind, files with size and sha256, date
    <home>/models/<name>/<files>
    <home>/models/.downloads/               where `pull` keeps what it has so far

<home> is EDGEINFER_HOME, or the platform's user data folder. An entry appears whole, by renaming a finished folder, or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from edgeinfer.errors import BadRequest, ModelDamaged, ModelNotFound
from edgeinfer.models import hub
from edgeinfer.models.catalogue import ENTRIES
from edgeinfer.models.folder import read_json
from edgeinfer.models.gguf_choice import choose
from edgeinfer.models.hub_id import HubId

MANIFEST = "manifest.json"
FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(1, 10))}   # Windows device names


@dataclass(frozen=True)
class StoredFile:
    """``path`` is relative to the entry's folder, with forward slashes."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class StoreEntry:
    """A stored model. ``kind``: "gguf" or "checkpoint" (or "onnx"). ``created`` is ISO 8601 in UTC."""

    name: str
    folder: Path
    kind: str
    source: str
    revision: str
    created: str
    files: tuple[StoredFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def model_path(self) -> Path:
        """What loaders take: the (first) GGUF, or the folder of a checkpoint."""
        if self.kind == "gguf":
            return self.folder / choose([file.path for file in self.files], None, f"The store entry {self.name}").first
        return self.folder


def home() -> Path:
    """EDGEINFER_HOME, or the platform's user data folder for edgeinfer. Not created here."""
    chosen = os.environ.get("EDGEINFER_HOME")
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_data_dir("edgeinfer", appauthor=False))


def models_folder() -> Path:
    return home() / "models"


def check_name(name: str) -> str:
    """``name`` if it may name an entry. Raises `BadRequest`: letters, digits, ".", "_" and "-", beginning with a letter or digit."""
    if not _NAME.fullmatch(name) or name.endswith(".") or name.split(".")[0].lower() in _RESERVED:
        raise BadRequest(f"{name!r} cannot name a stored model: use up to 100 letters, digits, '.', '_' and '-', a letter or digit first.")
    return name


def list_entries() -> list[StoreEntry]:
    """All entries by name. A folder without a readable manifest is not one."""
    folder = models_folder()
    if not folder.is_dir():
        return []
    names = sorted(path.name for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file())
    return [entry for name in names if (entry := find(name)) is not None]


def find(name: str) -> StoreEntry | None:
    """The entry, or None. Raises `ModelDamaged` when its manifest cannot be read."""
    if not _NAME.fullmatch(name):
        return None
    folder = models_folder() / name
    if folder.is_symlink():
        return None
    manifest = read_json(folder / MANIFEST)
    return None if manifest is None else _from_manifest(name, folder, manifest)


def show(name: str) -> StoreEntry:
    """The entry. Raises `ModelNotFound` that lists what there is."""
    entry = find(name)
    if entry is None:
        there = ", ".join(item.name for item in list_entries()) or "nothing"
        raise ModelNotFound(f"The store has no model {name!r}; it has {there}.")
    return entry


def verify(entry: StoreEntry) -> list[str]:
    """What differs between an entry's files and its manifest, a sentence each. Reads every byte."""
    problems = []
    for file in entry.files:
        path = entry.folder / file.path
        if not path.is_file():
            problems.append(f"{file.path} is missing.")
        elif path.stat().st_size != file.size:
            problems.append(f"{file.path} is incomplete: expected {file.size:,} bytes, has {path.stat().st_size:,}.")
        elif _sha256(path) != file.sha256:
            problems.append(f"{file.path} is damaged: its SHA-256 is not the recorded one.")
    return problems


def add(name: str, files: Mapping[str, Path], *, kind: str, source: str, revision: str = "") -> StoreEntry:
    """Make an entry of ``files`` (name within the entry -> file now), which stay where they are: hard links where the file system can, else copies.

    Raises `BadRequest` for a bad or taken name.
    """
    check_name(name)
    _free(name)
    root = models_folder()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".new-") as scratch:
        folder = Path(scratch) / name
        stored = []
        for inner, path in sorted(files.items()):
            target = folder / _inside(inner)
            target.parent.mkdir(parents=True, exist_ok=True)
            _place(path.resolve(strict=True), target)
            stored.append(StoredFile(inner, target.stat().st_size, _sha256(target)))
        created = datetime.now(UTC).isoformat(timespec="seconds")
        manifest: dict[str, Any] = {"format": FORMAT, "kind": kind, "source": source, "revision": revision, "created": created}
        manifest["files"] = [asdict(file) for file in stored]
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
        _free(name)                                      # somebody may have been faster
        os.rename(folder, root / name)
    return StoreEntry(name, root / name, kind, source, revision, created, tuple(stored))


def pull(model: str, *, name: str | None = None, offline: bool = False, progress: hub.Progress | None = None) -> StoreEntry:
    """Fetch a catalogue name or hub id (user/repo[:QUANT][@revision]) into the store.

    ``name`` defaults to the catalogue name, or the repository's with the quantisation. Interrupted pulls go on where the hub library can.
    """
    entry = ENTRIES.get(model)
    packaged = entry.packaged_file() if entry is not None else None
    if entry is not None and packaged is not None:
        _free(check_name(name or model))
        return add(name or model, {packaged.name: packaged}, kind="gguf", source=f"package {entry.package}")
    wanted = HubId.parse(f"{entry.hub}:{entry.quantization}" if entry is not None else model)
    if wanted is None:
        known = ", ".join(ENTRIES)
        raise BadRequest(f"{model!r} cannot be pulled: it is neither a hub id (user/repo[:QUANT][@revision]) nor one of {known}.")
    if name is not None:
        _free(check_name(name))
    cache = models_folder() / ".downloads"
    listing = hub.list_files(wanted.repo, wanted.revision, offline=offline, cache_dir=cache)
    names = [file.name for file in listing.files]
    kind = "gguf" if wanted.quantization or any(file.endswith(".gguf") for file in names) else "checkpoint"
    if kind == "gguf":
        choice = choose(names, wanted.quantization, wanted.repo)
        patterns = hub.exactly(choice.files)
        suffix = f"-{choice.quantization}" if choice.quantization else ""
    else:
        patterns, suffix = hub.CHECKPOINT_PATTERNS, ""
    name = check_name(name or (model if entry is not None else wanted.repo.split("/")[1].removesuffix("-GGUF") + suffix))
    _free(name)
    folder = hub.download(wanted.repo, wanted.revision, offline=offline, patterns=patterns, progress=progress, cache_dir=cache, listing=listing)
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    if kind == "gguf":
        files = {inner: files[inner] for inner in choice.files}
    for remote in listing.files:
        if remote.name in files and remote.sha256 is not None and _sha256(files[remote.name].resolve()) != remote.sha256:
            files[remote.name].resolve().unlink()        # or the next try would find it finished
            raise ModelDamaged(f"{remote.name} of {wanted.repo} arrived damaged: its SHA-256 is not the hub's; pull it again.")
    stored = add(name, files, kind=kind, source=wanted.repo, revision=folder.name)
    shutil.rmtree(cache / ("models--" + wanted.repo.replace("/", "--")), ignore_errors=True)
    return stored


def remove(name: str) -> StoreEntry:
    """Delete an entry and its files; links inside are removed, never followed. Raises `ModelNotFound` for what is not an entry."""
    entry = show(name)
    doomed = Path(tempfile.mkdtemp(dir=models_folder(), prefix=".old-"))
    os.rename(entry.folder, doomed / name)               # gone from the list at once, even if deleting is interrupted
    shutil.rmtree(doomed)
    return entry


def _free(name: str) -> None:
    if os.path.lexists(models_folder() / name):
        raise BadRequest(f"The store already has {name!r}; remove it first (`edgeinfer models rm {name}`) or choose another name.")


def _inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in name or ":" in name or name == MANIFEST:
        raise BadRequest(f"{name!r} cannot be a file of a stored model.")
    return path


def _place(source: Path, target: Path) -> None:
    try:
        os.link(source, target)                          # no second copy on disk where the file system allows it
    except OSError:
        shutil.copyfile(source, target)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _from_manifest(name: str, folder: Path, manifest: Mapping[str, Any]) -> StoreEntry:
    try:
        if manifest["format"] != FORMAT:
            raise ModelDamaged(f"The store entry {name} has manifest format {manifest['format']!r}; this version reads {FORMAT}.")
        files = tuple(StoredFile(str(_inside(item["path"])), int(item["size"]), str(item["sha256"])) for item in manifest["files"])
        texts = {key: str(manifest[key]) for key in ("kind", "source", "revision", "created")}
    except (KeyError, TypeError, ValueError, BadRequest) as error:
        raise ModelDamaged(f"The manifest of the store entry {name} is damaged ({error}); remove the folder {folder}.") from error
    return StoreEntry(name, folder, files=files, **texts)
