"""A small HTTP/1.1 client for model servers: JSON out, JSON or server-sent events in, connections kept open.

The base dependencies bring no HTTP client on every version of them, and what is needed here is little: asyncio streams, `Content-Length` and chunked
bodies. Redirects are not followed, so that a key goes nowhere but where it was sent.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from edgeinfer.errors import BadRequest, ServerFailed, ServerUnreachable

MAX_HEAD = 64 * 1024
MAX_BODY = 256 * 1024 * 1024             # of a reply that is read whole
CONNECT_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Address:
    """Where a server is. ``url`` is its base, without a slash and without /v1 at the end."""

    url: str
    host: str
    port: int
    tls: bool
    path: str

    @classmethod
    def of(cls, url: str) -> Address:
        """Raises `BadRequest` when ``url`` is none for HTTP."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise BadRequest(f"{url!r} is not a URL ({error}); give one such as http://127.0.0.1:8080.") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or any(char.isspace() for char in url):
            raise BadRequest(f"{url!r} is not the URL of a server; give one such as http://127.0.0.1:8080.")
        if parts.username is not None or parts.query or parts.fragment:
            plain = f"{parts.scheme}://{parts.hostname}"
            raise BadRequest(f"A server's URL has no user, query or fragment; give one such as {plain}, and a key with --api-key.")
        path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        tls = parts.scheme == "https"
        return cls(f"{parts.scheme}://{parts.netloc}{path}", parts.hostname, port or (443 if tls else 80), tls, path)


class Response:
    """One reply. Its body is read once, by one of `chunks`, `read`, `json` and `events`, inside the ``with`` block of the request."""

    def __init__(self, status: int, headers: Mapping[str, str], body: AsyncIterator[bytes]):
        self.status = status
        self.headers = headers                           # names in lower case
        self._body = body

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives."""
        return self._body

    async def read(self) -> bytes:
        parts, size = [], 0
        async for part in self._body:
            size += len(part)
            if size > MAX_BODY:
                raise ServerFailed(f"The server's reply is longer than {MAX_BODY:,} bytes.")
            parts.append(part)
        return b"".join(parts)

    async def json(self) -> Any:
        """The body as JSON; text that is none comes back as a string, since errors of proxies are HTML."""
        data = await self.read()
        try:
            return json.loads(data)
        except ValueError:                               # UnicodeDecodeError is one
            return data.decode("utf-8", "replace")

    async def events(self) -> AsyncIterator[str]:
        """The data of server-sent events; comments (pings) and other fields are passed over."""
        rest, data = b"", []
        async for part in self._body:
            *lines, rest = (rest + part).split(b"\n")
            if len(rest) > MAX_BODY:
                raise ServerFailed(f"The server sent a line longer than {MAX_BODY:,} bytes.")
            for line in lines:
                line = line.removesuffix(b"\r")
                if line.startswith(b"data:"):
                    data.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))
                elif not line and data:
                    yield "\n".join(data)
                    data = []


class HttpClient:
    """Connections to one server, as many as requests are under way; idle ones are used again. Use it in one event loop, ``async with``."""

    def __init__(self, address: Address, *, api_key: str | None = None, timeout_s: float = 600.0):
        """``timeout_s``: how long a server may send nothing while its reply is awaited."""
        if api_key is not None and not (api_key and api_key.isascii() and api_key.isprintable()):
            raise BadRequest("An API key is printable ASCII text.")
        self.address = address
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._tls = ssl.create_default_context() if address.tls else None
        self._idle: list[_Connection] = []

    @property
    def keyed(self) -> bool:
        return self._api_key is not None

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._idle:
            self._idle.pop().close()

    @asynccontextmanager
    async def request(self, method: str, path: str, body: Any = None) -> AsyncIterator[Response]:
        """Send ``body`` as JSON. The reply is read inside the ``with`` block; leaving it early hangs up, which ends the work at the server.

        Raises `ServerUnreachable`, and `ServerFailed` when the connection breaks, before the block or inside it.
        """
        payload = b"" if body is None else json.dumps(body).encode()
        connection, status, headers = await self._answered(self._head(method, path, payload) + payload)
        body_bytes = connection.body(method, status, headers)
        whole = False
        try:
            yield Response(status, headers, body_bytes)
            whole = connection.at_end
        finally:
            await body_bytes.aclose()
            if whole and headers.get("connection", "").lower() != "close":
                self._idle.append(connection)
            else:
                connection.close()

    async def _answered(self, message: bytes) -> tuple[_Connection, int, dict[str, str]]:
        """A connection on which the head of the reply has come."""
        while self._idle:
            connection = self._idle.pop()
            try:
                await connection.send(message)
                return connection, *await connection.head()
            except _Stale:                               # the server closed it while it was idle
                connection.close()
            except BaseException:
                connection.close()
                raise
        connection = await self._connect()
        try:
            await connection.send(message)
            return connection, *await connection.head()
        except _Stale as stale:
            connection.close()
            raise ServerFailed(f"{self.address.url} closed the connection without a reply.") from stale
        except BaseException:
            connection.close()
            raise

    async def _connect(self) -> _Connection:
        address = self.address
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(address.host, address.port, ssl=self._tls, limit=MAX_HEAD)
        except TimeoutError as error:
            raise ServerUnreachable(f"No server answers at {address.url} within {CONNECT_TIMEOUT_S:.0f} s.") from error
        except ssl.SSLError as error:
            raise ServerUnreachable(f"{address.url} cannot be reached over TLS: {error.reason or error}.") from error
        except (OSError, UnicodeError) as error:         # a host name that is none fails to encode
            raise ServerUnreachable(f"No server answers at {address.url}: {_reason(error)}; start one there or correct the URL.") from error
        return _Connection(address.url, reader, writer, self._timeout_s)

    def _head(self, method: str, path: str, payload: bytes) -> bytes:
        address = self.address
        host = f"[{address.host}]" if ":" in address.host else address.host
        lines = [
            f"{method} {address.path}{path} HTTP/1.1",
            f"Host: {host}" + ("" if address.port == (443 if address.tls else 80) else f":{address.port}"),
            "Accept: application/json, text/event-stream",
            "User-Agent: edgeinfer",
        ]
        if payload:
            lines.append("Content-Type: application/json")
        if payload or method == "POST":
            lines.append(f"Content-Length: {len(payload)}")
        if self._api_key is not None:
            lines.append(f"Authorization: Bearer {self._api_key}")
        return "\r\n".join([*lines, "", ""]).encode()


def _reason(error: OSError | UnicodeError) -> str:
    if isinstance(error, UnicodeError):
        return "the name of its host is none"
    if error.errno is not None and error.errno > 0:      # asyncio's own text names addresses instead of the reason
        return os.strerror(error.errno)
    return (error.strerror or str(error)).rstrip(".")


class _Stale(Exception):
    """The connection ended before any byte of a reply."""


class _Connection:
    """One connection, one request at a time."""

    def __init__(self, url: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout_s: float):
        self._url = url
        self._reader = reader
        self._writer = writer
        self._timeout_s = timeout_s
        self.at_end = False                              # the reply has been read whole, and another request may follow

    def close(self) -> None:
        self._writer.close()

    async def send(self, message: bytes) -> None:
        self.at_end = False
        if self._reader.at_eof():
            raise _Stale
        try:
            self._writer.write(message)
            await self._writer.drain()
        except ConnectionError:
            # A server may refuse without reading all: its reply, if there is one, says why.
            pass

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers, past any interim reply."""
        while True:
            try:
                async with self._patience():
                    block = await self._reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError as error:
                if not error.partial:
                    raise _Stale from error
                raise self._broken("broke off within the head of its reply") from error
            except asyncio.LimitOverrunError as error:
                raise self._broken("sent what is no HTTP") from error
            except ConnectionError as error:
                raise _Stale from error
            first, *lines = block.decode("latin-1").split("\r\n")
            version, _, rest = first.partition(" ")
            if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
                raise self._broken("sent what is no HTTP")
            status = int(rest[:3])
            if status >= 200:
                pairs = (line.partition(":") for line in lines if line)
                return status, {name.strip().lower(): value.strip() for name, _, value in pairs}

    async def body(self, method: str, status: int, headers: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """The parts of the reply's body as they come."""
        try:
            if method == "HEAD" or status in (204, 304):
                pass
            elif "chunked" in headers.get("transfer-encoding", "").lower():
                async for part in self._chunked():
                    yield part
            elif "content-length" in headers:
                left = int(headers["content-length"])
                while left > 0:
                    part = await self._read(min(left, 65536))
                    if not part:
                        raise self._broken("broke off within its reply")
                    left -= len(part)
                    yield part
            else:
                while part := await self._read(65536):
                    yield part
                return                                   # the end of the connection was the end of the reply
        except ValueError as error:
            raise self._broken("sent what is no HTTP") from error
        self.at_end = True

    async def _chunked(self) -> AsyncIterator[bytes]:
        try:
            while True:
                async with self._patience():
                    size = int((await self._reader.readuntil(b"\r\n")).partition(b";")[0], 16)
                if size == 0:
                    break
                left = size
                while left > 0:
                    part = await self._read(min(left, 65536))
                    if not part:
                        raise self._broken("broke off within its reply")
                    left -= len(part)
                    yield part
                async with self._patience():
                    await self._reader.readexactly(2)
            async with self._patience():
                while (await self._reader.readuntil(b"\r\n")) != b"\r\n":
                    pass                                 # trailers
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError) as error:
            raise self._broken("broke off within its reply") from error

    async def _read(self, most: int) -> bytes:
        try:
            async with self._patience():
                return await self._reader.read(most)
        except ConnectionError as error:
            raise self._broken("broke off within its reply") from error

    @asynccontextmanager
    async def _patience(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError as error:
            raise self._broken(f"sent nothing for {self._timeout_s:g} s") from error

    def _broken(self, what: str) -> ServerFailed:
        return ServerFailed(f"{self._url} {what}.")
