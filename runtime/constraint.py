"""The seam between the sampler and whatever limits what an answer may say: a grammar, a schema, a budget for thinking."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class ConstraintState(Protocol):
    """How far one answer has come. Used by the engine's thread alone, between two tokens: it must be quick."""

    def allowed(self) -> np.ndarray | None:
        """The tokens that may come next, one bit each: uint8 of shape (ceil(n_vocab / 8),), bit ``t & 7`` of byte ``t >> 3``. None: all may.

        Valid until the next call of any method. End-of-turn tokens are allowed exactly where the answer may end.
        """
        ...

    def accept(self, token: int) -> None:
        """The answer goes on with ``token``, which was allowed. Raises `BackendFailed` when it was not."""
        ...

    @property
    def complete(self) -> bool:
        """Nothing may follow: the answer ends here without waiting for an end-of-turn token."""
        ...


class Constraint(Protocol):
    """What answers must be like, compiled once and shared by any number of them."""

    def start(self) -> ConstraintState:
        """A fresh state for one answer. From any thread."""
        ...
