"""Errors as OpenAI's API words them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import logging
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from edgeinfer.errors import (
    BackendFailed, BadRequest, Cancelled, ChatTemplateError, ContextLengthExceeded, EdgeInferError, EngineBusy, EngineClosed, ModelNotFound,
    OutOfMemory,
)
from edgeinfer.runtime.server.json_out import json_response

log = logging.getLogger("edgeinfer.server")

RETRY_SECONDS = 1                        # a slot is free again about as soon as somebody's answer ends

_STATUS: tuple[tuple[type[EdgeInferError], int], ...] = (
    (BadRequest, 400), (ModelNotFound, 404), (EngineBusy, 429), (EngineClosed, 503), (OutOfMemory, 503), (Cancelled, 503), (BackendFailed, 500),
)
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_PARAMS: tuple[tuple[type[EdgeInferError], str], ...] = (
    (ContextLengthExceeded, "messages"), (ChatTemplateError, "messages"), (ModelNotFound, "model"),
)


class Refusal(Exception):
    """A request that gets no answer: the status and everything the reply says."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers or {}

    def as_dict(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_field(param: str, message: str, *, code: str = "invalid_value") -> Refusal:
    """400, about one field."""
    return Refusal(400, message, code=code, param=param)


def refusal_of(error: Exception) -> Refusal:
    """The reply that an exception becomes. One that nobody planned becomes a 500 that says nothing of what happened: the log does."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, HTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        message = {
            404: "There is no such address here; /openapi.json lists those that there are.", 405: "This address does not take that method.",
        }.get(error.status_code, error.detail)
        return Refusal(error.status_code, message, code=code, headers=dict(error.headers or {}))
    if isinstance(error, EdgeInferError):
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
        param = next((param for kind, param in _PARAMS if isinstance(error, kind)), None)
        retry = {"Retry-After": str(RETRY_SECONDS)} if status in (429, 503) else {}
        return Refusal(status, str(error), code=error.code, param=param, headers=retry)
    log.error("A request failed unexpectedly.", exc_info=error)
    return Refusal(500, "The server failed on this request; its log says why.", code="internal_error")


def reply_to(error: Exception) -> Response:
    refusal = refusal_of(error)
    return json_response(refusal.as_dict(), refusal.status, refusal.headers)


async def http_exception(_request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405 in the common shape."""
    return reply_to(error)
