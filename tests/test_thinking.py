"""A budget for thinking, and constraints that bind only what comes after it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from edgeinfer.errors import BackendFailed, BadRequest
from edgeinfer.runtime.answer_format import AnswerFormat
from edgeinfer.runtime.backends.fake import END, ByteVocab
from edgeinfer.runtime.thinking import thinking_constraint
from edgeinfer.runtime.tool_formats.table import GENERIC

FORMAT = AnswerFormat(GENERIC, renders_tools=False, reasoning=("<think>", "</think>"))
CLOSE = list(b"</think>")


class OneTokenVocab(ByteVocab):
    """The tags are tokens of their own: 258 opens, 259 closes; 260 both closes and goes on."""

    def __init__(self):
        super().__init__([b"<think>", b"</think>", b">x"])

    def encode(self, text, *, add_special, parse_special, opening=True):
        tags = {"<think>": [258], "</think>": [259]}
        return tags.get(text) or super().encode(text, add_special=add_special, parse_special=parse_special)


class Exactly:
    """The answer is ``text``, byte by byte."""

    def __init__(self, text: bytes, n_vocab: int):
        self.text, self.n_vocab = text, n_vocab

    def start(self):
        return _ExactlyState(self)


class _ExactlyState:
    def __init__(self, parent):
        self.parent, self.at = parent, 0

    def allowed(self):
        mask = np.zeros((self.parent.n_vocab + 7) // 8, np.uint8)
        token = self.parent.text[self.at] if self.at < len(self.parent.text) else END
        mask[token >> 3] |= 1 << (token & 7)
        return mask

    def accept(self, token):
        assert self.parent.text[self.at] == token
        self.at += 1

    @property
    def complete(self):
        return self.at == len(self.parent.text)


def may(state, token: int) -> bool:
    mask = state.allowed()
    return mask is None or bool(mask[token >> 3] >> (token & 7) & 1)


def only(state) -> int | None:
    mask = state.allowed()
    tokens = [] if mask is None else np.flatnonzero(np.unpackbits(mask, bitorder="little"))
    return int(tokens[0]) if len(tokens) == 1 else None


def say(state, tokens) -> None:
    for token in tokens:
        assert may(state, token), token
        state.accept(token)


def start(where, vocab=None, *, limit=None, inner=None):
    vocab = vocab or ByteVocab()
    constraint = thinking_constraint(FORMAT, where, vocab, vocab.size, limit=limit, inner=inner and Exactly(inner, vocab.size))
    return constraint.start()


def test_nothing_is_demanded_where_nothing_was_asked():
    vocab = ByteVocab()
    inner = Exactly(b"x", vocab.size)
    assert thinking_constraint(FORMAT, "open", vocab, vocab.size) is None
    assert thinking_constraint(FORMAT, "closed", vocab, vocab.size, limit=5) is None
    assert thinking_constraint(FORMAT, "closed", vocab, vocab.size, limit=5, inner=inner) is inner
    silent = AnswerFormat(GENERIC, renders_tools=False, reasoning=None)
    assert thinking_constraint(silent, "free", vocab, vocab.size, limit=5, inner=inner) is inner


@pytest.mark.parametrize("limit", [-1, 1.5, True, "5"])
def test_a_budget_is_a_whole_number(limit):
    with pytest.raises(BadRequest, match="thinking_budget"):
        thinking_constraint(FORMAT, "open", ByteVocab(), 258, limit=limit)


@pytest.mark.parametrize("limit", [0, 1, 7])
def test_after_the_budget_the_tag_is_forced(limit):
    state = start("open", limit=limit)
    for _ in range(limit):
        assert state.allowed() is None
        state.accept(ord("h"))
    for token in CLOSE:
        assert only(state) == token
        state.accept(token)
    assert state.allowed() is None and not state.complete     # words without a limit, to whatever end
    say(state, b"<think>" * 3)


def test_thinking_that_ends_in_time_is_left_alone():
    state = start("open", limit=20)
    say(state, b"hm</think>" + b"x" * 50)
    assert state.allowed() is None


def test_a_model_that_opens_the_block_itself_has_the_same_budget():
    state = start("free", limit=2)
    say(state, b"\n<think>ab")
    assert only(state) == ord("<")
    state = start("free", limit=2)
    say(state, b"<thin ice> is what I write, and no end of it")
    assert state.allowed() is None


def test_a_schema_binds_what_follows_the_thinking():
    state = start("open", inner=b"{}")
    assert not may(state, END)                               # an answer must follow
    say(state, b"{ hm }</think>")
    assert only(state) == ord("{") and not state.complete
    say(state, b"{}")
    assert state.complete


def test_budget_and_schema_together():
    state = start("open", limit=3, inner=b"{}")
    say(state, b"abc")
    for token in [*CLOSE, *b"{}"]:
        assert not state.complete and only(state) == token
        state.accept(token)
    assert state.complete


def test_a_model_may_think_first_or_answer_at_once():
    for text in (b"<think>hm</think>{}", b"{}"):
        state = start("free", inner=b"{}")
        assert may(state, ord("<")) and may(state, ord("{")) and not may(state, ord("x")) and not may(state, END)
        say(state, text)
        assert state.complete
    state = start("free", inner=b"{}")
    state.accept(ord("<"))
    assert only(state) == ord("t")                           # the tag it began, nothing else


def test_an_answer_that_begins_like_the_tag_is_the_answer():
    state = start("free", inner=b"<a>")
    say(state, b"<a>")
    assert state.complete


def test_tags_that_are_tokens():
    vocab = OneTokenVocab()
    state = start("free", vocab, limit=2, inner=b"{}")
    assert may(state, 258) and may(state, ord("{")) and not may(state, ord("<"))
    say(state, [258, ord("a"), 260])
    assert only(state) == 259
    say(state, [259, *b"{}"])
    assert state.complete


def test_no_token_ends_the_tag_and_begins_the_answer_past_its_constraint():
    vocab = ByteVocab([b">x", b"> \n", b"k>{"])
    over, space, both = 258, 259, 260
    state = start("open", vocab, inner=b"{}")
    say(state, [over, space, both])                          # nothing to end yet
    say(state, b"</thin")
    assert may(state, over) and not may(state, both)
    state.accept(ord("k"))
    assert not may(state, over) and may(state, space) and may(state, both) and may(state, ord(">"))
    say(state, [space, *b"{}"])
    assert state.complete


def test_what_is_not_allowed_is_the_engines_fault():
    state = start("open", limit=0)
    with pytest.raises(BackendFailed, match="only 60"):
        state.accept(ord("x"))


def test_states_are_their_own():
    vocab = ByteVocab()
    constraint = thinking_constraint(FORMAT, "open", vocab, vocab.size, limit=1, inner=Exactly(b"x", vocab.size))
    one, other = constraint.start(), constraint.start()
    say(one, b"a</think>x")
    assert one.complete and not other.complete and may(other, ord("q"))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=30), st.integers(0, 20), st.sampled_from(["open", "free"]))
def test_whatever_the_model_wants_to_say_the_answer_keeps_to_both(wishes, limit, where):
    state = start(where, limit=limit, inner=b"[1]")
    said = []
    for wish in [*wishes, *[ord("z")] * 60]:
        if state.complete:
            break
        token = wish if may(state, wish) else next(token for token in range(256) if may(state, token))
        state.accept(token)
        said.append(token)
    assert state.complete and bytes(said).endswith(b"[1]")
    thoughts, tag, _ = bytes(said)[:-3].removeprefix(b"<think>" if where == "free" else b"").rpartition(b"</think>")
    assert len(thoughts) <= limit + len(CLOSE)
    assert tag or (where == "free" and len(said) == 3)
