"""Markdown that grows: streamed equals whole, final blocks stay, nothing is lost, and no text is markup."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.tui.rendering import GrowingMarkdown, Palette

PALETTE = Palette("#7aa2c8", "#8fb6a0", "#d8b573", "#1c2025", "#808080", "nord")
PIECES = [
    "word", " ", "\n", "\n\n", "# Head", "- item", "  - nested", "1. one", "2. two", "> quote", "```", "```python\n", "x = 1", "| a | b |", "|---|---|", "***", "---", "=", "    ",
    "*em*", "**", "`code`", "[/", "[b +", "[x]", "[x]: http://a.b", "<div>", "日本", "🎉", "\t", "~~~", "\x1b[2J", "\u2028", "\x0c", "\r\n", "!", "[l](u)", "\\", "&amp;", "#", "+",
]


def shown(text: str | list[str], width: int = 60) -> list[str]:
    """The lines of a document whose text came in these pieces."""
    document = GrowingMarkdown()
    for piece in [text] if isinstance(text, str) else text:
        document.extend(piece)
        document.lines(width, PALETTE)
    final, tail = document.lines(width, PALETTE)
    return ["".join(segment.text for segment in line).rstrip() for line in [*final, *tail]]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=25))
def test_streamed_ends_as_whole(pieces):  # case 111: only the open block is parsed again, and that must not show
    assert shown(pieces) == shown("".join(pieces))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=25), st.integers(1, 40))
def test_character_by_character_ends_as_whole(pieces, width):
    text = "".join(pieces)
    assert shown(list(text), width) == shown(text, width)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=25))
def test_final_lines_never_change(pieces):
    document, before = GrowingMarkdown(), []
    for piece in pieces:
        document.extend(piece)
        final = ["".join(segment.text for segment in line) for line in document.lines(60, PALETTE)[0]]
        assert final[: len(before)] == before
        before = final


@pytest.mark.parametrize("text", [
    "[/", "[b +", "[/#888]", "[red]x[/red]", "<b>html</b>", "<div>\nblock\n</div>", "a\x1b[31mb", "x < y && z", "100% [sure](http://a.b)", "snake_case_name", "C:\\dir",
])
def test_text_is_shown_as_it_is(text):  # case 109
    lines = "\n".join(shown(text))
    for word in text.replace("\x1b", "␛").replace("[sure](http://a.b)", "sure").split():
        assert word in lines


def test_a_line_end_the_model_wrote_stays_one():
    assert shown("roses are red\nviolets are blue\n") == ["roses are red", "violets are blue"]


def test_blocks_are_one_empty_line_apart():
    assert shown("# H\n\npara\n\n\n\n- a\n- b\n\n```\ncode\n```\nend") == ["H", "", "para", "", " • a", " • b", "", " code", "", "end"]


def test_a_definition_may_come_blocks_before_its_use():
    assert "http://a.b" in "\n".join(shown(["[x]: http://a.b\n\n", "first\n\n", "second\n\n", "see [it][x]\n"]))


@pytest.mark.parametrize("text", ["> " * 60 + "deep", "- " * 60 + "deep", "\n".join("  " * i + "- x" for i in range(40)), "|" * 300 + "\n" + "|-" * 300, "`" * 500, "[" * 500, "*" * 500])
@pytest.mark.parametrize("width", [1, 10, 80])
def test_hostile_nesting_is_survived(text, width):
    assert shown(text, width)


def test_an_update_costs_the_open_block_not_the_answer(monkeypatch):  # case 111
    from edgeinfer.tui import rendering

    parsed = []
    parse = rendering._PARSER.parse
    monkeypatch.setattr(rendering._PARSER, "parse", lambda text, env=None: parsed.append(len(text)) or parse(text, env))
    document = GrowingMarkdown()
    for n in range(400):
        document.extend(f"Paragraph {n} has a few words.\n\n")
        document.lines(80, PALETTE)
    assert max(parsed) < 200 and len(document.source) > 12_000


def test_another_width_lays_everything_out_again():
    document = GrowingMarkdown()
    document.extend("word " * 40 + "\n\n" + "more " * 40)
    narrow, wide = [sum(map(len, document.lines(width, PALETTE))) for width in (30, 120)]
    assert narrow > wide and [sum(map(len, document.lines(width, PALETTE))) for width in (30, 120)] == [narrow, wide]
