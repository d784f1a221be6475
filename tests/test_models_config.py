"""config.json -> ModelSpec: every family, both rope layouts, and all problems of a bad config in one message."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tiny import FAMILIES, read_weights, tiny

from edgeinfer.errors import ConversionFailed, EdgeInferError, UnsupportedModel
from edgeinfer.models.config import ConfigReading, read_config, spec_from_config
from edgeinfer.models.families import ARCHITECTURES, expected_tensors
from edgeinfer.models.spec import ModelSpec

SIZES: dict[str, Any] = {
    "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 500,
}


def config(architecture: str, **keys: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **SIZES, **keys}


def llama(**keys: Any) -> ModelSpec:
    return spec_from_config(config("LlamaForCausalLM", **keys))


@pytest.mark.parametrize("family", FAMILIES)
def test_expected_tensors_are_those_of_a_checkpoint(family: str, tmp_path: Path) -> None:
    folder = tiny(tmp_path, family)
    spec = spec_from_config(json.loads((folder / "config.json").read_text()))
    assert expected_tensors(spec) == {name: values.shape for name, values in read_weights(folder).items()}
    assert spec.architecture == FAMILIES[family][0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rope", [None, "linear", "llama3", "longrope"])
def test_old_and_new_rope_keys_mean_the_same(family: str, rope: str | None, tmp_path: Path) -> None:  # case 11
    specs = []
    for keys in ("rope_type", "type", "rope_parameters"):
        folder = tiny(tmp_path / keys, family, rope=rope, rope_keys=keys, partial_rotary=0.5 if family == "phi3" else None)
        specs.append(spec_from_config(json.loads((folder / "config.json").read_text())))
    assert specs[0] == specs[1] == specs[2]
    assert specs[0].rope.type == (rope or "none")
    if rope == "longrope":
        assert len(specs[0].rope.short_factor) == len(specs[0].rope.long_factor) == specs[0].rope.rotary_dim // 2


def test_defaults_are_transformers_own() -> None:
    """What a config may leave out, by family: values read from transformers' configuration classes."""
    bare = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}

    def spec(architecture: str, **keys: Any) -> ModelSpec:
        return spec_from_config({"architectures": [architecture], **bare, **keys})

    found = {
        name: (s.kv_heads, s.head_dim, s.max_context, s.norm_eps, s.rope.theta, s.rope.local_theta, s.tied_embeddings, s.activation)
        for name, s in {
            "llama": spec("LlamaForCausalLM"),
            "mistral": spec("MistralForCausalLM", num_attention_heads=8),
            "qwen2": spec("Qwen2ForCausalLM", num_attention_heads=32, hidden_size=128),
            "qwen3": spec("Qwen3ForCausalLM", num_attention_heads=32),
            "gemma3": spec("Gemma3ForCausalLM", num_attention_heads=4),
            "phi3": spec("Phi3ForCausalLM"),
        }.items()
    }
    assert found == {
        "llama": (6, 16, 2048, 1e-6, 1e4, None, False, "silu"),
        "mistral": (8, 12, 131072, 1e-6, 1e4, None, False, "silu"),
        "qwen2": (32, 4, 32768, 1e-6, 1e4, None, False, "silu"),
        "qwen3": (32, 128, 32768, 1e-6, 1e4, None, False, "silu"),
        "gemma3": (4, 256, 131072, 1e-6, 1e6, 1e4, True, "gelu_tanh"),
        "phi3": (6, 16, 4096, 1e-5, 1e4, None, False, "silu"),
    }


def test_gemma_scales_windows_and_norms() -> None:
    spec = spec_from_config(config(
        "Gemma3ForCausalLM", num_hidden_layers=7, query_pre_attn_scalar=64, sliding_window=512, final_logit_softcapping=30.0))
    assert (spec.embedding_scale, spec.attention_scale, spec.norm_offset) == (96**0.5, 0.125, 1.0)
    assert spec.window_layers == (True, True, True, True, True, False, True)
    assert (spec.sliding_window, spec.final_softcap, spec.attention_softcap) == (512, 30.0, None)
    listed = spec_from_config(config("Gemma3ForCausalLM", layer_types=["full_attention", "sliding_attention"] * 2, sliding_window=512))
    assert listed.window_layers == (False, True, False, True)
    nested = spec_from_config(config("Gemma3ForCausalLM", rope_parameters={
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e4}}))
    assert (nested.rope.theta, nested.rope.local_theta, nested.rope.type, nested.rope.factor) == (2e6, 3e4, "linear", 8.0)


def test_windows_of_mistral_qwen_and_phi() -> None:
    assert spec_from_config(config("MistralForCausalLM")).sliding_window == 4096
    assert spec_from_config(config("MistralForCausalLM", sliding_window=None)).window_layers == ()
    assert spec_from_config(config("Qwen2ForCausalLM", sliding_window=100, max_window_layers=2)).sliding_window is None
    windowed = spec_from_config(config("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=100, max_window_layers=3))
    assert (windowed.sliding_window, windowed.window_layers) == (100, (False, False, False, True))
    assert spec_from_config(config("Phi3ForCausalLM", sliding_window=2047)).window_layers == (True,) * 4
    assert llama(sliding_window=100).sliding_window is None


def test_first_names_of_longrope() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    for name in ("su", "yarn", "longrope"):
        spec = spec_from_config(config("Phi3ForCausalLM", rope_scaling={"type": name, **factors}))
        assert (spec.rope.type, spec.rope.original_context, spec.rope.long_factor) == ("longrope", 4096, (2.0,) * 8)


def test_yarn_and_llama3_parameters() -> None:
    yarn = llama(max_position_embeddings=4096, rope_scaling={"rope_type": "yarn", "factor": 4, "beta_fast": 16}).rope
    assert (yarn.factor, yarn.beta_fast, yarn.beta_slow, yarn.original_context, yarn.attention_factor) == (4.0, 16.0, 1.0, 4096, None)
    parameters = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rope = llama(rope_theta=500000, rope_scaling={"rope_type": "llama3", **parameters}).rope
    assert (rope.theta, rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_context) == (5e5, 32.0, 1.0, 4.0, 8192)


def test_token_ids_are_a_union_of_both_configs() -> None:
    spec = spec_from_config(config("LlamaForCausalLM", bos_token_id=1, eos_token_id=2), generation_config={"eos_token_id": [7, 2, 9]})
    assert (spec.bos_id, spec.eos_ids) == (1, (2, 7, 9))
    assert llama().eos_ids == ()


def test_name_is_given_or_the_configs_own() -> None:
    assert spec_from_config(config("LlamaForCausalLM", _name_or_path="/x/y/Model-7B/")).name == "Model-7B"
    assert spec_from_config(config("LlamaForCausalLM"), name="mine").name == "mine"


def problems(**keys: Any) -> str:
    with pytest.raises(EdgeInferError) as caught:
        llama(**keys)
    assert "config.json" in str(caught.value)
    return str(caught.value)


def test_missing_architectures_names_the_key_and_what_is_known() -> None:  # case 9
    for value in ({}, {"architectures": None}, {"architectures": []}, {"architectures": "LlamaForCausalLM"}):
        with pytest.raises(ConversionFailed) as caught:
            spec_from_config({**SIZES, "model_type": "bloom", **value}, where="/models/flor/config.json")
        message = str(caught.value)
        assert "'architectures'" in message
        assert "/models/flor/config.json" in message
        assert "'bloom'" in message
        assert all(name in message for name in ARCHITECTURES)


def test_unknown_architecture_is_named() -> None:
    with pytest.raises(UnsupportedModel, match="'BloomForCausalLM' is unknown; known are LlamaForCausalLM"):
        spec_from_config(config("BloomForCausalLM"))


@pytest.mark.parametrize("key", [key for key in SIZES if key != "num_key_value_heads"])
def test_missing_size_is_named(key: str) -> None:  # case 9
    with pytest.raises(ConversionFailed, match=f"The key '{key}' is missing"):
        llama(**{key: None})


@pytest.mark.parametrize("keys", [
    {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}},
    {"rope_scaling": {"type": "spiral", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
    {"rope_parameters": {"full_attention": {"rope_type": "spiral"}}},
    {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}},
])
def test_unknown_rope_type_is_an_error_never_none(keys: dict[str, Any]) -> None:  # case 11
    with pytest.raises(UnsupportedModel, match=r"rope type '(spiral|mrope)' is unknown; known are default, linear"):
        llama(**keys)


@pytest.mark.parametrize(("scaling", "words"), [
    ({"rope_type": "longrope"}, "needs 'short_factor'"),                                                          # case 11
    ({"rope_type": "longrope", "short_factor": [1.0] * 8}, "needs 'long_factor'"),
    ({"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}, "list of 8 numbers"),
    ({"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}, "original_max_position_embeddings"),
    ({"rope_type": "linear"}, "'rope factor' is missing"),                                                        # case 11
    ({"rope_type": "linear", "factor": 0.5}, "must be 1 or more"),
    ({"rope_type": "linear", "factor": "4"}, "must be a number above 0"),
    ({"rope_type": "linear", "factor": float("nan")}, "must be a number above 0"),
    ({"rope_type": "linear", "factor": 10**400}, "must be a number above 0"),
    ({"rope_type": "llama3", "factor": 8.0}, "'rope low_freq_factor' is missing"),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}, "be below"),
    ({"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}, "unknown key 'mscale'"),
    ({"rope_type": "yarn", "type": "linear", "factor": 4.0}, "two types"),
    ("linear", "must be an object"),
    ({"full_attention": {"rope_type": "default"}, "factor": 2.0}, "mixes layer kinds"),
])
def test_incomplete_rope_is_an_error(scaling: Any, words: str) -> None:
    assert words in problems(rope_scaling=scaling)


def test_rope_layouts_that_disagree() -> None:
    message = problems(rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "linear", "factor": 4.0})
    assert "disagree about 'factor': 4.0 and 2.0" in message


@pytest.mark.parametrize(("keys", "words"), [
    ({"num_attention_heads": 5, "head_dim": 16}, "5 is not a multiple of 'num_key_value_heads' 2"),
    ({"num_hidden_layers": 0}, "'num_hidden_layers' must be a whole number from 1"),
    ({"num_hidden_layers": 10**9}, "'num_hidden_layers' must be a whole number from 1 to 10,000"),
    ({"hidden_size": "96"}, "'hidden_size' must be a whole number"),
    ({"hidden_size": True}, "'hidden_size' must be a whole number"),
    ({"hidden_size": 95}, "'head_dim' is not given"),
    ({"vocab_size": -1}, "'vocab_size'"),
    ({"rms_norm_eps": 0}, "'rms_norm_eps' must be a number above 0"),
    ({"rms_norm_eps": float("inf")}, "'rms_norm_eps' must be a number above 0"),
    ({"head_dim": 15}, "rotates 15; that must be even"),
    ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "'partial_rotary_factor' is 0.5"),
    ({"rope_interleaved": True}, "'rope_interleaved' is true"),
    ({"original_max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}}, "is 64 in"),
    ({"hidden_act": "relu"}, "'hidden_act' is 'relu'"),
    ({"attention_bias": True}, "'attention_bias' is true"),
    ({"mlp_bias": True}, "'mlp_bias' is true"),
    ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' must be true or false"),
    ({"eos_token_id": "2"}, "'eos_token_id' must be a token id"),
    ({"quantization_config": {"quant_method": "gptq"}}, "already quantised (gptq)"),
])
def test_impossible_and_unsupported_values(keys: dict[str, Any], words: str) -> None:
    assert words in problems(**keys)


def test_part_of_a_head_rotates_in_phi_only() -> None:
    def spec(part: float) -> ModelSpec:
        return spec_from_config(config("Phi3ForCausalLM", partial_rotary_factor=part))

    assert spec(0.75).rope.rotary_dim == 12
    for part, count in ((1.5, 24), (0.2, 3), (0.01, 0)):
        with pytest.raises(ConversionFailed, match=f"rotates {count}; that must be even, from 2 to 16"):
            spec(part)


def test_all_problems_are_listed_together() -> None:
    message = problems(vocab_size=None, num_hidden_layers=0, hidden_act="relu", rope_scaling={"rope_type": "spiral"}, quantization_config={})
    for words in ("'vocab_size' is missing", "'num_hidden_layers' must", "'hidden_act' is 'relu'", "'spiral'", "already quantised"):
        assert words in message


def test_one_mistake_neither_hides_another_nor_is_said_again_by_its_consequences() -> None:
    for keys, words in (
        ({"vocab_size": None, "hidden_size": 95}, ("'vocab_size'", "'head_dim' is not given")),
        ({"rms_norm_eps": 0, "head_dim": 15}, ("'rms_norm_eps'", "rotates 15")),
        ({"num_attention_heads": None}, ("'num_attention_heads' is missing",)),
        ({"hidden_size": 0, "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "original_max_position_embeddings": 64}},
         ("'hidden_size' must", "'long_factor'")),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "original_max_position_embeddings": "x"}},
         ("'rope high_freq_factor' is missing", "'rope original_max_position_embeddings' must")),
        ({"architectures": None, "model_type": "llama", "vocab_size": None, "hidden_act": "relu"}, ("'architectures'", "'vocab_size'", "'relu'")),
    ):
        with pytest.raises(ConversionFailed) as caught:
            llama(**keys)
        assert len(caught.value.problems) == len(words), caught.value.problems
        assert all(word in str(caught.value) for word in words)


def test_an_unknown_architecture_does_not_hide_an_unknown_rope_type() -> None:  # case 11
    with pytest.raises(UnsupportedModel) as caught:
        spec_from_config({"architectures": ["BloomForCausalLM"], "rope_scaling": {"type": "spiral"}})
    assert "'BloomForCausalLM'" in str(caught.value) and "'spiral'" in str(caught.value) and "missing" not in str(caught.value)


def test_what_is_wrong_with_a_config_leaves_the_sizes_it_has() -> None:
    reading = read_config(config("LlamaForCausalLM", hidden_act="relu", rms_norm_eps=0, rope_scaling={"rope_type": "spiral"}))
    assert isinstance(reading.error, ConversionFailed) and len(reading.problems) == 3
    assert expected_tensors(reading.spec) == expected_tensors(llama())
    for key in ("hidden_size", "tie_word_embeddings", "attention_bias"):
        assert read_config(config("LlamaForCausalLM", **{key: 7})).spec is None
    assert read_config(config("LlamaForCausalLM")) == ConfigReading(llama())


def test_layer_types_of_other_kinds_and_lengths() -> None:
    with pytest.raises(UnsupportedModel, match="'linear_attention'"):
        spec_from_config(config("Gemma3ForCausalLM", layer_types=["linear_attention"] * 4))
    with pytest.raises(ConversionFailed, match="list of 4 names"):
        spec_from_config(config("Gemma3ForCausalLM", layer_types=["full_attention"]))


def test_spec_is_plain_data() -> None:
    spec = llama()
    assert dataclasses.asdict(spec)["rope"]["type"] == "none"
    assert hash(spec) == hash(llama())
