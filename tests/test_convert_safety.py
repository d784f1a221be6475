"""Nothing under the final name but a whole, tested file: refusals before writing, full disks, interrupts, kills, leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny import DROP, change_weights, edit, tiny

from edgeinfer.convert import convert, pipeline, stream, verify
from edgeinfer.errors import ConversionFailed, EdgeInferError, ModelDamaged, ModelNotFound, UnsupportedModel

OLD = b"an older file"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny(tmp_path / "model", "llama")


def refuse(folder: Path, to: str = "gguf-q4", **options: object) -> EdgeInferError:
    """Convert onto an existing file, which must fail and leave it and its folder as they were."""
    place = folder.parent / "out"
    place.mkdir(exist_ok=True)
    (place / "model.gguf").write_bytes(OLD)
    with pytest.raises(EdgeInferError) as caught:
        convert(folder, to, place / "model.gguf", **options)
    assert (place / "model.gguf").read_bytes() == OLD
    assert [path.name for path in place.iterdir()] == ["model.gguf"]
    return caught.value


# --------------------------------------------------------------------------------------------------------------- before writing


def test_more_tokens_than_rows_names_both_numbers(tmp_path: Path) -> None:  # case 5
    error = refuse(tiny(tmp_path / "model", "llama", extra_rows=-3))
    rows = int(str(error).split(" rows")[0].split()[-1].replace(",", ""))
    assert f"{rows + 3}" in str(error).replace(",", "") and f"{rows} rows" in str(error).replace(",", "")


@pytest.mark.parametrize("key", ["architectures", "hidden_size", "vocab_size", "num_attention_heads"])
def test_a_missing_config_key_is_named(folder: Path, key: str) -> None:  # case 9
    edit(folder / "config.json", **{key: DROP})
    error = refuse(folder)
    assert key in str(error) and str(folder) in str(error)


def test_no_config_at_all(folder: Path) -> None:  # case 9
    (folder / "config.json").unlink()
    error = refuse(folder)
    assert "config.json" in str(error) and str(folder) in str(error)


def test_an_unknown_rope_type_is_refused_by_name(tmp_path: Path) -> None:  # case 11
    assert "spiral" in str(refuse(tiny(tmp_path / "model", "llama", rope="spiral")))


@pytest.mark.parametrize(
    ("family", "switches", "words"),
    [
        ("qwen2", {"rope": "llama3"}, "no llama3 rope for qwen2"),
        ("qwen3", {"rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 4.0}}, "beta_fast 32"),
        ("llama", {"partial_rotary": 0.5}, "whole heads"),
        ("gemma3", {"config": {"query_pre_attn_scalar": 100}}, "scales attention scores"),
        ("phi3", {"head_dim": 16}, "head_dim x heads"),
    ],
)
def test_what_llama_cpp_would_compute_differently_is_refused(family: str, switches: dict, words: str, tmp_path: Path) -> None:
    assert words in str(refuse(tiny(tmp_path / "model", family, **switches)))


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "model", "qwen2", rope="llama3", extra_rows=-2)
    change_weights(folder, lambda name, values: None if "layers.1.mlp.up_proj" in name else values.T if "o_proj" in name else values)
    error = refuse(folder)
    assert isinstance(error, ConversionFailed)
    text = str(error)
    assert all(word in text for word in ("layers.1.mlp.up_proj.weight is missing", "no llama3 rope", "rows"))
    assert len(error.problems) >= 3


@pytest.mark.parametrize("shards", [1, 3])
def test_problems_of_config_weights_and_tokenizer_are_one_list(shards: int, tmp_path: Path) -> None:  # cases 1, 9, 11
    folder = tiny(tmp_path / "model", "llama", rope="spiral", tokenizer="unknown", extra_rows=-2, shards=shards, config={"hidden_act": "relu6"})
    change_weights(folder, lambda name, values: None if "layers.1.mlp.up_proj" in name else values)
    if shards > 1:
        (folder / "model-00001-of-00003.safetensors").unlink()
    error = refuse(folder)
    assert isinstance(error, ConversionFailed)
    words = ["config.json: The rope type 'spiral'", "config.json: 'hidden_act' is 'relu6'", "layers.1.mlp.up_proj.weight", "--pre NAME"]
    words.append("tokens have no weights")
    if shards > 1:
        words.append("model-00001-of-00003.safetensors is missing")
    for word in words:
        assert any(word in problem for problem in error.problems), word


def test_a_config_that_says_no_sizes_hides_nothing_that_can_be_known_without_them(tmp_path: Path) -> None:  # cases 1, 9, 20
    folder = tiny(tmp_path / "model", "llama", rope="spiral", tokenizer="unknown", shards=2, drop=["hidden_size", "vocab_size"])
    data = (folder / "model-00001-of-00002.safetensors").read_bytes()
    (folder / "model-00001-of-00002.safetensors").write_bytes(data[:-1])
    (folder / "model-00002-of-00002.safetensors").unlink()
    edit(folder / "tokenizer_config.json", eos_token="<|nowhere|>")
    problems = list(refuse(folder).problems)
    expected = (
        "config.json: The key 'vocab_size' is missing", "config.json: The key 'hidden_size' is missing", "'spiral'",
        "00001-of-00002.safetensors is incomplete", "00002-of-00002.safetensors is missing", "pre-tokenizer",
        "'<|nowhere|>', which is not in the vocabulary",
    )
    for word in expected:
        assert sum(word in problem for problem in problems) == 1, word
    assert len(problems) == len(expected)                # and no consequence of these is said


def test_files_that_cannot_be_read_are_in_the_list_too(tmp_path: Path) -> None:  # cases 1, 9
    folder = tiny(tmp_path / "model", "llama", tokenizer="unknown")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        (folder / name).write_text("{")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    problems = refuse(folder).problems
    for word in ("/config.json is not", "generation_config.json is not", "tokenizer_config.json is not", "pytorch_model.bin", "--pre NAME"):
        assert sum(word in problem for problem in problems) == 1, word
    assert len(problems) == 5


def test_a_config_that_alone_is_wrong_keeps_its_own_error(folder: Path) -> None:  # case 11
    edit(folder / "config.json", hidden_act="relu6", rope_scaling={"rope_type": "spiral"})
    error = refuse(folder)
    assert type(error) is UnsupportedModel and error.exit_status == 2
    assert "'relu6'" in str(error) and "'spiral'" in str(error) and str(folder / "config.json") in str(error)
    (folder / "config.json").write_text("{")
    assert type(refuse(folder)) is ModelDamaged


def test_a_broken_tokenizer_is_found_before_any_weight_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # case 1
    monkeypatch.setattr(pipeline, "scan_all", lambda *_: pytest.fail("weights were read"))
    (folder / "tokenizer.json").unlink()
    assert "tokenizer" in str(refuse(folder))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_truncated_weights_are_refused(folder: Path, share: float) -> None:  # case 20
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    assert "model.safetensors" in str(refuse(folder))


def test_weights_that_end_while_they_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pipeline.scan_all

    def cut_afterwards(*arguments: object) -> dict:
        found = real(*arguments)
        os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 100)
        return found

    monkeypatch.setattr(pipeline, "scan_all", cut_afterwards)
    error = refuse(folder)
    assert isinstance(error, ModelDamaged) and "ended in the middle" in str(error)


def test_places_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConversionFailed, match="does not exist"):
        convert(folder, "gguf-q4", tmp_path / "nowhere" / "out.gguf")
    with pytest.raises(ModelNotFound):
        convert(tmp_path / "nothing", "gguf-q4")


def test_a_hub_cache_snapshot_is_followed_link_by_link(tmp_path: Path) -> None:  # case 22
    made = tiny(tmp_path / "made", "llama", shards=2)
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "0a1b"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(made.iterdir())):
        (blobs / f"{number:040x}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / f"{number:040x}")
    linked = convert(snapshot, "gguf-q8", tmp_path / "linked.gguf")
    assert linked.bytes == convert(made, "gguf-q8", tmp_path / "plain.gguf").bytes
    for file in made.glob("*.index.json"):
        text = file.read_text().replace("model-00002-of-00002.safetensors", "../../../made/model-00002-of-00002.safetensors")
        (snapshot / file.name).unlink()
        (snapshot / file.name).write_text(text)
    with pytest.raises(EdgeInferError, match=r"\.\./\.\./\.\./made"):
        convert(snapshot, "gguf-q8", tmp_path / "escaped.gguf")
    assert not (tmp_path / "escaped.gguf").exists()


# ---------------------------------------------------------------------------------------------------------------- while writing


def test_too_little_room_is_said_before_writing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # case 18
    monkeypatch.setattr(pipeline.shutil, "disk_usage", lambda _: os.terminal_size((0, 0)) and type("Usage", (), {"free": 1000})())
    assert "1.0 kB free" in str(refuse(folder))


def test_logits_that_are_no_numbers_remove_the_file(folder: Path) -> None:
    change_weights(folder, lambda name, values: values * np.float32(1e30) if "proj" in name else values)
    assert "not numbers" in str(refuse(folder, "gguf-bf16"))


def test_a_tokenizer_that_came_out_differently_removes_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeinfer.convert import parity

    def differ(*_: object, **__: object) -> None:
        raise ConversionFailed("The converted file does not treat text as the source does:", ["'abc' differs"])

    monkeypatch.setattr(parity, "check_parity", differ)
    assert "'abc' differs" in str(refuse(folder))


def test_an_older_file_is_replaced_only_by_a_whole_one(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.gguf"
    out.write_bytes(OLD)
    seen = []
    convert(folder, "gguf-q4", out, progress=lambda stage, done, total: seen.append(out.read_bytes() == OLD))
    assert seen and all(seen)
    assert out.read_bytes()[:4] == b"GGUF"


@pytest.mark.parametrize("stage", ["scan", "write", "verify"])
def test_an_exception_in_any_stage_leaves_nothing(folder: Path, stage: str) -> None:
    class Stop(EdgeInferError):
        pass

    def stop(name: str, done: int, total: int) -> None:
        if name == stage and done:
            raise Stop

    assert isinstance(refuse(folder, progress=stop), Stop)


CHILD = """
    import resource, sys, time
    from edgeinfer.convert import convert
    from edgeinfer.errors import EdgeInferError
    folder, out, how = sys.argv[1:]
    if how == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    def report(stage, done, total):
        if stage == "write" and done and how == "wait":
            print("writing", flush=True)
            for _ in range(12_000):                      # a signal just before a sleep begins does not end that sleep
                time.sleep(0.01)
    try:
        convert(folder, "gguf-f32", out, progress=report)
    except EdgeInferError as error:
        sys.exit(str(error))
"""


def child(folder: Path, out: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(folder), str(out), how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_file_size_limit_is_a_plain_message_and_no_file(folder: Path, tmp_path: Path) -> None:  # case 18
    out = tmp_path / "out" / "model.gguf"
    out.parent.mkdir()
    process = child(folder, out, "limit")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "could not be written" in stderr and "files of this size are not allowed" in stderr and "Traceback" not in stderr
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_conversion_leaves_no_final_file_and_the_next_one_cleans_up(folder: Path, number: int, tmp_path: Path) -> None:  # case 20
    out = tmp_path / "out" / "model[1].gguf"             # brackets: leftovers are looked for by pattern
    out.parent.mkdir()
    process = child(folder, out, "wait")
    assert process.stdout.readline() == "writing\n"
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode != 0
    assert not out.exists()
    assert len(list(out.parent.iterdir())) == (0 if number == signal.SIGINT else 1)
    convert(folder, "gguf-f32", out)
    assert list(out.parent.iterdir()) == [out]


def test_another_conversion_under_way_is_left_alone(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "model.gguf"
    out.parent.mkdir()
    process = child(folder, out, "wait")
    try:
        assert process.stdout.readline() == "writing\n"
        convert(folder, "gguf-q8", out)
        assert len(list(out.parent.iterdir())) == 2
    finally:
        process.kill()
        process.communicate(timeout=120)


# -------------------------------------------------------------------------------------------------------------------- streaming


@pytest.mark.parametrize("target", ["gguf-f16", "gguf-q4"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3"])
def test_blocks_and_threads_do_not_change_a_byte(family: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny(tmp_path / "model", family)
    convert(folder, target, tmp_path / "whole.gguf", threads=1, verify=False)
    monkeypatch.setattr(stream, "BLOCK_ELEMENTS", 1000)
    convert(folder, target, tmp_path / "blocks.gguf", threads=3, verify=False)
    assert (tmp_path / "whole.gguf").read_bytes() == (tmp_path / "blocks.gguf").read_bytes()


def test_progress_counts_every_byte_of_every_stage(folder: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    report = convert(folder, "gguf-q8", tmp_path, progress=lambda *step: seen.append(step))
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == ["scan", "write", "verify"]
    for stage in ("scan", "write", "verify"):
        steps = [(done, total) for name, done, total in seen if name == stage]
        assert steps[0][0] == 0 and steps[-1][0] == steps[-1][1]
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert sum(name == "write" for name, _, _ in seen) == 1 + sum(total.tensors for total in report.tensors)


def test_the_report_is_json(folder: Path, tmp_path: Path) -> None:
    import json

    report = convert(folder, "gguf-q4", tmp_path)
    values = json.loads(json.dumps(report.as_dict()))
    assert values["output"] == str(tmp_path / "model-Q4_K_M.gguf")
    assert values["bytes"] == (tmp_path / "model-Q4_K_M.gguf").stat().st_size
    assert values["checks"] and values["seconds"].keys() == {"plan", "scan", "write", "verify"} and values["peak_memory_bytes"] > 0
    assert sum(total["bytes"] for total in values["tensors"]) * 8 == pytest.approx(values["bits_per_weight"] * values["parameters"], rel=1e-3)


# ----------------------------------------------------------------------------------------------------- files too large to compute


def test_a_large_file_is_tried_without_its_weights(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "DECODE_UP_TO", 0)
    assert convert(folder, "gguf-f16", tmp_path).checks[0] == "llama.cpp takes every tensor"


@pytest.mark.parametrize("decode", [False, True])
def test_shapes_that_the_metadata_contradicts_are_found_either_way(folder: Path, decode: bool, tmp_path: Path) -> None:
    report = convert(folder, "gguf-f16", tmp_path)
    reader = gguf.GGUFReader(report.output, "r+")
    field = reader.fields["llama.feed_forward_length"]
    field.parts[field.data[0]][0] += 32
    reader.data.flush()
    with pytest.raises(ConversionFailed, match="wrong shape"):
        verify.try_model(report.output, decode=decode)
