"""The seam between the engine and whatever multiplies the matrices.

A backend owns slots 0 .. ``max_slots`` - 1. A slot holds the keys and values (KV) of one sequence's first ``length`` tokens. The engine decides which
tokens live where; the backend only computes. One thread calls everything here, except `Backend.abort`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence as Seq
from typing import Protocol

import numpy as np

from edgeinfer.runtime.values import BackendInfo, StepPlan, StepResult


class Vocab(Protocol):
    """Text to token ids and back, as the model was trained. Safe to call from any thread."""

    bos_id: int | None
    eos_id: int | None                           # the one templates print; `end_ids` are all that end a turn
    adds_bos: bool                               # encode() with add_special puts BOS in front
    end_ids: frozenset[int]                      # every token that ends a turn or a text
    chat_template: str | None
    markers: tuple[str, ...]                     # texts of control tokens: "<|im_start|>", "</s>", ...
    user_markers: tuple[str, ...]                # texts of added tokens that are not control: "<think>", HTML tags, ...

    def encode(self, text: str, *, add_special: bool, parse_special: bool, opening: bool = True) -> list[int]:
        """Token ids. ``add_special`` adds BOS/EOS as the model wants; ``parse_special`` lets marker texts become their control tokens.

        ``opening``: the text opens a prompt; some vocabularies put a space before its first word.
        """
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for in running text; empty for control tokens."""
        ...

    def token_text(self, token: int) -> str:
        """How the token is written in templates: "<s>" for BOS; empty string for an id the vocabulary lacks."""
        ...


class Backend(Protocol):
    """Runs step plans. See `edgeinfer.runtime.backends.fake` for the smallest complete one."""

    info: BackendInfo
    vocab: Vocab

    def forward(self, plan: StepPlan) -> StepResult:
        """Run the plan's chunks and extend their slots. Faults are values in the result and hurt only the slots named there."""
        ...

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        """Make ``dst`` hold the first ``length`` tokens of ``src``. ``dst`` must be empty; ``src`` is unchanged."""
        ...

    def truncate(self, slot: int, length: int) -> bool:
        """Keep the first ``length`` tokens of a slot. False, and nothing changed, when the memory cannot (the caller clears instead). 0 always works."""
        ...

    def reusable(self, slot: int, length: int, wanted: int) -> int:
        """Of a slot that holds ``length`` tokens: how many of the first ``wanted`` may be kept (0 when a sliding window has moved past them)."""
        ...

    def shift(self, slot: int, keep: int, drop: int) -> None:
        """Forget tokens ``keep .. keep + drop`` of a slot and move all later ones down by ``drop``. Only where ``info.can_shift``.

        Where ``info.shared_cells``, none of the later ones may be shared with another slot: they would move for that one too.
        """
        ...

    def export_slot(self, slot: int) -> bytes:
        """The slot's KV in a form that `import_slot` of the same model and KV types takes back. Only where ``info.can_export``."""
        ...

    def import_slot(self, slot: int, data: bytes) -> bool:
        """Fill an empty slot with what `export_slot` gave. False, and the slot is still empty, when there is no room or the data is not accepted."""
        ...

    def embed(self, tokens: Seq[int]) -> Generator[None, None, np.ndarray]:
        """The tokens' last hidden states, pooled as the model wants: float32 of shape (n_embd,), not normalised. Only where ``info.can_embed``.

        It computes one piece between two yields (no more than a prompt chunk; all, where attention looks both ways) and returns the vector at the end.
        Other calls may come in between and neither change it nor are changed. A new one ends the one before. An aborted piece is computed again.
        """
        ...

    def rest(self) -> None:
        """Nothing to do for now: give back what is only needed while computing. The next ``forward`` takes it again."""
        ...

    def drop_kv(self) -> None:
        """Every slot is empty and nobody is expected soon: give back the memory of the KV. Whatever needs it next takes it again."""
        ...

    def abort(self) -> None:
        """From any thread: make a running ``forward`` return soon, its unfinished chunks in ``aborted``, or ``embed`` yield. No effect otherwise."""
        ...

    def close(self) -> None:
        """Free all native memory now. Repeating it is harmless."""
        ...


