"""What is noted about every request: its id, how it ended, and the access log's line."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgeinfer.runtime.server.error_replies import reply_to
from edgeinfer.runtime.stream import Stream

log = logging.getLogger("edgeinfer.server")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
CLIENT_LEFT = 499                        # as nginx logs it; nobody receives it


@dataclass
class Record:
    """Filled in while the request is served."""

    request_id: str
    started: float                       # time.perf_counter()
    status: int = 0                      # 0: nothing was sent yet
    complete: bool = False               # the last byte was handed over
    model: str = ""
    streams: list[Stream] = field(default_factory=list)
    prompt: Any = None                   # only where prompts are logged


class Records:
    """Outermost middleware: gives every request an id, answers what nobody caught, and writes the access log."""

    def __init__(self, app: ASGIApp, access_log: AccessLog | None):
        self.app = app
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = Record(_request_id(scope), time.perf_counter())
        scope.setdefault("state", {})["record"] = record
        header = (b"x-request-id", record.request_id.encode())

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), header]}
            elif not message.get("more_body", False):
                record.complete = True                   # before it is sent: what follows may already be a disconnect
            await send(message)

        try:
            await self.app(scope, receive, noting)
        except Exception as error:                       # whatever it is, the client gets a reply and the log the traceback
            if record.status:
                log.error("A reply broke off.", exc_info=error)
            else:
                await reply_to(error)(scope, receive, noting)
        finally:
            if self._access_log is not None:
                self._access_log.write(scope, record)


def _request_id(scope: Scope) -> str:
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


class AccessLog:
    """One JSON line a request; ``target`` is a file that is appended to, or "-" for standard output."""

    def __init__(self, target: str, *, clock: Callable[[], float] = time.time):
        self._file: IO[str] = sys.stdout if target == "-" else open(target, "a", encoding="utf-8")
        self._owned = target != "-"
        self._clock = clock

    def write(self, scope: Scope, record: Record) -> None:
        usages = [stream.usage for stream in record.streams]
        first = [ms for stream in record.streams if (ms := stream.timings.first_token_ms) is not None]
        line: dict[str, Any] = {
            "time": round(self._clock(), 3), "request_id": record.request_id, "client": (scope.get("client") or ("",))[0],
            "method": scope["method"], "path": scope["path"][:200], "status": record.status if record.complete else CLIENT_LEFT, "model": record.model,
            "prompt_tokens": max((usage.prompt_tokens for usage in usages), default=0),
            "completion_tokens": sum(usage.completion_tokens for usage in usages),
            "ttft_ms": round(min(first), 1) if first else None, "duration_ms": round(1e3 * (time.perf_counter() - record.started), 1),
        }
        if record.prompt is not None:
            line["prompt"] = record.prompt
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:                         # a full disk is no reason to serve nobody
            log.error("The access log cannot be written: %s.", error)

    def close(self) -> None:
        if self._owned:
            self._file.close()
