"""The monitor: what it makes of a server's metrics, on a screen driven by keys, as plain text, and over HTTP."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_process import serving
from terminal import Terminal

from edgeinfer import cli
from edgeinfer.errors import BadRequest, EdgeInferError, ServerFailed, ServerUnreachable
from edgeinfer.runtime.backends.fake import ScriptedBackend
from edgeinfer.runtime.http_client import Address, HttpClient
from edgeinfer.runtime.readings import Sample, Snapshot, read_server
from edgeinfer.runtime.server.metrics import Metrics
from edgeinfer.runtime.server.scrape import scrape
from edgeinfer.runtime.service import Engine
from edgeinfer.tui.monitor import ConnectionLine, MonitorApp
from edgeinfer.tui.monitor_history import History
from edgeinfer.tui.monitor_text import server_rows, size, sparkline

MARKUP = ["[/", "[b +", "[red]x[/red]", "[@click=quit]x[/]", "\\[", "a\x1b[2Jb\u202e"]


def server(
    at: float, *models: str, generated: float = 0.0, busy: float = 0.0, firsts: tuple[float, ...] = (), raised: bool = False, gpu: bool = False,
) -> Snapshot:
    """What a server's metrics look like after ``generated`` tokens, ``busy`` seconds and first-token times of ``firsts`` seconds."""
    samples = [Sample("process_resident_memory_bytes", {}, 5e8)]
    for model in models:
        labels = {"model_name": model, "engine": "llamacpp"}
        values = {
            "generation_tokens_total": generated, "prefill_tokens_total": 3 * generated, "engine_busy_seconds_total": busy,
            "decode_steps_total": generated, "decode_rows_total": 2 * generated,
            "num_requests_running": 2, "num_requests_waiting": 1, "max_num_seqs": 4, "kv_cache_usage_perc": 0.25,
            "kv_cache_idle_perc": 0.5, "engine_healthy": 1, "prefix_cache_queries_total": 4 * generated, "prefix_cache_hits_total": generated,
            "time_to_first_token_seconds_count": len(firsts), "time_to_first_token_seconds_sum": sum(firsts),
        }
        samples += [Sample(f"edgeinfer_{name}", labels, float(value)) for name, value in values.items()]
        samples += [
            Sample("edgeinfer_time_to_first_token_seconds_bucket", {**labels, "le": str(bound)}, float(sum(first <= bound for first in firsts)))
            for bound in (0.1, 0.2, 0.5, 1.0, float("inf"))
        ]
        samples += [
            Sample("edgeinfer_engine_info", {**labels, "device": "cuda:0" if gpu else "cpu", "quantization": "Q4_K_M"}, 1.0),
            Sample("edgeinfer_memory_bytes", {**labels, "kind": "weights"}, 1e8), Sample("edgeinfer_memory_bytes", {**labels, "kind": "kv"}, 2.5e9),
            Sample("edgeinfer_request_success_total", {**labels, "finished_reason": "stop"}, 12.0),
            Sample("edgeinfer_request_failed_total", {**labels, "code": "backend_failed"}, 2.0),
            Sample("edgeinfer_alarm", {**labels, "name": "first_token_slow"}, float(raised)),
            Sample("edgeinfer_alarm_value", {**labels, "name": "first_token_slow"}, 1204.0),
            Sample("edgeinfer_alarm_threshold", {"name": "first_token_slow"}, 800.0),
        ]
    if gpu:
        about = {"gpu": "0", "gpu_name": "H200"}
        samples += [
            Sample("edgeinfer_gpu_utilization_ratio", about, 0.75), Sample("edgeinfer_gpu_memory_used_bytes", about, 4e10),
            Sample("edgeinfer_gpu_memory_total_bytes", about, 1.4e11),
        ]
    return Snapshot(at, tuple(samples))


def text_of(readings, width=80, history=None) -> str:
    return "\n".join(text.rstrip() for rows in server_rows(readings, width, history) for _, text in rows)


# ------------------------------------------------------------------------------------------------------------------ figures


def test_figures_are_rates_between_two_looks_and_latencies_since_the_base():
    before = server(10, "m", generated=100, busy=50, firsts=(0.9, 0.9))
    after = server(12, "m", generated=180, busy=51.5, firsts=(0.9, 0.9, 0.15, 0.15))
    (model,) = read_server(after, before, before).models
    assert (model.decode_tokens_per_second, model.prompt_tokens_per_second, model.utilisation, model.batch_fill) == (40, 120, 0.75, 2)
    assert (model.first_token_ms, model.first_token_p50_ms, model.first_token_p99_ms) == pytest.approx((150, 150, 199))
    (whole,) = read_server(after, before).models
    assert whole.first_token_ms == pytest.approx(150) and whole.first_token_p99_ms > 900
    (alone,) = read_server(after).models
    assert alone.decode_tokens_per_second is alone.utilisation is None and alone.running == 2 and alone.first_token_ms == pytest.approx(525)


def test_the_text_says_everything_without_colour():
    text = text_of(read_server(server(12, "m", generated=180, busy=51, firsts=(0.15,) * 4, raised=True), server(10, "m", generated=100, busy=50)))
    for words in (
        "m · llamacpp · cpu · Q4_K_M", "p50 150 ms", "p99 199 ms", "40.0 tok/s", "120 tok/s", "reused 25 %", "50 %", "2.0 of 4",
        "2 running  1 waiting", "25 % in use  50 % kept", "weights 100 MB  kv 2.5 GB", "2 failed · 12 stop", "! ALARM      first_token_slow: 1,204, raised at 800",
        "500 MB in memory",
    ):
        assert words in text, words
    assert "ALARM" not in text_of(read_server(server(1, "m"))) and "none of 1 is raised" in text_of(read_server(server(1, "m")))


def test_a_gpu_has_a_line_and_is_the_utilisation():
    readings = read_server(server(1, "m", gpu=True))
    assert readings.models[0].utilisation == 0.75 and "75 % busy  40.0 GB of 140 GB  H200" in text_of(readings)


def test_an_unloaded_model_keeps_its_counts():
    snapshot = server(1, "m")
    gone = Snapshot(1, tuple(sample for sample in snapshot.samples if sample.name != "edgeinfer_engine_info"))
    text = text_of(read_server(gone))
    assert "not loaded" in text and "12 stop" in text and "utilisation" not in text


@pytest.mark.parametrize("width", [20, 40, 57, 80, 200])
def test_no_line_is_wider_than_the_screen(width):
    history = History()
    for at in range(12):
        readings = history.add(server(at, "a model with quite a long name" * 3, generated=1e9 * at, busy=0.9 * at, firsts=(0.15,) * at, raised=True))
    assert all(len(line) <= width for line in text_of(readings, width, history).splitlines())


def test_history_lines_follow_the_figures():
    history = History()
    for at, generated in enumerate((0, 10, 30, 30, 30)):
        readings = history.add(server(at, "m", generated=generated, firsts=(0.15,) * (at // 2)))
        if at == 2:
            history.miss()
    model = readings.models[0]
    assert list(history.line(model, "decode_tokens_per_second")) == [None, 10, 15, None, 10, 7.5]
    assert list(history.line(model, "running")) == [2, 2, 2, None, 2, 2]
    assert history.line(model, "first_token_ms")[2] == pytest.approx(150)


@given(st.lists(st.one_of(st.none(), st.floats(0, 1e9)), max_size=30), st.integers(1, 40))
def test_a_sparkline_has_its_width_and_gaps(values, cells):
    line = sparkline(values, cells)
    assert len(line) == cells
    shown = values[-cells:]
    for value, block in zip(shown, line[cells - len(shown):]):
        assert (block == " ") is (value is None)
    assert sparkline([0.0, 0.5, 1.0], 5, top=1.0) == "  ▁▅█" and sparkline([0.0], 2) == " ▁"


def test_sizes_are_for_people():
    assert [size(value) for value in (0, 999, 1000, 105e6, 2.5e9, 3e15)] == ["0 B", "999 B", "1.0 KB", "105 MB", "2.5 GB", "3,000 TB"]


NAMES = st.sampled_from([
    "engine_busy_seconds_total", "time_to_first_token_seconds_bucket", "alarm", "alarm_value", "memory_bytes", "engine_info", "num_requests_running",
    "request_success_total", "gpu_memory_total_bytes", "gpu_utilization_ratio",
])
LABELS = st.dictionaries(
    st.sampled_from(["model_name", "engine", "le", "name", "kind", "gpu", "device", "finished_reason"]),
    st.sampled_from(["", "a", "0.5", "+Inf", "nan", "cuda:0", *MARKUP]),
)
SAMPLES = st.builds(Sample, NAMES.map("edgeinfer_".__add__), LABELS, st.floats(allow_nan=False, allow_infinity=False))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(SAMPLES, max_size=12), max_size=3))
def test_whatever_a_server_says_is_shown_as_harmless_lines(looks):
    history = History()
    for at, samples in enumerate(looks):
        for rows in server_rows(history.add(Snapshot(float(at), tuple(samples))), 60, history):
            for _, text in rows:
                assert len(text) <= 60 and not any(ord(char) < 32 or char == "\u202e" for char in text)


# ------------------------------------------------------------------------------------------------------------------- screen


class Look:
    """Answers each look with the next of ``answers``, and none after the last; an exception is raised."""

    def __init__(self, *answers: Snapshot | EdgeInferError):
        self.answers, self.count = list(answers), 0

    async def __call__(self) -> Snapshot:
        if not self.answers:
            await asyncio.Event().wait()
        self.count += 1
        answer = self.answers.pop(0)
        if isinstance(answer, EdgeInferError):
            raise answer
        return answer


class Screen:
    def __init__(self, app, pilot):
        self.app, self.pilot = app, pilot

    def text(self) -> str:
        return "\n".join("".join(segment.text for segment in strip) for strip in self.app.screen._compositor.render_strips())

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.01)
        await self.pilot.pause()

    async def shows(self, *words: str) -> str:
        await self.until(lambda: all(word in self.text() for word in words))
        return self.text()


@asynccontextmanager
async def monitor(look, size=(80, 24)):
    app = MonitorApp(look, url="http://127.0.0.1:8080", interval=0.05)
    async with app.run_test(size=size) as pilot:
        yield Screen(app, pilot)


def scenario(function):
    @functools.wraps(function)
    def test(*args, **kwargs):
        asyncio.run(function(*args, **kwargs))
    return test


@scenario
async def test_one_model_fits_the_smallest_screen():
    looks = [server(at, "m", generated=40 * at, busy=0.5 * at, firsts=(0.15,) * at, raised=True) for at in range(8)]
    async with monitor(Look(*looks)) as it:
        screen = await it.shows("http://127.0.0.1:8080  connected", "m · llamacpp", "40.0 tok/s", "! ALARM", "500 MB in memory", "▅▅▅▅▅▅▅", "Quit")
        assert "█" in screen
        await it.pilot.press("q")
        await it.until(lambda: not it.app.is_running)


@scenario
async def test_several_models_scroll_and_a_small_window_still_works():
    async with monitor(Look(server(0, "one", "three", "two"))) as it:
        await it.until(lambda: "one · llamacpp" in it.text() and "two" not in it.text())
        await it.pilot.press("end")
        await it.shows("two · llamacpp")
        await it.pilot.resize_terminal(30, 8)
        await it.shows("Quit")
        await it.pilot.resize_terminal(120, 60)
        await it.shows("one · llamacpp", "two · llamacpp")


@scenario
async def test_a_lost_server_is_said_and_found_again():
    lost = ServerUnreachable("No server answers at http://127.0.0.1:8080: Connection refused; start one there or correct the URL.")
    look = Look(lost, lost, server(0, "m"), lost, lost, lost, server(1, "m"))
    async with monitor(look) as it:
        await it.until(lambda: look.count >= 2)
        await it.shows("connected", "m · llamacpp")
        await it.until(lambda: look.count >= 7 and it.app.query_one(ConnectionLine).problem == "")
        assert "m · llamacpp" in it.text()


@scenario
async def test_while_it_is_lost_the_reason_and_the_old_figures_stay():
    lost = ServerUnreachable("No server answers at http://127.0.0.1:8080: Connection refused; start one there or correct the URL.")
    look = Look(server(0, "m"), lost)
    async with monitor(look) as it:
        screen = await it.shows("! No server answers at", "Connection refused", "s old. Trying again.")
        assert "m · llamacpp" in screen
        await it.pilot.press("q")
        await it.until(lambda: not it.app.is_running)


@scenario
async def test_nothing_a_server_says_is_markup():
    for text in MARKUP:
        async with monitor(Look(server(0, text), ServerFailed(text))) as it:
            await it.shows("llamacpp · cpu", "Trying again")
            screen = it.text()
            assert screen.count(text.replace("\x1b", "\u241b").replace("\u202e", "\ufffd")) == 2 and "\x1b" not in screen


@scenario
async def test_models_that_come_and_go_do_not_leave_anything_behind():
    async with monitor(Look(server(0, "one", "two"), server(1, "one"), server(2, "one", "three"), server(3))) as it:
        await it.shows("No model has been loaded yet.")
        assert "llamacpp" not in it.text()


# --------------------------------------------------------------------------------------------------------------------- HTTP


@contextmanager
def http_server(body: bytes = b"", status: int = 200, headers: dict[str, str] | None = None):
    """A server that answers everything alike, and remembers what it was asked."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers.get("Authorization")))
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.asked = asked
    thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}", asked
    finally:
        running.shutdown()
        running.server_close()
        thread.join()


def looked(url: str, api_key: str | None = None) -> Snapshot:
    async def run():
        async with HttpClient(Address.of(url), api_key=api_key) as client:
            return await scrape(client)

    return asyncio.run(run())


GOOD = b"""# TYPE edgeinfer_engine_busy_seconds_total counter
edgeinfer_engine_busy_seconds_total{model_name="m",engine="fake"} 3.5
edgeinfer_build_info 1
other NaN
"""


def test_a_server_is_asked_with_its_key():
    with http_server(GOOD) as (url, asked):
        snapshot = looked(f"{url}/v1/", api_key="secret")
        assert [model.model for model in read_server(snapshot).models] == ["m"] and len(snapshot.samples) == 2
        assert asked == [("/metrics", "Bearer secret")]


@pytest.mark.parametrize(("reply", "kind", "said"), [
    ({"status": 401}, BadRequest, "wants an API key (HTTP 401); give it with --api-key or EDGEINFER_API_KEY."),
    ({"status": 404}, BadRequest, "has no /metrics (HTTP 404)"),
    ({"status": 503, "body": b"busy"}, ServerFailed, "is not ready (HTTP 503): busy"),
    ({"status": 500}, ServerFailed, "does not give its metrics: HTTP 500."),
    ({"status": 302, "headers": {"Location": "http://127.0.0.1:1/"}}, ServerFailed, "HTTP 302."),
    ({"body": b"<html>hello</html>"}, ServerFailed, "is not edgeinfer's; give the URL of an edgeinfer server."),
    ({"body": b"# HELP x y\nllamacpp:requests_processing 1\n"}, ServerFailed, "is not edgeinfer's; give the URL of an edgeinfer server."),
    ({"body": b"edgeinfer_alarm{ what\n"}, ServerFailed, "is not in Prometheus' text format."),
    ({"body": b"\xff\xfe"}, ServerFailed, "is not in Prometheus' text format."),
])
def test_what_is_wrong_is_one_sentence(reply, kind, said):
    with http_server(**reply) as (url, _):
        with pytest.raises(kind) as refused:
            looked(url)
        assert said in str(refused.value) and url in str(refused.value) and "\n" not in str(refused.value)


def test_more_than_metrics_can_be_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr("edgeinfer.runtime.server.scrape.MAX_BYTES", 50)
    with http_server(GOOD) as (url, _), pytest.raises(ServerFailed, match="longer than 50 bytes"):
        looked(url)


# ------------------------------------------------------------------------------------------------------------- command line


def run(*arguments: str, capsys) -> tuple[int, str, str]:
    status = cli.main(["monitor", *arguments])
    return status, *capsys.readouterr()


def test_once_prints_text_and_json_for_scripts(capsys, monkeypatch):
    monkeypatch.setenv("EDGEINFER_API_KEY", "from the environment")
    with http_server(GOOD) as (url, asked):
        status, text, _ = run(url, "--once", "--interval", "0.1", capsys=capsys)
        assert status == 0 and text.startswith("m · fake") and "not loaded" in text
        status, text, _ = run(url, "--once", "--json", "--interval", "0.1", capsys=capsys)
        document = json.loads(text)
        assert status == 0 and document["models"][0]["model"] == "m" and document["models"][0]["utilisation"] == 0
        assert {key for _, key in asked} == {"Bearer from the environment"} and len(asked) == 4


def test_what_cannot_be_monitored_is_refused(capsys):
    with http_server(status=401) as (url, _):
        status, out, err = run(url, "--once", capsys=capsys)
        assert (status, out) == (2, "") and "wants an API key" in err
    for arguments, said in [
        ((), "needs a terminal; use --once"), (("--json",), "needs --once"), (("--once", "--interval", "0"), "--interval is from 0.1"),
        (("--once", "ftp://x"), "is not the URL of a server"), (("--once", "--interval", "nan"), "--interval is from 0.1"),
    ]:
        status, out, err = run(*arguments, capsys=capsys)
        assert (status, out) == (2, "") and said in err
    status, _, err = run("http://127.0.0.1:1", "--once", capsys=capsys)
    assert status == 1 and "No server answers at http://127.0.0.1:1" in err


# ----------------------------------------------------------------------------------------------------------- the server itself


def test_it_reads_the_server_that_it_is_made_for(capsys):
    engine = Engine(ScriptedBackend([b"hi", b" there"]))
    with serving(engine, metrics=Metrics, api_keys=("secret",)) as server:
        key = {"Authorization": "Bearer secret"}
        for _ in range(3):
            assert httpx.post(f"{server.v1}/completions", json={"prompt": "hello", "temperature": 0}, headers=key).status_code == 200
        status, out, err = run(server.url, "--once", capsys=capsys)
        assert status == 2 and f"{server.url} wants an API key" in err
        status, out, _ = run(server.url, "--once", "--json", "--interval", "0.1", "--api-key", "secret", capsys=capsys)
        (model,) = json.loads(out)["models"]
        assert status == 0 and model["loaded"] and model["healthy"] and model["requests"] == {"stop": 3} and model["first_token_p50_ms"] > 0
        status, out, _ = run(server.v1, "--once", "--interval", "0.1", "--api-key", "secret", capsys=capsys)
        assert status == 0 and "scripted · fake · cpu" in out and "3 stop" in out


@pytest.mark.skipif(Terminal.missing() is not None, reason=str(Terminal.missing()))
def test_in_a_real_terminal_it_outlives_the_server():
    with ExitStack() as running:
        server = running.enter_context(serving(Engine(ScriptedBackend([b"hi"])), metrics=Metrics))
        command = [sys.executable, "-m", "edgeinfer", "monitor", server.url, "--interval", "0.2"]
        with Terminal(command, env={"EDGEINFER_API_KEY": "unused"}) as terminal:
            terminal.wait_for("scripted · fake · cpu")
            httpx.post(f"{server.v1}/completions", json={"prompt": "hello"})
            terminal.wait_for("1 stop")
            running.close()
            screen = terminal.wait_for("Trying again.")
            assert "! No server answers at" in screen and "scripted · fake · cpu" in screen and "1 stop" in screen
            terminal.press("q")
            assert terminal.wait_exit() == 0
