"""What a model server offers, and its refusals as one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeinfer.errors import BadRequest, ServerFailed
from edgeinfer.runtime.http_client import HttpClient


@dataclass(frozen=True)
class RemoteModel:
    name: str
    owner: str                           # "edgeinfer", "llamacpp", "vllm", ...
    meta: Mapping[str, Any]              # what else the server says of it; differs from server to server


async def find_model(client: HttpClient, name: str | None, *, any_of_them: bool = False) -> RemoteModel:
    """The model of that name, or the only one there is; with ``any_of_them``, the first of several, or one without a name.

    Raises `ServerFailed` (`ServerUnreachable`) and `BadRequest`. A name that the server does not list is let through: several servers know short
    names and aliases.
    """
    url = client.address.url
    async with client.request("GET", "/v1/models") as response:
        document = await response.json()
    if response.status != 200:
        if response.status == 404 and (any_of_them or name is not None):
            return RemoteModel(name or "", "", {})       # it does not list its models
        if response.status == 404:
            raise BadRequest(f"{url} has no list of models (HTTP 404 for /v1/models); name the model with --model-name, or correct the URL.")
        refused(url, response.status, document, keyed=client.keyed)
        raise ServerFailed(f"{url} does not list its models: HTTP {response.status}: {error_text(document)}")
    data = document.get("data") if isinstance(document, dict) else None
    if not isinstance(data, list):
        raise ServerFailed(f"{url} is no OpenAI-compatible server: its /v1/models is no list of models.")
    models = [_model(entry) for entry in data if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    if name is not None:
        return next((model for model in models if model.name == name), RemoteModel(name, models[0].owner if models else "", {}))
    if any_of_them:
        return models[0] if models else RemoteModel("", "", {})
    if not models:
        raise BadRequest(f"{url} offers no model; name one with --model-name.")
    if len(models) > 1:
        raise BadRequest(f"{url} offers several models; choose one with --model-name: {', '.join(model.name for model in models[:20])}.")
    return models[0]


def refused(url: str, status: int, document: Any, *, keyed: bool) -> None:
    """Raise for a status that concerns all requests: a key is missing or wrong, or the server is not ready."""
    if status in (401, 403):
        way_out = "it refuses the one given" if keyed else "give it with --api-key or EDGEINFER_API_KEY"
        raise BadRequest(f"{url} wants an API key (HTTP {status}); {way_out}.")
    if status == 503:
        raise ServerFailed(f"{url} is not ready (HTTP 503): {error_text(document)}")


def error_text(document: Any) -> str:
    """The message inside an error reply, on one line."""
    error = document.get("error", document) if isinstance(document, dict) else document
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:500] or "no message"


def _model(entry: Mapping[str, Any]) -> RemoteModel:
    meta = entry.get("meta")
    owner = entry.get("owned_by")
    return RemoteModel(entry["id"], owner if isinstance(owner, str) else "", {**entry, **(meta if isinstance(meta, dict) else {})})
