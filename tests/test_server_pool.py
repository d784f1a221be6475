"""The pool of models: budget, holds, waiting, idling and crashes, with engines that are only counted, and a few real ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from engine_runs import PROFILE
from hypothesis import given, strategies as st

import edgeinfer
from edgeinfer.errors import (
    BackendFailed, BadRequest, EdgeInferError, EngineBusy, EngineClosed, ModelDamaged, ModelNotFound, OutOfMemory,
)
from edgeinfer.runtime.backends.fake import ScriptedBackend
from edgeinfer.runtime.health import Health
from edgeinfer.runtime.load import memory_needed
from edgeinfer.runtime.server import pool as pool_module
from edgeinfer.runtime.server.pool import ModelPool, ModelSource, PoolOptions
from edgeinfer.runtime.service import Engine


class Counted:
    """Stands for an engine: known to its `Machine` until it is closed."""

    def __init__(self, machine: Machine, source: ModelSource):
        self.machine = machine
        self.source = source
        self.info = SimpleNamespace(model=source.name)
        self.status = "ok"
        self.holders = 0
        self.drops = 0

    @property
    def health(self) -> Health:
        return Health(self.status)

    def drop_cache(self) -> None:
        assert self.status == "ok"
        self.drops += 1

    def close(self) -> None:
        assert self.machine.closing.wait(60)
        with self.machine.lock:
            assert self in self.machine.alive, "closed twice"
            self.machine.closed_in_use += bool(self.holders and self.status == "ok")
            self.machine.alive.remove(self)
            self.status = "closed"


class Machine:
    """Loads `Counted` engines of given sizes and notes the most that was ever alive."""

    def __init__(self, sizes: dict[str, int], *, budget: int | None = None, holds: int | None = None):
        self.sizes = sizes
        self.budget = budget
        self.holds = holds                               # bytes the machine itself has
        self.lock = threading.Lock()
        self.alive: list[Counted] = []
        self.made = self.most = self.at_once = self.closed_in_use = 0
        self.loads: list[str] = []
        self.broken: dict[str, Exception] = {}
        self.gates: dict[str, threading.Event] = {}      # loading a model waits for its gate
        self.closing = threading.Event()                 # and closing one for this
        self.closing.set()
        self.reached: dict[str, threading.Event] = {}

    def load(self, source: ModelSource) -> Any:
        with self.lock:
            self.at_once += 1
            assert self.at_once == 1, "two loads at once"
            self.loads.append(source.name)
            used = sum(self.sizes[engine.source.name] for engine in self.alive) + self.sizes[source.name]
            self.most = max(self.most, used)
        try:
            if source.name in self.gates:
                self.reached[source.name].set()
                assert self.gates[source.name].wait(60)
            if source.name in self.broken:
                raise self.broken[source.name]
            if self.holds is not None and used > self.holds:
                raise OutOfMemory("this machine has less")
            engine = Counted(self, source)
            with self.lock:
                self.made += 1
                self.alive.append(engine)
            return engine
        finally:
            with self.lock:
                self.at_once -= 1

    def gate(self, name: str) -> threading.Event:
        self.reached[name] = threading.Event()
        return self.gates.setdefault(name, threading.Event())

    def pool(self, pinned: str = "", **options: Any) -> ModelPool:
        sources = [ModelSource(name, Path(name), pinned=name in pinned) for name in self.sizes]
        return ModelPool(sources, load=self.load, needed=lambda source: self.sizes[source.name], options=PoolOptions(max_memory_bytes=self.budget, **options))


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work(), 120)              # a hang is a failure, and says where

    asyncio.run(bounded())


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def used(pool: ModelPool, name: str | None, work: Callable[[Counted], Awaitable[None]] | None = None) -> str:
    """Use a model as a request does; its name."""
    async with pool.use(name) as served:
        engine: Any = served.engine
        engine.holders += 1
        try:
            if work is not None:
                await work(engine)
            assert engine.status != "closed"
        finally:
            engine.holders -= 1
        return served.name


def states(pool: ModelPool) -> dict[str, str]:
    return {status.name: status.state for status in pool.status()}


def held(pool: ModelPool) -> int:
    """Holds and waits that are left."""
    return sum(loaded.users for loaded in pool._room.alive) + sum(len(model.waiting) for model in pool._distinct)


# ------------------------------------------------------------------------------------------------------------------- names


def test_a_model_is_found_by_its_name_and_by_nothing_else() -> None:
    machine = Machine({"a": 1, "b": 1})

    async def work() -> None:
        pool = machine.pool()
        assert await used(pool, "b") == "b" and await used(pool, None) == "a"
        for name in ("gpt-3.5-turbo", "A", "a ", ""):
            with pytest.raises(ModelNotFound, match=r"here; there is a, b\."):
                await used(pool, name)
        assert states(pool) == {"a": "loaded", "b": "loaded"}
        assert [served.name for served in pool.loaded()] == ["a", "b"]
        await pool.close()

    run(work)
    assert not machine.alive and machine.made == 2


def test_several_names_of_a_file_are_one_model() -> None:
    machine = Machine({"a": 1})

    async def work() -> None:
        sources = [ModelSource("a", Path("a")), ModelSource("alias", Path("a")), ModelSource("other", Path("a"), adapters=("x",))]
        machine.sizes["other"] = 1
        pool = ModelPool(sources, load=machine.load)
        async with pool.use("alias") as one, pool.use("a") as two:
            assert one == two and one.name == "a" and [status.state for status in pool.status()] == ["loaded", "loaded", "unloaded"]
        assert await used(pool, "other") == "other" and len(pool.loaded()) == 2
        await pool.close()

    run(work)


def test_what_is_asked_of_a_pool_is_checked() -> None:
    one = ModelSource("a", Path("a"))
    for sources, options, fault in (
        ([], {}, "no model"), ([one, ModelSource("a", Path("b"))], {}, "called 'a'"),
        ([ModelSource("a", Path("a"), pinned=True), ModelSource("b", Path("b"))], {"max_loaded": 1}, "pinned models leave no room"),
    ):
        with pytest.raises(BadRequest, match=fault):
            ModelPool(sources, load=Machine({}).load, options=PoolOptions(**options))
    for options in ({"max_memory_bytes": 0}, {"max_loaded": 0}, {"max_loaded": True}, {"load_wait_s": 0}, {"rest_after_s": float("nan")}, {"unload_after_s": -1}):
        with pytest.raises(BadRequest, match=next(iter(options))):
            PoolOptions(**options)


def test_the_start_loads_what_is_pinned_or_the_only_model() -> None:
    async def work() -> None:
        for sizes, pinned, loaded in (({"a": 1}, "", ["a"]), ({"a": 1, "b": 1}, "", []), ({"a": 1, "b": 1, "c": 1}, "ca", ["a", "c"])):
            machine = Machine(sizes)
            pool = machine.pool(pinned=pinned)
            await pool.start()
            assert machine.loads == loaded and [status.pinned for status in pool.status()] == [name in pinned for name in sizes]
            await pool.close()
            assert not machine.alive
        machine = Machine({"a": 1})
        machine.broken["a"] = ModelDamaged("a is half a model")
        pool = machine.pool()
        with pytest.raises(ModelDamaged, match="half a model"):
            await pool.start()
        await pool.close()

    run(work)


# ------------------------------------------------------------------------------------------------------------------ budget


def test_the_least_recently_used_goes_first_and_no_more_than_must() -> None:
    machine = Machine({"a": 4, "b": 4, "c": 2, "d": 4}, budget=10)

    async def work() -> None:
        pool = machine.pool()
        for name in "abca":
            await used(pool, name)
        assert machine.loads == ["a", "b", "c"]
        await used(pool, "d")                            # needs 4 of 10, 10 are used: b is the oldest and enough
        assert states(pool) == {"a": "loaded", "b": "unloaded", "c": "loaded", "d": "loaded"}
        await pool.close()

    run(work)
    assert machine.most == 10 and not machine.alive


def test_what_can_never_fit_is_refused_with_both_numbers_and_disturbs_nobody() -> None:
    machine = Machine({"a": 4 << 20, "big": 11 << 20, "p": 3 << 20, "q": 9 << 20}, budget=10 << 20)

    async def work() -> None:
        pool = machine.pool(pinned="p")
        await pool.start()
        await used(pool, "a")
        for name, numbers in (("big", r"11\.0 MiB.*10\.0 MiB"), ("q", r"9\.0 MiB.*10\.0 MiB, of which pinned models hold 3\.0 MiB")):
            with pytest.raises(OutOfMemory, match=f"{name} needs {numbers}"):
                await used(pool, name)
        assert states(pool) == {"a": "loaded", "big": "failed", "p": "loaded", "q": "failed"} and machine.loads == ["p", "a"]
        await pool.close()

    run(work)


def test_a_model_in_use_stays_and_who_needs_its_room_gets_it_next() -> None:
    machine = Machine({"a": 6, "b": 6}, budget=10)

    async def work() -> None:
        pool = machine.pool(load_wait_s=30)
        go = asyncio.Event()
        first = asyncio.create_task(used(pool, "a", lambda _: go.wait()))
        await until(pool.loaded)
        second = asyncio.create_task(used(pool, "b"))
        await until(lambda: machine.loads == ["a"] and pool._turn.locked())
        assert states(pool) == {"a": "loaded", "b": "loading"} and not second.done()
        assert await used(pool, "a") == "a"              # b has not waited for long
        go.set()
        assert await second == "b" and await first == "a"
        assert states(pool) == {"a": "unloaded", "b": "loaded"} and machine.closed_in_use == 0
        await pool.close()

    run(work)


def test_a_model_that_is_always_in_use_makes_room_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_PATIENCE", 4000)
    machine = Machine({"a": 6, "b": 6}, budget=10)
    served = {"a": 0, "b": 0}

    async def work() -> None:
        pool = machine.pool(load_wait_s=60)

        async def client(name: str) -> None:             # several of them overlap: the model is never idle by itself
            while min(served.values()) < 60:
                async def hold(_: Counted) -> None:
                    for _ in range(3):
                        await asyncio.sleep(0)

                await used(pool, name, hold)
                served[name] += 1

        await asyncio.gather(*(client(name) for name in "aaaabbbb"))
        assert held(pool) == 0
        await pool.close()

    run(work)
    assert machine.most <= 10 and machine.closed_in_use == 0 and not machine.alive


def test_waiting_for_room_and_for_loading_is_bounded() -> None:
    machine = Machine({"a": 6, "b": 6}, budget=10)

    async def work() -> None:
        pool = machine.pool(load_wait_s=0.05)
        gate = machine.gate("a")
        with pytest.raises(EngineBusy, match=r"a was still not loaded after 0\.05 s"):
            await used(pool, "a")
        gate.set()
        await until(pool.loaded)                         # nobody waited any more, and it is there for the next

        async def hold(_: Counted) -> None:
            with pytest.raises(EngineBusy, match=r"room for b beside the models in use|b was still not loaded"):
                await used(pool, "b")
            assert held(pool) == 1
            await until(lambda: not pool._turn.locked())
            assert not any(loaded.leaving for loaded in pool._room.alive)
            assert await used(pool, "a") == "a"          # takes requests again, since b gave up

        await used(pool, "a", hold)
        assert await used(pool, "b") == "b" and held(pool) == 0
        await pool.close()

    run(work)


def test_where_the_machine_has_less_than_the_budget_idle_models_go() -> None:
    machine = Machine({"a": 4, "b": 4, "c": 6}, holds=8)

    async def work() -> None:
        pool = machine.pool()
        for name in "abc":
            await used(pool, name)
        assert states(pool) == {"a": "unloaded", "b": "unloaded", "c": "loaded"}
        machine.sizes["c"] = 9
        await used(pool, "a")
        with pytest.raises(OutOfMemory, match="this machine has less"):
            await used(pool, "c")
        await pool.close()

    run(work)


def test_so_many_models_at_once() -> None:
    machine = Machine({"a": 1, "b": 1, "c": 1})

    async def work() -> None:
        pool = machine.pool(pinned="b", max_loaded=2)
        await pool.start()
        for name in "aca":
            await used(pool, name)
            assert len(machine.alive) == 2 and states(pool)["b"] == "loaded"
        await pool.close()

    run(work)


# ----------------------------------------------------------------------------------------------------------------- waiting


def test_all_who_wait_for_a_load_are_served_by_one_load_and_who_leaves_leaves_nothing() -> None:
    machine = Machine({"a": 1, "b": 1}, budget=1)

    async def work() -> None:
        pool = machine.pool()
        gate = machine.gate("a")
        clients = [asyncio.create_task(used(pool, "a")) for _ in range(50)]
        await until(machine.reached["a"].is_set)
        alive = await used_meanwhile()                   # the event loop is not blocked by a load
        for client in clients[::2]:
            client.cancel()
        await asyncio.wait(clients[::2])
        assert alive and held(pool) == 25
        gate.set()
        assert await asyncio.gather(*clients[1::2]) == ["a"] * 25
        assert machine.loads == ["a"] and held(pool) == 0
        assert await used(pool, "b") == "b"              # no hold was left on a
        await pool.close()

    async def used_meanwhile() -> bool:
        await asyncio.sleep(0)
        return True

    run(work)


def test_a_load_for_which_nobody_waits_any_more_is_not_begun() -> None:
    machine = Machine({"a": 1, "b": 1})

    async def work() -> None:
        pool = machine.pool()
        gate = machine.gate("a")
        first, second = asyncio.create_task(used(pool, "a")), asyncio.create_task(used(pool, "b"))
        await until(machine.reached["a"].is_set)
        second.cancel()
        await asyncio.wait((second,))
        gate.set()
        await first
        await until(lambda: states(pool) == {"a": "loaded", "b": "unloaded"})
        assert machine.loads == ["a"]
        await pool.close()

    run(work)


@pytest.mark.parametrize("late", [False, True])
def test_cancelled_in_the_moment_of_the_handover(late: bool) -> None:
    machine = Machine({"a": 1})

    async def work() -> None:
        pool = machine.pool()
        client = asyncio.create_task(used(pool, "a"))
        await until(pool.loaded)                         # handed over; the client has not run since, or has
        if late:
            await asyncio.sleep(0)
        client.cancel()
        with suppress(asyncio.CancelledError):
            await client
        assert held(pool) == 0
        await pool.close()

    run(work)


def test_a_failed_load_is_told_to_all_who_wait_and_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({"a": 1})

    async def work() -> None:
        pool = machine.pool()
        machine.broken["a"] = ModelDamaged("a is half a model")
        gate = machine.gate("a")
        clients = [asyncio.create_task(used(pool, "a")) for _ in range(5)]
        await until(machine.reached["a"].is_set)
        gate.set()
        assert {str(error) for error in await asyncio.gather(*clients, return_exceptions=True)} == {"a is half a model"}
        with pytest.raises(ModelDamaged):                # at once, without reading the file again
            await used(pool, "a")
        status, = pool.status()
        assert (status.state, status.error, status.info) == ("failed", "a is half a model", None) and machine.loads == ["a"]
        monkeypatch.setattr(pool_module.time, "monotonic", lambda now=pool_module.time.monotonic: now() + 1.5)
        with pytest.raises(ModelDamaged):
            await used(pool, "a")
        assert machine.loads == ["a", "a"] and pool._distinct[0].retry_at > pool_module.time.monotonic() + 1
        del machine.broken["a"]
        monkeypatch.setattr(pool_module.time, "monotonic", lambda now=pool_module.time.monotonic: now() + 2.5)
        assert await used(pool, "a") == "a" and states(pool) == {"a": "loaded"} and pool.status()[0].error == ""
        machine.broken["a"] = RuntimeError("a fault of ours")
        machine.alive[0].status = "failed"
        with pytest.raises(BackendFailed, match="RuntimeError: a fault of ours"):
            await used(pool, "a")
        await pool.close()

    run(work)
    assert not machine.alive


def test_a_crashed_engine_is_replaced_at_the_next_request() -> None:
    machine = Machine({"a": 6}, budget=10)

    async def work() -> None:
        pool = machine.pool(pinned="a")
        await pool.start()

        async def crash(engine: Counted) -> None:
            engine.status = "failed"
            await used(pool, "a", fresh)                 # although somebody still holds the old one
            assert engine.status == "closed"
            engine.status = "over"

        async def fresh(engine: Counted) -> None:
            assert engine is machine.alive[0] and engine.status == "ok"

        await used(pool, "a", crash)
        assert machine.made == 2 and machine.most == 6 and held(pool) == 0
        await pool.close()

    run(work)
    assert not machine.alive


def test_closing_ends_every_wait_and_every_engine() -> None:
    machine = Machine({"a": 6, "b": 6, "c": 1, "d": 1}, budget=10)

    async def work() -> None:
        pool = machine.pool()
        go = asyncio.Event()
        async def hold(_: Counted) -> None:
            await go.wait()

        user = asyncio.create_task(used(pool, "c", hold))
        await until(pool.loaded)
        gate = machine.gate("a")
        waiting = [asyncio.create_task(used(pool, name)) for name in "aabd"]
        await until(machine.reached["a"].is_set)
        closing = [asyncio.create_task(pool.close()) for _ in range(2)]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, EngineClosed) for result in results), results
        gate.set()                                       # the load cannot be stopped; what it made is closed
        await asyncio.gather(*closing)
        assert not machine.alive and machine.loads == ["c", "a"]
        with pytest.raises(EngineClosed):
            await used(pool, "c")
        go.set()
        with pytest.raises(AssertionError):              # it held a closed engine
            await user
        assert held(pool) == 0
        await pool.close()

    run(work)


# ------------------------------------------------------------------------------------------------------------------ idling


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
        source = ModelSource("m", smollm2_gguf)
        pool = ModelPool([source], load=lambda source: edgeinfer.load(source.path, ctx_size=512, parallel=2, threads=1), options=PoolOptions(rest_after_s=0.05))
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
        pool = ModelPool([ModelSource("m", smollm2_gguf)], load=lambda source: edgeinfer.load(source.path), options=PoolOptions(max_memory_bytes=1 << 20))
        with pytest.raises(OutOfMemory, match=r"m needs .* budget of all models is 1\.0 MiB"):
            await pool.start()
        await pool.close()

    run(work)


# -------------------------------------------------------------------------------------------------------- whatever happens

SIZES = {"a": 2, "b": 3, "c": 4, "d": 5, "p": 1}


@PROFILE
@given(st.randoms(use_true_random=False), st.integers(6, 12), st.booleans())
def test_whatever_happens_the_budget_holds_and_nothing_is_left(random: Random, budget: int, pin: bool) -> None:
    """Clients come and go, models crash and fail to load, idle ones are dropped: all at any moment."""
    machine = Machine(SIZES, budget=budget)
    ends: list[str] = []

    async def client(pool: ModelPool, plan: Random) -> None:
        await asyncio.sleep(plan.choice([0, 0, 0.001, 0.003]))
        name = plan.choice(sorted(SIZES))

        async def hold(engine: Counted) -> None:
            for _ in range(plan.randrange(8)):
                await asyncio.sleep(plan.choice([0, 0, 0, 0.001]))
            if plan.random() < 0.1 and engine.status == "ok":
                engine.status = "failed"
            engine.status = "over" if engine.status == "closed" else engine.status       # replaced: it had crashed in another's hands

        task = asyncio.create_task(used(pool, name, hold))
        if plan.random() < 0.3:
            await asyncio.sleep(plan.choice([0, 0.0005, 0.002, 0.004]))
            task.cancel()
        try:
            await task
            ends.append("served")
        except asyncio.CancelledError:
            ends.append("cancelled")
        except EdgeInferError as error:
            ends.append(error.code)

    async def work() -> None:
        pool = machine.pool(pinned="p" if pin else "", load_wait_s=0.2, rest_after_s=0.002, unload_after_s=0.004)
        await pool.start()
        plans = [Random(random.randrange(2**32)) for _ in range(40)]
        if random.random() < 0.5:
            machine.broken[random.choice("abcd")] = ModelDamaged("broken")
        await asyncio.gather(*(client(pool, plan) for plan in plans))
        await until(lambda: not pool._turn.locked())     # a load for one who left
        assert held(pool) == 0 and all(not loaded.leaving for loaded in pool._room.alive)
        assert not pin or states(pool)["p"] in ("loaded", "resting")
        await pool.close()
        assert not pool._tasks and not pool._room.alive

    run(work)
    assert len(ends) == 40 and set(ends) <= {"served", "cancelled", "model_damaged", "engine_busy"}
    assert machine.most <= budget and machine.closed_in_use == 0 and not machine.alive
