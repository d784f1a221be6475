"""JSON on its way out."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

# Compact. NaN and infinities are a programming error, never sent. One encoder for all: of a string alone it only quotes.
json_text = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def json_bytes(value: Any) -> bytes:
    return json_text(value).encode("utf-8", "replace")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_bytes(value), status, headers, "application/json")


def event(text: str) -> bytes:
    """One server-sent event."""
    return f"data: {text}\n\n".encode("utf-8", "replace")


def fields_of(value: dict[str, Any]) -> str:
    """The fields of an object without its braces, to be put among others: ``"a":1,"b":2``."""
    return json_text(value)[1:-1]
