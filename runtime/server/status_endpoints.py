"""What the server says about itself: /health, /metrics, /v1/models, /v1/capabilities."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from edgeinfer.runtime.answer_format import detect_format
from edgeinfer.runtime.server.bodies import ChatBody, CompletionBody
from edgeinfer.runtime.server.error_replies import Refusal
from edgeinfer.runtime.server.json_out import json_response
from edgeinfer.runtime.server.pool import ModelStatus, Served
from edgeinfer.runtime.values import MAX_LOGPROBS


async def health(request: Request) -> Response:
    """200 while every loaded engine makes progress, 503 with the reason otherwise. Needs no key, so it names no models."""
    for served in request.app.state.pool.loaded():
        state = served.engine.health
        if state.status not in ("ok", "closed"):         # closed: it is just being unloaded
            return json_response({"status": state.status, "reason": "An engine makes no progress; the server's log and /v1/models say more."}, 503)
    return json_response({"status": "ok"})


async def metrics(request: Request) -> Response:
    if not request.app.state.options.metrics:
        raise Refusal(404, "Metrics are switched off (--no-metrics).", code="not_found")
    # In a thread: some milliseconds a model, in which no answer would be sent on.
    body, kind = await asyncio.to_thread(request.app.state.metrics.render)
    return Response(body, media_type=None, headers={"content-type": kind})


async def models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_model(status) for status in request.app.state.pool.status()]})


async def model(request: Request) -> Response:
    name = request.path_params["name"]
    found = next((status for status in request.app.state.pool.status() if status.name == name), None)
    if found is None:
        raise Refusal(404, "There is no such model here; /v1/models lists those that there are.", code="model_not_found", param="model")
    return json_response(_model(found))


def _model(status: ModelStatus) -> dict[str, Any]:
    found: dict[str, Any] = {
        "id": status.name, "object": "model", "created": status.created, "owned_by": "edgeinfer", "state": status.state, "pinned": status.pinned,
    }
    if status.error:
        found["error"] = status.error
    if status.info is not None:
        info = status.info
        found["meta"] = {
            "name": info.model, "engine": info.engine, "device": info.device, "quant": info.quantization, "n_ctx": info.n_ctx,
            "n_ctx_train": info.n_ctx_train, "n_vocab": info.n_vocab, "size": info.weight_bytes, "max_slots": info.max_slots,
            "kv_type": info.kv_type, "adapters": list(info.adapters),
        }
    return found


async def capabilities(request: Request) -> Response:
    """Per loaded model, what a request may ask for."""
    options = request.app.state.options
    return json_response({
        "object": "list", "lenient": options.lenient,
        "limits": {
            "max_body_bytes": options.max_body_bytes, "max_messages": options.max_messages, "max_choices": options.max_choices,
            "max_logprobs": MAX_LOGPROBS,
        },
        "data": [_capabilities(served) for served in request.app.state.pool.loaded()],
    })


def _capabilities(served: Served) -> dict[str, Any]:
    info = served.engine.info
    format = detect_format(served.engine.chat_template_source)
    # An adapter can be named only where there is one; switches of thinking only where there is any thinking.
    absent = {"best_of", "suffix", *(() if info.adapters else ("lora",))}
    unthinking = set() if format.reasoning else {"thinking_budget", "reasoning_format"}
    return {
        "id": served.name, "engine": info.engine, "device": info.device, "n_ctx": info.n_ctx,
        "parameters": {
            "chat": sorted(set(ChatBody.model_fields) - absent - unthinking), "completions": sorted(set(CompletionBody.model_fields) - absent),
        },
        "context_policies": ["error", "truncate_middle", *(["shift"] if info.can_shift else [])],
        "lora": list(info.adapters),
        "chat": served.engine.chat_template_source is not None,
        "tools": {"format": format.tools.name, "in_template": format.renders_tools},
        "reasoning": {"tags": list(format.reasoning), "switches": sorted(format.switches)} if format.reasoning else None,
        "structured_output": ["json_object", "json_schema", "grammar", "regex", "lark"],
        "embeddings": info.can_embed,
    }
