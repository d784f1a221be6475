"""The pool of models: names, the budget, and that it holds whatever happens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest
from counted_models import Counted, Machine, held, run, states, until, used
from engine_runs import PROFILE
from hypothesis import given, strategies as st

from edgeinfer.errors import BadRequest, EdgeInferError, EngineBusy, ModelDamaged, ModelNotFound, OutOfMemory
from edgeinfer.runtime.server import pool as pool_module
from edgeinfer.runtime.server.pool import ModelPool, ModelSource, PoolOptions


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
    for name, value in (
        ("max_memory_bytes", 0), ("max_loaded", 0), ("max_loaded", True), ("load_wait_s", 0), ("rest_after_s", float("nan")), ("unload_after_s", -1),
    ):
        with pytest.raises(BadRequest, match=name):
            PoolOptions(**{name: value})


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
