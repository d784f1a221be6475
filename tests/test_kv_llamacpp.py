"""Saved conversations with llama.cpp on the demo model: what comes back is what a fresh computation gives."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import edgeinfer
import numpy as np
import pytest
from edgeinfer.runtime.backends.llamacpp import LlamaCppBackend, LlamaOptions
from edgeinfer.runtime.kv_spill import key_of
from edgeinfer.runtime.kv_store import KVStore
from edgeinfer.runtime.values import Chunk, StepPlan

TEXT = (Path(__file__).parent / "text_1000.txt").read_text("utf-8")
NEXT = 24                                                # tokens after the saved ones whose distributions are compared


@contextmanager
def backend_of(path: Path, **options) -> Iterator[LlamaCppBackend]:
    backend = LlamaCppBackend(path, LlamaOptions(**{"ctx_size": 1024, "parallel": 2, "threads": 1} | options))
    try:
        yield backend
    finally:
        backend.close()


def engine_of(path: Path, folder: Path, **options) -> edgeinfer.Engine:
    return edgeinfer.load(path, kv_cache_dir=folder, **{"ctx_size": 1024, "parallel": 2, "threads": 1} | options)


def read(backend: LlamaCppBackend, slot: int, tokens: list[int], start: int = 0, wanted: int = 0) -> np.ndarray | None:
    """Compute tokens from ``start`` on; the logits of the last ``wanted``."""
    result = backend.forward(StepPlan(prefills=(Chunk(slot, start, tokens[start:], wanted),)))
    assert not result.no_room and not result.failed
    return result.logits[slot].copy() if wanted else None


def divergence(expected: np.ndarray, got: np.ndarray) -> float:
    """Mean KL divergence of the distributions, in nats."""
    p, q = (logits.astype(np.float64) - np.logaddexp.reduce(logits.astype(np.float64), axis=1, keepdims=True) for logits in (expected, got))
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


@pytest.mark.parametrize("options", [{}, {"kv_unified": False, "cache_slots": 0}, {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}, {"flash_attn": "off"}])
def test_restored_equals_fresh(smollm2_gguf, tmp_path, options) -> None:
    store = KVStore(tmp_path, max_bytes=1 << 30)
    with backend_of(smollm2_gguf, **options) as backend:
        tokens = backend.vocab.encode(TEXT, add_special=True, parse_special=False)[: 160 + NEXT]
        assert len(tokens) == 160 + NEXT
        key = key_of(backend.info, backend.kv_layout)
        read(backend, 0, tokens[:160])
        assert store.save(key, tokens[:160], backend.export_slot(0))
        fresh = read(backend, 0, tokens, 160, NEXT)
    with backend_of(smollm2_gguf, **options) as backend:
        assert key_of(backend.info, backend.kv_layout) == key
        read(backend, 0, tokens[100:160])                # somebody else is there already
        found = store.best(key, tokens)
        assert found.shared == 160 and backend.import_slot(1, store.read(found))
        restored = read(backend, 1, tokens, 160, NEXT)
    assert divergence(fresh, restored) < 1e-2
    assert divergence(fresh, np.roll(restored, 1, axis=0)) > 1       # the measure tells one place from the next


def ask(engine: edgeinfer.Engine, messages: list[dict[str, str]]) -> tuple[str, int, int]:
    """Text, prompt tokens and cached tokens."""
    stream = engine.chat(messages, temperature=0, max_tokens=12)
    return stream.text(), stream.usage.prompt_tokens, stream.usage.cached_tokens


def test_a_restarted_engine_goes_on_without_reading_the_chat_again(smollm2_gguf, tmp_path) -> None:
    chat = [{"role": "user", "content": TEXT[:1500] + "\nWhat is this about?"}]
    with engine_of(smollm2_gguf, tmp_path) as engine:
        text, first, cached = ask(engine, chat)
        assert cached == 0 and first > 300
    chat += [{"role": "assistant", "content": text}, {"role": "user", "content": "Say it in one word."}]
    with engine_of(smollm2_gguf, tmp_path) as engine:
        _, second, cached = ask(engine, chat)
        assert first <= cached < second < first + 60
        assert not engine.notices
    with engine_of(smollm2_gguf, tmp_path, cache_type_k="q8_0") as engine:
        assert ask(engine, chat)[2] == 0                 # another KV type
    with engine_of(smollm2_gguf, tmp_path) as engine:
        assert ask(engine, chat)[2] == second - 1


def test_kv_laid_out_in_another_way_is_not_taken(smollm2_gguf, tmp_path) -> None:
    """Without flash attention V lies transposed."""
    chat = [{"role": "user", "content": TEXT[:1300]}]
    with engine_of(smollm2_gguf, tmp_path, flash_attn="on") as engine:
        text = ask(engine, chat)[0]
    with engine_of(smollm2_gguf, tmp_path, flash_attn="off") as engine:
        again, _, cached = ask(engine, chat)
        assert cached == 0 and bool(again) == bool(text)


def test_the_next_run_on_the_same_document_does_not_read_it_again(smollm2_gguf, tmp_path) -> None:
    def run(question: str) -> dict:
        words = ["run", str(smollm2_gguf), "-", "--kv-dir", str(tmp_path / "kv"), "--json", "--temp", "0", "-n", "4", "-c", "1024", "-t", "1"]
        done = subprocess.run([sys.executable, "-m", "edgeinfer", *words], input=TEXT[:1300] + question, capture_output=True, text=True, check=True)
        assert not done.stderr
        return json.loads(done.stdout)["usage"]

    assert run("\nWho is it about?")["cached_tokens"] == 0
    assert run("\nWhere is it?")["cached_tokens"] > 250
