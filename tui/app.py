"""The chat application: keys and messages in, turns of a conversation out. It owns the engine from loading to closing."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import ClassVar, Protocol

from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Footer

from edgeinfer.errors import EdgeInferError
from edgeinfer.runtime.values import (
    BackendInfo, Event, Failed, Finished, FinishReason, PrefillProgress, SamplingParams, TextDelta, Timings, Usage,
)
from edgeinfer.tui import commands, themes
from edgeinfer.tui.feed import batches
from edgeinfer.tui.keys import distinguish_alt_enter
from edgeinfer.tui.messages import PromptSubmitted, ScrollRequested
from edgeinfer.tui.readings import Phase, Readings, cut_short, summary
from edgeinfer.tui.session import ChatSession, Turn, TurnState
from edgeinfer.tui.widgets.conversation import ConversationView
from edgeinfer.tui.widgets.message import AnswerMessage
from edgeinfer.tui.widgets.prompt import PromptEditor
from edgeinfer.tui.widgets.status import StatusLine, TitleLine

_READ_EVERY = 0.2     # seconds between two looks at the engine's instruments
_ARMED_FOR = 3.0      # seconds in which a second Ctrl+C quits


class ChatStream(Protocol):
    """What the application needs of a running request."""

    usage: Usage
    timings: Timings
    progress: PrefillProgress | None

    def aevents(self) -> AsyncIterator[Event]:
        """Asynchronous iterator of the events, the last of which is `Finished` or `Failed`."""
        ...

    def cancel(self) -> None:
        """End the request soon; a `Finished` with reason cancelled follows."""
        ...


class ChatEngine(Protocol):
    """What the application needs of an engine."""

    info: BackendInfo

    def chat(self, messages: list[dict[str, str]], params: SamplingParams | None = None, *, context_policy: str = "error") -> ChatStream:
        """Start an answer; `EdgeInferError` when the request is wrong."""
        ...

    def close(self) -> None:
        """Free everything. Repeating it is harmless."""
        ...


class ChatApp(App[None]):
    """A conversation with one model.

    ``loader`` is called in a thread once the screen is up and returns the engine. The first `EdgeInferError` it raises is kept in `load_error`, and
    the application ends.
    """

    CSS_PATH = "chat.tcss"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop"),
        Binding("ctrl+n", "new", "New chat", key_display="^N"),
        Binding("ctrl+q", "quit", "Quit", key_display="^Q", priority=True),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
    ]

    def __init__(
        self,
        loader: Callable[[], ChatEngine],
        *,
        title: str = "",
        params: SamplingParams | None = None,
        system_prompt: str | None = None,
        context_policy: str = "error",
        theme: str | None = None,
    ) -> None:
        super().__init__()
        distinguish_alt_enter()
        for known in (themes.DARK, themes.LIGHT):
            self.register_theme(known)
        self.theme = theme if theme in self.available_themes else themes.preferred(os.environ)
        self.session = ChatSession(system_prompt=system_prompt, params=params or SamplingParams(), context_policy=context_policy)
        self.load_error: EdgeInferError | None = None
        self._loader = loader
        self._model_name = title
        self._engine: ChatEngine | None = None
        self._stream: ChatStream | None = None
        self._max_tokens: int | None = None
        self.phase = Phase.LOADING
        """What the engine is doing for this conversation."""
        self._closing = False
        self._armed = False
        self._loading_since = time.monotonic()

    # ------------------------------------------------------------------------------------------------------------- screen

    def compose(self) -> ComposeResult:
        yield TitleLine()
        yield ConversationView()
        yield StatusLine()
        yield PromptEditor()
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(TitleLine).model = self._model_name or "edgeinfer"
        self.query_one(PromptEditor).focus()
        self._ticker = self.set_interval(_READ_EVERY, self._show_readings)
        self._load()

    @property
    def answering(self) -> bool:
        """Whether a request is running."""
        return self.phase not in (Phase.LOADING, Phase.IDLE)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._show_readings()
        # Idle, nothing moves: the instruments keep the last answer's figures and the timer rests.
        self._ticker.pause() if phase is Phase.IDLE else self._ticker.resume()
        self.refresh_bindings()

    def _show_readings(self) -> None:
        """Copy the engine's instruments to the screen. Reading them costs the engine nothing."""
        stream = self._stream
        usage, timings = (stream.usage, stream.timings) if stream else (Usage(), Timings())
        if stream is not None and self.phase in (Phase.WAITING, Phase.PREFILL, Phase.DECODE):
            self.phase = Phase.DECODE if timings.predicted_n else Phase.PREFILL if stream.progress else Phase.WAITING
        readings = Readings(
            phase=self.phase,
            loading_ms=1e3 * (time.monotonic() - self._loading_since) if self.phase is Phase.LOADING else 0.0,
            progress=stream.progress if stream else None,
            usage=usage,
            timings=timings,
            n_ctx=self._engine.info.n_ctx if self._engine else 0,
        )
        self.query_one(StatusLine).readings = readings
        self.query_one(TitleLine).context_used = readings.context_used

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Esc is greyed out while there is nothing to stop."""
        return (self.answering or None) if action == "stop" else True

    # ------------------------------------------------------------------------------------------------------------- engine

    @work
    async def _load(self) -> None:
        def load() -> ChatEngine:
            self._engine = engine = self._loader()
            # The screen may have been left meanwhile; whichever of the two comes last closes the engine.
            if self._closing:
                engine.close()
            return engine

        try:
            engine = await asyncio.to_thread(load)
        except EdgeInferError as error:
            self.load_error = error
            self.exit(return_code=error.exit_status)
            return
        info = engine.info
        title = self.query_one(TitleLine)
        title.info = info
        title.model = info.model or self._model_name
        self._enter(Phase.IDLE)
        for notice in info.notices:
            await self._view.add_notice(notice)

    def close_engine(self) -> None:
        """Cancel what runs and free the engine. Repeating it is harmless; blocks until the engine is closed."""
        self._closing = True
        if self._stream is not None:
            self._stream.cancel()
        if self._engine is not None:
            self._engine.close()

    async def on_unmount(self) -> None:
        await asyncio.to_thread(self.close_engine)

    @work
    async def _answer(self, engine: ChatEngine, turn: Turn) -> None:
        """Run the last turn of the session and show it as it comes."""
        answer = await self._view.add_answer()
        try:
            # In a thread: rendering and tokenising a long conversation takes a moment.
            messages, params, policy = self.session.messages(), self.session.params, self.session.context_policy
            self._max_tokens = params.max_tokens         # /set may change it before the answer ends
            self._stream = stream = await asyncio.to_thread(engine.chat, messages, params, context_policy=policy)
        except EdgeInferError as error:
            await self._fail(turn, answer, error, Usage(), Timings())
            return
        if self.phase is Phase.STOPPING:
            stream.cancel()
        async for batch in batches(stream.aevents()):
            await self._receive(turn, answer, batch)

    async def _receive(self, turn: Turn, answer: AnswerMessage, batch: Iterable[Event]) -> None:
        batch = list(batch)
        text = "".join(event.text for event in batch if isinstance(event, TextDelta))
        turn.answer += text
        answer.extend(text)
        match batch[-1]:
            case Finished(reason, usage, timings):
                self._finish(turn, answer, reason, usage, timings)
            case Failed(error, usage, timings):
                await self._fail(turn, answer, error, usage, timings)

    def _finish(self, turn: Turn, answer: AnswerMessage, reason: FinishReason, usage: Usage, timings: Timings) -> None:
        stopped = reason is FinishReason.CANCELLED
        turn.state = TurnState.STOPPED if stopped else TurnState.DONE
        words = [summary(usage, timings)]
        if stopped:
            words.insert(0, "stopped")
        elif reason is FinishReason.LENGTH:
            words.insert(0, cut_short(usage, self._max_tokens, self._engine.info.n_ctx if self._engine else 0))
        elif not turn.answer:
            words.insert(0, "the model gave an empty answer")
        answer.end(" · ".join(words))
        if stopped and not turn.answer:
            self._prompt.restore(turn.user)
        self._enter(Phase.IDLE)

    async def _fail(self, turn: Turn, answer: AnswerMessage, error: Exception, usage: Usage, timings: Timings) -> None:
        turn.state = TurnState.FAILED
        answer.end(f"failed · {summary(usage, timings)}" if turn.answer else "no answer")
        await self._view.add_notice(str(error), "error")
        self._prompt.restore(turn.user)
        self._enter(Phase.IDLE)

    # ---------------------------------------------------------------------------------------------------------- user's acts

    @property
    def _view(self) -> ConversationView:
        return self.query_one(ConversationView)

    @property
    def _prompt(self) -> PromptEditor:
        return self.query_one(PromptEditor)

    def _hint(self, text: str) -> None:
        self.notify(text, markup=False, timeout=_ARMED_FOR)

    async def on_prompt_submitted(self, message: PromptSubmitted) -> None:
        draft = message.text
        command = commands.split(draft)
        if command is not None:
            await self._command(draft, *command)
        elif self._engine is None or self.phase is Phase.LOADING:
            self._prompt.give_back(draft)
            self._hint("The model is still loading; the draft is kept.")
        elif self.answering:
            self._prompt.give_back(draft)
            self._hint("An answer is running; Esc stops it. The draft is kept.")
        else:
            # Line ends around a message are how it was pasted, not what it says.
            text = draft.strip("\n")
            self._prompt.remember(text)
            self._armed = False
            turn = self.session.ask(text)
            self._stream = None
            self._enter(Phase.WAITING)
            await self._view.add_user(text)
            self._answer(self._engine, turn)

    async def _command(self, draft: str, name: str, argument: str) -> None:
        context = commands.Context(self.session, self._engine.info if self._engine else None, tuple(sorted(self.available_themes)))
        outcome = commands.execute(context, name, argument)
        if outcome.failed:
            # The draft stays, so that a slip of the finger can be mended.
            self._prompt.give_back(draft)
            await self._view.add_notice(outcome.text, "error")
            return
        self._prompt.remember(draft.strip())
        if outcome.text:
            await self._view.add_notice(outcome.text)
        match outcome.action:
            case commands.Action.CLEAR:
                await self.action_new()
            case commands.Action.REGENERATE:
                await self._regenerate()
            case commands.Action.COPY:
                await self._copy_answer()
            case commands.Action.THEME:
                self.theme = outcome.argument
            case commands.Action.EXIT:
                self.exit()

    async def _regenerate(self) -> None:
        if self._engine is None or self.phase is not Phase.IDLE:
            self._hint("An answer is running; Esc stops it." if self.answering else "The model is still loading.")
            return
        turn = self.session.ask_again()
        if turn is None:
            await self._view.add_notice("There is no message to answer anew.", "error")
            return
        await self._view.drop_last_answer()
        self._stream = None
        self._enter(Phase.WAITING)
        self._answer(self._engine, turn)

    async def _copy_answer(self) -> None:
        answers = [turn.answer for turn in self.session.turns if turn.answer]
        if not answers:
            await self._view.add_notice("There is no answer to copy.", "error")
            return
        self.copy_to_clipboard(answers[-1])
        self._hint("The last answer is on the clipboard, if this terminal allows it.")

    async def action_new(self) -> None:
        """Forget the conversation; the draft, the system prompt and the sampling stay."""
        if self.answering:
            self._hint("An answer is running; Esc stops it.")
            return
        self.session.clear()
        self._stream = None
        await self._view.clear()
        self._show_readings()

    def action_stop(self) -> None:
        """Stop the answer; what it has said so far stays."""
        if not self.answering:
            return
        self._enter(Phase.STOPPING)
        if self._stream is not None:
            self._stream.cancel()

    def action_interrupt(self) -> None:
        """Ctrl+C: copy a selection, else stop the answer, and quit when pressed twice."""
        selected = self._prompt.selected_text or self.screen.get_selected_text()
        if self._armed:
            self.exit()
        elif selected:
            self.copy_to_clipboard(selected)
        else:
            if self.answering:
                self.action_stop()
            self._armed = True
            self.set_timer(_ARMED_FOR, self._disarm)
            self._hint("Ctrl+C once more quits.")

    def _disarm(self) -> None:
        self._armed = False

    def on_scroll_requested(self, message: ScrollRequested) -> None:
        self._view.scroll_pages(message.pages)
