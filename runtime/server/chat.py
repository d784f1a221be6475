"""POST /v1/chat/completions"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from edgeinfer.runtime.server.bodies import ChatBody
from edgeinfer.runtime.server.body_reader import parse
from edgeinfer.runtime.server.choices import Choices, usage_object
from edgeinfer.runtime.server.error_replies import bad_field, json_bytes, json_response
from edgeinfer.runtime.server.generation import open_choices, use_model
from edgeinfer.runtime.server.logprobs import chat_entries
from edgeinfer.runtime.server.parameters import Judge, bounded_choices, constraint_of, judged, request_fields, sampling_params
from edgeinfer.runtime.server.sse import EventStream, json_text
from edgeinfer.runtime.service import Engine
from edgeinfer.runtime.stream import Stream
from edgeinfer.runtime.values import Finished, PrefillProgress, TextDelta, TokenLogprob


async def chat_completions(request: Request) -> ASGIApp:
    body = parse(request.state.body, ChatBody)
    options = request.app.state.options
    if len(body.messages) > options.max_messages:
        raise bad_field("messages", f"messages holds {len(body.messages):,} messages; this server takes at most {options.max_messages:,}.")
    served = await use_model(request, body.model, prompt=body.messages)
    judge = Judge(lenient=options.lenient)
    judged(body, served.engine.info, judge)
    count = bounded_choices(body.n or 1, options.max_choices)
    choices = await open_choices(request, partial(_submit, served.engine, body, count), count)
    reply = ChatReply(served.engine, served.name, body, choices, judge.warnings)
    if body.stream:
        return EventStream(reply.chunks(), ping_seconds=options.ping_seconds)
    return json_response(await reply.whole())


def _submit(engine: Engine, body: ChatBody, count: int) -> Iterator[Stream]:
    """One stream for each answer, in a thread."""
    params = sampling_params(body)
    fields = request_fields(body)
    if (constraint := constraint_of(body, engine)) is not None:
        fields["constraint"] = constraint
    for index in range(count):
        # The same seed for all would give the same answer n times.
        seeded = params if params.seed is None else replace(params, seed=params.seed + index)
        yield engine.chat(body.messages, seeded, tools=body.tools, template_kwargs=body.chat_template_kwargs, **fields)


class ChatReply:
    """What the streams of one request say, whole or in chunks."""

    def __init__(self, engine: Engine, model: str, body: ChatBody, choices: Choices, warnings: list[str]):
        self._engine = engine
        self._body = body
        self._choices = choices
        self._warnings = warnings
        self._logprobs = bool(body.logprobs)
        self._common = {
            "id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model, "system_fingerprint": f"fp_{engine.info.fingerprint[:12]}",
        }

    # ---------------------------------------------------------------------------------------------------------------- whole

    async def whole(self) -> dict[str, Any]:
        texts: list[list[str]] = [[] for _ in self._choices.streams]
        entries: list[list[TokenLogprob]] = [[] for _ in self._choices.streams]
        ends: dict[int, Finished] = {}
        async for index, event in self._choices.events():
            if isinstance(event, TextDelta):
                texts[index].append(event.text)
                entries[index].extend(event.logprobs)
            elif isinstance(event, Finished):
                ends[index] = event
        answer: dict[str, Any] = {
            **self._common, "object": "chat.completion",
            "choices": [
                {
                    "index": index, "message": {"role": "assistant", "content": "".join(text)}, "finish_reason": ends[index].reason.value,
                    "logprobs": {"content": chat_entries(self._engine, entries[index])} if self._logprobs else None, "seed": ends[index].usage.seed,
                }
                for index, text in enumerate(texts)
            ],
            "usage": usage_object([ends[index].usage for index in range(len(texts))]), "timings": ends[0].timings.as_dict(),
        }
        if self._warnings:
            answer["warnings"] = self._warnings
        return answer

    # --------------------------------------------------------------------------------------------------------------- chunks

    async def chunks(self) -> AsyncIterator[bytes]:
        """Role first, then what is said, one finish reason for each choice, the usage where it was asked for."""
        usage = bool(self._body.stream_options and self._body.stream_options.include_usage)
        common = {**self._common, "object": "chat.completion.chunk"}
        # Everything that is the same in all chunks is written once.
        head = "data: " + json.dumps(common | ({"usage": None} if usage else {}), ensure_ascii=False)[:-1] + ', "choices":[{"index":'
        began = False
        async for index, event in self._choices.events():
            if not began:
                began = True
                for number in range(len(self._choices.streams)):
                    extra = {"warnings": self._warnings} if self._warnings else {}
                    yield _chunk(head, number, '{"role":"assistant","content":""}', extra=extra)
            if isinstance(event, TextDelta):
                if event.text or event.logprobs:
                    logprobs = {"content": chat_entries(self._engine, event.logprobs)} if self._logprobs else None
                    extra = {"timings": self._choices.streams[index].timings.as_dict()} if self._body.timings_per_token else {}
                    yield _chunk(head, index, f'{{"content":{json_text(event.text)}}}', logprobs=logprobs, extra=extra)
            elif isinstance(event, PrefillProgress):
                if self._body.return_progress:
                    yield _chunk(head, index, "{}", extra={"prompt_progress": progress_object(event)})
            elif isinstance(event, Finished):
                yield _chunk(head, index, "{}", finish=event.reason.value, seed=event.usage.seed, extra={"timings": event.timings.as_dict()})
        if usage:
            yield b"data: " + json_bytes({**common, "choices": [], "usage": usage_object(self._choices.usages)}) + b"\n\n"


def progress_object(event: PrefillProgress) -> dict[str, Any]:
    """llama-server's ``prompt_progress``."""
    return {"total": event.total, "cache": event.cached, "processed": event.done, "time_ms": round(event.elapsed_ms, 3)}


def _chunk(
    head: str, index: int, delta: str, *, logprobs: dict[str, Any] | None = None, finish: str | None = None, seed: int | None = None,
    extra: dict[str, Any] | None = None,
) -> bytes:
    shown = "null" if logprobs is None else json.dumps(logprobs, ensure_ascii=False, allow_nan=False)
    end = "null" if finish is None else f'"{finish}"' + ("" if seed is None else f',"seed":{seed}')
    tail = "" if not extra else "," + json.dumps(extra, ensure_ascii=False, allow_nan=False)[1:-1]
    return f'{head}{index},"delta":{delta},"logprobs":{shown},"finish_reason":{end}}}]{tail}}}\n\n'.encode("utf-8", "replace")
