"""Checkpoint folders: what is read, what is refused, and that every problem is heard at once."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tiny import DROP, FAMILIES, edit, read_weights, tiny

from edgeinfer.errors import ConversionFailed, EdgeInferError, ModelDamaged, ModelNotFound, UnsupportedModel
from edgeinfer.models.checkpoint import Checkpoint, as_float32
from edgeinfer.models.safetensors import read_header


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_every_family_type_and_sharding_is_sound_and_exact(family: str, dtype: str, tmp_path: Path) -> None:
    folder = tiny(tmp_path, family, dtype=dtype, shards=3 if dtype == "f16" else 1)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.check() == []
    expected = read_weights(folder)
    assert set(checkpoint.tensors) == set(expected)
    for name, values in expected.items():
        array = checkpoint.read(name)
        assert checkpoint.tensors[name].dtype == dtype.upper()
        assert np.array_equal(as_float32(array, dtype.upper()), values)
        checkpoint.release(name)
        assert np.array_equal(as_float32(array, dtype.upper()), values)      # released pages come back from the file


def test_reading_copies_nothing_and_cannot_write(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny(tmp_path, "llama", dtype="f32"))
    one, other = checkpoint.read("model.norm.weight"), checkpoint.read("model.norm.weight")
    assert np.shares_memory(one, other)
    assert not one.flags.writeable
    assert as_float32(one, "F32") is one


def test_bfloat16_is_exact_for_every_bit_pattern() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    assert np.array_equal(as_float32(bits, "BF16").view(np.uint32), bits.astype(np.uint32) << 16)


def test_agrees_with_the_safetensors_package(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "scalar": np.array(3.5, np.float32), "empty": np.zeros((0, 4), np.float16), "odd": rng.integers(0, 255, 7, np.uint8),
        "doubles": rng.standard_normal((3, 5)), "flags": np.array([True, False]), "long name " * 9: rng.integers(-9, 9, (2, 2, 2)),
    }
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "np"})
    infos = read_header(tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    for name, values in load_file(tmp_path / "x.safetensors").items():
        info = infos[name]
        assert info.shape == values.shape
        assert data[info.offset : info.offset + info.nbytes] == values.tobytes()


def test_configs_tokenizer_and_template(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny(tmp_path / "My-Model", "llama", sentencepiece="none", added_tokens=[("<think>", False)]))
    assert checkpoint.spec.name == "My-Model"
    assert checkpoint.tokenizer_json == tmp_path / "My-Model" / "tokenizer.json"
    assert checkpoint.tokenizer_model is None
    assert checkpoint.chat_template == checkpoint.tokenizer_config["chat_template"]
    assert set(checkpoint.spec.eos_ids) >= set(checkpoint.generation_config["eos_token_id"])


def test_template_files_win_and_named_templates_are_kept(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "llama")
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    edit(folder / "tokenizer_config.json", chat_template=named)
    assert Checkpoint.open(folder).chat_templates == {"default": "plain", "tool_use": "tools"}
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert Checkpoint.open(folder).chat_template == "from json"
    (folder / "chat_template.jinja").write_text("from jinja é", encoding="utf-8")
    assert Checkpoint.open(folder).chat_template == "from jinja é"
    for path in ("chat_template.jinja", "chat_template.json"):
        (folder / path).unlink()
    edit(folder / "tokenizer_config.json", chat_template=DROP)
    assert Checkpoint.open(folder).chat_template is None
    edit(folder / "tokenizer_config.json", chat_template=[{"name": 1}])
    with pytest.raises(ModelDamaged, match="'chat_template'"):
        Checkpoint.open(folder)


# ------------------------------------------------------------------------------------------------------------------ tied heads


@pytest.mark.parametrize(("head", "own"), [("tied", False), ("untied", True), ("copied", False), ("different", True)])
def test_the_head(head: str, own: bool, tmp_path: Path) -> None:  # case 3
    checkpoint = Checkpoint.open(tiny(tmp_path, "llama", head=head))
    assert checkpoint.check() == []
    assert checkpoint.has_own_head is own
    assert ("lm_head.weight" in checkpoint.tensors) is own


def test_tied_and_copied_in_different_shards(tmp_path: Path) -> None:  # case 3
    assert not Checkpoint.open(tiny(tmp_path, "llama", head="copied", shards=4)).has_own_head


def test_untied_without_a_head_says_what_to_do(tmp_path: Path) -> None:  # case 3: no flag and no lm_head
    problems = Checkpoint.open(tiny(tmp_path, "llama", head="unsaid")).check()
    assert len(problems) == 1
    assert "lm_head.weight is missing" in problems[0]
    assert "tie_word_embeddings" in problems[0]


def test_embedding_rows_that_disagree_name_both_numbers(tmp_path: Path) -> None:  # case 5
    folder = tiny(tmp_path, "llama", head="tied")
    rows = Checkpoint.open(folder).spec.vocab_rows
    edit(folder / "config.json", vocab_size=rows + 6)
    (problem,) = Checkpoint.open(folder).check()
    assert f"[{rows}, 96]" in problem
    assert f"[{rows + 6}, 96]" in problem


# -------------------------------------------------------------------------------------------------------------------- problems


def rewrite(folder: Path, change) -> None:
    """Replace the tensors of a one-file f32 checkpoint by ``change(tensors)``."""
    tensors = load_file(folder / "model.safetensors")
    save_file({name: np.ascontiguousarray(values) for name, values in change(tensors).items()}, folder / "model.safetensors")


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "llama", dtype="f32")

    def spoil(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].T
        tensors["model.layers.1.input_layernorm.weight"] = tensors["model.layers.1.input_layernorm.weight"].astype(np.float64)
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(96, np.float32)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
        return tensors

    rewrite(folder, spoil)
    checkpoint = Checkpoint.open(folder)
    problems = checkpoint.check()
    assert len(problems) == 4
    for words in (
        "model.norm.weight is missing", "up_proj.weight has shape [96, 160], and config.json asks for [160, 96]", "is of type F64",
        "q_proj.bias is not known",
    ):
        assert any(words in problem for problem in problems), words
    with pytest.raises(ConversionFailed) as caught:
        checkpoint.require_sound()
    assert caught.value.problems == tuple(problems)


def test_many_missing_tensors_make_a_short_list(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "llama", dtype="f32")
    rewrite(folder, lambda tensors: {"model.norm.weight": tensors["model.norm.weight"]})
    problems = Checkpoint.open(folder).check()
    assert len(problems) == 10                           # the head's own sentence, eight names, and how many more
    assert problems[-1] == "11 more tensors are missing."


def test_index_and_shards_that_disagree(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "llama", shards=3)
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"
    document["weight_map"]["ghost"] = "model-00002-of-00003.safetensors"
    del document["weight_map"]["model.embed_tokens.weight"]
    index.write_text(json.dumps(document))
    problems = Checkpoint.open(folder).check()
    assert "The index says model.norm.weight is in model-00001-of-00003.safetensors, and it is in model-00003-of-00003.safetensors." in problems
    assert "The index says ghost is in model-00002-of-00003.safetensors, and it is not." in problems
    assert "model.embed_tokens.weight is in model-00001-of-00003.safetensors and not in the index." in problems
    assert len(problems) == 3


def test_missing_and_truncated_shards_are_both_named(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "llama", shards=3)
    (folder / "model-00001-of-00003.safetensors").unlink()
    cut = folder / "model-00003-of-00003.safetensors"
    whole = cut.stat().st_size
    os.truncate(cut, whole - 1)
    problems = "\n".join(Checkpoint.open(folder).check())
    assert "model-00001-of-00003.safetensors is missing" in problems
    assert f"model-00003-of-00003.safetensors is incomplete: expected {whole:,} bytes, has {whole - 1:,}" in problems


def test_odd_shard_names_with_and_without_an_index(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "llama", shards=2, shard_name="weights part {i} (of {n}).safetensors")
    assert Checkpoint.open(folder).check() == []
    (folder / "model.safetensors.index.json").unlink()
    assert Checkpoint.open(folder).check() == []
    (folder / "again.safetensors").write_bytes((folder / "weights part 1 (of 2).safetensors").read_bytes())
    assert any("is in again.safetensors and in weights part 1 (of 2).safetensors" in problem for problem in Checkpoint.open(folder).check())


# ----------------------------------------------------------------------------------------------------- links, escapes, refusals


def as_hub_cache(folder: Path, cache: Path) -> Path:
    """The same checkpoint laid out as huggingface_hub's cache: files are relative links into blobs/."""
    snapshot = cache / "snapshots" / ("0" * 40)
    (cache / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        blob = cache / "blobs" / f"{number:064x}"
        blob.write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


@pytest.mark.parametrize("shards", [1, 3])
def test_hub_cache_layout_of_links_works(shards: int, tmp_path: Path) -> None:  # case 22
    snapshot = as_hub_cache(tiny(tmp_path / "plain", "qwen3", shards=shards), tmp_path / "cache")
    for folder in (snapshot, tmp_path / "link"):
        if folder.name == "link":
            folder.symlink_to(snapshot)
        checkpoint = Checkpoint.open(folder)
        assert checkpoint.check() == []
        assert checkpoint.read("model.norm.weight").shape == (96,)
        assert checkpoint.tokenizer_json is not None


def test_dangling_link_is_named(tmp_path: Path) -> None:  # case 22
    snapshot = as_hub_cache(tiny(tmp_path / "plain", "llama"), tmp_path / "cache")
    (snapshot / "model.safetensors").resolve().unlink()
    assert "model.safetensors points to a file that does not exist" in Checkpoint.open(snapshot).check()[0]


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/../../outside.safetensors", "..\\x.safetensors", "C:x.safetensors", ""])
def test_shard_names_that_leave_the_folder_are_refused(name: str, tmp_path: Path) -> None:  # case 22
    folder = tiny(tmp_path / "model", "llama", shards=2)
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(document))
    with pytest.raises(ModelDamaged, match="not inside the folder"):
        Checkpoint.open(folder)


def test_pickle_is_never_opened(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin.*can run code"):
        Checkpoint.open(folder)


def test_missing_folder_config_and_weights(tmp_path: Path) -> None:  # case 9
    with pytest.raises(ModelNotFound, match="does not exist"):
        Checkpoint.open(tmp_path / "none")
    folder = tiny(tmp_path / "model", "llama")
    with pytest.raises(ModelNotFound, match="is not a folder"):
        Checkpoint.open(folder / "config.json")
    with pytest.raises(ConversionFailed, match="has no config.json") as caught:
        (tmp_path / "empty").mkdir()
        Checkpoint.open(tmp_path / "empty")
    assert str(tmp_path / "empty") in str(caught.value)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConversionFailed, match=r"no \.safetensors"):
        Checkpoint.open(folder)


def test_config_without_architectures_names_key_and_folder(tmp_path: Path) -> None:  # case 9
    folder = tiny(tmp_path, "llama", drop=["architectures"])
    with pytest.raises(ConversionFailed) as caught:
        Checkpoint.open(folder)
    assert "'architectures'" in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "nul", '"x"', "[" * 100_000, '{"a": ' * 50_000, "1" * 10_000])
def test_config_that_is_no_json_object(text: str, tmp_path: Path) -> None:
    folder = tiny(tmp_path, "llama")
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelDamaged, match=r"config\.json"):
        Checkpoint.open(folder)
    (folder / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ModelDamaged, match="not UTF-8"):
        Checkpoint.open(folder)


def test_inspecting_keeps_what_opening_raises(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "llama", shards=2, drop=["hidden_size"])
    (folder / "tokenizer_config.json").write_text("[]")
    (folder / "model-00002-of-00002.safetensors").unlink()
    checkpoint = Checkpoint.inspect(folder)
    assert [type(error) for error in checkpoint.errors] == [ConversionFailed, ModelDamaged]
    assert "config.json: The key 'hidden_size' is missing." in checkpoint.error_problems and not checkpoint.complete
    assert checkpoint.spec is None and checkpoint.tensors and checkpoint.vocab_rows
    assert checkpoint.check() == [f"The weight file {folder / 'model-00002-of-00002.safetensors'} is missing."]
    with pytest.raises(ConversionFailed, match="'hidden_size' is missing"):
        Checkpoint.open(folder)


def test_byte_order_mark_is_no_obstacle(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "llama")
    (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + (folder / "config.json").read_bytes())
    assert Checkpoint.open(folder).check() == []


def test_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"already quantised \(fp8\)"):
        Checkpoint.open(tiny(tmp_path, "llama", config={"quantization_config": {"quant_method": "fp8"}}))


# -------------------------------------------------------------------------------------------------------- safetensors headers


def safetensors_file(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: int, end: int, shape: list[object] | None = None, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(("header", "data", "words"), [
    ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "overlaps"),
    ({"a": entry(0, 4), "b": entry(8, 12)}, 12, "leaves a gap"),
    ({"a": entry(4, 8)}, 8, "leaves a gap"),
    ({"a": entry(0, 8)}, 7, "incomplete"),
    ({"a": entry(0, 8)}, 9, "describes"),
    ({"a": entry(0, 8, [3])}, 8, "does not take 8 bytes"),
    ({"a": entry(0, 8, [2**62, 4])}, 8, "does not take"),
    ({"a": entry(0, 8, [-2])}, 8, "malformed"),
    ({"a": entry(0, 8, [2.0])}, 8, "malformed"),
    ({"a": entry(0, 8, [True, 2])}, 8, "malformed"),
    ({"a": entry(8, 0, [2])}, 8, "does not take"),
    ({"a": {"dtype": "F32", "shape": [2]}}, 8, "malformed"),
    ({"a": [1]}, 8, "malformed"),
    ([], 0, "no JSON object"),
    (b'{"a": 1, "a": 2}', 0, "appears twice"),
    (b"{" * 100_000, 0, "damaged header"),
    (b"\xff\xff\xff", 0, "damaged header"),
])
def test_damaged_safetensors_header(header: object, data: int, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelDamaged, match=words):
        read_header(safetensors_file(tmp_path / "x.safetensors", header, bytes(data)))


@pytest.mark.parametrize(("data", "words"), [
    (b"", "empty"), (b"short", "text"), (b"<!doctype html><html>", "HTML"), (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
    (struct.pack("<Q", 2**63) + b"{}", "not a safetensors"), (b"GGUF" + bytes(64), "a GGUF file"), (struct.pack("<Q", 1000) + b"{", "incomplete"),
])
def test_what_is_no_safetensors_file(data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(ModelDamaged, match=words):
        read_header(tmp_path / "x.safetensors")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=6), cut=st.none() | st.integers(0, 4000))
def test_any_damage_to_a_safetensors_header_ends_in_our_error_or_tensors_inside_the_file(changes, cut, tmp_path: Path) -> None:
    arrays = {f"t{i}": np.full((i + 1, 3), i, np.float32) for i in range(6)}
    path = tmp_path / "x.safetensors"
    save_file(arrays, path)
    data = bytearray(path.read_bytes())
    for at, byte in changes:
        data[at % len(data)] = byte
    if cut is not None:
        del data[cut % len(data) :]
    path.write_bytes(data)
    try:
        tensors = read_header(path)
    except EdgeInferError as error:
        assert str(path) in str(error)
        return
    assert all(tensor.offset + tensor.nbytes <= len(data) for tensor in tensors.values())
