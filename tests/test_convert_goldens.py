"""Converted == source: F32 conversions of random checkpoints give, through llama.cpp, the logits that transformers gave (tests/goldens)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from golden_cases import CASES, FOLDER, Golden
from llama_logits import logits
from tiny import change_weights, tiny, weights_sha256

from edgeinfer.convert import convert
from edgeinfer.errors import ConversionFailed


def golden(name: str) -> Golden:
    return Golden.read(FOLDER / f"{name}.json")


def converted_logits(folder: Path, name: str) -> np.ndarray:
    """The golden's tokens run through an F32 conversion of ``folder``."""
    out = folder.parent / "model.gguf"
    convert(folder, "gguf-f32", out)
    return logits(out, golden(name).tokens, CASES[name].n_ctx)


def assert_matches(logits_TV: np.ndarray, name: str) -> None:
    expected = golden(name)
    assert expected.distance(logits_TV) < CASES[name].tolerance
    assert logits_TV[expected.positions].argmax(axis=1).tolist() == expected.argmax_P


@pytest.mark.parametrize("name", CASES)
def test_every_family_matches_its_golden(name: str, tmp_path: Path) -> None:
    folder = tiny(tmp_path / "model", CASES[name].family, **CASES[name].switches)
    assert weights_sha256(folder) == golden(name).weights_sha256, "tests/tiny.py makes other weights now: run scripts/make_goldens.py"
    assert_matches(converted_logits(folder, name), name)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(("shards", "shard_name"), [(1, None), (3, None), (2, "part {i} of {n} (final).safetensors"), (1, "weights.v1.safetensors")])
def test_source_type_and_shards_do_not_matter(dtype: str, shards: int, shard_name: str | None, tmp_path: Path) -> None:
    folder = tiny(tmp_path / "model", "llama", dtype=dtype, shards=shards, shard_name=shard_name)
    assert_matches(converted_logits(folder, "llama"), "llama")


@pytest.mark.parametrize(
    ("head", "name"),
    [
        ("tied", "llama-tied"),
        ("copied", "llama-tied"),                        # the flag says tied and an equal lm_head is there
        ("untied", "llama"),
        ("different", "llama"),                          # the flag says tied, the head differs: transformers uses the head, so do we
    ],
)
def test_tied_untied_and_superfluous_heads(head: str, name: str, tmp_path: Path) -> None:  # case 3
    assert_matches(converted_logits(tiny(tmp_path / "model", "llama", head=head), name), name)


def test_no_flag_and_no_head(tmp_path: Path) -> None:  # case 3
    """The family's default decides: Gemma ties, Llama does not and so lacks a tensor."""
    assert_matches(converted_logits(tiny(tmp_path / "gemma" / "model", "gemma3", head="unsaid"), "gemma3"), "gemma3")
    with pytest.raises(ConversionFailed, match=r"lm_head\.weight is missing"):
        convert(tiny(tmp_path / "llama" / "model", "llama", head="unsaid"), "gguf-f32", tmp_path / "llama.gguf")
    assert not (tmp_path / "llama.gguf").exists()


@pytest.mark.parametrize("keys", ["rope_type", "type", "rope_parameters"])
@pytest.mark.parametrize("name", ["llama-linear", "llama-yarn", "llama-llama3", "gemma3", "phi3-longrope-short", "phi4-mini-long", "qwen3"])
def test_every_spelling_of_the_rope_keys_means_the_same(name: str, keys: str, tmp_path: Path) -> None:  # case 11
    folder = tiny(tmp_path / "model", CASES[name].family, **CASES[name].switches | {"rope_keys": keys})
    assert_matches(converted_logits(folder, name), name)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_beyond_the_tokenizer_change_nothing(family: str, tmp_path: Path) -> None:  # case 5
    """Rows are drawn in order, so the golden's columns are still there with more rows below them."""
    folder = tiny(tmp_path / "model", family, extra_rows=16, head="untied" if family == "llama" else "tied")
    expected, logits_TV = golden(family), converted_logits(folder, family)
    close = np.abs(logits_TV[np.ix_(expected.positions, expected.columns)] - expected.logits_PC).max() / expected.spread
    assert close < CASES[family].tolerance


def _swap_halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head interleaved, as if the rope layout had been mistaken."""
    split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)


WRONG = {
    "q in the other rope layout": ("llama", "self_attn.q_proj", lambda values: _swap_halves(values, 6)),
    "k in the other rope layout": ("llama", "self_attn.k_proj", lambda values: _swap_halves(values, 2)),
    "norms one too large": ("gemma3", "input_layernorm", lambda values: values + 1),
    "head norms one too large": ("gemma3", "self_attn.k_norm", lambda values: values + 1),
    "no biases": ("qwen2", "self_attn.v_proj.bias", lambda values: values * 0),
    "gate and up exchanged": ("phi3", "mlp.gate_up_proj", lambda values: np.concatenate(np.split(values, 2)[::-1])),
    "k and v exchanged": ("phi3", "self_attn.qkv_proj", lambda values: np.concatenate([np.split(values, 3)[place] for place in (0, 2, 1)])),
}


@pytest.mark.parametrize("fault", WRONG)
def test_the_comparison_sees_a_wrong_conversion(fault: str, tmp_path: Path) -> None:
    """The tolerances are narrow enough: each of these mistakes, made in one layer, is far outside them."""
    name, tensor, spoil = WRONG[fault]
    folder = tiny(tmp_path / "model", CASES[name].family, **CASES[name].switches)
    change_weights(folder, lambda this, values: spoil(values) if f"layers.1.{tensor}" in this else values)
    assert golden(name).distance(converted_logits(folder, name)) > 10 * CASES[name].tolerance
