"""Converted == source: tensors, types and metadata of the file against the checkpoint it was made from."""

from __future__ import annotations

import ctypes
from pathlib import Path

import gguf
import numpy as np
import pytest
from llama_logits import logits
from tiny import FAMILIES, change_weights, read_weights, tiny

from edgeinfer.convert import convert
from edgeinfer.errors import BadRequest, ConversionFailed
from edgeinfer.models.native import llama

ODD = {"hidden": 96, "intermediate": 172}                # 172 divides by no block size, 96 by 32 alone
SMALL = {"hidden": 64, "intermediate": 172, "heads": 4, "kv_heads": 2, "head_dim": 16}


def tensors(path: Path) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def metadata(path: Path) -> dict[str, object]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items() if not name.startswith("GGUF.")}


def quantize_with_llama(source: Path, out: Path, file_type: int, *, again: bool = False) -> None:
    params = llama().llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = file_type, 2, again
    assert llama().llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params)) == 0


def rotate_half(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo the interleaving of each head's rows."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


# ------------------------------------------------------------------------------------------------------------------ round trip


def test_the_demo_checkpoint_survives_bit_by_bit(demo_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "demo.gguf"
    convert(demo_checkpoint, "gguf-f16", out)
    stored, weights = tensors(out), read_weights(demo_checkpoint)
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    parts = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }
    for layer in range(30):
        names |= {f"blk.{layer}.{ours}.weight": f"model.layers.{layer}.{theirs}.weight" for ours, theirs in parts.items()}
    assert stored.keys() == names.keys()
    assert weights.keys() == set(names.values())
    for ours, theirs in names.items():
        rows = stored[ours].data
        rows = rotate_half(rows, 9) if "attn_q" in ours else rotate_half(rows, 3) if "attn_k" in ours else rows
        assert rows.dtype == (np.float32 if "norm" in ours else np.float16)
        assert np.array_equal(rows.astype(np.float32), weights[theirs]), ours


def test_the_demo_conversion_says_what_the_packages_own_file_says(demo_checkpoint: Path, smollm2_gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "demo.gguf"
    convert(demo_checkpoint, "gguf-f16", out)
    ours, theirs = metadata(out), metadata(smollm2_gguf)
    assert "tokenizer.ggml.tokens" in theirs and "tokenizer.ggml.merges" in theirs
    shared = [key for key in theirs if key in ours and not key.startswith("general.")]
    assert {key for key in shared if ours[key] != theirs[key]} == set()
    assert len(shared) >= 20


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_f32_file_holds_every_weight_exactly(family: str, dtype: str, tmp_path: Path) -> None:
    folder = tiny(tmp_path / "model", family, dtype=dtype)
    convert(folder, "gguf-f32", tmp_path / "out.gguf", verify=False)
    stored = tensors(tmp_path / "out.gguf")
    values = sorted(np.sort(weight.ravel() + (family == "gemma3" and "norm" in name)).tolist() for name, weight in read_weights(folder).items())
    assert sorted(np.sort(tensor.data.ravel()).tolist() for tensor in stored.values()) == values
    assert {tensor.tensor_type.name for tensor in stored.values()} == {"F32"}


# -------------------------------------------------------------------------------------------------------- types, sizes, fallbacks


@pytest.mark.parametrize("target", [f"gguf-{name}" for name in "q8 q4_0 q4 q5_k_m q6_k q3_k_m q2_k iq4_nl iq4_xs".split()])
@pytest.mark.parametrize(("family", "dims"), [("llama", ODD), ("phi3", {}), ("qwen3", {"hidden": 256, "intermediate": 512}), ("gemma3", ODD)])
def test_quantised_files_are_llama_cpps_own_bytes(family: str, dims: dict[str, int], target: str, tmp_path: Path) -> None:
    """From an f16 checkpoint every tensor and every key equals what llama.cpp's quantiser makes of our F16 file."""
    folder = tiny(tmp_path / "model", family, dtype="f16", layers=4, **dims)
    convert(folder, "gguf-f16", tmp_path / "f16.gguf", verify=False)
    report = convert(folder, target, tmp_path / "ours.gguf")
    quantize_with_llama(tmp_path / "f16.gguf", tmp_path / "theirs.gguf", metadata(tmp_path / "ours.gguf")["general.file_type"])
    ours, theirs = tensors(tmp_path / "ours.gguf"), tensors(tmp_path / "theirs.gguf")
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].tensor_type == theirs[name].tensor_type, name
        assert np.array_equal(ours[name].data, theirs[name].data), name
    assert metadata(tmp_path / "ours.gguf") == metadata(tmp_path / "theirs.gguf")
    assert report.bytes == (tmp_path / "theirs.gguf").stat().st_size


@pytest.mark.parametrize(("target", "kind"), [("gguf-q8", "Q8_0"), ("gguf-q4_0", "Q4_0"), ("gguf-bf16", "BF16"), ("gguf-f16", "F16")])
def test_direct_types_are_the_gguf_packages_bytes(target: str, kind: str, tmp_path: Path) -> None:
    folder = tiny(tmp_path / "model", "qwen2", dtype="f32", intermediate=96)
    rng = np.random.default_rng(0)
    change_weights(folder, lambda name, values: rng.standard_normal(values.shape).astype(np.float32) if values.ndim == 2 else values)
    convert(folder, target, tmp_path / "out.gguf", verify=False)
    weights, compared = read_weights(folder), 0
    for name, tensor in tensors(tmp_path / "out.gguf").items():
        if name.startswith("blk.0.ffn_") and "norm" not in name:
            assert tensor.tensor_type.name == kind
            source = weights[f"model.layers.0.mlp.{name.split('_')[1].split('.')[0]}_proj.weight"]
            assert np.array_equal(tensor.data.view(np.uint8), gguf.quantize(source, tensor.tensor_type).view(np.uint8)), name
            compared += 1
    assert compared == 3


ALL_SIZES = [("llama", ODD), ("llama", SMALL), ("qwen2", {"hidden": 72, "intermediate": 100}), ("gemma3", {"hidden": 640, "layers": 1}), ("phi3", {})]


@pytest.mark.parametrize("target", [f"gguf-{name}" for name in "f32 f16 bf16 q8 q4_0 q4 q5_1 q6_k iq4_nl tq1_0".split()])
@pytest.mark.parametrize(("family", "dims"), ALL_SIZES)
def test_a_dry_run_knows_the_exact_size_and_writes_nothing(family: str, dims: dict[str, int], target: str, tmp_path: Path) -> None:
    folder, place = tiny(tmp_path / "model", family, **dims), tmp_path / "out"
    place.mkdir()
    plan = convert(folder, target, place, dry_run=True)
    assert list(place.iterdir()) == []
    done = convert(folder, target, place, verify=False)
    assert [path.name for path in place.iterdir()] == [f"model-{done.target}.gguf"]
    assert plan.bytes == done.bytes == done.output.stat().st_size
    assert (plan.output, plan.tensors, plan.fallbacks) == (done.output, done.tensors, done.fallbacks)
    assert plan.summary().startswith("Would write") and done.summary().startswith("Wrote")


@pytest.mark.parametrize("target", ["gguf-q8", "gguf-q4_0", "gguf-q4"])
def test_rows_that_no_block_divides_stay_half_precision_and_run(target: str, tmp_path: Path) -> None:  # case 14
    report = convert(tiny(tmp_path / "model", "llama", **SMALL), target, tmp_path)
    kept = {fallback.tensor: fallback for fallback in report.fallbacks if fallback.used == "F16"}
    assert kept.keys() == {"blk.0.ffn_down.weight", "blk.1.ffn_down.weight"}
    assert all(fallback.row == 172 for fallback in kept.values())
    assert "rows of 172 do not divide" in report.summary()
    assert np.isfinite(logits(report.output, [1, 2, 3, 4], 64)).all()


def test_fallbacks_are_counted_with_what_they_cost(tmp_path: Path) -> None:  # case 15
    dims = {"hidden": 576, "heads": 9, "kv_heads": 3, "head_dim": 64, "intermediate": 1536, "head": "tied"}
    report = convert(tiny(tmp_path / "model", "llama", **dims), "gguf-q4", tmp_path)
    stored = tensors(report.output)
    assert {fallback.wanted for fallback in report.fallbacks} == {"Q4_K", "Q6_K"}
    for fallback in report.fallbacks:
        tensor, ideal = stored[fallback.tensor], {"Q4_K": 144 / 256, "Q6_K": 210 / 256}[fallback.wanted]
        assert tensor.tensor_type.name == fallback.used
        assert fallback.extra_bytes == tensor.n_bytes - int(tensor.n_elements * ideal)
    assert {fallback.tensor for fallback in report.fallbacks} == {name for name in stored if "norm" not in name and "ffn_down" not in name}
    assert f"{len(report.fallbacks)} tensors, {report.fallback_bytes:,} bytes more" in report.summary()


@pytest.mark.parametrize("target", ["gguf-q8", "gguf-q4_0", "gguf-q5_1", "gguf-iq4_nl", "gguf-q4", "gguf-q6_k"])
def test_odd_rows_compute_what_their_dequantised_values_say(tmp_path: Path, target: str) -> None:  # case 16
    dims = {"hidden": 576, "heads": 9, "kv_heads": 3, "head_dim": 64, "intermediate": 672}
    quantised = convert(tiny(tmp_path / "model", "llama", **dims), target, tmp_path / "quantised.gguf").output
    quantize_with_llama(quantised, tmp_path / "dequantised.gguf", llama().LLAMA_FTYPE_ALL_F32, again=True)
    tokens = list(range(20, 60))
    ours, exact = logits(quantised, tokens, 64), logits(tmp_path / "dequantised.gguf", tokens, 64)
    # What remains is that the kernels round activations to 8 bits; padding that leaked into a product would be of the size of the logits.
    assert np.abs(ours - exact).mean() < 0.02 * exact.std()


def test_divisible_rows_fall_back_nowhere(tmp_path: Path) -> None:
    report = convert(tiny(tmp_path / "model", "llama", hidden=256, intermediate=512, head_dim=64, heads=4, kv_heads=4), "gguf-q4", tmp_path)
    assert report.fallbacks == () and "Fell back" not in report.summary()


# ------------------------------------------------------------------------------------------------------------------ values


def spike(folder: Path, value: float, where: str = "layers.0.mlp.up_proj") -> None:
    def change(name: str, values: np.ndarray) -> np.ndarray:
        if where in name:
            values = values.copy()
            values.flat[7] = value
        return values

    change_weights(folder, change)


@pytest.mark.parametrize(("dtype", "value"), [("bf16", 65536.0), ("f32", 65520.0), ("f32", -1e30)])
@pytest.mark.parametrize("target", ["gguf-f16", "gguf-q8", "gguf-q4"])
def test_a_weight_too_large_for_half_precision_keeps_its_tensor(dtype: str, value: float, target: str, tmp_path: Path) -> None:  # case 12
    folder = tiny(tmp_path / "model", "llama", dtype=dtype)
    spike(folder, value)
    plan = convert(folder, target, tmp_path, dry_run=True)
    report = convert(folder, target, tmp_path, verify=False)
    assert [(kept.tensor, kept.type) for kept in report.kept] == [("blk.0.ffn_up.weight", dtype.upper())]
    assert "blk.0.ffn_up.weight" in report.summary()
    assert plan.bytes == report.output.stat().st_size
    stored = tensors(report.output)
    assert stored["blk.0.ffn_up.weight"].tensor_type.name == dtype.upper()
    for tensor in stored.values():
        assert np.isfinite(gguf.dequantize(tensor.data, tensor.tensor_type)).all(), tensor.name
    assert np.float32(value) in gguf.dequantize(stored["blk.0.ffn_up.weight"].data, stored["blk.0.ffn_up.weight"].tensor_type)


@pytest.mark.parametrize(("value", "kept"), [(float.fromhex("0x1.fep+127"), 0), (float.fromhex("0x1.ffp+127"), 1)])
def test_a_weight_too_large_for_bfloat16_keeps_its_tensor(value: float, kept: int, tmp_path: Path) -> None:
    folder = tiny(tmp_path / "model", "llama", dtype="f32")
    spike(folder, value)
    report = convert(folder, "gguf-bf16", tmp_path, verify=False)
    assert [found.type for found in report.kept] == ["F32"] * kept
    tensor = tensors(report.output)["blk.0.ffn_up.weight"]
    assert gguf.dequantize(tensor.data, tensor.tensor_type).max() == np.float32(value)


def test_the_largest_float16_is_no_reason_to_keep_a_tensor(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "model", "llama", dtype="f32")
    spike(folder, 65504.0)
    report = convert(folder, "gguf-f16", tmp_path, verify=False)
    assert report.kept == ()
    assert tensors(report.output)["blk.0.ffn_up.weight"].data.max() == 65504.0


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_are_all_named(dtype: str, value: float, tmp_path: Path) -> None:  # case 12
    folder = tiny(tmp_path / "model", "llama", dtype=dtype)
    spike(folder, value)
    spike(folder, value, "layers.1.input_layernorm")
    with pytest.raises(ConversionFailed) as caught:
        convert(folder, "gguf-q4", tmp_path / "out.gguf")
    assert len(caught.value.problems) == 2
    assert "model.layers.0.mlp.up_proj.weight" in str(caught.value) and "model.layers.1.input_layernorm.weight" in str(caught.value)
    assert not list(tmp_path.glob("*.gguf"))


# --------------------------------------------------------------------------------------------------------------- GGUF as source


@pytest.mark.parametrize("middle", ["gguf-f32", "gguf-f16", "gguf-bf16"])
def test_requantising_a_gguf_gives_the_same_tensors_as_the_checkpoint(middle: str, tmp_path: Path) -> None:
    """The weights of tiny checkpoints are exact in all three types, so the way makes no difference."""
    folder = tiny(tmp_path / "model", "llama", dtype="f32", **ODD)
    first = convert(folder, middle, tmp_path, verify=False)
    plan = convert(first.output, "gguf-q4", dry_run=True)
    again = convert(first.output, "gguf-q4", tmp_path / "again.gguf")
    direct = convert(folder, "gguf-q4", tmp_path / "direct.gguf")
    assert plan.output == Path("model-Q4_K_M.gguf")
    assert plan.bytes == again.bytes == again.output.stat().st_size == direct.bytes
    assert (again.fallbacks, again.tensors) == (direct.fallbacks, direct.tensors)
    assert metadata(again.output) == metadata(direct.output)
    ours, theirs = tensors(again.output), tensors(direct.output)
    assert all(np.array_equal(ours[name].data, theirs[name].data) for name in theirs)


def test_a_quantised_gguf_is_no_source(smollm2_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(ConversionFailed, match="Q4_1.*quantising twice"):
        convert(smollm2_gguf, "gguf-q8", tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------------------------------------------- targets


@pytest.mark.parametrize("word", ["gguf-q4_k_x", "q4", "onnx-int4", "gguf-", "gguf-nvfp4"])
def test_unknown_targets_are_refused_with_the_known_ones(word: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="gguf-q4_k_m"):
        convert(tmp_path, word)


@pytest.mark.parametrize("target", ["gguf-iq2_xxs", "gguf-iq1_s", "gguf-q2_k_s"])
def test_targets_that_need_an_importance_matrix_say_so(target: str, tmp_path: Path) -> None:
    folder = tiny(tmp_path / "model", "llama", hidden=256, intermediate=256, heads=4, head_dim=64)
    with pytest.raises(BadRequest, match="importance matrix"):
        convert(folder, target, tmp_path / "out.gguf")
    assert not list(tmp_path.glob("*.gguf"))
