"""Who waits for a model, who leaves, and what a failed load, a crash and the end mean to them."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from counted_models import Counted, Machine, held, run, states, until, used

from edgeinfer.errors import BackendFailed, EngineClosed, ModelDamaged
from edgeinfer.runtime.server import pool as pool_module


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
