"""A real server in a thread, on a free port, over engines that a test made: ``with serving(engine) as server: httpx.get(server.url + "/health")``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from edgeinfer.errors import ModelNotFound
from edgeinfer.runtime.server.app import create_app
from edgeinfer.runtime.server.options import ServerOptions
from edgeinfer.runtime.server.pool import ModelStatus, Served
from edgeinfer.runtime.service import Engine


@dataclass
class CountingMetrics:
    """Notes what the endpoints report."""

    ends: list[tuple[str, Any, int]] = field(default_factory=list)
    refusals: list[tuple[str, str]] = field(default_factory=list)
    embeddings: list[tuple[str, int, int]] = field(default_factory=list)

    def ended(self, model: str, stream: Any, *, n: int = 1) -> None:
        assert stream.done, "a stream is reported when it is over"
        self.ends.append((model, stream, n))

    def refused(self, model: str, code: str) -> None:
        self.refusals.append((model, code))

    def embedded(self, model: str, *, inputs: int, prompt_tokens: int) -> None:
        self.embeddings.append((model, inputs, prompt_tokens))

    def render(self) -> tuple[bytes, str]:
        return b"", "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Server:
    """What a test needs to know of a running server."""

    url: str
    app: Any
    metrics: Any
    pool: Any
    loop: asyncio.AbstractEventLoop

    @property
    def v1(self) -> str:
        return self.url + "/v1"


class FixedPool:
    """Engines that are there already, under names; what `ModelPool` does, as far as endpoints see it. Closes them in the end."""

    def __init__(self, engines: Mapping[str, Engine]):
        self._engines = dict(engines)
        self.used = 0                                    # requests inside

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[Served]:
        name = next(iter(self._engines)) if name is None else name
        if name not in self._engines:
            raise ModelNotFound("There is no model of that name here.")
        self.used += 1
        try:
            yield Served(name, self._engines[name])
        finally:
            self.used -= 1

    def status(self) -> tuple[ModelStatus, ...]:
        return tuple(ModelStatus(name, "loaded", 1_700_000_000, False, "", engine.info) for name, engine in self._engines.items())

    def loaded(self) -> tuple[Served, ...]:
        return tuple(Served(name, engine) for name, engine in self._engines.items())

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        for engine in self._engines.values():
            await asyncio.to_thread(engine.close)


@contextmanager
def serving(engines: Any, *, metrics: Any = None, **options: Any) -> Iterator[Server]:
    """``engines``: one engine (its model is called "scripted"), several by name, or a `ModelPool`, which is started and closed here.

    ``metrics``: what the app gets as such, or a function that makes it from the pool; default `CountingMetrics`. ``options``: of `ServerOptions`.
    """
    pool = engines if hasattr(engines, "use") else FixedPool(engines if isinstance(engines, Mapping) else {"scripted": engines})
    counted = CountingMetrics() if metrics is None else metrics(pool) if callable(metrics) else metrics
    app = create_app(pool, counted, ServerOptions(**{"port": 0, **options}))
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off", ws="none", access_log=False, timeout_graceful_shutdown=10)
    server = uvicorn.Server(config)
    ready = threading.Event()
    address: list[int] = []
    loops: list[asyncio.AbstractEventLoop] = []
    problems: list[BaseException] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        try:
            await pool.start()
            serve = asyncio.create_task(server.serve())
            while not server.started and not serve.done():
                await asyncio.sleep(0.005)
            address.append(server.servers[0].sockets[0].getsockname()[1])
            ready.set()
            await serve
        except BaseException as error:
            problems.append(error)
            raise
        finally:
            ready.set()
            await pool.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),), name="server", daemon=True)
    thread.start()
    assert ready.wait(60)
    if problems:
        raise problems[0]
    try:
        yield Server(f"http://127.0.0.1:{address[0]}", app, counted, pool, loops[0])
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive(), "the server did not stop"
