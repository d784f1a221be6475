"""llama-server's helpers: /tokenize, /detokenize, /apply-template."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from edgeinfer.runtime.server.bodies import ApplyTemplateBody, DetokenizeBody, TokenizeBody
from edgeinfer.runtime.server.body_reader import parse
from edgeinfer.runtime.server.error_replies import bad_field
from edgeinfer.runtime.server.generation import use_model
from edgeinfer.runtime.server.json_out import json_response
from edgeinfer.runtime.service import Engine


async def tokenize(request: Request) -> ASGIApp:
    body = parse(request.state.body, TokenizeBody)
    engine = (await use_model(request, body.model, prompt=body.content)).engine
    tokens = await asyncio.to_thread(engine.tokenize, body.content, add_special=body.add_special, parse_special=body.parse_special)
    return json_response({"tokens": [_piece(engine, token) for token in tokens] if body.with_pieces else tokens})


def _piece(engine: Engine, token: int) -> dict[str, Any]:
    """llama-server's shape: the text, or the bytes where they are no text."""
    data = engine.token_bytes(token)
    try:
        return {"id": token, "piece": data.decode("utf-8")}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(data)}


async def detokenize(request: Request) -> ASGIApp:
    body = parse(request.state.body, DetokenizeBody)
    engine = (await use_model(request, body.model, prompt=body.tokens)).engine
    return json_response({"content": await asyncio.to_thread(engine.detokenize, body.tokens)})


async def apply_template(request: Request) -> ASGIApp:
    body = parse(request.state.body, ApplyTemplateBody)
    limit = request.app.state.options.max_messages
    if len(body.messages) > limit:
        raise bad_field("messages", f"messages holds {len(body.messages):,} messages; this server takes at most {limit:,}.")
    engine = (await use_model(request, body.model, prompt=body.messages)).engine
    text = await asyncio.to_thread(engine.render_chat, body.messages, body.tools, body.chat_template_kwargs)
    return json_response({"prompt": text})
