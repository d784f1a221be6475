"""A scripted backend: says what it is told to, byte by byte, and checks that the engine above it keeps the rules.

It makes everything about scheduling, streaming, stop strings and cancellation testable in milliseconds and free of model luck. Tokens are bytes
(ids 0..255), a few control tokens, and any further byte strings a script names.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Sequence

import numpy as np

from edgeinfer.errors import BackendFailed
from edgeinfer.runtime.values import BackendInfo, Chunk, StepPlan, StepResult

BOS, END = 256, 257
_EMBEDDING = 8                           # values of an embedding
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CONTROL = {BOS: "<|im_start|>", END: "<|im_end|>"}


class ByteVocab:
    """Bytes as tokens, two control markers, and ``extra`` tokens from id 258 on."""

    def __init__(self, extra: Sequence[bytes] = (), *, chat_template: str | None = CHATML, adds_bos: bool = False):
        self.extra = list(extra)
        self.bos_id: int | None = BOS
        self.eos_id: int | None = END
        self.adds_bos = adds_bos
        self.end_ids = frozenset({END})
        self.chat_template = chat_template
        self.markers = tuple(_CONTROL.values())
        self.user_markers: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return 258 + len(self.extra)

    def encode(self, text: str, *, add_special: bool, parse_special: bool, opening: bool = True) -> list[int]:
        ids = [BOS] if add_special and self.adds_bos else []
        data = text.encode()
        while data:
            hit = next((token for token, marker in _CONTROL.items() if parse_special and data.startswith(marker.encode())), None)
            ids.append(data[0] if hit is None else hit)
            data = data[1:] if hit is None else data[len(_CONTROL[hit]):]
        return ids

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b"" if token < 258 else self.extra[token - 258]

    def token_text(self, token: int) -> str:
        return _CONTROL.get(token) or self.token_bytes(token).decode("utf-8", "replace")


class ScriptedBackend:
    """Answers every prompt with a script.

    script: byte strings, one token each (a one-byte string is the byte's own token); after the last comes END. Or a function from the tokens of the
        sequence so far to the next token id, for answers that depend on the prompt.
    kv_cells: tokens that all slots together may hold (None: no limit); a copied prefix shares its cells, as on llama.cpp's unified cache.
    before_forward: called with each plan before it runs; may block (a slow prefill) or raise.
    before_embed: called with each piece of at most ``max_batch`` tokens before it is embedded, likewise.
    adapters: names that chunks may ask for; an adapter changes nothing but is part of what a slot's KV was computed with.
    """

    def __init__(
        self,
        script: Sequence[bytes] | Callable[[list[int]], int] = (b"ok",),
        *,
        n_ctx: int = 512,
        max_slots: int = 4,
        max_seqs: int = 0,
        max_batch: int = 64,
        max_logits: int = 0,
        kv_cells: int | None = None,
        attention_depth: int = 0,
        adapters: tuple[str, ...] = (),
        before_forward: Callable[[StepPlan], None] | None = None,
        before_embed: Callable[[Sequence[int]], None] | None = None,
        vocab: ByteVocab | None = None,
    ):
        self._next: Callable[[list[int]], int]
        if callable(script):
            self.vocab = vocab or ByteVocab()
            self._next = script
        else:
            self.vocab = vocab or ByteVocab([piece for piece in script if len(piece) != 1])
            ids = [piece[0] if len(piece) == 1 else 258 + self.vocab.extra.index(piece) for piece in script]
            self._next = lambda tokens: self._scripted(tokens, ids)
        self._spoken: tuple[list[int], int] = ([], 0)    # the sequence served last, and how much of the script it has said
        self.info = BackendInfo(
            engine="fake", device="cpu", model="scripted", quantization="none", n_vocab=self.vocab.size, n_ctx=n_ctx, n_ctx_train=n_ctx,
            max_slots=max_slots, max_seqs=max_seqs, max_batch=max_batch, max_logits=max_logits, kv_type="none", kv_bytes_per_token=1, weight_bytes=0,
            kv_cells=kv_cells or 0, fingerprint="scripted", adapters=adapters, shared_cells=True, can_shift=True, can_export=True,
            can_embed=True, n_embd=_EMBEDDING,
            attention_depth=attention_depth,
        )
        self._cells = kv_cells
        self._before_forward = before_forward
        self._before_embed = before_embed
        self._slots: dict[int, list[int]] = {slot: [] for slot in range(max_slots)}
        self._adapter: dict[int, str | None] = dict.fromkeys(range(max_slots))
        self._abort = threading.Event()
        self.plans: list[StepPlan] = []                  # everything that ran, for exact assertions
        self.tokens_computed = 0
        self.rests = 0
        self.kv_drops = 0
        self.closed = False

    def _scripted(self, tokens: list[int], ids: list[int]) -> int:
        # The answer starts after the last piece of the prompt; its length so far is the index into the script. The engine never tells a backend where
        # the prompt ended, so match the longest tail of the tokens that is a head of the script.
        previous, said = self._spoken
        if len(tokens) == len(previous) + 1 and said < len(ids) and tokens[-1] == ids[said] and tokens[:-1] == previous:
            said += 1                                    # the usual step, without the search
        else:
            said = next((n for n in range(min(len(ids), len(tokens)), 0, -1) if tokens[-n:] == ids[:n]), 0)
        self._spoken = (tokens, said)
        return ids[said] if said < len(ids) else END

    def _used(self) -> int:
        # Slots that share a prefix share its cells: count distinct prefixes once. A prefix is known by a hash that grows with it.
        prefixes = set()
        for tokens in self._slots.values():
            prefix = 0
            for token in tokens:
                prefix = hash((prefix, token))
                prefixes.add(prefix)
        return len(prefixes)

    def forward(self, plan: StepPlan) -> StepResult:
        if self.closed:
            raise BackendFailed("The backend was used after close().")
        self._abort.clear()
        self.plans.append(plan)
        if self._before_forward is not None:
            self._before_forward(plan)
        slots = [chunk.slot for chunk in plan.chunks]
        if len(set(slots)) != len(slots) or sum(len(chunk.tokens) for chunk in plan.chunks) > self.info.max_batch:
            raise BackendFailed("The plan uses a slot twice or exceeds the batch.")
        if self.info.max_logits and sum(chunk.n_logits for chunk in plan.chunks) > self.info.max_logits:
            raise BackendFailed("The plan asks for more rows of logits than there is room for.")
        logits: dict[int, np.ndarray] = {}
        no_room: list[int] = []
        aborted: list[int] = []
        for chunk in plan.chunks:
            if self._abort.is_set():
                aborted.append(chunk.slot)
            elif not self._extend(chunk):
                no_room.append(chunk.slot)
            elif chunk.n_logits:
                held = self._slots[chunk.slot]
                rows = np.full((chunk.n_logits, self.info.n_vocab), -10.0, np.float32)
                for at, row in enumerate(rows, len(held) - chunk.n_logits + 1):
                    row[self._next(held[:at])] = 10.0
                logits[chunk.slot] = rows
        return StepResult(logits, tuple(no_room), tuple(aborted))

    def _extend(self, chunk: Chunk) -> bool:
        held = self._slots[chunk.slot]
        if chunk.start != len(held):
            raise BackendFailed(f"Slot {chunk.slot} holds {len(held)} tokens and the chunk starts at {chunk.start}.")
        if len(held) + len(chunk.tokens) > self.info.n_ctx:
            raise BackendFailed(f"Slot {chunk.slot} would exceed its context.")
        if chunk.adapter is not None and chunk.adapter not in self.info.adapters:
            raise BackendFailed(f"There is no adapter {chunk.adapter!r}.")
        if held and self._adapter[chunk.slot] != chunk.adapter:
            raise BackendFailed(f"Slot {chunk.slot} was computed with another adapter.")
        self._adapter[chunk.slot] = chunk.adapter
        held.extend(chunk.tokens)
        if self._cells is not None and self._used() > self._cells:
            del held[chunk.start:]
            return False
        self.tokens_computed += len(chunk.tokens)
        return True

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        if self._slots[dst] or length > len(self._slots[src]):
            raise BackendFailed(f"Cannot copy {length} tokens of slot {src} into slot {dst}.")
        self._slots[dst] = self._slots[src][:length]
        self._adapter[dst] = self._adapter[src]

    def truncate(self, slot: int, length: int) -> bool:
        if length > len(self._slots[slot]):
            raise BackendFailed(f"Slot {slot} holds fewer than {length} tokens.")
        del self._slots[slot][length:]
        return True

    def reusable(self, slot: int, length: int, wanted: int) -> int:
        return min(length, wanted)

    def shift(self, slot: int, keep: int, drop: int) -> None:
        if keep + drop > len(self._slots[slot]):
            raise BackendFailed(f"Slot {slot} holds fewer than {keep + drop} tokens.")
        moved = self._slots[slot][: keep + drop + 1]
        if any(other != slot and len(moved) > keep + drop and tokens[: len(moved)] == moved for other, tokens in self._slots.items()):
            raise BackendFailed(f"Shifting slot {slot} would move cells that another slot shares.")
        del self._slots[slot][keep : keep + drop]

    def export_slot(self, slot: int) -> bytes:
        return json.dumps([self._adapter[slot], self._slots[slot]]).encode()

    def import_slot(self, slot: int, data: bytes) -> bool:
        if self._slots[slot]:
            raise BackendFailed(f"Slot {slot} is not empty.")
        self._adapter[slot], self._slots[slot] = json.loads(data)
        if self._cells is not None and self._used() > self._cells:
            self._slots[slot] = []
        return bool(self._slots[slot])

    def embed(self, tokens: Sequence[int]) -> Generator[None, None, np.ndarray]:
        total = np.zeros(_EMBEDDING, np.float32)
        start = 0
        while True:
            if self.closed:
                raise BackendFailed("The backend was used after close().")
            self._abort.clear()
            piece = tokens[start : start + self.info.max_batch]
            if self._before_embed is not None:
                self._before_embed(piece)
            if not self._abort.is_set():
                for position, token in enumerate(piece, start + 1):
                    total += np.sin(np.arange(1, _EMBEDDING + 1, dtype=np.float32) * (token + 1) / position)
                start += len(piece)
                if start == len(tokens):
                    return total / start
            yield

    def rest(self) -> None:
        self.rests += 1

    def drop_kv(self) -> None:
        if any(self._slots.values()):
            raise BackendFailed("The KV was to be dropped while a slot held tokens.")
        self.kv_drops += 1

    def abort(self) -> None:
        self._abort.set()

    def close(self) -> None:
        self.closed = True
