"""What the monitor remembers between two looks: snapshots to compare with, and a line of figures for each instrument."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from edgeinfer.runtime.readings import ModelReadings, ServerReadings, Snapshot, read_server

RATE_S = 5.0          # rates are over so many seconds: long enough that a step of a slow model does not show as a gap
LATENCY_S = 60.0      # latencies over so many: answers end seldom
KEPT = 240            # figures in a line, at most

TRACED = (
    "first_token_ms", "decode_tokens_per_second", "prompt_tokens_per_second", "utilisation", "batch_fill", "kv_fill", "running",
)


class History:
    """Grows by one column with every `add` or `miss`."""

    def __init__(self) -> None:
        self._snapshots: deque[Snapshot] = deque()
        self._lines: dict[tuple[str, str, str], deque[float | None]] = {}

    def add(self, now: Snapshot) -> ServerReadings:
        """The readings of this moment."""
        readings = read_server(now, self._before(now, RATE_S), self._before(now, LATENCY_S))
        for model in readings.models:
            for name in TRACED:
                # What was counted before the first look is of no moment that the line shows.
                self._line(model, name).append(getattr(model, name) if self._snapshots or name in ("kv_fill", "running") else None)
        self._snapshots.append(now)
        while now.at - self._snapshots[0].at > 2 * LATENCY_S:
            self._snapshots.popleft()
        return readings

    def miss(self) -> None:
        """The server did not answer: a gap in every line."""
        for line in self._lines.values():
            line.append(None)

    def line(self, model: ModelReadings, name: str) -> Sequence[float | None]:
        """The figures of one instrument so far, oldest first; None where there was none."""
        return self._line(model, name)

    def _line(self, model: ModelReadings, name: str) -> deque[float | None]:
        return self._lines.setdefault((model.model, model.engine, name), deque(maxlen=KEPT))

    def _before(self, now: Snapshot, seconds: float) -> Snapshot | None:
        """The newest snapshot at least so old, else the oldest there is."""
        old = [snapshot for snapshot in self._snapshots if now.at - snapshot.at >= seconds]
        return old[-1] if old else self._snapshots[0] if self._snapshots else None
