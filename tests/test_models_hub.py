"""Downloads from a hub on 127.0.0.1: what arrives, what resumes, what each failure says, and that offline opens no socket."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import traceback
from pathlib import Path

import huggingface_hub
import pytest
from fake_hub import COMMIT, FakeHub

from edgeinfer.errors import BackendFailed, ModelNotFound
from edgeinfer.models import hub

BIG = bytes(range(256)) * 2048                           # half a MiB
REPOS = {
    "user/model": {"config.json": b"{}", "model.safetensors": BIG, "tokenizer.json": b"{}", "README.md": b"# read me", "sub/extra.json": b"[]"},
    "user/quants": {"m-Q4_K_M.gguf": BIG, "m-Q8_0.gguf": BIG[::-1], "odd [1]-F16.gguf": BIG[1:]},
}
TOKEN = "hf_ThisIsSecretAndMustNeverBeShown"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    with FakeHub(REPOS, gated=frozenset({"user/gated"})) as fake:
        fake.repos = {**REPOS, "user/gated": {}}
        monkeypatch.setenv("HF_ENDPOINT", fake.url)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield fake


def test_fetches_what_matches_and_nothing_twice(server: FakeHub, tmp_path: Path) -> None:
    folder = hub.download("user/model", patterns=("*.safetensors", "*.json"), cache_dir=tmp_path)
    assert folder.name == COMMIT
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == set(REPOS["user/model"]) - {"README.md"}
    assert (folder / "model.safetensors").read_bytes() == BIG
    fetched = server.downloads()
    assert hub.download("user/model", patterns=("*.safetensors", "*.json"), cache_dir=tmp_path) == folder
    assert server.downloads() == fetched
    hub.download("user/model", patterns=("*.md",), cache_dir=tmp_path)
    assert server.downloads() == [*fetched, "README.md"]


def test_listing_has_sizes_and_hashes(server: FakeHub) -> None:
    listing = hub.list_files("user/model", "v1")
    assert listing.commit == COMMIT
    files = {file.name: file for file in listing.files}
    assert files["model.safetensors"].size == len(BIG)
    assert files["model.safetensors"].sha256 is not None
    assert files["config.json"].sha256 is None


def test_names_with_pattern_characters_are_taken_literally(server: FakeHub, tmp_path: Path) -> None:
    folder = hub.download("user/quants", patterns=hub.exactly(["odd [1]-F16.gguf"]), cache_dir=tmp_path)
    assert [path.name for path in folder.iterdir()] == ["odd [1]-F16.gguf"]


def test_a_connection_that_breaks_resumes_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # The library waits a second before it goes on, and keeps whole chunks of 10 MB: neither is what is tested.
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    with FakeHub(REPOS, drop_after=100_000) as fake:
        monkeypatch.setenv("HF_ENDPOINT", fake.url)
        folder = hub.download("user/quants", patterns=("m-Q4_K_M.gguf",), cache_dir=tmp_path)
        assert (folder / "m-Q4_K_M.gguf").read_bytes() == BIG
        ranges = [asked for method, path, asked in fake.requests if method == "GET" and path.endswith("Q4_K_M.gguf")]
    assert fake.dropped
    assert ranges[0] is None
    assert [asked for asked in ranges[1:] if asked], "the second request must ask for the rest only"
    assert all(0 < int(asked.split("=")[1].rstrip("-")) <= 100_000 for asked in ranges[1:] if asked)


def test_a_download_that_keeps_breaking_is_given_up(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[float] = []
    monkeypatch.setattr("time.sleep", tries.append)

    def broken(*_args: object, **_options: object) -> str:
        raise ConnectionResetError("reset by peer")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    assert "cannot be reached" in failure("user/model", cache_dir=tmp_path)
    assert tries == [1, 2, 3, 4]


def test_cache_folder_is_the_librarys(tmp_path: Path) -> None:
    code = "from pathlib import Path; from edgeinfer.models import hub; import huggingface_hub.constants as c"
    code += "; print(hub._cache_root(None) == Path(c.HF_HUB_CACHE))"
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE_", "XDG_"))}
    for changes in ({}, {"HF_HOME": str(tmp_path)}, {"HF_HUB_CACHE": str(tmp_path)}, {"HF_HOME": "~/x"}, {"XDG_CACHE_HOME": str(tmp_path)}):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean | changes, check=True)
        assert done.stdout == "True\n", changes


def test_progress_ends_at_the_total(server: FakeHub, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    hub.download("user/quants", patterns=("m-*.gguf",), cache_dir=tmp_path, progress=lambda *step: seen.append(step))
    total = 2 * len(BIG)
    assert seen[-1] == ("download user/quants", total, total)
    assert all(0 <= done <= total == of for _, done, of in seen)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_progress_grows_while_a_file_arrives(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = tmp_path / "models--user--model" / "blobs"
    steps: list[int] = []

    def slow(*_args: object, **_options: object) -> str:
        blobs.mkdir(parents=True)
        for size in (1000, 2000):
            (blobs / "x.incomplete").write_bytes(bytes(size))
            while not steps or steps[-1] < size:         # the watcher must see each size
                pass
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", slow)
    monkeypatch.setattr(hub, "POLL_SECONDS", 0.001)
    hub.download("user/model", cache_dir=tmp_path, progress=lambda _what, done, _total: steps.append(done))
    assert 1000 in steps
    assert 2000 in steps


# --------------------------------------------------------------------------------------------------------------------- failures


def failure(*args: object, kind: type[Exception] = ModelNotFound, **options: object) -> str:
    with pytest.raises(kind) as caught:
        hub.download(*args, **options)
    shown = "".join(traceback.format_exception(caught.value))
    assert TOKEN not in shown
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_each_failure_has_its_sentence(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "no model user/none" in failure("user/none", cache_dir=tmp_path)
    assert "is gated: accept its terms" in failure("user/gated", cache_dir=tmp_path)
    assert "no revision 'nowhere'" in failure("user/model", "nowhere", cache_dir=tmp_path)
    assert "not a possible hub id" in failure("a b/c?", cache_dir=tmp_path)
    assert "has no *.gguf" in failure("user/model", patterns=("*.gguf",), cache_dir=tmp_path)
    server.status = 500
    assert "answered 500" in failure("user/model", cache_dir=tmp_path)
    assert f"Bearer {TOKEN}" in server.tokens            # it was sent, so its absence from the messages means something


def test_no_network_and_what_lies_in_the_cache(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        message = failure("user/model", cache_dir=tmp_path)
        assert "cannot be reached" in message
        assert "--offline" not in message
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        hub.download("user/model", cache_dir=tmp_path)
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        assert "use it with --offline" in failure("user/model", cache_dir=tmp_path)


def test_full_disk_is_said(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object, **_options: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    message = failure("user/model", cache_dir=tmp_path, kind=BackendFailed)
    assert "No space left on device" in message
    assert str(tmp_path) in message


# ---------------------------------------------------------------------------------------------------------------------- offline

WATCHED = """
import json, sys
opened = []
sys.addaudithook(lambda event, args: opened.append(event) if event.startswith("socket.") else None)
from pathlib import Path
from edgeinfer.errors import EdgeInferError
from edgeinfer.models import hub, resolve
results = []
for call in (
    lambda: str(hub.download("user/model", patterns=["*.json"], offline={offline}, cache_dir=Path(sys.argv[1]))),
    lambda: [file.name for file in hub.list_files("user/model", offline={offline}, cache_dir=Path(sys.argv[1])).files],
    lambda: str(hub.download("user/absent", offline={offline}, cache_dir=Path(sys.argv[1]))),
    lambda: str(hub.download("user/model", patterns=["*.gguf"], offline={offline}, cache_dir=Path(sys.argv[1]))),
    lambda: str(hub.download("user/model", "../../etc", offline={offline}, cache_dir=Path(sys.argv[1]))),
    lambda: str(resolve.resolve("user/absent:Q4_0", offline={offline}).path),
):
    try:
        results.append(call())
    except EdgeInferError as error:
        results.append("error: " + str(error))
print(json.dumps([results, opened]))
"""


def watched(code: str, cache: Path, **environment: str) -> tuple[list[object], list[str]]:
    done = subprocess.run([sys.executable, "-c", code, str(cache)], capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_offline_opens_no_socket(server: FakeHub, tmp_path: Path) -> None:
    folder = hub.download("user/model", patterns=("*.json",), cache_dir=tmp_path)
    asked = len(server.requests)
    for offline, environment in (("True", {}), ("False", {"HF_HUB_OFFLINE": "1"})):
        results, opened = watched(WATCHED.format(offline=offline), tmp_path, HF_HOME=str(tmp_path / "home"), **environment)
        assert opened == []
        assert results[0] == str(folder)
        assert results[1] == ["config.json", "sub/extra.json", "tokenizer.json"]
        assert "not in the local cache" in results[2]
        assert "without any *.gguf" in results[3]
        assert "is no revision" in results[4]
        assert "not in the local cache" in results[5]
    assert len(server.requests) == asked
    # The watch itself works: online, the same calls do open sockets.
    assert watched(WATCHED.format(offline="False"), tmp_path, HF_HOME=str(tmp_path / "home"))[1]


def test_importing_the_door_opens_and_loads_nothing() -> None:
    code = "import edgeinfer.models.hub, edgeinfer.models.resolve, edgeinfer.models.store, sys; print('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
