"""A step that never ends, the watchdog that notices, and the numbers an engine gives about itself. All on the scripted backend."""

from __future__ import annotations

import gc
import json
import random
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields

import pytest

from edgeinfer.errors import BackendFailed, BadRequest, EngineClosed
from edgeinfer.runtime.backends.fake import ScriptedBackend
from edgeinfer.runtime.engine import EngineCounters
from edgeinfer.runtime.health import EngineOptions, Watchdog
from edgeinfer.runtime.scheduler import SchedulerOptions
from edgeinfer.runtime.service import Engine
from edgeinfer.runtime.values import Failed, StepPlan, StepResult


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread is about to do; the suite's own limit ends a wait for what never comes."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


class Hang:
    """Holds forwards from number ``first`` on until released, deaf to abort()."""

    def __init__(self, first: int = 1):
        self.first = first
        self.calls = 0
        self.inside = threading.Event()
        self.release = threading.Event()

    def __call__(self, plan: StepPlan) -> None:
        self.calls += 1
        if self.calls >= self.first:
            self.inside.set()
            assert self.release.wait(60)


class Deaf(ScriptedBackend):
    """Counts aborts and does not heed them: what a kernel without a callback does."""

    aborts = 0

    def abort(self) -> None:
        self.aborts += 1


@pytest.fixture(autouse=True)
def little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake has no operation that must end first."""
    monkeypatch.setattr("edgeinfer.runtime.health._GRACE_S", 0.05)


@pytest.fixture
def hung() -> Iterator[tuple[Engine, Deaf, Hang]]:
    hang = Hang()
    backend = Deaf([b"a", b"b"], max_slots=2, before_forward=hang)
    engine = Engine(backend, engine_options=EngineOptions(step_timeout_s=0.2))
    yield engine, backend, hang
    hang.release.set()
    engine.close()


def adds_up(engine: Engine) -> bool:
    stats = engine.stats()
    counters = stats.counters
    return counters.submitted == counters.finished + counters.cancelled + counters.failed + stats.running + stats.waiting


def test_a_step_that_never_ends_fails_everybody_and_is_survived(hung) -> None:
    engine, backend, hang = hung
    assert engine.health.status == "ok" and engine.health.step_seconds == 0
    streams = [engine.generate(f"request {n}", max_tokens=1) for n in range(5)]      # two run, three wait; the step that hangs would end two
    for stream in streams:
        with pytest.raises(BackendFailed, match="has not finished a step for .* s"):
            stream.text()
    assert backend.aborts == 1
    assert engine.health.status == "stalled" and "has not finished" in engine.health.reason and engine.health.step_seconds >= 0.2
    with pytest.raises(BackendFailed, match="has not finished"):
        engine.generate("one more")
    assert engine.stats().counters.submitted == 5 and adds_up(engine)
    hang.release.set()
    until(lambda: engine.health.status == "ok")
    assert engine.generate("again").text() == "ab"
    assert engine.stats().counters.failed == 5 and engine.stats().counters.finished == 1 and adds_up(engine)
    for stream in streams:                               # what the step produced after all came too late
        assert stream.text_so_far == "" and sum(isinstance(event, Failed) for event in stream.events()) == 1


def test_requests_that_arrive_during_the_hang_do_not_wait_either(hung) -> None:
    engine, backend, hang = hung
    first = engine.generate("x")
    assert hang.inside.wait(60)
    late = engine.generate("y")                          # still in the inbox: the engine's thread never sees it
    later = engine.generate("z")
    late.cancel()
    assert all(stream.wait(60) and isinstance(stream.error, BackendFailed) for stream in (first, late, later))
    hang.release.set()
    until(lambda: engine.health.status == "ok")
    counters = engine.stats().counters
    assert (counters.failed, counters.cancelled, counters.finished) == (2, 1, 0)


def test_an_end_comes_once_whatever_ends_after_all(hung) -> None:
    """The hung step returns while the watchdog tells its streams; every interleaving ends each stream once and counts it once."""
    engine, backend, hang = hung
    delays = random.Random(1)
    for _ in range(12):
        hang.release.clear()
        streams = [engine.generate("x", max_tokens=1) for _ in range(2)]
        until(lambda: engine.health.status == "stalled" or all(stream.done for stream in streams))
        time.sleep(delays.uniform(0, 0.08))              # it is given up 0.05 s after it was found stalled
        hang.release.set()
        for stream in streams:
            assert stream.wait(60)
            assert sum(type(event).__name__ in ("Failed", "Finished") for event in stream.events()) == 1
        until(lambda: engine.health.status == "ok")
        until(lambda: engine.stats().counters.inside == 0)
    counters = engine.stats().counters
    assert counters.submitted == 24 == counters.finished + counters.failed


def test_a_verdict_on_a_step_that_has_just_ended_changes_nothing(hung) -> None:
    engine, backend, hang = hung
    stream = engine.generate("x")
    assert hang.inside.wait(60)
    step = engine._loop._watch.began
    hang.release.set()
    assert stream.text() == "ab"
    until(lambda: engine._loop._watch.began != step)
    engine._loop._give_up(step)
    assert engine.health.status == "ok" and engine.generate("y").text() == "ab"


def test_close_does_not_wait_for_ever(hung) -> None:
    engine, backend, hang = hung
    stream = engine.generate("x")
    assert hang.inside.wait(60)
    with pytest.warns(RuntimeWarning, match="has not finished a step"):
        engine.close()
    assert stream.error is not None and engine.closed
    assert engine.health.status == "closed" and "has not finished" in engine.health.reason
    with pytest.raises(EngineClosed):
        engine.generate("y")
    hang.release.set()
    until(lambda: backend.closed)                        # freed when the step ends after all
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.close()
    assert engine.health.reason == "The engine is closed."


def test_a_slow_step_that_heeds_abort_is_tried_again_once() -> None:
    """Slow is not dead: weights that come from a slow disk for the first time. But it is not tried for ever."""
    slow = 1

    class Slow(ScriptedBackend):
        def forward(self, plan: StepPlan) -> StepResult:
            nonlocal slow
            if not slow:
                return super().forward(plan)
            slow -= 1
            self._abort.clear()
            assert self._abort.wait(60)
            return StepResult({}, aborted=tuple(chunk.slot for chunk in plan.chunks))

    with Engine(Slow([b"a", b"b"], max_slots=1), engine_options=EngineOptions(step_timeout_s=0.2)) as engine:
        assert engine.generate("x").text() == "ab" and engine.health.status == "ok"
        slow = 2
        first, second = engine.generate("y"), engine.generate("z")
        with pytest.raises(BackendFailed, match="prefill_chunk"):
            first.text()
        assert second.text() == "ab"                     # who waited is served
        assert adds_up(engine)


def test_without_a_timeout_nothing_watches() -> None:
    before = threading.active_count()
    with Engine(ScriptedBackend(), engine_options=EngineOptions(step_timeout_s=0)) as engine:
        assert threading.active_count() == before + 1
        assert engine.generate("x").text() == "ok" and engine.health.status == "ok"


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "5", True])
def test_timeouts_that_make_no_sense_are_refused(value) -> None:
    with pytest.raises(BadRequest, match="step_timeout_s"):
        EngineOptions(step_timeout_s=value)


def test_time_while_the_process_was_stopped_does_not_count() -> None:
    """One look may come an hour late (Ctrl-Z and fg): a step is stalled only after several looks at the same one."""
    events = []
    watchdog = Watchdog(0.4, stalled=lambda: None, overdue=lambda step: None)
    watchdog.began = time.perf_counter() - 3600
    looks = 0

    class Clock(threading.Event):
        def wait(self, timeout=None) -> bool:
            nonlocal looks
            looks += 1
            if looks == 6:
                assert not events
                watchdog.began = time.perf_counter() - 1800      # another step, just as old by the clock
            return looks > 30

    watchdog._stop = Clock()
    watchdog._run(lambda: events.append("stalled"), lambda step: events.append("overdue"))
    assert events == ["stalled", "overdue"] and looks == 31


def test_an_engine_that_cannot_be_cleaned_up_says_so() -> None:
    class Broken(ScriptedBackend):
        lost = False

        def forward(self, plan: StepPlan) -> StepResult:
            self.lost = True
            raise RuntimeError("device lost")

        def truncate(self, slot: int, length: int) -> bool:
            if self.lost:
                raise RuntimeError("device lost")
            return super().truncate(slot, length)

    with Engine(Broken()) as engine:
        with pytest.raises(BackendFailed, match="cannot go on"):
            engine.generate("x").text()
        assert engine.health.status == "failed" and "device lost" in engine.health.reason
        with pytest.raises(BackendFailed, match="cannot go on"):
            engine.generate("y")
        assert adds_up(engine)


def test_a_forgotten_engine_is_not_kept_by_its_watchdog() -> None:
    backend = ScriptedBackend()
    engine = Engine(backend)
    gone = weakref.ref(engine)
    engine.generate("x").text()
    gc.disable()
    try:
        del engine
        assert gone() is None                            # without the collector: there is no cycle
    finally:
        gc.enable()
    until(lambda: backend.closed)


# ---------------------------------------------------------------------------------------------------------------- numbers


def test_stats_hold_every_counter_and_every_gauge() -> None:
    backend = ScriptedBackend([b"a", b"b", b"c"], max_slots=2, kv_cells=400)
    with Engine(backend) as engine:
        engine.generate("the same beginning, one").text()
        engine.generate("the same beginning, two").text()
        stats = engine.stats()
        values = stats.as_dict()
        assert json.loads(json.dumps(values)) == values
        assert {field.name for field in fields(EngineCounters)} <= set(values)
        assert values["finished"] == 2 and values["running"] == values["waiting"] == 0
        assert values["kv_cells"] == 400 and values["kv_used_tokens"] == values["kv_idle_tokens"] == 2 * (23 + 3)
        assert stats.prefix_hit_share == pytest.approx(20 / 46) and stats.batch_fill == 1 and stats.acceptance_rate == 0
        assert values["health"] == "ok" and values["uptime_seconds"] > 0
        stats.counters.finished = 99                     # a copy
        assert engine.counters.finished == 2
    assert engine.stats().as_dict()["health"] == "closed" and engine.stats().counters.finished == 2


def test_gauges_follow_what_runs() -> None:
    hang = Hang(first=2)
    with Engine(ScriptedBackend([b"a"], max_slots=2, before_forward=hang)) as engine:
        streams = [engine.generate("12345") for _ in range(3)]
        assert hang.inside.wait(60)
        stats = engine.stats()
        assert stats.running + stats.waiting == 3 and 1 <= stats.running <= 2
        assert stats.kv_used_tokens >= 5 and stats.health.step_seconds > 0
        hang.release.set()
        assert [stream.text() for stream in streams] == ["a", "a", "a"]


def test_stats_never_contradict_themselves_under_load() -> None:
    """Read as fast as can be while requests come, run, end and are cancelled: each snapshot adds up, and totals never fall."""
    with Engine(ScriptedBackend([b"a"] * 20, max_slots=4), options=SchedulerOptions(max_waiting=1000)) as engine:
        done = threading.Event()

        def load() -> None:
            for n in range(60):
                stream = engine.generate(f"request {n}")
                if n % 3 == 0:
                    stream.cancel()
                if n % 5 == 0:
                    stream.wait()

        threads = [threading.Thread(target=load) for _ in range(3)]
        for thread in threads:
            thread.start()
        threading.Thread(target=lambda: ([thread.join() for thread in threads], done.set())).start()
        last, seen = engine.stats(), 0
        while not done.is_set() or engine.stats().counters.inside:
            stats = engine.stats()
            counters = stats.counters
            assert counters.submitted == counters.finished + counters.cancelled + counters.failed + stats.running + stats.waiting
            assert min(stats.running, stats.waiting, stats.kv_used_tokens, stats.kv_idle_tokens) >= 0 and stats.running <= 4
            assert all(getattr(counters, field.name) >= getattr(last.counters, field.name) for field in fields(EngineCounters))
            last, seen = stats, seen + 1
        assert seen > 10 and engine.stats().counters.submitted == 180
