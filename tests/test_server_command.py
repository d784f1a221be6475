"""`edgeinfer serve`: its flags, its socket, and a real server from start to a clean end."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from edgeinfer import cli
from edgeinfer.errors import BadRequest
from edgeinfer.runtime.backends.fake import ScriptedBackend
from edgeinfer.runtime.server.app import create_app
from edgeinfer.runtime.server.command import DrainingServer, bind, model_pool, model_sources, server_options
from edgeinfer.runtime.server.options import ServerOptions
from edgeinfer.runtime.service import Engine
from server_process import CountingMetrics, FixedPool

USER = [{"role": "user", "content": "Say hello."}]


def parsed(*words: str) -> argparse.Namespace:
    parser, commands = cli._parser()
    cli._apply_settings("serve", commands["serve"])
    return parser.parse_args(["serve", *words])


def resolve(name: str) -> tuple[str, Path]:
    return Path(name).stem, Path("/models") / name


# ------------------------------------------------------------------------------------------------------------------- flags


def test_flags_variables_and_the_file(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "edgeinfer.toml").write_text('[serve]\nport = 9000\nallow-origin = ["https://a.example"]\nmetrics = false\n')
    monkeypatch.setenv("EDGEINFER_API_KEY", "from-the-environment")
    options = server_options(parsed("m", "--allowed-host", "box", "--max-body", "1MiB", "--lenient"))
    assert options == ServerOptions(
        port=9000, api_keys=("from-the-environment",), allowed_hosts=("box",), allowed_origins=("https://a.example",), metrics=False, lenient=True, max_body_bytes=1024**2,
    )
    assert server_options(parsed("m", "--port", "1", "--metrics")).metrics


def test_beyond_loopback_needs_a_key(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["serve", "m", "--host", "0.0.0.0"]) == 2
    assert "--api-key" in capsys.readouterr().err


def test_names_of_models() -> None:
    found = model_sources(parsed("a.gguf", "big=b.gguf", "--alias", "gpt-4", "--alias", "huge=big", "--pin", "big"), resolve)
    assert [(source.name, source.path.name, source.pinned) for source in found] == [
        ("a", "a.gguf", False), ("big", "b.gguf", True), ("gpt-4", "a.gguf", False), ("huge", "b.gguf", False),
    ]
    assert model_sources(parsed("a.gguf", "--lora", "x.gguf", "--alias", "y"), resolve)[1].adapters == ("x.gguf",)


@pytest.mark.parametrize(("words", "said"), [
    (["a.gguf", "x/a.gguf"], "Two models"), (["a.gguf", "a=b.gguf"], "Two models"), (["a.gguf", "--alias", "a"], "taken"), (["a.gguf", "--alias", "b=c"], "no model 'c'"),
    (["a.gguf", "--pin", "c"], "no such model"), (["a.gguf", "b.gguf", "--lora", "x"], "--lora"), (["=a.gguf"], "names no model"), (["a.gguf", "--alias", "=a"], "no name"),
])
def test_names_that_contradict_each_other(words: list[str], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        model_sources(parsed(*words), resolve)


def test_what_a_model_needs_is_estimated_with_the_flags_it_is_loaded_with(smollm2_gguf, tmp_path) -> None:
    """Several models under one budget: none is loaded to find out."""
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")

    def needed(*words: str) -> int:
        args = parsed(str(smollm2_gguf), "--chat-template", str(template), *words)
        pool = model_pool(args, model_sources(args, lambda name: ("small", Path(name))), cli._engine_options(args))
        return pool._needed(pool._sources[0])

    assert needed("-c", "8192", "-np", "8") > needed("-c", "512", "-np", "1") > smollm2_gguf.stat().st_size / 2


# ------------------------------------------------------------------------------------------------------------------ socket


def test_a_port_in_use_is_one_sentence(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["serve", "m", "--port", str(port)]) == 2
    assert capsys.readouterr().err == f"edgeinfer: Port {port} of 127.0.0.1 is in use; choose another with --port, or 0 for any that is free.\n"


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7", "a" * 70 + ".example"])
def test_a_host_that_is_not_here(host: str) -> None:
    with pytest.raises(BadRequest, match="no address of this machine"):
        bind(host, 0)


# -------------------------------------------------------------------------------------------------------------------- draining


@contextmanager
def draining(engine: Engine, drain_seconds: float) -> Iterator[tuple[str, Any, threading.Thread]]:
    """A server in a thread, which is told to stop by the second value."""
    pool = FixedPool({"scripted": engine})
    app = create_app(pool, CountingMetrics(), ServerOptions())
    listener = bind("127.0.0.1", 0)
    ready = threading.Event()
    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=30)
    server = _InThread(config, pool, drain_seconds, started=ready.set)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server, thread
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()
        engine.close()
    assert not thread.is_alive()


def eventually(what: Callable[[], bool]) -> None:
    """For what another thread does soon."""
    for _ in range(6000):
        if what():
            return
        time.sleep(0.005)
    pytest.fail("it never came about")


class _InThread(DrainingServer):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield                                            # only a main thread has any


def test_running_requests_finish_and_new_ones_are_not_taken() -> None:
    gate = threading.Event()
    with draining(Engine(ScriptedBackend([b"o", b"k"], before_forward=lambda plan: gate.wait(60))), 60) as (url, server, thread):
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(httpx.post(url + "/v1/chat/completions", json={"messages": USER}, timeout=60)))
        asking.start()
        eventually(lambda: bool(server.server_state.tasks))
        server._told_to_stop()
        with pytest.raises(httpx.ConnectError):
            for _ in range(6000):
                httpx.get(url + "/health")
        gate.set()
        asking.join(60)
        thread.join(60)
        assert not thread.is_alive() and answers[0].json()["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize("stream", [False, True])
def test_who_does_not_finish_in_time_is_told_so(stream: bool) -> None:
    engine = Engine(ScriptedBackend(lambda tokens: ord("x"), n_ctx=1_000_000))
    with draining(engine, 0.05) as (url, server, thread):
        answers: list[httpx.Response] = []
        body = {"messages": USER, "stream": stream}
        asking = threading.Thread(target=lambda: answers.append(httpx.post(url + "/v1/chat/completions", json=body, timeout=60)))
        asking.start()
        eventually(lambda: engine.counters.generated_tokens >= 5)
        server._told_to_stop()
        asking.join(60)
        thread.join(60)
        assert not thread.is_alive() and "engine_closed" in answers[0].text[-300:] and answers[0].status_code == (200 if stream else 503)


# ------------------------------------------------------------------------------------------------------------ the real thing


def test_a_real_model_from_start_to_end(smollm2_gguf, tmp_path) -> None:
    log = tmp_path / "access.jsonl"
    words = ["serve", f"small={smollm2_gguf}", "--port", "0", "-c", "512", "-np", "2", "-t", "1", "--access-log", str(log), "--api-key", "key"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EDGEINFER_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "edgeinfer", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment,
    )
    try:
        serving, trying = process.stdout.readline(), process.stdout.readline()
        assert serving.startswith("Serving small at http://127.0.0.1:") and trying.startswith("Try it: curl http")
        url = serving.split()[-1]
        client = openai.OpenAI(base_url=url + "/v1", api_key="key", max_retries=0)
        schema = {"type": "object", "properties": {"word": {"type": "string", "maxLength": 8}}, "required": ["word"], "additionalProperties": False}
        bound = client.chat.completions.create(
            model="small", messages=USER, max_tokens=60, temperature=0, response_format={"type": "json_schema", "json_schema": {"name": "w", "schema": schema}},
        )
        assert set(json.loads(bound.choices[0].message.content)) == {"word"} and bound.choices[0].finish_reason == "stop"
        scored = client.completions.create(model="small", prompt="The capital of France is Paris", max_tokens=1, echo=True, logprobs=1, temperature=0)
        assert scored.choices[0].logprobs.tokens[:6] == ["The", " capital", " of", " France", " is", " Paris"] and scored.choices[0].logprobs.token_logprobs[5] > -2
        whole = client.chat.completions.create(model="small", messages=USER, max_tokens=24, temperature=0).choices[0].message.content
        stream = client.chat.completions.create(model="small", messages=USER, max_tokens=24, temperature=0, stream=True)
        pieces = [next(stream).choices[0].delta.content]
        process.send_signal(signal.SIGTERM)              # the answer that runs is finished first
        pieces += [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(pieces) == whole
        assert process.wait(60) == 0 and "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["status"] for line in lines] == [200] * 4 and all(line["model"] == "small" for line in lines)
