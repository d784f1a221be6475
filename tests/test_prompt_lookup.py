"""Guesses from where the text stood before: found as a naive search finds them, bounded in memory."""

from __future__ import annotations

import gc

import pytest
from drafting import Text
from hypothesis import given, strategies as st

from edgeinfer.errors import BadRequest
from edgeinfer.runtime.prompt_lookup import PromptLookup
from edgeinfer.runtime.speculative import Draft, Speculator


def look_up(tokens, limit: int = 8, **options) -> Draft:
    return PromptLookup(**options).draft([Text(tokens)], [limit])[0]


def longest_repeat(tokens: list[int]) -> int:
    """How many of the last tokens stood somewhere before, followed by something."""
    size = 0
    while any(tokens[at : at + size + 1] == tokens[-size - 1 :] for at in range(len(tokens) - size - 1)):
        size += 1
    return size


def continuations(tokens: list[int], size: int, limit: int) -> list[list[int]]:
    """What followed each earlier occurrence of the last ``size`` tokens, going on in the same period at the end of the text."""
    found = []
    for at in range(len(tokens) - size):
        if tokens[at : at + size] == tokens[-size:]:
            said = tokens[at + size :]
            while len(said) < limit:
                said.append(said[len(said) - (len(tokens) - at - size)])
            found.append(said[:limit])
    return found


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 12))
def test_a_lookup_finds_what_a_naive_search_finds(tokens: list[int], limit: int) -> None:
    size = longest_repeat(tokens)
    drafted = look_up(tokens, limit, max_ngram=4, min_ngram=2).tokens
    if size < 2:
        assert drafted == []
    else:
        assert drafted in continuations(tokens, min(size, 4), limit)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.data())
def test_an_index_that_grew_with_the_text_knows_as_much_as_a_fresh_one(tokens: list[int], data) -> None:
    lookup, text = PromptLookup(reach=0), Text(tokens[:1])
    for token in tokens[1:]:
        text.tokens.append(token)
        if data.draw(st.booleans()):
            lookup.draft([text], [3])
    drafted = lookup.draft([text], [6])[0].tokens
    # What is being followed may have matched longer than the n-grams reach; it is then one of the longer matches.
    size = longest_repeat(text.tokens)
    assert bool(drafted) == (size >= 2)
    assert not drafted or drafted in continuations(text.tokens, min(size, 4), 6)


@given(st.lists(st.integers(0, 3), min_size=30, max_size=60), st.integers(0, 20), st.integers(1, 20), st.lists(st.integers(0, 3), max_size=30))
def test_a_text_cut_in_the_middle_is_indexed_anew(tokens: list[int], keep: int, drop: int, after: list[int]) -> None:
    lookup, text = PromptLookup(), Text(tokens)
    lookup.draft([text], [4])
    del text.tokens[keep : keep + drop]
    shorter = len(text.tokens) < len(tokens)
    text.tokens += after
    drafted = lookup.draft([text], [4])[0].tokens
    assert shorter
    if len(text.tokens) < len(tokens):                   # certain to be noticed; else by the last tokens, which may be equal by chance
        size = longest_repeat(text.tokens)
        assert drafted in (continuations(text.tokens, min(size, 4), 4) if size >= 2 else [[]])
    lookup.forget(text)
    size = longest_repeat(text.tokens)
    assert lookup.draft([text], [4])[0].tokens in (continuations(text.tokens, min(size, 4), 4) if size >= 2 else [[]])


def test_a_text_that_was_cut_and_grew_longer_again_is_noticed_by_its_end() -> None:
    lookup, text = PromptLookup(), Text([1, 2, 3, 4, 5, 6, 7, 8])
    lookup.draft([text], [1])
    text.tokens[2:5] = []
    text.tokens += [20, 21, 22, 23, 6, 7]
    assert lookup.draft([text], [2])[0].tokens == [8, 20]


def test_the_latest_place_wins_and_a_longer_match_beats_it() -> None:
    assert look_up([1, 2, 7, 0, 1, 2, 8, 0, 1, 2], 1).tokens == [8]
    assert look_up([5, 1, 2, 7, 0, 1, 2, 8, 0, 5, 1, 2], 1).tokens == [7]


def test_a_place_that_was_right_is_followed_past_a_later_place_with_the_same_words() -> None:
    phrase = [1, 2, 3, 4, 5]
    source = [10, 11, *phrase, 12, 13]
    lookup, text = PromptLookup(), Text([*source, *phrase, 20, 10, 11])
    assert lookup.draft([text], [1])[0].tokens == [1]
    text.tokens += phrase                                # now the phrase's last four words stood latest before 20
    assert lookup.draft([text], [2])[0].tokens == [12, 13]


@pytest.mark.parametrize(("said", "then"), [
    pytest.param([1, 2, 3, 4, 5, 90], [7, 8], id="replaced"),
    pytest.param([1, 2, 3, 4, 5, 90, 7], [8, 9], id="replaced, and one word since"),
    pytest.param([1, 2, 3, 4, 5, 7], [8, 9], id="left out"),
    pytest.param([1, 2, 3, 4, 5, 90, 91, 92, 6], [7, 8], id="inserted"),
    pytest.param([1, 2, 3, 4, 5, 90, 91, 92, 93, 94, 95, 96, 97, 98, 6], [], id="too far"),
    pytest.param([1, 2, 90], [], id="no quotation before"),
])
def test_a_quotation_is_taken_up_after_an_edit(said: list[int], then: list[int]) -> None:
    text, lookup = Text([50, 51, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 60]), PromptLookup()
    for token in said:
        text.tokens.append(token)
        drafted = lookup.draft([text], [2])[0].tokens
    assert drafted == then
    assert PromptLookup(reach=0).draft([text], [2])[0].tokens == []


@given(st.lists(st.integers(0, 5), min_size=2, max_size=80), st.integers(1, 9))
def test_whatever_is_taken_up_is_text_of_the_conversation(tokens: list[int], limit: int) -> None:
    lookup, text = PromptLookup(), Text(tokens[:1])
    for token in tokens[1:]:
        text.tokens.append(token)
        drafted = lookup.draft([text], [limit])[0].tokens
        assert len(drafted) in (0, limit)
        assert not drafted or any(text.tokens[at : at + limit] == drafted[: len(text.tokens) - at] for at in range(len(text.tokens)))


def test_a_longer_match_is_better_evidence() -> None:
    words = list(range(100, 130))
    chances = [look_up([*words, 1, *words[:size]]).chance for size in (2, 3, 5, 8, 12, 20)]
    assert chances == sorted(set(chances))
    assert [look_up([*words, 1, *words[:size]]).kind for size in (2, 3, 5, 8, 12, 20)] == [0, 1, 2, 3, 4, 5]


def test_a_draft_stops_before_the_end_of_an_answer() -> None:
    assert look_up([1, 2, 3, 9, 4, 5, 1, 2], end_ids={9}).tokens == [3]
    assert look_up([1, 2, 9, 4, 5, 1, 2], end_ids={9}).tokens == []


def test_memory_is_bounded_by_the_window() -> None:
    lookup = PromptLookup(window=50)
    text = Text([7, 8, 9])
    for token in range(1000, 2000):
        text.tokens.append(token)
        lookup.draft([text], [1])
    assert sum(len(table) for _, _, table in lookup._indexes[text].tables) <= 3 * 100
    assert lookup.draft([Text([*text.tokens, 7, 8])], [1])[0].tokens == []          # too long ago
    text.tokens += text.tokens[-20:-10]
    assert lookup.draft([text], [1])[0].tokens == [text.tokens[-20]]


def test_sequences_that_were_forgotten_or_collected_leave_nothing() -> None:
    lookup = PromptLookup()
    texts = [Text([1, 2, 3, 1, 2]) for _ in range(4)]
    lookup.draft(texts, [1] * 4)
    lookup.forget(texts[0])
    lookup.forget(texts[0])
    assert len(lookup._indexes) == 3
    texts.clear()
    gc.collect()
    assert len(lookup._indexes) == 0


@pytest.mark.parametrize("options", [{"min_ngram": 0}, {"min_ngram": 5, "max_ngram": 4}, {"max_ngram": 17}, {"window": 3}])
def test_options_that_make_no_sense_are_refused(options) -> None:
    with pytest.raises(BadRequest):
        PromptLookup(**options)


@pytest.mark.parametrize("longest", [0, -1, 129, True, 2.0])
def test_a_longest_draft_that_makes_no_sense_is_refused(longest) -> None:
    with pytest.raises(BadRequest, match="max_draft"):
        Speculator(PromptLookup(), max_draft=longest)
