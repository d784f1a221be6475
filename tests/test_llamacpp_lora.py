"""LoRA adapters on llama.cpp: an adapter computes what the weights with it merged in compute, and the base model beside it stays what it was."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import edgeinfer
import gguf
import numpy as np
import psutil
import pytest
from edgeinfer.convert import convert
from edgeinfer.errors import BadRequest, EdgeInferError, ModelDamaged, ModelNotFound, UnsupportedModel
from edgeinfer.models.gguf_header import read_header
from edgeinfer.runtime.backends.llama_lora import LoraSpec, parse_lora
from edgeinfer.runtime.backends.llamacpp import LlamaCppBackend, LlamaOptions
from edgeinfer.runtime.values import Chunk, StepPlan
from tiny import change_weights, tiny

RANK, ALPHA = 4, 6.0
EXACT = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attn": "off", "threads": 1}
# Matrices of the llama family whose rows the converter does not permute; GGUF name -> source name.
CHANGED = {
    "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
    "blk.1.attn_output.weight": "model.layers.1.self_attn.o_proj.weight",
    "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
}


def factors(base: Path, seed: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(A, B) of each changed matrix, of shapes (rank, columns) and (rows, rank)."""
    random, tensors = np.random.default_rng(seed), read_header(base).tensors
    return {
        name: (random.standard_normal((RANK, tensors[name].shape[0])).astype(np.float32) * 0.1,
               random.standard_normal((tensors[name].shape[1], RANK)).astype(np.float32) * 0.1)
        for name in CHANGED
    }


def write_adapter(path: Path, pairs: dict[str, tuple[np.ndarray, np.ndarray]], *, arch: str = "llama", kind: str = "adapter", form: str = "lora",
                  alpha: float | None = ALPHA, extra: dict[str, np.ndarray] | None = None, alora: bool = False) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type(kind)
    writer.add_string("adapter.type", form)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    if alora:
        writer.add_array("adapter.alora.invocation_tokens", [1, 2])
    for name, (a, b) in pairs.items():
        writer.add_tensor(f"{name}.lora_a", a)
        writer.add_tensor(f"{name}.lora_b", b)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    convert(tiny(folder / "hf", "llama", dtype="f32"), "gguf-f32", folder / "base.gguf")
    return folder / "base.gguf"


@pytest.fixture(scope="module")
def adapters(base) -> tuple[Path, Path]:
    return tuple(write_adapter(base.with_name(f"{name}.gguf"), factors(base, seed)) for name, seed in (("pirate", 1), ("poet", 2)))


@contextmanager
def opened(path: Path, **options) -> Iterator[LlamaCppBackend]:
    backend = LlamaCppBackend(path, LlamaOptions(**{"ctx_size": 256, "parallel": 4} | EXACT | options))
    try:
        yield backend
    finally:
        backend.close()


def rows(backend: LlamaCppBackend, tokens: list[int], adapter: str | None = None) -> np.ndarray:
    """Logits after each token, in slot 0, which is empty before and after."""
    logits = backend.forward(StepPlan(decodes=(Chunk(0, 0, tokens, len(tokens), adapter=adapter),))).logits[0].copy()
    assert backend.truncate(0, 0)
    return logits


def merged(base: Path, folder: Path, seed: int, scale: float) -> Path:
    """The base model with scale * alpha / rank * B A added to its weights by hand."""
    shutil.copytree(base.parent / "hf", folder)
    deltas = {CHANGED[name]: scale * ALPHA / RANK * (b.astype(np.float64) @ a) for name, (a, b) in factors(base, seed).items()}
    change_weights(folder, lambda name, values: (values + deltas[name]).astype(np.float32) if name in deltas else values)
    convert(folder, "gguf-f32", folder.with_suffix(".gguf"))
    return folder.with_suffix(".gguf")


TOKENS = [5, 40, 17, 99, 23, 61, 8, 150]


@pytest.mark.parametrize("scale", [1.0, 0.5, -2.0])
def test_an_adapter_equals_merged_weights(base, adapters, tmp_path, scale) -> None:
    with opened(merged(base, tmp_path / "merged", 1, scale)) as backend:
        expected = rows(backend, TOKENS)
    with opened(base, lora=(f"{adapters[0]}:{scale}",)) as backend:
        assert backend.info.adapters == ("pirate",)
        plain, adapted = rows(backend, TOKENS), rows(backend, TOKENS, "pirate")
        assert np.abs(adapted - expected).max() < 1e-3 < 0.05 < np.abs(adapted - plain).max()
        assert np.array_equal(rows(backend, TOKENS), plain)


def test_requests_with_and_without_adapters_run_side_by_side(base, adapters) -> None:
    with opened(base) as backend:
        plain = rows(backend, TOKENS)
    with opened(base, lora=(f"pirate={adapters[0]}", str(adapters[1]))) as backend:
        alone = {name: rows(backend, TOKENS, name) for name in (None, "pirate", "poet")}
        assert np.array_equal(alone[None], plain)
        wanted = (None, "pirate", "poet", "poet")
        for slot, name in enumerate(wanted):
            backend.forward(StepPlan(prefills=(Chunk(slot, 0, TOKENS[:-1], 0, adapter=name),)))
        calls, decode = [], backend._decode
        backend._decode = lambda context, native: calls.append(native.n_tokens) or decode(context, native)
        result = backend.forward(StepPlan(decodes=tuple(Chunk(slot, len(TOKENS) - 1, TOKENS[-1:], 1, adapter=name) for slot, name in enumerate(wanted))))
        # One native call an adapter, beginning with the one that is set; two switches, not three.
        assert calls == [2, 1, 1] and backend._adapters.current == "pirate"
        for slot, name in enumerate(wanted):
            assert np.abs(result.logits[slot][0] - alone[name][-1]).max() < 1e-3


def test_an_unknown_adapter_hurts_only_its_request(base, adapters) -> None:
    with opened(base, lora=(str(adapters[0]),)) as backend:
        result = backend.forward(StepPlan(decodes=(Chunk(0, 0, TOKENS[:1], 1), Chunk(1, 0, TOKENS[:1], 1, adapter="parrot"))))
        assert "parrot" in result.failed[1] and "pirate" in result.failed[1] and set(result.logits) == {0}


def test_an_engine_takes_adapters_by_name(base, adapters) -> None:
    with edgeinfer.load(base, ctx_size=256, parallel=2, lora=(str(adapters[0]),), **EXACT) as engine:
        texts = {name: engine.generate("hello", temperature=0, max_tokens=12, ignore_eos=True, adapter=name).text() for name in (None, "pirate")}
        assert texts[None] != texts["pirate"]
        assert engine.generate("hello", temperature=0, max_tokens=12, ignore_eos=True).text() == texts[None]
        with pytest.raises(BadRequest, match="parrot"):
            engine.generate("hello", adapter="parrot")


def test_quantised_models_take_adapters_too(smollm2_gguf, tmp_path) -> None:
    """The demo model's matrices are repacked for the CPU; adapters stay beside them."""
    tensor = read_header(smollm2_gguf).tensors["blk.0.ffn_down.weight"]
    random = np.random.default_rng(3)
    pair = (random.standard_normal((RANK, tensor.shape[0])).astype(np.float16), random.standard_normal((tensor.shape[1], RANK)).astype(np.float16))
    path = write_adapter(tmp_path / "loud.gguf", {tensor.name: pair})
    with opened(smollm2_gguf, lora=(str(path),), cache_type_k="f16", cache_type_v="f16", flash_attn="auto") as backend:
        plain, loud = rows(backend, TOKENS), rows(backend, TOKENS, "loud")
        assert np.abs(plain - loud).max() > 0.1 and np.array_equal(plain, rows(backend, TOKENS))


def test_how_adapters_are_written() -> None:
    assert parse_lora(["/a/b/pirate.gguf"]) == (LoraSpec("pirate", Path("/a/b/pirate.gguf"), 1.0),)
    assert parse_lora("x=rel/p.gguf:0.5") == (LoraSpec("x", Path("rel/p.gguf"), 0.5),)
    assert parse_lora([r"C:\models\p.gguf:-1e-1", "./a=b.gguf"]) == (LoraSpec(Path(r"C:\models\p.gguf").stem, Path(r"C:\models\p.gguf"), -0.1), LoraSpec("a=b", Path("./a=b.gguf"), 1.0))
    for wrong in (["a/p.gguf", "b/p.gguf"], [""], [3], ["p.gguf:1e999"]):
        with pytest.raises(BadRequest, match="[lL]ora|adapter"):
            parse_lora(wrong)


def test_wrong_adapters_are_named_before_anything_is_loaded(base, adapters, tmp_path, monkeypatch) -> None:
    def loads(*_args: object, **_options: object) -> None:
        raise AssertionError("llama.cpp was asked to load something")

    monkeypatch.setattr("edgeinfer.runtime.backends.llamacpp.NativeModel", loads)
    pairs = factors(base, 1)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(adapters[0].read_bytes()[:-100])
    wrong: dict[Path, tuple[type[EdgeInferError], str]] = {
        tmp_path / "nowhere.gguf": (ModelNotFound, "nowhere"),
        cut: (ModelDamaged, "incomplete"),
        base: (UnsupportedModel, "no LoRA adapter"),
        write_adapter(tmp_path / "1.gguf", pairs, arch="qwen2"): (UnsupportedModel, "qwen2.*llama"),
        write_adapter(tmp_path / "2.gguf", pairs, form="ia3"): (UnsupportedModel, "ia3"),
        write_adapter(tmp_path / "3.gguf", pairs, alora=True): (UnsupportedModel, "aLoRA"),
        write_adapter(tmp_path / "4.gguf", {"blk.9.attn_v.weight": pairs["blk.0.attn_v.weight"]}): (UnsupportedModel, "blk.9.attn_v.weight"),
        write_adapter(tmp_path / "5.gguf", pairs, extra={"blk.0.attn_v.weight": np.zeros((8, 8), np.float32)}): (UnsupportedModel, "no part of a LoRA"),
        write_adapter(tmp_path / "6.gguf", {"blk.0.attn_v.weight": tuple(m.astype(np.int32) for m in pairs["blk.0.attn_v.weight"])}): (UnsupportedModel, "I32"),
    }
    for path, (kind, text) in wrong.items():
        with pytest.raises(kind, match=text) as caught:
            LlamaCppBackend(base, LlamaOptions(lora=(str(path),)))
        assert "\n" not in str(caught.value)


def test_shapes_and_pairs_that_do_not_fit_are_llamacpps_to_find(base, tmp_path) -> None:
    """And then everything that was loaded is freed."""
    a, b = factors(base, 1)["blk.0.attn_v.weight"]
    for number, pairs in enumerate(({"blk.0.attn_v.weight": (a[:, :-32], b)}, {"blk.0.attn_v.weight": (a, b[:-1])}, {"blk.0.attn_v.weight": (a[:2], b)})):
        path = write_adapter(tmp_path / f"{number}.gguf", pairs)
        with pytest.raises(ModelDamaged, match="cannot load the adapter") as caught:
            LlamaCppBackend(base, LlamaOptions(lora=(str(path),)))
        assert "\n" not in str(caught.value) and "reason" not in str(caught.value)


def test_adapters_are_freed(base, adapters) -> None:
    """case 91: an adapter of 40 MB, loaded and freed ten times over."""
    random = np.random.default_rng(0)
    tensor = read_header(base).tensors["blk.0.ffn_down.weight"]
    rank = 40_000
    big = write_adapter(base.with_name("big.gguf"), {tensor.name: (random.random((rank, tensor.shape[0]), np.float32), random.random((tensor.shape[1], rank), np.float32))})

    def cycle() -> int:
        with opened(base, lora=(str(big),)) as backend:
            rows(backend, TOKENS[:2], "big")
        return psutil.Process().memory_info().rss

    settled = [cycle() for _ in range(3)][-1]
    assert [cycle() for _ in range(10)][-1] - settled < 60e6
