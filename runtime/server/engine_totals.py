"""Counters of engines that come and go, as totals of their models that never go backwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgeinfer.runtime.engine import EngineCounters
    from edgeinfer.runtime.server.pool import ModelPool, Served

Key = tuple[str, str]
"""(model_name, engine): the labels that every metric of a model carries."""


@dataclass
class _Seen:
    key: Key
    counters: EngineCounters             # the engine's own, alive: what it counts after it left the pool is not lost
    evictions: int = 0

    def values(self) -> dict[str, float]:
        return {**vars(self.counters), "evictions": self.evictions}


class EngineTotals:
    """Remembers every engine that `look` has seen; one that left and has nobody inside is folded into its model's sum.

    Not thread-safe: its owner has the lock.
    """

    def __init__(self, pool: ModelPool):
        self._pool = pool
        self._seen: dict[int, _Seen] = {}                # by the identity of the counters, which each entry keeps alive
        self._folded: dict[Key, dict[str, float]] = {}
        self._engines: dict[str, str] = {}

    def look(self) -> tuple[Served, ...]:
        """The engines that are loaded now."""
        loaded = self._pool.loaded()
        present = set()
        for served in loaded:
            counters = served.engine.counters
            present.add(id(counters))
            if id(counters) not in self._seen:
                key = (served.name, served.engine.info.engine)
                self._seen[id(counters)] = _Seen(key, counters)
                self._engines[served.name] = key[1]
        for identity, seen in list(self._seen.items()):
            if identity not in present and seen.counters.inside == 0:
                self._add(self._folded.setdefault(seen.key, {}), seen)
                del self._seen[identity]
        return loaded

    def key(self, model: str) -> Key:
        """The labels of ``model``, by the engine that it was last seen with. Looks, so that no engine that answered is missed."""
        self.look()
        return model, self._engines.get(model, "")

    def evicted(self, served: Served, evictions: int) -> None:
        """What the engine's own statistics say, which end with it."""
        seen = self._seen.get(id(served.engine.counters))
        if seen is not None:
            seen.evictions = evictions

    def totals(self) -> dict[Key, dict[str, float]]:
        """Every counter of every model ever seen, its present engine included."""
        totals = {key: dict(values) for key, values in self._folded.items()}
        for seen in self._seen.values():
            self._add(totals.setdefault(seen.key, {}), seen)
        return totals

    @staticmethod
    def _add(total: dict[str, float], seen: _Seen) -> None:
        for name, value in seen.values().items():
            total[name] = total.get(name, 0) + value
