"""Who computes what in each step: exact plans."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, strategies as st
from engine_runs import SYSTEM, Run, start

from edgeinfer.errors import BackendFailed, BadRequest
from edgeinfer.runtime import scheduler
from edgeinfer.runtime.backends.fake import ScriptedBackend
from edgeinfer.runtime.scheduler import SchedulerOptions
from edgeinfer.runtime.service import Engine
from edgeinfer.runtime.values import Failed, FinishReason

# ------------------------------------------------------------------------------------------------------------- one step


def test_a_prompt_is_read_in_chunks_and_then_decoded() -> None:
    run = start()
    run.add("a", "x" * 40, max_tokens=3)
    assert run.finish() == ["| a16", "| a16", "| a8", "a |", "a |"]


def test_decoders_go_first_and_prefill_is_bounded_while_anyone_decodes() -> None:
    run = start()
    run.add("a", "aaaa")
    assert run.step() == "| a4"
    run.add("b", "b" * 10, max_tokens=2)
    assert run.steps(4) == ["a | b4", "a | b4", "a | b2", "a b |"]


def test_the_pieces_of_a_long_prompt_get_smaller_while_anyone_decodes() -> None:
    run = start(prefill_chunk=512, prefill_chunk_busy=256, attention_depth=1000)
    run.add("a", "aaaa")
    run.step()
    run.add("b", "b" * 2000, max_tokens=2)
    sizes = []
    while (plan := run.step()) != "a b |":
        sizes.append(int(plan.removeprefix("a | b")))
    assert sizes == [256, 192, 192, 192, *[128] * 9, 16]


@given(st.integers(1, 2048), st.integers(0, 100_000), st.integers(1, 50_000))
def test_a_piece_takes_as_long_wherever_it_is(budget: int, at: int, depth: int) -> None:
    time = scheduler._time(budget, 0, depth)
    count = scheduler.affordable(time, at, depth)
    assert 1 <= count <= budget + 32 and scheduler.affordable(time, at + 1000, depth) <= count
    tile = scheduler._time(32, at + count, depth)                   # half a tile more or less
    assert abs(scheduler._time(count, at, depth) - time) <= max(tile, scheduler._time(1, at + count, depth))
    assert scheduler.affordable(budget, at, 0) == budget


def test_one_step_reads_several_prompts() -> None:
    run = start()
    for name, length in (("a", 5), ("b", 6), ("c", 7)):
        run.add(name, name * length)
    assert run.steps(3) == ["| a5 b6 c5", "a b | c2", "a b c |"]


def test_the_step_never_exceeds_its_budget() -> None:
    run = start(max_num_batched_tokens=8, prefill_chunk=100, prefill_chunk_busy=100, max_slots=4)
    for name in "abc":
        run.add(name, name * 2)
    assert run.step() == "| a2 b2 c2"
    run.add("d", "d" * 12)
    assert run.steps(4) == ["a b c | d5", "a b c | d5", "a b c | d2", "a b c d |"]


def test_the_backend_bounds_the_step_too() -> None:
    run = start(prefill_chunk=100, max_batch=6, max_slots=2)
    run.add("a", "a" * 10, max_tokens=1)
    assert run.finish() == ["| a6", "| a4"]


def test_max_num_seqs_run_at_once_and_the_next_comes_in_as_one_leaves() -> None:
    run = start(max_num_seqs=2)
    for name in "abc":
        run.add(name, name * 3, max_tokens=2)
    assert run.finish() == ["| a3 b3", "a b |", "| c3", "c |"]


def test_a_backend_made_for_few_sequences_and_many_slots_runs_few_and_caches_many() -> None:
    run = start(max_seqs=1, max_slots=4)
    for name in "abc":
        run.add(name, name * 3, max_tokens=1)
    assert run.finish() == ["| a3", "| b3", "| c3"]
    assert run.core.slots.idle_tokens == 9


@pytest.mark.parametrize(("fields", "said"), [
    ({"max_num_seqs": 3, "max_slots": 2}, "max_num_seqs is 3"),
    ({"max_num_seqs": 33}, "at most 32"),
    ({"max_num_batched_tokens": 3, "max_slots": 4}, "cannot serve 4 sequences"),
    ({"policy": "random"}, "policy must be one of"),
    ({"batch_wait_ms": float("nan")}, "batch_wait_ms"),
    ({"max_num_seqs": True}, "max_num_seqs"),
])
def test_settings_that_cannot_be_kept_are_refused(fields, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        start(**fields)


def test_what_was_aborted_is_planned_again() -> None:
    run = start(before_forward=lambda plan: run.backend.abort() if len(run.backend.plans) == 2 else None)
    run.add("a", "a" * 20, max_tokens=2)
    assert run.finish() == ["| a16", "| a4", "| a4", "a |"]
    assert run["a"].text == "zz" and run.backend.tokens_computed == 21


# ------------------------------------------------------------------------------------------------------------- whose turn


def test_the_short_one_is_read_before_the_long_one() -> None:
    run = start()
    run.add("long", "l" * 40, max_tokens=1)
    run.add("short", "s" * 6, max_tokens=3)
    assert run.finish() == ["| short6 long10", "short | long4", "short | long4", "| long16", "| long6"]


def test_a_short_one_overtakes_a_long_one_that_is_being_read() -> None:
    run = start()
    run.add("long", "l" * 40, max_tokens=1)
    assert run.step() == "| long16"
    run.add("short", "s" * 6, max_tokens=1)
    assert run.finish() == ["| short6 long10", "| long14"]


def test_a_long_prompt_is_overtaken_only_by_what_arrives_before_it_is_due() -> None:
    """The long prompt of 30 tokens is due at 120. A short one of 10 is due 40 after it came: those that come before 80 go first."""
    run = start(prefill_chunk=10, max_num_seqs=2)
    run.add("long", "l" * 30, max_tokens=1)
    plans = []
    for number in range(12):
        run.add(f"s{number}-", chr(65 + number) * 10, max_tokens=1)
        plans.append(run.step())
    assert plans == [*(f"| s{number}-10" for number in range(8)), *["| long10"] * 3, "| s8-10"]
    assert run.finish() == ["| s9-10", "| s10-10", "| s11-10"]


def test_however_many_short_ones_come_a_long_one_is_read() -> None:
    run = start(prefill_chunk=8, max_num_seqs=1)
    run.add("first", "f" * 8, max_tokens=1)
    run.add("long", "l" * 64, max_tokens=1)
    number = 0
    while run["long"].end is None:
        run.add(f"s{number}-", chr(97 + number % 26) * 8, max_tokens=1)
        run.step()
        number += 1
        assert number <= (4 * 64) // 8 + 1 + 8


def test_interactive_goes_before_batch_whatever_its_length() -> None:
    run = start(max_num_seqs=2)
    run.add("batch", "b" * 4, max_tokens=1, priority="batch")
    run.add("chat", "c" * 20, max_tokens=1)
    assert run.finish() == ["| chat16", "| chat4 batch4"]


def test_interactive_overtakes_a_batch_prompt_that_is_being_read() -> None:
    run = start()
    run.add("batch", "b" * 40, max_tokens=1, priority="batch")
    assert run.step() == "| batch16"
    run.add("chat", "c" * 20, max_tokens=1)
    assert run.finish() == ["| chat16", "| chat4 batch12", "| batch12"]


@pytest.mark.parametrize("policy", ["shortest", "fcfs"])
def test_batch_requests_do_not_wait_for_ever(monkeypatch, policy: str) -> None:
    monkeypatch.setattr(scheduler, "_BATCH_DELAY", 100)
    run = start(prefill_chunk=10, max_num_seqs=1, policy=policy)
    run.add("batch", "b" * 10, max_tokens=1, priority="batch")
    plans = []
    for number in range(20):
        run.add(f"c{number}-", chr(97 + number) * 10, max_tokens=1)
        plans.append(run.step())
    # Whoever arrives at clock 100 or later is due no earlier than the batch request.
    assert plans.index("| batch10") == 10


def test_first_come_first_served_when_asked_for() -> None:
    run = start(policy="fcfs")
    run.add("long", "l" * 40, max_tokens=1)
    run.add("short", "s" * 6, max_tokens=1)
    run.step()
    run.add("later", "x", max_tokens=1)
    assert run.finish() == ["| long16", "| long8 short6 later1"]


def test_the_same_arrivals_give_the_same_plans() -> None:
    def plans(seed: int) -> list[str]:
        random = Random(seed)
        run = start(max_num_seqs=3, max_slots=5, kv_cells=200, n_ctx=150)
        said = []
        for number in range(60):
            if random.random() < 0.5:
                head = SYSTEM[: random.choice([0, 20, 43])]
                run.add(f"r{number}-", head + chr(97 + number % 26) * random.randint(1, 60), max_tokens=random.randint(1, 9),
                        priority=random.choice(["interactive", "batch"]), seed=random.choice([None, 5]), temperature=1)
            said.append(run.step())
        return said + run.finish()

    first, second = plans(1), plans(1)
    assert first == second and len(first) > 60 and first != plans(2)


# ------------------------------------------------------------------------------------------------------------ seeds, waiting


def spans(run: Run, slot: int) -> list[tuple[int, int]]:
    """Start and length of the chunks that were read in a slot, in order."""
    return [(chunk.start, len(chunk.tokens)) for plan in run.backend.plans for chunk in plan.prefills if chunk.slot == slot]


def test_a_seeded_prompt_is_read_in_the_same_chunks_alone_and_in_company() -> None:
    alone = start()
    alone.add("seeded", "s" * 18, seed=1, temperature=1, max_tokens=3)
    alone.finish()
    assert spans(alone, 0) == [(0, 4), (4, 4), (8, 4), (12, 4), (16, 2)]
    company = start()
    company.add("seeded", "s" * 18, seed=1, temperature=1, max_tokens=3)
    company.add("other", "o" * 5)
    company.add("third", "t" * 30)
    company.steps(30)
    assert spans(company, company["seeded"].slot or 0) and company["seeded"].end
    slots = {chunk.slot for plan in company.backend.plans for chunk in plan.chunks if chunk.alone}
    assert len(slots) == 1 and spans(company, slots.pop()) == spans(alone, 0)


def test_seeded_requests_run_in_batches_of_their_own_and_others_do_not() -> None:
    run = start()
    run.add("seeded", "s" * 3, seed=1, temperature=1, max_tokens=3)
    run.add("greedy", "g" * 3, seed=1, temperature=0, max_tokens=3)
    run.step()
    slot = run["seeded"].slot
    run.finish()
    assert len(run.backend.plans) == 3
    assert all(chunk.alone == (chunk.slot == slot) for plan in run.backend.plans for chunk in plan.chunks)


def test_a_seeded_prompt_reuses_whole_chunks_only() -> None:
    run = start()
    run.add("first", "x" * 11, max_tokens=1)
    run.finish()
    run.add("other", "o", max_tokens=2)
    again = run.add("again", "x" * 11, seed=1, temperature=1, max_tokens=1)
    assert run.finish() == ["| other1 again3", "other |"] and again.cached == 8


def test_drafts_leave_room_for_prompts() -> None:
    """An answer that is drafted as far as a step allows must not keep a prompt of fixed chunks from being read."""

    class Always:
        def propose(self, sequences, room, *, n_ctx, others=0) -> None:
            for seq in sequences:
                seq.draft = [ord("z")] * max(0, min(room, seq.draft_limit(n_ctx)))

        def settle(self, seq, drafted, right) -> None:
            pass

        def measured(self, rows, seconds) -> None:
            pass

        def forget(self, seq) -> None:
            pass

    run = start(max_num_batched_tokens=8, max_slots=2)
    run.core.speculator = Always()
    run.add("a", "aaaa", max_tokens=1000)
    assert run.step() == "| a4"
    run.add("seeded", "s" * 12, seed=1, temperature=1, max_tokens=1)
    run.steps(8)
    assert run["seeded"].end is not None and run["a"].end is None
    assert run.step() == "a7 |"


def test_an_idle_engine_gathers_requests_before_its_first_step() -> None:
    backend = ScriptedBackend([b"ok"])
    with Engine(backend, options=SchedulerOptions(batch_wait_ms=5)) as engine:
        # In place of 5 ms: until all three are there, so that the test does not depend on how fast this machine is.
        loop = engine._loop
        waited, really = [], loop._wake.wait_for

        def wait_for(over, timeout=None):
            if timeout != 0.005:
                return really(over, timeout)
            waited.append(timeout)
            return really(lambda: over() or len(loop._inbox) == 3)

        loop._wake.wait_for = wait_for
        streams = [engine.generate(text) for text in ("one", "two", "three")]
        assert [stream.text() for stream in streams] == ["ok"] * 3
    assert waited
    assert [len(chunk.tokens) for chunk in backend.plans[0].prefills] == [3, 3, 5]


# -------------------------------------------------------------------------------------------------------------- pressure


def test_under_pressure_the_youngest_waits_and_batch_requests_first() -> None:
    run = start(kv_cells=48, n_ctx=48)
    run.add("old", "o" * 10, max_tokens=20)
    run.add("batch", "b" * 10, max_tokens=20, priority="batch")
    run.step()
    run.add("new", "n" * 10, max_tokens=5)
    run.finish()
    assert [run[name].preemptions for name in ("old", "batch", "new")] == [0, 1, 0]
    assert {name: len(seq.text) for name, seq in run.sequences.items()} == {"old": 20, "batch": 20, "new": 5}


def test_idle_cache_goes_before_anybody_is_preempted() -> None:
    run = start(kv_cells=64, n_ctx=64)
    for name in "abc":
        run.add(name, name * 15, max_tokens=1)
        run.finish()
    assert run.core.slots.idle_tokens == 45
    run.add("d", "d" * 10, max_tokens=40)
    run.finish()
    assert run.core.counters.preemptions == 0 and run.core.slots.evictions == 2 and len(run["d"].text) == 40


def test_a_preempted_request_keeps_its_first_cache_report_and_comes_back_first() -> None:
    run = start(kv_cells=40, n_ctx=40, max_num_seqs=2)
    run.add("old", "o" * 10, max_tokens=20)
    run.add("young", "y" * 10, max_tokens=20)
    run.step()
    run.add("next", "n", max_tokens=1)
    plans = run.finish()
    assert run["young"].preemptions == 1 and run["young"].cached == 0 and run["young"].end.timings.preemptions == 1
    back = next(at for at, plan in enumerate(plans) if "| young" in plan)
    assert all("next" not in plan for plan in plans[:back])
    assert run["young"].end.reason is FinishReason.LENGTH and len(run["young"].text) == 20


@pytest.mark.parametrize("cache_bytes", [0, 1])
def test_who_had_no_room_beside_one_that_ended_in_the_same_step_goes_on(cache_bytes: int) -> None:
    run = start(kv_cells=30, n_ctx=30, cache_bytes=cache_bytes)
    run.add("a", "a" * 10, max_tokens=7)
    run.add("b", "b" * 10, max_tokens=20)
    said = run.finish()
    assert said[:8] == ["| a10 b6", "a | b4", *["a b |"] * 5, "b |"]      # in the seventh step a took the last cell, and ended with it
    assert [len(run[name].text) for name in "ab"] == [7, 20] and run.core.counters.preemptions == 0


def test_a_fault_while_slots_are_released_loses_no_request() -> None:
    run = start()
    for name in "ab":
        run.add(name, name * 4)
    run.step()
    truncate = run.backend.truncate

    def broken(slot: int, length: int) -> bool:
        run.backend.truncate = truncate
        raise RuntimeError("the library is gone")

    run.backend.truncate = broken
    with pytest.raises(RuntimeError):
        run.core.fail_all(BackendFailed("The step failed."))
    run.core.fail_all(BackendFailed("The step failed."))
    assert all(isinstance(run[name].end, Failed) for name in "ab") and run.core.counters.failed == 2 and not run.core.has_work
