"""Saved conversations on disk: the KV of each, found again by its tokens.

    <folder>/<digest of the key>-<digest of the tokens>.kv

A file appears whole under its name or not at all, and everything that is read is checked, so several processes may share the folder and delete each
other's files at any time. The files are the only truth; what is kept in memory is a cache of their heads. Least recently used (by modification
time) goes first. Nothing here raises because of a disk: what failed becomes a notice, and the conversation is computed again as if never saved.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edgeinfer.errors import BadRequest
from edgeinfer.runtime import kv_file
from edgeinfer.runtime.kv_file import KVKey

_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}\.kv")
_PARTIAL = ".partial"
_ABANDONED = 15 * 60                     # seconds without a write after which nobody is still writing a partial file


@dataclass(frozen=True)
class KVStoreOptions:
    """kv_cache_dir: folder for saved conversations, None for none. kv_cache_bytes: how large the files in it may be together."""

    kv_cache_dir: str | Path | None = None
    kv_cache_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        if self.kv_cache_dir is not None and not (isinstance(self.kv_cache_dir, (str, Path)) and str(self.kv_cache_dir)):
            raise BadRequest(f"kv_cache_dir must be a folder, not {self.kv_cache_dir!r}.")
        _check_bytes(self.kv_cache_bytes)


@dataclass(frozen=True, eq=False)
class SavedKV:
    """A saved conversation. ``tokens`` is a read-only int32 array; the first ``shared`` of them are those that were asked for."""

    path: Path
    key: KVKey
    tokens: np.ndarray
    data_bytes: int
    shared: int = 0


@dataclass(frozen=True)
class _Known:
    """The head of a file as it was when the file looked like ``stamp``."""

    stamp: tuple[int, int, int]
    head: kv_file.Head


class KVStore:
    """The saved conversations of one folder. Use it from one thread; other threads and processes have
    stores of their own for the same folder.

    max_bytes: of all files together; one being written comes on top, so that a failed write costs nothing that was there before.
    Raises `BadRequest` where the folder cannot be used.
    """

    def __init__(self, folder: Path | str, *, max_bytes: int):
        _check_bytes(max_bytes)
        self.folder = Path(folder).expanduser()
        self.max_bytes = max_bytes
        self.notices: tuple[str, ...] = ()               # what went wrong, newest last, one sentence each; may be read from any thread
        self._known: dict[str, _Known] = {}
        self._clock = 0
        _prepare(self.folder)
        self._sweep()

    # ---------------------------------------------------------------------------------------------------------- what it is for

    def save(self, key: KVKey, tokens: Sequence[int], data: bytes) -> bool:
        """Keep the KV of ``tokens``; True when it, or a conversation that starts with it, is in the store now.

        What it continues is replaced by it. False when it is larger than the whole store or the disk failed (see ``notices``).
        """
        wanted = _ids(tokens)
        size = kv_file.file_size(key, len(wanted), len(data))
        if not len(wanted) or size > self.max_bytes:
            return False
        if self.holds(key, wanted):
            return True
        path = self.folder / f"{key.digest}-{hashlib.blake2b(wanted.tobytes(), digest_size=16).hexdigest()}.kv"
        shorter = {name for name, known in self._of(key) if _starts_with(wanted, known.head.tokens)}
        try:
            self._write(path, key, wanted, data, spare={path.name, *shorter}, size=size)
        except OSError as error:
            self._notice(f"A conversation of {len(wanted):,} tokens was not saved in {self.folder}: {error.strerror or error}.")
            return False
        for name in shorter - {path.name}:
            _remove(self.folder / name)
        self._evict(self.max_bytes - size, spare={path.name})     # another process may have saved something too
        return True

    def holds(self, key: KVKey, tokens: Sequence[int] | np.ndarray) -> bool:
        """Whether a saved conversation starts with ``tokens``; it then counts as used."""
        wanted = _ids(tokens)
        return any(_starts_with(saved.tokens, wanted) and self._touch(saved.path) for saved in self.entries(key))

    def best(self, key: KVKey, tokens: Sequence[int]) -> SavedKV | None:
        """The saved conversation that shares the most leading tokens, with ``shared`` saying how many; None when none shares any.

        It may go on beyond them, or differ from there: cut the slot back after importing. Of equals the smallest.
        """
        wanted = _ids(tokens)
        found = ((_common_prefix(known.head.tokens, wanted), -known.head.data_bytes, name, known.head) for name, known in self._of(key))
        shared, _, name, head = max(found, key=lambda item: item[:2], default=(0, 0, "", None))
        return SavedKV(self.folder / name, key, head.tokens, head.data_bytes, shared) if shared and head is not None else None

    def read(self, saved: SavedKV) -> bytes | None:
        """The KV, checked, and counted as used. None when the file is gone, no longer the one that was found, or damaged (then it is removed)."""
        try:
            with kv_file.opened(saved.path) as file:
                stamp = _stamp(os.fstat(file.fileno()))
                try:
                    head = kv_file.read_head(file)
                    if head.key != saved.key.as_json or not np.array_equal(head.tokens, saved.tokens):
                        return None
                    data = kv_file.read_data(file, head)
                except kv_file.Damaged as damage:
                    self._discard(saved.path, stamp, damage)
                    return None
                except kv_file.OtherFormat:
                    return None
        except FileNotFoundError:
            return None
        except OSError as error:
            self._notice(f"{saved.path} cannot be read: {error.strerror or error}.")
            return None
        self._touch(saved.path)
        return data

    def entries(self, key: KVKey) -> list[SavedKV]:
        """What is saved under a key, most recently used first."""
        found = sorted(self._of(key), key=lambda item: item[1].stamp[1], reverse=True)
        return [SavedKV(self.folder / name, key, known.head.tokens, known.head.data_bytes) for name, known in found]

    @property
    def total_bytes(self) -> int:
        """Bytes of all saved conversations, whoever saved them."""
        return sum(status.st_size for _, status in self._files())

    def clear(self) -> None:
        """Delete every saved conversation, whoever saved it."""
        for name, _ in self._files():
            _remove(self.folder / name)
        self._known.clear()

    # ---------------------------------------------------------------------------------------------------------------- reading

    def _files(self, prefix: str = "") -> list[tuple[str, os.stat_result]]:
        """Names and states of the files there are. A request waits for this one: no more than one look at each."""
        found = []
        try:
            with os.scandir(self.folder) as there:
                for entry in there:
                    if entry.name.startswith(prefix) and _NAME.fullmatch(entry.name):
                        status = _status(entry)
                        if status is not None:
                            found.append((entry.name, status))
        except FileNotFoundError:
            pass                                         # somebody removed the folder: an empty store
        except OSError as error:
            self._notice(f"{self.folder} cannot be listed: {error.strerror or error}.")
        return found

    def _of(self, key: KVKey) -> list[tuple[str, _Known]]:
        """The readable files of a key."""
        files = self._files(f"{key.digest}-")
        there = {name for name, _ in files}
        for name in [name for name in self._known if name.startswith(key.digest) and name not in there]:
            del self._known[name]
        known = ((name, self._head(name, _stamp(status))) for name, status in files)
        return [(name, item) for name, item in known if item is not None and item.head.key == key.as_json]

    def _head(self, name: str, stamp: tuple[int, int, int]) -> _Known | None:
        known = self._known.get(name)
        if known is not None and known.stamp == stamp:
            return known
        path = self.folder / name
        try:
            with kv_file.opened(path) as file:
                stamp = _stamp(os.fstat(file.fileno()))
                self._known[name] = known = _Known(stamp, kv_file.read_head(file))
                return known
        except kv_file.Damaged as damage:
            self._discard(path, stamp, damage)
        except (kv_file.OtherFormat, FileNotFoundError):
            pass
        except OSError as error:
            self._notice(f"{path} cannot be read: {error.strerror or error}.")
        return None

    # ---------------------------------------------------------------------------------------------------------------- writing

    def _write(self, path: Path, key: KVKey, tokens: np.ndarray, data: bytes, *, spare: set[str], size: int) -> None:
        self._sweep()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=self.folder, prefix=f".{path.name}.", suffix=_PARTIAL)      # readable by the owner alone
        try:
            with open(number, "wb") as file:
                kv_file.write(file, key, tokens, data)
                os.utime(file.fileno(), ns=self._now())
            self._evict(self.max_bytes - size, spare)
            os.replace(name, path)
        finally:
            _remove(Path(name))
        _sync_folder(self.folder)

    def _evict(self, room: int, spare: set[str]) -> None:
        """Remove the least recently used files until those beside ``spare`` have at most ``room`` bytes."""
        files = sorted(((name, status) for name, status in self._files() if name not in spare), key=lambda item: item[1].st_mtime_ns)
        total = sum(status.st_size for _, status in files)
        for name, status in files:
            if total <= room:
                return
            _remove(self.folder / name)
            total -= status.st_size

    def _discard(self, path: Path, stamp: tuple[int, int, int], damage: kv_file.Damaged) -> None:
        status = _status(path)
        if status is not None and _stamp(status) == stamp:   # else somebody put another in its place
            _remove(path)
        self._notice(f"{path} was damaged ({damage}) and has been removed.")

    def _sweep(self) -> None:
        """Remove what killed processes left unfinished."""
        for path in self.folder.glob(f".*{_PARTIAL}"):
            status = _status(path)
            if _NAME.match(path.name[1:]) and status is not None and status.st_mtime < time.time() - _ABANDONED:
                _remove(path)

    def _touch(self, path: Path) -> bool:
        try:
            os.utime(path, ns=self._now(), follow_symlinks=False)
        except OSError:
            return False                                 # gone, or not ours to touch
        known, status = self._known.get(path.name), _status(path)
        if known is not None and status is not None and (status.st_ino, status.st_size) == (known.stamp[0], known.stamp[2]):
            self._known[path.name] = replace(known, stamp=_stamp(status))
        return True

    def _now(self) -> tuple[int, int]:
        # Never twice the same: the order of use must not depend on how finely the clock ticks.
        self._clock = max(time.time_ns(), self._clock + 1)
        return self._clock, self._clock

    def _notice(self, text: str) -> None:
        if text not in self.notices:
            self.notices = (*self.notices, text)[-20:]


def _check_bytes(value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadRequest(f"kv_cache_bytes must be a whole number from 1, not {value!r}.")


def _prepare(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = os.stat(folder).st_mode
    except OSError as error:
        raise BadRequest(f"Conversations cannot be saved in {folder}: {error.strerror or error}.") from error
    if os.name == "posix" and mode & stat.S_IWOTH:
        raise BadRequest(f"Conversations are not saved in {folder}, where everybody may write; choose a folder of your own, or chmod o-w it.")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise BadRequest(f"Conversations cannot be saved in {folder}: it cannot be read and written.")


def _ids(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.asarray(tokens, "<i4")


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def _starts_with(tokens: np.ndarray, start: np.ndarray) -> bool:
    return len(start) <= len(tokens) and bool(np.array_equal(tokens[: len(start)], start))


def _status(path: Path | os.DirEntry[str]) -> os.stat_result | None:
    """Of a regular file; None when it is gone or something else."""
    try:
        status = path.stat(follow_symlinks=False)
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_mtime_ns, status.st_size


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass                                             # a folder that lost its permissions: the next save will say so


def _sync_folder(folder: Path) -> None:
    try:
        number = os.open(folder, os.O_RDONLY)
    except OSError:                                      # systems whose folders cannot be opened need no sync
        return
    try:
        os.fsync(number)
    finally:
        os.close(number)
