"""What the llama.cpp backend does to slots: shifting, saving and restoring, faults, KV types. One compute thread: other tests run beside."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from edgeinfer.convert import convert
from edgeinfer.errors import BackendFailed, BadRequest
from edgeinfer.models.memory import KV_TYPES
from edgeinfer.models.native import llama
from edgeinfer.runtime.backends.llamacpp import LlamaCppBackend, LlamaOptions
from edgeinfer.runtime.values import Chunk, StepPlan, StepResult
from tiny import tiny

LAYOUTS = pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "streams"])
EXACT = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attn": "off"}    # flash attention rounds to f16 on a CPU
HEAD = struct.calcsize("<4sI16sQII")                     # of an exported slot


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory) -> Path:
    """A model of one layer: what it keeps of a token depends on that token and its position alone, so shifting it must be exact."""
    folder = tmp_path_factory.mktemp("one-layer")
    convert(tiny(folder / "hf", "mistral", layers=1, dtype="f32", head_dim=64, hidden=128), "gguf-f32", folder / "model.gguf")
    return folder / "model.gguf"


@contextmanager
def opened(path: Path, **options) -> Iterator[LlamaCppBackend]:
    backend = LlamaCppBackend(path, LlamaOptions(**{"ctx_size": 256, "parallel": 3, "threads": 1, "kv_unified": True} | options))
    try:
        yield backend
    finally:
        backend.close()


def run(backend: LlamaCppBackend, slot: int, start: int, tokens: list[int], adapter: str | None = None) -> np.ndarray:
    return backend.forward(StepPlan(prefills=(Chunk(slot, start, tokens, 1, adapter=adapter),))).logits[slot][0].copy()


def words(backend: LlamaCppBackend, count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(10, backend.info.n_vocab, count).tolist()


def divergence(a: np.ndarray, b: np.ndarray) -> float:
    """KL divergence of two rows of logits, in nats."""
    p, q = (row.astype(np.float64) - np.logaddexp.reduce(row.astype(np.float64)) for row in (a, b))
    return float((np.exp(p) * (p - q)).sum())


# --------------------------------------------------------------------------------------------------------------- shifting


@LAYOUTS
@pytest.mark.parametrize(("kv", "tolerance"), [("f32", 1e-4), ("f16", 0.02), ("q8_0", 0.2), ("q4_0", 2.0)])
def test_a_shifted_slot_equals_the_shorter_text(one_layer, kv_unified, kv, tolerance) -> None:
    with opened(one_layer, kv_unified=kv_unified, **(EXACT | {"cache_type_k": kv})) as backend:
        tokens = words(backend, 60)
        run(backend, 0, 0, tokens[:59])
        backend.shift(0, 4, 25)
        shifted = run(backend, 0, 59 - 25, tokens[59:])
        expected = run(backend, 1, 0, tokens[:4] + tokens[29:])
        unshifted = run(backend, 2, 0, tokens)
        assert np.abs(shifted - expected).max() < tolerance < np.abs(unshifted - expected).max()
        # A second shift, of what was shifted, before anything else is computed.
        backend.shift(0, 4, 10)
        backend.shift(0, 4, 5)
        assert backend.truncate(2, 0)
        assert np.abs(run(backend, 0, 20, tokens[:1]) - run(backend, 2, 0, tokens[:4] + tokens[44:] + tokens[:1])).max() < 2 * tolerance


@LAYOUTS
def test_shifting_touches_nobody_else(one_layer, kv_unified) -> None:
    """The first tokens are shared with another slot, and a third one has cells between theirs."""
    with opened(one_layer, kv_unified=kv_unified, **EXACT) as backend:
        tokens = words(backend, 60)
        run(backend, 0, 0, tokens[:8])
        backend.copy_prefix(0, 1, 8)
        for start in range(8, 40, 4):
            run(backend, 0, start, tokens[start : start + 4])
            run(backend, 1, start, tokens[start : start + 4])
        before = run(backend, 1, 40, tokens[40:])
        assert backend.truncate(1, 40)
        backend.shift(0, 8, 20)
        assert np.abs(run(backend, 1, 40, tokens[40:]) - before).max() < 1e-4
        assert np.abs(run(backend, 0, 20, tokens[40:]) - run(backend, 2, 0, tokens[:8] + tokens[28:])).max() < 1e-4


def test_a_full_cache_shifts_too(one_layer) -> None:
    with opened(one_layer, parallel=1, cache_slots=1, **EXACT) as backend:
        tokens = words(backend, 257)
        run(backend, 0, 0, tokens[:256])
        assert backend.forward(StepPlan(decodes=(Chunk(0, 256, tokens[256:], 1),))).no_room == (0,)
        backend.shift(0, 16, 120)
        shifted = run(backend, 0, 136, tokens[256:])
        assert backend.truncate(0, 0)
        assert np.abs(shifted - run(backend, 0, 0, tokens[:16] + tokens[136:])).max() < 1e-4


def test_an_abort_between_steps_does_not_reach_a_shift(one_layer) -> None:
    """A shift that stopped half way would leave some layers' keys moved and others not."""
    with opened(one_layer, **EXACT) as backend:
        tokens = words(backend, 60)
        run(backend, 0, 0, tokens[:59])
        backend.abort()
        backend.shift(0, 4, 25)
        assert np.abs(run(backend, 0, 34, tokens[59:]) - run(backend, 1, 0, tokens[:4] + tokens[29:])).max() < 1e-4


def test_keys_that_cannot_be_moved_are_said_beforehand(one_layer) -> None:
    """llama.cpp ends the process when keys in bf16 are to be moved."""
    with opened(one_layer, cache_type_k="bf16") as backend:
        run(backend, 0, 0, words(backend, 20))
        assert not backend.info.can_shift
        with pytest.raises(BackendFailed, match="cannot shift"):
            backend.shift(0, 4, 5)


# ---------------------------------------------------------------------------------------------------- saving and restoring


@LAYOUTS
@pytest.mark.parametrize("options", [{}, {"cache_type_k": "q8_0", "cache_type_v": "q4_0"}, {"flash_attn": "off"}], ids=["f16", "quantised", "no-flash"])
def test_restored_equals_kept(one_layer, kv_unified, options) -> None:
    with opened(one_layer, kv_unified=kv_unified, **options) as first:
        tokens = words(first, 90)
        run(first, 2, 0, tokens[:80])
        data = first.export_slot(2)
        kept = run(first, 2, 80, tokens[80:])
    with opened(one_layer, kv_unified=kv_unified, **options) as second:
        run(second, 0, 0, tokens[40:])                   # somebody else is there already
        assert second.import_slot(1, data)
        assert second.reusable(1, 80, 79) == 79
        assert np.abs(run(second, 1, 80, tokens[80:]) - kept).max() < 1e-3
        assert second.truncate(1, 30) and second.export_slot(1) != data


def test_a_slot_just_copied_or_shifted_is_saved_as_it_is(one_layer) -> None:
    """Between streams llama.cpp makes copies at the next decode only, and it moves keys then too."""
    with opened(one_layer, kv_unified=False, **EXACT) as backend:
        tokens = words(backend, 60)
        run(backend, 0, 0, tokens[:50])
        backend.copy_prefix(0, 1, 40)
        data = backend.export_slot(1)
        assert backend.truncate(1, 0) and backend.import_slot(1, data)
        assert np.abs(run(backend, 1, 40, tokens[40:]) - run(backend, 2, 0, tokens)).max() < 1e-4
        # The source of a copy that is still to be made is overwritten by a restored slot.
        assert backend.truncate(1, 0) and backend.truncate(2, 0)
        backend.copy_prefix(0, 2, 50)
        assert backend.truncate(0, 0) and backend.import_slot(0, data)
        expected = run(backend, 1, 0, tokens)
        assert np.abs(run(backend, 2, 50, tokens[50:]) - expected).max() < 1e-4
        backend.shift(2, 4, 20)
        data = backend.export_slot(2)
        assert backend.truncate(1, 0) and backend.import_slot(1, data)
        assert np.abs(run(backend, 1, 40, tokens[:1]) - run(backend, 2, 40, tokens[:1])).max() < 1e-4


def test_no_room_is_false_and_leaves_the_slot_empty(one_layer) -> None:
    with opened(one_layer) as backend:
        tokens = words(backend, 200)
        run(backend, 0, 0, tokens)
        data = backend.export_slot(0)
        assert not backend.import_slot(1, data)          # 256 cells, and 200 are taken
        run(backend, 1, 0, tokens[:50])                  # nothing is in the way
        assert backend.truncate(1, 0) and backend.truncate(0, 0)
        assert backend.import_slot(1, data)


def test_data_of_another_kind_is_not_taken(one_layer, tmp_path) -> None:
    with opened(one_layer) as backend:
        run(backend, 0, 0, words(backend, 20))
        data = backend.export_slot(0)
        layout = backend.kv_layout
    convert(tiny(tmp_path / "hf", "mistral", layers=1, dtype="f32", head_dim=64, hidden=128, seed=5), "gguf-f32", tmp_path / "other.gguf")
    for path, options in ((tmp_path / "other.gguf", {}), (one_layer, {"cache_type_k": "q8_0"}), (one_layer, {"flash_attn": "off"}), (one_layer, {"kv_unified": False})):
        with opened(path, **options) as backend:
            assert not backend.import_slot(0, data)
            run(backend, 0, 0, words(backend, 20))
            assert backend.kv_layout != layout or options in ({"flash_attn": "off"}, {"kv_unified": False})


def test_damaged_data_is_refused(one_layer) -> None:
    with opened(one_layer) as backend:
        tokens = words(backend, 20)
        run(backend, 0, 0, tokens)
        data = backend.export_slot(0)
        random = np.random.default_rng(1)
        damaged = [b"", b"EIKV", data[:HEAD], data[:-1], data + b"\0", bytes(len(data)), data[HEAD:], b"x" * 100]
        for _ in range(60):
            changed = bytearray(data)
            changed[random.integers(len(data))] ^= 1 << random.integers(8)
            damaged.append(bytes(changed))
        assert not any(backend.import_slot(1, bad) for bad in damaged)
        assert backend.import_slot(1, data)
        # What a checksum cannot know: a state that says something else. Sizes that llama.cpp reads are checked by llama.cpp.
        assert backend.truncate(1, 0)
        for offset in (0, 8, 12, 20):                     # magic, streams, cells, sequences of the first cell
            body = bytearray(data[HEAD:])
            body[offset : offset + 4] = b"\xff\xff\xff\x7f"
            head = data[: HEAD - 4] + struct.pack("<I", zlib.crc32(body))
            if not backend.import_slot(1, head + bytes(body)):
                assert llama().llama_memory_seq_pos_max(backend._memory, 1) == -1        # empty
            assert backend.truncate(1, 0)
        assert np.abs(run(backend, 0, 20, tokens[:1]) - run(backend, 2, 0, tokens + tokens[:1])).max() < 0.02


# ---------------------------------------------------------------------------------------------------------- sliding windows


def test_a_restored_window_is_used_as_far_as_it_reaches(tmp_path) -> None:
    """cases 57, 58: what slid out of the window is not in the saved state, so a shorter prefix of it may not be reused."""
    convert(tiny(tmp_path / "hf", "gemma3", dtype="f32", window=32), "gguf-f32", tmp_path / "windowed.gguf")
    with opened(tmp_path / "windowed.gguf", **EXACT) as backend:
        tokens = words(backend, 110)
        run(backend, 0, 0, tokens[:100])
        # llama.cpp keeps everything of a running slot, so any prefix of it is there: case 58's trigger, parity with fresh.
        assert backend.reusable(0, 100, 16) == 16
        backend.copy_prefix(0, 1, 16)
        assert np.abs(run(backend, 1, 16, tokens[60:90]) - run(backend, 2, 0, tokens[:16] + tokens[60:90])).max() < 1e-3
        assert backend.truncate(1, 0) and backend.truncate(2, 0)

        data = backend.export_slot(0)
        expected = run(backend, 0, 100, tokens[100:])
        assert backend.import_slot(1, data)
        assert backend.reusable(1, 100, 16) == 0 and backend.reusable(1, 100, 60) == 0
        assert backend.reusable(1, 100, 100) == 100 and backend.reusable(1, 100, 99) == 99
        assert np.abs(run(backend, 1, 100, tokens[100:]) - expected).max() < 1e-3
        assert backend.truncate(1, 99)
        assert np.abs(run(backend, 1, 99, tokens[99:]) - expected).max() < 1e-3


def test_two_unlike_prompts_in_a_row(tmp_path) -> None:
    """case 57 as reported: the second shares the first token only, then both are longer than the window and part early."""
    convert(tiny(tmp_path / "hf", "gemma3", dtype="f32", window=32), "gguf-f32", tmp_path / "windowed.gguf")
    with opened(tmp_path / "windowed.gguf", **EXACT) as backend:
        for size, shared in ((8, 1), (100, 3)):
            one, two = words(backend, size, 1), words(backend, size, 2)
            two[:shared] = one[:shared]
            run(backend, 0, 0, one)
            assert backend.reusable(0, size, shared) == shared and backend.truncate(0, shared)
            assert np.abs(run(backend, 0, shared, two[shared:]) - run(backend, 1, 0, two)).max() < 1e-3
            assert backend.truncate(0, 0) and backend.truncate(1, 0)


# ------------------------------------------------------------------------------------------------------------------ faults


def fail_with(backend: LlamaCppBackend, monkeypatch, status: int, guilty: set[int]) -> list[list[int]]:
    """Make every native call with a chunk of a guilty slot fail after it was computed. Returns the slots of each call."""
    decode, calls = backend._decode, []

    def faulty(context, native) -> int:
        slots = sorted({native.seq_id[i][0] for i in range(native.n_tokens)})
        calls.append(slots)
        return status if decode(context, native) == 0 and guilty & set(slots) else 0

    monkeypatch.setattr(backend, "_decode", faulty)
    return calls


def decode_all(backend: LlamaCppBackend, texts: dict[int, list[int]]) -> StepResult:
    return backend.forward(StepPlan(decodes=tuple(Chunk(slot, len(text) - 1, text[-1:], 1) for slot, text in texts.items())))


@LAYOUTS
def test_a_failed_call_hurts_only_the_guilty(one_layer, kv_unified, monkeypatch) -> None:
    with opened(one_layer, kv_unified=kv_unified) as backend:
        texts = {slot: words(backend, 20, slot) for slot in range(3)}
        for slot, text in texts.items():
            run(backend, slot, 0, text[:-1])
        with monkeypatch.context() as patch:
            calls = fail_with(backend, patch, -3, {1})
            result = decode_all(backend, texts)
        kept = {slot: rows[0].copy() for slot, rows in result.logits.items()}
        assert set(result.failed) == {1} and "-3" in result.failed[1] and set(result.logits) == {0, 2}
        assert calls == [[0, 1, 2], [0], [1], [2]]
        # Nothing of the failed call is left: the same step works now, and gives what it gives in a fresh slot.
        for slot in (0, 2):
            assert backend.truncate(slot, 19)
        again = {slot: rows[0].copy() for slot, rows in decode_all(backend, texts).logits.items()}
        for slot, text in texts.items():
            assert slot == 1 or divergence(again[slot], kept[slot]) < 1e-4
            assert backend.truncate(slot, 0)
            assert divergence(again[slot], run(backend, slot, 0, text)) < 1e-4


@pytest.mark.parametrize(("status", "field"), [(1, "no_room"), (2, "aborted")])
def test_no_room_and_aborts_are_not_repeated(one_layer, monkeypatch, status, field) -> None:
    with opened(one_layer) as backend:
        texts = {slot: words(backend, 20, slot) for slot in range(2)}
        for slot, text in texts.items():
            run(backend, slot, 0, text[:-1])
        with monkeypatch.context() as patch:
            calls = fail_with(backend, patch, status, {1})
            result = decode_all(backend, texts)
        assert getattr(result, field) == (0, 1) and not result.logits and not result.failed and calls == [[0, 1]]
        assert set(decode_all(backend, texts).logits) == {0, 1}


def test_decoders_without_room_change_nothing(one_layer) -> None:
    with opened(one_layer, parallel=2) as backend:
        texts = {0: words(backend, 129, 0), 1: words(backend, 129, 1)}
        for slot, text in texts.items():
            run(backend, slot, 0, text[:-1])
        assert decode_all(backend, texts).no_room == (0, 1)
        assert backend.truncate(1, 100)
        assert set(decode_all(backend, {0: texts[0], 1: texts[1][:101]}).logits) == {0, 1}


# --------------------------------------------------------------------------------------------------------------- KV types


@pytest.mark.parametrize("kv", KV_TYPES)
def test_every_kv_type_computes(smollm2_gguf, kv) -> None:
    """case 89: each with what it needs."""
    with opened(smollm2_gguf, parallel=1, cache_type_k=kv, cache_type_v=kv) as backend:
        tokens = backend.vocab.encode("The capital of France is Paris. The capital of Japan is", add_special=False, parse_special=False)
        for _ in range(3):
            tokens.append(int(run(backend, 0, 0, tokens).argmax()))
            assert backend.truncate(0, 0)
        assert b"Tokyo" in b"".join(backend.vocab.token_bytes(token) for token in tokens[-3:])


def test_heads_that_do_not_fill_blocks_are_refused(tmp_path) -> None:
    """Whole rows may fill blocks (2 heads of 16 are 32 values); attention reads them head by head."""
    convert(tiny(tmp_path / "hf", "llama"), "gguf-f32", tmp_path / "narrow.gguf")
    for options, flag in (({"cache_type_k": "q8_0"}, "-ctk f16"), ({"cache_type_v": "q4_0"}, "-ctv f16"), ({"cache_type_k": "q8_0", "flash_attn": "off"}, "-ctk f16")):
        with pytest.raises(BadRequest, match="heads have 16 values") as caught, opened(tmp_path / "narrow.gguf", **options):
            pass
        assert flag in str(caught.value)
    with opened(tmp_path / "narrow.gguf") as backend:
        assert run(backend, 0, 0, words(backend, 5)).shape == (backend.info.n_vocab,)
