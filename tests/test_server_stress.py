"""The whole server under crowds: many clients at once, clients that hang up anywhere, and models that come and go."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from server_process import Server, serving

from edgeinfer.runtime.backends.fake import ScriptedBackend
from edgeinfer.runtime.scheduler import SchedulerOptions
from edgeinfer.runtime.server import pool as pool_module
from edgeinfer.runtime.server.choices import Choices
from edgeinfer.runtime.server.metrics import Metrics
from edgeinfer.runtime.server.pool import ModelPool, ModelSource, PoolOptions
from edgeinfer.runtime.service import Engine
from edgeinfer.runtime.stream import Stream

CHAT = "/v1/chat/completions"
HANGS_UP = int(os.environ.get("EDGEINFER_HANGUPS", "300"))


def repeat(tokens: list[int]) -> int:
    """Says the newest complete "<...>" over and over: what is said depends on the sequence's own tokens alone."""
    data = bytes(token for token in tokens if token < 256)
    end = data.rindex(b">")
    marker = data[data.rindex(b"<", 0, end) : end + 1]
    return marker[data.rfind(b"<") > end and len(data) - data.rindex(b"<")]


class Pool(ModelPool):
    """Remembers every engine it loaded, and the event loop that it lives in."""

    def __init__(self, backends: dict[str, Callable[[], ScriptedBackend]], options: PoolOptions = PoolOptions(), **scheduling: int):
        self.made: list[Engine] = []

        def load(source: ModelSource) -> Engine:
            engine = Engine(backends[source.name](), options=SchedulerOptions(**scheduling))
            self.made.append(engine)
            return engine

        super().__init__([ModelSource(name, Path(name)) for name in backends], load=load, options=options, needed=lambda source: 1)

    async def start(self) -> None:
        self.event_loop = asyncio.get_running_loop()
        await super().start()

    def totals(self) -> Counter[str]:
        """Counters of all engines that ever were."""
        names = ("submitted", "finished", "cancelled", "failed")
        return Counter({name: sum(getattr(engine.counters, name) for engine in self.made) for name in names})

    def tasks(self) -> int:
        async def count() -> int:
            return len(asyncio.all_tasks()) - 1

        return asyncio.run_coroutine_threadsafe(count(), self.event_loop).result(60)


def settle(condition: Callable[[], Any]) -> None:
    """Wait until it holds; a test that never gets there is stopped by the suite's timeout."""
    while not condition():
        gc.collect()
        time.sleep(0.01)


def quiet(pool: Pool) -> bool:
    """Nobody is inside, and nobody holds anything."""
    return (
        all(engine.counters.inside == 0 for engine in pool.made)
        and all(loaded.users == 0 for loaded in pool._room.alive)
        and all(slot.owner is None for loaded in pool._room.alive for slot in loaded.engine._core.slots.slots)
    )


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


@asynccontextmanager
async def client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=httpx.Limits(max_connections=None)) as http:
        yield http


async def answer(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[list[str], httpx.Response]:
    """Every choice's text, streamed or whole, and the response. Of a refusal: no choices."""
    if not body.get("stream"):
        response = await http.post(CHAT, json=body)
        return ([choice["message"]["content"] for choice in response.json()["choices"]] if response.status_code == 200 else []), response
    texts: dict[int, str] = {}
    lines: list[str] = []
    async with http.stream("POST", CHAT, json=body) as response:
        if response.status_code != 200:
            await response.aread()
            return [], response
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                lines.append(line[6:])
    assert lines[-1] == "[DONE]", lines[-1]
    reasons: Counter[int] = Counter()
    for line in lines[:-1]:
        chunk = json.loads(line)
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
            reasons[choice["index"]] += choice["finish_reason"] is not None
    assert set(reasons.values()) == {1}                  # one finish reason for each choice
    return [texts[index] for index in sorted(texts)], response


# ------------------------------------------------------------------------------------------------------------------ crowds


@pytest.mark.parametrize("limit", [1000, 60])
def test_two_hundred_clients_at_once_on_sixteen_slots(limit: int) -> None:
    """Nobody gets an error but the refusal beyond the limit, nobody hangs, and the counters add up."""
    pool = Pool({"m": lambda: ScriptedBackend(repeat, n_ctx=256, max_slots=16, max_batch=128)}, max_waiting=limit)
    with serving(pool, metrics=Metrics) as server:
        async def crowd() -> list[tuple[int, str]]:
            async with client(server) as http:
                async def one(number: int) -> tuple[int, str]:
                    marker = f"<{number:03}-{random.Random(number).randrange(10**6):06}>"
                    texts, response = await answer(http, ask(f"say {marker}", max_tokens=40, stream=number % 2 == 0))
                    if response.status_code == 200:
                        assert texts == [(marker * 4)[:40]]
                    else:
                        assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1, response.status_code
                        error = response.json()["error"]
                        assert error["code"] == "engine_busy" and error["type"] == "rate_limit_error"
                    return response.status_code, marker

                return list(await asyncio.gather(*(one(number) for number in range(200))))

        ends = Counter(status for status, _ in asyncio.run(asyncio.wait_for(crowd(), 240)))
        settle(lambda: quiet(pool))
        totals = pool.totals()
        assert ends[200] + ends[429] == 200 and (ends[429] > 0) == (limit < 200) and ends[200] >= min(limit, 200)
        assert totals == Counter(submitted=ends[200], finished=ends[200])
        stats = pool.made[0].stats()
        assert stats.counters.generated_tokens == 40 * ends[200] and stats.batch_fill > 8
        metrics = httpx.get(server.url + "/metrics").text
    labels = '{engine="fake",model_name="m"}'
    assert f"edgeinfer_requests_submitted_total{labels} {ends[200]:.1f}" in metrics
    assert f"edgeinfer_generation_tokens_total{labels} {40 * ends[200]:.1f}" in metrics


def test_no_answer_over_http_shows_another_conversations_marker() -> None:
    """Several turns each, whole and streamed, one choice and two, plain and raw, in far too little KV; some leave in the middle."""
    backend = ScriptedBackend(repeat, n_ctx=900, max_slots=12, max_seqs=8, max_batch=96, kv_cells=950)
    pool = Pool({"m": lambda: backend}, prefill_chunk=48, prefill_chunk_busy=24, max_waiting=1000, cache_bytes=500)
    left: list[int] = []
    with serving(pool) as server:
        async def flood() -> int:
            async with client(server) as http:
                async def conversation(number: int) -> int:
                    plan = random.Random(number)
                    marker = f"<{number:02}-{plan.randrange(10**8):08}>"
                    messages = [{"role": "system", "content": "Repeat the code."}] * plan.choice([0, 1])
                    answers = 0
                    for turn in range(5):
                        messages = [*messages, {"role": "user", "content": f"{plan.choice(['', 'again: ', 'and once more, please: '])}{marker}"}]
                        tokens = plan.choice([1, 12, 70])
                        body = {
                            "messages": messages, "max_tokens": tokens, "stream": plan.random() < 0.6, "n": plan.choice([1, 1, 2]),
                            "priority": plan.choice(["interactive", "batch"]), "seed": plan.choice([None, None, 7]),
                        }
                        if plan.random() < 0.15:
                            asked = asyncio.create_task(answer(http, body))
                            await asyncio.sleep(plan.random() / 20)
                            asked.cancel()
                            await asyncio.wait((asked,))
                            left.append(number)
                            continue
                        texts, response = await answer(http, body)
                        assert response.status_code == 200, response.text
                        assert texts == [(marker * 6)[:tokens]] * body["n"], (marker, texts)
                        messages = [*messages, {"role": "assistant", "content": texts[0]}]
                        if turn == 4:
                            prompts = ["x" + marker, "y" + marker]
                            raw = await http.post("/v1/completions", json={"prompt": prompts, "max_tokens": tokens, "echo": True})
                            assert [choice["text"] for choice in raw.json()["choices"]] == [prompt + (marker * 6)[:tokens] for prompt in prompts]
                        answers += 1
                    return answers

                return sum(await asyncio.gather(*(conversation(number) for number in range(40))))

        answers = asyncio.run(asyncio.wait_for(flood(), 240))
        settle(lambda: quiet(pool))
        totals, core = pool.totals(), pool.made[0]._core
        assert answers > 120 and len(left) > 10
        assert totals["submitted"] == totals["finished"] + totals["cancelled"] and totals["failed"] == 0
        assert len(server.metrics.ends) == totals["submitted"] and not server.metrics.refusals
        # It was a flood. How many ran at the same moment, and so whether anybody was put out, is up to the clients' speed.
        assert core.slots.evictions > 0 and core.counters.prefix_hits > 50


def test_two_models_at_once_in_room_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is loaded and unloaded again and again under streams of both; nobody is refused, cut off, or answered by the other one."""
    monkeypatch.setattr(pool_module, "_PATIENCE", 2000)
    alive: Counter[str] = Counter()
    most: list[int] = []

    class Telling(ScriptedBackend):
        def __init__(self, name: str):
            super().__init__(lambda tokens: ord(name), n_ctx=256, max_slots=4)
            self.name = name
            alive[name] += 1
            most.append(sum(alive.values()))

        def close(self) -> None:
            if not self.closed:
                alive[self.name] -= 1
            super().close()

    pool = Pool({"a": lambda: Telling("a"), "b": lambda: Telling("b")}, PoolOptions(max_memory_bytes=1, load_wait_s=100))
    with serving(pool) as server:
        async def all_of_them() -> None:
            async with client(server) as http:
                async def one(number: int) -> None:
                    for turn in range(4):
                        name = "ab"[(number + turn) % 2]
                        texts, response = await answer(http, ask("hi", model=name, max_tokens=30, stream=number % 3 > 0))
                        assert response.status_code == 200 and texts == [name * 30], (response.status_code, texts)

                await asyncio.gather(*(one(number) for number in range(40)))
                missing = await http.post(CHAT, json=ask("hi", model="gpt-3.5-turbo"))
                assert missing.status_code == 404 and "a, b" in missing.json()["error"]["message"]

        asyncio.run(asyncio.wait_for(all_of_them(), 240))
        settle(lambda: quiet(pool))
        assert pool.totals() == Counter(submitted=160, finished=160)
        assert max(most) == 1 and len(pool.made) >= 4
    assert not +alive and all(engine.closed for engine in pool.made)


# ------------------------------------------------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("count", [1, 3])
def test_answers_end_although_their_reader_stopped_between_two_events(count: int) -> None:
    async def work(engine: Engine) -> None:
        ended: list[Stream] = []
        choices = Choices(ended.append)
        await choices.submit(lambda: (engine.generate("x", max_tokens=400) for _ in range(count)))
        reading = choices.events()
        await anext(reading)                             # and is left open, as by a task that is cancelled while it sends
        await choices.close()
        assert ended == choices.streams and all(stream.done for stream in ended)

    with Engine(ScriptedBackend(lambda tokens: ord("y"))) as engine:
        for _ in range(20):
            asyncio.run(asyncio.wait_for(work(engine), 60))


def test_clients_that_hang_up_at_any_byte_leave_nothing_behind() -> None:
    """In the middle of the request line, of the headers, of the body, before and within the answer; closed or reset."""

    def backend() -> ScriptedBackend:
        # A step takes a while, as on a real model: an answer must not be over before its client has left.
        return ScriptedBackend(repeat, n_ctx=2048, max_slots=4, max_batch=64, kv_cells=3000, before_forward=lambda plan: time.sleep(0.002))

    pool = Pool({"m": backend}, max_waiting=1000, prefill_chunk=64)
    with serving(pool) as server:
        address = urlsplit(server.url)
        where = (str(address.hostname), address.port)

        def request(plan: random.Random) -> bytes:
            long = "words " * plan.choice([0, 0, 150])
            fields = {"max_tokens": plan.choice([5, 150]), "stream": plan.random() < 0.7, "n": plan.choice([1, 1, 3])}
            body = json.dumps(ask(f"{long}<{plan.randrange(10**6)}>", **fields)).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            return head + body

        async def leave(plan: random.Random) -> None:
            data = request(plan)
            reader, writer = await asyncio.open_connection(*where)
            if plan.random() < 0.5:
                cut = plan.randrange(len(data))
                writer.write(data[:cut])
                await writer.drain()
            else:
                writer.write(data)
                await writer.drain()
                wanted = plan.choice([0, 1, 20, 150, 400, 1500, 5000])
                while wanted > 0:
                    part = await reader.read(wanted)
                    if not part:
                        break
                    wanted -= len(part)
            await asyncio.sleep(plan.choice([0, 0, 0.002]))
            if plan.random() < 0.5:                      # not closed in good order, but reset
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.close()
            try:
                await writer.wait_closed()
            except OSError:
                return

        async def leave_all(count: int, seed: int) -> None:
            plans = iter([random.Random(seed + number) for number in range(count)])

            async def some() -> None:
                for plan in plans:
                    await leave(plan)

            await asyncio.gather(*(some() for _ in range(16)))

        def held() -> tuple[int, int, int]:
            # Without the event loop's own workers, of which there come to be a few.
            workers = sum(thread.name.startswith("asyncio_") for thread in threading.enumerate())
            return pool.tasks(), threading.active_count() - workers, len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

        before = held()
        asyncio.run(asyncio.wait_for(leave_all(HANGS_UP, 0), 240))
        settle(lambda: quiet(pool) and all(now <= then for now, then in zip(held(), before, strict=True)))
        totals = pool.totals()
        assert totals["submitted"] == totals["finished"] + totals["cancelled"] and totals["cancelled"] > 0
        assert len(server.metrics.ends) == totals["submitted"]
        reply = httpx.post(server.url + CHAT, json=ask("say <still there>", max_tokens=13))
        assert reply.json()["choices"][0]["message"]["content"] == "<still there>"
