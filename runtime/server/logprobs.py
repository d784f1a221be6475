"""Log-probabilities as the two endpoints write them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from edgeinfer.runtime.service import Engine
from edgeinfer.runtime.values import TokenLogprob

_LOWEST = -9999.0                        # what OpenAI's API sends for a probability of zero: JSON has no infinity


def chat_entries(engine: Engine, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """``logprobs.content`` of a chat: ``[{"token", "logprob", "bytes", "top_logprobs"}]``."""
    return [
        {**_token(engine, entry.token, entry.logprob), "top_logprobs": [_token(engine, token, logprob) for token, logprob in entry.top]}
        for entry in entries
    ]


def _token(engine: Engine, token: int, logprob: float) -> dict[str, Any]:
    data = engine.token_bytes(token)
    return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, _LOWEST), "bytes": list(data)}


class CompletionLogprobs:
    """The older shape: four parallel lists, with the offset in the text at which each token begins. Fed in the order of the text."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def of(self, tokens: Sequence[int], entries: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """The lists for the next tokens; an entry of None (the first token of a prompt) has no probability."""
        names, offsets = [], []
        for token in tokens:
            data = self._engine.token_bytes(token)
            names.append(_name(data))
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(data))
        return {
            "tokens": names,
            "token_logprobs": [None if entry is None else max(entry.logprob, _LOWEST) for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        # The chosen token is always among them. Where two tokens read the same, the likelier counts.
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            top.setdefault(_name(self._engine.token_bytes(token)), max(logprob, _LOWEST))
        return top


def _name(data: bytes) -> str:
    """A token that is no text of its own is written byte by byte, so that different ones stay different."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
