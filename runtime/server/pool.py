"""Several models under one memory budget: loaded when somebody asks, the least recently used out when there is no room.

The one rule: an engine that anybody holds (`ModelPool.use`) is never closed, unless it has crashed.

Everything but `status` and `loaded` belongs to the event loop, so nothing here needs a lock; loading and closing, which block, happen in threads.
One model is loaded at a time. Whoever waits for it is handed the engine in the same turn of the event loop in which it is there: no other load can
take it away in between.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from edgeinfer.errors import BackendFailed, BadRequest, EdgeInferError, EngineBusy, EngineClosed, ModelNotFound, OutOfMemory
from edgeinfer.runtime.server.pool_room import Loaded, Model, Room
from edgeinfer.runtime.server.pool_values import ModelSource, ModelStatus, PoolOptions, Served
from edgeinfer.runtime.service import Engine

__all__ = ["ModelPool", "ModelSource", "ModelStatus", "PoolOptions", "Served"]

log = logging.getLogger("edgeinfer.server")

_BACK_OFF_S, _BACK_OFF_MOST_S = 1.0, 30.0                # a file that failed to load is not read again sooner; doubles with each failure
_PATIENCE = 4                                            # who has waited for room for 1/4 of load_wait_s gets it: models in the way take nobody new
_LOOK_S = 5.0                                            # at most so long between two looks for idle models

T = TypeVar("T")


class ModelPool:
    """The models of a server.

    load: makes an engine; runs in a thread. needed: the bytes that loading a source will take, asked in a thread before it where there is a budget;
    None: by the header and the defaults of `edgeinfer.load`.
    """

    def __init__(
        self,
        sources: Iterable[ModelSource],
        *,
        load: Callable[[ModelSource], Engine],
        options: PoolOptions = PoolOptions(),
        needed: Callable[[ModelSource], int] | None = None,
    ):
        self._load_engine = load
        self._needed = needed or _by_header
        self._options = options
        self._sources = tuple(sources)
        self._models: dict[str, Model] = {}
        by_file: dict[tuple[Path, tuple[str, ...]], Model] = {}
        for source in self._sources:
            if source.name in self._models:
                raise BadRequest(f"Two models are called {source.name!r}; give one of them another name.")
            model = by_file.setdefault((source.path, source.adapters), Model(source, False, _created(source.path)))
            model.pinned = model.pinned or source.pinned
            self._models[source.name] = model
        self._distinct = tuple(by_file.values())
        if not self._distinct:
            raise BadRequest("There is no model to serve; name at least one.")
        pinned = sum(model.pinned for model in self._distinct)
        if options.max_loaded is not None and pinned + (pinned < len(self._distinct)) > options.max_loaded:
            most = options.max_loaded
            raise BadRequest(f"{pinned} pinned models leave no room for another where {most} may be loaded; raise max_loaded or pin fewer.")
        self._room = Room(options)
        self._turn = asyncio.Lock()                      # whose turn it is to load
        self._released = asyncio.Event()                 # a hold ended, an engine was closed, or somebody gave up: look again whether there is room
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="edgeinfer-pool")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._closed = False

    # -------------------------------------------------------------------------------------------------------------- any thread

    def status(self) -> tuple[ModelStatus, ...]:
        """Every name, in the order given. From any thread."""
        return tuple(self._status_of(source, self._models[source.name]) for source in self._sources)

    def loaded(self) -> tuple[Served, ...]:
        """What is loaded now. From any thread, at no cost; an engine may be closed by the time it is looked at."""
        found = ((model.source.name, model.loaded) for model in self._distinct)
        return tuple(Served(name, loaded.engine) for name, loaded in found if loaded is not None)

    # ---------------------------------------------------------------------------------------------------------- the event loop

    async def start(self) -> None:
        """Load the pinned models, or the only one there is, and begin to look for idle ones. Raises what loading raises."""
        only = self._distinct if len(self._distinct) == 1 else ()
        for model in [model for model in self._distinct if model.pinned] or only:
            self._release(await self._hold(model, None))
        if self._options.rest_after_s or self._options.unload_after_s:
            self._watch = self._spawn(self._watch_idle())

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[Served]:
        """Hold a model; it is loaded first where it is not, and stays loaded inside. None: the first (or only) model.

        Raises `ModelNotFound`, `EngineBusy` after waiting for ``load_wait_s``, `OutOfMemory` where it can never fit, `EngineClosed` after `close`,
        and what loading it raises. Cancelling the wait leaves nothing behind.
        """
        model = self._distinct[0] if name is None else self._models.get(name)
        if model is None:
            raise ModelNotFound(f"There is no model {name!r} here; there is {', '.join(self._models)}.")
        loaded = await self._hold(model, self._options.load_wait_s)
        try:
            yield Served(model.source.name, loaded.engine)
        finally:
            self._release(loaded)

    async def close(self) -> None:
        """Close every engine, in use or not; whoever waits gets `EngineClosed`. Harmless when repeated."""
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        self._released.set()
        for model in self._distinct:
            _fail(model.waiting, _closed())
        while self._tasks or self._room.alive:           # a load that runs in its thread cannot be stopped: it ends and is closed
            for loaded in list(self._room.alive):
                self._begin_closing(loaded)
            await asyncio.wait(self._tasks)
        self._threads.shutdown(wait=False)

    # ----------------------------------------------------------------------------------------------------------------- holding

    async def _hold(self, model: Model, wait_s: float | None) -> Loaded:
        self._check_open()
        loaded = model.loaded
        if loaded is not None and loaded.works and not loaded.leaving:
            return _taken(loaded)
        if model.failure is not None and time.monotonic() < model.retry_at:
            raise model.failure.with_traceback(None)
        waiter: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
        model.waiting.add(waiter)
        if model.loading is None:
            model.loading = self._spawn(self._bring(model))
        try:
            await asyncio.wait((waiter,), timeout=wait_s)
        except asyncio.CancelledError:
            if not waiter.cancel() and waiter.exception() is None:           # it came in the same moment
                self._release(waiter.result())
            raise
        finally:
            model.waiting.discard(waiter)
            self._released.set()
        if waiter.cancel():
            raise EngineBusy(f"{model.source.name} was still not loaded after {wait_s:g} s; try again later.")
        return waiter.result()

    def _release(self, loaded: Loaded) -> None:
        loaded.users -= 1
        loaded.last_used = time.monotonic()
        self._released.set()

    # ----------------------------------------------------------------------------------------------------------------- loading

    async def _bring(self, model: Model) -> None:
        """When its turn comes: load a model and hand it to all who wait for it."""
        try:
            async with self._turn:
                if not model.waiting:
                    return
                self._check_open()
                loaded = model.loaded
                if loaded is None or not loaded.works:
                    loaded = await self._load(model)
                for waiter in model.waiting:
                    if not waiter.done():
                        waiter.set_result(_taken(loaded))
        except EdgeInferError as error:
            _fail(model.waiting, error)
        except Exception as error:
            log.error("Loading %s failed unexpectedly.", model.source.name, exc_info=error)
            _fail(model.waiting, _unplanned(model, error))
        finally:
            model.loading = None

    async def _load(self, model: Model) -> Loaded:
        if model.loaded is not None:                     # it has crashed, and all its streams have ended
            await self._unload(model.loaded)
        try:
            needed = 0 if self._options.max_memory_bytes is None else await self._in_thread(self._needed, model.source)
            await self._make_room(model, needed)
            engine = await self._engine_of(model)
        except (EngineBusy, EngineClosed):
            raise
        except Exception as error:
            model.failure = error if isinstance(error, EdgeInferError) else _unplanned(model, error)
            model.retry_at = time.monotonic() + min(_BACK_OFF_MOST_S, _BACK_OFF_S * 2**min(model.failures, 10))
            model.failures += 1
            raise
        loaded = Loaded(model, engine, needed, time.monotonic())
        self._room.alive.append(loaded)                  # where the pool is closing, that is how it finds it
        model.loaded, model.failure, model.failures = loaded, None, 0
        return loaded

    async def _engine_of(self, model: Model) -> Engine:
        while True:
            try:
                return await self._in_thread(self._load_engine, model.source)
            except OutOfMemory:                          # the machine has less than the budget: what is idle goes
                idle = self._room.idle()
                if not idle:
                    raise
                await self._unload(idle[0])

    async def _make_room(self, model: Model, needed: int) -> None:
        """Unload idle models, the least recently used first, until ``needed`` bytes more fit; wait for those in use."""
        room = self._room
        if not room.ever_fits(needed):
            raise OutOfMemory(room.refusal(model, needed))
        began = time.monotonic()
        wait_s = self._options.load_wait_s
        leaving: list[Loaded] = []
        try:
            while not room.fits(needed):
                victim = room.to_unload(needed)
                if victim is not None:
                    await self._unload(victim)
                    continue
                self._check_open()
                waited = time.monotonic() - began
                if waited >= wait_s or not model.waiting:
                    raise EngineBusy(f"There is no room for {model.source.name} beside the models in use; try again later.")
                patience = wait_s / _PATIENCE - waited
                if patience <= 0 and not leaving:
                    leaving = room.in_the_way(needed)
                    for loaded in leaving:
                        loaded.leaving = True
                self._released.clear()
                await _set_within(self._released, patience if patience > 0 else wait_s - waited)
        finally:
            for loaded in leaving:
                loaded.leaving = False

    # --------------------------------------------------------------------------------------------------------------- unloading

    def _begin_closing(self, loaded: Loaded) -> asyncio.Task[None]:
        if loaded.model.loaded is loaded:
            loaded.model.loaded = None
        if loaded.closing is None:
            loaded.closing = self._spawn(self._close(loaded))
        return loaded.closing

    async def _unload(self, loaded: Loaded) -> None:
        await asyncio.shield(self._begin_closing(loaded))

    async def _close(self, loaded: Loaded) -> None:
        try:
            await self._in_thread(loaded.engine.close)
        except Exception as error:
            log.error("Closing %s failed unexpectedly.", loaded.model.source.name, exc_info=error)
        finally:
            self._room.alive.remove(loaded)
            self._released.set()

    async def _watch_idle(self) -> None:
        """Two steps: idle models drop their cache, later they go."""
        rest, unload = self._options.rest_after_s, self._options.unload_after_s
        while True:
            await asyncio.sleep(min(_LOOK_S, min(after for after in (rest, unload) if after) / 4))
            for loaded in [loaded for loaded in self._room.alive if loaded.is_idle]:
                idle_s = time.monotonic() - loaded.last_used
                if unload and idle_s >= unload and not loaded.model.pinned:
                    self._begin_closing(loaded)
                elif rest and idle_s >= rest and not loaded.resting and loaded.works:
                    loaded.resting = True
                    try:
                        loaded.engine.drop_cache()
                    except EdgeInferError as error:      # it has just failed: the next request finds that out too
                        log.warning("%s does not rest: %s", loaded.model.source.name, error)

    # --------------------------------------------------------------------------------------------------------------- internals

    def _check_open(self) -> None:
        if self._closed:
            raise _closed()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    @staticmethod
    def _status_of(source: ModelSource, model: Model) -> ModelStatus:
        loaded, failure = model.loaded, model.failure    # once: another thread may change them
        state: Literal["unloaded", "loading", "loaded", "resting", "failed"]
        if loaded is not None:
            state = "resting" if loaded.resting else "loaded"
        elif model.loading is not None:
            state = "loading"
        else:
            state = "failed" if failure is not None else "unloaded"
        error, info = str(failure) if state == "failed" else "", loaded.engine.info if loaded is not None else None
        return ModelStatus(source.name, state, model.created, model.pinned, error, info)


def _taken(loaded: Loaded) -> Loaded:
    loaded.users += 1
    loaded.resting = False
    return loaded


def _fail(waiting: set[asyncio.Future[Loaded]], error: EdgeInferError) -> None:
    for waiter in waiting:
        if not waiter.done():
            waiter.set_exception(error)


def _unplanned(model: Model, error: Exception) -> BackendFailed:
    return BackendFailed(f"Loading {model.source.name} failed: {type(error).__name__}: {error}.")


def _closed() -> EngineClosed:
    return EngineClosed("The server is shutting down.")


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    """Wait for the event, or for so long."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


def _created(path: Path) -> int:
    """When the file was written; now, where there is none yet."""
    try:
        return int(path.stat().st_mtime)
    except OSError:
        return int(time.time())


def _by_header(source: ModelSource) -> int:
    from edgeinfer.runtime.load import memory_needed     # loads llama.cpp

    return memory_needed(source.path, lora=source.adapters)
