"""What a pool of models is told and what it tells."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgeinfer.errors import BadRequest
from edgeinfer.runtime.service import Engine
from edgeinfer.runtime.values import BackendInfo


@dataclass(frozen=True)
class ModelSource:
    """A model that can be asked for by ``name``. Sources of the same path and adapters are one model under several names."""

    name: str
    path: Path
    pinned: bool = False                                 # loaded at the start, and never unloaded
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelStatus:
    """A model at this moment. ``resting``: loaded, and its idle cache was dropped; ``failed``: it could not be loaded, ``error`` says why."""

    name: str
    state: Literal["unloaded", "loading", "loaded", "resting", "failed"]
    created: int                                         # of its file, in seconds since 1970
    pinned: bool
    error: str                                           # one sentence; empty unless failed
    info: BackendInfo | None                             # None unless loaded


@dataclass(frozen=True)
class Served:
    """A loaded model. ``name`` is its first one, whichever it was asked for by."""

    name: str
    engine: Engine


@dataclass(frozen=True)
class PoolOptions:
    """How many models, how much memory, for how long."""

    max_memory_bytes: int | None = None                  # of all models together, by the estimate before loading; None: what the machine has
    max_loaded: int | None = None                        # models loaded at once; None: no limit
    load_wait_s: float = 120                             # a request waits so long for its model
    rest_after_s: float = 0                              # idle for so long: drop the cached conversations; 0: never
    unload_after_s: float = 0                            # idle for so long: unload; 0: never

    def __post_init__(self) -> None:
        for name in ("max_memory_bytes", "max_loaded"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise BadRequest(f"{name} must be a whole number from 1, or None, not {value!r}.")
        for name in ("load_wait_s", "rest_after_s", "unload_after_s"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e9 or (name == "load_wait_s" and not value):
                raise BadRequest(f"{name} must be a number of seconds, not {value!r}.")
