"""Drafting goes on where it pays and stops where it does not, by what steps were measured to cost."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from drafting import Eager, Text

from edgeinfer.runtime.prompt_lookup import PromptLookup
from edgeinfer.runtime.speculative import Draft, Speculator
from edgeinfer.runtime.step_cost import StepCost, typical


def test_measured_row_counts_are_themselves_and_others_lie_between() -> None:
    costs = StepCost()
    assert not costs.known and costs.seconds(4) == 0
    for _ in range(60):
        for rows, seconds in ((1, 0.010), (4, 0.012), (16, 0.020)):
            costs.add(rows, seconds)
    assert [costs.seconds(rows) for rows in (1, 4, 16)] == pytest.approx([0.010, 0.012, 0.020], rel=0.03)
    assert costs.seconds(1) < costs.seconds(2) * 1.05
    assert costs.seconds(4) < costs.seconds(8) < costs.seconds(16) < costs.seconds(32)


def test_one_measurement_scales_the_typical_curve() -> None:
    costs = StepCost()
    costs.add(2, 3 * typical(2))
    assert [costs.seconds(rows) for rows in (1, 2, 9, 40)] == pytest.approx([3 * typical(rows) for rows in (1, 2, 9, 40)])


def test_a_pause_of_the_process_does_not_make_rows_dear() -> None:
    costs = StepCost()
    for _ in range(20):
        costs.add(1, 1.0)
    costs.add(8, 100.0)
    assert costs.seconds(8) < 1.7 * typical(8)
    costs.add(1, 50.0)
    assert costs.seconds(1) < 1.2


def test_a_slower_machine_is_slower_for_all_row_counts() -> None:
    costs = StepCost()
    for _ in range(30):
        costs.add(1, 1.0)
        costs.add(4, 2.0)
    for _ in range(100):
        costs.add(1, 2.0)
    assert costs.seconds(1) == pytest.approx(2.0, rel=0.05)
    assert 2.5 < costs.seconds(4) < 4.1


def test_what_was_not_seen_for_long_is_forgotten() -> None:
    costs = StepCost()
    costs.add(1, 1.0)
    for _ in range(20):
        costs.add(16, 100.0)
    for _ in range(3000):
        costs.add(1, 1.0)
    assert costs.seconds(16) == pytest.approx(typical(16), rel=0.01)


@pytest.mark.parametrize(("rows", "seconds"), [(0, 1.0), (1, 0.0), (1, -1.0), (1, float("nan"))])
def test_measurements_that_are_none_are_ignored(rows: int, seconds: float) -> None:
    costs = StepCost()
    costs.add(rows, seconds)
    assert not costs.known


# -------------------------------------------------------------------------------------------------------------- control


def flat(rows: int) -> float:
    return 1.0 + 0.01 * rows


def linear(rows: int) -> float:
    return float(rows)


def two_cores(rows: int) -> float:
    return typical(rows)


def answer(
    speculator: Speculator, prompt: list[int], said: list[int], cost: Callable[[int], float],
    *, others: int = 0, noise=None, text: Text | None = None,
) -> float:
    """Let the engine say ``said`` after ``prompt``; returns the seconds it took, of forwards that take what ``cost`` says."""
    text = text or Text(prompt)
    end = len(text.tokens) + len(said)
    whole = text.tokens + said
    took = 0.0
    while len(text.tokens) < end:
        text.limit = end - len(text.tokens) - 1
        speculator.propose([text], 64, n_ctx=1 << 30, others=others)
        assert len(text.draft) <= text.limit or not text.draft
        right = 0
        while right < len(text.draft) and text.draft[right] == whole[len(text.tokens) + right]:
            right += 1
        seconds = cost(1 + others + len(text.draft))
        speculator.measured(1 + others + len(text.draft), seconds * (noise() if noise else 1.0))
        speculator.settle(text, len(text.draft), right)
        text.tokens += whole[len(text.tokens) : len(text.tokens) + right + 1]
        took += seconds
    speculator.forget(text)
    return took


def prose(seed: int, length: int) -> list[int]:
    """Text whose short n-grams return all the time and go on differently: the worst there is for lookups."""
    chance = random.Random(seed)
    follow = {word: chance.sample(range(60), 3) for word in range(60)}
    text = [0]
    while len(text) < length:
        text.append(chance.choices(follow[text[-1]], (5, 3, 2))[0])
    return text


@pytest.mark.parametrize(("cost", "faster"), [(flat, 9.0), (two_cores, 1.9)])
def test_quoting_is_faster(cost, faster: float) -> None:
    quoted = random.Random(1).sample(range(10_000), 300)
    assert len(quoted) * cost(1) / answer(Speculator(PromptLookup()), [*quoted, 1, 2, *quoted[:2]], quoted[2:], cost) > faster


@pytest.mark.parametrize("cost", [flat, two_cores, linear])
@pytest.mark.parametrize("length", [150, 1500])
def test_text_that_cannot_be_guessed_is_not_slowed(cost, length: int) -> None:
    speculator = Speculator(PromptLookup())
    plain = took = 0.0
    for seed in range(6):
        text = prose(seed, 200 + length)
        took += answer(speculator, text[:200], text[200:], cost)
        plain += length * cost(1)
    assert plain / took > 0.98
    assert speculator.stats().steps > 0


@pytest.mark.parametrize("seed", range(5))
def test_noise_in_the_measurements_does_not_change_that(seed: int) -> None:
    jitter = random.Random(seed)
    speculator = Speculator(PromptLookup())
    plain = took = 0.0
    for which in range(4):
        text = prose(100 * seed + which, 600)
        took += answer(speculator, text[:200], text[200:], two_cores, noise=lambda: jitter.choices((jitter.uniform(0.8, 1.3), 5.0), (50, 1))[0])
        plain += 400 * two_cores(1)
    assert plain / took > 0.98


class Deceiver:
    """Is certain each time for a new reason, and always wrong."""

    costly = False
    chance = 0.99

    def __init__(self) -> None:
        self.kind = 0

    def draft(self, sequences, limits):
        self.kind += 1
        return [Draft([-1] * limit, self.kind, 0.99) for limit in limits]

    def seconds(self, width: int) -> float:
        return 0.0

    def forget(self, seq) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("cost", [flat, two_cores, lambda rows: 1 + 3.0 * (rows - 1)])
def test_even_a_drafter_that_is_certain_and_wrong_costs_little(cost) -> None:
    speculator = Speculator(Deceiver())
    took = answer(speculator, [0], list(range(2000)), cost)
    assert 2000 * cost(1) < took < (2000 * 1.01 + 2) * cost(1)
    assert speculator.stats().accepted == 0


def test_what_hardly_gains_is_left() -> None:
    def drafted(gain: float) -> int:
        text, speculator = Text([0]), Speculator(Eager(lambda tokens: [1]), max_draft=1)
        for _ in range(50):
            speculator.measured(1, 1.0)
            speculator.measured(2, 1.99 / gain)
        speculator.propose([text], 8, n_ctx=100)
        return len(text.draft)

    assert [drafted(gain) for gain in (0.95, 1.03, 1.07, 1.5)] == [0, 0, 1, 1]


def test_rows_that_cost_as_much_as_tokens_are_not_drafted() -> None:
    speculator = Speculator(PromptLookup())
    quoted = random.Random(1).sample(range(10_000), 400)
    took = answer(speculator, [*quoted, *quoted[:2]], quoted[2:], linear)
    assert took < 398 * 1.01
    assert speculator.stats().drafted < 40


def test_a_text_that_begins_to_quote_late_is_found_out() -> None:
    speculator = Speculator(PromptLookup())
    source = random.Random(2).sample(range(1000, 10_000), 400)
    text = Text([*source, *prose(3, 200)])
    answer(speculator, [], prose(3, 1000)[200:], two_cores, text=text)
    took = answer(speculator, [], source, two_cores, text=text)
    assert 400 / took > 1.2


def test_after_a_mistake_in_a_quotation_the_drafts_come_back() -> None:
    speculator = Speculator(PromptLookup())
    source = random.Random(4).sample(range(1000, 10_000), 400)
    edited = [word if at % 20 else 5 for at, word in enumerate(source)]
    took = answer(speculator, [*source, 1], edited, two_cores)
    assert 400 / took > 1.4
    stats = speculator.stats()
    assert stats.accept_rate > 0.7
    assert stats.drafted >= stats.accepted > 200 and stats.drafts < stats.steps


def test_a_full_batch_is_left_alone_where_rows_cost() -> None:
    quoted = random.Random(1).sample(range(10_000), 300)
    busy = Speculator(PromptLookup())
    answer(busy, [*quoted, *quoted[:2]], quoted[2:], linear, others=15)
    alone = Speculator(PromptLookup())
    answer(alone, [*quoted, *quoted[:2]], quoted[2:], two_cores)
    assert busy.stats().drafted < 0.1 * alone.stats().drafted


def test_the_room_of_a_step_goes_to_the_likeliest() -> None:
    speculator = Speculator(PromptLookup())
    speculator.measured(1, 1.0)
    for rows in range(2, 30):
        speculator.measured(rows, 1.0)
    words = list(range(100, 130))
    sure, unsure, new = Text([*words, 1, *words[:20]]), Text([*words, 1, *words[:3]]), Text(words)
    speculator.propose([unsure, sure, new], 6, n_ctx=1000)
    assert sure.draft == words[20:][: len(sure.draft)] and unsure.draft == words[3:][: len(unsure.draft)] and new.draft == []
    assert len(sure.draft) + len(unsure.draft) == 6
    assert len(sure.draft) > len(unsure.draft)
    speculator.propose([unsure, sure, new], 0, n_ctx=1000)
    assert unsure.draft == sure.draft == []


def test_no_draft_beyond_what_the_answer_may_use() -> None:
    speculator = Speculator(PromptLookup())
    for rows in range(1, 20):
        speculator.measured(rows, 1.0)
    words = list(range(100, 130))
    for limit in (0, 1, 3):
        text = Text([*words, 1, *words[:20]], limit)
        speculator.propose([text], 64, n_ctx=1000)
        assert len(text.draft) == limit
    text = Text([*words, 1, *words[:20]])
    speculator.propose([text], 64, n_ctx=len(text.tokens) + 2)
    assert len(text.draft) == 2


def test_nothing_is_drafted_before_anything_was_measured() -> None:
    text = Text([1, 2, 3, 4, 1, 2, 3, 4])
    speculator = Speculator(PromptLookup())
    speculator.propose([text], 64, n_ctx=1000)
    assert text.draft == []


def test_the_same_measurements_give_the_same_drafts() -> None:
    def run() -> tuple:
        speculator = Speculator(PromptLookup())
        jitter = random.Random(9)
        text = prose(5, 800)
        return answer(speculator, text[:300], text[300:] + text[:200], two_cores, noise=lambda: jitter.uniform(0.9, 1.2)), speculator.stats()

    assert run() == run()


class Oracle:
    """Drafts what will be said, at a price."""

    costly = True
    chance = 0.8

    def __init__(self, whole: list[int], seconds: float):
        self.whole = whole
        self.price = seconds
        self.asked: list[int] = []
        self.closed = False

    def draft(self, sequences, limits):
        self.asked += limits
        return [Draft(self.whole[len(seq.tokens) : len(seq.tokens) + limit]) for seq, limit in zip(sequences, limits, strict=True)]

    def seconds(self, width: int) -> float:
        return self.price if width else 0.0

    def forget(self, seq) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def test_what_drafting_costs_is_weighed_before_it_is_done() -> None:
    whole = random.Random(1).sample(range(10_000), 400)
    cheap, dear = Oracle(whole, 0.05), Oracle(whole, 0.9)
    answer(Speculator(cheap), whole[:100], whole[100:], two_cores)
    answer(Speculator(dear), whole[:100], whole[100:], two_cores)
    assert sum(cheap.asked) > 150
    assert sum(dear.asked) == 0


def test_closing_frees_the_drafter() -> None:
    oracle = Oracle([], 0.0)
    Speculator(oracle).close()
    assert oracle.closed
