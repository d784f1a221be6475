"""An answer of one kind or another."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.errors import BackendFailed
from edgeinfer.runtime.backends.fake import ByteVocab
from edgeinfer.runtime.either import Either
from edgeinfer.runtime.structured import Grammars

VOCAB = ByteVocab()
GRAMMARS = Grammars(VOCAB, VOCAB.size)


def following(state) -> str:
    tokens = np.flatnonzero(np.unpackbits(state.allowed(), bitorder="little")[: VOCAB.size])
    return "".join("$" if token in VOCAB.end_ids else chr(token) for token in tokens)


def after(state, text: str) -> str:
    for character in text:
        assert character in following(state)
        state.accept(ord(character))
    return following(state)


def either(*patterns: str):
    return Either([GRAMMARS.regex(pattern) for pattern in patterns]).start()


def test_the_first_token_may_be_of_any_kind_and_the_next_only_of_those_it_fits():
    state = either("abc", "abd?", "xy")
    assert following(state) == "ax"
    assert after(state, "ab") == "$cd" or set(following(state)) == set("cd$")
    assert after(state, "c") == "$" and state.complete
    assert after(either("abc", "xy"), "x") == "y"


def test_one_kind_that_is_over_does_not_end_another_that_goes_on():
    state = either("a", "ab")
    after(state, "a")
    assert not state.complete and set(following(state)) == set("b$")
    after(state, "b")
    assert state.complete


def test_a_token_of_no_kind_is_the_engines_fault():
    state = either("a", "b")
    with pytest.raises(BackendFailed, match="does not belong"):
        state.accept(ord("c"))
    state = either("ax", "bx")
    state.accept(ord("b"))                                   # without having been asked what may follow
    assert following(state) == "x"


def test_what_allows_everything_allows_everything():
    class Anything:
        complete = False

        def start(self):
            return self

        def allowed(self):
            return None

        def accept(self, token):
            pass

    state = Either([GRAMMARS.regex("a"), Anything()]).start()
    assert state.allowed() is None
    state.accept(ord("z"))
    assert state.allowed() is None and not state.complete
