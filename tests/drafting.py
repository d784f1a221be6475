"""What tests of speculative decoding share."""

from __future__ import annotations

from collections.abc import Callable

from edgeinfer.runtime.backends.fake import ScriptedBackend
from edgeinfer.runtime.speculative import Draft


class Text:
    """What drafters and the speculator see of a sequence."""

    def __init__(self, tokens, limit: int = 10_000):
        self.tokens = list(tokens)
        self.draft: list[int] = []
        self.limit = limit

    def draft_limit(self, n_ctx: int) -> int:
        return max(0, min(self.limit, n_ctx - len(self.tokens)))


class Eager:
    """Always drafts something, right or wrong: an engine must not care."""

    costly = False
    chance = 0.9

    def __init__(self, guess: Callable[[list[int]], list[int]]):
        self.guess = guess

    def draft(self, sequences, limits):
        return [Draft(self.guess(seq.tokens)[:limit], 0, 0.99) for seq, limit in zip(sequences, limits, strict=True)]

    def seconds(self, width: int) -> float:
        return 0.0

    def forget(self, seq) -> None:
        pass

    def close(self) -> None:
        pass


def counting(tokens: list[int]) -> int:
    """The next byte in order, whatever came before."""
    return (tokens[-1] + 1) % 256


def other(tokens: list[int]) -> int:
    return (tokens[-1] + 2) % 256


def model(next_token=counting, **options) -> ScriptedBackend:
    return ScriptedBackend(next_token, **options)
