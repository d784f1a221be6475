"""Who may ask at all: the Host and Origin headers, the key, and which web pages.

A page in a browser can reach a server on this machine. It cannot choose the Host header (a name that its owner points at 127.0.0.1 gives itself
away there), it cannot hide its Origin, and it cannot read a reply that does not allow its origin.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgeinfer.runtime.server.error_replies import Refusal, reply_to
from edgeinfer.runtime.server.options import LOOPBACK_NAMES, ServerOptions, is_loopback

_OPEN = frozenset({"/health"})
_METHODS = "GET, POST, OPTIONS"


class Security:
    """Middleware. Everything it refuses has run nothing and read no body."""

    def __init__(self, app: ASGIApp, options: ServerOptions):
        self.app = app
        self._max_headers = options.max_headers
        self._origins = frozenset(origin.lower() for origin in options.allowed_origins)
        self._keys = tuple(_digest(key) for key in options.api_keys)
        self._beyond_loopback = not is_loopback(options.host)
        names = {options.host, *options.allowed_hosts}
        if self._beyond_loopback:
            names.add(socket.gethostname())
        self._hosts = LOOPBACK_NAMES | frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            origin = self._checked_origin(scope)
            if origin is not None:                       # only now: a page that may not ask may not read why either
                send = _allowing(origin, send)
                if scope["method"] == "OPTIONS" and _header(scope, b"access-control-request-method"):
                    await Response(status_code=204, headers=_preflight(scope))(scope, receive, send)
                    return
            self._check_key(scope)
        except Refusal as refusal:
            await reply_to(refusal)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _checked_origin(self, scope: Scope) -> str | None:
        """The Origin when there is one, which is then allowed. Refuses others, unknown hosts, and too many headers."""
        if len(scope["headers"]) > self._max_headers:
            raise Refusal(431, f"The request has more than {self._max_headers} headers.", code="too_many_headers")
        host = _header(scope, b"host").lower()
        if not self._knows(_hostname(host)):
            raise Refusal(403, "The Host header names a host that this server does not answer for; --allowed-host adds one.", code="host_not_allowed")
        origin = _header(scope, b"origin")
        if not origin:
            return None
        if origin.lower() not in self._origins and origin.lower() != f"{scope.get('scheme', 'http')}://{host}":
            raise Refusal(403, "Web pages of this origin may not use this server; --allow-origin adds one.", code="origin_not_allowed")
        return origin

    def _knows(self, hostname: str) -> bool:
        if hostname in self._hosts:
            return True
        try:
            address = ipaddress.ip_address(hostname)
        except ValueError:
            return False
        # Nobody can point an address elsewhere, as one can a name.
        return address.is_loopback or self._beyond_loopback

    def _check_key(self, scope: Scope) -> None:
        if not self._keys or scope["path"] in _OPEN:
            return
        scheme, _, key = _header(scope, b"authorization").partition(" ")
        given = _digest(key.strip()) if scheme.lower() == "bearer" else b""
        # Digests of equal length, all of them compared: the time says nothing about how much of a key was right, nor which.
        if not sum(hmac.compare_digest(given, known) for known in self._keys):
            message = "This server asks for a key, in the header Authorization: Bearer KEY."
            raise Refusal(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _allowing(origin: str, send: Send) -> Send:
    """``send`` with the headers that let a page of ``origin`` read the reply."""
    readable = (b"access-control-expose-headers", b"X-Request-Id, Retry-After")
    headers = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin"), readable]

    async def allowing(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *headers]}
        await send(message)

    return allowing


def _preflight(scope: Scope) -> dict[str, str]:
    asked = _header(scope, b"access-control-request-headers")
    return {
        "Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": "600",
        "Access-Control-Allow-Headers": asked if asked.isascii() and asked.isprintable() else "Authorization, Content-Type",
    }


def _header(scope: Scope, name: bytes) -> str:
    return next((value for key, value in scope["headers"] if key == name), b"").decode("latin-1").strip()


def _hostname(host: str) -> str:
    """Without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8")).digest()
