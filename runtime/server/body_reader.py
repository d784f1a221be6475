"""The bytes of a request as a checked value. Whatever is wrong with them is a 400 that says where."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from edgeinfer.runtime.server.error_replies import Refusal, bad_field

MAX_DEPTH = 100                          # of containers within containers
_INT_LIMIT = 2**63

Body = TypeVar("Body", bound=BaseModel)


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body. Refuses what is not JSON by its type, or longer than ``limit`` bytes. Raises `ClientDisconnect`."""
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        raise Refusal(415, "The body must be JSON, with Content-Type: application/json.", code="unsupported_media_type")
    if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"", b"identity"):
        raise Refusal(415, "The body must not be compressed.", code="unsupported_media_type")
    too_long = Refusal(413, f"The body is longer than the {limit:,} bytes this server takes (--max-body).", code="body_too_large")
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and (len(declared) > 15 or int(declared) > limit):
        raise too_long
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise too_long
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def parse(data: bytes, kind: type[Body]) -> Body:
    """The body as an instance of ``kind``."""
    value = loads(data)
    if not isinstance(value, dict):
        raise Refusal(400, f"The body must be a JSON object, not {_name(value)}.", code="invalid_json")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _refusal(error) from None


def loads(data: bytes) -> Any:
    """JSON within bounds: finite numbers, whole ones of 64 bits, no halves of surrogate pairs, containers at most `MAX_DEPTH` deep."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refusal(400, f"The body is not UTF-8: {error.reason} at byte {error.start}.", code="invalid_json") from None
    try:
        value = json.loads(text, parse_constant=_not_a_number, parse_float=_finite, parse_int=_bounded)
        _check_depth(value, text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if text.strip() else "the body is empty"
        raise Refusal(400, f"The body is not JSON: {error.msg} ({where}).", code="invalid_json") from None
    except RecursionError:
        raise Refusal(400, f"The body nests deeper than {MAX_DEPTH} levels.", code="invalid_json") from None
    if re.search(r"\\u[dD][89a-fA-F]", text):
        _check_surrogates(value)
    return value


def _not_a_number(name: str) -> NoReturn:
    raise Refusal(400, f"The body holds {name}, which JSON does not have.", code="invalid_json")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise Refusal(400, "The body holds a number that is too large.", code="invalid_json")
    return value


def _bounded(digits: str) -> int:
    # Before int(): the time it takes grows with the square of the length.
    if len(digits) > 20 or not -_INT_LIMIT <= (value := int(digits)) < _INT_LIMIT:
        raise Refusal(400, "The body holds a whole number of more than 64 bits.", code="invalid_json")
    return value


def _check_depth(value: Any, text: str) -> None:
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer) if isinstance(inner, (dict, list))]
        if not level:
            return
    raise RecursionError


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Refusal(400, "The body holds half a surrogate pair (\\ud800 to \\udfff), which is no character.", code="invalid_json") from None


def _refusal(error: ValidationError) -> Refusal:
    """The first complaint, without the value: it is somebody's text, and may be long."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    # Of a union, pydantic names the branch too ("prompt.list[int].0"); the field and the indices are what the caller knows.
    path = [part for part in first["loc"] if isinstance(part, int) or re.fullmatch(r"[a-z_]+", part)]
    where = ".".join(map(str, path)) or "body"
    if first["type"] == "missing":
        return bad_field(where, f"{where} is missing.", code="missing_required_parameter")
    message = str(first["msg"]).removeprefix("Value error, ")
    return bad_field(str(path[0]) if path else "body", f"{where}: {message[:1].lower()}{message[1:]}.".replace("..", "."))


def _name(value: Any) -> str:
    if value is None:
        return "null"
    return {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}[type(value)]
