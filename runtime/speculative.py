"""Speculative decoding: who proposes, how much is proposed, and when to leave it.

A drafter guesses how an answer goes on; the target model computes the guesses in one forward, beside the newest token, and the sampler draws from
each row in turn for as long as it draws what was guessed. So the text is the target's own whatever the drafter says, and the only question is whether
the extra rows cost less than the tokens they win. That is measured, never assumed:

    price of a row    from the time of forwards by their number of rows (`StepCost`)
    chance of a token from what became of earlier drafts of the same kind, in this answer and in all others

Rows go one by one to the answer whose next guess is likeliest to be right; the number of rows with most tokens per second wins. And an answer may
lose only what it has won by drafts before, a small start, and one token in a hundred: whatever the estimates say, a text that cannot be guessed is
not slowed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from edgeinfer.errors import BadRequest
from edgeinfer.runtime.step_cost import StepCost

if TYPE_CHECKING:
    from edgeinfer.runtime.sequence import Sequence

_START = 1.5                              # tokens that an answer may lose before its drafts won any
_ALLOWANCE = 0.01                         # tokens it may lose for each one made: drafts are tried again, but rarely
_LARGEST_CREDIT = 12.0                    # winnings that may be risked; enough for the longest drafts
_LEAST_GAIN = 1.05                        # expected tokens per second with drafts, in times of those without
_OWN_MEMORY, _COMMON_MEMORY = 8.0, 100.0  # guesses that an estimate remembers: one answer's, everybody's
_PRIOR_WEIGHT = 4.0                       # guesses that an estimate is worth where it stands in for experience
_FADING = 0.998                           # of what all answers learned, for each step: nothing is given up for good
_SUREST, _LEAST = 0.99, 0.03              # chances beyond these are not told apart
_HOPELESS = math.log(_LEAST)


class Draft(NamedTuple):
    """How an answer may go on. ``kind`` says what the guess rests on: chances are learned per kind. ``chance`` of a token stands in before that."""

    tokens: list[int]
    kind: int = 0
    chance: float = 0.5


class Drafter(Protocol):
    """Guesses continuations. Called from the engine's thread only."""

    costly: bool                                 # drafting takes time: how far is decided before; else a draft is made first and cut to what pays
    chance: float                                # of a token to be right, for what is decided before

    def draft(self, sequences: Seq[Sequence], limits: Seq[int]) -> list[Draft]:
        """For each sequence at most its limit of tokens that may follow ``seq.tokens``; fewer or none where it has no idea. Never fails."""
        ...

    def seconds(self, width: int) -> float:
        """What one more token for each of ``width`` sequences takes to draft; 0 where that is nothing worth counting."""
        ...

    def forget(self, seq: Sequence) -> None:
        """The sequence is over, or starts again from its tokens."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


@dataclass(frozen=True)
class SpeculationStats:
    """Totals since the engine started."""

    steps: int = 0                       # steps in which drafting was considered
    drafts: int = 0                      # drafts that were verified, one answer each
    drafted: int = 0                     # tokens in them
    accepted: int = 0                    # tokens of them that were right
    switched_off: int = 0                # times an answer had lost what drafts may lose, and went on without for a while

    @property
    def accept_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass
class _Record:
    """How many of the newest guesses were right. Old ones count less and less."""

    right: float = 0.0
    tried: float = 0.0

    def add(self, right: int, wrong: int, memory: float) -> None:
        fade = max(0.0, 1 - 1 / memory) ** (right + wrong)
        self.right = self.right * fade + right
        self.tried = self.tried * fade + right + wrong

    def chance(self, otherwise: float) -> float:
        return (self.right + otherwise * _PRIOR_WEIGHT) / (self.tried + _PRIOR_WEIGHT)


@dataclass
class _Account:
    """One answer's experience, and the tokens it may still lose."""

    credit: float = _START
    records: dict[int, _Record] = field(default_factory=dict)      # by kind of draft
    kind: int = 0                        # of the draft under way ...
    price: float = 0.0                   # ... and what each of its tokens costs, in tokens
    off: bool = False


class Speculator:
    """Proposes how answers go on, watches whether that pays, and stops where it does not. Owned by the engine's thread, but for `stats`.

    max_draft: longest draft of one answer in one step. Deterministic: the same sequences and measurements give the same drafts.
    """

    def __init__(self, drafter: Drafter, *, max_draft: int = 15):
        if not isinstance(max_draft, int) or isinstance(max_draft, bool) or not 1 <= max_draft <= 128:
            raise BadRequest(f"max_draft must be a whole number from 1 to 128, not {max_draft!r}.")
        self._drafter = drafter
        self._max_draft = max_draft
        self._costs = StepCost()
        self._common: dict[int, _Record] = {}
        self._accounts: WeakKeyDictionary[Sequence, _Account] = WeakKeyDictionary()
        self._steps = self._drafts = self._drafted = self._accepted = self._switched_off = 0

    def stats(self) -> SpeculationStats:
        """The totals so far. May be called from any thread."""
        return SpeculationStats(self._steps, self._drafts, self._drafted, self._accepted, self._switched_off)

    def propose(self, sequences: Seq[Sequence], room: int, *, n_ctx: int, others: int = 0) -> None:
        """Set ``seq.draft`` of each of the ``sequences``, all of which decode; [] for no draft.

        room: drafted tokens that the step can take in all. n_ctx: tokens one sequence may have. others: decoders in the same batch that must not be
        drafted.
        """
        for seq in sequences:
            seq.draft = []
        if not sequences:
            return
        self._steps += 1
        for record in self._common.values():
            record.right *= _FADING
            record.tried *= _FADING
        if not self._costs.known or room < 1:
            return
        accounts = [self._account(seq) for seq in sequences]
        for account in accounts:
            if account.credit < _START:
                account.credit += _ALLOWANCE
        longest = min(self._max_draft, room)
        limits = [min(longest, seq.draft_limit(n_ctx)) for seq in sequences]
        width = len(sequences) + others
        if self._drafter.costly:
            drafts = [Draft([], 0, self._drafter.chance)] * len(sequences)
            lengths = self._lengths(accounts, drafts, limits, room, width)
            if not any(lengths):
                return
            drafts = self._drafter.draft(sequences, lengths)
        else:
            drafts = self._drafter.draft(sequences, limits)
            lengths = self._lengths(accounts, drafts, [len(draft.tokens) for draft in drafts], room, width)
        chosen = [draft.tokens[:length] for draft, length in zip(drafts, lengths, strict=True)]
        total = sum(map(len, chosen))
        if not total:
            return
        price = self._tokens(width, total, [len(tokens) for tokens in chosen]) / total
        for seq, account, draft, tokens in zip(sequences, accounts, drafts, chosen, strict=True):
            seq.draft, account.kind, account.price = tokens, draft.kind, price

    def settle(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """Of the ``drafted`` tokens of ``seq.draft`` that were computed, the first ``accepted`` were what the sampler drew."""
        if drafted < 1:
            return
        account = self._account(seq)
        wrong = int(accepted < drafted)                  # what follows the first wrong guess was never tried
        account.records.setdefault(account.kind, _Record()).add(accepted, wrong, _OWN_MEMORY)
        self._common.setdefault(account.kind, _Record()).add(accepted, wrong, _COMMON_MEMORY)
        account.credit = min(_LARGEST_CREDIT, account.credit + accepted - drafted * account.price)
        self._drafts += 1
        self._drafted += drafted
        self._accepted += accepted

    def measured(self, rows: int, seconds: float) -> None:
        """A step that only decoded, in one batch of ``rows`` rows of logits, took ``seconds``."""
        self._costs.add(rows, seconds)

    def forget(self, seq: Sequence) -> None:
        """The sequence ended or was preempted."""
        self._accounts.pop(seq, None)
        self._drafter.forget(seq)

    def close(self) -> None:
        """Frees a draft model."""
        self._accounts.clear()
        self._drafter.close()

    # ----------------------------------------------------------------------------------------------------------- internals

    def _account(self, seq: Sequence) -> _Account:
        account = self._accounts.get(seq)
        if account is None:
            account = self._accounts[seq] = _Account()
        return account

    def _lengths(self, accounts: list[_Account], drafts: list[Draft], limits: list[int], room: int, width: int) -> list[int]:
        """How many tokens of each draft to verify: at most its limit, what the answer can afford, and what is worth its rows."""
        if not any(limits):
            return limits
        chances = self._chances(accounts, drafts)
        limits = [min(limit, int(_HOPELESS / math.log(chance))) for limit, chance in zip(limits, chances, strict=True)]
        prices = self._prices(width, max(limits))
        limits = [min(limit, self._affordable(account, prices)) if limit else 0 for limit, account in zip(limits, accounts, strict=True)]
        return self._worthwhile(chances, limits, room, width) if any(limits) else limits

    def _chances(self, accounts: list[_Account], drafts: list[Draft]) -> list[float]:
        """Of each draft: how likely a token of it is right, given that those before it are."""
        chances = []
        for account, draft in zip(accounts, drafts, strict=True):
            common = self._common.get(draft.kind, _NOTHING).chance(draft.chance)
            chances.append(min(_SUREST, max(_LEAST, account.records.get(draft.kind, _NOTHING).chance(common))))
        return chances

    def _tokens(self, width: int, rows: int, lengths: list[int]) -> float:
        """Price of ``rows`` more rows beside ``width`` decoders and of drafting them, in tokens that the same time would make without drafts."""
        costs = self._costs
        plain = costs.seconds(width)
        extra = costs.seconds(width + rows) - plain
        if self._drafter.costly:
            extra += sum(self._drafter.seconds(sum(length > depth for length in lengths)) for depth in range(max(lengths)))
        return max(0.0, extra) * width / plain

    def _prices(self, width: int, longest: int) -> list[float]:
        """Price of a draft of 1, 2, 3, ... tokens for one answer; never falling."""
        prices: list[float] = []
        for length in range(1, longest + 1):
            price = self._tokens(width, length, [length])
            prices.append(max(price, prices[-1]) if prices else price)
        return prices

    def _affordable(self, account: _Account, prices: list[float]) -> int:
        """The longest draft that the answer could lose whole."""
        count = bisect_right(prices, account.credit)
        if not count and not account.off:
            self._switched_off += 1
        account.off = not count
        return count

    def _worthwhile(self, chances: list[float], limits: list[int], room: int, width: int) -> list[int]:
        """How many tokens of each draft to verify, within its limit, for most tokens per second; none at all where that is not clearly more."""
        pairs = enumerate(zip(chances, limits, strict=True))
        guesses = sorted((-(chance ** depth), depth, at) for at, (chance, limit) in pairs for depth in range(1, limit + 1))
        lengths, expected = [0] * len(limits), 0.0
        best, best_rate = list(lengths), 1.0
        for rows, (chance, depth, at) in enumerate(guesses[:room], 1):
            lengths[at] = depth
            expected -= chance
            price = self._tokens(width, rows, lengths)
            rate = (width + expected) / (width + price)
            drafted = sum(length > 0 for length in lengths)
            if rate > best_rate and drafted + expected >= _LEAST_GAIN * (drafted + price):
                best, best_rate = list(lengths), rate
        return best


_NOTHING = _Record()
