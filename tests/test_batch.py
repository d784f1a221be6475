"""`edgeinfer batch`: a file of requests becomes a file of replies, whatever comes in between."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw_server import MODELS, raw_server, whole
from server_process import serving

from edgeinfer import cli
from edgeinfer.errors import BadRequest, Cancelled, ServerFailed, ServerUnreachable
from edgeinfer.runtime.backends.fake import ScriptedBackend
from edgeinfer.runtime.batch import arguments, command, local, work
from edgeinfer.runtime.batch.requests import RequestFile, ordered
from edgeinfer.runtime.batch.results import ResultFile
from edgeinfer.runtime.batch.senders import InProcess, Reply
from edgeinfer.runtime.service import Engine


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch) -> None:
    """No test sees the user's own settings."""
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    for name in [name for name in os.environ if name.startswith("EDGEINFER_")]:
        monkeypatch.delenv(name)


def chat(custom_id: str, text: str = "hi", **body) -> dict:
    messages = [{"role": "user", "content": text}]
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": {"messages": messages, **body}}


def written(path: Path, *lines) -> Path:
    path.write_bytes(b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines))
    return path


def replies(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().decode().split("\n")[:-1]]


def engine(script=(b"a", b"b", b"c"), **options) -> Engine:
    return Engine(ScriptedBackend(script, **{"n_ctx": 4096, "max_slots": 4, "max_batch": 512, **options}))


# ----------------------------------------------------------------------------------------------------------------- the input


def test_requests_are_read_with_their_bodies(tmp_path) -> None:
    embeddings = {"custom_id": "c", "method": "POST", "url": "/v1/embeddings", "body": {"input": ["x", "y"]}}
    lines = [chat("a", "one"), chat("b\u00e4", "two", max_tokens=3), embeddings]
    first, second, third = (json.dumps(line, ensure_ascii=False).encode() for line in lines)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + first + b"\r\n\n  \n" + second + b"\n" + third)
    with RequestFile(path) as source:
        assert [request.custom_id for request in source.requests] == ["a", "b\u00e4", "c"]
        assert [source.body(request) for request in reversed(source.requests)] == [(line["url"], line["body"]) for line in reversed(lines)]


def test_every_bad_line_is_listed_at_once(tmp_path) -> None:
    good = chat("good")
    bad = [
        (b"{not json", "not JSON"), (b"[1]", "no JSON object"), ({**good, "custom_id": None}, "no custom_id"), ({**good, "custom_id": 3}, "3 is no"),
        (chat("good"), "'good' is that of line 1"), ({**chat("u"), "url": "/v1/audio"}, "'/v1/audio'"), ({**chat("m"), "method": "GET"}, "'GET'"),
        ({**chat("b"), "body": [1]}, "body is no JSON object"), ({"custom_id": "x", "method": "POST", "url": "/v1/completions"}, "no body"),
        (chat("s", stream=True), "stream"), (b'{"custom_id": "\xff"}', "UTF-8"), (b'{"custom_id": NaN}', "NaN"), (b"[" * 100_000, "nested"),
        (b"1" * 6000, "not JSON"),
    ]
    path = written(tmp_path / "in.jsonl", good, *(line for line, _ in bad), chat("fine"))
    with pytest.raises(BadRequest) as found:
        RequestFile(path)
    first, *problems = str(found.value).split("\n")
    assert str(path) in first and str(len(bad)) in first and len(problems) == len(bad)
    for number, (problem, (_, named)) in enumerate(zip(problems, bad, strict=True), 2):
        assert problem.startswith(f"  - line {number}: ") and named in problem


def test_very_many_bad_lines_are_counted(tmp_path) -> None:
    with pytest.raises(BadRequest) as found:
        RequestFile(written(tmp_path / "in.jsonl", *[b"x"] * 2000))
    assert "2,000 lines" in str(found.value) and "and 1,950 more" in str(found.value) and len(str(found.value)) < 10_000


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_file_without_requests(tmp_path, content) -> None:
    (tmp_path / "in.jsonl").write_bytes(content)
    with pytest.raises(BadRequest, match="no requests"):
        RequestFile(tmp_path / "in.jsonl")


bodies = st.fixed_dictionaries({"text": st.text(max_size=30), "words": st.integers(0, 400), "max_tokens": st.none() | st.integers(1, 500)})


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(bodies, min_size=1, max_size=30))
def test_the_order_is_a_permutation_long_first_with_like_openings_together(tmp_path, found) -> None:
    lines = [chat(f"r{n}", body["text"] + " word" * body["words"], max_tokens=body["max_tokens"]) for n, body in enumerate(found)]
    with RequestFile(written(tmp_path / "in.jsonl", *lines)) as source:
        order = ordered(source.requests)
    assert sorted(request.offset for request in order) == [request.offset for request in source.requests]
    lengths = [request.tokens.bit_length() for request in order]
    assert lengths == sorted(lengths, reverse=True)
    for length in set(lengths):
        openings = [request.opening for request in order if request.tokens.bit_length() == length]
        assert openings == sorted(openings)


def test_lengths_are_seen_in_every_kind_of_body(tmp_path) -> None:
    def line(custom_id: str, url: str, **body) -> dict:
        return {"custom_id": custom_id, "method": "POST", "url": f"/v1/{url}", "body": body}

    lines = [
        line("short", "completions", prompt="x"), line("text", "completions", prompt="x" * 4000), line("ids", "completions", prompt=[1] * 1000),
        line("lists", "completions", prompt=[[1] * 500, [2] * 500]), line("input", "embeddings", input=["x" * 2000, "y" * 2000]),
        line("parts", "chat/completions", messages=[{"role": "user", "content": [{"type": "text", "text": "x" * 4000}]}]),
        line("answer", "chat/completions", messages=[], max_completion_tokens=1000), line("odd", "chat/completions", messages=7, max_tokens="many"),
    ]
    with RequestFile(written(tmp_path / "in.jsonl", *lines)) as source:
        assert {request.custom_id: request.tokens for request in source.requests} == {
            "short": 0, "text": 1000, "ids": 1000, "lists": 1000, "input": 1000, "parts": 1000, "answer": 1000, "odd": 0,
        }


# ---------------------------------------------------------------------------------------------------------------- the output


def answered(path: Path, source: RequestFile, count: int) -> None:
    with ResultFile(path, source.requests) as output:
        for number, request in enumerate(source.requests[:count]):
            status = 400 if number % 3 == 2 else 200
            output.add(request, {"status_code": status, "request_id": "", "body": {"text": "\u00e4\u2603\n"}}, None)


def test_a_file_cut_anywhere_loses_only_its_last_line(tmp_path) -> None:
    path = tmp_path / "out.jsonl"
    with RequestFile(written(tmp_path / "in.jsonl", *(chat(f"r{n}", f"text {n}") for n in range(4)))) as source:
        answered(path, source, 4)
        content = path.read_bytes()
        ends = [at for at, byte in enumerate(content) if byte == 10]
        for cut in sorted({*range(0, len(content), 7), *(end + step for end in ends for step in (0, 1, 2) if end + step <= len(content))}):
            path.write_bytes(content[:cut])
            kept = content[:cut].count(b"\n")
            with ResultFile(path, source.requests) as output:
                assert list(output.done) == ["r0", "r1", "r2", "r3"][:kept]
            assert path.read_bytes() == b"".join(content.splitlines(keepends=True)[:kept])
            with ResultFile(path, source.requests) as output:
                for request in source.requests[kept:]:
                    output.add(request, None, {"code": "x", "message": "y"})
            assert [line["custom_id"] for line in replies(path)] == ["r0", "r1", "r2", "r3"]


@pytest.mark.parametrize(("change", "named"), [
    (lambda lines: [*lines, lines[0]], "'r0' once more"), (lambda lines: [lines[0].replace("r0", "r9"), lines[1]], "'r9'"),
    (lambda lines: [*lines, "{}"], "line 3"), (lambda lines: ["", *lines], "line 1"), (lambda lines: ["my notes"], "line 1"),
    (lambda lines: [json.dumps(chat("r0"))], "line 1"), (lambda lines: [lines[0].replace('"r0"', '["r0"]')], "line 1"),
    (lambda lines: [lines[0].replace("batch_req_", "batch_req_0")], "another request"),
    (lambda lines: [lines[0].replace('"response": {', '"other": {')], "line 1"),
])
@pytest.mark.parametrize("end", ["\n", "\nnotes without an end", '\n{"id": "batch_req_12'])
def test_a_file_that_belongs_to_something_else_is_refused_untouched(tmp_path, change, named, end) -> None:
    path = tmp_path / "out.jsonl"
    with RequestFile(written(tmp_path / "in.jsonl", chat("r0"), chat("r1"))) as source:
        answered(path, source, 2)
        path.write_text("\n".join(change(path.read_text().splitlines())) + end)
        before = path.read_bytes()
        with pytest.raises(BadRequest, match="does not belong to this input") as found:
            ResultFile(path, source.requests)
    assert named in str(found.value) and path.read_bytes() == before


def test_a_text_without_a_line_end_is_not_taken_for_half_a_line(tmp_path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("precious")
    with RequestFile(written(tmp_path / "in.jsonl", chat("a"))) as source:
        with pytest.raises(BadRequest):
            ResultFile(path, source.requests)
    assert path.read_text() == "precious"


def test_a_changed_request_is_another_one(tmp_path) -> None:
    path = tmp_path / "out.jsonl"
    with RequestFile(written(tmp_path / "in.jsonl", chat("a", "one"))) as source:
        answered(path, source, 1)
    with RequestFile(written(tmp_path / "in.jsonl", chat("new"), json.dumps(chat("a", "one"), indent=None, sort_keys=True).encode())) as source:
        with ResultFile(path, source.requests) as output:
            assert output.done == {"a": True}            # moved and written otherwise, but the same
    with RequestFile(written(tmp_path / "in.jsonl", chat("a", "two"))) as source:
        with pytest.raises(BadRequest, match="another request"):
            ResultFile(path, source.requests)


def test_one_run_at_a_time(tmp_path) -> None:
    path = tmp_path / "out.jsonl"
    with RequestFile(written(tmp_path / "in.jsonl", chat("a"))) as source:
        with ResultFile(path, source.requests):
            with pytest.raises(BadRequest, match="Another"):
                ResultFile(path, source.requests)
        ResultFile(path, source.requests).close()


@pytest.mark.parametrize(("name", "named"), [(".", "folder"), ("gone/out.jsonl", "no folder")])
def test_places_that_cannot_be_written(tmp_path, name, named) -> None:
    with RequestFile(written(tmp_path / "in.jsonl", chat("a"))) as source:
        with pytest.raises(BadRequest, match=named):
            ResultFile(tmp_path / name, source.requests)


def test_failed_ones_can_be_asked_again(tmp_path) -> None:
    path = tmp_path / "out.jsonl"
    with RequestFile(written(tmp_path / "in.jsonl", *(chat(f"r{n}") for n in range(6)))) as source:
        answered(path, source, 4)                        # the third failed
        path.chmod(0o640)
        with ResultFile(path, source.requests, retry_failed=True) as output:
            assert output.done == {"r0": True, "r1": True, "r3": True}
            with pytest.raises(BadRequest, match="Another"):
                ResultFile(path, source.requests)        # the new file is locked like the old one
            output.add(source.requests[2], {"status_code": 200, "request_id": "", "body": {}}, None)
        assert [line["custom_id"] for line in replies(path)] == ["r0", "r1", "r3", "r2"]
    assert sorted(found.name for found in tmp_path.iterdir()) == ["home", "in.jsonl", "out.jsonl"] and path.stat().st_mode & 0o777 == 0o640


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch) -> None:
    path = tmp_path / "out.jsonl"
    really = os.write

    def full(handle: int, data: bytes) -> int:
        if len(data) < 60:
            raise OSError(28, "No space left on device")
        return really(handle, data[:50])

    with RequestFile(written(tmp_path / "in.jsonl", chat("a"), chat("b"))) as source, ResultFile(path, source.requests) as output:
        output.add(source.requests[0], {"status_code": 200, "request_id": "", "body": {}}, None)
        before = path.read_bytes()
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space") as found:
            output.add(source.requests[1], {"status_code": 200, "request_id": "", "body": "x" * 200}, None)
        monkeypatch.undo()
        assert path.read_bytes() == before and found.value.filename == str(path) and output.done == {"a": True}


def test_any_text_can_be_written_and_read_again(tmp_path) -> None:
    path = tmp_path / "out.jsonl"
    with RequestFile(written(tmp_path / "in.jsonl", chat("\ud800 half"), chat("\u2028 \x00 \u2603"))) as source:
        for _ in range(2):
            with ResultFile(path, source.requests) as output:
                for request in source.requests:
                    if request.custom_id not in output.done:
                        output.add(request, {"status_code": 200, "request_id": "", "body": "\ud83d\u2029\n"}, None)
    assert [line["response"]["body"] for line in replies(path)] == ["\ud83d\u2029\n"] * 2


# ------------------------------------------------------------------------------------------------------------------ the work


class Scripted:
    """Answers by a function of (text, times asked); notes the order and how many are inside."""

    def __init__(self, answer=lambda text, times: Reply(200, {"said": text})):
        self._answer = answer
        self.asked: list[str] = []
        self.inside = self.most = 0

    async def send(self, url, body):
        text = body["messages"][0]["content"]
        self.asked.append(text)
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await asyncio.sleep(0)
            found = self._answer(text, self.asked.count(text))
            if isinstance(found, Exception):
                raise found
            return found
        finally:
            self.inside -= 1


def worked(tmp_path: Path, sender: Scripted, texts: list[str], *, concurrency: int = 3) -> list[float]:
    """Answers ``texts`` into out.jsonl; returns the pauses that were made."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    path = written(tmp_path / "in.jsonl", *(chat(f"id {n}", text) for n, text in enumerate(texts)))
    with RequestFile(path) as source, ResultFile(tmp_path / "out.jsonl", source.requests) as output:
        todo = [request for request in source.requests if request.custom_id not in output.done]
        asyncio.run(work.answer(source, todo, sender, output, concurrency=concurrency, sleep=sleep))
    return pauses


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_as_many_at_a_time_as_asked_in_order(tmp_path, concurrency) -> None:
    sender = Scripted()
    assert worked(tmp_path, sender, [f"t{n}" for n in range(20)], concurrency=concurrency) == []
    assert sender.asked == [f"t{n}" for n in range(20)] and sender.most == min(concurrency, 20)
    found = {line["custom_id"]: line["response"]["body"]["said"] for line in replies(tmp_path / "out.jsonl")}
    assert found == {f"id {n}": f"t{n}" for n in range(20)}


def test_a_failure_is_a_line_and_not_the_end(tmp_path) -> None:
    broken = {"bad": Reply(400, {"error": {"message": "no"}}, "req-1"), "lost": ServerFailed("It broke off.")}
    worked(tmp_path, Scripted(lambda text, times: broken.get(text, Reply(200, {}))), ["a", "bad", "b", "lost", "c"])
    found = {line["custom_id"]: line for line in replies(tmp_path / "out.jsonl")}
    assert len(found) == 5 and all(set(line) == {"id", "custom_id", "response", "error"} for line in found.values())
    assert found["id 1"]["response"] == {"status_code": 400, "request_id": "req-1", "body": {"error": {"message": "no"}}}
    assert found["id 1"]["error"] is None
    assert found["id 3"]["response"] is None and found["id 3"]["error"] == {"code": "server_failed", "message": "It broke off."}


def test_patience_with_those_who_are_busy(tmp_path) -> None:
    sender = Scripted(lambda text, times: Reply(429, {}, "", 7.0) if times < 3 else Reply(503, {}) if times == 3 else Reply(200, {}))
    assert worked(tmp_path, sender, ["x"]) == [7.0, 7.0, 2.0] and replies(tmp_path / "out.jsonl")[0]["response"]["status_code"] == 200
    sender = Scripted(lambda text, times: Reply(503, {"error": "busy"}, "", 1e9))
    pauses = worked(tmp_path, sender, ["x", "y"])
    assert len(sender.asked) == work.TRIES and max(pauses) <= 60         # x is done already
    assert {line["custom_id"]: line["response"]["status_code"] for line in replies(tmp_path / "out.jsonl")} == {"id 0": 200, "id 1": 503}


def test_nobody_there_any_more_ends_the_run_and_keeps_what_is_done(tmp_path) -> None:
    sender = Scripted(lambda text, times: Reply(200, {}) if text < "c" else ServerUnreachable("Gone."))
    with pytest.raises(ServerUnreachable, match="Gone"):
        worked(tmp_path, sender, ["a", "b", "c", "d", "e", "f"], concurrency=2)
    assert [line["custom_id"] for line in replies(tmp_path / "out.jsonl")] == ["id 0", "id 1"]
    again = Scripted()
    worked(tmp_path, again, ["a", "b", "c", "d", "e", "f"], concurrency=2)
    assert again.asked == ["c", "d", "e", "f"] and len(replies(tmp_path / "out.jsonl")) == 6


def test_a_refused_key_ends_the_run(tmp_path) -> None:
    with pytest.raises(BadRequest, match="key"):
        worked(tmp_path, Scripted(lambda text, times: BadRequest("The key is wrong.")), ["a", "b", "c"])
    assert replies(tmp_path / "out.jsonl") == []


# ---------------------------------------------------------------------------------------------------------------- in process


@contextlib.asynccontextmanager
async def inside(tmp_path: Path, made: Engine):
    async with local.application("mine", tmp_path / "none.gguf", lambda source: made) as app:
        yield InProcess(app, changes={"model": "mine"})


def test_in_process_answers_are_the_server_s(tmp_path) -> None:
    import httpx

    asked = [
        ("/v1/chat/completions", {"model": "gpt-x", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "n": 2}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/embeddings", {"input": ["one", "two"], "encoding_format": "base64"}), ("/v1/completions", {"prompt": 7}),
        ("/v1/chat/completions", {}), ("/v1/completions", {"prompt": "x" * 9000}),
    ]

    async def work_() -> list[Reply]:
        async with inside(tmp_path, engine()) as sender:
            return [await sender.send(url, body) for url, body in asked]

    found = asyncio.run(work_())
    with serving({"mine": engine()}) as server:
        for (url, body), reply in zip(asked, found, strict=True):
            over = httpx.post(server.url + url, json={**body, "model": "mine"})
            assert reply.status == over.status_code and reply.request_id
            assert _steady(reply.body) == _steady(over.json())
    assert [reply.status for reply in found] == [200, 200, 200, 400, 400, 400] and found[0].body["choices"][1]["message"]["content"] == "ab"


def _steady(body: dict) -> dict:
    """A reply without what differs from one time to the next."""
    return {name: value for name, value in body.items() if name not in ("id", "created", "timings", "choices")} | {
        "choices": [{name: value for name, value in choice.items() if name != "seed"} for choice in body.get("choices", [])],
    }


def test_a_batch_steps_back_behind_those_who_wait(tmp_path) -> None:
    async def priorities(body: dict) -> list[str]:
        made = engine()
        seen = []
        submit = made._core.submit
        made._core.submit = lambda seq: (seen.append(seq.options.priority), submit(seq))[1]
        async with inside(tmp_path, made) as sender:
            await sender.send("/v1/completions", {"prompt": "x", **body})
        return seen

    assert asyncio.run(priorities({})) == ["batch"] and asyncio.run(priorities({"priority": "interactive"})) == ["interactive"]


def test_cancelling_frees_the_engine(tmp_path) -> None:
    made = engine(script=lambda tokens: 97)

    async def work_() -> None:
        async with inside(tmp_path, made) as sender:
            task = asyncio.create_task(sender.send("/v1/completions", {"prompt": "x", "max_tokens": 4000}))
            while not made.stats().running:
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.wait((task,))
            assert task.cancelled()
            while made.stats().running:
                await asyncio.sleep(0.001)
            assert (await sender.send("/v1/completions", {"prompt": "x", "max_tokens": 2})).status == 200

    asyncio.run(work_())


def test_an_interrupt_stops_loading(tmp_path) -> None:
    begun, left = threading.Event(), threading.Event()

    def make(source) -> Engine:
        begun.set()
        assert left.wait(60)
        raise Cancelled("Loading was stopped.")

    async def load() -> None:
        async with local.application("mine", tmp_path / "none.gguf", make, left.set):
            raise AssertionError("it never loaded")

    async def work_() -> None:
        task = asyncio.create_task(load())
        await asyncio.to_thread(begun.wait)
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()

    asyncio.run(work_())


# -------------------------------------------------------------------------------------------------------------- command line


def parsed(*words: str | Path):
    parser, commands = cli._parser()
    cli._apply_settings("batch", commands["batch"])
    return parser.parse_args(["batch", *map(str, words)])


@pytest.mark.parametrize(("words", "named"), [
    (["m", "in"], "Three names"), (["--url", "http://x", "m", "in", "out"], "not both"), (["m", "in", "out", "--concurrency", "-1"], "--concurrency"),
])
def test_places_are_checked(words, named) -> None:
    with pytest.raises(BadRequest, match=named):
        arguments.places(parsed(*words))


def test_places_are_told_apart() -> None:
    assert arguments.places(parsed("m", "in", "out")) == ("m", Path("in"), Path("out"))
    assert arguments.places(parsed("-np", "2", "m", "-c", "99", "in", "out")) == ("m", Path("in"), Path("out"))
    assert arguments.places(parsed("--url", "http://x", "in", "out")) == (None, Path("in"), Path("out"))


@pytest.mark.parametrize("words", [
    ["--url", "http://x", "in.jsonl", "out", "-np", "2"], ["--url", "http://x", "in.jsonl", "out", "-c", "99"],
    ["m", "in.jsonl", "out", "--api-key", "k"],
])
def test_flags_that_would_be_ignored_are_refused(words) -> None:
    with pytest.raises(BadRequest, match="--"):
        command.run(parsed(*words), lambda name: (name, Path(name)), {}, lambda *stage: None)


def batch(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgeinfer", "batch", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL)


def test_at_a_server_from_file_to_file(tmp_path) -> None:
    lines = [chat(f"r{n}", f"question {n}", model="whatever") for n in range(20)]
    bad = {"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "temperature": "hot"}}
    path = written(tmp_path / "in.jsonl", *lines, bad)
    out = tmp_path / "out.jsonl"
    with serving({"mine": engine()}, api_keys=("k",)) as server:
        refused = batch("--url", server.url, path, out)
        assert refused.returncode == 2 and "--api-key" in refused.stderr and refused.stderr.count("\n") == 1 and out.read_bytes() == b""
        first = batch("--url", server.url, "--api-key", "k", "--model-name", "mine", path, out)
        assert first.returncode == 1 and "21 requests: 20 answered, 1 failed" in first.stdout, first.stderr
        assert [model for model, _, _ in server.metrics.ends] == ["mine"] * 20
    found = {line["custom_id"]: line["response"] for line in replies(out)}
    assert Counter(response["status_code"] for response in found.values()) == {200: 20, 400: 1}
    assert {response["body"]["choices"][0]["message"]["content"] for name, response in found.items() if name != "bad"} == {"abc"}
    again = batch("--url", "http://127.0.0.1:9", path, out)          # nothing is left to ask
    assert again.returncode == 1 and "(21 of them by earlier runs)" in again.stdout and len(replies(out)) == 21


def test_bad_lines_are_said_before_the_model_is_looked_for(tmp_path) -> None:
    path = written(tmp_path / "in.jsonl", chat("a"), b"nonsense", chat("a"))
    done = batch("no-such-model", path, tmp_path / "out.jsonl")
    assert done.returncode == 2 and done.stdout == "" and "line 2" in done.stderr and "line 3" in done.stderr and "no-such-model" not in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_stopped_goes_on_later_and_loses_nothing(tmp_path, how) -> None:
    asked = Counter()

    def answer(request):
        if request.method == "GET":
            return [whole(MODELS)]
        text = request.body["messages"][0]["content"]
        asked[text] += 1
        held = sum(asked.values()) > 6 and not released
        return slow() if held else [whole({"said": text})]

    def slow():
        while not released:
            time.sleep(0.01)
            yield b""

    released: list[bool] = []
    texts = [f"t{n}" for n in range(16)]
    path, out = written(tmp_path / "in.jsonl", *(chat(text, text) for text in texts)), tmp_path / "out.jsonl"
    with raw_server(answer) as server:
        words = [sys.executable, "-m", "edgeinfer", "batch", "--url", server.url, "--concurrency", "3", str(path), str(out)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
        while sum(asked.values()) < 9 and process.poll() is None:       # the third of three workers is held: six lines are written
            time.sleep(0.01)
        process.send_signal(how)
        stdout, stderr = process.communicate(timeout=60)
        assert "Traceback" not in stderr
        if how is not signal.SIGKILL:
            assert process.returncode == 130 and "6 answered, 0 failed, 10 left" in stdout and "goes on" in stderr
        before = out.read_bytes()
        with out.open("ab") as file:
            file.write(b'{"id": "batch_req_0123')        # what a kill in the middle of a write leaves
        released.append(True)
        done = batch("--url", server.url, path, out)
        assert done.returncode == 0, done.stderr
    assert out.read_bytes().startswith(before) and before.count(b"\n") == 6
    assert Counter(line["custom_id"] for line in replies(out)) == Counter(texts)
    assert all(line["response"]["body"]["said"] == line["custom_id"] for line in replies(out))


def test_an_interrupt_in_process_keeps_what_is_answered(smollm2_gguf, tmp_path) -> None:
    endless = {"max_tokens": 4000, "temperature": 0, "logit_bias": {"2": -100, "0": -100}}
    path = written(tmp_path / "in.jsonl", chat("endless", **endless), *(chat(f"r{n}", max_tokens=1) for n in range(3)))
    out = tmp_path / "out.jsonl"
    words = [sys.executable, "-m", "edgeinfer", "batch", str(smollm2_gguf), str(path), str(out), "-np", "2", "-c", "8192", "-t", "1"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
    while not (out.exists() and out.read_bytes().count(b"\n") == 3) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130 and "3 answered, 0 failed, 1 left" in stdout and "Traceback" not in stderr, stderr
    assert sorted(line["custom_id"] for line in replies(out)) == ["r0", "r1", "r2"]


def test_on_the_demo_model(smollm2_gguf, tmp_path) -> None:
    lines = [chat(f"r{n}", f"Say {n}", max_tokens=2, model="gpt-4o-mini", temperature=0) for n in range(4)]
    raw = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once", "max_tokens": 2}}
    path, out = written(tmp_path / "in.jsonl", *lines, raw), tmp_path / "out.jsonl"
    done = batch(smollm2_gguf, path, out, "-np", "2", "-c", "256", "-t", "1")
    assert done.returncode == 0 and "5 requests: 5 answered, 0 failed" in done.stdout, done.stderr
    for line in replies(out):
        body = line["response"]["body"]
        assert body["usage"]["completion_tokens"] == 2 and body["choices"][0]["finish_reason"] == "length" and body["model"] != "gpt-4o-mini"
