"""Choosing the next token from one row of logits.

The chain is llama.cpp's: logit bias, penalties, top-k, top-p, min-p, temperature, draw. Everything is exact, and with top-k or min-p on, the row is
never sorted: one pass takes the maximum of each of a few hundred groups, and the k-th largest of those is a floor under at least k logits, so only
what lies above it is looked at again. A row is a float32 array of shape (n_vocab,). It is often a view into native memory and is never modified. -inf
in it is a mask; NaN and +inf are faults.

Between equal logits the lower id wins, so a result does not depend on how a list happened to be partitioned.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from random import Random

import numpy as np

from edgeinfer.errors import BackendFailed, BadRequest
from edgeinfer.runtime.values import SamplingParams

_GROUP = 64                               # logits to a group; 16 to 256 are equally fast
_LARGEST_LOGIT = 1e30                     # where edited logits are capped: far above any real one, far below float32's overflow
_FEW = 1024                               # up to so many tokens that a mask leaves are looked at alone instead of masking all others
_SHORT_LIST = 128                         # a top-k up to this is sorted and summed in plain Python
_LOWEST_TEMPERATURE = 1e-30               # below it nothing changes: any difference in logits is already infinite

# For each value of a byte, what eight logits may be at most: no limit where the bit is set, -inf where it is not. Eight times as quick as a boolean mask.
_LIMITS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.float32(np.inf), np.float32(-np.inf))


def random_seed() -> int:
    """A seed from the operating system, 32 bits wide so that it survives JSON and llama.cpp's own range."""
    return secrets.randbits(32)


# ------------------------------------------------------------------------------------------------------------- pure functions


def argmax(row: np.ndarray) -> int:
    """The most likely token, the lowest id among equals. Raises `BackendFailed` when the row is not usable."""
    best = int(row.argmax())              # NaN counts as the largest value here, so one pass finds it too
    if not math.isfinite(row[best]):
        raise _unusable(row)
    return best


def largest(row: np.ndarray) -> float:
    """The maximum of the row. Raises `BackendFailed` when it holds NaN or +inf, or nothing but -inf."""
    top = float(row.max())
    if not math.isfinite(top):
        raise _unusable(row)
    return top


def top_k(row: np.ndarray, k: int) -> np.ndarray:
    """Ids (ascending) of the ``k`` largest logits, 1 <= k; fewer when fewer are not masked."""
    groups = min(len(row) // 2, max(len(row) // _GROUP, 4 * k))
    if groups < k:
        floor = np.float32(-np.inf)
    else:
        size = len(row) // groups
        peaks = row[: groups * size].reshape(size, groups).max(axis=0)
        floor = np.partition(peaks, groups - k)[groups - k]
    ids = np.flatnonzero(row >= floor) if floor > -np.inf else np.flatnonzero(row > -np.inf)
    return keep_largest(row, ids, k)


def keep_largest(row: np.ndarray, ids: np.ndarray, count: int) -> np.ndarray:
    """Those of ``ids`` (ascending) with the ``count`` largest logits, still ascending."""
    if len(ids) <= count:
        return ids
    values = row[ids]
    lowest = np.partition(values, len(ids) - count)[len(ids) - count]
    kept = values > lowest
    kept[np.flatnonzero(values == lowest)[: count - int(np.count_nonzero(kept))]] = True
    return ids[kept]


def nucleus_size(logits: np.ndarray, p: float, top: float, mass: float) -> int:
    """How many of the largest ``logits`` top-p keeps: the fewest whose probability reaches ``p``.

    ``mass`` is the sum of exp(logit - top) over all that compete; ``logits`` may leave out some of the least likely of them.
    """
    weights = np.exp(-np.sort(-logits) - np.float32(top))
    reached = np.cumsum(weights.astype(np.float64))         # six times faster than cumsum(dtype=float64)
    return min(int(np.searchsorted(reached, p * mass)) + 1, len(logits))


def mass_of(logits: np.ndarray, top: float) -> float:
    """Sum of exp(logit - top): the softmax denominator."""
    return float(np.exp(logits - np.float32(top)).sum(dtype=np.float64))


def survivors(row: np.ndarray, params: SamplingParams, top: float) -> np.ndarray:
    """Ids (ascending) that top-k, top-p and min-p leave; ``top`` is the row's maximum, and one that has it always stays."""
    limited = 0 < params.top_k < len(row)
    # min-p comes last, but its floor does not depend on what the others keep: the most likely token always stays.
    floor = np.float32(top + math.log(params.min_p)) if params.min_p > 0 else None
    ids = top_k(row, params.top_k) if limited else None
    if params.top_p < 1:
        logits = row[ids] if limited else row
        mass = mass_of(logits, top)
        if floor is not None:
            ids = ids[logits >= floor] if limited else np.flatnonzero(row >= floor)
        elif ids is None:
            ids = _head(row, params.top_p, top, mass)
        return keep_largest(row, ids, nucleus_size(row[ids], params.top_p, top, mass))
    if floor is not None:
        return ids[row[ids] >= floor] if limited else np.flatnonzero(row >= floor)
    return ids if limited else np.flatnonzero(row > -np.inf)


def _head(row: np.ndarray, p: float, top: float, mass: float) -> np.ndarray:
    """Ids (ascending) of the likeliest tokens, surely with probability ``p`` together; found by lowering a floor."""
    for depth in (2, 4, 8, 16):
        ids = np.flatnonzero(row >= np.float32(top - depth))
        # The margin covers rounding in two sums of the same numbers: too long a list costs time, too short a one would be wrong.
        if mass_of(row[ids], top) >= p * mass * (1 + 1e-5):
            return ids
    return np.flatnonzero(row > -np.inf)


def _nucleus(weights: Sequence[float], p: float) -> int:
    """How many of the descending ``weights`` reach the share ``p`` of their sum."""
    target = p * sum(weights)
    reached = 0.0
    for count, weight in enumerate(weights, 1):
        reached += weight
        if reached >= target:
            return count
    return len(weights)


def draw(logits: np.ndarray, temperature: float, top: float, uniform: float) -> int:
    """Index into ``logits`` drawn from their softmax at ``temperature`` (above 0), by a number ``uniform`` in [0, 1)."""
    with np.errstate(over="ignore", under="ignore"):        # a tiny temperature sends every other logit to -inf, as it should
        weights = np.exp((logits - np.float32(top)) / np.float32(max(temperature, _LOWEST_TEMPERATURE)))
    reached = np.cumsum(weights.astype(np.float64))
    return min(int(np.searchsorted(reached, uniform * reached[-1], side="right")), len(logits) - 1)


def masked(row: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """A copy of ``row`` with -inf for every token whose bit in ``allowed`` (lowest bit first) is not set; NaN stays NaN."""
    return np.minimum(row, np.take(_LIMITS, allowed, axis=0).reshape(-1)[: len(row)])


def penalise(logits: np.ndarray, counts: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Logits of tokens seen ``counts`` times (all above 0) after the repeat, frequency and presence penalties."""
    # Dividing would reward a token whose logit is negative.
    penalised = np.where(logits > 0, logits / params.repeat_penalty, logits * params.repeat_penalty)
    return penalised - (counts * params.frequency_penalty + params.presence_penalty)


def _unusable(row: np.ndarray) -> BackendFailed:
    bad = np.flatnonzero(np.isnan(row) | (row == np.inf))
    if not len(bad):
        return BackendFailed("Every token is masked (all logits are -inf), so none can be chosen; relax the logit bias or the constraint.")
    return BackendFailed(
        f"The model produced logits that are not finite numbers ({len(bad)} of {len(row)}, the first is {row[bad[0]]} for token {bad[0]}); "
        "the model file or its number format is at fault."
    )


# ------------------------------------------------------------------------------------------------------------------ state


class RecentTokens:
    """How often each token occurs among the last ``window`` ones (None: all). Adding costs O(1); ids and counts are ready as arrays."""

    def __init__(self, window: int | None, tokens: Sequence[int] = ()):
        self._window = window
        self._order: deque[int] = deque()
        self._index: dict[int, int] = {}
        self._ids = np.zeros(64, np.int64)
        self._counts = np.zeros(64, np.int64)
        self.extend(tokens if window is None else tokens[max(0, len(tokens) - window):])

    @property
    def ids(self) -> np.ndarray:
        """Distinct tokens, in no particular order. A view, valid until the next change."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> np.ndarray:
        """Occurrences of each of `ids`. A view, valid until the next change."""
        return self._counts[: len(self._index)]

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        if self._window == 0:
            return
        if self._window is not None:
            if len(self._order) == self._window:
                self._forget(self._order.popleft())
            self._order.append(token)
        at = self._index.setdefault(token, len(self._index))
        if at == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[at] = token
        self._counts[at] += 1

    def _forget(self, token: int) -> None:
        at = self._index[token]
        self._counts[at] -= 1
        if self._counts[at]:
            return
        del self._index[token]
        last = len(self._index)                             # the last entry moves into the gap
        if at != last:
            self._ids[at], self._counts[at] = self._ids[last], self._counts[last]
            self._index[int(self._ids[at])] = at
        self._counts[last] = 0


class Sampler:
    """Chooses the tokens of one request: its random numbers, its penalties, nothing shared with any other.

    The same seed, parameters and rows give the same tokens, whatever else runs. ``seed`` is the one really used (drawn when the parameters have
    None). Call `sample` for each row and `accept` with the token that was kept. Raises `BadRequest` for a logit bias that cannot be applied.
    """

    def __init__(self, params: SamplingParams, *, n_vocab: int, prompt: Sequence[int] = ()):
        self.params = params
        self.seed = random_seed() if params.seed is None else params.seed
        self._random = Random(self.seed)
        self._depth = 8.0                                    # logits below the maximum at which a small top-k is looked for
        self._bias_ids, self._bias = _bias_arrays(params, n_vocab)
        penalised = params.repeat_last_n != 0 and (params.repeat_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0)
        self._recent = RecentTokens(None if params.repeat_last_n < 0 else params.repeat_last_n, prompt) if penalised else None
        self._edited = np.empty(n_vocab, np.float32) if penalised or len(self._bias_ids) else None

    def sample(self, row: np.ndarray, allowed: np.ndarray | None = None) -> int:
        """The next token. Changes the random state, not the row and not the penalties. Raises `BackendFailed` for logits that are not numbers.

        allowed: bits of the tokens that may be chosen, as `ConstraintState.allowed` gives them; all others are masked before anything else.
        """
        if allowed is None:
            return self._choose(self._edit(row))
        bits = np.unpackbits(allowed, count=len(row), bitorder="little").view(bool)
        if np.count_nonzero(bits) > _FEW:
            return self._choose(self._edit(masked(row, allowed)))
        largest(row)                                         # a fault of the model is one wherever it is
        ids = np.flatnonzero(bits)
        if not len(ids):
            raise _unusable(np.full(1, -np.inf, np.float32))
        return int(ids[self._choose(self._edit(row)[ids])])

    def _choose(self, row: np.ndarray) -> int:
        if self.params.temperature == 0:
            return argmax(row)
        top = largest(row)
        if 0 < self.params.top_k <= _SHORT_LIST:
            return self._sample_short(row, top)
        ids = survivors(row, self.params, top)
        return int(ids[draw(row[ids], self.params.temperature, top, self._random.random())])

    def _sample_short(self, row: np.ndarray, top: float) -> int:
        """The same chain for a small top-k. Right after a step the caches hold weights, not us, and each numpy call costs several times what it does
        in a tight loop: one comparison pass, then plain Python over the few tokens that passed."""
        params = self.params
        k = min(params.top_k, len(row))
        ids = (row >= np.float32(top - self._depth)).nonzero()[0]
        if len(ids) < k:                                     # the depth follows the rows: it decides how long this takes, never a result
            ids = top_k(row, k)
            self._depth = min(self._depth * 1.2, 64.0)
        elif len(ids) > 4 * k:
            ids = keep_largest(row, ids, k)
            self._depth *= 0.9
        logits = row[ids].tolist()
        order = sorted(range(len(logits)), key=logits.__getitem__, reverse=True)[:k]   # stable: equals stay ascending by id
        kept = [logits[at] for at in order]
        if params.top_p < 1:
            kept = kept[: _nucleus([math.exp(logit - top) for logit in kept], params.top_p)]
        if params.min_p > 0:
            floor = top + math.log(params.min_p)
            kept = [logit for logit in kept if logit >= floor]
        temperature = max(params.temperature, _LOWEST_TEMPERATURE)
        weights = [math.exp((logit - top) / temperature) for logit in kept]
        target = self._random.random() * sum(weights)
        for at, weight in zip(order, weights):
            target -= weight
            if target < 0:
                return int(ids[at])
        return int(ids[order[len(kept) - 1]])

    def accept(self, token: int) -> None:
        """Count ``token`` for the penalties of the following ones."""
        if self._recent is not None:
            self._recent.add(token)

    def _edit(self, row: np.ndarray) -> np.ndarray:
        if self._edited is None:
            return row
        edited = self._edited
        np.copyto(edited, row)
        edited[self._bias_ids] += self._bias
        if self._recent is not None and len(self._recent.ids):
            ids = self._recent.ids
            before = edited[ids].astype(np.float64)
            after = np.minimum(penalise(before, self._recent.counts, self.params), _LARGEST_LOGIT)
            # What was NaN or +inf stays it: an edit must not hide a fault of the model.
            edited[ids] = np.where(before < np.inf, after, before)
        return edited


def _bias_arrays(params: SamplingParams, n_vocab: int) -> tuple[np.ndarray, np.ndarray]:
    for token, bias in params.logit_bias.items():
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < n_vocab:
            raise BadRequest(f"logit_bias names token {token!r}; ids of this model are whole numbers from 0 to {n_vocab - 1}.")
        if not isinstance(bias, (int, float)) or isinstance(bias, bool) or not (abs(bias) <= 1e6 or bias == -math.inf):
            raise BadRequest(f"The logit_bias of token {token} must be a number between -1e6 and 1e6, or -inf to ban it, not {bias!r}.")
    return np.fromiter(params.logit_bias.keys(), np.int64), np.fromiter(params.logit_bias.values(), np.float32)
