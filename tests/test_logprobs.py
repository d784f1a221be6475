"""Log-probabilities of answers and of prompts: their values, and that none is lost or misplaced."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from drafting import Eager
from engine_runs import Recorded, start
from hypothesis import given, settings, strategies as st

import edgeinfer
from edgeinfer.errors import BackendFailed
from edgeinfer.runtime.backends.fake import END, ScriptedBackend
from edgeinfer.runtime.engine import EngineCore
from edgeinfer.runtime.logprobs import LOWEST, PromptScores, token_logprob
from edgeinfer.runtime.scheduler import SchedulerOptions
from edgeinfer.runtime.service import Engine
from edgeinfer.runtime.speculative import Speculator
from edgeinfer.runtime.values import FinishReason, PrefillProgress, PromptLogprobs, StepPlan, StepResult, TextDelta, TokenLogprob


def reference(row: np.ndarray) -> np.ndarray:
    wide = row.astype(np.float64)
    return wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())


class Noisy(ScriptedBackend):
    """Says what it is told to, and finds every other token more or less likely too, by its position and the token before."""

    def forward(self, plan: StepPlan) -> StepResult:
        result = super().forward(plan)
        logits = {}
        for chunk in plan.chunks:
            if chunk.slot in result.logits:
                first = chunk.start + len(chunk.tokens) - chunk.n_logits
                tokens = chunk.tokens[len(chunk.tokens) - chunk.n_logits :]
                noise = np.stack([self.noise(first + at, token) for at, token in enumerate(tokens)])
                logits[chunk.slot] = result.logits[chunk.slot] + noise
        return result._replace(logits=logits)

    def noise(self, position: int, token: int) -> np.ndarray:
        return np.random.default_rng((position, token)).normal(0, 3, self.info.n_vocab).astype(np.float32)

    def expected(self, tokens: list[int], start: int) -> list[float]:
        """Of ``tokens[start:]``, by the rows that they are drawn from."""
        found = []
        for at in range(start, len(tokens)):
            row = np.full(self.info.n_vocab, -10, np.float32)
            row[self._next(tokens[:at])] = 10
            found.append(float(reference(row + self.noise(at - 1, tokens[at - 1]))[tokens[at]]))
        return found


def deltas(events) -> list[TextDelta]:
    return [event for event in events if isinstance(event, TextDelta)]


def entries(events) -> list[TokenLogprob]:
    return [entry for event in deltas(events) for entry in event.logprobs]


def prompt_entries(events) -> tuple[TokenLogprob | None, ...]:
    found = [event for event in events if isinstance(event, PromptLogprobs)]
    assert len(found) == 1
    return found[0].entries


# ------------------------------------------------------------------------------------------------------------------- one row


@given(st.integers(0, 2**32), st.integers(2, 3000), st.integers(0, 20), st.sampled_from([0.01, 3.0, 100.0]))
def test_an_entry_is_the_log_softmax_of_the_row(seed: int, size: int, alternatives: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    row = rng.normal(0, spread, size).astype(np.float32)
    row[rng.integers(0, size, size // 4)] = -np.inf          # masked by the model itself
    row[0] = 1.0
    wanted = np.maximum(reference(row), LOWEST)
    token = int(rng.integers(size))
    entry = token_logprob(row, token, alternatives)
    assert entry.token == token
    assert entry.logprob == pytest.approx(wanted[token], abs=1e-4)
    best = sorted((index for index in range(size) if row[index] > -np.inf), key=lambda index: (-row[index], index))[:alternatives]
    assert [index for index, _ in entry.top] == best
    assert [value for _, value in entry.top] == pytest.approx([wanted[index] for index in best], abs=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_are_no_numbers_are_an_error(bad: float) -> None:
    row = np.zeros(8, np.float32)
    row[3] = bad
    with pytest.raises(BackendFailed, match="not finite"):
        token_logprob(row, 0, 0)


# ------------------------------------------------------------------------------------------------------------------- answers

PIECES = [b"a", b"ST", b"S", b"TOP", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98\x80", b"OP", b" ", b"", b"\xff", b"xS"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=12), st.sampled_from([(), ("STOP",), ("é", "TOPx"), ("S ", "STOP")]), st.integers(1, 14))
def test_every_token_of_the_answer_has_one_entry_in_order(script: list[bytes], stops: tuple[str, ...], most: int) -> None:
    backend = Noisy(script, max_batch=256)
    core = EngineCore(backend)
    seq = Recorded(backend, "p:", temperature=0, logprobs=1, stop=stops, max_tokens=most)
    core.submit(seq)
    while core.has_work:
        core.step()
    drawn = seq.sampled
    found = entries(seq.events)
    assert [entry.token for entry in found] == drawn[: len(found)]
    said = [backend.vocab.token_bytes(token) for token in drawn]
    if seq.end.reason is FinishReason.LENGTH:
        assert len(found) == len(drawn)
    elif not seq.stops.stopped:
        assert len(found) == len(drawn) - 1 and drawn[-1] == END
    else:                                                    # all that have any part in the text, and none that begins after it
        begun = len(b"".join(said[: len(found)]).decode("utf-8", "replace"))
        assert begun >= len(seq.text)
        assert not found or len(b"".join(said[: len(found) - 1]).decode("utf-8", "ignore")) <= len(seq.text)
    assert [entry.logprob for entry in found] == pytest.approx(backend.expected(seq.tokens, seq.prompt_len)[: len(found)], abs=1e-4)
    # A piece never comes before its tokens: what was said by then is made of tokens that were sent.
    text, sent = "", 0
    for delta in deltas(seq.events)[:-1]:
        text, sent = text + delta.text, sent + len(delta.logprobs)
        assert b"".join(said[:sent]).decode("utf-8", "replace").startswith(text[: max(0, len(text) - 4)])


def test_text_comes_without_entries_unless_they_were_asked_for() -> None:
    with Engine(Noisy([b"some", b"thing"])) as engine:
        assert not entries(engine.generate("p", temperature=0).events())
        assert len(entries(engine.generate("p", temperature=0, logprobs=0).events())) == 2


def test_sampling_parameters_do_not_change_the_entries() -> None:
    with Engine(Noisy([b"x", b"y", b"z"])) as engine:
        plain = entries(engine.generate("p", temperature=0, logprobs=3).events())
        bent = entries(engine.generate("p", temperature=0.01, logprobs=3, logit_bias={5: 3.0}, repeat_penalty=1.2, top_k=1).events())
    assert plain == bent


def test_drafted_tokens_have_the_same_entries() -> None:
    script = [b"a", b"b", b"c", b"d", b"e", b"f"] * 4
    with Engine(Noisy(script)) as engine:
        alone = engine.generate("p", temperature=0, logprobs=2)
        wanted = entries(alone.events())
    text = b"".join(script)

    def guess(tokens: list[int]) -> list[int]:
        said = len(tokens) - 1
        return [*text[said : said + 2], 0]                   # two right ones, then one that is wrong

    backend = Noisy(script, max_logits=40)
    with Engine(backend, speculator=Speculator(Eager(guess))) as engine:
        stream = engine.generate("p", temperature=0, logprobs=2)
        assert entries(stream.events()) == wanted
        assert stream.timings.draft_n_accepted > 0


# ------------------------------------------------------------------------------------------------------------------- prompts


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=1, max_size=60), st.integers(4, 20), st.integers(1, 9), st.integers(0, 3), st.sampled_from([None, 7]))
def test_a_prompt_is_scored_however_it_is_divided(prompt: bytes, rows: int, chunk: int, alternatives: int, seed: int | None) -> None:
    backend = Noisy([b"yes"], max_logits=rows, max_slots=4)
    with Engine(backend, options=SchedulerOptions(prefill_chunk=chunk)) as engine:
        tokens = list(prompt)
        stream = engine.generate(tokens, prompt_logprobs=alternatives, max_tokens=3, temperature=0.001, seed=seed)
        found = prompt_entries(list(stream.events()))
    assert stream.text() == "yes"
    assert found[0] is None and [entry.token for entry in found[1:]] == tokens[1:]
    assert [entry.logprob for entry in found[1:]] == pytest.approx(backend.expected(tokens, 1), abs=1e-4)
    assert all(len(entry.top) == alternatives for entry in found[1:])


def test_a_prompt_may_be_scored_without_an_answer() -> None:
    backend = Noisy([b"yes"])
    with Engine(backend) as engine:
        stream = engine.generate("some words", prompt_logprobs=0, max_tokens=0)
        events = list(stream.events())
        assert [type(event) for event in events[:-1]] == [PrefillProgress, PromptLogprobs]
        assert stream.finish_reason is FinishReason.LENGTH
        assert stream.usage.completion_tokens == 0 and stream.usage.prompt_tokens == 10 and stream.timings.prompt_n == 10
        assert len(prompt_entries(events)) == 10
        assert prompt_entries(engine.generate("x", prompt_logprobs=0, max_tokens=0).events()) == (None,)
        assert engine.generate("some words", max_tokens=0).text() == ""


def test_the_scores_come_before_the_answer() -> None:
    with Engine(Noisy([b"yes", b"no"])) as engine:
        kinds = [type(event) for event in engine.generate("some words", prompt_logprobs=0).events()]
    assert kinds.index(PromptLogprobs) < kinds.index(TextDelta)


def test_nothing_cached_is_reused_for_a_prompt_that_is_scored() -> None:
    with Engine(Noisy([b"yes"])) as engine:
        engine.generate("some words", temperature=0).text()
        stream = engine.generate("some words", temperature=0, prompt_logprobs=0)
        assert len(prompt_entries(list(stream.events()))) == 10
        assert stream.usage.cached_tokens == 0 and "log-probability" in stream.usage.cache_miss
        again = engine.generate("some words", temperature=0)
        again.wait()
        assert again.usage.cached_tokens == 9                # and the next one takes it from there


def test_a_scored_prompt_is_read_again_after_a_preemption() -> None:
    run = start(backend=Noisy, kv_cells=60, prefill_chunk=16, prefill_chunk_busy=4)
    run.add("a", "a" * 10, max_tokens=40)
    run.step()
    run.add("b", "b" * 45, max_tokens=4, prompt_logprobs=0)
    run.finish()
    assert run["b"].preemptions and not any(type(event) is PromptLogprobs for event in run["b"].events[:8])
    found = prompt_entries(run["b"].events)
    assert [entry.logprob for entry in found[1:]] == pytest.approx(run.backend.expected(list(b"b" * 45), 1), abs=1e-4)


def test_reading_a_scored_prompt_stays_within_the_rows_of_a_step() -> None:
    """The backend refuses a step that asks for more. Others decode, read, and are drafted for meanwhile."""
    run = start(backend=Noisy, max_logits=9, max_seqs=8)
    for at in range(6):
        run.add(f"d{at}", f"d{at}", max_tokens=30)
    run.steps(3)
    run.add("s", "s" * 30, prompt_logprobs=1, max_tokens=2)
    run.add("t", "t" * 30, prompt_logprobs=1, max_tokens=2)
    run.finish()
    assert all(sum(chunk.n_logits for chunk in plan.chunks) <= 9 for plan in run.backend.plans)
    assert len(prompt_entries(run["s"].events)) == len(prompt_entries(run["t"].events)) == 30


def test_scores_that_were_seen_are_not_taken_twice() -> None:
    scores = PromptScores([1, 2, 3, 4], 0)
    rows = np.random.default_rng(0).normal(0, 1, (4, 8)).astype(np.float32)
    scores.add(0, rows[:3])
    once = scores.entries
    scores.add(0, rows)
    assert scores.complete and scores.entries == once and len(once) == 4


# --------------------------------------------------------------------------------------------------------------- a real model


@pytest.fixture(scope="module")
def engine(smollm2_gguf) -> Iterator[edgeinfer.Engine]:
    with edgeinfer.load(smollm2_gguf, ctx_size=512, parallel=2) as loaded:
        yield loaded


def test_an_answer_and_the_same_text_as_a_prompt_are_equally_likely(engine) -> None:
    stream = engine.generate("The capital of France is", temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    said = entries(stream.events())
    assert [entry.token for entry in said] == [entry.top[0][0] for entry in said]        # greedy takes the likeliest
    prompt = engine.tokenize("The capital of France is")
    tokens = [*prompt, *(entry.token for entry in said)]
    scored = prompt_entries(list(engine.generate(tokens, prompt_logprobs=1, max_tokens=0).events()))
    assert [entry.token for entry in scored[1:]] == tokens[1:]
    # Kernels round differently by the number of rows, see the architecture's chapter on numbers.
    assert [entry.logprob for entry in scored[len(prompt) :]] == pytest.approx([entry.logprob for entry in said], abs=0.15)
    wrong = prompt_entries(list(engine.generate("The capital of France is cheese", prompt_logprobs=0, max_tokens=0).events()))
    right = prompt_entries(list(engine.generate("The capital of France is Paris", prompt_logprobs=0, max_tokens=0).events()))
    assert right[-1].logprob > wrong[-1].logprob + 3
