"""The HTTP client that `bench --url` and `batch --url` use, against servers of every kind of manners."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_server import HANG_UP, events, raw_server, whole

from edgeinfer.errors import BadRequest, ServerFailed, ServerUnreachable
from edgeinfer.runtime.http_client import Address, HttpClient


def asked(url: str, *requests: tuple, key: str | None = None, timeout_s: float = 20.0, stream: bool = False) -> list:
    """What the requests gave, one after the other over one client: (status, JSON), or the list of events."""
    async def work() -> list:
        found = []
        async with HttpClient(Address.of(url), api_key=key, timeout_s=timeout_s) as client:
            for request in requests or (("GET", "/x"),):
                async with client.request(*request) as response:
                    found.append([event async for event in response.events()] if stream else (response.status, await response.json()))
        return found

    return asyncio.run(work())


# ------------------------------------------------------------------------------------------------------------------ address


@pytest.mark.parametrize(("text", "url", "host", "port", "path"), [
    ("http://127.0.0.1:8080", "http://127.0.0.1:8080", "127.0.0.1", 8080, ""),
    ("http://localhost:8080/v1/", "http://localhost:8080", "localhost", 8080, ""),
    ("localhost:80", "http://localhost:80", "localhost", 80, ""),
    ("https://example.org/api/v1", "https://example.org/api", "example.org", 443, "/api"),
    ("http://[::1]:9/", "http://[::1]:9", "::1", 9, ""),
])
def test_addresses(text, url, host, port, path) -> None:
    found = Address.of(text)
    assert (found.url, found.host, found.port, found.path, found.tls) == (url, host, port, path, text.startswith("https"))


@pytest.mark.parametrize("text", [
    "", "http://", "ftp://x", "http://x:port", "http://x:99999", "http://me:secret@x", "http://x/?a=b",
    "http://x y", "http://x\r\nHost: y", "http://[::1",
])
def test_what_is_no_address_is_refused_without_a_secret_in_the_sentence(text) -> None:
    with pytest.raises(BadRequest) as found:
        Address.of(text)
    assert "secret" not in str(found.value)


# -------------------------------------------------------------------------------------------------------------------- bodies


MESSAGE = b"".join(events("one", {"two": "\u00e4\u2603"}, ["x" * 300], "[DONE]"))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, len(MESSAGE)), max_size=8))
def test_events_do_not_depend_on_how_their_bytes_arrive(cuts) -> None:
    places = [0, *sorted(cuts), len(MESSAGE)]
    with raw_server(lambda request: [MESSAGE[a:b] for a, b in zip(places, places[1:])]) as server:
        assert asked(server.url, stream=True) == [["one", '{"two": "\\u00e4\\u2603"}', '["' + "x" * 300 + '"]', "[DONE]"]]


def test_pings_other_fields_and_both_line_ends() -> None:
    body = b": ping\n\nevent: x\ndata: a\r\ndata:b\r\n\r\nid: 4\n\ndata: c\n\ndata: never ended"
    with raw_server(lambda request: [whole(body)]) as server:
        assert asked(server.url, stream=True) == [["a\nb", "c"]]


def test_three_ways_to_say_how_long_a_body_is() -> None:
    ways = [
        [whole({"n": 1})], [b"HTTP/1.1 200 OK\r\n\r\n", b'{"n"', b": 1}", HANG_UP],
        [b'HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\n{"n\r\n5\r\n": 1}\r\n0\r\nTrailer: x\r\n\r\n'],
    ]
    for pieces in ways:
        with raw_server(lambda request: pieces) as server:
            assert asked(server.url) == [(200, {"n": 1})]


def test_text_that_is_no_json_comes_as_text() -> None:
    with raw_server(lambda request: [whole(b"<html>Bad gateway\xff", 502)]) as server:
        assert asked(server.url) == [(502, "<html>Bad gateway\ufffd")]


def test_what_is_sent() -> None:
    with raw_server(lambda request: [whole({})]) as server:
        asked(server.url + "/base/v1", ("POST", "/v1/x", {"a": "\u00e4", "b": "\ud800"}), ("GET", "/y"), key="secret")
    post, get = server.requests
    assert (post.method, post.path, post.body) == ("POST", "/base/v1/x", {"a": "\u00e4", "b": "\ud800"})
    assert post.headers["authorization"] == "Bearer secret" and post.headers["content-type"] == "application/json"
    assert post.headers["host"] == server.url.removeprefix("http://") and (get.method, get.path, get.body) == ("GET", "/base/y", None)


@pytest.mark.parametrize("key", ["", "a\nb", "k\u00e4se"])
def test_a_key_that_no_header_can_hold_is_refused(key) -> None:
    with pytest.raises(BadRequest, match="key"):
        HttpClient(Address.of("http://x"), api_key=key)


# --------------------------------------------------------------------------------------------------------------- connections


def test_a_connection_is_used_again_after_a_whole_reply_only() -> None:
    def answer(request):
        yield whole({}, 200, *(["Connection: close"] if request.path == "/close" else []))

    with raw_server(answer) as server:
        asked(server.url, ("GET", "/a"), ("POST", "/b", {}), ("GET", "/close"), ("GET", "/c"))
    assert [request.connection for request in server.requests] == [0, 0, 0, 1]


def test_a_connection_that_the_server_closed_meanwhile_is_made_anew() -> None:
    with raw_server(lambda request: [whole({}), HANG_UP]) as server:
        assert asked(server.url, *[("GET", "/")] * 4) == [(200, {})] * 4
    assert [request.connection for request in server.requests] == [0, 1, 2, 3]


def test_leaving_early_hangs_up() -> None:
    with raw_server(lambda request: [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n8\r\ndata: x\n\r\n1\r\n\n\r\n"]) as server:
        async def work() -> None:
            async with HttpClient(Address.of(server.url)) as client:
                async with client.request("GET", "/") as response:
                    async for event in response.events():
                        assert event == "x"
                        break

        asyncio.run(work())
        assert server.left.wait(20)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(("pieces", "named"), [
    ([HANG_UP], "without a reply"), ([b"HTTP/1.1 200", HANG_UP], "head"), ([b"SSH-2.0-OpenSSH_9.6\r\n\r\n"], "no HTTP"),
    ([b"x" * 70_000, HANG_UP], "no HTTP"), ([b"HTTP/1.1 200 OK\r\nContent-Length: ten\r\n\r\n"], "no HTTP"),
    ([b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf", HANG_UP], "broke off"), ([CHUNKED + b"5\r\nab", HANG_UP], "broke off"),
    ([CHUNKED + b"5\r\nabcde\r\n", HANG_UP], "broke off"), ([CHUNKED + b"zz\r\n"], "no HTTP"),
])
def test_every_way_to_break_off_is_one_error(pieces, named) -> None:
    with raw_server(lambda request: pieces) as server:
        with pytest.raises(ServerFailed, match=named) as found:
            asked(server.url)
        assert server.url in str(found.value) and not isinstance(found.value, ServerUnreachable)


def test_a_silent_server_is_left() -> None:
    with raw_server(lambda request: [b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n"]) as server:
        with pytest.raises(ServerFailed, match="nothing for 0.05 s"):
            asked(server.url, timeout_s=0.05)


def test_nobody_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ServerUnreachable, match=url):
            asked(url)
    with pytest.raises(ServerUnreachable):
        asked("http://" + "a" * 70 + ".invalid")


def test_plain_http_where_tls_is_expected() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.recv(4096)

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(ServerUnreachable, match="TLS"):
            asked(f"https://127.0.0.1:{listener.getsockname()[1]}")
        thread.join(20)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_tls_and_its_certificates(tmp_path, monkeypatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*make, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    with raw_server(lambda request: [whole({"n": 1})], tls=context) as server:
        url = server.url.replace("http://127.0.0.1", "https://localhost")
        with pytest.raises(ServerUnreachable, match="TLS"):
            asked(url)                                   # nobody vouches for it
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert asked(url) == [(200, {"n": 1})]
