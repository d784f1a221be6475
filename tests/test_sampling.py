"""Sampling against a slow reference that sorts everything, over random rows with ties, masks and tiny vocabularies."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from edgeinfer.errors import BackendFailed, BadRequest
from edgeinfer.runtime.sampling import RecentTokens, Sampler, argmax, draw, keep_largest, nucleus_size, penalise, survivors, top_k
from edgeinfer.runtime.values import SamplingParams

# ---------------------------------------------------------------------------------------------------------------- reference


def ranked(row: np.ndarray) -> list[int]:
    return sorted((i for i in range(len(row)) if row[i] > -np.inf), key=lambda i: (-row[i], i))


def reference(row: np.ndarray, params: SamplingParams) -> tuple[list[int], bool]:
    """Ids that survive, by full sort in plain Python; and whether a cut lies so near a rounding error that float32 may differ."""
    ids, near = ranked(row), False
    if params.top_k > 0:
        ids = ids[: params.top_k]
    top = float(row[ids[0]])
    if params.top_p < 1:
        weights = [math.exp(float(row[i]) - top) for i in ids]
        total, reached = math.fsum(weights), 0.0
        for count, weight in enumerate(weights, 1):
            reached += weight
            near |= abs(reached - params.top_p * total) < 1e-5 * total
            if reached >= params.top_p * total:
                ids = ids[:count]
                break
    if params.min_p > 0:
        floor = top + math.log(params.min_p)
        near |= any(abs(float(row[i]) - floor) < 1e-4 for i in ids)
        ids = [i for i in ids if row[i] >= floor]
    return sorted(ids), near


@st.composite
def rows(draw_):
    """Rows of 1 to 3,000 logits: smooth, peaked, flat, coarse (many ties), partly masked."""
    n = draw_(st.one_of(st.integers(1, 12), st.sampled_from([63, 64, 65, 500, 1024, 3000])))
    rng = np.random.default_rng(draw_(st.integers(0, 2**32 - 1)))
    row = (rng.standard_normal(n) * draw_(st.sampled_from([0.0, 0.3, 3.0, 30.0]))).astype(np.float32)
    if draw_(st.booleans()):
        row = np.round(row)
    row += np.float32(draw_(st.sampled_from([0.0, -40.0, 1000.0])))
    if draw_(st.booleans()):
        row[rng.random(n) < draw_(st.sampled_from([0.1, 0.9]))] = -np.inf
        if not np.isfinite(row).any():
            row[rng.integers(n)] = 0
    return row


chain = st.builds(
    SamplingParams,
    top_k=st.sampled_from([0, 1, 2, 5, 40, 700, 10_000]),
    top_p=st.sampled_from([1.0, 0.99, 0.95, 0.5, 0.01, 1e-9]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0, 1e-6]),
)


@settings(max_examples=400, deadline=None)
@given(rows(), chain)
def test_survivors_equal_a_full_sort(row, params):
    expected, near = reference(row, params)
    before = row.copy()
    found = survivors(row, params, float(row.max())).tolist()
    if near:
        # Only the members of a boundary that float32 cannot resolve may differ, and the likeliest token is never one of them.
        assert ranked(row)[0] in found
        strict = {round(float(row[i]), 3) for i in set(found) ^ set(expected)}
        assert len(strict) <= 2
    else:
        assert found == expected
    assert np.array_equal(row, before)


@settings(max_examples=200, deadline=None)
@given(rows(), st.integers(1, 5000))
def test_top_k_is_exact_with_ties_going_to_the_lower_id(row, k):
    assert top_k(row, k).tolist() == sorted(ranked(row)[:k])


@given(rows(), st.integers(1, 100))
def test_keep_largest(row, count):
    ids = np.arange(len(row))[::2]
    expected = sorted(sorted(ids.tolist(), key=lambda i: (-row[i], i))[:count])
    assert keep_largest(row, ids, count).tolist() == expected


def test_large_vocabulary():
    rng = np.random.default_rng(3)
    row = (rng.standard_normal(262_144) * 2.5).astype(np.float32)
    order = np.argsort(-row, kind="stable")
    for params in (SamplingParams(), SamplingParams(top_k=0, min_p=0, top_p=0.6), SamplingParams(top_k=50_000, top_p=1, min_p=0)):
        found = survivors(row, params, float(row.max()))
        assert np.array_equal(np.sort(order[: len(found)]), found)
    assert len(survivors(row, SamplingParams(top_k=50_000, top_p=1, min_p=0), float(row.max()))) == 50_000


def test_top_p_runs_on_what_top_k_left():
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    # Over all four 0.55 needs two tokens; after top-k 2 the first alone holds 0.57.
    assert survivors(row, SamplingParams(top_k=0, top_p=0.55, min_p=0), float(row.max())).tolist() == [0, 1]
    assert survivors(row, SamplingParams(top_k=2, top_p=0.55, min_p=0), float(row.max())).tolist() == [0]


def test_filters_ignore_temperature():
    """Temperature comes last: it changes the odds among the survivors, not who survives."""
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    params = SamplingParams(top_k=0, top_p=0.75, min_p=0, temperature=50, seed=1)
    sampler = Sampler(params, n_vocab=4)
    assert {sampler.sample(row) for _ in range(300)} == {0, 1}


# --------------------------------------------------------------------------------------------------------------------- draw


def test_draw_follows_the_softmax():
    probabilities = np.array([0.5, 0.25, 0.125, 0.125])
    logits = np.log(probabilities).astype(np.float32)
    for temperature in (0.5, 1.0, 2.0):
        expected = probabilities ** (1 / temperature)
        edges = np.concatenate([[0], np.cumsum(expected / expected.sum())])
        for index in range(4):
            for share in (0.001, 0.5, 0.999):
                uniform = edges[index] + share * (edges[index + 1] - edges[index])
                assert draw(logits, temperature, float(logits.max()), float(uniform)) == index


def test_sampled_frequencies():
    row = np.log(np.array([0.6, 0.3, 0.1], np.float32))
    sampler = Sampler(SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0, seed=11), n_vocab=3)
    counts = np.bincount([sampler.sample(row) for _ in range(20_000)], minlength=3) / 20_000
    assert np.abs(counts - [0.6, 0.3, 0.1]).max() < 0.015           # four standard deviations


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_a_tiny_temperature_is_greedy(temperature):
    row = np.array([1.0, 3.0, 2.9, -np.inf], np.float32)
    sampler = Sampler(SamplingParams(temperature=temperature, seed=1), n_vocab=4)
    assert {sampler.sample(row) for _ in range(50)} == {1}


def test_greedy_takes_the_first_of_equal_logits_and_uses_no_randomness():
    row = np.array([0, 7, 7, -np.inf], np.float32)
    assert argmax(row) == 1
    sampler = Sampler(SamplingParams(temperature=0, seed=5), n_vocab=4)
    assert [sampler.sample(row) for _ in range(3)] == [1, 1, 1]


def test_a_high_temperature_has_an_effect():
    # case 85: reports of a huge temperature that changed nothing
    row = np.array([8.0, 5.5, 5.4, 5.3], np.float32)
    sampler = Sampler(SamplingParams(temperature=100, top_k=0, top_p=1, min_p=0, seed=2), n_vocab=4)
    assert np.bincount([sampler.sample(row) for _ in range(2000)], minlength=4).min() > 400


# --------------------------------------------------------------------------------------------------------------------- seed


def _tokens(seed: int | None, count: int = 40) -> list[int]:
    rng = np.random.default_rng(0)
    sampler = Sampler(SamplingParams(temperature=1, seed=seed), n_vocab=500)
    return [sampler.sample(rng.standard_normal(500).astype(np.float32)) for _ in range(count)]


def test_a_seed_repeats_whatever_else_is_sampled():
    # case 84: fixed seed repeats exactly, also in a batch, per request
    alone = _tokens(7)
    rng = np.random.default_rng(0)
    mine, other = Sampler(SamplingParams(temperature=1, seed=7), n_vocab=500), Sampler(SamplingParams(temperature=1, seed=8), n_vocab=500)
    together = []
    for _ in range(40):
        row = rng.standard_normal(500).astype(np.float32)
        other.sample(row)
        together.append(mine.sample(row))
        np.random.random()
    assert alone == together
    assert alone != _tokens(8)


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**64])
def test_every_given_seed_is_used_as_it_is(seed):
    # case 84 (+ #386): 0 is a seed like any other
    assert Sampler(SamplingParams(seed=seed), n_vocab=4).seed == seed
    assert _tokens(seed) == _tokens(seed)


@pytest.mark.parametrize("seed", [None, -1])
def test_no_seed_draws_one_and_reports_it(seed):
    # case 84: unset and -1 differ from run to run, and the seed that was used repeats the run
    samplers = [Sampler(SamplingParams(temperature=1, seed=seed), n_vocab=500) for _ in range(8)]
    assert len({sampler.seed for sampler in samplers}) == 8
    rows_ = [np.random.default_rng(i).standard_normal(500).astype(np.float32) for i in range(20)]
    texts = [[sampler.sample(row) for row in rows_] for sampler in samplers]
    assert len({tuple(text) for text in texts}) == 8
    again = Sampler(SamplingParams(temperature=1, seed=samplers[0].seed), n_vocab=500)
    assert [again.sample(row) for row in rows_] == texts[0]


def test_fresh_processes_draw_different_seeds():
    # case 84: "fresh process twice"
    code = "from edgeinfer.runtime.sampling import *; print(Sampler(SamplingParams(), n_vocab=4).seed)"
    seeds = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert len(seeds) == 2


# ---------------------------------------------------------------------------------------------------------- penalties, bias


def test_penalties_by_hand():
    params = SamplingParams(repeat_penalty=2, presence_penalty=0.5, frequency_penalty=0.25)
    assert penalise(np.array([4.0, -4.0]), np.array([1, 3]), params).tolist() == [4 / 2 - 0.25 - 0.5, -4 * 2 - 0.75 - 0.5]


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=60), st.lists(st.integers(0, 9), max_size=60), st.sampled_from([None, 0, 1, 3, 16]))
def test_recent_tokens_count_the_window(prompt, answer, window):
    recent = RecentTokens(window, prompt)
    for token in answer:
        recent.add(token)
    everything = prompt + answer
    last = everything if window is None else everything[max(0, len(everything) - window):]
    assert dict(zip(recent.ids.tolist(), recent.counts.tolist())) == {token: last.count(token) for token in set(last)}


def test_recent_tokens_grow_beyond_their_first_room():
    recent = RecentTokens(None, range(1000))
    recent.add(999)
    assert len(recent.ids) == 1000 and recent.counts.sum() == 1001


def test_penalties_reach_back_over_the_prompt_and_forget():
    row = np.array([2.0, 1.9, 0.0], np.float32)
    sampler = Sampler(SamplingParams(temperature=0, repeat_penalty=1.5, repeat_last_n=2), n_vocab=3, prompt=[0])
    assert sampler.sample(row) == 1
    sampler.accept(1)
    assert sampler.sample(row) == 0                     # both are penalised now
    sampler.accept(2)                                   # 0 falls out of the window
    assert sampler.sample(row) == 0
    sampler.accept(0)
    assert sampler.sample(row) == 1


def test_penalties_and_bias_leave_the_row_alone_and_apply_once():
    row = np.array([2.0, 1.0, -1.0, 0.5], np.float32)
    row.flags.writeable = False
    sampler = Sampler(SamplingParams(temperature=0, presence_penalty=1.5, logit_bias={2: 5.0, 0: -math.inf}), n_vocab=4, prompt=[2, 2])
    assert [sampler.sample(row) for _ in range(4)] == [2] * 4           # -1 + 5 - 1.5 = 2.5, each time
    assert row.tolist() == [2.0, 1.0, -1.0, 0.5]


def test_bias_bans():
    row = np.zeros(5, np.float32)
    sampler = Sampler(SamplingParams(temperature=1, seed=1, logit_bias={0: -math.inf, 3: -math.inf}), n_vocab=5)
    assert {sampler.sample(row) for _ in range(200)} == {1, 2, 4}
    everything = Sampler(SamplingParams(logit_bias={i: -math.inf for i in range(5)}), n_vocab=5)
    with pytest.raises(BackendFailed, match="masked"):
        everything.sample(row)


@pytest.mark.parametrize("bias", [{5: 1.0}, {-1: 1.0}, {True: 1.0}, {"1": 1.0}, {1: math.nan}, {1: math.inf}, {1: 1e39}, {1: "2"}])
def test_bias_that_cannot_be_applied_is_refused(bias):
    # case 85: NaN and infinity do not slip through a range check
    with pytest.raises(BadRequest, match="logit_bias"):
        Sampler(SamplingParams(logit_bias=bias), n_vocab=5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 999_999}, {"temperature": -1}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_p": -1}, {"top_p": 0},
        {"top_p": math.nan},
        {"top_p": 1.5}, {"min_p": -0.1}, {"min_p": math.nan}, {"repeat_penalty": 0}, {"repeat_penalty": math.inf}, {"top_k": -1}, {"top_k": 2.5},
        {"presence_penalty": math.nan}, {"frequency_penalty": math.inf}, {"temperature": "1"}, {"temperature": True}, {"repeat_last_n": -2},
        {"seed": 1.5},
    ],
)
def test_parameters_out_of_range_are_refused_by_name(wrong):
    # case 85
    with pytest.raises(BadRequest, match=next(iter(wrong))):
        SamplingParams(**wrong)


@pytest.mark.parametrize("penalty", [1e-30, 1e-300, 100.0])
def test_extreme_penalties_stay_finite(penalty):
    row = np.array([20.0, -20.0, 1.0, -np.inf], np.float32)
    sampler = Sampler(SamplingParams(temperature=0, repeat_penalty=penalty), n_vocab=4, prompt=[0, 1, 3])
    assert sampler.sample(row) == (0 if penalty < 1 else 2)


# -------------------------------------------------------------------------------------------------------- logits not numbers

ALL_WAYS = [
    SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=0), SamplingParams(top_k=0, top_p=1, min_p=0),
    SamplingParams(temperature=0, repeat_penalty=1.2), SamplingParams(repeat_penalty=1.2, logit_bias={0: -1.0}), SamplingParams(top_k=0, min_p=0),
]


@pytest.mark.parametrize("params", ALL_WAYS)
@pytest.mark.parametrize("fault", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 1, 777, 4095, 4099])
def test_nan_and_infinity_anywhere_end_the_request(params, fault, at):
    # case 27: all logits NaN streamed token 0 at full speed
    row = np.random.default_rng(1).standard_normal(4100).astype(np.float32)
    row[2] = 90
    row[at] = fault
    with pytest.raises(BackendFailed, match=rf"token {at}\)"):
        Sampler(params, n_vocab=4100, prompt=[0, 5, 777]).sample(row)


@pytest.mark.parametrize("params", ALL_WAYS)
def test_all_nan(params):
    with pytest.raises(BackendFailed, match="nan"):
        Sampler(params, n_vocab=100).sample(np.full(100, np.nan, np.float32))


def test_nucleus_size_by_hand():
    logits = np.log(np.array([0.25, 0.5, 0.25], np.float32))
    top = float(logits.max())
    assert [nucleus_size(logits, p, top, 2.0) for p in (0.1, 0.5, 0.51, 0.75, 0.76, 0.999)] == [1, 1, 2, 2, 3, 3]
