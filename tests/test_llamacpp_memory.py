"""What a model needs is known before llama.cpp is asked for any of it."""

from __future__ import annotations

import re
from pathlib import Path

import edgeinfer
import pytest
from edgeinfer.errors import BadRequest, OutOfMemory
from edgeinfer.models.gguf_header import read_header
from edgeinfer.models.memory import kv_bytes_per_token, parse_bytes
from edgeinfer.runtime.backends import llama_memory
from edgeinfer.runtime.backends.llama_options import flash_attention
from edgeinfer.runtime.backends.llamacpp import LlamaCppBackend, LlamaOptions
from edgeinfer.runtime.values import Chunk, StepPlan

GIB = 1 << 30


@pytest.fixture
def nothing_loads(monkeypatch) -> None:
    def loads(*_args: object, **_options: object) -> None:
        raise AssertionError("llama.cpp was asked to load something")

    monkeypatch.setattr("edgeinfer.runtime.backends.llamacpp.NativeModel", loads)


def check(path: Path, notices: list[str] | None = None, *, gpu_layers: int = 0, adapter_bytes: int = 0, **options):
    asked = LlamaOptions(**({"kv_unified": True} | options))
    header, said = read_header(path), [] if notices is None else notices
    flash = flash_attention(asked, gpu_layers, said)
    return llama_memory.check_memory(header, asked, llama_memory.context_size(header, asked, []), flash, gpu_layers, adapter_bytes, said)


def test_a_budget_is_kept_before_anything_is_loaded(smollm2_gguf, nothing_loads) -> None:
    """case 92: an error with every number and the way out, where others end the process."""
    with pytest.raises(OutOfMemory) as caught:
        edgeinfer.load(smollm2_gguf, max_memory="256MiB")
    text = str(caught.value)
    assert re.search(r"needs \d+ MiB \(weights 92\.\d MiB, KV cache 180 MiB for a context of 8,192 tokens, compute buffers [\d.]+ MiB\)", text), text
    assert "max_memory allows 256 MiB" in text and "\n" not in text
    (fitting,) = re.findall(r"--ctx-size (\d+) would fit", text)
    assert check(smollm2_gguf, max_memory="256MiB", ctx_size=int(fitting)).total <= 256 << 20
    with pytest.raises(OutOfMemory):
        check(smollm2_gguf, max_memory="256MiB", ctx_size=2 * int(fitting))
    with pytest.raises(OutOfMemory, match="no context would fit: take a smaller"):
        edgeinfer.load(smollm2_gguf, max_memory=50_000_000)


def test_a_budget_counts_all_that_is_asked_for(smollm2_gguf) -> None:
    plain = check(smollm2_gguf, ctx_size=2048)
    per_token = plain.kv_bytes_per_token
    assert plain.kv == 2048 * per_token
    assert check(smollm2_gguf, ctx_size=2048, kv_size=8192).kv == 8192 * per_token
    assert check(smollm2_gguf, ctx_size=2048, kv_unified=False, parallel=3).kv == 3 * 2048 * per_token
    assert check(smollm2_gguf, ctx_size=2048, kv_unified=False, parallel=3, cache_slots=2).kv == 5 * 2048 * per_token
    assert check(smollm2_gguf, ctx_size=2048, cache_type_k="q8_0", cache_type_v="q8_0").kv == plain.kv * 34 // 64
    assert check(smollm2_gguf, ctx_size=2048, adapter_bytes=1000).weights == plain.weights + 1000
    # Idle conversations in a shared cache take no memory of their own.
    assert check(smollm2_gguf, ctx_size=2048, cache_slots=100).kv == plain.kv
    assert check(smollm2_gguf, ctx_size=2048, max_memory=plain.total) == plain
    with pytest.raises(OutOfMemory):
        check(smollm2_gguf, ctx_size=2048, max_memory=plain.total - 1)


def test_a_machine_without_the_memory_is_said_before_loading(smollm2_gguf, monkeypatch, nothing_loads) -> None:
    """case 92: the KV cache and the buffers must fit; mapped weights need not, but it is said."""
    need = check(smollm2_gguf)
    monkeypatch.setattr(llama_memory, "available_memory", lambda: need.kv + need.compute - 1)
    with pytest.raises(OutOfMemory, match="this machine has .* available"):
        edgeinfer.load(smollm2_gguf)
    monkeypatch.setattr(llama_memory, "available_memory", lambda: need.kv + need.compute)
    notices: list[str] = []
    assert check(smollm2_gguf, notices) == need
    assert len(notices) == 1 and "do not fit beside the KV cache" in notices[0]
    with pytest.raises(OutOfMemory, match="this machine has"):
        check(smollm2_gguf, mmap=False)
    # On a GPU most of it lives elsewhere.
    assert check(smollm2_gguf, gpu_layers=99, mmap=False) == need
    monkeypatch.setattr(llama_memory, "available_memory", lambda: need.total)
    notices.clear()
    check(smollm2_gguf, notices, mmap=False)
    assert notices == []


def test_a_context_nobody_has_memory_for(smollm2_gguf, nothing_loads) -> None:
    """case 92, on this machine as it is."""
    with pytest.raises(OutOfMemory, match="would fit"):
        edgeinfer.load(smollm2_gguf, ctx_size=100_000_000)


@pytest.mark.parametrize("wrong", ["much", "-1GiB", 0, ""])
def test_a_budget_that_is_none(smollm2_gguf, nothing_loads, wrong) -> None:
    with pytest.raises(BadRequest, match="no amount of memory"):
        edgeinfer.load(smollm2_gguf, max_memory=wrong)


def test_a_model_within_its_budget_runs(smollm2_gguf) -> None:
    need = check(smollm2_gguf, ctx_size=512, parallel=2)
    backend = LlamaCppBackend(smollm2_gguf, LlamaOptions(ctx_size=512, parallel=2, threads=1, max_memory=need.total))
    try:
        assert backend.info.kv_cells * backend.info.kv_bytes_per_token == need.kv
        assert backend.forward(StepPlan(decodes=(Chunk(0, 0, [1], 1),))).logits[0].shape == (1, backend.info.n_vocab)
    finally:
        backend.close()
    assert parse_bytes("1GiB") == GIB


def test_options_that_contradict_each_other(smollm2_gguf, nothing_loads) -> None:
    for options, words in (
        ({"kv_unified": False, "kv_size": 4096}, "shared KV cache"),
        ({"ctx_size": 512, "kv_size": 100}, "smaller than the context"),
        ({"parallel": 200}, "256 conversations"),
        ({"parallel": 10, "cache_slots": 250}, "256 conversations"),
        ({"cache_slots": -2}, "cache_slots must be at least -1"),
        ({"max_draft_rows": -1}, "max_draft_rows must be"),
    ):
        with pytest.raises(BadRequest, match=words):
            edgeinfer.load(smollm2_gguf, **options)


@pytest.mark.parametrize(("options", "layers", "expected"), [
    ({"kv_unified": True}, 0, 1),
    ({"kv_unified": False}, 0, 1),
    ({"kv_unified": False, "parallel": 1}, 0, 1),
    ({"kv_unified": False, "cache_type_v": "q8_0"}, 0, 1),
    ({"kv_unified": False, "flash_attn": "on"}, 0, 1),
    ({"flash_attn": "off"}, 0, 0),
    ({"cache_type_v": "q8_0"}, 99, 1),
    ({"kv_unified": False}, 99, -1),                     # on a GPU llama.cpp knows best
])
def test_flash_attention_where_it_pays(options, layers, expected) -> None:
    said: list[str] = []
    assert flash_attention(LlamaOptions(**options), layers, said) == expected
    # What llama.cpp would have chosen by itself is said to have been chosen otherwise.
    assert bool(said) == (layers > 0 and "cache_type_v" in options)


@pytest.mark.parametrize(("options", "available", "unified"), [
    ({"parallel": 4}, 8, False),                         # at most 1/8 of the memory
    ({"parallel": 4}, 7, True),
    ({"parallel": 1}, 1, False),                         # the same memory either way
    ({"parallel": 1, "cache_slots": 1}, 1, True),
    ({"parallel": 4, "kv_size": 4096}, 99, True),        # asked for
    ({"parallel": 4, "max_memory": "1GiB"}, 99, True),
    ({"parallel": 4, "kv_unified": False}, 1, False),
    ({"parallel": 4, "kv_unified": True}, 99, True),
])
def test_sequences_get_their_own_cells_where_memory_is_plenty(smollm2_gguf, monkeypatch, options, available, unified) -> None:
    header = read_header(smollm2_gguf)
    per_token = kv_bytes_per_token(header, type_k="f16", type_v="f16")
    monkeypatch.setattr(llama_memory, "available_memory", lambda: available * 4 * 2048 * per_token)
    chosen = llama_memory.choose_layout(header, LlamaOptions(**options), 2048)
    assert chosen.kv_unified is unified and chosen.slots == options["parallel"] + (2 * options["parallel"] + 2 if unified and "cache_slots" not in options else options.get("cache_slots", 0))
