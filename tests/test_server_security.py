"""Who may use the server: hosts, origins, keys, bounds, and what the access log and replies tell."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress

import httpx
import openai
import pytest
from server_process import Server, serving

from edgeinfer.errors import BadRequest
from edgeinfer.runtime.backends.fake import ScriptedBackend
from edgeinfer.runtime.server.options import ServerOptions
from edgeinfer.runtime.service import Engine

CHAT = {"messages": [{"role": "user", "content": "my secret"}]}
EVIL = "https://evil.example"
APP = "https://app.example"


def engine() -> Engine:
    return Engine(ScriptedBackend([b"o", b"k"]))


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    with serving(engine()) as server:
        yield server


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    with serving(engine(), api_keys=("first-key", "second-key"), allowed_origins=(APP,), allowed_hosts=("box.local",)) as server:
        yield server


def code(response: httpx.Response) -> str:
    return response.json()["error"]["code"]


# ------------------------------------------------------------------------------------------------------------ hosts, origins


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", "", "192.168.1.5", "[::2]", "box.local", "a@localhost"])
@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/health")])
def test_another_host_is_refused(plain: Server, host: str, method: str, path: str) -> None:
    response = httpx.request(method, plain.url + path, headers={"Host": host}, json=CHAT if method == "POST" else None)
    assert response.status_code == 403 and code(response) == "host_not_allowed"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1234", "127.0.0.1", "127.0.0.1:80", "[::1]:8080", "127.0.0.2"])
def test_loopback_hosts_are_served(plain: Server, host: str) -> None:
    assert httpx.get(plain.url + "/health", headers={"Host": host}).status_code == 200


def test_a_host_that_was_allowed(guarded: Server) -> None:
    assert httpx.get(guarded.url + "/health", headers={"Host": "box.local:99"}).status_code == 200


@pytest.mark.parametrize("origin", [EVIL, "null", "http://localhost", "http://127.0.0.1:1", APP + ".evil.example", "https://app.example:444", "http://app.example"])
@pytest.mark.parametrize("server", ["plain", "guarded"])
def test_pages_of_other_origins_are_refused_and_told_nothing(request, server: str, origin: str) -> None:
    server = request.getfixturevalue(server)
    for method in ("POST", "GET", "OPTIONS"):
        response = httpx.request(
            method, server.v1 + "/models", headers={"Origin": origin, "Authorization": "Bearer first-key", "Access-Control-Request-Method": "POST"},
        )
        assert response.status_code == 403 and code(response) == "origin_not_allowed"
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_the_servers_own_pages_may_ask(plain: Server) -> None:
    assert httpx.get(plain.v1 + "/models", headers={"Origin": plain.url}).status_code == 200


def test_an_allowed_origin(guarded: Server) -> None:
    asked = {"Origin": APP, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    preflight = httpx.options(guarded.v1 + "/chat/completions", headers=asked)
    assert preflight.status_code == 204 and preflight.headers["access-control-allow-origin"] == APP
    assert "POST" in preflight.headers["access-control-allow-methods"] and "authorization" in preflight.headers["access-control-allow-headers"]
    response = httpx.post(guarded.v1 + "/chat/completions", headers={"Origin": APP, "Authorization": "Bearer first-key"}, json=CHAT)
    assert response.status_code == 200 and response.headers["access-control-allow-origin"] == APP and response.headers["vary"] == "Origin"
    streamed = httpx.post(guarded.v1 + "/chat/completions", headers={"Origin": APP, "Authorization": "Bearer first-key"}, json=CHAT | {"stream": True})
    assert streamed.headers["access-control-allow-origin"] == APP and "access-control-allow-credentials" not in streamed.headers


def test_an_allowed_page_may_read_why_it_is_refused(guarded: Server) -> None:
    response = httpx.get(guarded.v1 + "/models", headers={"Origin": APP})
    assert response.status_code == 401 and response.headers["access-control-allow-origin"] == APP


def test_a_request_without_an_origin_gets_no_cors_headers(plain: Server) -> None:
    assert not [name for name in httpx.get(plain.v1 + "/models").headers if name.startswith("access-control")]


# --------------------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize("given", [None, "", "first-key", "Bearer", "Bearer wrong", "Bearer first-keyx", "Bearer FIRST-KEY", "Basic first-key", "Bearer second-ke", "Bearer \xe9"])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/capabilities", "/metrics", "/openapi.json", "/nowhere", "/v1/chat/completions"])
def test_without_the_key_there_is_nothing(guarded: Server, given: str | None, path: str) -> None:
    response = httpx.get(guarded.url + path, headers={} if given is None else {"Authorization": given.encode("latin-1")})
    assert response.status_code == 401 and code(response) == "invalid_api_key" and response.headers["www-authenticate"] == "Bearer"


def test_health_needs_no_key(guarded: Server) -> None:
    assert httpx.get(guarded.url + "/health").json() == {"status": "ok"}


@pytest.mark.parametrize("key", ["first-key", "second-key"])
def test_each_key_opens(guarded: Server, key: str) -> None:
    assert openai.OpenAI(base_url=guarded.v1, api_key=key, max_retries=0).models.list().data[0].id == "scripted"


def test_the_openai_package_is_told_that_its_key_is_wrong(guarded: Server) -> None:
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=guarded.v1, api_key="wrong", max_retries=0).models.list()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "box.local", ""])
def test_beyond_loopback_needs_a_key_or_a_word(host: str) -> None:
    with pytest.raises(BadRequest, match="--api-key"):
        ServerOptions(host=host)
    assert ServerOptions(host=host, api_keys=("x",)) and ServerOptions(host=host, allow_unauthenticated=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_loopback_needs_none(host: str) -> None:
    assert ServerOptions(host=host)


@pytest.mark.parametrize("wrong", [
    {"port": 70000}, {"port": -1}, {"api_keys": ("",)}, {"api_keys": ("a b\n",)}, {"api_keys": ("ü",)}, {"allowed_origins": ("*",)}, {"allowed_origins": ("app.example",)},
    {"allowed_origins": ("https://app.example/path",)}, {"log_prompts": True}, {"max_body_bytes": 0}, {"ping_seconds": 0}, {"drain_seconds": -1}, {"drain_seconds": float("nan")},
])
def test_options_that_make_no_sense(wrong: dict) -> None:
    with pytest.raises(BadRequest):
        ServerOptions(**wrong)


# ------------------------------------------------------------------------------------------------------------------- bounds


def test_too_many_headers(plain: Server) -> None:
    response = httpx.get(plain.url + "/health", headers={f"x-{number}": "y" for number in range(150)})
    assert response.status_code == 431


def raw(server: Server, data: bytes) -> bytes:
    host, port = server.url.removeprefix("http://").split(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=60) as connection, suppress(ConnectionResetError, BrokenPipeError):
        connection.sendall(data)                         # what the server does not read any more comes back as a reset
        connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(65536):
            answer += part
    return answer


@pytest.mark.parametrize("data", [
    b"\r\n\r\n", b"GARBAGE\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"\x16\x03\x01\x02\x00" * 20,
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: -5\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 999999999999\r\n\r\n{}",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
])
def test_what_is_no_http_ends_the_connection_and_nothing_else(plain: Server, data: bytes) -> None:
    answer = raw(plain, data)
    assert not answer or answer.split(b" ")[1][:1] == b"4"
    assert httpx.get(plain.url + "/health").status_code == 200


# ----------------------------------------------------------------------------------------------------- ids and the access log


@pytest.mark.parametrize(("given", "kept"), [("abc-1.2_3", True), ("a" * 128, True), ("a" * 129, False), ("a b", False), ("<x>", False), ("", False), ("ü", False)])
def test_request_ids(plain: Server, given: str, kept: bool) -> None:
    response = httpx.get(plain.url + "/health", headers={"X-Request-Id": given.encode()})
    assert (response.headers["x-request-id"] == given) == kept and response.headers["x-request-id"]


@pytest.mark.parametrize("prompts", [False, True])
def test_the_access_log_has_one_line_a_request_and_no_prompts_unless_asked(tmp_path, prompts: bool) -> None:
    path = tmp_path / "access.jsonl"
    with serving(engine(), access_log=str(path), log_prompts=prompts) as server:
        httpx.get(server.url + "/health")
        httpx.post(server.v1 + "/chat/completions", json=CHAT, headers={"X-Request-Id": "mine"})
        httpx.post(server.v1 + "/chat/completions", json=CHAT | {"stream": True, "n": 2})
        httpx.post(server.v1 + "/completions", json={"prompt": "my secret", "temperature": 1e6})
        httpx.get(server.v1 + "/my%0Asecret")
    text = path.read_text()
    health, whole, streamed, refused, missing = map(json.loads, text.splitlines())
    assert health["path"] == "/health" and health["status"] == 200 and health["model"] == ""
    assert whole["request_id"] == "mine" and whole["model"] == "scripted" and whole["completion_tokens"] == 3 and whole["prompt_tokens"] > 0
    assert whole["ttft_ms"] > 0 and whole["duration_ms"] >= whole["ttft_ms"] and streamed["completion_tokens"] == 6
    assert refused["status"] == 400 and refused["completion_tokens"] == 0 and refused["ttft_ms"] is None and missing["status"] == 404
    assert all(line["time"] > 1e9 and line["client"] == "127.0.0.1" and line["request_id"] for line in (health, whole, streamed, refused, missing))
    assert (text.count("my secret") == 3) if prompts else ("my secret" not in text)
