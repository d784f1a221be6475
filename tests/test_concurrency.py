"""One engine, many threads and event loops: cancelling, closing, leaving, and what is left behind."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import edgeinfer
from edgeinfer.errors import BackendFailed, BadRequest, Cancelled, EdgeInferError, EngineClosed
from edgeinfer.runtime.backends.fake import END, ScriptedBackend
from edgeinfer.runtime.engine import EngineCounters
from edgeinfer.runtime.scheduler import SchedulerOptions
from edgeinfer.runtime.service import Engine
from edgeinfer.runtime.values import FinishReason, StepPlan

ENDLESS = 10_000_000                                     # a context that no test fills


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread is about to do."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def echo(tokens: list[int]) -> int:
    """Says back what stood between "<" and ">" in the prompt."""
    data = bytes(token for token in tokens if token < 256)
    marker, _, said = data.rpartition(b"assistant\n")
    marker = marker[marker.rindex(b"<") : marker.rindex(b">") + 1]
    return marker[len(said)] if len(said) < len(marker) else END


def endless(tokens: list[int]) -> int:
    return ord("z")


def nothing_left(counters: EngineCounters) -> bool:
    return counters.submitted == counters.finished + counters.cancelled + counters.failed


class Gate:
    """Holds the engine's thread before its next forward until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, plan: StepPlan) -> None:
        self.reached.set()
        assert self.open.wait(60)


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    """Makes engines that are closed after the test."""
    made: list[Engine] = []

    def make(*args, max_waiting: int = 256, **fields) -> Engine:
        made.append(Engine(ScriptedBackend(*args, **fields), options=SchedulerOptions(max_waiting=max_waiting)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


# ------------------------------------------------------------------------------------------------------------ many callers


def test_threads_and_event_loops_share_one_engine(start) -> None:
    """case 63: twelve callers of all kinds at once, some of whom change their mind; whoever stays gets an answer of their own."""
    engine = start(echo, max_slots=5, kv_cells=700, max_waiting=1000)
    wrong: list[str] = []

    def judge(index: int, text: str, cancelled: bool) -> None:
        expected = f"<marker {index}>"
        if text != expected and not (cancelled and expected.startswith(text)):
            wrong.append(f"{index}: {text!r}")

    def thread(first: int) -> None:
        choice = random.Random(first)
        for index in range(first, first + 12):
            stream = engine.chat(ask(f"<marker {index}>"))
            give_up = choice.random() < 0.3
            if give_up:
                stream.cancel()
                stream.wait()
            judge(index, stream.text() if choice.random() < 0.5 else "".join(stream) or stream.text(), give_up)

    def event_loop(first: int) -> None:
        async def one(index: int) -> None:
            judge(index, "".join([piece async for piece in engine.chat(ask(f"<marker {index}>"))]), False)

        async def leave(index: int) -> None:
            task = asyncio.create_task(one(index))
            await asyncio.sleep(0.001 * (index % 3))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        async def everybody() -> None:
            await asyncio.gather(*(leave(index) if index % 4 == 0 else one(index) for index in range(first, first + 12)))

        asyncio.run(everybody())

    threads = [threading.Thread(target=kind, args=(1000 * n,)) for n, kind in enumerate([thread, event_loop] * 6, 1)]
    for caller in threads:
        caller.start()
    for caller in threads:
        caller.join()
    assert not wrong
    gc.collect()
    until(lambda: engine.counters.inside == 0)
    assert engine.counters.submitted == 144 and engine.counters.failed == 0 and nothing_left(engine.counters)


def test_cancel_from_many_threads_at_once_ends_once(start) -> None:
    engine = start(endless, n_ctx=ENDLESS, max_slots=2)
    streams = [engine.generate("x") for _ in range(6)]
    threads = [threading.Thread(target=stream.cancel) for stream in streams for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(stream.wait(60) and stream.finish_reason is FinishReason.CANCELLED for stream in streams)
    assert engine.counters.cancelled == 6 and nothing_left(engine.counters)


def test_queued_requests_leave_before_they_cost_anything(start) -> None:
    """case 75: those still in the queue are dropped too."""
    gate = Gate()
    engine = start([b"a"], max_slots=1, before_forward=gate)
    running = engine.generate("the one that runs")
    assert gate.reached.wait(60)
    queued = [engine.generate("y" * 60) for _ in range(8)]
    for stream in queued[::2]:
        stream.cancel()
    del queued[1::2], stream                             # the others by being forgotten
    gc.collect()
    gate.open.set()
    assert running.text() == "a"
    assert all(stream.wait(60) for stream in queued)
    until(lambda: engine.counters.inside == 0)
    assert engine.counters.cancelled == 8
    assert engine._core.backend.tokens_computed == len("the one that runs") + 1


def test_a_stream_may_be_dropped_by_another_thread(start) -> None:
    """case 74, in process."""
    engine = start(endless, n_ctx=ENDLESS, max_slots=1)
    box = [engine.generate("x")]
    next(iter(box[0]))
    dropper = threading.Thread(target=box.clear)
    dropper.start()
    dropper.join()
    assert engine.generate("y", max_tokens=2).text() == "zz"
    assert engine.counters.cancelled == 1


def test_an_interrupt_between_submitting_and_answering_leaves_no_orphan(start, monkeypatch) -> None:
    """Ctrl-C inside generate(): the request is in, and nobody will ever hold its stream."""
    engine = start(endless, n_ctx=ENDLESS, max_slots=1)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("edgeinfer.runtime.stream.Stream._bind", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate("x")
    gc.collect()
    assert engine.generate("y", max_tokens=2).text() == "zz"
    assert engine.counters.cancelled == 1


def test_a_full_cache_makes_only_the_one_wait_that_does_not_fit(start) -> None:
    """case 67: two answers fill the shared KV; the third, whose prompt does not fit beside them, waits for room, and nobody fails."""
    gate = Gate()
    engine = start(endless, n_ctx=100, max_slots=3, kv_cells=100, before_forward=gate)
    first, second = (engine.generate(name * 20, max_tokens=15) for name in "ab")
    third = engine.generate("c" * 70, max_tokens=15)
    gate.open.set()
    assert [stream.text() for stream in (first, second, third)] == ["z" * 15] * 3
    assert (first.timings.preemptions, second.timings.preemptions, third.timings.preemptions) == (0, 0, 0)
    plans = engine._core.backend.plans
    begun = next(at for at, plan in enumerate(plans) if any(chunk.tokens[0] == ord("c") for chunk in plan.prefills))
    assert begun > 0 and all(len(plan.chunks) == 1 for plan in plans[begun:])     # nobody was put out for it: it waited until it was alone
    assert engine.counters.failed == 0 and nothing_left(engine.counters)


# ----------------------------------------------------------------------------------------------------------------- asyncio


def test_an_event_loop_that_closes_in_the_middle(start) -> None:
    """case 76: the reader's loop is gone while it waits and its stream is still held; the engine finds out, and goes on for others."""
    go_on = threading.Event()

    def pause(plan: StepPlan) -> None:
        assert not plan.decodes or go_on.wait(60)

    engine = start(endless, n_ctx=ENDLESS, max_slots=1, before_forward=pause)
    stream = engine.generate("x")
    read: list[str] = []

    async def reader() -> None:
        async for piece in stream:
            read.append(piece)

    loop = asyncio.new_event_loop()
    reading = loop.create_task(reader())
    while not read:
        loop.run_until_complete(asyncio.sleep(0.001))
    loop.run_until_complete(asyncio.sleep(0))            # now it waits for the second token
    reading._log_destroy_pending = False                 # that it is left pending is the point
    loop.close()
    go_on.set()
    assert stream.wait(60) and stream.finish_reason is FinishReason.CANCELLED
    assert engine.generate("y", max_tokens=2).text() == "zz"
    assert engine.counters.cancelled == 1 and nothing_left(engine.counters)


def test_a_task_cancelled_at_the_end_leaves_the_next_ones_working(start) -> None:
    """case 76: finish, error and disconnect, again and again, each followed by a request that works."""
    engine = start([b"a", b"b"], max_slots=2)

    async def several() -> None:
        for turn in range(30):
            stream = engine.generate("x")
            task = asyncio.create_task(_read(stream))
            for _ in range(turn % 5):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert await _read(engine.generate("y")) == "ab"

    asyncio.run(several())
    until(lambda: engine.counters.inside == 0)
    assert nothing_left(engine.counters)


async def _read(stream: edgeinfer.Stream) -> str:
    return "".join([piece async for piece in stream])


def test_closing_inside_asyncio_ends_every_task(start) -> None:
    engine = start(endless, n_ctx=ENDLESS, max_slots=2)

    async def main() -> list[object]:
        tasks = [asyncio.create_task(_read(engine.generate("x"))) for _ in range(5)]
        await asyncio.sleep(0.02)
        engine.close()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(result) for result in asyncio.run(main())] == [EngineClosed] * 5
    assert engine.counters.failed == 5 and nothing_left(engine.counters)


# ----------------------------------------------------------------------------------------------------------------- closing


def test_closing_from_another_thread_ends_all_readers(start) -> None:
    engine = start(endless, n_ctx=ENDLESS, max_slots=2)
    errors: list[BaseException] = []
    streams = [engine.generate("x") for _ in range(5)]

    def read(stream: edgeinfer.Stream) -> None:
        try:
            for _ in stream:
                pass
        except EdgeInferError as error:
            errors.append(error)

    readers = [threading.Thread(target=read, args=(stream,)) for stream in streams]
    closers = [threading.Thread(target=engine.close) for _ in range(3)]
    for thread in readers + closers:
        thread.start()
    for thread in readers + closers:
        thread.join()
    assert [type(error) for error in errors] == [EngineClosed] * 5
    assert engine._core.backend.closed


def test_every_closer_waits_until_it_is_closed(start) -> None:
    gate = Gate()
    engine = start([b"a"], before_forward=gate)
    stream = engine.generate("x")
    assert gate.reached.wait(60)
    closed_when_back: list[bool] = []
    closers = [threading.Thread(target=lambda: (engine.close(), closed_when_back.append(engine._core.backend.closed))) for _ in range(3)]
    for closer in closers:
        closer.start()
    until(lambda: engine.closed)
    assert not closed_when_back
    gate.open.set()
    for closer in closers:
        closer.join()
    assert closed_when_back == [True] * 3 and isinstance(stream.error, EngineClosed)


def test_a_reader_may_close_the_engine_it_reads_from(start) -> None:
    engine = start(endless, n_ctx=ENDLESS)
    stream = engine.generate("x")
    with pytest.raises(EngineClosed):
        for piece in stream:
            engine.close()
    assert stream.text_so_far.startswith(piece) and engine._core.backend.closed


def test_requests_that_race_with_close_end_or_are_refused() -> None:
    """Every request of a crowd either gets its answer or hears that the engine is closed; none hangs, none is lost from the counts."""
    for _ in range(20):
        engine = Engine(ScriptedBackend([b"a"] * 3, max_slots=2))
        accepted: list[edgeinfer.Stream] = []

        def crowd() -> None:
            while True:
                try:
                    accepted.append(engine.generate("x"))
                except EngineClosed:
                    return
                except EdgeInferError:                   # busy
                    pass

        threads = [threading.Thread(target=crowd) for _ in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: len(accepted) > 5)
        engine.close()
        for thread in threads:
            thread.join()
        assert all(stream.done and (stream.text_so_far == "aaa" or isinstance(stream.error, EngineClosed)) for stream in accepted)
        assert engine.counters.submitted == len(accepted) and nothing_left(engine.counters)


def test_stopping_a_load_raises_cancelled_and_frees_it(smollm2_gguf) -> None:
    """Closing while the weights load: the progress callback is the way, by its answer or by an exception of its own."""
    with pytest.raises(BadRequest, match="step_timeout_s"):
        edgeinfer.load(smollm2_gguf, ctx_size=256, step_timeout_s=-1)
    with pytest.raises(Cancelled):
        edgeinfer.load(smollm2_gguf, ctx_size=256, progress=lambda share: share < 0.3)

    class Leaving(Exception):
        pass

    def leave(share: float) -> bool:
        raise Leaving

    with pytest.raises(Leaving):
        edgeinfer.load(smollm2_gguf, ctx_size=256, progress=leave)
    threads, rss = threading.active_count(), psutil.Process().memory_info().rss
    for _ in range(10):
        with pytest.raises(Cancelled):
            edgeinfer.load(smollm2_gguf, ctx_size=256, progress=lambda share: share < 0.9)
    assert threading.active_count() == threads and psutil.Process().memory_info().rss - rss < 60e6


# ---------------------------------------------------------------------------------------------------------- what is left over


def test_hundreds_of_engines_leave_nothing_behind() -> None:
    """case 91's kind: threads, file descriptors and objects are as many after 300 engines as after 50, however each ended."""
    process = psutil.Process()

    def cycle(n: int) -> None:
        engine = Engine(ScriptedBackend([b"a", b"b"], max_slots=2))
        finished, cancelled = engine.generate("one"), engine.chat(ask("two"))
        if n % 3 == 0:
            cancelled.cancel()
        assert finished.text() == "ab"
        if n % 4 == 0:
            asyncio.run(_read(engine.generate("three")))
        if n % 5 == 0:                                   # forgotten instead of closed
            return
        engine.close()
        with pytest.raises(EngineClosed):
            engine.generate("four")

    def left(cycles: int) -> tuple[int, int, int]:
        for n in range(cycles):
            cycle(n)
        gc.collect()
        until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("edgeinfer")])
        gc.collect()
        return process.num_threads(), process.num_fds() if hasattr(process, "num_fds") else 0, len(gc.get_objects())

    threads, files, objects = left(50)
    more_threads, more_files, more_objects = left(300)
    assert more_threads <= threads and more_files <= files
    assert more_objects - objects < 300                  # less than one for each engine


def test_an_ended_stream_keeps_its_text_and_not_its_engine() -> None:
    engine = Engine(ScriptedBackend([b"a", b"b"]))
    stream, gone = engine.generate("x"), weakref.ref(engine)
    assert stream.text() == "ab"
    del engine
    until(lambda: gone() is None)
    assert stream.text() == "ab" and stream.usage.completion_tokens == 3 and stream.timings.predicted_n == 3


def test_nothing_waits_for_the_garbage_collector() -> None:
    """No reference cycle holds an engine or its backend: a closed one is gone when its last name is."""
    gc.collect()
    gc.disable()
    try:
        backend = ScriptedBackend(endless)
        engine = Engine(backend)
        assert engine.generate("x", max_tokens=2).text() == "zz"
        cancelled = engine.generate("y")
        cancelled.cancel()
        cancelled.wait()
        engine.close()
        gone = [weakref.ref(engine), weakref.ref(backend), weakref.ref(cancelled)]
        del engine, backend, cancelled
        until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("edgeinfer")])
        assert [ref() for ref in gone] == [None] * 3
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------------------ on llama.cpp


def long_prompt(engine: Engine, tokens: int) -> list[int]:
    text = "The keeper wrote the name of each boat, the hour and the weather into a thick blue book. "
    return (engine.vocab.encode(text, add_special=False, parse_special=False) * (tokens // 10))[:tokens]


def test_cancel_reaches_into_a_chunk_that_is_being_computed(smollm2_gguf) -> None:
    """case 75: a prompt of 3,000 tokens read in one piece, given up in the middle of it: by cancel(), by dropping the stream, by close()."""
    options = {"ctx_size": 4096, "parallel": 2, "batch_size": 4096, "prefill_chunk": 4096, "prefill_chunk_busy": 4096, "max_num_batched_tokens": 4096}
    with edgeinfer.load(smollm2_gguf, **options) as engine:
        prompt = long_prompt(engine, 3000)
        stream = engine.generate(prompt)
        until(lambda: engine.health.step_seconds > 0.05)
        stream.cancel()
        assert stream.wait(120) and stream.finish_reason is FinishReason.CANCELLED
        assert engine.counters.prefill_tokens == 0 and engine.counters.steps == 1

        stream = engine.generate(prompt)
        until(lambda: engine.health.step_seconds > 0.05 and engine.counters.steps == 1)
        del stream
        gc.collect()
        until(lambda: engine.counters.cancelled == 2)
        assert engine.counters.prefill_tokens == 0

        assert "Tokyo" in engine.chat(ask("What is the capital of Japan?"), temperature=0, max_tokens=16).text()
        steps, read = engine.counters.steps, engine.counters.prefill_tokens
        stream = engine.generate(prompt)
        until(lambda: engine.health.step_seconds > 0.05 and engine.counters.steps == steps)
        engine.close()
        assert isinstance(stream.error, EngineClosed) and engine.counters.prefill_tokens == read


def test_the_watchdog_stops_a_step_that_takes_too_long(smollm2_gguf) -> None:
    """The same prompt in one piece, under a limit that it cannot keep: stopped natively, tried again once, then failed with the way out."""
    options = {"ctx_size": 4096, "parallel": 1, "batch_size": 4096, "prefill_chunk": 4096, "max_num_batched_tokens": 4096, "threads": 1, "ubatch_size": 128}
    with edgeinfer.load(smollm2_gguf, **options, step_timeout_s=0.2) as engine:
        with pytest.raises(BackendFailed, match="prefill_chunk"):
            engine.generate(long_prompt(engine, 4000)).text()
        assert engine.counters.steps == 2 and engine.counters.prefill_tokens == 0 and engine.counters.failed == 1
        assert engine.health.status == "ok"


def test_two_engines_work_at_the_same_time(smollm2_gguf) -> None:
    """Each answers right while the other computes, and goes on when the other is closed in the middle."""
    question, options = ask("What is the capital of Japan?"), {"temperature": 0, "max_tokens": 16}
    with edgeinfer.load(smollm2_gguf, ctx_size=512, parallel=2, threads=1) as one, edgeinfer.load(smollm2_gguf, ctx_size=1024, parallel=3, threads=1) as two:
        busy = [engine.generate("Once upon a time", ignore_eos=True) for engine in (one, two)]
        until(lambda: all(stream.usage.completion_tokens > 2 for stream in busy))
        answers = [engine.chat(question, **options) for engine in (one, two) for _ in range(2)]
        assert all("Tokyo" in stream.text() for stream in answers)
        assert not busy[1].done or busy[1].finish_reason is FinishReason.LENGTH
        one.close()
        assert busy[0].done
        assert "Tokyo" in two.chat(question, **options).text()
        with edgeinfer.load(smollm2_gguf, ctx_size=256, parallel=1, threads=1) as three:
            assert "Tokyo" in three.chat(question, **options).text()
        assert "Tokyo" in two.chat(question, **options).text()


def test_load_run_close_does_not_grow(smollm2_gguf) -> None:
    """case 91, with streams that are cancelled, forgotten and cut off by close: memory, threads and files stay where they were."""
    process = psutil.Process()

    def cycle(n: int) -> None:
        engine = edgeinfer.load(smollm2_gguf, ctx_size=512, parallel=2, threads=1)
        engine.generate("hello", max_tokens=1, temperature=0).text()
        streams = [engine.generate("once upon a time", ignore_eos=True) for _ in range(2)]
        next(iter(streams[0]))
        if n % 2:
            streams.pop().cancel()
        engine.close()
        assert isinstance(streams[0].error, EngineClosed)

    def left(cycles: int) -> tuple[int, int, int]:
        for n in range(cycles):
            cycle(n)
        gc.collect()
        return process.memory_info().rss, process.num_threads(), process.num_fds() if hasattr(process, "num_fds") else 0

    rss, threads, files = left(5)                        # allocators and thread pools warm up in the first rounds
    more_rss, more_threads, more_files = left(20)
    assert more_rss - rss < 40e6                         # one leaked context alone would be 12 MB a round, the weights 97 MB
    assert more_threads <= threads and more_files <= files
