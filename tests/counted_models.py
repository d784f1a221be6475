"""A machine whose models are only counted: what a pool loads, holds and closes, without any weights."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from edgeinfer.errors import OutOfMemory
from edgeinfer.runtime.health import Health
from edgeinfer.runtime.server.pool import ModelPool, ModelSource, PoolOptions


class Counted:
    """Stands for an engine: known to its `Machine` until it is closed."""

    def __init__(self, machine: Machine, source: ModelSource):
        self.machine = machine
        self.source = source
        self.info = SimpleNamespace(model=source.name)
        self.status = "ok"
        self.holders = 0
        self.drops = 0

    @property
    def health(self) -> Health:
        return Health(self.status)

    def drop_cache(self) -> None:
        assert self.status == "ok"
        self.drops += 1

    def close(self) -> None:
        assert self.machine.closing.wait(60)
        with self.machine.lock:
            assert self in self.machine.alive, "closed twice"
            self.machine.closed_in_use += bool(self.holders and self.status == "ok")
            self.machine.alive.remove(self)
            self.status = "closed"


class Machine:
    """Loads `Counted` engines of given sizes and notes the most that was ever alive."""

    def __init__(self, sizes: dict[str, int], *, budget: int | None = None, holds: int | None = None):
        self.sizes = sizes
        self.budget = budget
        self.holds = holds                               # bytes the machine itself has
        self.lock = threading.Lock()
        self.alive: list[Counted] = []
        self.made = self.most = self.at_once = self.closed_in_use = 0
        self.loads: list[str] = []
        self.broken: dict[str, Exception] = {}
        self.gates: dict[str, threading.Event] = {}      # loading a model waits for its gate
        self.closing = threading.Event()                 # and closing one for this
        self.closing.set()
        self.reached: dict[str, threading.Event] = {}

    def load(self, source: ModelSource) -> Any:
        with self.lock:
            self.at_once += 1
            assert self.at_once == 1, "two loads at once"
            self.loads.append(source.name)
            used = sum(self.sizes[engine.source.name] for engine in self.alive) + self.sizes[source.name]
            self.most = max(self.most, used)
        try:
            if source.name in self.gates:
                self.reached[source.name].set()
                assert self.gates[source.name].wait(60)
            if source.name in self.broken:
                raise self.broken[source.name]
            if self.holds is not None and used > self.holds:
                raise OutOfMemory("this machine has less")
            engine = Counted(self, source)
            with self.lock:
                self.made += 1
                self.alive.append(engine)
            return engine
        finally:
            with self.lock:
                self.at_once -= 1

    def gate(self, name: str) -> threading.Event:
        self.reached[name] = threading.Event()
        return self.gates.setdefault(name, threading.Event())

    def pool(self, pinned: str = "", **options: Any) -> ModelPool:
        sources = [ModelSource(name, Path(name), pinned=name in pinned) for name in self.sizes]
        bounds = PoolOptions(max_memory_bytes=self.budget, **options)
        return ModelPool(sources, load=self.load, needed=lambda source: self.sizes[source.name], options=bounds)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work(), 120)              # a hang is a failure, and says where

    asyncio.run(bounded())


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def used(pool: ModelPool, name: str | None, work: Callable[[Counted], Awaitable[None]] | None = None) -> str:
    """Use a model as a request does; its name."""
    async with pool.use(name) as served:
        engine: Any = served.engine
        engine.holders += 1
        try:
            if work is not None:
                await work(engine)
            assert engine.status != "closed"
        finally:
            engine.holders -= 1
        return served.name


def states(pool: ModelPool) -> dict[str, str]:
    return {status.name: status.state for status in pool.status()}


def held(pool: ModelPool) -> int:
    """Holds and waits that are left."""
    return sum(loaded.users for loaded in pool._room.alive) + sum(len(model.waiting) for model in pool._distinct)
