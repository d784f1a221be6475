"""The chat application, driven by keys, on a scripted engine and on the real service with the scripted backend."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from contextlib import asynccontextmanager

import pytest
from textual import events
from textual.widgets import Static
from tui_engine import Answer, ScriptedEngine, words

from edgeinfer.errors import BackendFailed, ContextLengthExceeded, ModelDamaged
from edgeinfer.runtime.backends.fake import ScriptedBackend
from edgeinfer.runtime.service import Engine
from edgeinfer.runtime.values import FinishReason, SamplingParams
from edgeinfer.tui.app import ChatApp
from edgeinfer.tui.readings import Phase
from edgeinfer.tui.session import TurnState
from edgeinfer.tui.widgets.conversation import ConversationView
from edgeinfer.tui.widgets.message import AnswerMessage, Notice, UserMessage
from edgeinfer.tui.widgets.prompt import PromptEditor
from edgeinfer.tui.widgets.status import StatusLine, TitleLine

MARKUP = ["[/", "[b +", "[/#888]", "[red]x[/red]", "[@click=quit]x[/]", "[[", "\\["]


class Chat:
    """The application with words for what tests do to it."""

    def __init__(self, app: ChatApp, pilot, engine):
        self.app, self.pilot, self.engine = app, pilot, engine
        self.prompt = app.query_one(PromptEditor)
        self.view = app.query_one(ConversationView)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the application work until the condition holds; a hang is the test runner's timeout."""
        while not condition():
            await asyncio.sleep(0.01)
        await self.pilot.pause()

    async def idle(self) -> None:
        await self.until(lambda: self.app.phase is Phase.IDLE)

    async def send(self, text: str) -> None:
        self.prompt.text = text
        await self.pilot.press("enter")

    async def ask(self, text: str) -> None:
        await self.send(text)
        await self.idle()

    def all(self, kind) -> list:
        return list(self.view.query(kind))

    @property
    def users(self) -> list[str]:
        return [message.text for message in self.all(UserMessage)]

    @property
    def answers(self) -> list[str]:
        return [answer.markdown.source for answer in self.all(AnswerMessage)]

    @property
    def footnotes(self) -> list[str]:
        return [str(answer.query_one(".footnote", Static).visual) for answer in self.all(AnswerMessage)]

    @property
    def notices(self) -> list[str]:
        return [str(notice.visual) for notice in self.all(Notice)]

    def screen(self) -> str:
        """The whole screen as text."""
        return "\n".join("".join(segment.text for segment in strip) for strip in self.app.screen._compositor.render_strips())

    @property
    def status(self) -> str:
        return str(self.app.query_one(StatusLine).render())


@asynccontextmanager
async def chat(*answers: Answer | str, engine=None, size=(80, 24), ready=True, **options):
    engine = engine or ScriptedEngine(*answers)
    app = ChatApp(lambda: engine, **options)
    async with app.run_test(size=size, notifications=True) as pilot:
        it = Chat(app, pilot, engine)
        if ready:
            await it.idle()
        yield it


def scenario(function):
    """Run an async test, with whatever parameters pytest gives it."""
    @functools.wraps(function)
    def test(*args, **kwargs):
        asyncio.run(function(*args, **kwargs))
    return test


# --------------------------------------------------------------------------------------------------------- a conversation


@scenario
async def test_two_turns_send_the_whole_conversation():
    async with chat("Tokyo is the **capital**.", "About 14 million.", system_prompt="be brief") as it:
        await it.ask("What is the capital of Japan?")
        await it.ask("How many people?")
        assert it.users == ["What is the capital of Japan?", "How many people?"]
        assert it.answers == ["Tokyo is the **capital**.", "About 14 million."]
        assert [[m["role"] for m in messages] for messages, _ in it.engine.requests] == [["system", "user"], ["system", "user", "assistant", "user"]]
        assert it.engine.requests[1][0][2]["content"] == "Tokyo is the **capital**."
        screen = it.screen()
        assert "Tokyo is the capital." in screen and "Scripted-1B" in screen and "Q4_K_M" in screen and "kv f16" in screen
        assert "tok/s" in it.footnotes[0] and "first token 180 ms" in it.footnotes[0]
    assert it.engine.closed


@scenario
async def test_the_live_line_follows_the_stream_and_keeps_the_last_figures():
    held = Answer(words("x" * 400), hold_at=50, cached=8, cache_miss="the last turn was edited")
    async with chat(held, size=(140, 30)) as it:
        await it.send("one two three four five six seven eight nine ten")
        await it.until(lambda: it.engine.streams and it.engine.streams[0].usage.completion_tokens == 50)
        await it.until(lambda: "40.0 tok/s" in it.status)
        assert "KV 8/14 reused (the last turn was edited)" in it.status and "first 180 ms" in it.status
        await it.until(lambda: it.app.query_one(TitleLine).context_used == 64)
        assert "64/4,096 tokens 2%" in str(it.app.query_one(TitleLine).render())
        held.release.set()
        await it.idle()
        assert it.status.startswith("○ ready") and "40.0 tok/s" in it.status


@scenario
async def test_sampling_and_system_commands_reach_the_next_request():
    async with chat("a", "b") as it:
        await it.send("/set temperature 0.25")
        await it.send("/system Talk like a pirate")
        await it.ask("hi")
        messages, params = it.engine.requests[0]
        assert params.temperature == 0.25 and messages[0] == {"role": "system", "content": "Talk like a pirate"}
        await it.ask("/nonsense")
        assert "/nonsense" in it.notices[-1] and it.prompt.text == "/nonsense" and len(it.engine.requests) == 1


@scenario
async def test_regen_replaces_the_answer_and_clear_forgets_the_conversation():
    async with chat("first", "second", "third") as it:
        await it.ask("/regen")
        assert "no message" in it.notices[-1]
        await it.ask("q")
        await it.ask("/regen")
        assert it.answers == ["second"] and it.users == ["q"]
        assert it.engine.requests[0][0] == it.engine.requests[1][0]
        await it.pilot.press("ctrl+n")
        assert not it.users and not it.answers and not it.notices
        await it.ask("new")
        assert len(it.engine.requests[2][0]) == 1


@scenario
async def test_every_command_works_on_the_screen():
    async with chat("an answer", "again") as it:
        await it.ask("q")
        for command in ("/help", "/show", "/set", "/copy", "/theme edgeinfer-light", "/regen", "/clear"):
            await it.ask(command)
        assert it.app.theme == "edgeinfer-light"
        await it.send("/bye")
        await it.until(lambda: not it.app.is_running)
    assert it.engine.closed


# ------------------------------------------------------------------------------------------------------------ markup (case 109)


@scenario
@pytest.mark.parametrize("text", [*MARKUP, " and ".join(MARKUP)])
async def test_markup_in_text_is_shown_as_it_is(text):  # case 109
    async with chat(f"{text} `{text}`\n\n| {text} | h |\n|---|---|\n| {text} | c |\n\n```{text}\n{text}\n```", "ok", size=(120, 40)) as it:
        await it.ask(f"please explain {text}")
        assert it.users == [f"please explain {text}"]
        screen = it.screen()
        assert screen.count(text) >= (4 if "\\" not in text else 2)
        await it.ask(f"/{text}")
        await it.ask(f"/system {text}")
        await it.ask("/system")
        assert text in it.notices[-1]


@scenario
@pytest.mark.parametrize("text", MARKUP)
async def test_markup_in_names_and_errors_is_shown_as_it_is(text):  # case 109
    async with chat(Answer(error=BackendFailed(f"bad {text} thing")), Answer(refuse=BackendFailed(f"no {text} way")), title=f"m {text}") as it:
        assert text not in it.notices
        it.app.query_one(TitleLine).model = f"model {text}"
        await it.ask("a")
        await it.ask("b")
        assert [text in notice for notice in it.notices] == [True, True]
        it.app._hint(f"hint {text}")
        await it.pilot.pause()
        assert all(toast.region.bottom <= it.prompt.region.y for toast in it.app.screen.query("Toast"))
        screen = it.screen()
        assert f"model {text}" in screen and f"no {text} way" in screen and f"hint {text}" in screen


@scenario
async def test_html_control_characters_and_odd_separators_survive_as_visible_text():
    text = "<div>html</div> <b>x</b> a\u2028b\x0cc \x1b[31mred\n\n<script>alert(1)</script>\n\nend"
    async with chat(text, size=(100, 40)) as it:
        await it.ask("\x1b[2J wipe")
        screen = it.screen()
        assert all(part in screen for part in ("<div>html</div>", "<b>x</b>", "<script>alert(1)</script>", "␛[31mred", "␛[2J wipe", "end"))
        assert "\x1b" not in screen and it.app.session.turns[0].answer == text


# -------------------------------------------------------------------------------------------------------- the editor (case 112)


@scenario
@pytest.mark.parametrize("key", ["ctrl+j", "shift+enter", "alt+enter"])
async def test_newline_keys_make_a_newline_and_enter_sends(key):
    async with chat("ok") as it:
        await it.pilot.press("a", key, "b")
        assert it.prompt.text == "a\nb" and not it.engine.requests
        await it.pilot.press("enter")
        await it.idle()
        assert it.users == ["a\nb"] and it.prompt.text == ""


@scenario
@pytest.mark.parametrize("pasted,draft", [
    ("one\ntwo\nthree", "one\ntwo\nthree"),
    ("one\r\ntwo\r\n\tthree\r\n", "one\ntwo\n\tthree\n"),
    ("one\rtwo\r", "one\ntwo\n"),
    ("\tdef f():\n\t\treturn [/ 1\n", "\tdef f():\n\t\treturn [/ 1\n"),
    ("\n".join(f"line {i}" for i in range(10_000)) + "\n", "\n".join(f"line {i}" for i in range(10_000)) + "\n"),
    ("/help\nme", "/help\nme"),
], ids=["3 lines", "crlf and trailing newline", "cr", "tabs", "10k lines", "slash"])
async def test_a_paste_of_any_size_is_one_draft_and_is_not_sent(pasted, draft):  # case 112
    async with chat("ok") as it:
        it.app.post_message(events.Paste(pasted))
        await it.until(lambda: it.prompt.text == draft)
        assert not it.engine.requests and it.prompt.size.height <= 10 and it.view.size.height > 5
        await it.pilot.press("enter")
        await it.idle()
        assert it.engine.requests[0][0][-1]["content"] == draft.strip("\n")
        assert it.users == [draft.strip("\n")] and len(it.engine.requests) == 1
        message = it.all(UserMessage)[0]
        assert message.size.height < 20         # a long one is folded
        await it.pilot.click(message)
        assert message.folded is False


@scenario
async def test_blank_drafts_are_not_sent():
    async with chat("ok") as it:
        for blank in ("", "   ", "\n\n"):
            await it.send(blank)
        assert not it.engine.requests and not it.users


@scenario
async def test_up_in_an_empty_draft_walks_back_and_down_returns():
    async with chat("1", "2", "3") as it:
        for text in ("first", "second\nline", "third"):
            await it.ask(text)
        seen = []
        for key in ("up", "up", "up", "up", "down", "down", "down"):
            await it.pilot.press(key)
            if not seen or seen[-1] != it.prompt.text:
                seen.append(it.prompt.text)
        assert seen[:3] == ["third", "second\nline", "first"]
        it.prompt.text = "typed"
        await it.pilot.press("up", "up")
        assert it.prompt.text == "typed"


@scenario
async def test_keys_that_arrive_in_one_burst_keep_their_order():
    """A fast typist or a script: nothing typed before Enter may miss the message, nothing typed after it may get lost."""
    async with chat("1", "2") as it:
        for character in "first":
            it.app.post_message(events.Key(character, character))
        it.app.post_message(events.Key("ctrl+j", "\n"))
        it.app.post_message(events.Paste("pasted"))
        it.app.post_message(events.Key("enter", "\r"))
        for character in "next":
            it.app.post_message(events.Key(character, character))
        await it.until(lambda: it.prompt.text == "next")
        await it.idle()
        assert it.users == ["first\npasted"]


# --------------------------------------------------------------------------------------------------------- stopping, failing


@scenario
async def test_escape_stops_keeps_the_text_and_the_next_message_works():
    async with chat(Answer(words("All of this stays. " * 40), hold_at=10), "next") as it:
        await it.send("go")
        await it.until(lambda: it.answers and it.answers[0])
        await it.pilot.press("escape")
        await it.idle()
        assert it.footnotes[0].startswith("stopped") and it.answers[0].startswith("All of this stays.")
        assert it.app.session.turns[0].state is TurnState.STOPPED
        await it.ask("more")
        assert [m["role"] for m in it.engine.requests[1][0]] == ["user", "assistant", "user"]
        assert it.engine.requests[1][0][1]["content"] == it.answers[0]


@scenario
async def test_stopping_before_the_first_token_gives_the_draft_back():
    async with chat(Answer(["x"], hold_at=0), "ok") as it:
        await it.send("think")
        await it.pilot.press("escape")
        await it.idle()
        assert it.prompt.text == "think" and it.footnotes[0].startswith("stopped")
        await it.pilot.press("enter")
        await it.idle()
        assert [m["role"] for m in it.engine.requests[1][0]] == ["user"]


@scenario
async def test_enter_during_an_answer_keeps_the_draft():
    held = Answer(words("long"), hold_at=0)
    async with chat(held, "ok") as it:
        await it.send("one")
        await it.send("two")
        assert it.prompt.text == "two" and len(it.engine.requests) == 1
        held.release.set()
        await it.idle()
        await it.pilot.press("enter")
        await it.idle()
        assert it.users == ["one", "two"]


@scenario
@pytest.mark.parametrize("answer,sentence,kept", [
    (Answer(refuse=ContextLengthExceeded(5000, 4096)), "5,000 tokens and the context holds 4,096", ""),
    (Answer(words("half an ans"), error=BackendFailed("llama_decode said 1; try again.")), "llama_decode said 1", "half an ans"),
])
async def test_a_failure_is_told_the_draft_kept_and_the_next_message_works(answer, sentence, kept):
    async with chat(answer, "fine") as it:
        await it.ask("my question")
        assert sentence in it.notices[-1] and it.prompt.text == "my question"
        assert it.answers == [kept] and it.users == ["my question"]
        await it.ask("another")
        assert it.answers[-1] == "fine" and [m["content"] for m in it.engine.requests[-1][0]] == ["another"]


@scenario
async def test_an_answer_cut_short_says_why():
    limited = SamplingParams(max_tokens=1)
    async with chat(Answer(["x"], reason=FinishReason.LENGTH), Answer([]), Answer(["x"], reason=FinishReason.LENGTH), params=limited) as it:
        await it.ask("a")
        await it.ask("b")
        await it.ask("/set max_tokens 100")
        await it.ask("c")
        assert "max_tokens" in it.footnotes[0] and "empty answer" in it.footnotes[1] and "the context is full" in it.footnotes[2]


# ----------------------------------------------------------------------------------------------------------- loading, leaving


@scenario
async def test_the_screen_is_up_while_the_model_loads_and_the_draft_is_kept():
    gate, engine = threading.Event(), ScriptedEngine("ok")

    def loader():
        gate.wait()
        return engine

    app = ChatApp(loader, title="slow-model")
    async with app.run_test(size=(80, 24)) as pilot:
        it = Chat(app, pilot, engine)
        try:
            await it.send("hello")
            assert "loading the model" in it.screen() and "slow-model" in it.screen()
            assert it.prompt.text == "hello"
        finally:
            gate.set()
        await it.idle()
        await it.pilot.press("enter")
        await it.idle()
        assert it.answers == ["ok"]
    assert engine.closed


@scenario
async def test_leaving_while_the_model_loads_closes_it_afterwards():
    gate, engine = threading.Event(), ScriptedEngine()

    def loader():
        gate.wait()
        return engine

    app = ChatApp(loader)
    async with app.run_test() as pilot:
        await pilot.press("ctrl+q")
    gate.set()
    while not engine.closed:
        await asyncio.sleep(0.01)


@scenario
async def test_a_failed_load_ends_the_chat_with_the_errors_status():
    def loader():
        raise ModelDamaged("model.gguf is incomplete: expected 10 bytes, has 5.")

    app = ChatApp(loader)
    async with app.run_test():
        while app.is_running:
            await asyncio.sleep(0.01)
    assert "incomplete" in str(app.load_error) and app.return_code == 1


@scenario
async def test_ctrl_c_cancels_an_answer_and_a_second_quits():
    async with chat(Answer(words("abc " * 100), hold_at=5)) as it:
        await it.send("go")
        await it.until(lambda: it.answers and it.answers[0])
        await it.pilot.press("ctrl+c")
        await it.idle()
        assert it.footnotes[0].startswith("stopped") and it.app.is_running
        await it.pilot.press("ctrl+c")
        await it.until(lambda: not it.app.is_running)
    assert it.engine.closed


@scenario
async def test_quitting_in_the_middle_of_an_answer_frees_the_engine():
    async with chat(Answer(words("abc " * 100), hold_at=5)) as it:
        await it.send("go")
        await it.until(lambda: it.answers and it.answers[0])
        await it.pilot.press("ctrl+q")
        await it.until(lambda: not it.app.is_running)
    assert it.engine.closed and it.engine.streams[0].cancelled.is_set()


# ------------------------------------------------------------------------------------------------ scrolling, resizing, speed


@scenario
async def test_the_view_follows_the_tail_only_while_the_reader_is_there():
    held = Answer([f"line {i}\n\n" for i in range(200)], hold_at=100)
    async with chat(held) as it:
        await it.send("go")
        await it.until(lambda: it.answers and "line 99" in it.answers[0])
        assert it.view.scroll_y == it.view.max_scroll_y > 0
        await it.pilot.press("pageup", "pageup")
        await it.pilot.pause()
        place = it.view.scroll_y
        assert place < it.view.max_scroll_y
        held.release.set()
        await it.idle()
        assert it.view.scroll_y == place and it.view.max_scroll_y > place + 50
        await it.pilot.press(*["pagedown"] * 30)
        assert it.view.scroll_y == it.view.max_scroll_y


@scenario
async def test_resizing_keeps_everything_usable():
    async with chat("word " * 60, "b") as it:
        await it.ask("a question")
        for width, height in ((40, 12), (20, 8), (200, 60), (80, 24)):
            await it.pilot.resize_terminal(width, height)
            await it.pilot.pause()
            assert it.prompt.size.width <= width and it.prompt.region.bottom <= height
        await it.ask("still there?")
        assert it.answers[-1] == "b"


def long_answer(tokens: int) -> list[str]:
    """About ``tokens`` pieces with code blocks, tables, lists and prose."""
    section = (
        "## Part {n}\n\nSome *prose* with `code` and [/ brackets, which goes on for a while.\n\n```python\n" + "def f(x):\n    return x + 1  # {n}\n" * 12
        + "```\n\n| a | b |\n|---|---|\n" + "| cell {n} | value |\n" * 12 + "\n- one\n- two\n  - nested\n\n"
    )
    text, n = "", 0
    while len(text) < 4 * tokens:
        n += 1
        text += section.replace("{n}", str(n))
    return words(text)[:tokens] + ["\n\nTHE END"]


@scenario
async def test_five_thousand_tokens_cost_few_updates_and_lose_nothing():  # case 111
    pieces = long_answer(5000)
    async with chat(Answer(pieces)) as it:
        await it.ask("go")
        answer = it.all(AnswerMessage)[0]
        assert answer.markdown.source == "".join(pieces)
        assert answer.markdown.updates < len(pieces) / 20
        assert "THE END" in it.screen()


# --------------------------------------------------------------------------------------------------- with the real service


@scenario
async def test_the_real_service_answers_reuses_the_kv_and_is_closed():
    engine = Engine(ScriptedBackend([bytes([c]) for c in b"hello [/ there"], n_ctx=512))
    async with chat(engine=engine, size=(140, 30)) as it:
        await it.ask("one")
        await it.ask("two")
        assert it.answers == ["hello [/ there"] * 2
        usage = it.app._stream.usage
        assert usage.cached_tokens > 0 and f"KV {usage.cached_tokens}/{usage.prompt_tokens} reused" in it.status
        await it.ask("x" * 600)
        assert "context holds 512" in it.notices[-1] and it.prompt.text == "x" * 600
        it.prompt.text = ""
        await it.ask("/clear")
        await it.ask("three")
        assert it.answers == ["hello [/ there"]
    assert engine.closed


@scenario
async def test_a_conversation_longer_than_the_context_goes_on_and_says_what_was_dropped():
    # case 69: trimming is opted in to, and reported
    engine = Engine(ScriptedBackend([b"fine"], n_ctx=256))
    async with chat(engine=engine, size=(140, 30), context_policy="shift", system_prompt="be brief") as it:
        for question in ("x" * 80, "y" * 80, "z" * 80):
            await it.ask(question)
        assert it.answers == ["fine"] * 3
        assert "dropped" not in it.footnotes[0] and "older tokens dropped" in it.footnotes[2]
        assert it.app.query_one(TitleLine).context_used <= 256
        await it.ask("/show")
        assert "the oldest turns are dropped" in it.notices[-1]


@scenario
async def test_escape_reaches_the_real_service():
    engine = Engine(ScriptedBackend(lambda tokens: ord("a"), n_ctx=100_000))
    async with chat(engine=engine) as it:
        await it.send("go")
        await it.until(lambda: it.answers and len(it.answers[0]) > 10)
        await it.pilot.press("escape")
        await it.idle()
        assert it.footnotes[0].startswith("stopped")
        assert it.answers[0] == it.app.session.turns[0].answer == it.app._stream.text_so_far
