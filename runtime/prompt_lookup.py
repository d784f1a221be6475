"""Drafts by looking up where the newest tokens stood before: answers that summarise, edit or correct quote their prompt.

The idea is Apoorv Saxena's prompt lookup decoding. Here every n-gram of the conversation is indexed as it comes, so a lookup costs a few dictionary
reads whatever the length. A place that has been right so far is followed until it is wrong, even when its last words occur elsewhere too; and after a
word that an edit replaced, inserted or left out, it is taken up again.
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
_SOLID = 4                                # a match from here on is no coincidence, and worth taking up again after a difference
_TAKEN_UP, _REPLACED = (6, 0.8), (7, 0.7)     # kind and chance: the newest word stands near the difference; none does, and one word was replaced


class _Index:
    """Where each n-gram of ``tokens[base:length]`` was last followed by another token, and the place that is being followed."""

    def __init__(self, base: int, sizes: Seq[int], reach: int):
        self.base = self.length = base
        self.tables: list[tuple[int, int, dict[int, int]]] = [(size, (1 << _BITS * size) - 1, {}) for size in sizes]   # longest first
        self.newest = 0                                  # the last tokens, packed
        self.tail: list[int] = []
        self.source: int | None = None                   # the next token was tokens[source] before ...
        self.matched = 0                                 # ... and so many tokens before it were the same
        self.reach = reach                               # tokens around a difference in which a place is taken up again
        self.near = False                                # that is how `source` was found
        self.lost: tuple[int, int] | None = None         # where the followed text and the answer differed: tokens[0] should have been at [1]

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
                    if self.reach and self.matched >= _SOLID:
                        self.lost = source, at
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
            if self.source is None or matched >= min(max(self.matched, _SOLID if self.near else 0), _LONGEST):
                self.source, self.matched, self.near = place, matched, False
            break
        if self.lost is not None and (self.source is None or self.matched < _SOLID) and not (self.near and self.source is not None):
            self._take_up(tokens, *self.lost)
        return self.source is not None

    def _take_up(self, tokens: list[int], place: int, differs: int) -> None:
        """After the answer differed from the followed text: where it may have joined it again."""
        since = self.length - differs
        if since > self.reach:
            self.lost = None
            return
        around = tokens[place : min(place + self.reach, differs)]
        if tokens[-1] in around:
            self.source, self.matched, self.near = place + around.index(tokens[-1]) + 1, 1, True
        elif since == 1 and self.source is None and place + 1 < differs:
            self.source, self.matched, self.near = place + 1, 0, True

    @property
    def evidence(self) -> tuple[int, float]:
        """Kind of draft that follows ``source``, and its chance before that was learned."""
        if self.near and self.matched < _SOLID:
            return _TAKEN_UP if self.matched else _REPLACED
        kind = max(0, bisect_right(_LENGTHS, self.matched) - 1)
        return kind, _CHANCES[kind]


class PromptLookup:
    """Drafter without a model. See `edgeinfer.runtime.speculative.Drafter`.

    max_ngram, min_ngram: how many of the newest tokens must have stood somewhere before; longer ones are looked for first.
    reach: tokens around a difference between the answer and a text it quotes in which it is expected to join that text again; 0: not looked for.
    window: tokens of a conversation that are surely indexed, the newest ones; memory is bounded by twice as many, about 400 bytes each.
    end_ids: tokens that end an answer: a draft stops before them.
    """

    costly = False
    chance = _CHANCES[0]

    def __init__(self, *, max_ngram: int = 4, min_ngram: int = 2, reach: int = 8, window: int = 16384, end_ids: Collection[int] = ()):
        if not 1 <= min_ngram <= max_ngram <= 16:
            raise BadRequest(f"Prompt lookup needs 1 <= min_ngram <= max_ngram <= 16, not {min_ngram} and {max_ngram}.")
        if window < max_ngram:
            raise BadRequest(f"The window of prompt lookup must hold at least max_ngram ({max_ngram}) tokens, not {window}.")
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._reach = max(0, reach)
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
            index = self._indexes[seq] = _Index(max(0, len(tokens) - self._window), self._sizes, self._reach)
        index.extend(tokens)
        if not index.find(tokens):
            return Draft([])
        assert index.source is not None                  # find() said so
        return Draft(self._continued(tokens, index.source, limit), *index.evidence)

    def _continued(self, tokens: list[int], source: int, limit: int) -> list[int]:
        drafted = tokens[source : source + limit]
        period = len(tokens) - source                    # what repeats itself up to the end goes on repeating itself
        while len(drafted) < limit:
            drafted.append(drafted[-period])
        if not self._end_ids.isdisjoint(drafted):
            drafted = drafted[: next(at for at, token in enumerate(drafted) if token in self._end_ids)]
        return drafted

