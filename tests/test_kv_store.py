"""Saved conversations on disk: found by their tokens, bounded, private, and never returned damaged."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from edgeinfer.errors import BadRequest
from edgeinfer.runtime import kv_file
from edgeinfer.runtime.kv_store import KVKey, KVStore, KVStoreOptions
from hypothesis import given, settings
from hypothesis import strategies as st

KEY = KVKey(model="m", kv_type="f16", layout="fake", library="test 1")
HEAD = kv_file.file_size(KEY, 0, 0)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


# -------------------------------------------------------------------------------------------------------- against a model


@dataclass
class Model:
    """What a store should hold: (key, tokens, data), least recently used first."""

    max_bytes: int
    held: list[tuple[KVKey, tuple[int, ...], bytes]]

    @staticmethod
    def size(entry) -> int:
        key, tokens, data = entry
        return kv_file.file_size(key, len(tokens), len(data))

    def save(self, key, tokens, data) -> bool:
        entry = (key, tokens, data)
        if not tokens or self.size(entry) > self.max_bytes:
            return False
        longer = [other for other in self.held if other[0] == key and other[1][: len(tokens)] == tokens]
        if longer:
            self.touch(longer[-1])
            return True
        self.held = [other for other in self.held if not (other[0] == key and tokens[: len(other[1])] == other[1])]
        while self.held and sum(map(self.size, self.held)) + self.size(entry) > self.max_bytes:
            self.held.pop(0)
        self.held.append(entry)
        return True

    def touch(self, entry) -> None:
        self.held.remove(entry)
        self.held.append(entry)

    def shared(self, key, tokens) -> int:
        return max((len(os.path.commonprefix([other[1], tokens])) for other in self.held if other[0] == key), default=0)


KEYS = [KEY, replace(KEY, model="other"), replace(KEY, adapter="lora")]
TOKENS = st.lists(st.integers(0, 2), max_size=6).map(tuple)
SAVES = st.tuples(st.just("save"), st.sampled_from(KEYS), TOKENS, st.binary(max_size=300))
ASKS = st.tuples(st.just("ask"), st.sampled_from(KEYS), TOKENS, st.booleans())


@settings(max_examples=60, deadline=None)
@given(st.lists(SAVES | SAVES | ASKS, max_size=25), st.integers(HEAD, 4 * HEAD), st.booleans())
def test_the_store_behaves_as_its_model(steps, max_bytes: int, reopening: bool) -> None:
    """Longest prefix found, shorter replaced, least recently used evicted, the bound kept; the same when a fresh store looks at the files each time."""
    with tempfile.TemporaryDirectory() as name:
        store, model = KVStore(Path(name), max_bytes=max_bytes), Model(max_bytes, [])
        for step, key, tokens, extra in steps:
            if reopening:
                clock, store = store._clock, KVStore(Path(name), max_bytes=max_bytes)
                store._clock = clock
            if step == "save":
                assert store.save(key, tokens, extra) == model.save(key, tokens, extra)
            else:
                found = store.best(key, tokens)
                assert (found.shared if found else 0) == model.shared(key, tokens)
                if found and extra:
                    entry = next(entry for entry in model.held if entry[0] == key and entry[1] == tuple(found.tokens))
                    assert store.read(found) == entry[2]
                    model.touch(entry)
            assert store.total_bytes == sum(map(model.size, model.held)) <= max_bytes
            for key in KEYS:
                assert [tuple(saved.tokens) for saved in store.entries(key)] == [entry[1] for entry in reversed(model.held) if entry[0] == key]
        assert not store.notices and len(files(Path(name))) == len(model.held)


def test_a_saved_conversation_outlives_the_store(tmp_path) -> None:
    assert KVStore(tmp_path, max_bytes=10_000).save(KEY, [5, 6, 7], b"kv")
    store = KVStore(tmp_path, max_bytes=10_000)
    found = store.best(KEY, [5, 6, 8, 9])
    assert found.shared == 2 and found.tokens.tolist() == [5, 6, 7] and store.read(found) == b"kv"
    assert store.best(KEY, [6, 5]) is None and store.best(KEY, []) is None


@pytest.mark.parametrize("change", [{"model": "n"}, {"kv_type": "q8_0"}, {"adapter": "a"}, {"layout": "other"}, {"library": "test 2"}, {"format": 2}])
def test_another_key_never_matches(tmp_path, change) -> None:
    store = KVStore(tmp_path, max_bytes=10_000)
    store.save(KEY, [1, 2, 3], b"kv")
    other = replace(KEY, **change)
    assert store.best(other, [1, 2, 3]) is None and store.best(KEY, [1, 2, 3]).shared == 3
    # Nor when its file is under the name of the other key.
    path, = files(tmp_path)
    path.rename(tmp_path / path.name.replace(KEY.digest, other.digest))
    assert store.best(other, [1, 2, 3]) is None


def test_of_equals_the_smallest_is_read(tmp_path) -> None:
    store = KVStore(tmp_path, max_bytes=10_000)
    store.save(KEY, [1, 2, 3, 4], b"x" * 40)
    store.save(KEY, [1, 2, 5], b"x" * 30)
    assert store.best(KEY, [1, 2, 9]).tokens.tolist() == [1, 2, 5]


def test_what_is_larger_than_the_store_is_not_saved_and_costs_nothing(tmp_path) -> None:
    store = KVStore(tmp_path, max_bytes=1_000)
    assert store.save(KEY, [1], b"small") and not store.save(KEY, [2], b"x" * 1_000)
    assert store.best(KEY, [1]) is not None and store.best(KEY, [2]) is None


# ------------------------------------------------------------------------------------------------------------------ damage


def saved_file(folder: Path) -> tuple[KVStore, Path]:
    store = KVStore(folder, max_bytes=1 << 20)
    assert store.save(KEY, range(40), bytes(range(256)) * 2)
    path, = files(folder)
    return store, path


def look(folder: Path) -> bytes | None:
    """What a fresh store gets."""
    store = KVStore(folder, max_bytes=1 << 20)
    found = store.best(KEY, range(40))
    return None if found is None else store.read(found)


def test_a_flipped_bit_anywhere_is_detected(tmp_path) -> None:
    _, path = saved_file(tmp_path)
    whole = path.read_bytes()
    assert look(tmp_path) == bytes(range(256)) * 2
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        assert look(tmp_path) is None, place
    path.write_bytes(whole)
    assert look(tmp_path) == bytes(range(256)) * 2


def test_a_file_cut_or_extended_anywhere_is_detected(tmp_path) -> None:
    _, path = saved_file(tmp_path)
    whole = path.read_bytes()
    for damaged in [*(whole[:length] for length in range(0, len(whole), 3)), whole + b"x", whole + whole]:
        path.write_bytes(damaged)
        assert look(tmp_path) is None and not path.exists(), len(damaged)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_are_survived(data: bytes, with_magic: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        _, path = saved_file(Path(name))
        path.write_bytes(path.read_bytes()[:12] + data if with_magic else data)
        assert look(Path(name)) is None


def test_a_damaged_head_makes_nobody_allocate_what_it_claims(tmp_path) -> None:
    """Sizes of the largest the fields can say, in a program that may have little memory."""
    _, path = saved_file(tmp_path)
    code = (
        "import resource, sys; from edgeinfer.runtime.kv_store import KVStore; from tests_key import KEY\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "assert KVStore(sys.argv[1], max_bytes=1 << 20).best(KEY, range(40)) is None"
    )
    (tmp_path / "tests_key.py").write_text(f"from edgeinfer.runtime.kv_store import KVKey\nKEY = {KEY!r}\n")
    whole = path.read_bytes()
    for place, width in ((12, 4), (16, 8), (24, 8)):
        for value in (b"\xff" * width, (1 << (8 * width - 2)).to_bytes(width, "little")):
            path.write_bytes(whole[:place] + value + whole[place + width :])
            subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=os.environ | {"PYTHONPATH": str(tmp_path)})
            assert not path.exists()


def test_damage_is_reported_once_and_removed(tmp_path) -> None:
    store, path = saved_file(tmp_path)
    found = store.best(KEY, range(40))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert store.read(found) is None and not path.exists()
    notice, = store.notices
    assert path.name in notice and "damaged" in notice
    assert store.best(KEY, range(40)) is None and store.save(KEY, range(40), b"again")


def test_a_file_of_a_later_format_is_left_alone(tmp_path) -> None:
    store, path = saved_file(tmp_path)
    data = bytearray(path.read_bytes())
    data[8] += 1
    path.write_bytes(data)
    assert store.best(KEY, range(40)) is None and path.exists() and not store.notices and store.total_bytes == len(data)


# ----------------------------------------------------------------------------------------------------- other processes, the disk


def test_two_stores_share_a_folder(tmp_path) -> None:
    one, two = KVStore(tmp_path, max_bytes=2_000), KVStore(tmp_path, max_bytes=2_000)
    one.save(KEY, [1, 2], b"a")
    two.save(KEY, [3, 4], b"b")
    assert one.read(one.best(KEY, [3])) == b"b" and two.read(two.best(KEY, [1])) == b"a"
    found = one.best(KEY, [3, 4])
    two.save(KEY, [3, 4, 5], b"c")                       # replaces it under the other's feet
    assert one.read(found) is None and not one.notices
    assert one.read(one.best(KEY, [3, 4])) == b"c"
    found = one.best(KEY, [1])
    two.clear()
    assert one.read(found) is None and one.best(KEY, [1]) is None and one.total_bytes == 0 and not one.notices


def test_the_other_one_saved_something_else_under_the_name(tmp_path) -> None:
    store, path = saved_file(tmp_path)
    found = store.best(KEY, range(40))
    KVStore(tmp_path / "elsewhere", max_bytes=10_000).save(KEY, [1], b"other")
    other, = files(tmp_path / "elsewhere")
    os.replace(other, path)
    assert store.read(found) is None and path.exists() and not store.notices


WRITER = """
import random, sys
from edgeinfer.runtime.kv_store import KVStore
from tests_key import KEY
draw, store = random.Random(int(sys.argv[2])), KVStore(sys.argv[1], max_bytes=40_000)
reads = 0
for _ in range(150):
    tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 9))]
    if draw.random() < 0.5:
        assert store.save(KEY, tokens, bytes(tokens) * 800)
    else:
        found = store.best(KEY, tokens)
        data = found and store.read(found)
        assert data is None or data == bytes(found.tokens.tolist()) * 800
        reads += data is not None
assert reads > 10 and not store.notices, (reads, store.notices)
"""


def test_processes_that_write_at_once_corrupt_nothing(tmp_path) -> None:
    folder = tmp_path / "kv"
    (tmp_path / "tests_key.py").write_text(f"from edgeinfer.runtime.kv_store import KVKey\nKEY = {KEY!r}\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    running = [subprocess.Popen([sys.executable, "-c", WRITER, str(folder), str(seed)], env=environment, stderr=subprocess.PIPE) for seed in range(3)]
    for process in running:
        _, problem = process.communicate()
        assert process.returncode == 0, problem.decode()
    store = KVStore(folder, max_bytes=40_000)
    assert 0 < store.total_bytes <= 40_000 and len(store.entries(KEY)) == len(files(folder))


def test_private(tmp_path) -> None:
    before = os.umask(0)
    try:
        store = KVStore(tmp_path / "new" / "kv", max_bytes=10_000)
        store.save(KEY, [1], b"x")
    finally:
        os.umask(before)
    path, = files(store.folder)
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700 and stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
def test_a_full_disk_costs_the_new_one_alone(tmp_path, monkeypatch, where: str) -> None:
    store = KVStore(tmp_path, max_bytes=3 * HEAD)
    store.save(KEY, [1, 2], b"a")
    store.save(KEY, [3, 4], b"b")

    def full(*_arguments, **_named):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if where == "write":
            patch.setattr(kv_file, "write", lambda file, *_: (file.write(b"half"), full()))
        else:
            patch.setattr(os, where, full)
        assert store.save(KEY, [1, 2, 3], b"longer") is False
    notice, = store.notices
    assert "No space left" in notice and "3 tokens" in notice
    assert not [path for path in files(tmp_path) if path.suffix != ".kv"]
    assert store.read(store.best(KEY, [1, 2, 3])) == b"a" and store.read(store.best(KEY, [3])) == b"b"
    assert store.save(KEY, [1, 2, 3], b"longer")


def test_a_folder_that_vanishes_is_made_again(tmp_path) -> None:
    store = KVStore(tmp_path / "kv", max_bytes=10_000)
    (tmp_path / "kv").rmdir()
    assert store.best(KEY, [1]) is None and store.total_bytes == 0
    assert store.save(KEY, [1], b"x") and store.read(store.best(KEY, [1])) == b"x" and not store.notices


def test_what_killed_programs_left_is_removed_and_what_is_being_written_is_not(tmp_path) -> None:
    store, path = saved_file(tmp_path)
    old, new = (tmp_path / f".{path.name}.{name}.partial" for name in ("old", "new"))
    for partial in (old, new):
        partial.write_bytes(b"half")
    os.utime(old, (time.time() - 3600, time.time() - 3600))
    (tmp_path / "notes.txt").write_text("mine")
    os.utime(tmp_path / "notes.txt", (0, 0))
    KVStore(tmp_path, max_bytes=1 << 20)
    assert files(tmp_path) == sorted([new, path, tmp_path / "notes.txt"])
    store.clear()
    assert (tmp_path / "notes.txt").exists() and not path.exists()


def test_only_regular_files_are_opened(tmp_path) -> None:
    store, path = saved_file(tmp_path)
    secret = tmp_path / "secret"
    path.rename(secret)
    path.symlink_to(secret)
    assert store.best(KEY, range(40)) is None
    path.unlink()
    os.mkfifo(path)                                      # opening it would wait for ever
    assert store.best(KEY, range(40)) is None and store.total_bytes == 0


def test_folders_that_cannot_be_used_are_refused(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadRequest, match="file"):
        KVStore(tmp_path / "file", max_bytes=1)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(BadRequest, match="everybody may write"):
        KVStore(tmp_path / "open", max_bytes=1)


@pytest.mark.parametrize("options", [{"kv_cache_bytes": 0}, {"kv_cache_bytes": 1.5}, {"kv_cache_bytes": True}, {"kv_cache_dir": ""}, {"kv_cache_dir": 3}])
def test_options_are_checked(options) -> None:
    with pytest.raises(BadRequest):
        KVStoreOptions(**options)
