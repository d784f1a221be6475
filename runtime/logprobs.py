"""How likely the model found its tokens: log-softmax of the raw rows of logits, before any sampling parameter.

An answer's entries travel with its text, and text may be held back. The rule: a token's entry leaves with the piece that completes the token's text.
Tokens without text of their own (half a character, a marker that is not shown) leave with the next piece, or at the end with a last one, which may be
empty. What is not part of the answer has no entry: the end-of-turn token, and tokens that lie wholly in the stop string that ended it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import numpy as np

from edgeinfer.runtime.sampling import largest, mass_of, top_k
from edgeinfer.runtime.values import TokenLogprob

LOWEST = -9999.0                         # stands for the logarithm of nothing: JSON has no infinities


def token_logprob(row: np.ndarray, token: int, alternatives: int) -> TokenLogprob:
    """The entry of ``token`` by the raw logits ``row``, with so many of the likeliest tokens. Raises `BackendFailed` for logits that are no numbers."""
    top = largest(row)
    norm = top + math.log(mass_of(row, top))
    best: tuple[tuple[int, float], ...] = ()
    if alternatives:
        ids = top_k(row, alternatives)
        order = np.argsort(-row[ids], kind="stable")         # ids ascend: of equals the lower one first
        best = tuple((int(ids[at]), _bounded(float(row[ids[at]]) - norm)) for at in order)
    return TokenLogprob(token, _bounded(float(row[token]) - norm), best)


def _bounded(logprob: float) -> float:
    return min(max(logprob, LOWEST), 0.0)


class AnswerLogprobs:
    """The entries of one answer that wait for their text. Positions are characters of the answer."""

    def __init__(self, alternatives: int):
        self._alternatives = alternatives
        self._held: deque[tuple[int, int, TokenLogprob]] = deque()       # where the token's text starts, by what it is complete, its entry
        self._decoded = self._emitted = 0

    def add(self, row: np.ndarray, token: int, text: str) -> None:
        """``token`` was drawn from ``row`` and completed the characters ``text``, which may be none."""
        start = self._decoded
        self._decoded += len(text)
        self._held.append((start, max(self._decoded, start + 1), token_logprob(row, token, self._alternatives)))

    def released(self, text: str) -> tuple[TokenLogprob, ...]:
        """Entries to send with ``text``, the next piece of the answer."""
        self._emitted += len(text)
        return self._take(lambda start, end: end <= self._emitted)

    def rest(self, text: str, *, stopped: bool) -> tuple[TokenLogprob, ...]:
        """Entries to send with the last piece. ``stopped``: a stop string ended the answer, and what came with or after it is not part of it."""
        self._emitted += len(text)
        return self._take(lambda start, end: start < self._emitted or not stopped)

    def _take(self, ready: Callable[[int, int], bool]) -> tuple[TokenLogprob, ...]:
        taken = []
        while self._held and ready(*self._held[0][:2]):
            taken.append(self._held.popleft()[2])
        return tuple(taken)


class PromptScores:
    """The entries of a prompt that is being read. Reading it again after a preemption changes nothing."""

    def __init__(self, prompt: list[int], alternatives: int):
        self._prompt = tuple(prompt)
        self._alternatives = alternatives
        self._entries: list[TokenLogprob | None] = [None]                # nothing precedes the first token
        self.complete = False                            # all rows were seen, the last of which is the answer's

    @property
    def entries(self) -> tuple[TokenLogprob | None, ...]:
        return tuple(self._entries)

    def add(self, start: int, rows: np.ndarray) -> None:
        """``rows`` are the logits at positions ``start``, ``start`` + 1, ...; the one at position p says how likely token p + 1 was."""
        known = len(self._entries)
        for row, token in zip(rows[known - 1 - start :], self._prompt[known:]):
            self._entries.append(token_logprob(row, token, self._alternatives))
        self.complete = start + len(rows) == len(self._prompt)
