"""Drafts by looking up where the newest tokens stood before: answers that summarise, edit or correct quote their prompt.

The idea is Apoorv Saxena's prompt lookup decoding. Here every n-gram of the conversation is indexed as it comes, so a lookup costs a few dictionary
reads whatever the length, and a place that has been right so far is followed until it is wrong, even when its last words occur elsewhere too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence as Seq
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from edgeinfer.errors import BadRequest
from edgeinfer.runtime.speculative import Draft

if TYPE_CHECKING:
    from edgeinfer.runtime.sequence import Sequence

_BITS = 24                                # of a packed n-gram for each token; no vocabulary has 16 million entries
_LONGEST = 32                             # a match is measured no further back than this
_CHECKED = 8                              # tokens at the end of what is indexed that are looked at to see whether the conversation was cut

# Length of the match -> how often the next token is the one that followed, until it is known better.
_LENGTHS = (2, 3, 4, 6, 9, 16)
_CHANCES = (0.35, 0.5, 0.65, 0.8, 0.9, 0.95)


class _Index:
    """Where each n-gram of ``tokens[base:length]`` was last followed by another token, and the place that is being followed."""

    def __init__(self, base: int, sizes: Seq[int]):
        self.base = self.length = base
        self.tables: list[tuple[int, int, dict[int, int]]] = [(size, (1 << _BITS * size) - 1, {}) for size in sizes]   # longest first
        self.newest = 0                                  # the last tokens, packed
        self.tail: list[int] = []
        self.source: int | None = None                   # the next token was tokens[source] before ...
        self.matched = 0                                 # ... and so many tokens before it were the same

    def holds(self, tokens: list[int]) -> bool:
        """``tokens`` is what was indexed, and possibly more."""
        return len(tokens) >= self.length and tokens[self.length - len(self.tail) : self.length] == self.tail

    def extend(self, tokens: list[int]) -> None:
        keep = self.tables[0][1]
        newest, source = self.newest, self.source
        for at in range(self.length, len(tokens)):
            token = tokens[at]
            for size, mask, table in self.tables:
                if at - self.base >= size:
                    table[newest & mask] = at
            newest = (newest << _BITS | token) & keep
            if source is not None:
                if tokens[source] == token:
                    source += 1
                    self.matched += 1
                else:
                    source = None
        self.newest, self.source, self.length = newest, source, len(tokens)
        self.tail = tokens[max(self.base, self.length - _CHECKED) :]

    def find(self, tokens: list[int]) -> bool:
        """Set ``source`` to where the newest tokens stood before: the longest match, the latest among equals. False when they are new."""
        for size, mask, table in self.tables:
            place = table.get(self.newest & mask) if self.length - self.base >= size else None
            if place is None:
                continue
            matched = size
            while matched < _LONGEST and place - 1 - matched >= self.base and tokens[place - 1 - matched] == tokens[self.length - 1 - matched]:
                matched += 1
            if self.source is None or matched >= min(self.matched, _LONGEST):
                self.source, self.matched = place, matched
            break
        return self.source is not None


class PromptLookup:
    """Drafter without a model. See `edgeinfer.runtime.speculative.Drafter`.

    max_ngram, min_ngram: how many of the newest tokens must have stood somewhere before; longer ones are looked for first.
    window: tokens of a conversation that are surely indexed, the newest ones; memory is bounded by twice as many, about 400 bytes each.
    end_ids: tokens that end an answer: a draft stops before them.
    """

    costly = False
    chance = _CHANCES[0]

    def __init__(self, *, max_ngram: int = 4, min_ngram: int = 2, window: int = 16384, end_ids: Collection[int] = ()):
        if not 1 <= min_ngram <= max_ngram <= 16:
            raise BadRequest(f"Prompt lookup needs 1 <= min_ngram <= max_ngram <= 16, not {min_ngram} and {max_ngram}.")
        if window < max_ngram:
            raise BadRequest(f"The window of prompt lookup must hold at least max_ngram ({max_ngram}) tokens, not {window}.")
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._window = window
        self._end_ids = frozenset(end_ids)
        self._indexes: WeakKeyDictionary[Sequence, _Index] = WeakKeyDictionary()

    def draft(self, sequences: Seq[Sequence], limits: Seq[int]) -> list[Draft]:
        return [self._draft(seq, limit) if limit > 0 else Draft([]) for seq, limit in zip(sequences, limits, strict=True)]

    def seconds(self, width: int) -> float:
        return 0.0

    def forget(self, seq: Sequence) -> None:
        self._indexes.pop(seq, None)

    def close(self) -> None:
        self._indexes.clear()

    def _draft(self, seq: Sequence, limit: int) -> Draft:
        tokens = seq.tokens
        index = self._indexes.get(seq)
        if index is None or not index.holds(tokens) or len(tokens) - index.base > 2 * self._window:
            index = self._indexes[seq] = _Index(max(0, len(tokens) - self._window), self._sizes)
        index.extend(tokens)
        if not index.find(tokens):
            return Draft([])
        assert index.source is not None                  # find() said so
        return Draft(self._continued(tokens, index.source, limit), *_evidence(index.matched))

    def _continued(self, tokens: list[int], source: int, limit: int) -> list[int]:
        drafted = tokens[source : source + limit]
        period = len(tokens) - source                    # what repeats itself up to the end goes on repeating itself
        while len(drafted) < limit:
            drafted.append(drafted[-period])
        if not self._end_ids.isdisjoint(drafted):
            drafted = drafted[: next(at for at, token in enumerate(drafted) if token in self._end_ids)]
        return drafted


def _evidence(matched: int) -> tuple[int, float]:
    kind = max(0, bisect_right(_LENGTHS, matched) - 1)
    return kind, _CHANCES[kind]
