"""How much work one rendering of a chat template may cost.

A template comes with a model file from anywhere, so it must end soon and in bounded memory whatever it says. The rule: nothing large is made in one
go (what would be is refused before it is made), everything made is counted, and the clock is looked at every few steps. Limits are far above what the
templates of real models need; they are no promise of a render time to the millisecond.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from string import Formatter
from typing import Any

from edgeinfer.errors import ChatTemplateError

MAX_STEPS = 1_000_000                     # loop turns, calls, filters and tests
MAX_CHARACTERS = 64_000_000               # all text and list entries made on the way, intermediate ones included
MAX_ENTRIES = 200_000                     # of one list or dictionary, nested ones counted through
MAX_CPU_SECONDS = 5.0                     # of the rendering thread, so a busy machine does not fail anyone
MAX_NUMBER = 10_000                       # a width, indent or count given to a filter that makes text longer
MAX_INTEGER_BITS = 4096
_STEPS_PER_CLOCK = 16


def refuse(what: str) -> ChatTemplateError:
    return ChatTemplateError(f"The model's chat template was stopped: it {what}. Use another template with --chat-template, or a raw prompt.")


class Budget:
    """Counts the work of one rendering. Every method raises `ChatTemplateError` when a limit is passed."""

    def __init__(self) -> None:
        self._steps = 0
        self._characters = 0
        self._next_look = _STEPS_PER_CLOCK
        self._deadline = time.thread_time() + MAX_CPU_SECONDS

    def step(self, characters: int = 0) -> None:
        """One turn of a loop, one call; ``characters`` is the fixed text it may print."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise refuse(f"took more than {MAX_STEPS:,} steps")
        if self._steps >= self._next_look:
            self._next_look = self._steps + _STEPS_PER_CLOCK
            self._look_at_clock()
        if characters:
            self.spend(characters)

    def _look_at_clock(self) -> None:
        if time.thread_time() > self._deadline:
            raise refuse(f"took more than {MAX_CPU_SECONDS:g} seconds")

    def spend(self, characters: int) -> None:
        """About to make this much text or this many list entries."""
        self._characters += characters
        if self._characters > MAX_CHARACTERS:
            raise refuse(f"made more than {MAX_CHARACTERS:,} characters")

    def made(self, value: Any) -> Any:
        """Count a value that an operation has just made; returns it."""
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, (list, tuple, dict, set, frozenset)):
            # Lists that share their entries are small in memory and huge when printed or compared: they count as printed.
            self.spend(len(value))
            self.weigh(value)
        return value

    def weigh(self, value: Any) -> int:
        """Characters and entries of ``value`` counted as printed, i.e. shared parts each time; refused above the limits."""
        characters, entries, todo = 0, 0, [value]
        while todo:
            item = todo.pop()
            if isinstance(item, str):
                characters += len(item)
            elif isinstance(item, Mapping):
                entries += len(item)
            elif isinstance(item, (list, tuple, set, frozenset)):
                entries += len(item)
            if characters > MAX_CHARACTERS or entries > MAX_ENTRIES:
                raise refuse(f"built a value of more than {MAX_ENTRIES:,} entries or {MAX_CHARACTERS:,} characters")
            if isinstance(item, Mapping):
                todo.extend(item.keys())
                todo.extend(item.values())
            elif isinstance(item, (list, tuple, set, frozenset)):
                todo.extend(item)
        # Templates that append to a list message by message weigh it each time; that is quadratic and still must pass, hence the discount.
        self._steps += entries // 16
        return characters + entries + 1

    def binary(self, operator: str, left: Any, right: Any) -> None:
        """Before ``left operator right``; the operators that can make something large are + * ** %."""
        self.step()
        if operator == "+":
            if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
                self.spend(len(left) + len(right))
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, (str, list, tuple)) and isinstance(times, int) and times > 0:
                    self.spend(self.weigh(value) * times)
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_INTEGER_BITS:
                raise refuse("computed with an absurdly large number")
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * max(0, right) > MAX_INTEGER_BITS:
                raise refuse("computed with an absurdly large number")
        elif isinstance(left, str):
            check_percent_format(left)

    def growth(self, value: Any, arguments: tuple[Any, ...]) -> None:
        """Refuse a number or text argument that multiplies ``value`` beyond the limit: widths, indents, separators, counts."""
        for argument in arguments:
            if isinstance(argument, int) and abs(argument) > MAX_NUMBER:
                raise refuse(f"asked for a width or count of {argument}")
            factor = len(argument) if isinstance(argument, str) else argument if isinstance(argument, int) else 0
            if factor > 1 and self.weigh(value) * factor > MAX_CHARACTERS:
                raise refuse(f"made more than {MAX_CHARACTERS:,} characters")


def check_percent_format(text: str) -> None:
    """Refuse "%1000000000d" and "%*d"."""
    if re.search(r"%[-+ #.0-9()]*(\d{5}|\*)", text):
        raise refuse("formatted text with an absurd width")


def check_brace_format(text: str) -> None:
    """Refuse "{:1000000000}" and widths that are arguments themselves."""
    try:
        specs = [spec for _, _, spec, _ in Formatter().parse(text) if spec]
    except ValueError:
        return                                              # format() itself will say what is wrong
    if any("{" in spec or re.search(r"\d{5}", spec) for spec in specs):
        raise refuse("formatted text with an absurd width")


def check_replace(text: str, old: str, new: str) -> None:
    """Refuse a replacement that multiplies the text beyond the limit."""
    # Counting costs as much as replacing, so it waits until the product could matter at all.
    if len(text) * len(new) > MAX_CHARACTERS and text.count(old) * len(new) > MAX_CHARACTERS:
        raise refuse(f"made more than {MAX_CHARACTERS:,} characters")
