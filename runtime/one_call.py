"""Answers that end with their first call of a tool, for clients and templates that take one at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgeinfer.runtime.answer_parser import AnswerParser
from edgeinfer.runtime.backend import Vocab
from edgeinfer.runtime.constraint import Constraint, ConstraintState
from edgeinfer.runtime.detokenizer import Detokenizer


class OneCall:
    """Nothing is demanded beyond ``inner``, but the answer is over where its first call is.

    parser: makes a parser for one answer. shown: the control tokens it has to see.
    """

    def __init__(self, parser: Callable[[], AnswerParser], vocab: Vocab, shown: frozenset[int], inner: Constraint | None = None):
        self._parser = parser
        self._vocab = vocab
        self._shown = shown
        self._inner = inner

    def start(self) -> ConstraintState:
        return _State(self._parser(), Detokenizer(self._vocab, self._shown), self._inner.start() if self._inner is not None else None)


class _State:
    def __init__(self, parser: AnswerParser, detokenizer: Detokenizer, inner: ConstraintState | None):
        self._parser = parser
        self._detokenizer = detokenizer
        self._inner = inner

    def allowed(self) -> np.ndarray | None:
        return self._inner.allowed() if self._inner is not None else None

    def accept(self, token: int) -> None:
        self._parser.push(self._detokenizer.push(token))
        if self._inner is not None:
            self._inner.accept(token)

    @property
    def complete(self) -> bool:
        return self._parser.call_ended or (self._inner is not None and self._inner.complete)
