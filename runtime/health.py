"""Is the engine alive: a step that never ends is noticed, told to everybody who waits for it, and survived where it ends after all.

    step begins        step_timeout_s later         a little later                    if the step ever ends
    ------------------ stalled: abort() is sent --- overdue: every stream fails, ---- requests are accepted again
                                                    new requests are refused
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from edgeinfer.errors import BadRequest

_TICKS = 8                               # looks at a step within its timeout, at least
_TICK_S = 5.0                            # and at most so many seconds between two
_GRACE = 2                               # looks after abort() before the step is given up, at least,
_GRACE_S = 1.0                           # and seconds: kernels end between two operations, not within one


@dataclass(frozen=True)
class EngineOptions:
    """Of the engine's thread, whatever the backend."""

    step_timeout_s: float = 120          # a step that runs longer is stopped or given up; 0: never

    def __post_init__(self) -> None:
        value = self.step_timeout_s
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not (math.isfinite(value) and value >= 0):
            raise BadRequest(f"step_timeout_s must be a number of seconds from 0 (never), not {value!r}.")


@dataclass(frozen=True)
class Health:
    """ok: it works or waits for work. stalled: the step that runs should have ended long ago. failed: it is over. closed: its owner closed it."""

    status: Literal["ok", "stalled", "failed", "closed"]
    reason: str = ""                     # one sentence; empty while all is well
    step_seconds: float = 0.0            # how long the current step has been running; 0 between steps


class Watchdog:
    """Looks at the engine's thread from a thread of its own. A step costs two writes of `began`; an engine without work costs nothing.

    Time counts in looks, not seconds: a process that was stopped for an hour (Ctrl-Z, a laptop's lid) has missed one look, not a deadline.

    stalled: called once when a step has run for ``timeout_s``; overdue: called with its `began` when it does not end soon after either.
    """

    def __init__(self, timeout_s: float, *, stalled: Callable[[], None], overdue: Callable[[float], None]):
        self.began = 0.0                 # time.perf_counter() at the start of the step that runs; 0 between steps
        self.stalled = 0.0               # `began` of the last step that ran too long
        self._timeout = timeout_s
        self._stop = threading.Event()
        # The thread alone knows the callbacks, and forgets them when it ends: their owner owns this object.
        self.thread = threading.Thread(target=self._run, args=(stalled, overdue), name="edgeinfer-watchdog", daemon=True) if timeout_s else None

    def start(self) -> None:
        if self.thread is not None:
            self.thread.start()

    def stop(self) -> None:
        """End the thread; returns at once."""
        self._stop.set()

    @property
    def is_stalled(self) -> bool:
        """The step that runs now has run too long."""
        return self.began == self.stalled != 0

    def _run(self, on_stalled: Callable[[], None], on_overdue: Callable[[float], None]) -> None:
        limit = max(_TICKS, math.ceil(self._timeout / _TICK_S))
        grace = max(_GRACE, math.ceil(_GRACE_S * limit / self._timeout))
        step, looks = 0.0, 0
        while not self._stop.wait(self._timeout / limit):
            now = self.began
            looks = looks + 1 if now and now == step else 0
            step = now
            if looks == limit:
                self.stalled = step
                on_stalled()
            elif looks == limit + grace:
                on_overdue(step)
