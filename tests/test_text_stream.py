"""Detokenising and stop strings: what is streamed, joined, equals the whole, wherever the pieces end."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings, strategies as st

from edgeinfer.runtime.detokenizer import Detokenizer
from edgeinfer.runtime.stops import StopMatcher

# ------------------------------------------------------------------------------------------------------------- detokenising


class PieceVocab:
    """Token i stands for the i-th piece."""

    def __init__(self, pieces: list[bytes]):
        self.pieces = pieces

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]


def decode(pieces: list[bytes]) -> list[str]:
    """Every delta, the flush last."""
    detokenizer = Detokenizer(PieceVocab(pieces))
    return [detokenizer.push(token) for token in range(len(pieces))] + [detokenizer.flush()]


def split(data: bytes | str, cuts: list[int]) -> list:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in zip(edges, edges[1:])]


def test_an_emoji_in_four_tokens():
    # case 47
    assert decode([b"\xf0", b"\x9f", b"\x98", b"\x80"]) == ["", "", "", "😀", ""]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_an_answer_that_ends_within_a_character(length):
    # case 47: max_tokens, stop or cancel in mid-character: U+FFFD once
    pieces = [b"ok ", *(bytes([byte]) for byte in "😀".encode()[:length])]
    assert decode(pieces) == ["ok ", *[""] * length, "\ufffd"]


def test_nothing_is_left_after_a_flush():
    detokenizer = Detokenizer(PieceVocab([b"\xf0\x9f", b"a"]))
    assert detokenizer.push(0) + detokenizer.flush() + detokenizer.push(1) + detokenizer.flush() == "\ufffda"


TEXTS = [
    "日本語、中文、한국어", "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 🇯🇵🇩🇪", "e\u0301 a\u0308\u0323 \u0e01\u0e33",
    "Привет, мир", "naïve — “quoted” …", "\u0000\u001b[0m\r\n\t", "𐍈𝔸\U0010ffff",
]


@pytest.mark.parametrize("text", TEXTS)
def test_every_split_of_nasty_text(text):
    # case 48: byte for byte, incl. CJK, ZWJ sequences, flags, combining marks
    data = text.encode()
    for size in range(1, len(data) + 1):
        assert "".join(decode([data[at:at + size] for at in range(0, len(data), size)])) == text
    single = decode([bytes([byte]) for byte in data])
    assert [delta for delta in single if delta] == list(text)            # each character as soon as its last byte is there


@settings(max_examples=300)
@given(st.text(), st.lists(st.integers(0, 200)))
def test_joined_deltas_equal_the_text(text, cuts):
    # case 48
    assert "".join(decode(split(text.encode("utf-8", "replace"), cuts))) == text.encode("utf-8", "replace").decode()


@settings(max_examples=300)
@given(st.binary(max_size=40), st.lists(st.integers(0, 200)))
@example(b"\xed\xa0\x80\xf5\xc0\xaf\xe2\x82A\xf0\x9f\x98", [1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_broken_bytes_decode_the_same_whole_or_in_pieces(data, cuts):
    # case 48 (+ ik_llama.cpp#780: U+FFFD in streamed completions only)
    assert "".join(decode(split(data, cuts))) == data.decode("utf-8", "replace")


def test_a_leading_space_is_kept():
    assert "".join(decode([b" Hello", b" world"])) == " Hello world"


# ------------------------------------------------------------------------------------------------------------- stop strings


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, bool]:
    """All text that came out, and whether a stop ended it."""
    matcher = StopMatcher(stops)
    out = ""
    for piece in pieces:
        emit, stopped = matcher.push(piece)
        out += emit
        assert stopped == matcher.stopped
        if stopped:
            assert matcher.push("more") == ("", True)
            break
    out += matcher.flush()
    return out, matcher.stopped


def reference(stops: tuple[str, ...], text: str) -> tuple[str, bool]:
    starts = [text.find(stop) for stop in stops if stop in text]
    return (text[: min(starts)], True) if starts else (text, False)


def test_a_stop_across_tokens():
    # case 50
    assert run(("beta gamma",), ["alpha ", "be", "ta ", "gam", "ma de", "lta"]) == ("alpha ", True)
    assert run(("beta gamma",), ["alpha beta gamma delta"]) == ("alpha ", True)
    assert run(("DEFGHIJ",), ["ABC", "DEF", "G", "HI", "J"]) == ("ABC", True)      # + vllm#3574: no prefix leaks


def test_a_prefix_is_not_shown_before_it_is_decided():
    # case 50 (+ vllm#3574)
    matcher = StopMatcher(("DEFGHIJ",))
    assert [matcher.push(piece) for piece in ("ABCD", "EF", "G", "HI", "x", "DE")] == [
        ("ABC", False), ("", False), ("", False), ("", False), ("DEFGHIx", False), ("", False),
    ]
    assert matcher.flush() == "DE" and not matcher.stopped


def test_text_before_a_stop_within_one_token_survives():
    # case 51: stop "\n", last token "?\n"
    assert run(("\n",), ["Who", "?\n"]) == ("Who?", True)


@pytest.mark.parametrize("tail", ["EN", "E", "almost EN"])
def test_held_text_is_flushed_at_the_end(tail):
    # case 51: held prefix, then EOS or max_tokens
    assert run(("END",), ["text ", tail]) == ("text " + tail, False)


def test_the_first_to_start_wins_over_the_first_to_complete():
    assert run(("abcd", "bc"), ["xabc", "d"]) == ("x", True)
    assert run(("abcd", "bc"), ["xabc", "e"]) == ("xa", True)
    assert run(("abcd", "bc"), ["xabc"]) == ("xa", True)                           # the answer ends while "abcd" is still open


def test_without_stops_nothing_is_held():
    assert StopMatcher(()).push("anything <") == ("anything <", False)


def test_text_that_cannot_start_a_stop_leaves_at_once():
    matcher = StopMatcher(("User:",))
    assert matcher.push("Hello Us") == ("Hello ", False)
    assert matcher.push("A") == ("UsA", False)


@settings(max_examples=1000, deadline=None)
@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=6), max_size=4).map(tuple),
    st.lists(st.integers(0, 60), max_size=8),
)
@example("aabaab", ("aab", "abaa"), [1, 2, 3, 4, 5])
def test_any_split_equals_find_on_the_whole(text, stops, cuts):
    # cases 50, 51
    assert run(stops, split(text, cuts)) == reference(stops, text)


@settings(deadline=None)
@given(st.text(max_size=60), st.text(min_size=1, max_size=3), st.lists(st.integers(0, 60), max_size=8))
def test_any_split_of_any_text(text, stop, cuts):
    assert run((stop,), split(text, cuts)) == reference((stop,), text)


@given(st.text("xyz", max_size=20), st.integers(0, 3))
def test_no_more_is_held_than_a_stop_may_need(text, kind):
    stop = ("<|end|>", "zz!", "xyx?", "yyyyyyyyyyyyyyyyyyyyyyyyy")[kind]
    matcher = StopMatcher((stop,))
    emitted = ""
    for at, character in enumerate(text, 1):
        emitted += matcher.push(character)[0]
        held = text[len(emitted):at]
        assert stop.startswith(held)
    assert emitted + matcher.flush() == text
