"""Counts of values by upper bound, as Prometheus wants them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence


class Histogram:
    """Takes many values at once, such as all gaps between an answer's tokens. Not thread-safe: its owner has the lock."""

    def __init__(self, bounds: Sequence[float]):
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, values: Iterable[float]) -> None:
        for value in values:
            self._counts[bisect_left(self._bounds, value)] += 1
            self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many values up to it), ascending; the last is ("+Inf", all of them)."""
        cumulative: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts):
            total += count
            cumulative.append((bound, total))
        return cumulative
