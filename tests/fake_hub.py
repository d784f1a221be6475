"""A model hub on 127.0.0.1: as much of the Hugging Face API as downloading needs, with faults to order.

    with FakeHub({"user/model": {"model.gguf": b"..."}}) as hub: ...      hub.url, hub.requests, hub.drop_after
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "c0ff"
LARGE = 100                                              # bytes from which a file counts as LFS and has a sha256


class FakeHub:
    """``repos``: name -> file -> content. ``gated`` ones answer 403. ``drop_after``: bytes after which a connection breaks, once a file."""

    def __init__(self, repos: Mapping[str, Mapping[str, bytes]], *, gated: frozenset[str] = frozenset(), drop_after: int | None = None):
        self.repos, self.gated, self.drop_after = repos, gated, drop_after
        self.status: int | None = None                   # answer everything with this
        self.lies_about: set[str] = set()                # files whose content does not have the announced sha256
        self.requests: list[tuple[str, str, str | None]] = []    # method, path, Range
        self.tokens: set[str | None] = set()
        self.dropped: set[str] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                hub._answer(self)

            def do_GET(self) -> None:
                hub._answer(self)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    def __enter__(self) -> FakeHub:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def downloads(self) -> list[str]:
        """Files asked for with GET, in order."""
        return [path.split("/resolve/")[1].split("/", 1)[1] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.requests.append((request.command, path, request.headers.get("Range")))
        self.tokens.add(request.headers.get("Authorization"))
        if self.status is not None:
            return self._json(request, {"error": "broken"}, status=self.status)
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+).*)?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = api or file
        repo = match[1] if match else ""
        if repo not in self.repos:
            return self._json(request, {"error": "Repository not found"}, status=404, code="RepoNotFound")
        if repo in self.gated:
            return self._json(request, {"error": "Access restricted"}, status=403, code="GatedRepo")
        revision = (match[3] if api else match[2]) or "main"
        if revision not in ("main", "v1", COMMIT):
            return self._json(request, {"error": "Invalid rev"}, status=404, code="RevisionNotFound")
        files = self.repos[repo]
        if api and api[2] == "tree":
            tree = [{"type": "file", "path": name, "size": len(data), "oid": _oid(data), **self._lfs(name, data)} for name, data in files.items()]
            return self._json(request, tree)
        if api:
            siblings = [{"rfilename": name, "size": len(data), "blobId": _oid(data), **self._lfs(name, data)} for name, data in files.items()]
            return self._json(request, {"_id": "0", "id": repo, "modelId": repo, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings})
        if file[3] not in files:
            return self._json(request, {"error": "Entry not found"}, status=404, code="EntryNotFound")
        return self._file(request, repo, file[3], files[file[3]])

    def _lfs(self, name: str, data: bytes) -> dict[str, object]:
        digest = "0" * 64 if name in self.lies_about else hashlib.sha256(data).hexdigest()
        return {"lfs": {"oid": digest, "sha256": digest, "size": len(data), "pointerSize": 130}} if len(data) >= LARGE else {}

    def _json(self, request: BaseHTTPRequestHandler, value: object, *, status: int = 200, code: str | None = None) -> None:
        body = json.dumps(value).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        if code:
            request.send_header("X-Error-Code", code)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)

    def _file(self, request: BaseHTTPRequestHandler, repo: str, name: str, data: bytes) -> None:
        start = 0
        asked = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range") or "")
        if asked:
            start = int(asked[1])
        part = data[start:]
        request.send_response(206 if asked else 200)
        request.send_header("Content-Length", str(len(part)))
        request.send_header("Accept-Ranges", "bytes")
        if asked:
            request.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        request.send_header("ETag", f'"{hashlib.sha256(data).hexdigest() if len(data) >= LARGE else _oid(data)}"')
        request.send_header("X-Repo-Commit", COMMIT)
        request.end_headers()
        if request.command == "HEAD":
            return
        if self.drop_after is not None and len(part) > self.drop_after and f"{repo}/{name}" not in self.dropped:
            self.dropped.add(f"{repo}/{name}")
            request.wfile.write(part[: self.drop_after])
            request.wfile.flush()
            request.close_connection = True
            return
        request.wfile.write(part)


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
