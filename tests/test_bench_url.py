"""`edgeinfer bench --url`: the scenarios against servers of several dialects, ours among them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from raw_server import HANG_UP, MODELS, events, raw_server, whole
from server_process import serving

from edgeinfer import cli
from edgeinfer.errors import BadRequest, EdgeInferError, ServerFailed, ServerUnreachable
from edgeinfer.runtime.backends.fake import ScriptedBackend
from edgeinfer.runtime.bench import arguments, clients, comparison, http_clients, page, report_file, table
from edgeinfer.runtime.bench.scenarios import Scenario, Turn
from edgeinfer.runtime.bench.session import Session
from edgeinfer.runtime.bench.url_session import UrlSession
from edgeinfer.runtime.bench.values import Settings
from edgeinfer.runtime.service import Engine


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch) -> None:
    """No test sees the user's own settings."""
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    for name in [name for name in os.environ if name.startswith("EDGEINFER_")]:
        monkeypatch.delenv(name)


def engine(script=(b"a", b"b", b"c"), **options) -> Engine:
    return Engine(ScriptedBackend(script, **{"n_ctx": 8192, "max_slots": 16, "max_batch": 2048, **options}))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def parsed(*words: str) -> argparse.Namespace:
    parser, commands = cli._parser()
    cli._apply_settings("bench", commands["bench"])
    return parser.parse_args(["bench", *words])


def chunk(text: str | None = None, finish: str | None = None, **more) -> dict:
    delta = {"role": "assistant"} if text is None and finish is None else {} if text is None else {"content": text}
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}


def usage(**more) -> dict:
    return {"object": "chat.completion.chunk", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12, **more}}


def dialect(*documents):
    """A server with one model that says the same to every question."""
    return lambda request: [whole(MODELS)] if request.method == "GET" else events(*documents)


# ------------------------------------------------------------------------------------------------------------- what is measured


SCENARIO = Scenario("two kinds", 3, (
    *((Turn("x" if n % 2 else "y", (user(f"question {n}"),), 2),) for n in range(7)),
    (Turn("x", (user("first"),), 8), Turn("x", (user("second"),), 8)),
))


def test_counts_are_those_of_the_same_scenario_in_process() -> None:
    with engine() as made:
        inside = clients.run(made, SCENARIO)
    seen: list[tuple[int, int]] = []
    with serving(engine()) as server:
        outside = http_clients.run(http_clients.find(server.url, None, None), SCENARIO, lambda done, total: seen.append((done, total)))
        assert len(server.metrics.ends) == 9 + 2         # and two warm-ups
    for name in ("name", "clients", "requests", "failed", "errors", "output_tokens"):
        assert getattr(outside, name) == getattr(inside, name), name
    assert seen == [(done, 9) for done in range(10)]
    for kind in ("x", "y"):
        assert outside.kinds[kind].requests == inside.kinds[kind].requests
        assert outside.kinds[kind].output_tokens_mean == inside.kinds[kind].output_tokens_mean
        assert outside.kinds[kind].prompt_tokens_mean == inside.kinds[kind].prompt_tokens_mean
        assert outside.kinds[kind].ttft_ms.p50 <= outside.kinds[kind].latency_ms.p50
    assert outside.kinds["x"].cached_tokens_mean > 0


def test_failures_are_counted_and_end_a_conversation() -> None:
    long = user("much too long " * 40)
    scenario = Scenario("some fail", 2, (
        (Turn("good", (user("hi"),), 2),), (Turn("bad", (long,), 2), Turn("bad", (user("never asked"),), 2)), (Turn("good", (user("ho"),), 2),),
    ))
    with serving(engine(n_ctx=200)) as server:
        figures = http_clients.run(http_clients.find(server.url, None, None), scenario)
    assert (figures.requests, figures.failed, list(figures.kinds)) == (3, 1, ["good"])
    assert "HTTP 400" in next(iter(figures.errors)) and "200" in next(iter(figures.errors))


def thinks(field: str) -> dict:
    return {"choices": [{"delta": {field: "hm"}}]}


ONE = Scenario("one", 1, ((Turn("one", (user("hi"),), 3),),))


@pytest.mark.parametrize(("documents", "texts", "output", "prompt", "cached"), [
    ((chunk(), chunk("a"), chunk("b"), chunk(None, "stop"), usage(prompt_tokens_details={"cached_tokens": 4}), "[DONE]"), 2, 3, 9, 4),
    ((chunk("ab"), chunk("c", "stop"), usage(), "[DONE]"), 2, 3, 9, 0),
    ((chunk("a"), chunk(None, "length", timings={"cache_n": 5, "prompt_n": 4}, usage={"prompt_tokens": 9, "completion_tokens": 1}),), 1, 1, 9, 5),
    ((chunk("a"), chunk("b"), chunk(None, "stop"), "[DONE]"), 2, 2, 0, 0),                                    # no usage: pieces count
    ((chunk("a"), chunk(None, "stop"), usage(prompt_tokens_details=None), "[DONE]"), 1, 3, 9, 0),
    ((thinks("reasoning_content"), thinks("reasoning"), chunk("a", "stop"), usage(), "[DONE]"), 3, 3, 9, 0),
    ((chunk(), chunk(None, "stop"), usage(completion_tokens=0), "[DONE]"), 0, 0, 9, 0),                       # an empty answer
])
def test_dialects(documents, texts, output, prompt, cached) -> None:
    with raw_server(dialect(*documents)) as server:
        figures = http_clients.run(http_clients.find(server.url, None, None), ONE)
    assert figures.errors == {} and figures.output_tokens == output
    found = figures.kinds["one"]
    assert (found.prompt_tokens_mean, found.cached_tokens_mean, found.output_tokens_mean) == (prompt, cached, output)
    assert (found.ttft_ms is not None, found.itl_ms is not None) == (texts > 0, texts > 1)


@pytest.mark.parametrize(("pieces", "named"), [
    ([whole({"error": {"message": "It is\nbroken."}}, 500)], "HTTP 500: It is broken."), ([whole(b"<html>", 502)], "HTTP 502: <html>"),
    ([HANG_UP], "without a reply"), ([*events(chunk("a"))], "without a finish reason"),
    ([*events(chunk("a"), {"error": {"message": "Lost the GPU.", "code": 500}})], "Lost the GPU."),
    ([*events(chunk("a"), "{]", "[DONE]")], "no JSON"), ([*events(chunk("a"))][:2] + [HANG_UP], "broke off"),
])
def test_broken_answers_are_failures_with_a_reason(pieces, named) -> None:
    asked = iter(range(100))

    def answer(request):
        if request.method == "GET":
            return [whole(MODELS)]
        return events(chunk("ok", "stop"), "[DONE]") if next(asked) < 2 else pieces      # two warm-ups

    with raw_server(answer) as server:
        figures = http_clients.run(http_clients.find(server.url, None, None), ONE)
    assert figures.failed == 1 and figures.kinds == {}
    assert named in next(iter(figures.errors)), figures.errors


def test_what_is_asked_is_the_scenario_s() -> None:
    with raw_server(dialect(chunk("yes"), chunk(None, "stop"), usage(), "[DONE]")) as server:
        target = http_clients.find(server.url + "/v1", "the-key", None)
        http_clients.run(target, Scenario("talk", 1, ((Turn("t", (user("one"),), 5), Turn("t", (user("two"),), 6)),)))
        asked = [request.body for request in server.requests if request.method == "POST"][2:]
        assert {request.headers["authorization"] for request in server.requests} == {"Bearer the-key"}
    common = {"model": "m", "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    assert asked[0] == {**common, "messages": [user("one")], "max_tokens": 5}
    assert asked[1]["messages"] == [user("one"), {"role": "assistant", "content": "yes"}, user("two")] and asked[1]["max_tokens"] == 6


# ------------------------------------------------------------------------------------------------------ before anything is run


def refusal(answer, *, name: str | None = None, key: str | None = None) -> EdgeInferError:
    with raw_server(answer) as server:
        with pytest.raises(EdgeInferError) as found:
            http_clients.find(server.url, key, name)
        assert len(server.requests) <= 2 and server.url in str(found.value) and "\n" not in str(found.value)
    return found.value


def listing(*names: str) -> bytes:
    return whole({"object": "list", "data": [{"id": name} for name in names]})


@pytest.mark.parametrize(("reply", "kind", "named"), [
    (whole({"error": {"message": "Invalid API Key"}}, 401), BadRequest, "--api-key"),
    (whole({"error": {"message": "Loading model"}}, 503), ServerFailed, "Loading model"),
    (listing("a", "b"), BadRequest, "a, b"), (listing(), BadRequest, "--model-name"), (whole("hello"), ServerFailed, "no OpenAI-compatible"),
    (whole({}, 404), BadRequest, "404"), (whole(b"<h1>It works", 500), ServerFailed, "500"), (whole([1]), ServerFailed, "no OpenAI-compatible"),
])
def test_a_server_that_will_not_do_is_one_sentence(reply, kind, named) -> None:
    error = refusal(lambda request: [reply])
    assert type(error) is kind and named in str(error)


def test_a_key_that_is_wanted_only_for_answers_is_found_missing_too() -> None:
    assert "--api-key" in str(refusal(lambda request: [whole(MODELS) if request.method == "GET" else whole({}, 401)]))
    assert "refuses the one given" in str(refusal(lambda request: [whole(MODELS) if request.method == "GET" else whole({}, 403)], key="wrong"))


def test_a_first_answer_that_fails_says_why() -> None:
    error = refusal(lambda request: [whole(MODELS) if request.method == "GET" else whole({"error": "This model has no chat template."}, 400)])
    assert type(error) is BadRequest and "no chat template" in str(error)


def test_nobody_there() -> None:
    with pytest.raises(ServerUnreachable, match="127.0.0.1:9"):
        http_clients.find("http://127.0.0.1:9", None, None)


def test_a_model_is_chosen_by_name_listed_or_not() -> None:
    answer = lambda request: [listing("a", "b")] if request.method == "GET" else events(chunk("x", "stop"), usage(), "[DONE]")      # noqa: E731
    with raw_server(answer) as server:
        assert [http_clients.find(server.url, None, name).model for name in ("b", "short")] == ["b", "short"]
    with raw_server(lambda request: [whole({}, 404)] if request.method == "GET" else events(chunk("x", "stop"), usage(), "[DONE]")) as server:
        assert http_clients.find(server.url, None, "unlisted").model == "unlisted"


# ------------------------------------------------------------------------------------------------------------------- reports


def test_a_session_makes_a_report_that_lasts_and_compares(tmp_path) -> None:
    with serving(engine()) as server:
        session = UrlSession(http_clients.find(server.url, None, None), Settings(scenarios=("single", "turns"), quick=True, rounds=2), version="1")
        session.run()
        report = session.report()
    assert (report.model.url, report.model.name, report.model.n_ctx, report.model.engine) == (server.url, "scripted", 8192, "edgeinfer (fake on cpu)")
    assert [(each.name, each.requests, each.failed, len(each.samples)) for each in report.scenarios] == [("single", 2, 0, 2), ("turns", 6, 0, 2)]
    assert (report.rates, report.batched, report.profile, report.notices, report.interrupted) == ((), (), (), (), False)
    path = tmp_path / "run.json"
    report_file.write_text(path, json.dumps(report_file.as_document(report), allow_nan=False))
    assert report_file.read(path) == report
    both = comparison.compare(report, report)
    assert both.differences == () and {row.verdict for row in both.rows} == {"same"}
    for text in (table.render(report, both), page.render(report, both)):
        assert server.url in text and "KV" not in text and "scripted" in text and "8,192" in text
    ET.fromstring(page.render(report, both).removeprefix("<!DOCTYPE html>"))


def test_a_server_that_counts_no_tokens_is_told_of() -> None:
    with raw_server(dialect(chunk("a"), chunk("b", "stop"), "[DONE]")) as server:
        session = UrlSession(http_clients.find(server.url, None, None), Settings(scenarios=("single",), quick=True))
        session.run()
        report = session.report()
    assert report.scenarios[0].output_tokens == 4 and "no usage" in report.notices[0] and "no usage" in table.render(report)


def test_prompts_that_an_earlier_run_left_in_the_cache_are_told_of() -> None:
    with serving(engine()) as server:
        reports = []
        for _ in range(2):
            session = UrlSession(http_clients.find(server.url, None, None), Settings(scenarios=("single",), quick=True))
            session.run()
            reports.append(session.report())
    assert reports[0].notices == () and "--seed" in reports[1].notices[0]


@pytest.mark.parametrize("when", ["single", "burst"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_finished_and_hangs_up(when, how, caplog) -> None:
    def progress(what: str, done: int, total: int) -> None:
        if what == when and done == 1:
            signal.raise_signal(how)

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)               # as the command line does
    try:
        with serving(engine(script=lambda tokens: 97)) as server:
            session = UrlSession(http_clients.find(server.url, None, None), Settings(scenarios=("single", "burst"), quick=True), progress=progress)
            session.run()
            report = session.report()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert report.interrupted and [each.name for each in report.scenarios] == (["single"] if when == "burst" else [])
    assert [record for record in caplog.records if record.threadName != "server"] == []      # asyncio has nothing to complain about in the clients


# -------------------------------------------------------------------------------------------------------------- command line


def test_only_scenarios_are_left_of_the_settings() -> None:
    settings = arguments.settings(parsed("--url", "http://x", "--quick", "--scenario", "burst,single", "--rounds", "2", "--seed", "3"))
    assert settings == Settings(n_prompt=(), n_gen=(), parallel=(), scenarios=("single", "burst"), rounds=2, quick=True, seed=3)
    with pytest.raises(BadRequest, match="scenarios"):
        arguments.settings(parsed("--url", "http://x", "--scenario", "none"))


@pytest.mark.parametrize(("words", "named"), [
    ([], "MODEL"), (["m", "--url", "http://x"], "not both"), (["--url", "http://x", "-ngl", "3"], "--gpu-layers"),
    (["--url", "http://x", "-npl", "2"], "--n-parallel"),
    (["--url", "http://x", "--profile"], "--profile"), (["--url", "http://x", "--set", "a=1"], "--set"), (["m", "--api-key", "k"], "--api-key"),
    (["m", "--model-name", "k"], "--model-name"),
])
def test_one_place_and_no_flag_of_the_other(words, named) -> None:
    with pytest.raises(BadRequest, match=named):
        arguments.check_place(parsed(*words))


def test_settings_for_every_command_do_not_stand_in_the_way(monkeypatch) -> None:
    Path("edgeinfer.toml").write_text("ctx-size = 512\nthreads = 1\n")
    monkeypatch.setenv("EDGEINFER_API_KEY", "k")
    arguments.check_place(parsed("--url", "http://x"))
    arguments.check_place(parsed("m"))
    assert parsed("--url", "http://x").api_key == "k"


def bench(*words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgeinfer", "bench", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, stdin=subprocess.DEVNULL, env={**os.environ, **env})


def test_the_command_from_url_to_page(tmp_path) -> None:
    with serving(engine(), api_keys=("very-secret",)) as server:
        first = bench("--url", server.url, "--quick", "--scenario", "single,burst", "--json", EDGEINFER_API_KEY="very-secret")
        assert first.returncode == 0, first.stderr
        earlier = tmp_path / "earlier.json"
        earlier.write_text(first.stdout)
        output = ("--compare", earlier, "--html", tmp_path / "page.html")
        second = bench("--url", server.url, "--api-key", "very-secret", "--quick", "--seed", "8", *output)
        assert second.returncode == 0, second.stderr
        refused = bench("--url", server.url)
    assert [each.failed for each in report_file.read(earlier).scenarios] == [0, 0]
    for part in (server.url, "burst", "TTFT p50", "compared with the run of", "not the same: seed: 7 before, 8 now", "only now: shared output"):
        assert part in second.stdout.replace("\n    ", " "), part
    for text in (first.stdout, first.stderr, second.stdout, second.stderr, (tmp_path / "page.html").read_text("utf-8")):
        assert "very-secret" not in text
    assert refused.returncode == 2 and refused.stdout == "" and refused.stderr.count("\n") == 1 and "--api-key" in refused.stderr


def test_unreachable_is_one_sentence() -> None:
    done = bench("--url", "http://127.0.0.1:9")
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("edgeinfer: No server answers at http://127.0.0.1:9: Connection refused")


def test_a_server_compares_with_the_engine_inside() -> None:
    settings = Settings(n_prompt=(), n_gen=(), parallel=(), scenarios=("single",), quick=True)
    with engine() as made:
        inside = Session(made, settings)
        inside.run()
    with serving(engine()) as server:
        outside = UrlSession(http_clients.find(server.url, None, None), settings)
        outside.run()
    both = comparison.compare(inside.report(), outside.report())
    assert f"url: none before, {server.url} now" in both.differences
    assert both.only_before == both.only_now == () and {"single output", "single TTFT p50", "single ITL p99"} <= {row.name for row in both.rows}
