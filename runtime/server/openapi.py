"""The server's OpenAPI document, made from the bodies it checks requests with."""

from __future__ import annotations

import functools
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from edgeinfer.runtime.server.bodies import ApplyTemplateBody, ChatBody, CompletionBody, DetokenizeBody, EmbeddingsBody, TokenizeBody
from edgeinfer.runtime.server.json_out import json_response

_POSTS: dict[str, tuple[type[BaseModel], str, bool]] = {
    "/v1/chat/completions": (ChatBody, "Answer a conversation", True),
    "/v1/completions": (CompletionBody, "Continue a raw prompt", True),
    "/v1/embeddings": (EmbeddingsBody, "Texts to vectors", False),
    "/tokenize": (TokenizeBody, "Text to token ids", False),
    "/detokenize": (DetokenizeBody, "Token ids to text", False),
    "/apply-template": (ApplyTemplateBody, "What the chat template makes of a conversation", False),
}
_GETS = {
    "/v1/models": ("The models there are", "application/json"),
    "/v1/capabilities": ("What requests to the loaded models may ask for", "application/json"),
    "/health": ("Whether every engine makes progress", "application/json"),
    "/metrics": ("Prometheus metrics", "text/plain"),
}
_ERROR = {
    "type": "object", "required": ["error"],
    "properties": {"error": {
        "type": "object", "required": ["message", "type", "param", "code"],
        "properties": {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")},
    }},
}


@functools.cache
def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths: dict[str, Any] = {}
    for path, (body, summary, streams) in _POSTS.items():
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[body.__name__] = schema
        content = {"application/json": {"schema": {"type": "object"}}} | ({"text/event-stream": {"schema": {"type": "string"}}} if streams else {})
        paths[path] = {"post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}},
            "responses": {"200": {"description": "The answer", "content": content}, "default": _refused()},
        }}
    for path, (summary, kind) in _GETS.items():
        paths[path] = {"get": {"summary": summary, "responses": {"200": {"description": summary, "content": {kind: {}}}, "default": _refused()}}}
    paths["/v1/models/{name}"] = {"get": {
        "summary": "One model", "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
        "responses": {"200": {"description": "The model", "content": {"application/json": {}}}, "default": _refused()},
    }}
    return {
        "openapi": "3.1.0", "info": {"title": "edgeinfer", "version": version("edgeinfer")}, "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}, "security": [{}, {"key": []}],
    }


def _refused() -> dict[str, Any]:
    return {"description": "Refused, or failed", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}


async def openapi(_request: Request) -> Response:
    return json_response(document())
