"""The seam between the sampler and whatever limits what an answer may say: a grammar, a schema, a budget for thinking."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from edgeinfer.errors import BackendFailed, EdgeInferError


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


class CheckedState:
    """A state that may come from anybody: whatever goes wrong in it becomes a `BackendFailed`, which ends its own request and no other."""

    def __init__(self, state: ConstraintState, n_vocab: int):
        self._state = state
        self._bytes = (n_vocab + 7) // 8

    def allowed(self) -> np.ndarray | None:
        try:
            bits = self._state.allowed()
        except Exception as error:                       # foreign code: it can raise anything that Python can
            raise _failed(error) from error
        if bits is not None and not (isinstance(bits, np.ndarray) and bits.dtype == np.uint8 and bits.shape == (self._bytes,)):
            raise BackendFailed(f"The constraint of this request gave a mask that is not an array of {self._bytes:,} bytes; it was made for another model.")
        return bits

    def accept(self, token: int) -> None:
        try:
            self._state.accept(token)
        except Exception as error:
            raise _failed(error) from error

    @property
    def complete(self) -> bool:
        try:
            return self._state.complete
        except Exception as error:
            raise _failed(error) from error


def checked(constraint: Constraint | None, n_vocab: int) -> CheckedState | None:
    """A fresh state of ``constraint``, if there is one."""
    return CheckedState(constraint.start(), n_vocab) if constraint is not None else None


def _failed(error: Exception) -> EdgeInferError:
    return error if isinstance(error, EdgeInferError) else BackendFailed(f"The constraint of this request failed: {type(error).__name__}: {error}.")
