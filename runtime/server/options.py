"""What whoever starts the server decides."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass

from edgeinfer.errors import BadRequest

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server bound to ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class ServerOptions:
    """Where it listens, who may ask, and how much at once."""

    host: str = "127.0.0.1"
    port: int = 8080                     # 0: any that is free
    api_keys: tuple[str, ...] = ()       # any of these opens all but /health; none: no key is asked for
    allow_unauthenticated: bool = False  # beyond loopback without a key
    allowed_hosts: tuple[str, ...] = ()  # names in the Host header besides loopback's and the address bound to
    allowed_origins: tuple[str, ...] = ()   # web pages that may ask, "https://app.example"; besides the server's own
    lenient: bool = False                # what cannot be honoured becomes a warning in the answer instead of a refusal
    metrics: bool = True                 # /metrics
    max_body_bytes: int = 8 * 1024 * 1024
    max_headers: int = 100
    max_messages: int = 4096
    max_choices: int = 128               # prompts times n
    ping_seconds: float = 5.0            # a stream that has nothing to say sends a comment this often
    drain_seconds: float = 30.0          # running requests may take so long to finish when the server is told to stop
    access_log: str | None = None        # a file that gets one JSON line a request; "-" is standard output
    log_prompts: bool = False            # with the prompts in it

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and not self.api_keys and not self.allow_unauthenticated:
            raise BadRequest(
                f"--host {self.host} can be reached from other machines; give an --api-key, or --allow-unauthenticated if everybody who reaches it "
                "may use it."
            )
        if not 0 <= self.port <= 65535:
            raise BadRequest(f"--port must be from 0 to 65535, not {self.port}.")
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or key != key.strip():
                raise BadRequest("An API key must be printable ASCII without white space around it.")
        for origin in self.allowed_origins:
            scheme, separator, rest = origin.partition("://")
            if not separator or not scheme or not rest or "/" in rest or "*" in rest:
                raise BadRequest(f"--allow-origin takes an origin such as https://app.example, not {origin!r}.")
        if self.log_prompts and self.access_log is None:
            raise BadRequest("--log-prompts says what the access log holds; name one with --access-log.")
        for name, low in (("max_body_bytes", 1), ("max_headers", 1), ("max_messages", 1), ("max_choices", 1)):
            if getattr(self, name) < low:
                raise BadRequest(f"{name} must be at least {low}, not {getattr(self, name)}.")
        for name in ("ping_seconds", "drain_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0) or (name == "ping_seconds" and not value):
                raise BadRequest(f"{name} must be a number of seconds, not {value!r}.")
