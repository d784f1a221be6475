"""A server of raw bytes in a thread, for what well-behaved servers do not do: ``with raw_server(answer) as server: ... server.url``."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

HANG_UP = None                           # a piece that ends the connection


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: Any
    connection: int                      # which connection of the server's life it came on


@dataclass
class RawServer:
    url: str
    requests: list[Request] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)       # a client has hung up


@contextmanager
def raw_server(answer: Callable[[Request], Iterable[bytes | None]], *, tls: ssl.SSLContext | None = None) -> Iterator[RawServer]:
    """``answer`` gives the pieces that are written for a request, one after the other; it may sleep: each connection has a thread for it."""
    server = RawServer("")
    ready = threading.Event()
    stop: list[Callable[[], None]] = []
    connections = iter(range(1_000_000))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = next(connections)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, path, _ = head[0].split(" ")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                request = Request(method, path, headers, json.loads(body) if body else None, number)
                server.requests.append(request)
                pieces = iter(answer(request))
                while (piece := await asyncio.to_thread(next, pieces, "end")) != "end":
                    if piece is HANG_UP:
                        return
                    writer.write(piece)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            server.left.set()
        except asyncio.CancelledError:                   # the test is over
            pass
        finally:
            writer.close()

    async def main() -> None:
        listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(ended.set))
        ready.set()
        await ended.wait()
        listener.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield server
    finally:
        stop[0]()
        thread.join(30)


def whole(document: Any, status: int = 200, *extra: str) -> bytes:
    """A JSON reply in one piece."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    head = [f"HTTP/1.1 {status} X", "Content-Type: application/json", f"Content-Length: {len(body)}", *extra]
    return "\r\n".join([*head, "", ""]).encode() + body


def events(*documents: Any) -> Iterator[bytes]:
    """A stream of server-sent events in chunks, one piece each."""
    yield b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    for document in documents:
        data = f"data: {document if isinstance(document, str) else json.dumps(document)}\n\n".encode()
        yield f"{len(data):x}\r\n".encode() + data + b"\r\n"
    yield b"0\r\n\r\n"


MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "somebody"}]}
