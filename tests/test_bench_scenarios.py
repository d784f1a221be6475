"""What `edgeinfer bench` asks the engine, and the figures it makes of the answers, on the scripted backend."""

from __future__ import annotations

import gc
import random
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.errors import BackendFailed, BadRequest
from edgeinfer.runtime.backends.fake import ScriptedBackend
from edgeinfer.runtime.bench import clients, profile, prompts, scenarios, throughput
from edgeinfer.runtime.bench.scenarios import Scenario, Turn
from edgeinfer.runtime.bench.session import Session
from edgeinfer.runtime.bench.values import Batched, KindFigures, Rate, ScenarioFigures, Settings, Spread
from edgeinfer.runtime.service import Engine


def engine(script=(b"a", b"b", b"c"), *, n_ctx: int = 8192, max_slots: int = 16, **options) -> Engine:
    return Engine(ScriptedBackend(script, n_ctx=n_ctx, max_slots=max_slots, max_batch=2048, **options))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


# ----------------------------------------------------------------------------------------------------------------- prompts


@given(st.integers(0, 400), st.integers())
def test_prompts_have_as_many_words_as_asked_and_repeat(words: int, seed: int) -> None:
    text = prompts.text(random.Random(seed), words)
    assert len(text.split()) == words and text == prompts.text(random.Random(seed), words)
    assert not words or text.endswith(".")


@pytest.mark.parametrize(("name", "clients_", "requests", "new"), [
    ("single", 1, 8, {128}), ("burst", 16, 48, {64}), ("shared", 8, 24, {32}), ("mixed", 10, 44, {32}), ("turns", 4, 48, {48}),
])
def test_scenarios_have_their_shapes(name, clients_, requests, new) -> None:
    made = scenarios.build(name, seed=1)
    turns = [turn for conversation in made.conversations for turn in conversation]
    assert (made.clients, made.requests, len(turns)) == (clients_, requests, requests)
    assert {turn.max_tokens for turn in turns} == new
    assert made == scenarios.build(name, seed=1) != scenarios.build(name, seed=2)
    assert scenarios.build(name, seed=1, quick=True).requests < requests
    assert set(scenarios.SUMMARIES) == set(scenarios.NAMES)


def words(turn: Turn) -> list[int]:
    return [len(message["content"].split()) for message in turn.messages]


def test_prompts_of_the_scenarios() -> None:
    first = {name: [conversation[0] for conversation in scenarios.build(name, seed=1).conversations] for name in scenarios.NAMES}
    assert all(words(turn) == [128] for turn in first["single"])
    lengths = [words(turn)[0] for turn in first["burst"]]
    assert min(lengths) >= 16 and max(lengths) <= 320 and len(set(lengths)) > 10
    assert all(words(turn) == [900, 12] for turn in first["shared"]) and len({turn.messages[0]["content"] for turn in first["shared"]}) == 1
    assert sorted((turn.kind, *words(turn)) for turn in first["mixed"]) == [("long", 2000)] * 4 + [("short", 24)] * 40
    assert len({turn.messages[-1]["content"] for name in scenarios.NAMES for turn in first[name]}) == sum(map(len, first.values()))
    assert all(len(conversation) == 6 for conversation in scenarios.build("turns", seed=1).conversations)


# ----------------------------------------------------------------------------------------------------------------- clients


def test_every_request_is_asked_once_and_counted() -> None:
    scenario = Scenario("two kinds", 3, tuple((Turn("x" if n % 2 else "y", (user(f"question {n}"),), 2),) for n in range(7)))
    seen: list[tuple[int, int]] = []
    with engine() as made:
        figures = clients.run(made, scenario, lambda done, total: seen.append((done, total)))
        assert made.counters.submitted == 7 + 1          # and the warm-up
    assert (figures.requests, figures.failed, figures.output_tokens, figures.clients) == (7, 0, 14, 3)
    assert {kind: found.requests for kind, found in figures.kinds.items()} == {"x": 3, "y": 4}
    assert seen == [(done, 7) for done in range(8)]
    for found in figures.kinds.values():
        assert found.output_tokens_mean == 2 and found.prompt_tokens_mean > len("question 1")
        assert found.ttft_ms.p50 <= found.ttft_ms.p90 <= found.ttft_ms.p99 <= found.latency_ms.p99
    assert figures.output_tokens_per_second == pytest.approx(14 / figures.wall_s)


def test_no_more_clients_than_asked_are_inside() -> None:
    most = 0

    def watch(plan) -> None:
        nonlocal most
        most = max(most, len(plan.chunks))

    scenario = Scenario("crowd", 3, tuple((Turn("x", (user(f"question {n}"),), 3),) for n in range(12)))
    with engine(before_forward=watch) as made:
        clients.run(made, scenario)
    assert 1 <= most <= 3


def test_turns_resend_the_conversation_and_find_it_cached() -> None:
    scenario = Scenario("turns", 1, ((Turn("turns", (user("first"),), 8), Turn("turns", (user("second"),), 8)),))
    with engine() as made:
        figures = clients.run(made, scenario)
        prompt = made.count_tokens([user("first"), {"role": "assistant", "content": "abc"}, user("second")])
        alone = made.count_tokens([user("first")])
    found = figures.kinds["turns"]
    assert found.prompt_tokens_mean == (alone + prompt) / 2
    assert found.cached_tokens_mean > alone / 2          # the second request's prompt is the first's, its answer, and little more


def test_failures_are_counted_and_end_a_conversation() -> None:
    long = user("much too long " * 40)
    scenario = Scenario("some fail", 2, (
        (Turn("good", (user("hi"),), 2),), (Turn("bad", (long,), 2), Turn("bad", (user("never asked"),), 2)), (Turn("good", (user("ho"),), 2),),
    ))
    with engine(n_ctx=200) as made:
        figures = clients.run(made, scenario)
    assert (figures.requests, figures.failed, list(figures.kinds)) == (3, 1, ["good"])
    assert sum(figures.errors.values()) == 1 and "200" in next(iter(figures.errors)) and figures.output_tokens == 4


def test_a_scenario_in_which_all_fail_has_no_latencies() -> None:
    with engine(n_ctx=64) as made:
        figures = clients.run(made, Scenario("none", 1, ((Turn("x", (user("long " * 100),), 2),),)))
    assert (figures.failed, figures.kinds, figures.output_tokens_per_second) == (1, {}, 0)


# ------------------------------------------------------------------------------------------------------------------ figures


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_percentiles_are_measured_values_and_ranks(values: list[float]) -> None:
    spread = Spread.of(values)
    for share, value in ((0.5, spread.p50), (0.9, spread.p90), (0.99, spread.p99)):
        assert value in values
        assert sum(each <= value for each in values) >= share * len(values) - 1e-9
        assert sum(each < value for each in values) < share * len(values) + 1e-9


def test_percentiles_by_hand() -> None:
    assert Spread.of([]) is None
    assert Spread.of([3.0]) == Spread(3, 3, 3)
    assert Spread.of([float(n) for n in range(100, 0, -1)]) == Spread(50, 90, 99)


def test_mean_and_deviation_are_those_of_samples() -> None:
    assert Rate.of("pp512", [100.0, 110.0, 120.0]) == Rate("pp512", 110.0, 10.0, (100.0, 110.0, 120.0))
    assert Rate.of("tg128", [7.0]).sd == 0


def test_a_decode_rate_counts_only_while_all_decode() -> None:
    # Two that run side by side from second 1 to 3, ten tokens each.
    assert throughput.shared_decode_rate([(1.0, 3.0), (1.0, 3.0)], 10) == pytest.approx(10)
    # One after the other: only the last one runs when all have begun.
    assert throughput.shared_decode_rate([(0.0, 1.0), (1.0, 2.0), (2.0, 4.0)], 10) == pytest.approx(5)
    # The first began a second early: its ten tokens in four seconds count for three of them.
    assert throughput.shared_decode_rate([(0.0, 4.0), (1.0, 4.0)], 12) == pytest.approx((9 + 12) / 3)


def round_of(rate: float, ttft: Spread | None, failed: int = 0) -> ScenarioFigures:
    spread = Spread(1.0, 2.0, 3.0)
    kinds = {"x": KindFigures(4, ttft, spread, spread, 10.0, rate, 5.0)}
    return ScenarioFigures("s", 1, 4, failed, {"broken": failed} if failed else {}, 2.0, 20, rate, kinds, (rate,))


def test_rounds_become_medians_and_failures_add_up() -> None:
    folded = clients.median_of([round_of(1.0, Spread(1, 1, 1), 1), round_of(9.0, Spread(5, 7, 9)), round_of(2.0, Spread(3, 3, 30), 2)])
    assert folded.output_tokens_per_second == 2 and folded.samples == (1, 9, 2)
    assert folded.failed == 3 and folded.errors == {"broken": 3} and folded.requests == 4
    assert folded.kinds["x"].ttft_ms == Spread(3, 3, 9) and folded.kinds["x"].cached_tokens_mean == 2
    assert clients.median_of([round_of(1.0, None), round_of(2.0, None)]).kinds["x"].ttft_ms is None
    batches = [Batched(4, 128, 64, t_pp=n, s_pp=n, t_tg=n, s_tg=n, s=n) for n in (1.0, 5.0, 2.0)]
    assert throughput.median_batched(batches) == Batched(4, 128, 64, 2.0, 2.0, 2.0, 2.0, 2.0)


# ------------------------------------------------------------------------------------------------------------------ kernels


def test_throughput_reads_fresh_prompts_and_generates_as_much_as_it_says() -> None:
    with engine(script=lambda tokens: 97, n_ctx=512) as made:
        backend = made._core.backend
        rng = random.Random(1)
        assert throughput.prompt_rate(made, rng, 100) > 0 and throughput.prompt_rate(made, rng, 100) > 0
        assert backend.tokens_computed == 200            # nothing was reused
        assert throughput.decode_rate(made, rng, 50) > 0
        assert backend.tokens_computed == 200 + 1 + 50
        found = throughput.batched(made, rng, 4, 20, 10)
        assert backend.tokens_computed == 251 + 4 * 20 + 4 * 11      # prompts once, then their last token and ten more
    assert found.s_pp == pytest.approx(80 / found.t_pp) and found.s_tg == pytest.approx(40 / found.t_tg) and found.s == pytest.approx(120 / (found.t_pp + found.t_tg))


@pytest.mark.parametrize(("changes", "named"), [
    ({"n_prompt": (512, 4096)}, "pp4096"), ({"n_gen": (4096,)}, "tg4096"), ({"parallel": (1, 17)}, "-npl 17"),
    ({"batched_prompt": 1000}, "-npp 1000"), ({"parallel": (16,), "batched_prompt": 900}, "KV cache"),
])
def test_what_does_not_fit_is_refused_before_anything_runs(changes, named) -> None:
    with engine(n_ctx=1024) as made:
        made.info = made.info.__class__(**{**vars(made.info), "kv_cells": 2048})
        with pytest.raises(BadRequest, match=named):
            Session(made, Settings(**{"n_gen": (), "parallel": (), **({"parallel": (1,)} if "batched_prompt" in changes else {}), **changes}))
        assert made.counters.submitted == 0


# ------------------------------------------------------------------------------------------------------------------ session


def test_a_session_measures_what_was_asked_and_nothing_else() -> None:
    stages: list[str] = []
    asked = Settings(n_prompt=(32,), n_gen=(), repetitions=3, parallel=(2,), batched_prompt=8, batched_gen=4, scenarios=("turns",), rounds=2, quick=True)
    with engine(script=lambda tokens: 97) as made:
        session = Session(made, asked, progress=lambda what, done, total: stages.append(what))
        session.run()
        report = session.report()
    assert [(rate.name, len(rate.samples)) for rate in report.rates] == [("pp32", 3)]
    assert [(each.sequences, each.n_prompt, each.n_gen) for each in report.batched] == [(2, 8, 4)]
    assert [(each.name, each.requests, len(each.samples)) for each in report.scenarios] == [("turns", 6, 2)]
    assert report.profile == () and not report.interrupted and report.settings == asked
    assert list(dict.fromkeys(stages)) == ["pp32", "batched, round 1", "turns, round 1", "batched, round 2", "turns, round 2"]
    assert report.model.kv_bytes_per_token == 1 and report.model.max_seqs == 16 and report.machine.cores >= 1


@pytest.mark.parametrize("when", ["pp32", "tg8", "single", "burst"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_finished(when, how, caplog) -> None:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)               # as the command line does
    try:
        _interrupted(when, how)
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
    gc.collect()
    assert caplog.records == []                          # asyncio has nothing to complain about


def _interrupted(when: str, how: signal.Signals) -> None:
    def progress(what: str, done: int, total: int) -> None:
        if what == when and done == 1:
            signal.raise_signal(how)

    with engine(script=lambda tokens: 97) as made:
        session = Session(made, Settings(n_prompt=(32,), n_gen=(8,), repetitions=2, parallel=(), scenarios=("single", "burst"), quick=True), progress=progress)
        session.run()
        report = session.report()
        assert made.chat([user("still there?")], max_tokens=2).text() == "aa"
    assert report.interrupted
    finished = [rate.name for rate in report.rates if len(rate.samples) == 2] + [each.name for each in report.scenarios]
    assert finished == ["pp32", "tg8", "single", "burst"][: ["pp32", "tg8", "single", "burst"].index(when)]


# ------------------------------------------------------------------------------------------------------------------ profile


@pytest.mark.parametrize("sequences", [1, 4])
def test_the_profile_divides_a_step_without_rest(sequences) -> None:
    with engine(script=lambda tokens: 97, n_ctx=1024) as made:
        found = profile.profile(made, random.Random(1), sequences, 200, words=4)
        core = made._core
        assert not {"step", "submit"} & set(vars(core)) and "forward" not in vars(core.backend) and "schedule" not in vars(core.scheduler)
        assert made.chat([user("hi")], max_tokens=1).text() == "a"
    assert found.sequences == sequences and 0 < found.steps < 200
    assert tuple(found.python_ms) == profile.PARTS and all(value >= 0 for value in found.python_ms.values())
    assert found.native_ms + sum(found.python_ms.values()) == pytest.approx(found.step_ms)
    assert found.python_percent == pytest.approx(100 * (1 - found.native_ms / found.step_ms))
    assert 0 < found.python_percent_p50 < 100
    assert found.python_ms["sample"] > 0 and found.python_ms["batch"] == 0           # the scripted backend is all "native"


def test_the_clock_counts_only_steady_steps_and_exclusive_time() -> None:
    clock = profile.StepClock(2)
    with pytest.raises(BackendFailed, match="2 sequences"):
        clock.profile()

    class Plan:
        decodes, prefills = (1, 2), ()

    inner = clock.timed("native", lambda: sum(range(20_000)))
    forward = clock.forward(lambda plan: inner(), "batch")
    step = clock.step(lambda: forward(Plan))
    step()
    assert clock.steps == 0                              # nothing is known of the time before it
    step()
    Plan.prefills = (3,)
    step()
    Plan.prefills = ()
    step()                                               # the one before it was not steady: its gap is no decode gap
    assert clock.steps == 1
    found = clock.profile()
    assert found.native_ms > found.python_ms["batch"] > 0 and found.step_ms == pytest.approx(1e3 * clock.total)
    assert found.python_percent_p50 == pytest.approx(found.python_percent)           # there is one step
