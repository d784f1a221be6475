"""The seam for constraints: any object with the two small interfaces decides what an answer may say, and harms nobody but its own request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from drafting import Eager
from engine_runs import Recorded
from hypothesis import given, strategies as st

from edgeinfer.errors import BackendFailed, BadRequest
from edgeinfer.runtime.backends.fake import END, ScriptedBackend
from edgeinfer.runtime.engine import EngineCore
from edgeinfer.runtime.sampling import Sampler, masked
from edgeinfer.runtime.service import Engine
from edgeinfer.runtime.speculative import Speculator
from edgeinfer.runtime.values import FinishReason, SamplingParams, TextDelta

N_VOCAB = 260


def bits(tokens, n_vocab: int = N_VOCAB) -> np.ndarray:
    wanted = np.zeros(n_vocab, np.uint8)
    wanted[list(tokens)] = 1
    return np.packbits(wanted, bitorder="little")


class Among:
    """Answers must be one of ``texts``: constraint and, made by `start`, state."""

    def __init__(self, *texts: bytes, said: bytes = b""):
        self.texts = texts
        self.said = said

    def start(self) -> Among:
        return Among(*self.texts)

    def allowed(self) -> np.ndarray | None:
        size = len(self.said)
        following = {text[size] for text in self.texts if text.startswith(self.said) and len(text) > size}
        return bits(following | ({END} if self.said in self.texts else set()))

    def accept(self, token: int) -> None:
        self.said += bytes([token])

    @property
    def complete(self) -> bool:
        return self.said in self.texts and not any(text != self.said and text.startswith(self.said) for text in self.texts)


class Broken(Among):
    """One method of it is replaced."""

    def __init__(self, name: str, does: Callable[[Any], Any]):
        super().__init__(b"fine")
        self.made = type("Made", (Among,), {name: property(does) if name == "complete" else does})

    def start(self) -> Among:
        return self.made(b"fine")


def backend(script=(b"f", b"a", b"l", b"s", b"e"), **options) -> ScriptedBackend:
    return ScriptedBackend(script, **options)


# -------------------------------------------------------------------------------------------------------------------- masks


@given(st.integers(1, 300), st.integers(0, 2**32))
def test_a_mask_leaves_what_it_allows_and_nothing_else(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    row = rng.normal(0, 3, size).astype(np.float32)
    wanted = rng.random(size) < rng.random()
    before = row.copy()
    found = masked(row, np.packbits(wanted, bitorder="little"))
    assert np.array_equal(found, np.where(wanted, row, -np.inf)) and np.array_equal(row, before)


@given(st.integers(0, 2**32), st.sampled_from([0, 0.001, 1, 50.0]), st.integers(0, 40), st.floats(0.1, 1), st.floats(0, 0.5))
def test_no_sampling_parameter_brings_back_what_is_masked(seed: int, temperature: float, k: int, p: float, min_p: float) -> None:
    rng = np.random.default_rng(seed)
    row = rng.normal(0, 5, N_VOCAB).astype(np.float32)
    few = set(rng.integers(0, N_VOCAB, 3).tolist())
    params = SamplingParams(
        temperature=temperature, top_k=k, top_p=p, min_p=min_p, seed=seed, repeat_penalty=1.5, presence_penalty=-2.0, logit_bias={5: 1e6, 7: 100.0},
    )
    sampler = Sampler(params, n_vocab=N_VOCAB, prompt=list(range(100)))
    assert {sampler.sample(row, bits(few)) for _ in range(5)} <= few


@given(st.integers(0, 2**32), st.sampled_from([0, 0.7, 1.5]), st.integers(0, 60), st.floats(0.1, 1), st.floats(0, 0.5), st.floats(0.0001, 1))
def test_looking_at_the_few_allowed_tokens_alone_changes_nothing(seed: int, temperature: float, k: int, p: float, min_p: float, share: float) -> None:
    rng = np.random.default_rng(seed)
    row = rng.normal(0, 5, 5000).astype(np.float32)
    wanted = rng.random(5000) < share
    wanted[0] = True
    params = SamplingParams(temperature=temperature, top_k=k, top_p=p, min_p=min_p, seed=seed, frequency_penalty=0.5, logit_bias={5: 3.0})
    one, other = (Sampler(params, n_vocab=5000, prompt=[1, 2, 2]) for _ in range(2))
    mask = np.packbits(wanted, bitorder="little")
    assert [one.sample(row, mask) for _ in range(3)] == [other.sample(masked(row, mask)) for _ in range(3)]


def test_a_mask_hides_no_fault_of_the_model() -> None:
    row = np.zeros(N_VOCAB, np.float32)
    row[3] = np.nan
    with pytest.raises(BackendFailed, match="not finite"):
        Sampler(SamplingParams(temperature=0), n_vocab=N_VOCAB).sample(row, bits({5}))


# ------------------------------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_an_answer_is_one_that_is_allowed(temperature: float) -> None:
    with Engine(backend()) as engine:
        for _ in range(10):
            stream = engine.generate("true or false?", constraint=Among(b"true", b"fully", b"falter"), temperature=temperature, top_k=0, min_p=0)
            assert stream.text() in ("true", "fully", "falter")
            assert stream.finish_reason is FinishReason.STOP
            assert stream.usage.completion_tokens == len(stream.text())      # no end-of-turn token was waited for


def test_the_answer_goes_on_while_more_may_follow_and_ends_where_it_may() -> None:
    with Engine(backend()) as engine:
        assert engine.generate("p", constraint=Among(b"false", b"falsehood"), temperature=0).text() == "false"
        assert engine.generate("p", constraint=Among(b"false", b"falsehood"), temperature=0, ignore_eos=True, logit_bias={END: -1000}).text() == "falsehood"


def test_an_answer_that_is_cut_says_so() -> None:
    with Engine(backend()) as engine:
        stream = engine.generate("p", constraint=Among(b"falsehood"), temperature=0, max_tokens=4)
        assert (stream.text(), stream.finish_reason) == ("fals", FinishReason.LENGTH)
        whole = engine.generate("p", constraint=Among(b"fals"), temperature=0, max_tokens=4)
        assert (whole.text(), whole.finish_reason) == ("fals", FinishReason.STOP)


def test_what_was_held_back_is_delivered_when_the_value_is_complete() -> None:
    with Engine(backend()) as engine:
        stream = engine.generate("p", constraint=Among(b"false"), temperature=0, stop="selfish", logprobs=0)
        events = [event for event in stream.events() if isinstance(event, TextDelta)]
        assert "".join(event.text for event in events) == "false" == stream.text()
        assert sum(len(event.logprobs) for event in events) == 5
        cut = engine.generate("p", constraint=Among(b"false"), temperature=0, stop="ls")
        assert (cut.text(), cut.finish_reason) == ("fa", FinishReason.STOP)


def test_log_probabilities_are_those_of_the_model_not_of_the_mask() -> None:
    with Engine(backend()) as engine:
        events = list(engine.generate("p", constraint=Among(b"xalse"), temperature=0, logprobs=1).events())
    first = next(event for event in events if isinstance(event, TextDelta)).logprobs[0]
    assert first.token == ord("x") and first.logprob < -10 and first.top[0][0] == ord("f")


def test_requests_of_one_constraint_do_not_share_their_state() -> None:
    constraint = Among(b"true", b"false")
    with Engine(backend()) as engine:
        streams = [engine.generate(f"p{at}", constraint=constraint, temperature=1.5, top_k=0, min_p=0) for at in range(8)]
        assert all(stream.text() in ("true", "false") for stream in streams)
    assert constraint.said == b""


def test_a_constrained_answer_is_not_drafted_for_and_others_still_are() -> None:
    made = backend([bytes([65 + at]) for at in range(20)], max_logits=40)
    text = bytes(range(65, 85))

    def guess(tokens: list[int]) -> list[int]:
        said = sum(1 for token in tokens[1:] if 65 <= token < 85)
        return list(text[said : said + 3])

    core = EngineCore(made, speculator=Speculator(Eager(guess)))
    free = Recorded(made, "p", temperature=0)
    bound = Recorded(made, "p", temperature=0)
    bound.constraint = Among(text).start()
    for seq in (free, bound):
        core.submit(seq)
    while core.has_work:
        core.step()
    assert free.text == bound.text == text.decode()
    assert free.accepted > 0 and bound.drafted == 0


def test_a_preempted_answer_keeps_its_constraint() -> None:
    made = backend(lambda tokens: ord("z"), kv_cells=24)
    core = EngineCore(made)
    seqs = [Recorded(made, name * 4, temperature=0, max_tokens=30) for name in "ab"]
    for seq in seqs:
        seq.constraint = Among(b"a text of some length").start()
        core.submit(seq)
    while core.has_work:
        core.step()
    assert core.counters.preemptions > 0
    assert [seq.text for seq in seqs] == ["a text of some length"] * 2


# -------------------------------------------------------------------------------------------------------------------- faults


def explode(*_: Any) -> Any:
    raise ZeroDivisionError("in a plugin")


@pytest.mark.parametrize(
    "name, does, message",
    [
        ("allowed", explode, "ZeroDivisionError: in a plugin"),
        ("accept", explode, "ZeroDivisionError: in a plugin"),
        ("complete", explode, "ZeroDivisionError: in a plugin"),
        ("allowed", lambda self: np.zeros(3, np.uint8), "made for another model"),
        ("allowed", lambda self: [1, 2, 3], "made for another model"),
        ("allowed", lambda self: bits(()), "Every token is masked"),
    ],
)
def test_a_constraint_that_fails_ends_its_own_request_only(name: str, does: Callable[[Any], Any], message: str) -> None:
    with Engine(backend([b"x"] * 50, n_ctx=100)) as engine:
        good = engine.generate("good", temperature=0)
        bad = engine.generate("bad", temperature=0, constraint=Broken(name, does))
        with pytest.raises(BackendFailed, match=message):
            bad.text()
        assert good.text() == "x" * 50
        assert engine.generate("after", temperature=0).text() == "x" * 50
        stats = engine.stats()
        assert stats.counters.failed == 1 and stats.counters.inside == 0


def test_a_constraint_that_cannot_start_is_refused_at_once() -> None:
    def start(self: Any) -> Any:
        raise BadRequest("No.")

    with Engine(backend()) as engine, pytest.raises(BadRequest, match="No."):
        engine.generate("p", constraint=type("Never", (), {"start": start})())
