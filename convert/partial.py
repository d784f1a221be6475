"""The file while it is being made: a temporary name in the final folder, and one rename at the end."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SUFFIX = ".partial"


@contextmanager
def partial_file(final: Path) -> Iterator[Path]:
    """A path for the unfinished file, in ``final``'s folder; whatever is there when the block ends is removed. Leftovers of killed runs go first."""
    remove_leftovers(final)
    path = final.with_name(f".{final.name}.{os.getpid()}{SUFFIX}")
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def publish(path: Path, final: Path) -> None:
    """Give a finished, synced file its name, atomically. A reader sees the old file or the whole new one."""
    os.replace(path, final)
    try:
        folder = os.open(final.parent, os.O_RDONLY)
    except OSError:                                      # systems whose folders cannot be opened need no sync
        return
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove_leftovers(final: Path) -> None:
    """Delete partial files of ``final`` whose process is gone."""
    for leftover in final.parent.glob(f".{glob.escape(final.name)}.*{SUFFIX}"):
        match = re.fullmatch(r"\d+", leftover.name[len(final.name) + 2 : -len(SUFFIX)])
        if match and not _alive(int(match[0])):
            leftover.unlink(missing_ok=True)


def _alive(process: int) -> bool:
    if process == os.getpid():                           # ours would exist only after a reused number
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
