"""The chat's parts that need no screen: text, session, commands, coalescing, the words of the live line."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tui_engine import INFO

from edgeinfer.runtime.values import PrefillProgress, SamplingParams, Timings, Usage
from edgeinfer.tui import commands, themes
from edgeinfer.tui.commands import Action, Context
from edgeinfer.tui.feed import LONGEST_PAUSE, SHORTEST_PAUSE, batches, pause_after
from edgeinfer.tui.readings import Phase, Readings, activity, context_gauge, details, engine_parts, fit
from edgeinfer.tui.session import ChatSession, TurnState
from edgeinfer.tui.text import displayable, duration, normalise_newlines


@given(st.text())
def test_displayable_text_cannot_command_a_terminal_and_keeps_its_line_count_unambiguous(text):
    shown = displayable(text)
    assert not any(ord(c) < 0x20 and c not in "\n\t" or 0x7F <= ord(c) < 0xA0 or 0xD800 <= ord(c) < 0xE000 for c in shown)
    assert len(shown.splitlines()) == len(shown.removesuffix("\n").split("\n")) if shown else True
    assert len(shown) == len(text)


def test_escape_sequences_become_visible():
    assert displayable("\x1b[2Jhi\x07") == "␛[2Jhi␇"
    assert displayable("plain [/ text\n\ttab é 日本") == "plain [/ text\n\ttab é 日本"


def test_newlines_of_every_terminal_are_one():
    assert normalise_newlines("a\r\nb\rc\nd\r") == "a\nb\nc\nd\n"


@pytest.mark.parametrize("ms,text", [(0, "0 ms"), (85.4, "85 ms"), (1240, "1.24 s"), (45_000, "45.0 s"), (125_000, "2 min 05 s"), (999.9, "1.00 s")])
def test_durations(ms, text):
    assert duration(ms) == text


# ---------------------------------------------------------------------------------------------------------------- session


def test_the_request_alternates_whatever_became_of_earlier_turns():
    session = ChatSession(system_prompt="be brief")
    for user, answer, state in [
        ("a", "A", TurnState.DONE), ("b", "part", TurnState.STOPPED), ("c", "", TurnState.STOPPED), ("d", "half", TurnState.FAILED), ("e", "", TurnState.DONE),
    ]:
        turn = session.ask(user)
        turn.answer, turn.state = answer, state
    session.ask("last")
    assert [(m["role"], m["content"]) for m in session.messages()] == [
        ("system", "be brief"), ("user", "a"), ("assistant", "A"), ("user", "b"), ("assistant", "part"), ("user", "last"),
    ]


def test_asking_again_sends_the_same_request():
    session = ChatSession()
    turn = session.ask("q")
    before = session.messages()
    turn.answer, turn.state = "bad", TurnState.DONE
    again = session.ask_again()
    assert again is not turn and session.messages() == before and len(session.turns) == 1
    assert ChatSession().ask_again() is None


# --------------------------------------------------------------------------------------------------------------- commands


def run(text: str, session: ChatSession | None = None):
    return commands.execute(Context(session or ChatSession(), INFO, ("edgeinfer-dark", "edgeinfer-light")), *commands.split(text))


@pytest.mark.parametrize("text", ["hello", "/usr/bin/python fails", "/", "/ help", "/help\nme", "what does /help do?", "//x", "", "1/2"])
def test_only_one_line_that_starts_with_a_slash_and_a_name_is_a_command(text):
    assert commands.split(text) is None


def test_every_command_is_in_the_help_and_runs():
    text = run("/help").text
    for name in commands.COMMANDS:
        assert f"/{name}" in text
        assert not run(f"/{name}").failed
    assert "Ctrl+J" in text
    assert {run(f"/{name}").action for name in ("exit", "bye", "quit")} == {Action.EXIT}
    assert run("/clear").action is run("/new").action is Action.CLEAR


def test_an_unknown_command_is_one_clear_line():
    outcome = run("/frob now")
    assert outcome.failed and "/frob" in outcome.text and "/help" in outcome.text and "\n" not in outcome.text


@pytest.mark.parametrize("text,name,value", [
    ("/set temperature 0.2", "temperature", 0.2), ("/set temp=0", "temperature", 0.0), ("/set top_k 5", "top_k", 5), ("/set top-p 0.5", "top_p", 0.5),
    ("/set seed 42", "seed", 42), ("/set seed none", "seed", None), ("/set max_tokens 10", "max_tokens", 10), ("/set stop END", "stop", ("END",)),
    ("/set stop none", "stop", ()), ("/set ignore_eos on", "ignore_eos", True),
])
def test_set_changes_one_parameter(text, name, value):
    session = ChatSession()
    outcome = run(text, session)
    assert not outcome.failed and name in outcome.text
    assert session.params == SamplingParams.of(**{name: value})


@pytest.mark.parametrize("text", ["/set temperature warm", "/set temperature -1", "/set top_p 2", "/set frob 1", "/set top_k 1.5", "/set temperature", "/set temperature nan"])
def test_a_wrong_value_says_so_and_changes_nothing(text):
    session = ChatSession()
    outcome = run(text, session)
    assert outcome.failed and outcome.text and session.params == SamplingParams()


def test_system_prompt_is_set_shown_and_removed():
    session = ChatSession()
    run("/system You are a [/ pirate", session)
    assert session.system_prompt == "You are a [/ pirate"
    assert "pirate" in run("/system", session).text and "pirate" in run("/show", session).text
    run("/system off", session)
    assert session.system_prompt is None


def test_show_names_model_engine_and_settings():
    text = run("/show").text
    assert all(word in text for word in ("Scripted-1B", "Q4_K_M", "fake", "cpu", "4,096", "f16", "temperature", "0.8"))


def test_theme_takes_only_a_known_name():
    assert run("/theme edgeinfer-light").argument == "edgeinfer-light"
    assert run("/theme nope").failed and "edgeinfer-dark" in run("/theme").text
    assert themes.preferred({"COLORFGBG": "0;15"}) == themes.LIGHT.name and themes.preferred({}) == themes.DARK.name


# --------------------------------------------------------------------------------------------------------------- coalescing


def test_batches_lose_nothing_keep_the_order_and_are_few():
    async def collect(n):
        async def events():
            for i in range(n):
                yield i
                if i % 500 == 0:             # as a stream does when its queue has run empty
                    await asyncio.sleep(0.001)
        return [batch async for batch in batches(events())]

    got = asyncio.run(collect(5000))
    assert [event for batch in got for event in batch] == list(range(5000))
    assert all(got) and len(got) < 60


def test_the_source_is_not_read_while_the_screen_is_drawn():
    """The engine's thread wakes this loop only when somebody waits for its next token, so nobody may wait meanwhile."""
    async def scenario():
        taken = 0

        async def events():
            nonlocal taken
            while True:
                taken += 1
                yield taken
                await asyncio.sleep(0)

        source = batches(events())
        await anext(source)
        before = taken
        for _ in range(100):
            await asyncio.sleep(0)
        assert taken <= before + 1
        await source.aclose()

    asyncio.run(scenario())


def test_an_error_of_the_source_comes_after_what_it_gave():
    async def scenario():
        async def events():
            yield 1
            raise RuntimeError("source")

        got = []
        with pytest.raises(RuntimeError, match="source"):
            async for batch in batches(events()):
                got += batch
        return got

    assert asyncio.run(scenario()) == [1]


def test_dear_drawing_is_done_more_rarely_within_bounds():
    assert pause_after(0) == SHORTEST_PAUSE and pause_after(100) == LONGEST_PAUSE
    costs = [pause_after(c / 1000) for c in range(0, 100)]
    assert costs == sorted(costs) and costs[0] < costs[-1]


# --------------------------------------------------------------------------------------------------------------- the live line


def test_the_line_shows_the_engines_own_figures():
    usage = Usage(396, 380, 48, 7, None)
    timings = Timings(cache_n=380, prompt_n=16, prompt_ms=50, predicted_n=48, predicted_ms=1000, first_token_ms=212, last_second_per_second=38.24)
    line = " · ".join([activity(Readings(Phase.DECODE, usage=usage, timings=timings)), *details(Readings(Phase.DECODE, usage=usage, timings=timings))])
    assert line == "38.2 tok/s · 47.0 avg · first 212 ms · KV 380/396 reused · prompt 320 tok/s"
    assert len(line) + 2 <= 80 - 4 + 3        # in 80 columns all but the last figure always fit; this one fits but for the margin
    missed = Readings(Phase.DECODE, usage=Usage(396, 0, 1, 7, "no shared prefix"), timings=timings)
    assert any("no shared prefix" in part for part in details(missed))


def test_prefill_progress_counts_computed_tokens_only():
    readings = Readings(Phase.PREFILL, progress=PrefillProgress(done=600, total=1000, cached=100, elapsed_ms=1000))
    assert "600/1,000" in activity(readings) and "500 tok/s" in activity(readings)
    assert readings.context_used == 600


@given(st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=8), st.integers(1, 120))
def test_fitting_keeps_the_first_and_never_exceeds_the_width_after_it(parts, width):
    line = fit(parts, width, " · ")
    assert line.startswith(parts[0]) and len(line) <= max(width, len(parts[0]))


def test_gauge_and_title_name_what_runs():
    assert context_gauge(412, 2048) == "412/2,048 tokens 20%" and context_gauge(0, 0) == ""
    assert engine_parts(INFO) == ["Q4_K_M", "fake cpu", "kv f16"] and engine_parts(None) == []


def test_alt_enter_as_terminals_send_it_is_a_newline_key():
    from textual._xterm_parser import XTermParser

    from edgeinfer.tui.keys import distinguish_alt_enter

    distinguish_alt_enter()
    assert [event.key for event in XTermParser(False).feed("\x1b\r")] == ["ctrl+j"]
    assert [event.key for event in XTermParser(False).feed("\r")] == ["enter"]
