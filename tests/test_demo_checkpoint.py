"""The demo checkpoint: a real Hugging Face folder whose values are the package's own."""

import json

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors import safe_open

from edgeinfer.errors import EdgeInferError


@pytest.fixture(scope="module")
def reader(smollm2_gguf):
    return GGUFReader(smollm2_gguf)


def shard_of(folder, name):
    return folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]


def tensor(folder, name):
    with safe_open(shard_of(folder, name), framework="numpy") as file:
        return file.get_tensor(name)


def test_has_every_file_and_two_shards_or_more(demo_checkpoint):
    names = {path.name for path in demo_checkpoint.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"} <= names
    index = json.loads((demo_checkpoint / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) >= 2 and shards <= names
    stored = {}
    for shard in shards:
        with safe_open(demo_checkpoint / shard, framework="numpy") as file:
            stored |= {name: (file.get_slice(name).get_dtype(), shard) for name in file.keys()}
    assert {name: shard for name, (_dtype, shard) in stored.items()} == index["weight_map"]
    assert {dtype for dtype, _shard in stored.values()} == {"F16"}
    assert len(stored) == 2 + 9 * 30 and "lm_head.weight" not in stored


def test_values_are_the_packages_own(demo_checkpoint, reader):
    tensors = {one.name: one for one in reader.tensors}
    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.29.mlp.down_proj.weight": "blk.29.ffn_down.weight",
        "model.layers.3.self_attn.v_proj.weight": "blk.3.attn_v.weight",
    }.items():
        one = tensors[theirs]
        assert np.array_equal(tensor(demo_checkpoint, ours), dequantize(one.data, one.tensor_type).astype(np.float16))


@pytest.mark.parametrize(("part", "theirs", "heads"), [("q_proj", "attn_q", 9), ("k_proj", "attn_k", 3)])
def test_rotated_rows_are_half_a_head_apart(demo_checkpoint, reader, part, theirs, heads):
    one = next(one for one in reader.tensors if one.name == f"blk.7.{theirs}.weight")
    interleaved = dequantize(one.data, one.tensor_type).astype(np.float16)
    ours = tensor(demo_checkpoint, f"model.layers.7.self_attn.{part}.weight")
    for head in range(heads):
        for pair in (0, 1, 17, 31):
            assert np.array_equal(ours[64 * head + pair], interleaved[64 * head + 2 * pair])
            assert np.array_equal(ours[64 * head + 32 + pair], interleaved[64 * head + 2 * pair + 1])


def test_tokenizer_is_as_the_original_has_it(demo_checkpoint):
    tokenizer = json.loads((demo_checkpoint / "tokenizer.json").read_text("utf-8"))
    assert [part["type"] for part in tokenizer["pre_tokenizer"]["pretokenizers"]] == ["Digits", "ByteLevel"]
    assert tokenizer["model"]["byte_fallback"] is False and tokenizer["normalizer"] is None and tokenizer["post_processor"] is None
    assert [(one["id"], one["special"]) for one in tokenizer["added_tokens"]] == [(number, True) for number in range(17)]
    settings = json.loads((demo_checkpoint / "tokenizer_config.json").read_text("utf-8"))
    assert settings["tokenizer_class"] == "GPT2Tokenizer"
    assert (settings["bos_token"], settings["eos_token"], settings["unk_token"], settings["pad_token"]) == (
        "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_end|>")
    assert "{% for message in messages %}" in settings["chat_template"]


def test_a_complete_folder_is_kept_and_anything_else_is_left_alone(demo_checkpoint, demo_script, tmp_path):
    before = {path.name: path.stat().st_mtime_ns for path in demo_checkpoint.iterdir()}
    assert demo_script.make(demo_checkpoint) == demo_checkpoint
    assert {path.name: path.stat().st_mtime_ns for path in demo_checkpoint.iterdir()} == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(EdgeInferError, match="not a complete demo checkpoint"):
        demo_script.make(tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_cut_shard_is_seen(demo_checkpoint, demo_script, tmp_path):
    for path in demo_checkpoint.iterdir():
        (tmp_path / path.name).hardlink_to(path)
    assert demo_script.is_complete(tmp_path)
    shard = next(tmp_path.glob("*-of-*.safetensors"))
    data = shard.read_bytes()[:-1]
    shard.unlink()
    shard.write_bytes(data)
    assert not demo_script.is_complete(tmp_path)


def test_a_failure_leaves_nothing_behind(demo_script, tmp_path, monkeypatch):
    def no_room(folder):
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo_script, "_write", no_room)
    with pytest.raises(OSError, match="No space"):
        demo_script.make(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
