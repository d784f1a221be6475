"""The ASGI application: which address does what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from edgeinfer.runtime.server.chat import chat_completions
from edgeinfer.runtime.server.completions import completions
from edgeinfer.runtime.server.embeddings import embeddings
from edgeinfer.runtime.server.endpoint import Endpoint
from edgeinfer.runtime.server.error_replies import Refusal, http_exception
from edgeinfer.runtime.server.openapi import openapi
from edgeinfer.runtime.server.options import ServerOptions
from edgeinfer.runtime.server.records import AccessLog, Records
from edgeinfer.runtime.server.security import Security
from edgeinfer.runtime.server.status_endpoints import capabilities, health, metrics, model, models
from edgeinfer.runtime.server.text_endpoints import apply_template, detokenize, tokenize

if TYPE_CHECKING:
    from edgeinfer.runtime.server.metrics import Metrics
    from edgeinfer.runtime.server.pool import ModelPool


def create_app(pool: ModelPool, metrics_of: Metrics, options: ServerOptions = ServerOptions()) -> Starlette:
    """The server over ``pool``, whose owner starts and closes it. Endpoints find their surroundings in ``app.state``: pool, metrics, options."""
    access_log = AccessLog(options.access_log) if options.access_log is not None else None
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", Endpoint(chat_completions, generates=True), methods=["POST"]),
            Route("/v1/completions", Endpoint(completions, generates=True), methods=["POST"]),
            Route("/v1/embeddings", Endpoint(embeddings, generates=True), methods=["POST"]),
            Route("/tokenize", Endpoint(tokenize), methods=["POST"]),
            Route("/detokenize", Endpoint(detokenize), methods=["POST"]),
            Route("/apply-template", Endpoint(apply_template), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/capabilities", capabilities),
            Route("/openapi.json", openapi),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        middleware=[Middleware(Records, access_log=access_log), Middleware(Security, options=options)],
        exception_handlers={HTTPException: http_exception, Refusal: http_exception},
    )
    app.router.redirect_slashes = False
    app.state.access_log = access_log
    app.state.pool = pool
    app.state.metrics = metrics_of
    app.state.options = options
    return app
