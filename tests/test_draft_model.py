"""A smaller model guesses ahead: computes only what is new, and its faults mean no draft."""

from __future__ import annotations

import pytest
from drafting import Text, counting, model

from edgeinfer.errors import BadRequest
from edgeinfer.runtime.backends.fake import END, ByteVocab, ScriptedBackend
from edgeinfer.runtime.draft_model import DraftModel
from edgeinfer.runtime.values import StepPlan


def test_a_draft_model_says_what_it_would_say() -> None:
    backend = model()
    drafter = DraftModel(backend, model())
    texts = [Text([1, 2, 3]), Text([50]), Text([7, 8])]
    drafts = drafter.draft(texts, [4, 2, 0])
    assert [draft.tokens for draft in drafts] == [[4, 5, 6, 7], [51, 52], []]
    assert [len(plan.chunks) for plan in backend.plans] == [2, 2, 1, 1]          # all sequences in one forward for each position


def test_only_what_is_new_is_computed() -> None:
    backend = model()
    drafter = DraftModel(backend, model())
    text = Text(range(40))
    drafter.draft([text], [4])
    text.tokens += [40, 41, 99]                          # two of four were right
    computed = backend.tokens_computed
    assert drafter.draft([text], [3])[0].tokens == [100, 101, 102]
    assert backend.tokens_computed - computed == 3       # 99, then two guesses


def test_a_draft_ends_where_the_model_is_unsure_or_ends() -> None:
    class Unsure(ScriptedBackend):
        def forward(self, plan: StepPlan):
            result = super().forward(plan)
            for chunk in plan.chunks:
                if chunk.n_logits and chunk.tokens[-1] == 5:
                    result.logits[chunk.slot][-1, [6, 7, 8]] = 10.0
            return result

    assert DraftModel(Unsure(counting), model()).draft([Text([1, 2])], [10])[0].tokens == [3, 4, 5]
    assert DraftModel(Unsure(counting), model(), threshold=0.3).draft([Text([1, 2])], [5])[0].tokens == [3, 4, 5, 6, 7]
    ending = model(lambda tokens: END if tokens[-1] == 4 else tokens[-1] + 1)
    assert DraftModel(ending, model()).draft([Text([1, 2])], [10])[0].tokens == [3, 4]


def test_more_sequences_than_slots_take_turns_without_harm() -> None:
    backend = model(max_slots=2)
    drafter = DraftModel(backend, model())
    texts = [Text([10 * n + 1, 10 * n + 2]) for n in range(4)]
    assert [len(draft.tokens) for draft in drafter.draft(texts, [2] * 4)] == [2, 2, 0, 0]
    computed = backend.tokens_computed
    drafter.draft(texts, [2] * 4)
    assert backend.tokens_computed - computed <= 4       # those that have a slot keep it
    assert [draft.tokens for draft in drafter.draft(texts[2:], [2, 2])] == [[23, 24], [33, 34]]


def test_long_prompts_are_read_a_piece_at_a_time() -> None:
    backend = model(n_ctx=4096, max_batch=64)
    drafter = DraftModel(backend, model(n_ctx=4096), read_ahead=100)
    text = Text(n % 256 for n in range(350))
    drafts = [drafter.draft([text], [2])[0].tokens for _ in range(5)]
    assert drafts == [[], [], [], [94, 95], [94, 95]]
    assert max(sum(len(chunk.tokens) for chunk in plan.chunks) for plan in backend.plans) <= 64


def test_the_next_turn_starts_where_the_last_one_ended() -> None:
    backend = model()
    drafter = DraftModel(backend, model())
    first = Text(range(60))
    drafter.draft([first], [2])
    drafter.forget(first)
    computed = backend.tokens_computed
    assert drafter.draft([Text([*range(60), 3])], [1])[0].tokens == [4]
    assert backend.tokens_computed - computed == 1


def test_a_shifted_sequence_is_read_again() -> None:
    drafter = DraftModel(model(), model())
    text = Text(range(100))
    drafter.draft([text], [2])
    del text.tokens[10:50]
    assert drafter.draft([text], [2])[0].tokens == [100, 101]


def test_faults_of_the_draft_model_mean_no_draft() -> None:
    full = model(kv_cells=20)
    drafter = DraftModel(full, model())
    assert drafter.draft([Text(range(30))], [2])[0].tokens == []
    assert drafter.draft([Text(range(10))], [2])[0].tokens == [10, 11]
    for _ in range(2):                                   # the slot of somebody who is gone gives way
        drafts = drafter.draft([Text(range(100, 115))], [2])[0].tokens
    assert drafts == [115, 116]
    assert DraftModel(model(n_ctx=16), model()).draft([Text(range(15))], [2])[0].tokens == []

    class Failing(ScriptedBackend):
        def forward(self, plan: StepPlan):
            result = super().forward(plan)
            return result if len(self.plans) != 2 else result._replace(logits={}, failed={chunk.slot: "broken" for chunk in plan.chunks})

    drafter = DraftModel(Failing(counting), model())
    assert drafter.draft([Text([1, 2])], [4])[0].tokens == [3]
    assert drafter.draft([Text([1, 2])], [4])[0].tokens == [3, 4, 5, 6]


def test_models_that_share_no_vocabulary_are_refused_with_both_names() -> None:
    with pytest.raises(BadRequest, match="scripted cannot draft for scripted: their vocabularies differ.*257"):
        class Foreign(ByteVocab):
            def token_text(self, token: int) -> str:
                return "</s>" if token == END else super().token_text(token)

        DraftModel(model(vocab=Foreign()), model())
    with pytest.raises(BadRequest, match="600 and 258 tokens|258 and 600 tokens"):
        DraftModel(model(vocab=ByteVocab([b"%d" % n for n in range(342)])), model())
    with pytest.raises(BadRequest, match="BOS"):
        started = ByteVocab()
        started.bos_id = 1
        DraftModel(model(vocab=started), model())
    with pytest.raises(BadRequest, match="itself"):
        same = model()
        DraftModel(same, same)
    with pytest.raises(BadRequest, match="threshold"):
        DraftModel(model(), model(), threshold=1.5)


def test_a_vocabulary_that_is_padded_is_shared_and_its_padding_never_drafted() -> None:
    padded = ScriptedBackend(lambda tokens: 260 if tokens[-1] == 5 else tokens[-1] + 1, vocab=ByteVocab([b"x", b"y", b"z"]))
    assert DraftModel(padded, model()).draft([Text([3])], [5])[0].tokens == [4, 5]
