"""The one door to huggingface_hub: listing and downloading model repositories.

``offline=True`` (or HF_HUB_OFFLINE) answers from the local cache alone and opens no socket. Finished files are never fetched again, and a connection
that breaks resumes where it was; whether a file survives the end of the process half done is the library's affair (0.x and 1.x keep it, 2.x starts
that file afresh).
The library's telemetry is switched off. Tokens come from HF_TOKEN or `hf auth login` through the library and appear in no message of ours.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

from edgeinfer.errors import BackendFailed, EdgeInferError, ModelNotFound

Progress = Callable[[str, int, int], None]               # what is done ("download user/repo"), bytes here so far, bytes in all
POLL_SECONDS = 0.2
ATTEMPTS = 5                                             # at a download whose connection breaks
CHECKPOINT_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")


@dataclass(frozen=True)
class HubFile:
    """A file of a repository. ``sha256`` is known for large (LFS) files."""

    name: str
    size: int
    sha256: str | None = None


@dataclass(frozen=True)
class HubListing:
    """The files of a repository at one commit."""

    repo_id: str
    commit: str
    files: tuple[HubFile, ...]


def _hub() -> ModuleType:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import huggingface_hub
    import huggingface_hub.constants
    import huggingface_hub.errors
    import huggingface_hub.utils

    return huggingface_hub


def _endpoint() -> str | None:
    """HF_ENDPOINT as it is now: the library reads it only once, when imported."""
    return os.environ.get("HF_ENDPOINT") or None


def exactly(names: Sequence[str]) -> tuple[str, ...]:
    """Patterns that match these names and no others."""
    return tuple(name.replace("[", "[[]").replace("*", "[*]").replace("?", "[?]") for name in names)


def is_offline(offline: bool) -> bool:
    """The flag, or the library's own environment variable."""
    return offline or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def list_files(repo_id: str, revision: str | None = None, *, offline: bool = False, cache_dir: Path | None = None) -> HubListing:
    """What a repository holds; offline, what of it lies in the cache. Raises `ModelNotFound` with a sentence for each way to fail."""
    if is_offline(offline):
        folder = _cached_folder(repo_id, revision, cache_dir)
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        return HubListing(repo_id, folder.name, tuple(HubFile(name, (folder / name).stat().st_size) for name in names))
    with _explained(repo_id, revision, cache_dir):
        info = _hub().HfApi(endpoint=_endpoint()).model_info(repo_id, revision=revision, files_metadata=True)
    files = tuple(HubFile(item.rfilename, item.size or 0, _sha256(item.lfs)) for item in info.siblings or ())
    return HubListing(repo_id, info.sha or "", files)


def download(
    repo_id: str,
    revision: str | None = None,
    *,
    offline: bool = False,
    patterns: Sequence[str] = (),
    progress: Progress | None = None,
    cache_dir: Path | None = None,
    listing: HubListing | None = None,
) -> Path:
    """The folder of a repository's snapshot, with the files that match any of ``patterns`` (shell style; none: all) in it.

    ``progress`` is called from another thread a few times a second, and once at the end. ``listing`` saves a second request when the caller has one.
    Raises `ModelNotFound` (no such repository, revision or file; gated; no network) and `BackendFailed` (disk full).
    """
    if is_offline(offline):
        folder = _cached_folder(repo_id, revision, cache_dir)
        if not any(_matches(path.relative_to(folder).as_posix(), patterns) for path in folder.rglob("*") if path.is_file()):
            raise ModelNotFound(f"{repo_id} is in the local cache without any {' or '.join(patterns) or 'file'}; run once without --offline.")
        return folder
    listing = listing or list_files(repo_id, revision, cache_dir=cache_dir)
    wanted = [file for file in listing.files if _matches(file.name, patterns)]
    if not wanted:
        raise ModelNotFound(f"{repo_id} has no {' or '.join(patterns) or 'files'}.")
    hub = _hub()
    with _explained(repo_id, revision, cache_dir, patterns), _quiet(hub), _watched(repo_id, listing.commit, wanted, progress, cache_dir):
        attempt = 1
        while True:
            try:
                folder = hub.snapshot_download(
                    repo_id, revision=revision, allow_patterns=list(patterns) or None, cache_dir=_cache_root(cache_dir), endpoint=_endpoint()
                )
                return Path(folder)
            except _network_errors() as error:
                # Again only after what may pass by itself: not an answer of the server, not a fault of the disk.
                answered = getattr(error, "response", None) is not None or isinstance(error, hub.errors.EntryNotFoundError)
                if attempt == ATTEMPTS or answered or _is_disk(error):
                    raise
                time.sleep(attempt)
                attempt += 1


def _sha256(lfs: Any) -> str | None:
    # A dict in old versions, an object with the same names in new ones; absent for files kept in git itself.
    return lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch(name, pattern) for pattern in patterns)


def _cache_root(cache_dir: Path | None) -> Path:
    """The cache's folder by the library's documented rules. Not asked of the library: offline it need not even be imported."""
    if cache_dir is not None:
        return Path(cache_dir)
    chosen = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if chosen:
        return Path(os.path.expandvars(chosen)).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expandvars(home)).expanduser() / "hub"


def _is_disk(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM, errno.EIO)


def _cached_folder(repo_id: str, revision: str | None, cache_dir: Path | None) -> Path:
    """The snapshot in the cache, found by the cache's documented layout: refs/<revision> names a folder under snapshots/."""
    at = f" at revision {revision}" if revision else ""
    missing = f"{repo_id}{at} is not in the local cache, and offline mode asks no hub; run once without --offline."
    root = _cache_root(cache_dir) / ("models--" + repo_id.replace("/", "--"))
    commit = revision or "main"
    if ".." in commit.split("/") or commit.startswith("/") or "\\" in commit:
        raise ModelNotFound(f"{commit!r} is no revision of {repo_id}.")
    ref = root / "refs" / commit
    if ref.is_file():
        commit = ref.read_text("utf-8").strip()
    folder = root / "snapshots" / commit
    if "/" in commit or not folder.is_dir():
        raise ModelNotFound(missing)
    return folder


@contextmanager
def _quiet(hub: ModuleType) -> Iterator[None]:
    """Without the library's own bars: the caller has a progress of its own."""
    shown = not hub.utils.are_progress_bars_disabled()
    if shown:
        hub.utils.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            hub.utils.enable_progress_bars()


@contextmanager
def _watched(
    repo_id: str, commit: str, wanted: list[HubFile], progress: Progress | None, cache_dir: Path | None
) -> Iterator[None]:
    """Report progress by the sizes of the files on disk: the library's own callbacks differ from version to version, its cache layout does not."""
    if progress is None:
        yield
        return
    stage = f"download {repo_id}"
    total = sum(file.size for file in wanted)
    root = _cache_root(cache_dir) / ("models--" + repo_id.replace("/", "--"))
    snapshot, blobs = root / "snapshots" / commit, root / "blobs"
    present = sum(file.size for file in wanted if (snapshot / file.name).is_file())
    at_start = _folder_bytes(blobs)
    stop = threading.Event()

    def report() -> None:
        while not stop.wait(POLL_SECONDS):
            progress(stage, min(total, present + max(0, _folder_bytes(blobs) - at_start)), total)

    watcher = threading.Thread(target=report, name="edgeinfer-download-progress", daemon=True)
    watcher.start()
    try:
        yield
        failed = False
    except BaseException:
        failed = True
        raise
    finally:
        stop.set()
        watcher.join()
        if not failed:
            progress(stage, total, total)


def _folder_bytes(folder: Path) -> int:
    total = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    total += entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:                # finished and renamed between the two calls
                    continue
    except FileNotFoundError:                            # nothing downloaded yet
        return 0
    return total


def _network_errors() -> tuple[type[BaseException], ...]:
    """What the library's HTTP client of the day raises: requests up to 0.x, httpx and its successor after."""
    found: list[type[BaseException]] = [OSError]
    names = {"requests": "RequestException", "httpx": "HTTPError", "httpx2": "HTTPError", "huggingface_hub.errors": "XetDownloadError"}
    for module, name in names.items():
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None:
            found.append(kind)
    return tuple(found)


@contextmanager
def _explained(repo_id: str, revision: str | None, cache_dir: Path | None, patterns: Sequence[str] = ()) -> Iterator[None]:
    """Turn the library's errors into one sentence each."""
    errors = _hub().errors
    try:
        yield
    except EdgeInferError:
        raise
    except errors.HFValidationError as error:
        raise ModelNotFound(f"{repo_id!r} is not a possible hub id; it looks like user/repo.") from error
    except errors.GatedRepoError as error:
        raise ModelNotFound(
            f"{repo_id} is gated: accept its terms at https://huggingface.co/{repo_id}, then log in with `hf auth login` or set HF_TOKEN."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"The hub has no model {repo_id}, or it is private; check the spelling, or log in with `hf auth login` or HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFound(f"{repo_id} has no revision {revision!r}.") from error
    except errors.EntryNotFoundError as error:
        # Also what the library raises, with the true cause attached, when it fell back to its cache and found nothing.
        raise ModelNotFound(f"{_cause(repo_id, error.__cause__ or error)}{_hint(repo_id, revision, cache_dir, patterns)}") from error
    except _network_errors() as error:
        if _is_disk(error):
            where = _cache_root(cache_dir)
            raise BackendFailed(f"{repo_id} cannot be stored in {where}: {error}. Free some space or choose another HF_HUB_CACHE.") from error
        raise ModelNotFound(f"{_cause(repo_id, error)}{_hint(repo_id, revision, cache_dir, patterns)}") from error


def _cause(repo_id: str, error: BaseException) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    host = _endpoint() or "https://huggingface.co"
    if status is not None:
        return f"{host} answered {status} when asked for {repo_id}; try again later."
    if type(error).__name__ in ("LocalEntryNotFoundError", "EntryNotFoundError", "RemoteEntryNotFoundError"):
        return f"A file of {repo_id} could not be fetched from {host}."
    return f"{host} cannot be reached ({type(error).__name__}), so {repo_id} cannot be downloaded; check the network."


def _hint(repo_id: str, revision: str | None, cache_dir: Path | None, patterns: Sequence[str]) -> str:
    try:
        download(repo_id, revision, offline=True, patterns=patterns, cache_dir=cache_dir)
    except ModelNotFound:
        return ""
    return " A copy lies in the local cache: use it with --offline."
