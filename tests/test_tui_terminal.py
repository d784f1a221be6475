"""The chat in a real terminal: what the keys of a terminal do, and what its screen shows."""

from __future__ import annotations

import sys

import pytest
from terminal import Terminal

pytestmark = pytest.mark.skipif(Terminal.missing() is not None, reason=str(Terminal.missing()))

# Answers "short" with a word, anything longer for as long as the context lasts.
PROGRAM = """
import sys
from edgeinfer.errors import ModelDamaged
from edgeinfer.runtime.backends.fake import END, ScriptedBackend
from edgeinfer.runtime.service import Engine
from edgeinfer.tui import run_chat

ANSWER = b"It is *done* [/ so."

def next_token(tokens):
    text = bytes(t for t in tokens if t < 256)
    question, _, answer = text.rpartition(b"assistant\\n")
    if question.rpartition(b"user\\n")[2].startswith(b"long"):
        return ord("abcdefgh "[len(answer) % 9])
    return ANSWER[len(answer)] if len(answer) < len(ANSWER) else END

def loader():
    if "damaged" in sys.argv:
        raise ModelDamaged("m.gguf is incomplete: expected 10 bytes, has 5.")
    return Engine(ScriptedBackend(next_token, n_ctx=200_000))

sys.exit(run_chat(loader, title="scripted"))
"""


def chat(*arguments: str) -> Terminal:
    return Terminal([sys.executable, "-c", PROGRAM, *arguments])


def answered(terminal: Terminal) -> str:
    """The screen once the answer has ended. Until then a next message is kept as a draft, so its words alone are not enough to go on."""
    return terminal.wait_until(lambda screen: "It is done [/ so." in screen and "first token" in screen and "○ ready" in screen, "a whole answer")


def test_a_conversation_in_a_terminal():  # cases 109, 112
    with chat() as terminal:
        terminal.wait_for("ready")
        terminal.type("hello [/ and [b +")
        terminal.press("Enter")
        assert "hello [/ and [b +" in answered(terminal)

        terminal.press("C-n")
        terminal.wait_gone("It is done")
        terminal.type("one")
        terminal.press("C-j")
        terminal.type("two")
        terminal.press("M-Enter")
        terminal.type("three")
        screen = terminal.wait_for("three")
        assert [line.strip(" │") for line in screen.splitlines() if "│" in line] == ["one", "two", "three"]
        terminal.press("Enter")
        answered(terminal)

        terminal.press("C-n")
        terminal.wait_gone("It is done")
        terminal.paste("first pasted\n\tsecond pasted\r\nthird pasted\n")
        screen = terminal.wait_for("third pasted")
        assert "It is done" not in screen and "│ first pasted" in screen and "│     second pasted" in screen
        terminal.press("Enter")
        answered(terminal)

        terminal.type("long story")
        terminal.press("Enter")
        terminal.wait_for("abcdefgh abcdefgh")
        terminal.press("Escape")
        terminal.wait_for("stopped ·")
        terminal.resize(50, 16)
        terminal.wait_until(lambda screen: "╰" + "─" * 46 + "╯" in screen and "ready" in screen, "the smaller frame")
        terminal.resize(120, 40)
        terminal.wait_until(lambda screen: "╰" + "─" * 116 + "╯" in screen, "the larger frame")
        terminal.press("C-q")
        assert terminal.wait_exit() == 0


def test_ctrl_c_twice_quits():
    with chat() as terminal:
        terminal.wait_for("ready")
        terminal.type("long story")
        terminal.press("Enter")
        terminal.wait_for("abcdefgh abcdefgh")
        terminal.press("C-c")
        terminal.wait_for("stopped ·")
        terminal.press("C-c")
        assert terminal.wait_exit() == 0


def test_a_failed_load_leaves_its_sentence_on_the_normal_screen():
    with chat("damaged") as terminal:
        assert terminal.wait_exit() == 1
        assert "edgeinfer: m.gguf is incomplete: expected 10 bytes, has 5." in terminal.screen()
