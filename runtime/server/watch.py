"""The background task that looks at the metrics every few seconds and raises alarms."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from edgeinfer.runtime.alarms import LOG, AlarmRule, Alarms
from edgeinfer.runtime.readings import Snapshot, read

if TYPE_CHECKING:
    from edgeinfer.runtime.server.metrics import Metrics

EVERY_S = 5.0
WINDOW_S = 30.0                          # rates and latencies are those of so many seconds


async def watch(metrics: Metrics, rules: Iterable[AlarmRule], *, every_s: float = EVERY_S, window_s: float = WINDOW_S) -> None:
    """Runs until it is cancelled."""
    alarms = Alarms(rules)
    looks: deque[Snapshot] = deque(maxlen=max(1, round(window_s / every_s)))
    try:
        while True:
            look(metrics, alarms, looks, await asyncio.to_thread(metrics.snapshot))
            await asyncio.sleep(every_s)
    except Exception:
        # Nobody waits for this task: without a word, alarms would just stay as they are.
        LOG.exception("the alarms are no longer watched")
        raise


def look(metrics: Metrics, alarms: Alarms, looks: deque[Snapshot], now: Snapshot) -> None:
    """One look: readings over what is in ``looks``, alarms, gauges."""
    base = looks[0] if looks else now                    # what was counted before the first look is not of the window
    metrics.set_alarms(alarms.look(read(now, base, base), now.at))
    looks.append(now)
