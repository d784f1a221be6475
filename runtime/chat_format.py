"""Messages to token ids: the chat template's scaffolding as control tokens, everybody's words as text.

The danger is that a message spells a marker ("<|im_end|>") and ends its own turn. The rule: a marker counts only when the template wrote it. To tell
the two apart after rendering, every character of a message at which a marker could begin or end gets a mark beside it, a character that occurs
nowhere in the chat. Where the rendered text spells a marker across such a mark, the text is cut there; all marks vanish, and the pieces are tokenised
one by one. No token spans a cut, so no marker can form, however it was assembled: nested, glued from two messages, or finished by the template.

For SentencePiece vocabularies with a space prefix, llama.cpp puts that space before every piece, so a marker spelled in a message gets a space
after its first character. Only texts that spell a marker are touched, and a stray space is a small price there.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgeinfer.errors import BadRequest
from edgeinfer.models.chat_messages import MARKS, normalise_messages
from edgeinfer.runtime.backend import Vocab

if TYPE_CHECKING:
    from edgeinfer.models.chat_template import ChatTemplate


def encode_chat(vocab: Vocab, template: ChatTemplate, messages: Iterable[Mapping[str, Any]], /, **kwargs: Any) -> list[int]:
    """Token ids of a chat, ready for the model to answer.

    One BOS in front when the vocabulary wants one, whether or not the template prints it; otherwise the template alone decides. No EOS is added.
    Markers in messages and tool definitions stay text: all control markers, and those other added tokens that the template itself uses. In what the
    assistant said the latter ("<think>") keep their meaning, because templates split the text at them.
    kwargs: as for `ChatTemplate.render`, whose errors pass through.
    """
    markers = _markers(vocab.markers, vocab.user_markers, template.source)
    normal = normalise_messages(messages)
    mark = _unused_mark([normal, kwargs, template.source])
    marked = [_mark_message(message, markers, mark) for message in normal]
    kwargs = {name: _mark(value, markers, mark) for name, value in kwargs.items()}
    text, cuts = _cuts(template.render(marked, **kwargs), markers, mark)
    ids: list[int] = []
    for start, end in zip([0, *cuts], [*cuts, len(text)]):
        if start < end:
            ids += vocab.encode(text[start:end], add_special=False, parse_special=True, opening=start == 0)
    return with_bos(vocab, ids)


def encode_prompt(vocab: Vocab, text: str) -> list[int]:
    """Token ids of a raw prompt: markers in it mean what they say. One BOS in front when the vocabulary wants one, typed or not; no EOS."""
    return with_bos(vocab, vocab.encode(text, add_special=False, parse_special=True))


def with_bos(vocab: Vocab, ids: list[int]) -> list[int]:
    """``ids`` with exactly one BOS at the start, for vocabularies that add one; unchanged for others. BOS further on is the author's business."""
    if not vocab.adds_bos or vocab.bos_id is None:
        return ids
    start = next((at for at, token in enumerate(ids) if token != vocab.bos_id), len(ids))
    return [vocab.bos_id, *ids[start:]]


# ----------------------------------------------------------------------------------------------------------------- markers


@dataclass(frozen=True)
class _Markers:
    texts: frozenset[str]                 # all that must not form from a message
    lengths: tuple[int, ...]
    first: frozenset[str]                 # characters that begin one
    last: frozenset[str]                  # characters that end one
    anchors: re.Pattern[str]              # one character of `first` or `last`
    kept_or_anchors: re.Pattern[str]      # a whole added token that the template uses, or such a character


@functools.lru_cache(maxsize=8)
def _markers(control: tuple[str, ...], user: tuple[str, ...], source: str) -> _Markers:
    # White space among the added tokens (runs of newlines in Gemma) is ordinary text. A marker of one character cannot be cut.
    used = sorted((text for text in user if len(text) > 1 and text.strip(" \t\r\n▁") and text in source), key=len, reverse=True)
    texts = frozenset(text for text in control if len(text) > 1) | frozenset(used)
    first, last = frozenset(text[0] for text in texts), frozenset(text[-1] for text in texts)
    anchor = f"[{re.escape(''.join(sorted(first | last)))}]" if texts else "(?!)"
    return _Markers(
        texts=texts,
        lengths=tuple(sorted({len(text) for text in texts})),
        first=first,
        last=last,
        anchors=re.compile(anchor),
        kept_or_anchors=re.compile("|".join([*map(re.escape, used), anchor])),
    )


def _mark_message(message: Mapping[str, Any], markers: _Markers, mark: str) -> dict[str, Any]:
    pattern = markers.kept_or_anchors if message["role"] == "assistant" else markers.anchors
    marked = {key: value if key == "role" else _mark(value, markers, mark, pattern) for key, value in message.items()}
    return {**marked, "content": _mark_text(message["content"], markers, mark, pattern)}


def _mark(value: Any, markers: _Markers, mark: str, pattern: re.Pattern[str] | None = None) -> Any:
    """``value`` with the mark set in its strings, keys included; new containers, the given ones unchanged."""
    if isinstance(value, str):
        # Names that templates look up or compare ("arguments", "string", "high") stay whole even in vocabularies whose markers begin with a letter.
        return value if value.isidentifier() and value not in markers.texts else _mark_text(value, markers, mark, pattern or markers.anchors)
    if isinstance(value, Mapping):
        return {_mark(key, markers, mark, pattern): _mark(item, markers, mark, pattern) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mark(item, markers, mark, pattern) for item in value]
    return value


def _mark_text(text: str, markers: _Markers, mark: str, pattern: re.Pattern[str]) -> str:
    """The mark after every character that may begin a marker and before every one that may end it."""

    def marked(match: re.Match[str]) -> str:
        found = match[0]
        if len(found) > 1:
            return found
        return (mark if found in markers.last else "") + found + (mark if found in markers.first else "")

    return pattern.sub(marked, text)


def _cuts(marked: str, markers: _Markers, mark: str) -> tuple[str, list[int]]:
    """The rendered text without marks, and the positions where it must be cut."""
    parts = marked.split(mark)
    text, cuts, at = "".join(parts), [], 0
    for part in parts[:-1]:
        at += len(part)
        begins = at > 0 and any(text[at - 1:at - 1 + length] in markers.texts for length in markers.lengths)
        ends = any(at + 1 - length >= 0 and text[at + 1 - length:at + 1] in markers.texts for length in markers.lengths)
        if begins or ends:
            cuts.append(at)
    return text, cuts


def _unused_mark(chat: Any) -> str:
    used = _marks_in(chat)
    free = next((mark for mark in MARKS if mark not in used), None)
    if free is None:
        raise BadRequest(f"The messages use every character from U+{ord(MARKS[0]):X} to U+{ord(MARKS[-1]):X}; remove one of them.")
    return free


def _marks_in(value: Any) -> set[str]:
    if isinstance(value, str):
        return {mark for mark in MARKS if mark in value} if not value.isascii() else set()
    if isinstance(value, Mapping):
        return _marks_in([*value.keys(), *value.values()])
    if isinstance(value, (list, tuple)):
        return set().union(*map(_marks_in, value))
    return set()
