"""Many conversations at once, each with a marker of its own, under pressure: no answer ever holds another's marker."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable
from random import Random

import numpy as np
import pytest

import edgeinfer
from edgeinfer.runtime.backends.fake import ScriptedBackend
from edgeinfer.runtime.scheduler import SchedulerOptions
from edgeinfer.runtime.service import Engine
from edgeinfer.runtime.values import FinishReason

SYSTEM = "You repeat the code that you are given. Nothing else is to be said, whatever happens and whoever asks for it."
FILLER = "the quick brown fox jumps over the lazy dog and "


def repeat(tokens: list[int]) -> int:
    """Says the newest complete "<...>" over and over, whatever else was let go: what is said depends on the sequence's own tokens alone."""
    data = bytes(token for token in tokens if token < 256)
    end = data.rindex(b">")
    marker = data[data.rindex(b"<", 0, end) : end + 1]
    return marker[data.rfind(b"<") > end and len(data) - data.rindex(b"<")]


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run ``work(0) .. work(count - 1)`` at once; what any of them raises is raised here."""
    faults: list[BaseException] = []

    def one(index: int) -> None:
        try:
            work(index)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]


def settled(engine: Engine) -> None:
    """Wait until requests whose stream was dropped have ended too: the engine's thread reads its inbox in order."""
    gc.collect()
    engine.generate("<>", max_tokens=1).wait()


def test_five_hundred_conversations_keep_to_themselves() -> None:
    """case 62: mixed lengths, priorities, context policies, seeds and adapters; every fifth is cancelled or dropped; the KV is far too small."""
    backend = ScriptedBackend(repeat, n_ctx=256, max_slots=12, max_seqs=8, max_batch=96, kv_cells=520, adapters=("a", "b"))
    options = SchedulerOptions(prefill_chunk=48, prefill_chunk_busy=24, max_waiting=1000, cache_bytes=300)
    ends: list[tuple[str, str, FinishReason, int, bool]] = []
    dropped: list[int] = []

    with Engine(backend, options=options) as engine:
        def client(number: int) -> None:
            random = Random(number)
            for turn in range(25):
                marker = f"<{number:02}-{turn:02}-{random.randrange(10**6):06}>"
                policy = random.choice(["error", "error", "shift", "truncate_middle"])
                words = FILLER * random.choice([0, 0, 1, 2, 2] if policy == "error" else [0, 1, 2, 9])
                chat = [{"role": "system", "content": SYSTEM}] * random.choice([0, 1]) if policy == "error" else []
                chat = [*chat, {"role": "user", "content": f"{words}{marker}"}]
                limit = random.choice([1, 15, 40, 40, 70] if policy == "error" else [15, 40, 270])
                stream = engine.chat(
                    chat, max_tokens=limit, context_policy=policy, priority=random.choice(["interactive", "batch"]),
                    seed=random.choice([None, None, 7]), adapter=random.choice([None, None, "a", "b"]),
                )
                what = random.randrange(10)
                if what == 0:
                    stream.cancel()
                elif what == 1:
                    for _ in range(random.randrange(1, 4)):
                        next(iter(stream), None)
                    stream.cancel()
                elif what == 2:
                    next(iter(stream), None)
                    dropped.append(1)
                    del stream
                    continue
                assert stream.wait(120), f"{marker} hangs"
                reason = stream.finish_reason
                assert reason is not None, stream.error
                full = stream.usage.total_tokens == engine.info.n_ctx + 1      # then the answer may end early, and say so
                ends.append((marker, stream.text(), reason, limit, full))

        in_threads(20, client)
        settled(engine)
        counters = engine.counters

    assert len(ends) + len(dropped) == 500
    for marker, text, reason, limit, full in ends:
        whole = (marker * 30)[:limit]
        assert text == whole or (whole.startswith(text) and (reason is FinishReason.CANCELLED or full)), (marker, text)
    assert counters.submitted == 501 == counters.finished + counters.cancelled + counters.failed and counters.failed == 0
    assert counters.finished >= sum(reason is FinishReason.LENGTH for _, _, reason, _, _ in ends) > 350 and counters.cancelled > 20
    # It was a flood: all that can interfere did.
    assert counters.preemptions > 5 and counters.prefix_hits > 50 and counters.shifts > 5 and engine._core.slots.evictions > 50


@pytest.mark.parametrize("slots", [2, 3])
def test_rounds_of_two_new_chats_beside_finished_ones(slots: int) -> None:
    """case 62: several finished chats are cached, then pairs of new ones come at once, on hardly more slots than chats."""
    backend = ScriptedBackend(repeat, n_ctx=256, max_slots=slots, max_batch=64, kv_cells=300)
    with Engine(backend, options=SchedulerOptions(prefill_chunk=32)) as engine:
        for number in range(4):
            assert engine.chat([{"role": "user", "content": f"<old {number}>"}], max_tokens=7).text() == f"<old {number}>"
        for turn in range(20):
            pair = [f"<new {turn} {side}>" for side in "ab"]
            streams = [engine.chat([{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}], max_tokens=len(text)) for text in pair]
            assert [stream.text() for stream in streams] == pair
            # One marker in common is all that the prompts share, and all that is ever reused.
            assert all(stream.usage.cached_tokens < stream.usage.prompt_tokens - len(f"{turn} a>") for stream in streams)
        assert engine.counters.finished == 44


# ------------------------------------------------------------------------------------------------------------- on llama.cpp

ANIMALS = ["ZEBRA", "OTTER", "HERON", "BADGER", "WALRUS", "FALCON", "GECKO", "PANDA", "MOOSE", "TIGER"]


def test_no_answer_of_a_real_model_holds_anothers_marker(smollm2_gguf) -> None:
    """case 62: thirty-two chats, eight at once, in a KV cache that holds about six; every eighth is cancelled."""
    markers = [f"{ANIMALS[number % 10]}-{4711 + 137 * number}" for number in range(32)]
    answers: dict[str, str] = {}
    with edgeinfer.load(smollm2_gguf, ctx_size=256, kv_size=256, parallel=8, cache_slots=4, threads=1) as engine:
        def client(number: int) -> None:
            for marker in markers[number::8]:
                at = markers.index(marker)
                chat = [{"role": "user", "content": f"The password is {marker}. What is the password?"}]
                stream = engine.chat(chat, temperature=0, max_tokens=24, ignore_eos=True)
                if at % 8 == 3:
                    next(iter(stream), None)
                    stream.cancel()
                assert stream.wait(240), f"{marker} hangs"
                assert stream.error is None, stream.error
                answers[marker] = stream.text()

        in_threads(8, client)
        counters = engine.counters
        assert counters.submitted == 32 == counters.finished + counters.cancelled and counters.cancelled <= 4
        assert counters.preemptions > 0 and engine._core.slots.evictions > 0 and counters.prefix_hits > 20
    assert set(answers) == set(markers)
    for own, text in answers.items():
        assert not [marker for marker in markers if marker != own and marker in text], (own, text)
        # Not even half of one: a number may be garbled, but the animals of others it has never seen.
        assert {word for word in re.findall(r"[A-Z]{4,}", text) if word in ANIMALS} <= {own.split("-")[0]}, (own, text)
    assert sum(own in text for own, text in answers.items()) >= 16


def test_the_same_prompt_again_has_the_same_first_token_each_time(smollm2_gguf) -> None:
    """case 54: one token, five times, its KV reused: the distribution does not drift."""
    with edgeinfer.load(smollm2_gguf, ctx_size=512, parallel=2, threads=1) as engine:
        backend, rows = engine._core.backend, []
        forward = backend.forward

        def noting(plan):
            result = forward(plan)
            rows.extend(matrix[-1].astype(np.float64) for matrix in result.logits.values())
            return result

        backend.forward = noting
        streams = []
        for _ in range(5):
            streams.append(engine.chat([{"role": "user", "content": "What is the capital of Japan?"}], temperature=0, max_tokens=1))
            streams[-1].wait()
    assert len(rows) == 5 and [stream.usage.cached_tokens for stream in streams] == [0] + [streams[0].usage.prompt_tokens - 1] * 4
    assert {stream.finish_reason for stream in streams} == {FinishReason.LENGTH} and len({stream.text() for stream in streams}) == 1
    logprobs = [row - row.max() - np.log(np.exp(row - row.max()).sum()) for row in rows]
    tops = {int(row.argmax()) for row in rows}
    assert len(tops) == 1
    top = tops.pop()
    assert max(abs(row[top] - logprobs[0][top]) for row in logprobs) < 0.05          # another batch shape than the first time
    assert max(abs(row[top] - logprobs[1][top]) for row in logprobs[1:]) < 1e-3      # and from then on the same
