"""``edgeinfer serve``: the socket, the models, and how it all ends."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvicorn

from edgeinfer.errors import BadRequest
from edgeinfer.models.memory import parse_bytes
from edgeinfer.runtime.alarms import DEFAULT_RULES, AlarmRule
from edgeinfer.runtime.server.app import create_app
from edgeinfer.runtime.server.metrics import Metrics
from edgeinfer.runtime.server.options import ServerOptions
from edgeinfer.runtime.server.pool import ModelPool, ModelSource, PoolOptions
from edgeinfer.runtime.server.watch import watch

THREADS = 64                             # for templates, tokenizers and compilers
KEEP_ALIVE_S = 65                        # longer than clients keep idle connections: they close them, and never send into one just closed here

Resolve = Callable[[str], tuple[str, Path]]


def serve(args: argparse.Namespace, resolve: Resolve, engine_options: dict[str, Any], rules: Iterable[AlarmRule] = DEFAULT_RULES) -> int:
    """Serve until told to stop; returns the exit status.

    ``resolve`` gives a model's name and file; ``engine_options`` are those of `edgeinfer.load`.
    """
    options = server_options(args)
    listener = bind(options.host, options.port)
    with contextlib.closing(listener):
        sources = model_sources(args, resolve)
        pool = model_pool(args, sources, engine_options)
        show = _printer(options)
        logging.basicConfig(format="edgeinfer: %(message)s", stream=sys.stderr, level=logging.WARNING)
        asyncio.run(_run(pool, Metrics(pool, compat=args.metrics_compat), options, listener, [source.name for source in sources], tuple(rules), show))
    return 0


async def _run(
    pool: ModelPool, metrics: Metrics, options: ServerOptions, listener: socket.socket, names: list[str], rules: tuple[AlarmRule, ...],
    show: Callable[[str], None],
) -> None:
    app = create_app(pool, metrics, options)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False, timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(options.drain_seconds) + 10,
    )
    # Requests that compile a schema wait for each other in their threads; those that only tokenise must find one.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="edgeinfer-request"))
    url = _url(listener)
    watching = None
    try:
        await pool.start()
        for served in pool.loaded():
            for notice in served.engine.notices:
                print(f"edgeinfer: {served.name}: {notice}", file=sys.stderr)
        watching = asyncio.create_task(watch(metrics, rules))
        question = '{"messages": [{"role": "user", "content": "Hello"}]}'
        key = "" if not options.api_keys else "-H 'Authorization: Bearer KEY' "
        server = DrainingServer(config, pool, options.drain_seconds, started=lambda: show(
            f"Serving {', '.join(names)} at {url}\nTry it: curl {url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{question}'"
        ))
        await server.serve(sockets=[listener])
    finally:
        if watching is not None:
            watching.cancel()
        await pool.close()
        if app.state.access_log is not None:
            app.state.access_log.close()


class DrainingServer(uvicorn.Server):
    """uvicorn's server, told to stop by SIGINT or SIGTERM.

    Running requests get ``drain_seconds``; then their engines are closed, which ends them with an error that they can read. A second signal stops
    waiting.
    """

    def __init__(self, config: uvicorn.Config, pool: ModelPool, drain_seconds: float, *, started: Callable[[], None]):
        super().__init__(config)
        self._pool = pool
        self._drain_seconds = drain_seconds
        self._on_started = started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn raises the signal once more when it has stopped, which would make an interrupt of a clean end.
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self._told_to_stop)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _told_to_stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(self._close_late())
        try:
            await super().shutdown(sockets)
        finally:
            closing.cancel()

    async def _close_late(self) -> None:
        await asyncio.sleep(self._drain_seconds)
        await self._pool.close()


# ------------------------------------------------------------------------------------------------------------------- options


def server_options(args: argparse.Namespace) -> ServerOptions:
    """Raises `BadRequest` for what contradicts itself or is not safe."""
    return ServerOptions(
        host=args.host, port=args.port, api_keys=tuple(args.api_key), allow_unauthenticated=args.allow_unauthenticated,
        allowed_hosts=tuple(args.allowed_host), allowed_origins=tuple(args.allow_origin), lenient=args.lenient, metrics=args.metrics,
        max_body_bytes=parse_bytes(args.max_body),
        drain_seconds=args.drain_timeout, access_log=args.access_log, log_prompts=args.log_prompts,
    )


def model_sources(args: argparse.Namespace, resolve: Resolve) -> list[ModelSource]:
    """What is served, in the order named: MODEL or NAME=PATH, then the aliases."""
    files: dict[str, Path] = {}
    for model in args.models:
        name, separator, path = model.partition("=")
        found_name, found = resolve(path if separator else model)
        name = name if separator else found_name
        if not name or name in files:
            raise BadRequest(f"Two models are called {name!r}; name one of them otherwise: NAME={model}." if name else f"{model!r} names no model.")
        files[name] = found
    for alias in args.alias:
        name, _, model = alias.partition("=")
        model = model or next(iter(files))
        if model not in files:
            raise BadRequest(f"--alias {alias}: there is no model {model!r} here; there is {', '.join(files)}.")
        if not name or name in files:
            raise BadRequest(f"--alias {alias}: the name is taken." if name else f"--alias {alias}: there is no name.")
        files[name] = files[model]
    unknown = next((name for name in args.pin if name not in files), None)
    if unknown is not None:
        raise BadRequest(f"--pin {unknown}: there is no such model here; there is {', '.join(files)}.")
    if args.lora and len(set(files.values())) > 1:
        raise BadRequest("--lora belongs to one model; serve that one alone.")
    return [ModelSource(name, path, pinned=name in args.pin, adapters=tuple(args.lora)) for name, path in files.items()]


def _pool_options(args: argparse.Namespace) -> PoolOptions:
    return PoolOptions(
        max_memory_bytes=None if args.max_memory is None else parse_bytes(args.max_memory), max_loaded=args.max_loaded, load_wait_s=args.load_wait,
        rest_after_s=args.rest_after, unload_after_s=args.unload_after,
    )


def model_pool(args: argparse.Namespace, sources: Iterable[ModelSource], engine_options: dict[str, Any]) -> ModelPool:
    """The models, each to be loaded as the flags say."""
    from edgeinfer.runtime.load import load, memory_needed

    def options(source: ModelSource) -> dict[str, Any]:
        return {**engine_options, "parallel": args.parallel, "max_waiting": args.max_waiting, "lora": source.adapters}

    def needed(source: ModelSource) -> int:
        return memory_needed(source.path, **{name: value for name, value in options(source).items() if name != "chat_template"})

    return ModelPool(sources, load=lambda source: load(source.path, **options(source)), needed=needed, options=_pool_options(args))


# -------------------------------------------------------------------------------------------------------------------- socket


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, before anything is loaded. Raises `BadRequest` where that cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise BadRequest(f"--host {host} is no address of this machine.") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1)                               # taken now: two that only bound it would both have it
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise BadRequest(f"Port {port} of {host} is in use; choose another with --port, or 0 for any that is free.") from error
        if error.errno == errno.EACCES:
            raise BadRequest(f"Port {port} needs rights that this user does not have; choose one above 1023.") from error
        raise BadRequest(f"--host {host} is no address of this machine ({error.strerror}).") from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)     # everywhere, and so here
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _printer(options: ServerOptions) -> Callable[[str], None]:
    stream = sys.stderr if options.access_log == "-" else sys.stdout     # the log's lines are for programs

    def show(text: str) -> None:
        print(text, file=stream, flush=True)

    return show
