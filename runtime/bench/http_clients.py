"""The same clients against any OpenAI-compatible chat server."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from edgeinfer.errors import BadRequest, ServerFailed
from edgeinfer.runtime.bench import event_loop
from edgeinfer.runtime.bench.clients import WARM_UP, Count, Shot, drive
from edgeinfer.runtime.bench.scenarios import Message, Scenario, Turn
from edgeinfer.runtime.bench.values import ScenarioFigures
from edgeinfer.runtime.http_client import Address, HttpClient
from edgeinfer.runtime.remote_models import RemoteModel, error_text, find_model, refused


@dataclass(frozen=True)
class Target:
    """A chat server and one of its models."""

    address: Address
    api_key: str | None
    model: str
    engine: str = ""                     # what the server says of itself and of the model, where it does
    quantization: str = ""
    n_ctx: int = 0
    weight_bytes: int = 0
    counts_tokens: bool = True           # sends usage at the end of a stream; without, pieces of text are counted

    def client(self) -> HttpClient:
        return HttpClient(self.address, api_key=self.api_key)


def find(url: str, api_key: str | None, model: str | None) -> Target:
    """The server's model of that name, or its only one, after it has answered a first short request.

    Raises `ServerFailed` and `BadRequest`, so that whatever would make every request fail is said before anything is measured.
    """
    return event_loop.run(_find(Address.of(url), api_key, model))


async def _find(address: Address, api_key: str | None, name: str | None) -> Target:
    async with HttpClient(address, api_key=api_key) as client:
        found = await find_model(client, name)
        meta = found.meta
        target = Target(
            address, api_key, found.name, engine=_engine(found), quantization=_text(meta.get("quant") or meta.get("ftype")),
            n_ctx=_count(meta.get("n_ctx") or meta.get("max_model_len")), weight_bytes=_count(meta.get("size")),
        )
        shot = await _ask(client, found.name, list(WARM_UP), Turn("warm-up", (), 8), first=True)
    if shot.error:
        raise BadRequest(f"{address.url} answers a first request to {found.name} with an error: {shot.error}")
    return Target(**{**vars(target), "counts_tokens": shot.prompt_tokens > 0})


def run(target: Target, scenario: Scenario, progress: Count = lambda done, total: None) -> ScenarioFigures:
    """As `clients.run`, over HTTP. Each client keeps its connection."""
    async def work() -> ScenarioFigures:
        async with target.client() as client:
            return await drive(partial(_ask, client, target.model), scenario, progress)

    return event_loop.run(work())


async def _ask(client: HttpClient, model: str, messages: list[Message], turn: Turn, *, first: bool = False) -> Shot:
    """``first``: what concerns all requests, such as a wrong key, is raised."""
    body = {
        "model": model, "messages": messages, "max_tokens": turn.max_tokens, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }
    shot = Shot(turn.kind, sent=time.perf_counter())
    reader = _Reader(shot)
    try:
        async with client.request("POST", "/v1/chat/completions", body) as response:
            if response.status != 200:
                document = await response.json()
                if first:
                    refused(client.address.url, response.status, document, keyed=client.keyed)
                shot.error = f"HTTP {response.status}: {error_text(document)}"
                return shot
            async for data in response.events():
                reader.take(data, time.perf_counter())
    except ServerFailed as error:                        # a failed request is a finding, not the end of the measurement
        if first:
            raise
        shot.error = str(error)
        return shot
    reader.finish()
    return shot


class _Reader:
    """Fills a shot from the chunks of its stream."""

    def __init__(self, shot: Shot):
        self._shot = shot
        self._pieces: list[str] = []
        self._finished = False

    def take(self, data: str, now: float) -> None:
        shot = self._shot
        if data == "[DONE]":
            self._finished = True
            shot.ended = now
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            shot.error = shot.error or f"The server sent a chunk that is no JSON object: {data[:80]!r}."
            return
        if chunk.get("error"):
            shot.error = shot.error or error_text(chunk)
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            said = delta.get("content") or ""
            if said or delta.get("reasoning_content") or delta.get("reasoning"):
                shot.texts.append(now)
            self._pieces.append(said)
            self._finished = self._finished or bool(choice.get("finish_reason"))
        self._count(chunk)
        shot.ended = now

    def finish(self) -> None:
        shot = self._shot
        if not shot.error and not self._finished:
            shot.error = "The stream ended without a finish reason and without [DONE]."
        shot.answer = "".join(self._pieces)
        shot.output_tokens = shot.output_tokens or len(shot.texts)

    def _count(self, chunk: Mapping[str, Any]) -> None:
        shot = self._shot
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            shot.prompt_tokens, shot.output_tokens = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
            details = usage.get("prompt_tokens_details")
            if isinstance(details, dict):
                shot.cached_tokens = _count(details.get("cached_tokens"))
        timings = chunk.get("timings")                   # llama-server's
        if isinstance(timings, dict):
            shot.cached_tokens = shot.cached_tokens or _count(timings.get("cache_n"))


def _engine(found: RemoteModel) -> str:
    engine, device = _text(found.meta.get("engine")), _text(found.meta.get("device"))
    return found.owner + (f" ({engine} on {device})" if engine and device else "")


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
