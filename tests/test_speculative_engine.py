"""Answers are the model's own, with drafts and without."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from drafting import Eager, model, other

from edgeinfer.runtime.backends.fake import END, ScriptedBackend
from edgeinfer.runtime.backends.llamacpp import LlamaCppBackend, LlamaOptions
from edgeinfer.runtime.draft_model import DraftModel
from edgeinfer.runtime.prompt_lookup import PromptLookup
from edgeinfer.runtime.service import Engine
from edgeinfer.runtime.speculative import Speculator
from edgeinfer.runtime.values import Chunk, StepPlan


def echo(tokens: list[int]) -> int:
    """Says back what stood between the last "<" and ">" of the prompt."""
    data = bytes(token for token in tokens if token < 256)
    marker, _, said = data.rpartition(b"assistant\n")
    marker = marker[marker.rindex(b"<") : marker.rindex(b">") + 1]
    return marker[len(said)] if len(said) < len(marker) else END


class Always(Speculator):
    """Drafts in every step, whatever it costs."""

    def propose(self, sequences, room, *, n_ctx, others=0) -> None:
        limits = [max(0, min(self._max_draft, room, seq.draft_limit(n_ctx))) for seq in sequences]
        for seq, draft in zip(sequences, self._drafter.draft(sequences, limits), strict=True):
            seq.draft = draft.tokens[: max(0, room)]
            room -= len(seq.draft)


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


MARKED = "<the quick brown fox jumps over the lazy dog>"


def mixed(tokens: list[int]) -> list[int]:
    """Guesses that are right at first and wrong later, by a different length each time."""
    guess = list(tokens)
    for at in range(6):
        guess.append(echo(guess) if at < len(tokens) % 5 else 63)
    return guess[len(tokens) :]


@pytest.mark.parametrize("make", [
    pytest.param(lambda backend: Speculator(PromptLookup(end_ids={END})), id="lookup"),
    pytest.param(lambda backend: Speculator(DraftModel(model(echo), backend)), id="model"),
    pytest.param(lambda backend: Always(PromptLookup(end_ids={END})), id="lookup always"),
    pytest.param(lambda backend: Always(DraftModel(model(echo), backend)), id="same model always"),
    pytest.param(lambda backend: Always(DraftModel(model(other), backend)), id="other model always"),
    pytest.param(lambda backend: Always(Eager(lambda tokens: [63] * 6)), id="wrong"),
    pytest.param(lambda backend: Always(Eager(mixed)), id="mixed"),
])
@pytest.mark.parametrize("limits", [{}, {"max_tokens": 17}, {"stop": "fox"}, {"stop": ("lazy", "x jum")}])
def test_greedy_text_is_the_same_with_and_without(make, limits) -> None:
    def run(speculator_of) -> list:
        backend = ScriptedBackend(echo, n_ctx=256)
        with Engine(backend, speculator=speculator_of(backend)) as engine:
            streams = [engine.chat(ask(f"Say {MARKED} {n}"), temperature=0, **limits) for n in range(3)]
            return [(stream.text(), stream.finish_reason, stream.usage.completion_tokens) for stream in streams]

    assert run(make) == run(lambda backend: None)


def test_drafts_save_forwards_and_are_counted() -> None:
    backend = ScriptedBackend(echo)
    with Engine(backend, speculator=Always(PromptLookup(end_ids={END}))) as engine:
        stream = engine.chat(ask(f"Say {MARKED}"), temperature=0)
        assert stream.text() == MARKED
    timings = stream.timings
    assert timings.draft_n >= timings.draft_n_accepted > 30
    assert len(backend.plans) < 0.4 * len(MARKED)


def test_a_request_may_refuse_to_be_drafted_and_one_with_a_seed_is_not() -> None:
    for options in ({"temperature": 0, "speculative": False}, {"temperature": 1.0, "seed": 3}):
        backend = ScriptedBackend(echo)
        with Engine(backend, speculator=Always(PromptLookup(end_ids={END}))) as engine:
            stream = engine.chat(ask(f"Say {MARKED}"), **options)
            assert stream.text() == MARKED
        assert stream.timings.draft_n == 0
        assert all(chunk.n_logits <= 1 for plan in backend.plans for chunk in plan.chunks)


def test_a_context_that_shifts_while_drafting_goes_on() -> None:
    def cycle(tokens: list[int]) -> int:
        return 97 + (tokens[-1] - 96) % 7 if 97 <= tokens[-1] < 104 else 97

    def run(speculator) -> str:
        backend = ScriptedBackend(cycle, n_ctx=64)
        with Engine(backend, speculator=speculator) as engine:
            return engine.chat(ask("go"), temperature=0, max_tokens=300, context_policy="shift").text()

    plain = run(None)
    assert len(plain) == 300
    assert run(Always(PromptLookup(end_ids={END}))) == plain


class Dice(ScriptedBackend):
    """Every position has the same distribution over three letters; the answer never ends by itself."""

    SHARES = {97: 0.6, 98: 0.3, 99: 0.1}

    def forward(self, plan: StepPlan):
        result = super().forward(plan)
        for rows in result.logits.values():
            rows[:] = -30.0
            for token, share in self.SHARES.items():
                rows[:, token] = math.log(share)
        return result


@pytest.mark.parametrize("guess", [[97] * 4, [98, 97, 99, 97], [99] * 4])
def test_sampled_answers_keep_their_distribution(guess: list[int]) -> None:
    """Pairs of neighbours over 6,000 tokens: what was drafted must not make itself likelier, nor what follows it."""
    backend = Dice(lambda tokens: 97, n_ctx=1 << 13, max_batch=64)
    with Engine(backend, speculator=Always(Eager(lambda tokens: guess))) as engine:
        stream = engine.chat(ask("dice"), temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, max_tokens=6000)
        text = stream.text()
    assert stream.timings.draft_n > 1000
    pairs = Counter(zip(text, text[1:]))
    for (first, second), count in pairs.items():
        expected = Dice.SHARES[ord(first)] * Dice.SHARES[ord(second)] * (len(text) - 1)
        assert abs(count - expected) < 6 * expected ** 0.5 + 5, (first, second, count, expected)


# ------------------------------------------------------------------------------------------------------------- for real

NOTE = (
    "The migration of the customer database finished on Tuesday. Three of the forty tables needed a second pass, because their indexes were larger "
    "than expected. Two customers reported that their invoices from March were missing; both were found in the archive and restored the same day."
)


class Recorded(Always):
    """Keeps the tokens of every answer that ended."""

    def __init__(self, drafter):
        super().__init__(drafter)
        self.answers: list[list[int]] = []

    def forget(self, seq) -> None:
        self.answers.append(seq.tokens)
        super().forget(seq)


@pytest.fixture(scope="module")
def quotations(smollm2_gguf):
    """Answers that quote, with and without drafts: pairs of token lists (prompt included), the backend's path, and what was drafted."""
    backend = LlamaCppBackend(smollm2_gguf, LlamaOptions(ctx_size=1024, parallel=2))
    speculator = Recorded(PromptLookup(end_ids=backend.vocab.end_ids))
    pairs = []
    drafted = accepted = 0
    with Engine(backend, speculator=speculator) as engine:
        for task in ("Repeat this text word for word", "Correct the spelling of this text", "Summarise"):
            question = f"{task}:\n\n{NOTE}"
            engine.chat(ask(question), temperature=0, max_tokens=1).text()          # both then start from the same cached prompt
            for speculative in (False, True):
                stream = engine.chat(ask(question), temperature=0, max_tokens=64, speculative=speculative)
                stream.text()
                drafted, accepted = drafted + stream.timings.draft_n, accepted + stream.timings.draft_n_accepted
            pairs.append(tuple(speculator.answers[-2:]))
    return pairs, drafted, accepted


def test_a_real_model_says_the_same_but_for_near_ties(quotations, smollm2_gguf, record_property) -> None:
    """Kernels round by the number of rows, so where two tokens are almost equally likely the texts may part; nowhere else."""
    pairs, drafted, accepted = quotations
    assert drafted > accepted > 50
    backend = LlamaCppBackend(smollm2_gguf, LlamaOptions(ctx_size=1024, parallel=1))
    ties = 0
    try:
        for plain, with_drafts in pairs:
            same = next((at for at, (a, b) in enumerate(zip(plain, with_drafts)) if a != b), None)
            if same is None:
                assert len(plain) == len(with_drafts)
                continue
            ties += 1
            backend.truncate(0, 0)
            row = backend.forward(StepPlan((), (Chunk(0, 0, plain[:same], 1),))).logits[0][0]
            assert row.max() - min(row[plain[same]], row[with_drafts[same]]) < 0.5
    finally:
        backend.close()
    record_property("near_ties", ties)
    print(f"{ties} of {len(pairs)} answers parted at a near tie")
