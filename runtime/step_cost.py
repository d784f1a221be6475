"""How long a forward takes, by the number of rows in it, learned while serving.

Kernels have steps (four rows may cost hardly more than three), so each row count is measured for itself; between and beyond the measured ones a
typical curve is scaled to pass through them.
"""

from __future__ import annotations

import math
from bisect import bisect_left

# Rows and the time of a forward in times of one row: a small 4-bit model on two CPU cores. Only a first guess at the shape; a GPU is nearly flat.
_TYPICAL = ((1, 1.0), (2, 1.8), (4, 2.4), (8, 4.5), (16, 7.2), (32, 13.0))
_PACE = 0.2                               # share of a surprise that an estimate follows at once
_SHARED = 0.5                             # share of it that is taken for a change of the whole machine: another clock, longer contexts, a neighbour
_LARGEST_SURPRISE = math.log(1.6)         # a pause of the process is not the price of a row
_STALE = 2000                             # measurements after which a row count that was not seen again is forgotten, so that it gets another try


def typical(rows: int) -> float:
    """Time of a forward with ``rows`` rows in times of one with a single row, before anything was measured."""
    at = min(max(1, bisect_left(_TYPICAL, (rows, 0.0))), len(_TYPICAL) - 1)
    (x0, y0), (x1, y1) = _TYPICAL[at - 1], _TYPICAL[at]
    return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)


def _bucket(rows: int) -> int:
    """Row counts that share an estimate: each its own up to 32, then eight at a time."""
    return rows if rows <= 32 else (rows + 4) // 8 * 8


class StepCost:
    """Seconds of a forward by its rows: moving averages of what was measured, in the logarithm, so that all scales when the machine slows down."""

    def __init__(self) -> None:
        self._offsets: dict[int, float] = {}             # rows -> log(measured / typical)
        self._seen: dict[int, int] = {}                  # rows -> tick of the newest measurement
        self._keys: list[int] = []                       # measured rows, ascending
        self._cache: dict[int, float] = {}
        self._tick = 0

    @property
    def known(self) -> bool:
        """Anything was measured; before, `seconds` is 0."""
        return bool(self._keys)

    def add(self, rows: int, seconds: float) -> None:
        """A forward with ``rows`` rows took ``seconds``. Ignored when either is not positive."""
        if rows < 1 or not seconds > 0:
            return
        self._tick += 1
        key = _bucket(rows)
        offset = math.log(seconds / typical(rows))
        if self._keys:
            expected = self._offset(key)
            surprise = max(-_LARGEST_SURPRISE, min(_LARGEST_SURPRISE, offset - expected))
            new = key not in self._offsets
            for other in self._offsets:
                self._offsets[other] += _SHARED * _PACE * surprise
            self._offsets[key] = expected + (surprise if new else _PACE * surprise)
        else:
            self._offsets[key] = offset
        self._seen[key] = self._tick
        if self._tick % 256 == 0:
            for other in [rows for rows, tick in self._seen.items() if self._tick - tick > _STALE]:
                del self._offsets[other], self._seen[other]
        self._keys = sorted(self._offsets)
        self._cache.clear()

    def seconds(self, rows: int) -> float:
        """What a forward with ``rows`` rows is expected to take."""
        known = self._cache.get(rows)
        if known is None:
            known = self._cache[rows] = typical(rows) * math.exp(self._offset(rows)) if self._keys else 0.0
        return known

    def _offset(self, rows: int) -> float:
        keys = self._keys
        at = bisect_left(keys, rows)
        if at == len(keys):
            return self._offsets[keys[-1]]
        if keys[at] == rows or at == 0:
            return self._offsets[keys[at]]
        low, high = keys[at - 1], keys[at]
        share = math.log(rows / low) / math.log(high / low)
        return (1 - share) * self._offsets[low] + share * self._offsets[high]
