"""What goes when a conversation is longer than the context: nothing silently, and never the system turn.

``error`` refuses. ``shift`` and ``truncate_middle`` drop; what they drop is counted and reported. All decisions about it are made here, as pure
functions: how a prompt is cut before it runs, and how much a running sequence forgets when it has filled the context.

A chat loses whole exchanges (a user message with all that follows it up to the next one), since a model makes little of half a message whose beginning
is gone. Only when the newest exchange alone is too long are tokens cut, and then inside the words of its last message, so that every turn marker stays.

Cuts come in steps. A client sends a growing conversation anew with every turn; if each turn dropped just what is over, every prompt would differ from
the last right behind the system turn, and all of it would be computed again. Dropping up to a quarter more leaves the place of the cut where it is for
several turns, whose prompts then continue what is cached.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from edgeinfer.errors import ContextLengthExceeded
from edgeinfer.models.chat_messages import normalise_messages
from edgeinfer.runtime.slots import common_prefix

SINKS = 4                                # the first tokens, which everything attends to (attention sinks): a model without them talks nonsense
_LEAST = 16                              # 1/16 of the context: the least that a shift frees, and that is kept of the newest
_ANSWER = 8                              # 1/8 of the context: the most that a cut prompt leaves free for its answer
_STEPS = 4                               # cuts are multiples of 1/4 of what may be cut

Message = Mapping[str, Any]
Encode = Callable[[list[Any]], list[int]]


@dataclass(frozen=True)
class Fit:
    """A prompt that fits, the number of leading tokens that no later shift may drop, and how many tokens were dropped to make it fit."""

    tokens: list[int]
    keep: int
    dropped: int


def fit_prompt(tokens: list[int], keep: int, room: int, policy: str, max_tokens: int | None = None) -> Fit:
    """``tokens`` as they are, or cut so that they fit ``room`` under ``policy`` (one of CONTEXT_POLICIES).

    keep: leading tokens that stay whatever happens, at least SINKS are.
    max_tokens: of the answer. "shift" and "truncate_middle" leave room for it, at most 1/8 of ``room``, and 1/8 when it is None.
    "shift" keeps the head and the newest tokens; "truncate_middle" the first half and the newest tokens.
    Raises `ContextLengthExceeded`: always under "error", otherwise when the head leaves less than 1/16 of ``room`` for the rest.
    """
    if policy == "error":
        if len(tokens) > room:
            raise ContextLengthExceeded(
                len(tokens), room, "Shorten the conversation, load the model with a larger --ctx-size, or let old turns go (--context-policy shift).",
            )
        return Fit(tokens, 0, 0)
    keep = max(keep, SINKS)
    limit = _limit(room, max_tokens)
    if len(tokens) <= limit:
        return Fit(tokens, keep, 0)
    if limit - keep < least_freed(room):
        raise ContextLengthExceeded(
            len(tokens), room,
            f"Its first {keep:,} tokens, the system message among them, are always kept, so too little can be dropped; "
            "shorten that message or load the model with a larger --ctx-size.",
        )
    head = max(keep, limit // 2) if policy == "truncate_middle" else keep
    dropped = _in_steps(len(tokens), limit, head)
    return Fit(tokens[:head] + tokens[head + dropped:], keep, dropped)


def fit_chat(encode: Encode, messages: Iterable[Message], room: int, policy: str, max_tokens: int | None = None) -> Fit:
    """The prompt of a chat, made to fit as `fit_prompt` does, but by dropping whole exchanges where that suffices.

    encode: the chat template and the tokenizer, messages to token ids. Called once for "error" and for what fits, else some log2(messages) times more.
    "shift" drops the oldest exchanges; "truncate_middle" those after the first, unless the first alone takes half of the room (a pasted document with
    questions about it): then tokens are cut, so that its beginning stays. The system turn and the last user message are never dropped; of a long chain
    of tool calls after the last user message, the oldest go.
    """
    chat = normalise_messages(messages)
    tokens = encode(chat)
    limit = _limit(room, max_tokens)
    if policy == "error" or (policy == "truncate_middle" and len(tokens) <= limit):
        return fit_prompt(tokens, 0, room, policy, max_tokens)
    keep = system_length(encode, chat, tokens)
    if len(tokens) <= limit:
        return fit_prompt(tokens, keep, room, policy, max_tokens)

    wanted = _in_steps(len(tokens), limit, max(keep, SINKS))
    rest, kept = chat, tokens
    for head, starts in _ways(encode, chat, limit, policy):
        if starts:
            rest, kept = _drop_turns(encode, chat, len(tokens), head, starts, wanted)
        if len(kept) <= limit:
            break
    keep = system_length(encode, rest, kept)
    if len(kept) > limit:
        # Only the last message is cut, where what precedes its words is short enough; else the system turn is all that stays for sure.
        start = _words_begin(encode, rest, kept)
        kept = fit_prompt(kept, start if start <= limit // 2 else keep, room, policy, max_tokens).tokens
    return Fit(kept, max(SINKS, keep), len(tokens) - len(kept))


def system_length(encode: Encode, messages: list[Any], tokens: list[int]) -> int:
    """How many leading ``tokens`` of an encoded chat say the system turn: BOS, the system message, tool definitions, a template's default prompt.

    Found by encoding the same system messages before another user message: what both begin with. So it holds for every template, also for those that
    put the system text into the first user turn, and it ends where the first user's words begin. (A template that puts it into the last user turn has it
    among the newest tokens.)
    """
    count = _system_count(messages)
    first = str(messages[count].get("content") or "") if count < len(messages) else ""
    return common_prefix(tokens, encode([*messages[:count], _other_user(first)]), len(tokens))


def plan_shift(held: int, keep: int, n_ctx: int) -> int:
    """Tokens to drop right after the first ``keep`` of the ``held`` ones of a running sequence that has filled its context; 0 when that cannot help.

    Half of what is not kept. Less than `least_freed` is not worth a shift: one would follow the other at every few tokens. The sequence then ends.
    """
    drop = (held - keep) // 2
    return drop if drop >= least_freed(n_ctx) else 0


def least_freed(n_ctx: int) -> int:
    """The least number of tokens that one shift frees."""
    return max(1, n_ctx // _LEAST)


def answer_limit(max_tokens: int | None, n_ctx: int, policy: str) -> int | None:
    """``max_tokens`` of the whole answer, across shifts. Where shifting takes away the end that a full context is, n_ctx tokens when none was given."""
    return n_ctx if max_tokens is None and policy == "shift" else max_tokens


# ---------------------------------------------------------------------------------------------------------------- internals


def _limit(room: int, max_tokens: int | None) -> int:
    """Tokens that a prompt may have so that its answer can begin."""
    free = room // _ANSWER
    # Nothing is computed from the last token of an answer, so that it needs no room.
    return room - (free if max_tokens is None else min(free, max(0, max_tokens - 1)))


def _in_steps(total: int, limit: int, head: int) -> int:
    """How many of ``total`` tokens to drop, with ``head`` of them kept, so that at most ``limit`` are left."""
    step = max(1, (limit - head) // _STEPS)
    return -(-(total - limit) // step) * step


def _system_count(chat: list[Any]) -> int:
    return next((n for n, message in enumerate(chat) if message["role"] not in ("system", "developer")), len(chat))


def _other_user(content: str) -> dict[str, str]:
    """A user message that differs from ``content`` in its first character."""
    return {"role": "user", "content": "B" if content.lstrip().startswith("A") else "A"}


def _words_begin(encode: Encode, chat: list[Any], tokens: list[int]) -> int:
    last = chat[-1]
    other = {**last, "content": _other_user(last["content"])["content"]}
    return common_prefix(tokens, encode([*chat[:-1], other]), len(tokens))


def _ways(encode: Encode, chat: list[Any], limit: int, policy: str) -> Iterable[tuple[list[Any], list[int]]]:
    """How turns may be dropped, best first: messages that stay in front, and the positions at which the rest may then begin."""
    count = _system_count(chat)
    users = [at for at, message in enumerate(chat) if at >= count and message["role"] == "user"]
    if not users:
        return
    head = count
    if policy == "truncate_middle" and len(users) > 1:
        head = users[1]
        if len(encode([*chat[:head], _other_user("")])) > limit // 2:
            return
    yield chat[:head], [at for at in users if at > head]
    last = users[-1]
    yield [*chat[:count], chat[last]], [at for at in range(last + 2, len(chat)) if chat[at]["role"] == "assistant"]


def _drop_turns(encode: Encode, chat: list[Any], total: int, head: list[Any], starts: list[int], wanted: int) -> tuple[list[Any], list[int]]:
    """The longest chat that drops ``wanted`` tokens, or else as many as can be, and its tokens."""

    @cache
    def encoded(start: int) -> list[int]:
        return encode([*head, *chat[start:]])

    at = bisect_left(starts, wanted, key=lambda start: total - len(encoded(start)))
    start = starts[min(at, len(starts) - 1)]
    return [*head, *chat[start:]], encoded(start)
