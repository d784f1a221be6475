"""POST /v1/chat/completions"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from starlette.requests import Request
from starlette.types import ASGIApp

from edgeinfer.runtime.answer_plan import AnswerPlan
from edgeinfer.runtime.server.bodies import ChatBody
from edgeinfer.runtime.server.body_reader import parse
from edgeinfer.runtime.server.chat_answers import plan_of
from edgeinfer.runtime.server.chat_reply import ChatReply
from edgeinfer.runtime.server.error_replies import bad_field
from edgeinfer.runtime.server.generation import open_choices, use_model
from edgeinfer.runtime.server.json_out import json_response
from edgeinfer.runtime.server.parameters import Judge, bounded_choices, judged, request_fields, sampling_params
from edgeinfer.runtime.server.sse import EventStream
from edgeinfer.runtime.service import Engine
from edgeinfer.runtime.stream import Stream


async def chat_completions(request: Request) -> ASGIApp:
    body = parse(request.state.body, ChatBody)
    options = request.app.state.options
    if len(body.messages) > options.max_messages:
        raise bad_field("messages", f"messages holds {len(body.messages):,} messages; this server takes at most {options.max_messages:,}.")
    n = bounded_choices(body.n or 1, options.max_choices)
    served = await use_model(request, body.model, prompt=body.messages)
    judge = Judge(lenient=options.lenient)
    judged(body, served.engine.info, judge)
    plans: list[AnswerPlan] = []

    def submit() -> Iterator[Stream]:
        plans.append(plan_of(served.engine, body, judge))
        return _streams(served.engine, body, plans[0], n)

    choices = await open_choices(request, submit, n)
    reply = ChatReply(served, body, plans[0], choices, judge.warnings)
    if body.stream:
        return EventStream(reply.chunks(), ping_seconds=options.ping_seconds)
    return json_response(await reply.whole())


def _streams(engine: Engine, body: ChatBody, plan: AnswerPlan, n: int) -> Iterator[Stream]:
    params = sampling_params(body)
    fields = request_fields(body) | plan.chat_fields
    for index in range(n):
        # The same seed for all would give the same answer n times.
        seeded = params if params.seed is None else replace(params, seed=params.seed + index)
        yield engine.chat(plan.messages, seeded, **fields)
