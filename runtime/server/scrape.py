"""Ask a server for its metrics over HTTP."""

from __future__ import annotations

import asyncio
import time

from edgeinfer.errors import BadRequest, ServerFailed, ServerUnreachable
from edgeinfer.runtime.http_client import HttpClient
from edgeinfer.runtime.readings import NEEDED, PREFIX, Sample, Snapshot
from edgeinfer.runtime.remote_models import refused
from edgeinfer.runtime.server.metrics import parse

PATIENCE_S = 5.0
MAX_BYTES = 16 * 1024 * 1024


async def scrape(client: HttpClient) -> Snapshot:
    """What the server's /metrics say now. Raises `ServerUnreachable`, `ServerFailed` (for another kind of server too) and `BadRequest` (no key)."""
    url = client.address.url
    try:
        async with asyncio.timeout(PATIENCE_S):
            status, body = await _get(client)
    except TimeoutError as error:
        raise ServerUnreachable(f"No answer from {url} within {PATIENCE_S:g} s.") from error
    refused(url, status, body.decode("utf-8", "replace"), keyed=client.keyed)
    if status == 404:
        raise BadRequest(f"{url} has no /metrics (HTTP 404); give the URL of an edgeinfer server that exports them.")
    if status != 200:
        raise ServerFailed(f"{url} does not give its metrics: HTTP {status}.")
    samples = _parsed(url, body)
    if not any(sample.name == f"{PREFIX}build_info" for sample in samples):
        raise ServerFailed(f"What {url} gives as /metrics is not edgeinfer's; give the URL of an edgeinfer server.")
    return Snapshot(time.monotonic(), tuple(samples))


async def _get(client: HttpClient) -> tuple[int, bytes]:
    async with client.request("GET", "/metrics") as response:
        body = bytearray()
        async for part in response.chunks():
            body += part
            if len(body) > MAX_BYTES:
                raise ServerFailed(f"The metrics of {client.address.url} are longer than {MAX_BYTES:,} bytes.")
        return response.status, bytes(body)


def _parsed(url: str, body: bytes) -> list[Sample]:
    try:
        # Most of an exposition is buckets of histograms that nobody here looks at, and parsing takes time from the models on this machine.
        return parse("".join(f"{line}\n" for line in body.decode().split("\n") if line.startswith(NEEDED)))
    except (UnicodeDecodeError, BadRequest) as error:
        raise ServerFailed(f"What {url} gives as /metrics is not in Prometheus' text format.") from error
