"""The end of the whole process by SIGTERM, while streams run and others wait."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

CHAT = "/v1/chat/completions"


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


@contextmanager
def process(model: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`edgeinfer serve` as users start it, and its address."""
    sized = ("--ctx-size", "512", "--parallel", "2", "--threads", "1")
    command = [sys.executable, "-m", "edgeinfer", "serve", f"smollm2={model}", "--port", "0", *sized, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            first = running.stdout.readline()
            assert " at http://" in first, (first, running.poll(), running.stderr and running.stderr.read())
            yield running, first.rpartition(" at ")[2].strip()
        finally:
            running.kill()


class Streaming(threading.Thread):
    """A client that reads a streamed answer to its end, whatever that is."""

    def __init__(self, url: str, tokens: int):
        super().__init__()
        self.url, self.tokens = url, tokens
        self.begun = threading.Event()
        self.lines: list[str] = []
        self.refusal: dict[str, Any] = {}
        self.fault: Exception | None = None
        self.start()

    def run(self) -> None:
        body = {"messages": [{"role": "user", "content": "Tell a long story."}], "max_tokens": self.tokens, "stream": True, "ignore_eos": True}
        try:
            with httpx.stream("POST", self.url + CHAT, json=body, timeout=120) as response:
                if response.status_code != 200:
                    self.refusal = {"status": response.status_code, **json.loads(response.read())["error"]}
                for line in response.iter_lines() if response.status_code == 200 else ():
                    if line.startswith("data: "):
                        self.lines.append(line[6:])
                        if '"content"' in line and '"role"' not in line:
                            self.begun.set()
        except httpx.HTTPError as error:
            self.fault = error
        finally:
            self.begun.set()


def submitted(url: str, count: int) -> None:
    """Wait until the engine has taken so many requests."""
    line = f'edgeinfer_requests_submitted_total{{engine="llamacpp",model_name="smollm2"}} {count:.1f}'
    with httpx.Client(base_url=url, timeout=120) as http:
        until(lambda: line in http.get("/metrics").text)


def test_sigterm_lets_running_streams_finish_and_takes_nobody_new(smollm2_gguf: Path) -> None:
    with process(smollm2_gguf, "--drain-timeout", "120") as (running, url):
        assert httpx.get(url + "/health").status_code == 200
        streams = [Streaming(url, 30) for _ in range(4)]         # two of them wait for a slot
        submitted(url, 4)
        running.send_signal(signal.SIGTERM)
        for stream in streams:
            stream.join(120)
            assert stream.fault is None and stream.lines[-1] == "[DONE]", (stream.fault, stream.lines[-1:])
            assert [json.loads(line)["choices"][0]["finish_reason"] for line in stream.lines[:-1] if '"finish_reason":"' in line] == ["length"]
        assert running.wait(120) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(url + "/health")
        assert running.stderr is not None and "Traceback" not in running.stderr.read()


def test_streams_that_outlast_the_drain_end_with_an_error(smollm2_gguf: Path) -> None:
    with process(smollm2_gguf, "--drain-timeout", "0.2") as (running, url):
        streams = [Streaming(url, 450) for _ in range(3)]
        submitted(url, 3)
        until(lambda: any(stream.begun.is_set() for stream in streams))
        running.send_signal(signal.SIGTERM)
        assert running.wait(120) == 0
        for stream in streams:
            stream.join(120)
            assert stream.fault is None, stream.fault
        # Of those that had begun, and of those that waited for a slot.
        begun = [json.loads(stream.lines[-1])["error"]["code"] for stream in streams if stream.lines]
        queued = [(stream.refusal["status"], stream.refusal["code"]) for stream in streams if not stream.lines]
        assert begun == ["engine_closed"] * len(begun) and queued == [(503, "engine_closed")] * len(queued) and len(begun) <= 2
        assert running.stderr is not None and "Traceback" not in running.stderr.read()
