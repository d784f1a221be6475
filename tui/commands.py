"""Slash commands: a line such as ``/set temperature 0.2`` becomes an `Outcome`. Nothing here draws or computes.

A message that merely begins with a slash (a path, several lines) is no command: a command is one line of ``/name`` and an argument.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass, fields

from edgeinfer.errors import BadRequest
from edgeinfer.runtime.values import BackendInfo, SamplingParams
from edgeinfer.tui.session import ChatSession

_COMMAND = re.compile(r"/([A-Za-z?]+)(?:[ \t]+([^\n]*))?")


class Action(enum.Enum):
    """What the application has to do besides showing the text."""

    NOTHING = "nothing"
    CLEAR = "clear"
    REGENERATE = "regenerate"
    COPY = "copy"
    THEME = "theme"
    EXIT = "exit"


@dataclass(frozen=True)
class Outcome:
    """The answer to a command: a text to show and something to do."""

    text: str = ""
    action: Action = Action.NOTHING
    argument: str = ""
    failed: bool = False


@dataclass(frozen=True)
class Context:
    """What a command may read (and, for the session, change)."""

    session: ChatSession
    info: BackendInfo | None
    themes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """A name with what it does. ``usage`` follows the name in the help."""

    run: Callable[[Context, str], Outcome]
    usage: str
    help: str


def split(text: str) -> tuple[str, str] | None:
    """(name, argument) when ``text`` is written as a command, else None."""
    match = _COMMAND.fullmatch(text.strip())
    return (match[1].lower(), (match[2] or "").strip()) if match else None


def execute(context: Context, name: str, argument: str) -> Outcome:
    """Run a command. An unknown name or a wrong value is an outcome with ``failed`` set, never an exception."""
    command = COMMANDS.get(ALIASES.get(name, name))
    if command is None:
        return Outcome(f"There is no command /{name}; /help lists them.", failed=True)
    try:
        return command.run(context, argument)
    except BadRequest as error:
        return Outcome(str(error), failed=True)


def _help(_: Context, __: str) -> Outcome:
    names = {name: f"/{name} {command.usage}".rstrip() for name, command in COMMANDS.items()}
    width = max(map(len, names.values()))
    lines = [f"{names[name]:{width}}  {command.help}" for name, command in COMMANDS.items()]
    keys = (
        ("Enter", "send"),
        ("Ctrl+J, Alt+Enter, Shift+Enter", "new line (Shift+Enter only where the terminal reports it)"),
        ("Esc", "stop the answer and keep its text"),
        ("Up in an empty draft", "earlier messages"),
        ("PageUp, PageDown", "scroll the conversation"),
        ("Ctrl+N / Ctrl+Q", "new conversation / quit"),
    )
    width = max(len(key) for key, _ in keys)
    return Outcome("\n".join([*lines, "", *(f"{key:{width}}  {what}" for key, what in keys)]))


def _system(context: Context, argument: str) -> Outcome:
    session = context.session
    if not argument:
        return Outcome(f"System prompt: {session.system_prompt}" if session.system_prompt else "There is no system prompt; /system TEXT sets one.")
    if argument.lower() == "off":
        session.system_prompt = None
        return Outcome("System prompt removed.")
    session.system_prompt = argument
    return Outcome(f"System prompt set, from the next message on: {argument}")


def _set(context: Context, argument: str) -> Outcome:
    session = context.session
    if not argument:
        return Outcome(describe_params(session.params))
    name, _, written = argument.replace("=", " ", 1).partition(" ")
    name = _SHORT_NAMES.get(name.lower(), name.lower()).replace("-", "_")
    if name not in _SETTABLE:
        raise BadRequest(f"There is no sampling parameter {name!r}; /set lists them.")
    if not written.strip():
        raise BadRequest(f"/set {name} needs a value; it is {_written(getattr(session.params, name))}.")
    session.params = SamplingParams.of(session.params, **{name: _value(name, written.strip())})
    return Outcome(f"{name} = {_written(getattr(session.params, name))}")


_WHEN_FULL = {
    "error": "a message that does not fit is refused, and an answer ends (--context-policy error)",
    "shift": "the oldest turns are dropped, and an answer goes on (--context-policy shift)",
    "truncate_middle": "turns in the middle are dropped, and an answer ends (--context-policy truncate_middle)",
}


def _show(context: Context, _: str) -> Outcome:
    session, info = context.session, context.info
    lines = []
    if info is not None:
        lines += [
            f"model          {info.model}",
            f"quantisation   {info.quantization}, {info.weight_bytes / 1e6:,.0f} MB of weights",
            f"engine         {info.engine} on {info.device}" + (f", {info.layers_offloaded} of {info.layers} layers offloaded" if info.layers_offloaded else ""),
            f"context        {info.n_ctx:,} tokens (trained for {info.n_ctx_train:,})",
            f"KV cache       {info.kv_type}, {info.kv_bytes_per_token / 1024:,.1f} KiB a token",
        ]
        lines += [f"note           {notice}" for notice in info.notices]
    lines += [f"when full      {_WHEN_FULL[session.context_policy]}"]
    lines += [f"system prompt  {session.system_prompt or 'none'}", f"turns          {len(session.turns)}", "", describe_params(session.params)]
    return Outcome("\n".join(lines))


def _theme(context: Context, argument: str) -> Outcome:
    if argument in context.themes:
        return Outcome(action=Action.THEME, argument=argument)
    return Outcome(f"Themes: {', '.join(context.themes)}", failed=bool(argument))


COMMANDS: dict[str, Command] = {
    "help": Command(_help, "", "this list"),
    "clear": Command(lambda *_: Outcome(action=Action.CLEAR), "", "new conversation; system prompt and sampling stay"),
    "regen": Command(lambda *_: Outcome(action=Action.REGENERATE), "", "answer the last message anew"),
    "system": Command(_system, "[TEXT|off]", "show, set or remove the system prompt"),
    "set": Command(_set, "[NAME VALUE]", "show or change sampling, e.g. /set temperature 0.2"),
    "show": Command(_show, "", "model, engine, context and settings"),
    "copy": Command(lambda *_: Outcome(action=Action.COPY), "", "copy the last answer to the clipboard"),
    "theme": Command(_theme, "[NAME]", "list the colour themes or take one"),
    "exit": Command(lambda *_: Outcome(action=Action.EXIT), "", "quit (also /bye)"),
}
ALIASES = {"bye": "exit", "quit": "exit", "new": "clear", "regenerate": "regen", "?": "help"}

_SETTABLE = tuple(f.name for f in fields(SamplingParams) if f.name != "logit_bias")
_SHORT_NAMES = {"temp": "temperature", "n": "max_tokens", "predict": "max_tokens"}
_WHOLE = {"top_k", "repeat_last_n", "seed", "max_tokens"}


def _value(name: str, written: str) -> object:
    """The Python value of what was typed; `BadRequest` when it is none."""
    if name in ("seed", "max_tokens") and written.lower() in ("none", "off", "-1"):
        return None
    if name == "stop":
        return () if written.lower() in ("none", "off") else (written.replace("\\n", "\n"),)
    if name == "ignore_eos":
        if written.lower() not in ("on", "off", "true", "false"):
            raise BadRequest(f"ignore_eos is on or off, not {written!r}.")
        return written.lower() in ("on", "true")
    try:
        return int(written) if name in _WHOLE else float(written)
    except ValueError:
        raise BadRequest(f"{name} must be a {'whole ' if name in _WHOLE else ''}number, not {written!r}.") from None


def _written(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return ", ".join(map(repr, value)) or "none"
    return "none" if value is None else str(value)


def describe_params(params: SamplingParams) -> str:
    """Name and value of every sampling parameter, one a line."""
    width = max(map(len, _SETTABLE)) + 2
    return "\n".join(f"{name:{width}}{_written(getattr(params, name))}" for name in _SETTABLE)
