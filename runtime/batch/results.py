"""The output of a batch: one line for each request that is done, in the order in which they ended. It is its own record of progress."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from edgeinfer.errors import BadRequest
from edgeinfer.runtime.batch.requests import BatchRequest

if sys.platform != "win32":                              # there, nothing keeps two runs from one file
    import fcntl

_BEGIN = b'{"id": "batch_req_'           # of every line written here
_SHOWN = 5
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)


class ResultFile:
    """Lines are appended whole, one system call each: a run that is killed leaves at most one line half written, which the next one drops.

    ``done``: custom_id -> whether it was answered (not failed), of what the file holds.
    """

    def __init__(self, path: Path, requests: Sequence[BatchRequest], *, retry_failed: bool = False):
        """Opens or makes ``path`` for the answers to ``requests``, keeping those it has; with ``retry_failed``, only those that did not fail.

        Raises `BadRequest`, and changes nothing, when the file holds anything else or another run writes it.
        """
        self.path = path
        if path.is_dir():
            raise BadRequest(f"{path} is a folder; name a file for the replies.")
        if not path.absolute().parent.is_dir():
            raise BadRequest(f"There is no folder {path.absolute().parent} to write {path.name} into; make it first.")
        self._handle = os.open(path, _FLAGS, 0o666)
        try:
            if not _locked(self._handle):
                raise BadRequest(f"Another edgeinfer batch is writing {path}; wait for its end or name another file.")
            self.done = self._checked({request.custom_id: request for request in requests})
            if retry_failed and not all(self.done.values()):
                self._keep_answered()
        except BaseException:
            os.close(self._handle)
            raise

    def add(self, request: BatchRequest, response: dict[str, Any] | None, error: dict[str, Any] | None) -> None:
        """Append a line, whole or not at all. ``response``: what came back, of whatever status; ``error``: why nothing did."""
        line = {"id": request.id, "custom_id": request.custom_id, "response": response, "error": error}
        try:
            data = (json.dumps(line, ensure_ascii=False) + "\n").encode()
        except UnicodeEncodeError:                       # half a surrogate pair, which only its escape can write
            data = (json.dumps(line) + "\n").encode()
        size = os.fstat(self._handle).st_size
        try:
            _write(self._handle, data)
        except OSError as error:                         # the disk is full
            os.ftruncate(self._handle, size)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.done[request.custom_id] = _answered(line)

    def close(self) -> None:
        os.fsync(self._handle)
        os.close(self._handle)

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    # ----------------------------------------------------------------------------------------------------------- internals

    def _lines(self) -> Iterator[bytes]:
        with open(os.dup(self._handle), "rb") as file:
            file.seek(0)
            yield from file

    def _checked(self, requests: dict[str, BatchRequest]) -> dict[str, bool]:
        done: dict[str, bool] = {}
        problems = []
        size, half = 0, 0                                # bytes of whole lines, and of a last one that is not
        for number, data in enumerate(self._lines(), 1):
            if not data.endswith(b"\n"):
                half = len(data)
                if not (data.startswith(_BEGIN) or _BEGIN.startswith(data)):
                    problems.append(f"line {number} is no reply")
                break
            size += len(data)
            try:
                line = json.loads(data)
                custom_id, line_id, answered = line["custom_id"], line["id"], _answered(line)
                request = requests.get(custom_id)
            except (ValueError, KeyError, TypeError):
                problems.append(f"line {number} is no reply")
                continue
            if request is None:
                problems.append(f"line {number} answers {custom_id!r}, which the input does not ask")
            elif request.id != line_id:
                problems.append(f"line {number} answers another request under {custom_id!r}")
            elif custom_id in done:
                problems.append(f"line {number} answers {custom_id!r} once more")
            else:
                done[custom_id] = answered
        if problems:
            more = [f"and {len(problems) - _SHOWN:,} more"] if len(problems) > _SHOWN else []
            first = f"{self.path} does not belong to this input; name another file for the replies."
            raise BadRequest("\n  - ".join([first, *problems[:_SHOWN], *more]))
        if half:
            os.ftruncate(self._handle, size)
        return done

    def _keep_answered(self) -> None:
        """The file without the lines of failed requests, written beside it and renamed; interrupted, the file is what it was."""
        target = self.path.resolve()                     # not a link to it
        beside = target.with_name(f".{target.name}.partial")
        handle = os.open(beside, _FLAGS | os.O_TRUNC, os.fstat(self._handle).st_mode & 0o777)
        try:
            for data in self._lines():
                if _answered(json.loads(data)):
                    _write(handle, data)
            os.fsync(handle)
            _locked(handle)                              # nobody else knows it yet
            os.replace(beside, target)
        except BaseException:
            os.close(handle)
            beside.unlink(missing_ok=True)
            raise
        os.close(self._handle)
        self._handle = handle
        self.done = {custom_id: True for custom_id, answered in self.done.items() if answered}


def _locked(handle: int) -> bool:
    """Take the file for this run, until it is closed; False where another one has it."""
    if sys.platform != "win32":
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _write(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data):]


def _answered(line: dict[str, Any]) -> bool:
    response = line["response"]
    return response is not None and response["status_code"] == 200
