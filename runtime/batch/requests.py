"""The input of a batch: OpenAI's lines, one JSON object each.

Only what is needed for order and bookkeeping stays in memory; a request's body is read again when its turn comes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from edgeinfer.errors import BadRequest

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
_SHOWN = 50                              # problems that are listed one by one
_PREFIX = 96                             # characters by which prompts are told to begin alike
_CHARS_PER_TOKEN = 4


@dataclass(frozen=True)
class BatchRequest:
    """One line. ``id`` follows from what the line says: an answer under it answers this line and no other."""

    custom_id: str
    id: str
    offset: int                          # in the file, bytes
    tokens: int                          # of prompt and answer, estimated
    opening: str                         # how its prompt begins


class RequestFile:
    """The input, open for reading bodies. Use it as a context manager."""

    def __init__(self, path: Path):
        """Raises `BadRequest` that lists every line that is no request, all at once."""
        self.path = path
        self._file: BinaryIO = path.open("rb")
        try:
            self.requests = tuple(self._checked())
        except BaseException:
            self._file.close()
            raise

    def body(self, request: BatchRequest) -> tuple[str, dict[str, Any]]:
        """URL and body of a request."""
        self._file.seek(request.offset)
        line = json.loads(self._file.readline())
        return line["url"], line["body"]

    def __enter__(self) -> RequestFile:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def _checked(self) -> Iterator[BatchRequest]:
        problems: list[str] = []
        lines: dict[str, int] = {}
        offset = 0
        for number, data in enumerate(self._file, 1):
            start, offset = offset, offset + len(data)
            if number == 1 and data.startswith(b"\xef\xbb\xbf"):
                start, data = 3, data[3:]
            if not data.strip():
                continue
            try:
                request = _request(data, start)
                first = lines.setdefault(request.custom_id, number)
                if first != number:
                    raise _Wrong(f"its custom_id {request.custom_id!r} is that of line {first}")
            except _Wrong as wrong:
                problems.append(f"line {number}: {wrong}")
            except RecursionError:
                problems.append(f"line {number}: it is nested too deeply")
            else:
                yield request
        if problems:
            more = [f"and {len(problems) - _SHOWN:,} more"] if len(problems) > _SHOWN else []
            lines_are = "1 line is no batch request" if len(problems) == 1 else f"{len(problems):,} lines are no batch requests"
            raise BadRequest("\n  - ".join([f"{self.path}: {lines_are}; nothing was asked.", *problems[:_SHOWN], *more]))
        if not lines:
            raise BadRequest(f"{self.path} has no requests in it.")


def ordered(requests: Iterable[BatchRequest]) -> list[BatchRequest]:
    """Long ones first, like beside like, and those of about one length by how they begin.

    What runs at the same time is then of about one length, so that the batch stays full until it is done; the short ones at the end leave no long
    tail; and prompts that begin alike come while their beginning is still in the cache.
    """
    return sorted(requests, key=lambda request: (-request.tokens.bit_length(), request.opening, -request.tokens, request.offset))


class _Wrong(Exception):
    """What is wrong with a line."""


def _request(data: bytes, offset: int) -> BatchRequest:
    try:
        line = json.loads(data, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise _Wrong(f"it is not UTF-8 ({error.reason} at byte {error.start})") from error
    except ValueError as error:
        raise _Wrong(f"it is not JSON ({error})") from error
    if not isinstance(line, dict):
        raise _Wrong("it is no JSON object")
    custom_id, method, url, body = (line.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise _Wrong("it has no custom_id" if custom_id is None else f"its custom_id {custom_id!r} is no text")
    if method != "POST":
        raise _Wrong("it has no method; it is POST" if method is None else f"its method is {method!r} instead of POST")
    if url not in URLS:
        raise _Wrong("it has no url" if url is None else f"its url is {url!r}; known are {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise _Wrong("it has no body" if body is None else "its body is no JSON object")
    if body.get("stream"):
        raise _Wrong("its body asks for a stream; leave stream out")
    texts = list(_texts(body.get("messages", body.get("prompt", body.get("input")))))
    answer = body.get("max_completion_tokens", body.get("max_tokens"))
    tokens = sum(map(len, texts)) // _CHARS_PER_TOKEN + (answer if isinstance(answer, int) and answer > 0 else 0)
    digest = hashlib.sha256(json.dumps([custom_id, url, body], sort_keys=True).encode()).hexdigest()
    return BatchRequest(custom_id, f"batch_req_{digest[:24]}", offset, tokens, "".join(texts[:8])[:_PREFIX])


def _texts(value: Any) -> Iterator[str]:
    """The texts of messages, a prompt or an input; a token id counts as one token."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts(value.get("content", value.get("text")))
    elif isinstance(value, list):
        if value and all(isinstance(each, int) for each in value):
            yield " " * (_CHARS_PER_TOKEN * len(value))
        else:
            for each in value:
                yield from _texts(each)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
