"""Who is loaded, and whether there is room for one more. Nothing here waits or changes anything."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from edgeinfer.errors import EdgeInferError
from edgeinfer.models.memory import format_bytes
from edgeinfer.runtime.server.pool_values import ModelSource, PoolOptions
from edgeinfer.runtime.service import Engine


@dataclass(eq=False)
class Loaded:
    """An engine, and how many hold it. Exists until the engine is closed."""

    model: Model
    engine: Engine
    needed: int                                          # bytes, by the estimate
    last_used: float
    users: int = 0
    resting: bool = False
    leaving: bool = False                                # takes nobody new: another model waits for its room
    closing: asyncio.Task[None] | None = None

    @property
    def works(self) -> bool:
        return self.engine.health.status not in ("failed", "closed")

    @property
    def is_idle(self) -> bool:
        return not self.users and self.closing is None


@dataclass(eq=False)
class Model:
    source: ModelSource
    pinned: bool
    created: int
    loaded: Loaded | None = None
    waiting: set[asyncio.Future[Loaded]] = field(default_factory=set)       # who is handed it when it is there
    loading: asyncio.Task[None] | None = None
    failure: EdgeInferError | None = None
    failures: int = 0                                    # in a row
    retry_at: float = 0.0


class Room:
    """The bounds on models that are loaded together, and ``alive``: every engine that is not closed yet, in no order."""

    def __init__(self, options: PoolOptions):
        self._memory = options.max_memory_bytes
        self._count = options.max_loaded
        self.alive: list[Loaded] = []

    def fits(self, needed: int, beside: list[Loaded] | None = None) -> bool:
        """Whether one more that takes ``needed`` bytes has room beside these; None: beside all there are."""
        beside = self.alive if beside is None else beside
        if self._count is not None and len(beside) >= self._count:
            return False
        return self._memory is None or needed + sum(loaded.needed for loaded in beside) <= self._memory

    def ever_fits(self, needed: int) -> bool:
        """Whether it has room when all are gone that may go."""
        return self.fits(needed, self._pinned())

    def idle(self) -> list[Loaded]:
        """What may be unloaded now, the least recently used first."""
        return sorted((loaded for loaded in self.alive if loaded.is_idle and not loaded.model.pinned), key=lambda loaded: loaded.last_used)

    def to_unload(self, needed: int) -> Loaded | None:
        """The first to go; None where all idle ones together would not make room."""
        idle = self.idle()
        return idle[0] if idle and self.fits(needed, self._without(idle)) else None

    def in_the_way(self, needed: int) -> list[Loaded]:
        """The fewest of those that may go, idle ones and the least recently used first, without which there is room."""
        able = sorted((loaded for loaded in self.alive if not loaded.model.pinned), key=lambda loaded: (loaded.users > 0, loaded.last_used))
        return next((able[:count] for count in range(len(able)) if self.fits(needed, self._without(able[:count]))), able)

    def refusal(self, model: Model, needed: int) -> str:
        """Why it never fits."""
        held = sum(loaded.needed for loaded in self._pinned())
        beside = f", of which pinned models hold {format_bytes(held)}" if held else ""
        return (
            f"{model.source.name} needs {format_bytes(needed)} and the budget of all models is {format_bytes(self._memory or 0)}{beside}; "
            "raise the budget, or serve it with a smaller context or KV type."
        )

    def _pinned(self) -> list[Loaded]:
        return [loaded for loaded in self.alive if loaded.model.pinned]

    def _without(self, gone: list[Loaded]) -> list[Loaded]:
        return [loaded for loaded in self.alive if loaded not in gone]
