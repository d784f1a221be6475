"""Who answers a request: a server over HTTP, or the server's application in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

from edgeinfer.runtime.http_client import HttpClient
from edgeinfer.runtime.remote_models import refused

_GENERATES = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True)
class Reply:
    """What came back, whatever its status."""

    status: int
    body: Any
    request_id: str = ""
    retry_after_s: float | None = None   # what a busy answerer asks for


class Sender(Protocol):
    async def send(self, url: str, body: Mapping[str, Any]) -> Reply:
        """Raises `ServerFailed` where there is no reply, and `BadRequest` where there would be none to any request."""


class OverHttp:
    """A server. The key it refuses is refused for all requests."""

    def __init__(self, client: HttpClient, *, changes: Mapping[str, Any], ours: bool):
        """``changes`` are made to every body; with ``ours``, an edgeinfer server, requests step back behind those of people who wait."""
        self._client = client
        self._changes = changes
        self._ours = ours

    async def send(self, url: str, body: Mapping[str, Any]) -> Reply:
        body = {**body, **self._changes}
        async with self._client.request("POST", url, _patient(url, body) if self._ours else body) as response:
            document = await response.json()
        if response.status in (401, 403):
            refused(self._client.address.url, response.status, document, keyed=self._client.keyed)
        return _reply(response.status, response.headers, document)


Message = MutableMapping[str, Any]
Application = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


class InProcess:
    """An ASGI application, asked without a socket."""

    def __init__(self, app: Application, *, changes: Mapping[str, Any]):
        self._app = app
        self._changes = changes

    async def send(self, url: str, body: Mapping[str, Any]) -> Reply:
        payload = json.dumps(_patient(url, {**body, **self._changes})).encode()
        status, headers, parts = 0, {}, []
        unread = [{"type": "http.request", "body": payload, "more_body": False}]

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await asyncio.Event().wait()                 # this client does not leave; when it is cancelled, the application is too
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]}
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        await self._app(_scope(url, len(payload)), receive, send)
        return _reply(status, headers, json.loads(b"".join(parts)))


def _scope(url: str, length: int) -> Message:
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "POST", "scheme": "http", "path": url,
        "raw_path": url.encode(), "root_path": "", "query_string": b"", "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 80), "state": {},
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), (b"content-length", str(length).encode())],
    }


def _patient(url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"priority": "batch", **body} if url in _GENERATES else body


def _reply(status: int, headers: Mapping[str, str], document: Any) -> Reply:
    retry = headers.get("retry-after", "")
    return Reply(status, document, headers.get("x-request-id", ""), float(retry) if retry.isdigit() else None)
