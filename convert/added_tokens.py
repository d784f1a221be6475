"""Added tokens: every one that any file of the folder names, with its id and its kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from edgeinfer.models.checkpoint import Checkpoint


@dataclass(frozen=True)
class AddedToken:
    """``special``: a control token, never shown. lstrip, rstrip: it swallows whitespace before or after it. ``source``: the file that names it."""

    id: int
    text: str
    special: bool
    lstrip: bool
    rstrip: bool
    single_word: bool
    source: str


def token_text(value: Any) -> str | None:
    """The text of a token that a config writes as a string or as an object with ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def named_token(checkpoint: Checkpoint, name: str) -> str | None:
    """The text of ``bos_token``, ``eos_token`` ... in tokenizer_config.json, else in special_tokens_map.json."""
    return token_text(checkpoint.tokenizer_config.get(name)) or token_text(checkpoint.special_tokens_map.get(name))


def special_texts(checkpoint: Checkpoint) -> set[str]:
    """Texts that the configs call special by giving them a role."""
    found = set()
    for settings in (checkpoint.tokenizer_config, checkpoint.special_tokens_map):
        for name, value in settings.items():
            more = name in ("additional_special_tokens", "extra_special_tokens")
            if not more and not (name.endswith("_token") and not name.startswith("add_")):
                continue
            values: Iterable[Any] = value.values() if more and isinstance(value, dict) else value if isinstance(value, list) else [value]
            found |= {text for text in map(token_text, values) if text}
    return found


def gather(checkpoint: Checkpoint, document: dict[str, Any] | None, problems: list[str]) -> dict[int, AddedToken]:
    """Added tokens by id. ``document`` is the parsed tokenizer.json, which wins over the other files about a token's kind.

    Contradictions go to ``problems``.
    """
    found: dict[int, AddedToken] = {}
    by_text: dict[str, AddedToken] = {}
    for token in _named(checkpoint, document, problems):
        other = found.get(token.id)
        same = by_text.get(token.text)
        if other is not None and other.text != token.text:
            problems.append(f"{other.source} says token {token.id} is {other.text!r}, and {token.source} says it is {token.text!r}.")
        elif same is not None and same.id != token.id:
            problems.append(f"{same.source} gives {token.text!r} the id {same.id}, and {token.source} gives it {token.id}.")
        elif other is None:
            found[token.id] = by_text[token.text] = token
    return dict(sorted(found.items()))


def _named(checkpoint: Checkpoint, document: dict[str, Any] | None, problems: list[str]) -> list[AddedToken]:
    tokens: list[AddedToken] = []

    def add(number: Any, entry: Any, source: str, *, special: bool = False) -> None:
        text = token_text(entry)
        identity = int(number) if isinstance(number, str) and number.isdecimal() else number
        if text is None or not isinstance(identity, int) or isinstance(identity, bool) or identity < 0:
            problems.append(f"{source} has an added token that makes no sense: {number!r}: {entry!r}.")
            return
        flags = entry if isinstance(entry, dict) else {"special": special}
        kinds = (bool(flags.get(name, False)) for name in ("special", "lstrip", "rstrip", "single_word"))
        tokens.append(AddedToken(identity, text, *kinds, source))

    for entry in (document or {}).get("added_tokens") or []:
        add(entry.get("id"), entry, "tokenizer.json")
    decoder = checkpoint.tokenizer_config.get("added_tokens_decoder") or {}
    for number, entry in decoder.items():
        add(number, entry, "tokenizer_config.json")
    roles = special_texts(checkpoint)
    for text, number in checkpoint.added_tokens.items():
        add(number, text, "added_tokens.json", special=text in roles)
    return tokens
