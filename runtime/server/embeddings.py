"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.types import ASGIApp

from edgeinfer.errors import BadRequest
from edgeinfer.runtime.embedding import Embeddings, unit
from edgeinfer.runtime.server.bodies import EmbeddingsBody
from edgeinfer.runtime.server.body_reader import parse
from edgeinfer.runtime.server.error_replies import Refusal, bad_field
from edgeinfer.runtime.server.generation import use_model
from edgeinfer.runtime.server.json_out import json_response
from edgeinfer.runtime.server.parameters import Judge

MAX_INPUTS = 2048                        # OpenAI's


async def embeddings(request: Request) -> ASGIApp:
    body = parse(request.state.body, EmbeddingsBody)
    inputs = _inputs(body.input)
    served = await use_model(request, body.model, prompt=body.input)
    judge = Judge(lenient=request.app.state.options.lenient)
    judge.unknown_fields(body)
    width = served.engine.info.n_embd
    if body.dimensions is not None and body.dimensions > width:
        raise bad_field("dimensions", f"dimensions is {body.dimensions:,}; this model's embeddings have {width:,}.")
    try:
        found = await served.engine.aembed(inputs)
    except BadRequest as error:
        raise Refusal(400, str(error), code=error.code, param="input") from None
    request.app.state.metrics.embedded(served.name, inputs=len(inputs), prompt_tokens=found.prompt_tokens)
    usage = {"prompt_tokens": found.prompt_tokens, "total_tokens": found.prompt_tokens}
    answer: dict[str, Any] = {"object": "list", "data": [], "model": served.name, "usage": usage}
    if judge.warnings:
        answer["warnings"] = judge.warnings
    # In a thread: a thousand vectors of a thousand numbers are a second's worth of JSON.
    return await asyncio.to_thread(lambda: json_response(answer | {"data": _data(found, body)}))


def _inputs(given: Any) -> list[str | list[int]]:
    """The four shapes as one: a list of inputs, each text or token ids."""
    inputs = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if len(inputs) > MAX_INPUTS:
        raise bad_field("input", f"input holds {len(inputs):,} inputs; this server takes at most {MAX_INPUTS:,} at once.")
    return inputs


def _data(found: Embeddings, body: EmbeddingsBody) -> list[dict[str, Any]]:
    vectors = found.vectors if body.dimensions is None else [unit(vector[: body.dimensions]) for vector in found.vectors]
    written = _base64 if body.encoding_format == "base64" else np.ndarray.tolist
    return [{"object": "embedding", "index": index, "embedding": written(vector)} for index, vector in enumerate(vectors)]


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
