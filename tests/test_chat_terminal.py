"""`edgeinfer chat` in a real terminal, with the real model: what a person does, and what the screen shows."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from terminal import Terminal

pytestmark = pytest.mark.skipif(Terminal.missing() is not None, reason=str(Terminal.missing()))


def chat(*words: str | Path, **options) -> Terminal:
    return Terminal([sys.executable, "-m", "edgeinfer", "chat", *map(str, words)], **options)


@pytest.fixture
def window(smollm2_gguf) -> Iterator[Terminal]:
    with chat(smollm2_gguf, "--temp", "0", columns=100, rows=32) as terminal:
        terminal.wait_for("ready")
        yield terminal


def ask(window: Terminal, text: str) -> None:
    window.type(text)
    window.press("Enter")


def test_two_turns_and_the_live_line(window) -> None:
    ask(window, "What is the capital of Japan?")
    window.wait_for("Tokyo")
    screen = window.wait_until(lambda text: re.search(r"ready .* tok/s", text) is not None, "a rate")
    assert "first" in screen and re.search(r"\d+/8,192 tokens", screen) and "nothing is cached yet" in screen
    ask(window, "What is the opposite of hot?")
    window.wait_for("cold")
    # The second turn reuses the first one's KV, and the line says how much of the prompt that was.
    reused = re.search(r"KV (\d+)/(\d+) reused", window.wait_until(lambda text: re.search(r"ready .* KV [1-9]\d*/", text) is not None, "reused KV"))
    assert 0 < int(reused[1]) < int(reused[2])
    window.press("C-q")
    assert window.wait_exit() == 0


def test_escape_stops_the_answer_and_keeps_its_text(smollm2_gguf) -> None:
    with chat(smollm2_gguf, "--temp", "0", "--ignore-eos", columns=100, rows=32) as window:
        window.wait_for("ready")
        ask(window, "What is the capital of Japan?")
        window.wait_for("Tokyo")
        window.press("Escape")
        screen = window.wait_for("stopped")
        assert "Tokyo" in screen
        ask(window, "And of France?")                    # the engine is free at once
        window.wait_until(lambda text: "And of France?" in text and "stopped" in text, "the next answer")
        window.press("C-q")
        assert window.wait_exit() == 0


def test_pasted_lines_are_one_draft(window) -> None:
    """case 112"""
    window.paste("first line\n\tsecond line\nthird line\n")
    screen = window.wait_for("third line")
    assert all(line in screen for line in ("first line", "second line")) and "▌ first line" not in screen
    window.press("Enter")
    screen = window.wait_for("▌ third line")
    assert "▌ first line" in screen and screen.count("▌ first line") == 1


def test_text_that_looks_like_markup_is_shown_as_it_is(window) -> None:
    """case 109"""
    for text in ("[/", "[b +", "[/#888]", "[bold]x[/bold]"):
        ask(window, f"say {text}")
        window.wait_until(lambda screen, text=text: f"▌ say {text}" in screen and "○ ready" in screen, f"{text} and its answer")
    window.press("C-q")
    assert window.wait_exit() == 0


def test_resizing_keeps_the_conversation(window) -> None:
    ask(window, "What is the capital of Japan?")
    window.wait_for("Tokyo")
    for columns, rows in ((40, 16), (120, 40), (80, 24)):
        window.resize(columns, rows)
        window.wait_until(lambda text: "Tokyo" in text and "Ask something" in text and "○ ready" in text, "the conversation after resizing")
    ask(window, "What is the opposite of hot?")
    window.wait_for("cold")


@pytest.mark.parametrize("content", [None, b"", b"GGUF\x03\0\0\0"])
def test_a_model_that_cannot_be_opened_is_said_without_a_screen(tmp_path, content) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    with chat(path, columns=200) as window:
        assert window.wait_exit() in (1, 2)
        screen = window.screen().strip()
    assert screen.startswith("edgeinfer: ") and "model.gguf" in screen.replace("\n", "") and "Traceback" not in screen
