"""A client that leaves frees what it used at once, wherever its request is: on its way in, queued, in prefill, answering whole or in a stream."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time

import httpx
import pytest
from server_process import Server, serving

from edgeinfer.runtime.backends.fake import ScriptedBackend
from edgeinfer.runtime.scheduler import SchedulerOptions
from edgeinfer.runtime.service import Engine
from edgeinfer.runtime.values import FinishReason, StepPlan


class Gate:
    """Holds the engine's thread before a forward that matches, until opened."""

    def __init__(self, when=lambda plan: True):
        self.when = when
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, plan: StepPlan) -> None:
        if self.when(plan):
            self.reached.set()
            assert self.open.wait(60)


def endless(tokens: list[int]) -> int:
    return ord("x")


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def request_bytes(body: dict, path: str = "/v1/chat/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def chat(text: str = "hi", **fields) -> dict:
    return {"messages": [{"role": "user", "content": text}], **fields}


def eventually(what, message: str) -> None:
    """For what another thread does soon."""
    for _ in range(6000):
        if what():
            return
        time.sleep(0.005)
    pytest.fail(message)


def free(server: Server, engine: Engine) -> bool:
    stats = engine.stats()
    return stats.running == stats.waiting == 0 and not server.pool.used


@pytest.mark.parametrize("stream", [False, True])
def test_while_it_answers(stream: bool) -> None:
    engine = Engine(ScriptedBackend(endless, n_ctx=100_000))
    with serving(engine) as server:
        client = connect(server)
        client.sendall(request_bytes(chat(stream=stream)))
        eventually(lambda: engine.stats().counters.generated_tokens > 3, "nothing was generated")
        client.close()
        eventually(lambda: free(server, engine), "the slot is still taken")
        (_, ended, _), = server.metrics.ends
        assert ended.finish_reason is FinishReason.CANCELLED
        assert httpx.post(server.v1 + "/completions", json={"prompt": "a", "max_tokens": 2}).json()["choices"][0]["text"] == "xx"


@pytest.mark.parametrize("stream", [False, True])
def test_while_its_prompt_is_read(stream: bool) -> None:
    gate = Gate(lambda plan: bool(plan.prefills))
    backend = ScriptedBackend(endless, n_ctx=4096, before_forward=gate)
    engine = Engine(backend)
    with serving(engine) as server:
        client = connect(server)
        client.sendall(request_bytes(chat("long " * 700, stream=stream)))
        assert gate.reached.wait(60)
        client.close()
        eventually(backend._abort.is_set, "the computation was not told to stop")
        gate.open.set()
        eventually(lambda: free(server, engine), "the slot is still taken")
        assert backend.tokens_computed < 700 * 5, "the whole prompt was read"


@pytest.mark.parametrize("stream", [False, True])
def test_while_it_is_queued(stream: bool) -> None:
    gate = Gate()
    engine = Engine(ScriptedBackend(endless, max_slots=1, before_forward=gate))
    with serving(engine) as server, httpx.Client(base_url=server.v1) as busy:
        first = threading.Thread(target=busy.post, args=("/completions",), kwargs={"json": {"prompt": "a", "max_tokens": 1}, "timeout": 60})
        first.start()
        assert gate.reached.wait(60)
        client = connect(server)
        client.sendall(request_bytes(chat(stream=stream)))
        eventually(lambda: engine.stats().waiting == 1, "it was not queued")
        client.close()
        # The engine's thread is held and has read neither note: the request and its cancellation.
        eventually(lambda: len(engine._loop._inbox) == 2, "no cancellation was sent")
        gate.open.set()
        eventually(lambda: free(server, engine), "it is still queued")
        first.join()
        cancelled = [stream for _, stream, _ in server.metrics.ends if stream.finish_reason is FinishReason.CANCELLED]
        assert len(cancelled) == 1 and cancelled[0].usage.completion_tokens == 0


def test_several_choices_end_together() -> None:
    engine = Engine(ScriptedBackend(endless, n_ctx=100_000))
    with serving(engine) as server:
        client = connect(server)
        client.sendall(request_bytes(chat(stream=True, n=3)))
        eventually(lambda: engine.stats().counters.generated_tokens > 9, "nothing was generated")
        client.close()
        eventually(lambda: free(server, engine), "a slot is still taken")
        assert len(server.metrics.ends) == 3 and {n for _, _, n in server.metrics.ends} == {3}


def test_hanging_up_at_any_byte_leaves_nothing_behind() -> None:
    engine = Engine(ScriptedBackend(endless, n_ctx=4096, max_slots=4), options=SchedulerOptions(max_waiting=1000))
    generator = random.Random(0)
    with serving(engine) as server:
        bodies = [chat("hello " * 20, stream=True, max_tokens=40), chat(max_tokens=40), chat(stream=True, n=2, max_tokens=20)]
        for index in range(150):
            client = connect(server)
            data = request_bytes(bodies[index % 3])
            cut = generator.randrange(1, len(data) + 400)
            client.sendall(data[:cut])
            for _ in range(max(0, cut - len(data))):     # hung up inside the reply
                if not client.recv(1):
                    break
            client.close()
        eventually(lambda: free(server, engine), "a slot is still taken")

        async def count() -> int:
            return len(asyncio.all_tasks())

        # The server's own two, and the one that counts.
        eventually(lambda: asyncio.run_coroutine_threadsafe(count(), server.loop).result() <= 3, "tasks are left behind")
        counters = engine.stats().counters
        assert counters.submitted == counters.finished + counters.cancelled + counters.failed == len(server.metrics.ends)
        assert httpx.post(server.v1 + "/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
