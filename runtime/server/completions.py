"""POST /v1/completions: raw prompts, their log-probabilities too. What lm-evaluation-harness talks to."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from edgeinfer.runtime.chat_format import encode_prompt
from edgeinfer.runtime.server.bodies import CompletionBody
from edgeinfer.runtime.server.body_reader import parse
from edgeinfer.runtime.server.chat_reply import progress_object
from edgeinfer.runtime.server.choices import Choices, usage_object
from edgeinfer.runtime.server.error_replies import bad_field
from edgeinfer.runtime.server.generation import open_choices, use_model
from edgeinfer.runtime.server.json_out import event, fields_of, json_response, json_text
from edgeinfer.runtime.server.logprobs import CompletionLogprobs
from edgeinfer.runtime.server.parameters import Judge, bounded_choices, constraint_of, judged, request_fields, sampling_params
from edgeinfer.runtime.server.sse import EventStream
from edgeinfer.runtime.service import Engine
from edgeinfer.runtime.stream import Stream
from edgeinfer.runtime.values import Finished, PrefillProgress, PromptLogprobs, TextDelta, TokenLogprob


async def completions(request: Request) -> ASGIApp:
    body = parse(request.state.body, CompletionBody)
    options = request.app.state.options
    served = await use_model(request, body.model, prompt=body.prompt)
    judge = Judge(lenient=options.lenient)
    judged(body, served.engine.info, judge)
    if body.echo and body.context_policy not in (None, "error"):
        raise bad_field("echo", "echo gives the prompt back, which context_policy may shorten; leave one of them out.")
    prompts = _prompts(body.prompt)
    n = body.n or 1
    bounded_choices(len(prompts) * n, options.max_choices)
    reply = CompletionReply(served.engine, served.name, body, prompts, judge.warnings)
    choices = await open_choices(request, reply.submit, n)
    if body.stream:
        return EventStream(reply.chunks(choices), ping_seconds=options.ping_seconds)
    return json_response(await reply.whole(choices))


def _prompts(prompt: Any) -> list[str | list[int]]:
    """The four shapes as one: a list of prompts, each text or token ids."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise bad_field("prompt", "prompt must hold at least one character or token.")
    return prompt


class CompletionReply:
    """The choices are numbered prompt by prompt: n for the first, n for the second."""

    def __init__(self, engine: Engine, model: str, body: CompletionBody, prompts: list[str | list[int]], warnings: list[str]):
        self._engine = engine
        self._body = body
        self._prompts = prompts
        self._warnings = warnings
        self._n = body.n or 1
        self._tokens: list[list[int]] = []
        self._echo: list[str] = []
        self._common = {
            "id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": model,
            "system_fingerprint": f"fp_{engine.info.fingerprint[:12]}",
        }

    def submit(self) -> Iterator[Stream]:
        """One stream for each choice, in a thread."""
        params = sampling_params(self._body)
        fields = request_fields(self._body)
        if (constraint := constraint_of(self._body, self._engine)) is not None:
            fields["constraint"] = constraint
        if self._body.echo and self._body.logprobs is not None:
            fields["prompt_logprobs"] = self._body.logprobs
            if params.max_tokens == 1:
                # Evaluation harnesses drop the entry of the one token after the text they score: it must be there even where that token ends the turn.
                params = replace(params, ignore_eos=True)
        for prompt in self._prompts:
            tokens = encode_prompt(self._engine.vocab, prompt) if isinstance(prompt, str) else prompt
            self._tokens.append(tokens)
            if self._body.echo:
                self._echo.append(prompt if isinstance(prompt, str) else self._engine.detokenize(prompt))
            for index in range(self._n):
                # The same seed for all would give the same answer n times.
                seeded = params if params.seed is None else replace(params, seed=params.seed + index)
                yield self._engine.generate(tokens, seeded, **fields)

    # ---------------------------------------------------------------------------------------------------------------- whole

    async def whole(self, choices: Choices) -> dict[str, Any]:
        count = len(choices.streams)
        texts = [[text] for text in self._echoes()]
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        logprobs: list[dict[str, list[Any]]] = [{name: [] for name in names} for _ in range(count)]
        writers = [CompletionLogprobs(self._engine) for _ in range(count)]
        ends: dict[int, Finished] = {}
        async for index, happened in choices.events():
            if isinstance(happened, TextDelta):
                texts[index].append(happened.text)
            elif isinstance(happened, Finished):
                ends[index] = happened
            for name, values in (self._logprobs(writers[index], index, happened) or {}).items():
                logprobs[index][name].extend(values)
        usages = [ends[index].usage for index in range(count)]
        answer: dict[str, Any] = {
            **self._common,
            "choices": [
                {
                    "index": index, "text": "".join(texts[index]), "finish_reason": ends[index].reason.value,
                    "logprobs": logprobs[index] if self._body.logprobs is not None else None, "seed": ends[index].usage.seed,
                }
                for index in range(count)
            ],
            "usage": usage_object(usages, prompts=len(self._prompts)), "timings": ends[0].timings.as_dict(),
        }
        if self._warnings:
            answer["warnings"] = self._warnings
        return answer

    def _echoes(self) -> list[str]:
        """What each choice's text begins with."""
        return [text for prompt in (self._echo or [""] * len(self._prompts)) for text in [prompt] * self._n]

    def _logprobs(self, writer: CompletionLogprobs, index: int, happened: object) -> dict[str, Any] | None:
        """What an event adds to the four lists."""
        if self._body.logprobs is None:
            return None
        if isinstance(happened, PromptLogprobs):
            return writer.of(self._tokens[index // self._n], happened.entries)
        if isinstance(happened, TextDelta) and happened.logprobs:
            entries: tuple[TokenLogprob, ...] = happened.logprobs
            return writer.of([entry.token for entry in entries], entries)
        return None

    # --------------------------------------------------------------------------------------------------------------- chunks

    async def chunks(self, choices: Choices) -> AsyncIterator[bytes]:
        usage = bool(self._body.stream_options and self._body.stream_options.include_usage)
        head = "{" + fields_of(self._common | ({"usage": None} if usage else {})) + ',"choices":['
        writers = [CompletionLogprobs(self._engine) for _ in choices.streams]
        began = False

        def chunk(index: int, text: str, logprobs: dict[str, Any] | None = None, finish: str | None = None, **extra: Any) -> bytes:
            choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
            tail = "," + fields_of(extra) if extra else ""
            return event(f"{head}{json_text(choice)}]{tail}}}")

        async for index, happened in choices.events():
            if not began:
                began = True
                for number, text in enumerate(self._echoes()):
                    if text or self._warnings:
                        yield chunk(number, text, **({"warnings": self._warnings} if self._warnings else {}))
            logprobs = self._logprobs(writers[index], index, happened)
            if isinstance(happened, TextDelta):
                if happened.text or logprobs:
                    extra = {"timings": choices.streams[index].timings.as_dict()} if self._body.timings_per_token else {}
                    yield chunk(index, happened.text, logprobs, **extra)
            elif isinstance(happened, PromptLogprobs) and logprobs:
                yield chunk(index, "", logprobs)
            elif isinstance(happened, PrefillProgress):
                if self._body.return_progress:
                    yield chunk(index, "", prompt_progress=progress_object(happened))
            elif isinstance(happened, Finished):
                yield chunk(index, "", None, happened.reason.value, timings=happened.timings.as_dict())
        if usage:
            total = usage_object(choices.usages, prompts=len(self._prompts))
            yield event(json_text({**self._common, "choices": [], "usage": total}))
