"""`edgeinfer bench` as a person or a script meets it."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgeinfer import cli
from edgeinfer.errors import BadRequest
from edgeinfer.runtime.bench import arguments, profile, report_file
from edgeinfer.runtime.load import load

SHORT = ("-p", "32", "-n", "8", "-r", "2", "-npl", "1,2", "-npp", "16", "-ntg", "4", "--scenario", "none", "-np", "2", "-c", "512", "--kv-size", "1024", "-t", "1")


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch) -> None:
    """No test sees the user's own settings."""
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    for name in [name for name in os.environ if name.startswith("EDGEINFER_")]:
        monkeypatch.delenv(name)


def bench(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgeinfer", "bench", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, stdin=subprocess.DEVNULL)


def parsed(*words: str) -> argparse.Namespace:
    parser, commands = cli._parser()
    cli._apply_settings("bench", commands["bench"])
    return parser.parse_args(["bench", *words])


# ---------------------------------------------------------------------------------------------------------------- arguments


def test_defaults_are_llama_bench_s() -> None:
    settings = arguments.settings(parsed("m"))
    assert (settings.n_prompt, settings.n_gen, settings.repetitions, settings.parallel, settings.batched_prompt, settings.batched_gen) == ((512,), (128,), 5, (1, 4, 16), 128, 64)
    assert settings.scenarios == ("single", "burst", "shared", "mixed", "turns") and settings.rounds == 1 and not settings.quick


def test_parts_can_be_chosen_and_left_out() -> None:
    settings = arguments.settings(parsed("m", "-p", "0", "-n", "16,32", "-npl", "none", "--scenario", "turns,single", "--quick", "--rounds", "3"))
    assert (settings.n_prompt, settings.n_gen, settings.parallel, settings.scenarios) == ((), (16, 32), (), ("single", "turns"))
    assert (settings.quick, settings.rounds, settings.repetitions) == (True, 3, 2)


def test_settings_come_from_variables_and_files_too(monkeypatch) -> None:
    monkeypatch.setenv("EDGEINFER_N_PARALLEL", "2,8")
    Path("edgeinfer.toml").write_text('[bench]\nscenario = "burst"\nquick = true\nset = ["prefill_chunk=64"]\n')
    args = parsed("m")
    assert (args.n_parallel, args.scenario, args.quick, args.set) == ((2, 8), "burst", True, ["prefill_chunk=64"])


@pytest.mark.parametrize(("words", "named"), [
    (["--scenario", "busrt"], "busrt"), (["--scenario", ""], "scenario"), (["-r", "-1"], "-r"), (["--rounds", "0"], "--rounds"), (["-npp", "0"], "-npp"), (["-ntg", "0"], "-ntg"),
    (["-p", "0", "-n", "0", "-npl", "0", "--scenario", "none"], "Nothing"),
])
def test_wrong_settings_are_refused(words, named) -> None:
    with pytest.raises(BadRequest, match=named):
        arguments.settings(parsed("m", *words))


@pytest.mark.parametrize("words", [["-p", "-5"], ["-npl", "1,x"], ["-n", "many"], ["--url"]])
def test_wrong_usage_has_status_2(words) -> None:
    with pytest.raises(SystemExit) as stop:
        parsed("m", *words)
    assert stop.value.code == 2


def test_the_engine_gets_room_for_what_is_measured() -> None:
    def of(*words: str) -> dict:
        args = parsed("m", *words)
        return arguments.engine_options(args, {"ctx_size": args.ctx_size})

    assert of() == {"ctx_size": 0, "parallel": 16, "kv_size": 16384}
    assert of("-npl", "32", "-npp", "900", "-c", "2048") == {"ctx_size": 2048, "parallel": 32, "kv_size": 32 * 965}
    assert of("-np", "4", "--kv-size", "100") == {"ctx_size": 0, "parallel": 4, "kv_size": 100}
    assert of("-c", "32768")["kv_size"] == 32768
    assert of("--no-kv-unified") == {"ctx_size": 4096, "parallel": 16, "kv_unified": False}
    assert of("--set", "prefill-chunk=64", "--set", "mmap=false", "--set", "flash_attn=on", "--set", "kv_size=5") == {
        "ctx_size": 0, "parallel": 16, "kv_size": 5, "prefill_chunk": 64, "mmap": False, "flash_attn": "on",
    }
    with pytest.raises(BadRequest, match="NAME=VALUE"):
        of("--set", "prefill_chunk")


# ------------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(("words", "named"), [
    (["nowhere.gguf"], "nowhere.gguf"), (["smollm2-135m", "--compare", "gone.json"], "gone.json"), (["smollm2-135m", "--html", "gone/page.html"], "gone"),
    (["smollm2-135m", "--scenario", "x"], "'x'"), (["smollm2-135m", *SHORT, "-p", "600"], "pp600"), (["smollm2-135m", *SHORT, "--set", "nonsense=1"], "nonsense"),
    (["smollm2-135m", *SHORT, "-npl", "4"], "-npl 4"),
])
def test_errors_are_one_sentence_before_anything_is_measured(words, named) -> None:
    done = bench(*words)
    assert done.returncode == 2 and done.stdout == "" and named in done.stderr, done.stderr
    assert done.stderr.startswith("edgeinfer: ") and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


# ------------------------------------------------------------------------------------------------------------ the real thing


def test_a_short_run_on_the_demo_model_and_a_second_one_beside_it(smollm2_gguf, tmp_path) -> None:
    first = bench(smollm2_gguf, *SHORT, "--json")
    assert first.returncode == 0, first.stderr
    earlier = tmp_path / "earlier.json"
    earlier.write_text(first.stdout)
    report = report_file.read(earlier)
    assert [rate.name for rate in report.rates] == ["pp32", "tg8"] and all(rate.mean > 0 for rate in report.rates)
    assert [each.sequences for each in report.batched] == [1, 2]
    assert report.model.quantization == "Q4_1" and report.model.kv_bytes_per_token == 23040 and report.model.weight_bytes > 80e6 and report.model.kv_type == "f16"
    assert report.machine.threads == 1 and report.machine.build and "pp32 ..." in first.stderr

    page = tmp_path / "page.html"
    second = bench(smollm2_gguf, *SHORT, "-npl", "0", "--compare", earlier, "--html", page, "-ctk", "q8_0", "-ctv", "q8_0", "--profile")
    assert second.returncode == 0, second.stderr
    for part in ("pp32", "compared with the run of", "not the same: kv type: f16 before, q8_0 now", "only before: 1 sequence S_PP", "a decode step in milliseconds"):
        assert part in second.stdout, part
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>") and sorted(path.name for path in tmp_path.iterdir()) == ["earlier.json", "home", "page.html"]


def test_the_profile_tells_native_time_from_our_own(smollm2_gguf) -> None:
    with load(smollm2_gguf, ctx_size=256, threads=1, parallel=2) as engine:
        found = profile.profile(engine, random.Random(1), 2, 12, words=3)
    assert found.steps > 2 and found.native_ms > found.python_ms["batch"] > 0 and found.python_ms["sample"] > 0


def test_interrupting_prints_what_was_measured(smollm2_gguf, tmp_path) -> None:
    command = [sys.executable, "-m", "edgeinfer", "bench", str(smollm2_gguf), *SHORT, "-p", "16", "-n", "200", "-r", "1000", "--json", "--html", str(tmp_path / "page.html")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
    line = process.stderr.readline()
    assert line == "pp16 ...\n", line
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=120)
    document = json.loads(out)
    assert process.returncode == 130 and document["interrupted"] is True and "Traceback" not in errors
    assert document["batched"] == [] and sorted(path.name for path in tmp_path.iterdir()) == ["home", "page.html"]
