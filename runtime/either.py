"""An answer of one kind or another: a value that fits a schema, or a call of a tool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.errors import BackendFailed
from edgeinfer.runtime.constraint import Constraint, ConstraintState


class Either:
    """An answer that keeps to one of ``kinds``. Which one is decided by its tokens: those it can no longer be are left out."""

    def __init__(self, kinds: Sequence[Constraint]):
        self._kinds = tuple(kinds)

    def start(self) -> ConstraintState:
        return _State([kind.start() for kind in self._kinds])


class _State:
    def __init__(self, kinds: list[ConstraintState]):
        self._kinds = kinds                              # that the answer can still be
        self._masks: list[np.ndarray | None] | None = None

    def allowed(self) -> np.ndarray | None:
        if len(self._kinds) == 1:
            return self._kinds[0].allowed()
        self._masks = [kind.allowed() for kind in self._kinds]
        masks = [mask for mask in self._masks if mask is not None]
        return np.bitwise_or.reduce(masks) if len(masks) == len(self._masks) else None

    def accept(self, token: int) -> None:
        if len(self._kinds) > 1:
            masks = self._masks if self._masks is not None else [kind.allowed() for kind in self._kinds]
            self._kinds = [kind for kind, mask in zip(self._kinds, masks) if mask is None or mask[token >> 3] >> (token & 7) & 1]
            self._masks = None
            if not self._kinds:
                raise BackendFailed(f"Token {token} does not belong to any kind of answer that was asked for.")
        for kind in self._kinds:
            kind.accept(token)

    @property
    def complete(self) -> bool:
        return all(kind.complete for kind in self._kinds)
