"""Limits on thinking, and limits on the answer that leave the thinking alone.

A model thinks inside tags; a schema or grammar is about what follows them. `thinking_constraint` makes one constraint of both: nothing is demanded
inside the block, except that it ends after a number of tokens, and the answer's own constraint begins where the block has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from edgeinfer.errors import BackendFailed, BadRequest
from edgeinfer.runtime.answer_format import AnswerFormat
from edgeinfer.runtime.backend import Vocab
from edgeinfer.runtime.constraint import Constraint, ConstraintState

_SPACE = b" \t\r\n"


def thinking_constraint(
    format: AnswerFormat,
    start: Literal["open", "closed", "free"],
    vocab: Vocab,
    n_vocab: int,
    *,
    limit: int | None = None,
    inner: Constraint | None = None,
) -> Constraint | None:
    """What an answer must be like whose thinking may take ``limit`` tokens and whose rest must be like ``inner``; None where nothing is demanded.

    start: where the prompt left off, see `edgeinfer.runtime.answer_format.thinking_at_start`. A model that may open a block itself may do so before
    anything else. After ``limit`` tokens of thinking the closing tag is forced.
    """
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 0):
        raise BadRequest(f"thinking_budget must be a whole number from 0, not {limit!r}.")
    if start == "closed" or format.reasoning is None or (limit is None and inner is None):
        return inner
    return ThinkingConstraint(_Block.of(format.reasoning, vocab, n_vocab, guarded=inner is not None), start == "open", limit, inner)


@dataclass(frozen=True)
class _Block:
    """The tags of thinking as a vocabulary has them."""

    vocab: Vocab
    n_vocab: int
    open: bytes
    close: bytes
    open_tokens: tuple[int, ...]
    close_tokens: tuple[int, ...]
    thinking: np.ndarray                 # what may come while thinking, where an answer must follow: all but the end
    running_over: frozenset[int]         # tokens that may end the closing tag and begin the answer at once

    @classmethod
    def of(cls, tags: tuple[str, str], vocab: Vocab, n_vocab: int, *, guarded: bool) -> _Block:
        opening, closing = (tuple(vocab.encode(tag, add_special=False, parse_special=True, opening=False)) for tag in tags)
        thinking = np.full((n_vocab + 7) // 8, 0xFF, np.uint8)
        for token in vocab.end_ids:
            _clear(thinking, token)
        close = tags[1].encode()
        over = (token for token in range(n_vocab) if guarded and len(closing) > 1 and _runs_over(vocab.token_bytes(token), close))
        return cls(vocab, n_vocab, tags[0].encode(), close, opening, closing, thinking, frozenset(over))

    def bytes_of(self, token: int) -> bytes:
        return self.vocab.token_bytes(token) or self.vocab.token_text(token).encode()

    def only(self, token: int) -> np.ndarray:
        mask = np.zeros((self.n_vocab + 7) // 8, np.uint8)
        mask[token >> 3] |= 1 << (token & 7)
        return mask


def _clear(mask: np.ndarray, token: int) -> None:
    if token >> 3 < len(mask):
        mask[token >> 3] &= 0xFF ^ (1 << (token & 7))


def _runs_over(text: bytes, close: bytes) -> bool:
    """Whether ``text`` may complete the closing tag and go on with more than white space."""
    for end in range(1, len(text)):
        if text[end:].strip(_SPACE) and text[end - 1] == close[-1] and (close.endswith(text[:end]) or text[:end].endswith(close)):
            return True
    return False


class ThinkingConstraint:
    """A budget for thinking before an answer with a constraint of its own; make it with `thinking_constraint`."""

    def __init__(self, block: _Block, opened: bool, limit: int | None, inner: Constraint | None):
        self._block = block
        self._opened = opened
        self._limit = limit
        self._inner = inner

    def start(self) -> ConstraintState:
        return _State(self._block, self._opened, self._limit, self._inner.start() if self._inner is not None else None)


class _State:
    """Before the block -> (its opening tag) -> inside -> (its closing tag, forced) -> after it."""

    def __init__(self, block: _Block, opened: bool, limit: int | None, inner: ConstraintState | None):
        self._block = block
        self._limit = limit
        self._inner = inner
        self._place: Literal["before", "inside", "after"] = "before"
        self._forced: Iterator[int] = iter(())
        self._next: int | None = None                    # the only token that may follow
        self._text = b""                                 # the end of what was said, as long as a tag may begin in it
        self._thought = 0
        if opened:
            self._enter()

    def allowed(self) -> np.ndarray | None:
        if self._next is not None:
            return self._block.only(self._next)
        if self._place == "inside":
            return self._while_thinking()
        answer = self._inner.allowed() if self._inner is not None else None
        if self._place == "after" or answer is None:
            return answer
        mask = answer.copy()                             # before the block: the answer, or the tag
        first = self._block.open_tokens[0]
        mask[first >> 3] |= 1 << (first & 7)
        return mask

    def accept(self, token: int) -> None:
        if self._next is not None:
            if token != self._next:
                raise BackendFailed(f"Token {token} was taken where only {self._next} was allowed; this is a fault of the engine.")
            self._follow()
        elif self._place == "before":
            self._accept_before(token)
        elif self._place == "inside":
            self._accept_thinking(token)
        elif self._inner is not None:
            self._inner.accept(token)

    @property
    def complete(self) -> bool:
        return self._place == "after" and self._next is None and self._inner is not None and self._inner.complete

    # ------------------------------------------------------------------------------------------------------------ internals

    def _force(self, tokens: tuple[int, ...]) -> None:
        self._forced = iter(tokens)
        self._follow()

    def _follow(self) -> None:
        self._next = next(self._forced, None)
        if self._next is None and self._place == "before":
            self._enter()

    def _enter(self) -> None:
        self._place = "inside"
        self._text = b""
        self._spent()

    def _spent(self) -> None:
        if self._limit is not None and self._thought >= self._limit:
            self._place = "after"
            self._force(self._block.close_tokens)

    def _accept_before(self, token: int) -> None:
        if self._inner is not None:
            answer = self._inner.allowed()
            if token == self._block.open_tokens[0] and answer is not None and not answer[token >> 3] & 1 << (token & 7):
                self._force(self._block.open_tokens[1:])
            else:
                self._place = "after"
                self._inner.accept(token)
            return
        self._text = (self._text + self._block.bytes_of(token)).lstrip(_SPACE)
        if self._text.startswith(self._block.open):
            self._enter()
        elif not self._block.open.startswith(self._text):
            self._place = "after"

    def _accept_thinking(self, token: int) -> None:
        close = self._block.close
        self._text += self._block.bytes_of(token)
        if close in self._text:
            self._place = "after"
            return
        self._text = self._text[-(len(close) - 1):]
        self._thought += 1
        self._spent()

    def _while_thinking(self) -> np.ndarray | None:
        if self._inner is None:
            return None
        mask, close = self._block.thinking, self._block.close
        if self._block.running_over and any(self._text.endswith(close[:count]) for count in range(1, len(close))):
            mask = mask.copy()
            for token in self._block.running_over:
                if self._reaches_past(token, close):
                    _clear(mask, token)
        return mask

    def _reaches_past(self, token: int, close: bytes) -> bool:
        _, found, rest = (self._text + self._block.bytes_of(token)).partition(close)
        return bool(found and rest.strip(_SPACE))
