"""The command line as a person or a script meets it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgeinfer import cli
from edgeinfer.errors import BadRequest

JAPAN = "What is the capital of Japan?"


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch) -> None:
    """No test sees or changes the user's own store, settings or folder."""
    home = tmp_path / "home"
    (home / "work").mkdir(parents=True)
    monkeypatch.chdir(home / "work")
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith("EDGEINFER_")]:
        monkeypatch.delenv(name)


def edgeinfer(*words: str | Path, stdin: str | None = None, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgeinfer", *map(str, words)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=280, **({"stdin": subprocess.DEVNULL} if stdin is None else {}), **options)


def one_sentence(text: str) -> bool:
    """Our errors are one line that begins with the program's name, no traceback."""
    return text.startswith("edgeinfer: ") and text.count("\n") == 1 and "Traceback" not in text


# ----------------------------------------------------------------------------------------------------------------------- run


def test_run_streams_an_answer(smollm2_gguf) -> None:
    done = edgeinfer("run", smollm2_gguf, JAPAN, "--temp", "0", "-n", "16")
    assert (done.returncode, done.stderr) == (0, "") and "Tokyo" in done.stdout and done.stdout.endswith("\n")


def test_run_json_is_one_document(smollm2_gguf) -> None:
    done = edgeinfer("run", smollm2_gguf, JAPAN, "--temp", "0", "-n", "4", "--json", "-c", "512", "-s", "5")
    document = json.loads(done.stdout)
    assert done.returncode == 0 and done.stderr == ""
    assert document["finish_reason"] == "length" and document["seed"] == 5
    assert document["usage"]["completion_tokens"] == 4 and document["usage"]["total_tokens"] == document["usage"]["prompt_tokens"] + 4
    assert document["timings"]["predicted_n"] == 4 and document["timings"]["predicted_per_second"] > 0 and document["timings"]["first_token_ms"] > 0
    assert document["model"]["engine"] == "llamacpp" and document["model"]["n_ctx"] == 512 and document["model"]["layers_offloaded"] == 0


@pytest.mark.parametrize("words", [["-"], []])
def test_run_reads_standard_input(smollm2_gguf, words) -> None:
    done = edgeinfer("run", smollm2_gguf, *words, "--temp", "0", "-n", "16", stdin=JAPAN)
    assert done.returncode == 0 and "Tokyo" in done.stdout


def test_run_raw_and_stop(smollm2_gguf) -> None:
    done = edgeinfer("run", smollm2_gguf, "One, two, three, four,", "--raw", "--temp", "0", "-n", "40", "--stop", "seven")
    assert done.returncode == 0 and "five" in done.stdout and "seven" not in done.stdout


def test_interrupting_run_keeps_the_text(smollm2_gguf) -> None:
    command = [sys.executable, "-m", "edgeinfer", "run", str(smollm2_gguf), "Count.", "--ignore-eos", "--temp", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
    first = process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=120)
    assert process.returncode == 130 and len(first) == 5 and rest.endswith("\n") and "Traceback" not in errors


def test_a_reader_that_leaves_is_no_traceback(smollm2_gguf) -> None:
    command = f'"{sys.executable}" -m edgeinfer run "{smollm2_gguf}" "Count." --ignore-eos --temp 0 -n 600 | head -c 5'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert len(done.stdout) == 5 and "Traceback" not in done.stderr


# -------------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(("words", "status", "named"), [
    (["run", "nowhere.gguf", "hi"], 2, "nowhere.gguf"),
    (["run", "smolm2-135m", "hi"], 2, "smollm2-135m"),                              # a near miss is suggested
    (["run", "smollm2-135m", "hi", "--temp", "999999"], 2, "temperature"),         # case 85
    (["run", "smollm2-135m", "hi", "--temp", "nan"], 2, "temperature"),
    (["run", "smollm2-135m", "hi", "--top-p", "-1"], 2, "top_p"),
    (["run", "smollm2-135m", "hi", "--repeat-penalty", "0"], 2, "repeat_penalty"),
    (["run", "smollm2-135m", "hi", "-ctk", "q9"], 2, "q9"),
    (["run", "smollm2-135m", "hi", "--raw", "--system", "x"], 2, "--system"),
    (["run", "smollm2-135m", "word " * 300, "-c", "256"], 2, "256"),
    (["chat", "smollm2-135m"], 2, "terminal"),
    (["chat", "nowhere.gguf"], 2, "terminal"),
    (["convert", "nowhere", "--to", "gguf-q4"], 2, "nowhere"),
    (["models", "show"], 2, "NAME"),
    (["models", "list", "x"], 2, "models show x"),
    (["models", "rm", "x"], 2, "x"),
    (["models", "pull", "qwen3-0.6b", "--offline"], 2, "offline"),
])
def test_errors_are_one_sentence_that_names_the_thing(words, status, named) -> None:
    done = edgeinfer(*words)
    assert done.returncode == status and done.stdout == "" and one_sentence(done.stderr) and named in done.stderr, done.stderr


def test_an_empty_raw_prompt_is_refused() -> None:
    done = edgeinfer("run", "smollm2-135m", "", "--raw")
    assert done.returncode == 2 and one_sentence(done.stderr) and "empty" in done.stderr


def test_debug_shows_the_traceback() -> None:
    done = edgeinfer("run", "nowhere.gguf", "hi", "--debug")
    assert done.returncode == 1 and "Traceback" in done.stderr


@pytest.mark.parametrize("words", [["run"], ["fly"], ["run", "m", "p", "--wat"], ["convert", "x"], ["run", "m", "p", "-n", "many"]])
def test_wrong_usage_has_status_2(words) -> None:
    done = edgeinfer(*words)
    assert done.returncode == 2 and "usage:" in done.stderr


# ------------------------------------------------------------------------------------------------------------------ settings


def parsed(*words: str):
    parser, commands = cli._parser()
    cli._apply_settings(words[0], commands[words[0]])
    return parser.parse_args(words)


def test_flag_beats_variable_beats_file_beats_default(monkeypatch) -> None:
    assert parsed("run", "m", "p").top_k == 40
    Path("edgeinfer.toml").write_text("top-k = 1\n")
    assert parsed("run", "m", "p").top_k == 1
    Path("edgeinfer.toml").write_text("top-k = 1\n[run]\ntop_k = 2\n")
    assert parsed("run", "m", "p").top_k == 2
    assert parsed("chat", "m").top_k == 1
    monkeypatch.setenv("EDGEINFER_TOP_K", "3")
    assert parsed("run", "m", "p").top_k == 3
    assert parsed("run", "m", "p", "--top-k", "4").top_k == 4


def test_settings_of_every_kind(monkeypatch) -> None:
    monkeypatch.setenv("EDGEINFER_JSON", "yes")
    monkeypatch.setenv("EDGEINFER_TEMP", "0.25")
    monkeypatch.setenv("EDGEINFER_SYSTEM", "Be brief.")
    monkeypatch.setenv("EDGEINFER_CHAT_TEMPLATE", "t.jinja")
    Path("edgeinfer.toml").write_text('stop = ["a", "b"]\nflash-attn = "on"\n')
    args = parsed("run", "m", "p")
    assert (args.json, args.temp, args.system, args.chat_template, args.stop, args.flash_attn) == (True, 0.25, "Be brief.", Path("t.jinja"), ["a", "b"], "on")


def test_required_options_may_come_from_settings(monkeypatch) -> None:
    monkeypatch.setenv("EDGEINFER_TO", "gguf-q8")
    assert parsed("convert", "x").to == "gguf-q8"


@pytest.mark.parametrize(("content", "named"), [
    ("topk = 1", "topk"), ("[fly]\nx = 1", "fly"), ("[run]\nwat = 1", "wat"), ("top-k = 'many'", "many"), ("flash-attn = 'maybe'", "maybe"), ("= 1", "TOML"),
    ("json = 'perhaps'", "perhaps"),
])
def test_wrong_settings_files_are_named(content, named) -> None:
    Path("edgeinfer.toml").write_text(content)
    with pytest.raises(BadRequest, match=named):
        parsed("run", "m", "p")


def test_a_named_settings_file_must_exist(monkeypatch) -> None:
    monkeypatch.setenv("EDGEINFER_CONFIG", "gone.toml")
    with pytest.raises(BadRequest, match="gone.toml"):
        parsed("run", "m", "p")
    Path("gone.toml").write_text("top-k = 7")
    assert parsed("run", "m", "p").top_k == 7


def test_a_wrong_variable_is_one_sentence() -> None:
    done = edgeinfer("run", "smollm2-135m", "hi", env={**os.environ, "EDGEINFER_TOP_K": "many"})
    assert done.returncode == 2 and one_sentence(done.stderr) and "EDGEINFER_TOP_K" in done.stderr


# -------------------------------------------------------------------------------------------------------- convert and models


def test_convert_from_the_command_line(demo_checkpoint, tmp_path) -> None:
    out = tmp_path / "demo.gguf"
    plan = edgeinfer("convert", demo_checkpoint, "--to", "gguf-q4_0", "-o", out, "--dry-run", "--json")
    assert plan.returncode == 0 and not out.exists()
    done = edgeinfer("convert", demo_checkpoint, "--to", "gguf-q4_0", "-o", out)
    assert done.returncode == 0 and str(out) in done.stdout and "Q4_0" in done.stdout
    assert json.loads(plan.stdout)["bytes"] == out.stat().st_size
    assert "Tokyo" in edgeinfer("run", out, JAPAN, "--temp", "0", "-n", "16").stdout


@pytest.mark.parametrize(("to", "named"), [("gguf-q9", "q9"), ("onnx-int4", "onnx-int4"), ("q4", "gguf-q4")])
def test_wrong_targets_are_named(demo_checkpoint, to, named) -> None:
    done = edgeinfer("convert", demo_checkpoint, "--to", to)
    assert done.returncode == 2 and one_sentence(done.stderr) and named in done.stderr


def test_models_list_and_show() -> None:
    done = edgeinfer("models")
    assert done.returncode == 0 and "smollm2-135m" in done.stdout and "NAME" in done.stdout
    listed = json.loads(edgeinfer("models", "list", "--json").stdout)
    assert any(row["name"] == "smollm2-135m" and row["where"] == "here" for row in listed)
    shown = json.loads(edgeinfer("models", "show", "smollm2-135m", "--json", "-c", "1024", "-np", "2", "-ctk", "q8_0").stdout)
    assert shown["quantization"] == "Q4_1" and shown["context_length"] == 8192 and shown["memory"]["kv"] > 0
    assert "memory" in edgeinfer("models", "show", "smollm2-135m").stdout


def test_doctor() -> None:
    report = json.loads(edgeinfer("doctor", "--json").stdout)
    assert report["engine"] == "llamacpp" and report["packages"]["llama-cpp-python"] and report["cores"]["usable"] >= 1
    assert "llama.cpp" in edgeinfer("doctor").stdout


def test_the_store_is_used_by_name(smollm2_gguf) -> None:
    from edgeinfer.models import store

    store.add("mine", {"model.gguf": smollm2_gguf}, kind="gguf", source="test")
    assert "Tokyo" in edgeinfer("run", "mine", JAPAN, "--temp", "0", "-n", "16").stdout
    assert "mine" in edgeinfer("models").stdout
    assert edgeinfer("models", "rm", "mine").returncode == 0 and "mine " not in edgeinfer("models").stdout
