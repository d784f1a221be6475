"""The engine on the scripted backend: exact, and in milliseconds."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator

import pytest

from edgeinfer.errors import BackendFailed, BadRequest, ContextLengthExceeded, EngineBusy, EngineClosed
from edgeinfer.runtime.backends.fake import END, ByteVocab, ScriptedBackend
from edgeinfer.runtime.scheduler import SchedulerOptions
from edgeinfer.runtime.service import Engine
from edgeinfer.runtime.values import Finished, FinishReason, PrefillProgress, StepPlan, TextDelta


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    """Engines made in a test, closed after it."""
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close()


def start(engines: list[Engine], backend: ScriptedBackend, **options: int) -> Engine:
    engines.append(Engine(backend, options=SchedulerOptions(**options)))
    return engines[-1]


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def echo(tokens: list[int]) -> int:
    """Says back what stood between the last "<" and ">" of the prompt: the answer depends on the prompt alone."""
    data = bytes(token for token in tokens if token < 256)
    marker, _, said = data.rpartition(b"assistant\n")
    marker = marker[marker.rindex(b"<") : marker.rindex(b">") + 1]
    return marker[len(said)] if len(said) < len(marker) else END


class Gate:
    """Holds the engine thread before a forward that matches, until released."""

    def __init__(self, when=lambda plan: True):
        self.when = when
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, plan: StepPlan) -> None:
        if self.when(plan):
            self.reached.set()
            assert self.open.wait(60)


# -------------------------------------------------------------------------------------------------------------- answers


def test_an_answer_streams_and_ends(engines) -> None:
    engine = start(engines, ScriptedBackend([b"Hel", b"lo", b"!"]))
    stream = engine.chat(ask("hi"))
    assert list(stream) == ["Hel", "lo", "!"]
    assert stream.text() == "Hello!"
    assert stream.finish_reason is FinishReason.STOP
    assert stream.usage.completion_tokens == 4           # the end-of-turn token was generated too
    assert stream.timings.predicted_n == 4 and stream.timings.first_token_ms > 0


def test_streamed_equals_whole_and_async_equals_sync(engines) -> None:
    engine = start(engines, ScriptedBackend([b"\xf0\x9f", b"\x98\x80", b" \xe6\x97\xa5", b"\xe6\x9c\xac"]))   # case 48

    async def collect() -> str:
        return "".join([piece async for piece in engine.chat(ask("hi"))])

    whole = engine.chat(ask("hi")).text()
    assert whole == "".join(engine.chat(ask("hi"))) == asyncio.run(collect()) == "😀 日本"


def test_events_tell_the_whole_story(engines) -> None:
    engine = start(engines, ScriptedBackend([b"a", b"b"]), prefill_chunk=16)
    events = list(engine.generate("x" * 40).events())
    progress = [event for event in events if isinstance(event, PrefillProgress)]
    assert [event.done for event in progress] == [16, 32, 40] and {event.total for event in progress} == {40}
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["a", "b"]
    assert isinstance(events[-1], Finished) and sum(isinstance(event, Finished) for event in events) == 1


def test_many_at_once_each_get_their_own(engines) -> None:
    """case 63: several threads call one engine; every answer is its own."""
    engine = start(engines, ScriptedBackend(echo, max_slots=3))
    answers: dict[int, str] = {}

    def one(index: int) -> None:
        answers[index] = engine.chat(ask(f"<marker {index}>")).text()

    threads = [threading.Thread(target=one, args=(index,)) for index in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {index: f"<marker {index}>" for index in range(20)}
    counters = engine.counters
    assert counters.submitted == counters.finished == 20


@pytest.mark.parametrize(("limit", "text"), [(1, "a"), (2, "ab"), (3, "abc")])
def test_max_tokens(engines, limit: int, text: str) -> None:
    engine = start(engines, ScriptedBackend([b"a", b"b", b"c", b"d"]))
    stream = engine.generate("x", max_tokens=limit)
    assert stream.text() == text and stream.finish_reason is FinishReason.LENGTH and stream.usage.completion_tokens == limit


def test_max_tokens_zero_generates_nothing(engines) -> None:
    stream = start(engines, ScriptedBackend([b"a"])).generate("x", max_tokens=0)
    assert stream.text() == "" and stream.finish_reason is FinishReason.LENGTH and stream.usage.completion_tokens == 0


@pytest.mark.parametrize("length", [1, 30, 31, 32])
def test_the_context_limit_ends_an_answer_and_keeps_its_text(engines, length: int) -> None:
    """case 72: n_ctx is reached long before max_tokens."""
    stream = start(engines, ScriptedBackend(lambda tokens: ord("z"), n_ctx=32)).generate("x" * length, max_tokens=1000)
    assert stream.text() == "z" * (33 - length)          # the last token needs no room: nothing is computed from it
    assert stream.finish_reason is FinishReason.LENGTH


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(engines) -> None:
    engine = start(engines, ScriptedBackend(n_ctx=32))
    with pytest.raises(ContextLengthExceeded) as caught:
        engine.generate("x" * 33)
    assert caught.value.needed == 33 and caught.value.available == 32 and "33" in str(caught.value) and "32" in str(caught.value)
    assert engine.counters.submitted == 0


@pytest.mark.parametrize("call", [
    lambda engine: engine.generate(""),
    lambda engine: engine.generate([]),
    lambda engine: engine.generate([99999]),
    lambda engine: engine.generate("x", temprature=1),
    lambda engine: engine.generate("x", logit_bias={99999: 1.0}),
    lambda engine: engine.chat([]),
])
def test_bad_requests_are_refused_where_they_are_made(engines, call) -> None:
    engine = start(engines, ScriptedBackend())
    with pytest.raises(BadRequest):
        call(engine)
    assert engine.generate("x").text() == "ok"


# ------------------------------------------------------------------------------------------------------------ reuse of KV


def test_a_second_turn_reuses_the_first_and_its_answer(engines) -> None:
    backend = ScriptedBackend([b"fine"])
    engine = start(engines, backend)
    first = engine.chat(ask("how are you?"))
    history = [*ask("how are you?"), {"role": "assistant", "content": first.text()}, {"role": "user", "content": "good"}]
    before = backend.tokens_computed
    second = engine.chat(history)
    assert second.text() == "fine"
    # Everything up to the answer's end was in the KV; "fine" is one token of the script but four bytes of a prompt, so reuse ends where it starts.
    assert second.usage.cached_tokens == first.usage.prompt_tokens
    assert backend.tokens_computed - before == second.usage.prompt_tokens - second.usage.cached_tokens + 1


def test_the_answer_itself_is_reused(engines) -> None:
    backend = ScriptedBackend([b"f", b"i", b"n", b"e"])
    engine = start(engines, backend)
    first = engine.chat(ask("hi"))
    history = [*ask("hi"), {"role": "assistant", "content": first.text()}, {"role": "user", "content": "again"}]
    second = engine.chat(history)
    second.text()
    assert second.usage.cached_tokens >= first.usage.prompt_tokens + len("fine")


def test_the_same_prompt_again_recomputes_one_token_and_answers_the_same(engines) -> None:
    """case 55: a full hit still decodes; "regenerate" is not empty."""
    backend = ScriptedBackend([b"same"])
    engine = start(engines, backend)
    for turn in range(3):
        stream = engine.chat(ask("tell me"))
        assert stream.text() == "same"
        assert stream.usage.cached_tokens == (stream.usage.prompt_tokens - 1 if turn else 0)
        assert (stream.usage.cache_miss is None) == bool(turn)


def test_a_miss_says_why(engines) -> None:
    engine = start(engines, ScriptedBackend([b"ok"], max_slots=1))
    texts = ["aaaa", "bbbb", "bbcc", "bbcc!"]
    reasons = []
    for text in texts:
        stream = engine.generate(text)
        stream.text()
        reasons.append(stream.usage.cache_miss)
    assert reasons == ["nothing is cached yet", "no cached conversation starts with these tokens", "the cached conversation differs from token 2 on", None]


def test_a_running_conversation_lends_its_prefix(engines) -> None:
    gate = Gate(lambda plan: len(plan.decodes) > 0)
    backend = ScriptedBackend([b"one", b"two"], before_forward=gate)
    engine = start(engines, backend)
    first = engine.generate("shared prefix, then A")
    assert gate.reached.wait(60)
    second = engine.generate("shared prefix, then B")
    gate.open.set()
    assert first.text() == second.text() == "onetwo"
    assert second.usage.cached_tokens == len("shared prefix, then ")


# -------------------------------------------------------------------------------------------------- stop strings and UTF-8


def test_stop_strings_cut_exactly(engines) -> None:
    engine = start(engines, ScriptedBackend([b"alpha ", b"beta ", b"gam", b"ma delta"]))                    # case 50
    stream = engine.generate("x", stop=("beta gamma",))
    assert list(stream) and stream.text() == "alpha " and stream.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("script", [[b"why", b"?\n"], [b"why?"], [b"why", b"?", b"\n"]])
def test_what_was_held_back_is_delivered_at_the_end(engines, script) -> None:
    stream = start(engines, ScriptedBackend(script)).generate("x", stop=("\n",))                            # case 51
    assert stream.text() == "why?"


def test_a_held_prefix_is_flushed_when_the_answer_ends(engines) -> None:
    engine = start(engines, ScriptedBackend([b"so ST", b"O"]))
    assert engine.generate("x", stop=("STOP",)).text() == "so STO"                                          # end of turn
    assert engine.generate("x", stop=("STOP",), max_tokens=1).text() == "so ST"                             # max_tokens


def test_an_answer_cut_inside_a_character_ends_with_one_replacement(engines) -> None:
    engine = start(engines, ScriptedBackend([b"\xf0", b"\x9f", b"\x98", b"\x80"]))                            # case 47
    assert engine.generate("x").text() == "😀"
    assert engine.generate("x", max_tokens=2).text() == "\ufffd"


# ------------------------------------------------------------------------------------------------------------ cancellation


def test_cancel_keeps_the_text_and_frees_the_slot(engines) -> None:
    backend = ScriptedBackend(lambda tokens: ord("z"), n_ctx=100_000, max_slots=1)
    engine = start(engines, backend)
    stream = engine.generate("x")
    pieces = iter(stream)
    got = [next(pieces) for _ in range(5)]
    stream.cancel()
    assert stream.wait(60)
    assert stream.finish_reason is FinishReason.CANCELLED and stream.error is None
    assert stream.text().startswith("".join(got))
    assert engine.generate("y", max_tokens=2).text() == "zz"
    assert engine.counters.cancelled == 1


def test_cancel_reaches_a_running_prefill(engines) -> None:
    """case 75's kind: the chunk that is being computed is given up, not finished."""
    gate = Gate()
    backend = ScriptedBackend([b"never"], before_forward=gate, max_slots=1)
    engine = start(engines, backend)
    stream = engine.generate("x" * 400)
    assert gate.reached.wait(60)
    stream.cancel()
    gate.open.set()
    assert stream.wait(60) and stream.finish_reason is FinishReason.CANCELLED
    assert backend.tokens_computed == 0 and stream.usage.completion_tokens == 0


def test_cancel_while_queued(engines) -> None:
    gate = Gate()
    backend = ScriptedBackend([b"a"], before_forward=gate, max_slots=1)
    engine = start(engines, backend)
    first = engine.generate("first")
    assert gate.reached.wait(60)
    second = engine.generate("second")
    second.cancel()
    gate.open.set()
    assert first.text() == "a" and second.text() == "" and second.finish_reason is FinishReason.CANCELLED


def test_a_dropped_stream_stops_its_request(engines) -> None:
    """case 74, in process: nobody listens any more."""
    backend = ScriptedBackend(lambda tokens: ord("z"), n_ctx=10_000_000, max_slots=1)
    engine = start(engines, backend)
    stream = engine.generate("x")
    next(iter(stream))
    del stream
    gc.collect()
    assert engine.generate("y", max_tokens=1).text() == "z"      # would wait for ever behind the endless one
    assert engine.counters.cancelled == 1


def test_leaving_the_with_block_cancels(engines) -> None:
    engine = start(engines, ScriptedBackend(lambda tokens: ord("z"), n_ctx=10_000_000, max_slots=1))
    with engine.generate("x") as stream:
        next(iter(stream))
    assert stream.wait(60) and stream.finish_reason is FinishReason.CANCELLED


def test_an_asyncio_reader_that_is_cancelled_leaves_the_engine_working(engines) -> None:
    """case 76: the next request works, from another event loop too."""
    engine = start(engines, ScriptedBackend(lambda tokens: ord("z"), n_ctx=10_000_000, max_slots=1))

    async def give_up() -> None:
        async def read() -> None:
            async for _ in engine.generate("x"):
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    gc.collect()
    assert engine.generate("y", max_tokens=2).text() == "zz"


# ------------------------------------------------------------------------------------------------------ pressure and faults


def test_a_full_cache_fails_nobody_who_fits_alone(engines) -> None:
    """case 67's kind: idle cache goes first, then the youngest waits and is computed again; every answer is complete and its own."""
    backend = ScriptedBackend(echo, n_ctx=128, max_slots=4, kv_cells=150)
    engine = start(engines, backend)
    streams = [engine.chat(ask(f"<{index} says hello to everybody>")) for index in range(6)]
    assert [stream.text() for stream in streams] == [f"<{index} says hello to everybody>" for index in range(6)]
    assert engine.counters.preemptions > 0 and engine.counters.failed == 0


def test_queue_limit_says_busy(engines) -> None:
    gate = Gate()
    engine = start(engines, ScriptedBackend([b"a"], before_forward=gate, max_slots=1), max_waiting=2)
    streams = [engine.generate("one")]
    assert gate.reached.wait(60)
    streams.append(engine.generate("two"))
    with pytest.raises(EngineBusy):
        engine.generate("three")
    gate.open.set()
    assert [stream.text() for stream in streams] == ["a", "a"]


def test_a_failing_step_ends_its_requests_and_the_engine_lives(engines) -> None:
    calls = []

    def fail_once(plan: StepPlan) -> None:
        calls.append(plan)
        if len(calls) == 1:
            raise RuntimeError("boom")

    engine = start(engines, ScriptedBackend([b"ok"], before_forward=fail_once))
    with pytest.raises(BackendFailed, match="boom"):
        engine.generate("x").text()
    assert engine.generate("x").text() == "ok"
    assert engine.counters.failed == 1 and engine.counters.finished == 1


def test_logits_that_are_no_numbers_fail_only_their_request(engines) -> None:
    """case 27's kind."""
    backend = ScriptedBackend(echo, max_slots=2)
    forward = backend.forward

    def poisoned(plan):
        result = forward(plan)
        for chunk in plan.chunks:
            if bytes(token for token in backend._slots[chunk.slot] if token < 256).count(b"poison") and chunk.slot in result.logits:
                result.logits[chunk.slot][0, 7] = float("nan")
        return result

    backend.forward = poisoned
    engine = start(engines, backend)
    bad, good = engine.chat(ask("<poison>")), engine.chat(ask("<fine>"))
    assert good.text() == "<fine>"
    with pytest.raises(BackendFailed):
        bad.text()


def test_closing_ends_running_requests_with_a_clear_error() -> None:
    backend = ScriptedBackend(lambda tokens: ord("z"), n_ctx=10_000_000)
    engine = Engine(backend)
    stream = engine.generate("x")
    next(iter(stream))
    engine.close()
    engine.close()
    assert backend.closed and engine.closed
    with pytest.raises(EngineClosed):
        stream.text()
    with pytest.raises(EngineClosed):
        engine.generate("x")


def test_engines_leave_no_threads_behind() -> None:
    before = threading.active_count()
    for _ in range(50):
        with Engine(ScriptedBackend([b"ok"])) as engine:
            assert engine.generate("x").text() == "ok"
    forgotten = Engine(ScriptedBackend([b"ok"]))
    forgotten.generate("x").text()
    del forgotten
    gc.collect()
    for _ in range(600):                                 # a joined thread is gone; a collected engine's needs a moment
        if threading.active_count() == before:
            break
        time.sleep(0.1)
    assert threading.active_count() == before


def test_a_stream_keeps_its_engine_alive() -> None:
    assert Engine(ScriptedBackend([b"to", b" the", b" end"])).generate("x").text() == "to the end"


@pytest.mark.parametrize("options", [{"prefill_chunk": 0}, {"prefill_chunk_busy": -1}, {"max_waiting": 0}, {"max_num_batched_tokens": 3}])
def test_options_that_could_never_make_a_step_are_refused(options) -> None:
    backend = ScriptedBackend(max_slots=4)
    with pytest.raises(BadRequest):
        Engine(backend, options=SchedulerOptions(**options))


@pytest.mark.parametrize("options", [{"prefill_chunk": 3}, {"prefill_chunk_busy": 2}, {"max_num_batched_tokens": 4}, {}])
def test_seeded_and_other_requests_finish_together_whatever_the_chunks(engines, options) -> None:
    engine = start(engines, ScriptedBackend(echo, max_slots=4, max_batch=16), **options)
    streams = [engine.chat(ask(f"<number {n}>"), seed=n if n % 2 else None) for n in range(10)]
    assert [stream.text() for stream in streams] == [f"<number {n}>" for n in range(10)]


def test_timings_and_usage_are_readable_while_it_runs(engines) -> None:
    gate = Gate(lambda plan: len(plan.decodes) > 0)
    engine = start(engines, ScriptedBackend([b"a", b"b"], before_forward=gate))
    stream = engine.generate("x" * 10)
    assert gate.reached.wait(60)
    assert stream.progress.done == 10 and stream.usage.completion_tokens == 1 and not stream.done and stream.finish_reason is None
    assert stream.timings.prompt_n == 10 and stream.timings.first_token_ms > 0
    gate.open.set()
    assert stream.text() == "ab"


def test_count_tokens_is_what_chat_sends(engines) -> None:
    engine = start(engines, ScriptedBackend())
    stream = engine.chat(ask("how long is this?"))
    assert engine.count_tokens(ask("how long is this?")) == stream.usage.prompt_tokens


def test_without_a_template_chat_says_what_to_do(engines) -> None:
    engine = start(engines, ScriptedBackend(vocab=ByteVocab(chat_template=None), script=lambda tokens: END))
    with pytest.raises(BadRequest, match="template"):
        engine.chat(ask("hi"))
    assert engine.generate("hi").text() == ""
