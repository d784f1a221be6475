"""Requests made up from the server's own OpenAPI document, right and wrong ones: none is the server's fault, and replies are what the document says."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance
from server_process import Server, serving

from edgeinfer.runtime.backends.fake import ScriptedBackend
from edgeinfer.runtime.server.openapi import document
from edgeinfer.runtime.service import Engine

schema = schemathesis.openapi.from_dict(document())


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Engine(ScriptedBackend([b"o", b"k"], n_ctx=256, max_slots=4))) as server:
        yield server


@schema.parametrize()
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_is_the_servers_fault(case: schemathesis.Case, server: Server) -> None:
    response = case.call(base_url=server.url, timeout=60)
    case.validate_response(response, checks=(not_a_server_error, content_type_conformance, response_schema_conformance))


def test_the_document_is_served_and_lists_every_address(server: Server) -> None:
    assert httpx.get(server.url + "/openapi.json").json() == document()
    routes = {route.path.replace(":path", "") for route in server.app.routes} - {"/openapi.json"}
    assert routes == set(document()["paths"])
