"""What the engine has done and what it holds, as one value that any thread may ask for. Servers and screens only show it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from edgeinfer.runtime.engine import EngineCore, EngineCounters
from edgeinfer.runtime.health import Health


@dataclass(frozen=True)
class EngineStats:
    """A moment of the engine. ``counters`` is a copy; counters.submitted = finished + cancelled + failed + running + waiting."""

    counters: EngineCounters
    running: int                         # requests that have a slot
    waiting: int                         # requests that wait for one, preempted ones among them
    kv_used_tokens: int                  # tokens whose KV is held, by running requests and as cache, counted per conversation even where they share cells
    kv_idle_tokens: int                  # of these, cache that no request is using
    kv_cells: int                        # tokens that the KV cache holds at most
    evictions: int                       # times an idle conversation's KV was dropped to make room
    uptime_seconds: float
    health: Health
    first_token_wait_seconds: float = 0.0    # how long the request has waited that has waited longest for its first token; 0 where none does

    @property
    def batch_fill(self) -> float:
        """Tokens decoded together in one step, on average; 0 before the first."""
        return _share(self.counters.decode_rows, self.counters.decode_steps)

    @property
    def prefix_hit_share(self) -> float:
        """Of the prompt tokens of ended requests, how many were reused instead of computed: 0 .. 1."""
        return _share(self.counters.cached_tokens, self.counters.prompt_tokens)

    @property
    def acceptance_rate(self) -> float:
        """Of the drafted tokens, how many were right: 0 .. 1."""
        return _share(self.counters.draft_tokens_accepted, self.counters.draft_tokens)

    def as_dict(self) -> dict[str, float | int | str]:
        """JSON-ready and flat: counters, gauges, shares, and ``health``, ``health_reason``, ``step_seconds``."""
        counters = asdict(self.counters)
        gauges = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("counters", "health")}
        shares = {name: getattr(self, name) for name in ("batch_fill", "prefix_hit_share", "acceptance_rate")}
        health = {"health": self.health.status, "health_reason": self.health.reason, "step_seconds": self.health.step_seconds}
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in (counters | gauges | shares | health).items()}


def snapshot(core: EngineCore, *, uptime_seconds: float, health: Health) -> EngineStats:
    """From any thread, without stopping the engine's."""
    # One copy of all counters at once: read one by one, they would be of different moments.
    counters = EngineCounters(**dict(vars(core.counters)))
    running = min(len(core.scheduler.running), counters.inside)
    info = core.backend.info
    since = min((seq.submitted for seq in tuple(core.inside) if not seq.token_times), default=None)
    return EngineStats(
        counters, running, counters.inside - running, core.slots.used_tokens, core.slots.idle_tokens, info.kv_cells or info.n_ctx * info.max_slots,
        core.slots.evictions, uptime_seconds, health, 0.0 if since is None else max(0.0, time.perf_counter() - since),
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
