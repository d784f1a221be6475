"""Idle models rest, and go later; what resting gives back, and what loading takes."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from counted_models import Counted, Machine, run, states, until, used

import edgeinfer
from edgeinfer.errors import BadRequest, ModelNotFound, OutOfMemory
from edgeinfer.runtime.backends.fake import ScriptedBackend
from edgeinfer.runtime.load import memory_needed
from edgeinfer.runtime.server.pool import ModelPool, ModelSource, PoolOptions
from edgeinfer.runtime.service import Engine


def test_an_idle_model_rests_and_then_goes_and_a_pinned_one_only_rests() -> None:
    machine = Machine({"a": 1, "p": 1})

    async def work() -> None:
        pool = machine.pool(pinned="p", rest_after_s=0.01, unload_after_s=0.4)
        await pool.start()

        async def stays(engine: Counted) -> None:        # whoever is in use neither rests nor goes
            before = machine.alive[0].drops
            await until(lambda: machine.alive[0].drops > before)
            assert engine.drops == 0

        await used(pool, "a", stays)
        await until(lambda: states(pool) == {"a": "resting", "p": "resting"})
        drops = [engine.drops for engine in machine.alive]
        assert drops == [1, 1]
        await until(lambda: states(pool) == {"a": "unloaded", "p": "resting"})

        async def awake(engine: Counted) -> None:
            assert states(pool)["p"] == "loaded" and engine.drops == 1

        await used(pool, "p", awake)
        await until(lambda: machine.alive[0].drops == 2)
        assert await used(pool, "p") == "p" and await used(pool, "a") == "a"
        assert machine.loads == ["p", "a", "a"]
        await pool.close()

    run(work)


def test_who_needs_the_room_of_a_model_that_is_being_closed_waits_for_it() -> None:
    machine = Machine({"a": 6, "b": 6}, budget=10)

    async def work() -> None:
        pool = machine.pool(load_wait_s=1e6, unload_after_s=0.01)
        await used(pool, "a")
        machine.closing.clear()
        await pool.start()
        await until(lambda: states(pool)["a"] == "unloaded")
        waiting = [asyncio.create_task(used(pool, name)) for name in "ba"]
        await until(lambda: pool._turn.locked())
        await asyncio.sleep(0.01)
        assert machine.loads == ["a"] and machine.alive
        machine.closing.set()
        assert await asyncio.gather(*waiting) == ["b", "a"]
        await pool.close()

    run(work)
    assert machine.most == 6


def test_resting_takes_the_memory_of_the_kv_and_costs_no_answer(smollm2_gguf: Path) -> None:
    chat = [{"role": "user", "content": "What is the capital of Japan?"}]
    rests = []

    async def work() -> None:
        def load(source: ModelSource) -> Engine:
            return edgeinfer.load(source.path, ctx_size=512, parallel=2, threads=1)

        pool = ModelPool([ModelSource("m", smollm2_gguf)], load=load, options=PoolOptions(rest_after_s=0.05))
        await pool.start()
        backend = pool.loaded()[0].engine._core.backend
        answers = []
        for _ in range(3):
            async with pool.use("m") as served:
                stream = served.engine.chat(chat, temperature=0, max_tokens=6)
                answers.append("".join([piece async for piece in stream]))
                assert stream.usage.cached_tokens == 0
            await until(lambda: states(pool) == {"m": "resting"})
            await until(lambda: backend._context is None)
            rests.append(served.engine.stats().kv_used_tokens)
        assert len(set(answers)) == 1 and "Tokyo" in answers[0]
        await pool.close()

    run(work)
    assert rests == [0, 0, 0]


def test_resting_saves_conversations_where_that_was_asked_for(smollm2_gguf: Path, tmp_path: Path) -> None:
    words = "The quick brown fox jumps over the lazy dog. " * 26
    with edgeinfer.load(smollm2_gguf, ctx_size=512, parallel=1, threads=1, kv_cache_dir=tmp_path) as engine:
        first = engine.generate(words, temperature=0, max_tokens=4)
        text = first.text()
        engine.drop_cache()
        engine._loop.post(lambda: engine._persistence.drain())               # what is still on its way to the disk is not found there
        again = engine.generate(words, temperature=0, max_tokens=4)
        assert again.text() == text
        assert first.usage.cached_tokens == 0 and again.usage.cached_tokens >= first.usage.prompt_tokens - 1
        engine.drop_cache()
    assert engine.closed and not engine.notices


def test_dropping_the_cache_leaves_those_inside_alone() -> None:
    reached, go = threading.Event(), threading.Event()

    def wait(_: object) -> None:
        reached.set()
        assert go.wait(60)

    backend = ScriptedBackend([b"a", b"b"], before_forward=wait)
    with Engine(backend) as engine:
        stream = engine.generate("x")
        assert reached.wait(60)
        engine.drop_cache()
        go.set()
        assert stream.text() == "ab" and backend.kv_drops == 0
        dropped = threading.Event()
        engine.drop_cache()
        engine._loop.post(dropped.set)
        assert dropped.wait(60) and backend.kv_drops == 1
        assert engine.generate("x").text() == "ab"


def test_what_a_load_takes_is_estimated_without_loading(smollm2_gguf: Path) -> None:
    options = {"ctx_size": 512, "parallel": 2, "threads": 1, "kv_unified": True}
    needed = memory_needed(smollm2_gguf, **options)
    with pytest.raises(OutOfMemory):
        edgeinfer.load(smollm2_gguf, max_memory=needed - 1, **options)
    edgeinfer.load(smollm2_gguf, max_memory=needed, **options).close()
    assert memory_needed(smollm2_gguf, chat_template="{{ messages }}", max_waiting=3, **options) == needed
    assert memory_needed(smollm2_gguf, draft_model=smollm2_gguf, **options) > 1.5 * needed
    with pytest.raises(BadRequest, match="Unknown option 'x'"):
        memory_needed(smollm2_gguf, x=1)
    with pytest.raises(ModelNotFound):
        memory_needed("no-such-model.gguf")

    async def work() -> None:
        options = PoolOptions(max_memory_bytes=1 << 20)
        pool = ModelPool([ModelSource("m", smollm2_gguf)], load=lambda source: edgeinfer.load(source.path), options=options)
        with pytest.raises(OutOfMemory, match=r"m needs .* budget of all models is 1\.0 MiB"):
            await pool.start()
        await pool.close()

    run(work)
