"""Conversations that outlive their slot and their engine, on the scripted backend: exact counts, and nobody's KV under another's name."""

from __future__ import annotations

import errno
import gc
import os
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.errors import BackendFailed, UnsupportedParameter
from edgeinfer.runtime import kv_file, kv_spill
from edgeinfer.runtime.backends.fake import ScriptedBackend
from edgeinfer.runtime.engine import EngineCore
from edgeinfer.runtime.kv_spill import KVPersistence
from edgeinfer.runtime.kv_store import KVStore
from edgeinfer.runtime.scheduler import SchedulerOptions
from edgeinfer.runtime.service import Engine

LONG = "".join(chr(97 + i * i % 23) for i in range(400))     # long enough to be saved; starts like nothing else here
OTHER = LONG[::-1].upper()
ADAPTERS = {"poet": "weights of the poet"}


class Session:
    """An engine, and what a test wants to know of its parts."""

    def __init__(self, engine: Engine, backend: ScriptedBackend, persistence: KVPersistence):
        self.engine, self.backend, self.persistence = engine, backend, persistence

    def ask(self, prompt: str, **fields) -> tuple[str, int, int]:
        """Text, cached tokens and tokens computed for one answer."""
        before = self.backend.tokens_computed
        stream = self.engine.generate(prompt, **fields)
        return stream.text(), stream.usage.cached_tokens, self.backend.tokens_computed - before


@contextmanager
def session(folder: Path, *, max_bytes: int = 1 << 20, info=None, adapters=ADAPTERS, **settings):
    settings = {"n_ctx": 2048, "max_slots": 2, "adapters": tuple(ADAPTERS)} | settings
    backend = ScriptedBackend([b"a", b"b", b"c"], **settings)
    backend.info = replace(backend.info, **(info or {}))
    persistence = KVPersistence(backend, KVStore(folder, max_bytes=max_bytes), adapters=adapters)
    engine = Engine(backend, persistence=persistence)
    try:
        yield Session(engine, backend, persistence)
    finally:
        engine.close()


def saved(folder: Path) -> int:
    return len(list(folder.glob("*.kv")))


def test_a_restarted_engine_goes_on_where_it_was(tmp_path) -> None:
    with session(tmp_path) as first:
        assert first.ask(LONG) == ("abc", 0, 403)
    assert saved(tmp_path) == 1
    with session(tmp_path) as second:
        # The conversation and its answer come back: only what is new is computed.
        assert second.ask(LONG + "abc, and then?") == ("abc", 403, 11 + 3)
        assert second.persistence.restored == 1
        assert second.ask(LONG + "abc, and then?abc!")[1] == 417      # from the slot now
        assert second.persistence.restored == 1
    assert saved(tmp_path) == 1                          # the longer one replaced the shorter


def test_regenerating_after_a_restart_computes_one_token(tmp_path) -> None:
    with session(tmp_path) as first:
        first.ask(LONG)
    with session(tmp_path) as second:
        assert second.ask(LONG) == ("abc", 399, 1 + 3)
        assert second.persistence.spilled == 0           # what the disk has is not written again


def test_a_conversation_that_branched_off_comes_back_up_to_there(tmp_path) -> None:
    with session(tmp_path) as first:
        first.ask(LONG)
    with session(tmp_path) as second:
        assert second.ask(LONG[:300] + "something else") == ("abc", 300, 14 + 3)
    assert saved(tmp_path) == 2


def test_one_that_is_evicted_while_the_engine_runs_comes_back(tmp_path) -> None:
    with session(tmp_path, max_slots=1) as one:
        one.ask(LONG)
        assert one.ask(OTHER)[1] == 0
        one.persistence.drain()
        assert one.ask(LONG + "abc!") == ("abc", 403, 1 + 3)
        one.persistence.drain()
        assert one.ask(OTHER + "abc!")[1] == 403
    assert saved(tmp_path) == 2


def test_pressure_on_the_cache_saves_what_it_evicts(tmp_path) -> None:
    with session(tmp_path, max_slots=4, kv_cells=900) as one:
        one.ask(LONG)
        one.ask(OTHER)
        one.ask("#" * 300)                               # the cells are used up: LONG goes
        one.persistence.drain()
        assert one.ask(LONG + "abc!")[1] == 403          # for which OTHER makes room
        assert one.engine.counters.failed == 0


def test_what_another_slot_continues_is_not_saved_twice(tmp_path) -> None:
    with session(tmp_path, max_slots=4) as one:
        one.ask(LONG, max_tokens=1)
        one.ask(LONG[:350] + OTHER)
        one.ask(LONG[:350] + OTHER + "abc and more")
    assert sorted(len(entry.tokens) for entry in KVStore(tmp_path, max_bytes=1 << 20).entries(kv_spill.key_of(one.backend.info))) == [400, 350 + 400 + 12 + 3]


def test_another_answer_replaces_the_last_one_without_the_disk(tmp_path) -> None:
    with session(tmp_path, max_slots=1) as one:
        for _ in range(3):
            assert one.ask(LONG)[0] == "abc"
        one.persistence.drain()
        assert one.persistence.spilled == 0
        one.ask(LONG[:300])                              # but a hundred tokens are worth keeping
        one.persistence.drain()
        assert one.persistence.spilled == saved(tmp_path) == 1


def test_the_same_words_for_another_adapter_do_not_lose_the_conversation(tmp_path) -> None:
    with session(tmp_path, max_slots=1) as one:
        one.ask(LONG)
        one.ask(LONG + "abc!", adapter="poet")
        one.persistence.drain()
        assert one.ask(LONG + "abc!")[1] == 403


@pytest.mark.parametrize("prompt", ["short", LONG[: kv_spill.MIN_TOKENS - 4]])
def test_short_conversations_are_not_saved(tmp_path, prompt: str) -> None:
    with session(tmp_path) as one:
        one.ask(prompt)
    assert saved(tmp_path) == 0


def test_little_gain_is_not_worth_reading(tmp_path) -> None:
    with session(tmp_path) as first:
        first.ask(LONG)
    with session(tmp_path) as second:
        second.ask(LONG[:350])
        assert second.persistence.restored == 1
        assert second.ask(LONG[:380] + "!") [1] == 350   # 30 more on the disk, which the slot has up to there
        assert second.persistence.restored == 1
    with session(tmp_path) as third:
        assert third.ask(LONG[: kv_spill.MIN_GAIN] + "!")[1] == kv_spill.MIN_GAIN
        assert third.ask(OTHER[:10] + LONG)[1] == 0


@pytest.mark.parametrize("change", [{"fingerprint": "another model"}, {"kv_type": "q8_0"}])
def test_another_model_or_kv_type_never_matches(tmp_path, change) -> None:
    with session(tmp_path) as first:
        first.ask(LONG)
    with session(tmp_path, info=change) as second:
        assert second.ask(LONG)[1] == 0 and second.persistence.restored == 0
    with session(tmp_path) as third:
        assert third.ask(LONG)[1] == 399


def test_adapters_are_kept_apart_and_known_by_their_weights(tmp_path) -> None:
    with session(tmp_path) as first:
        first.ask(LONG, adapter="poet")
    with session(tmp_path) as second:
        assert second.ask(LONG)[1] == 0
        assert second.ask(LONG, adapter="poet")[1] == 399
    with session(tmp_path, adapters={"poet": "weights that were trained on"}) as third:
        assert third.ask(LONG, adapter="poet")[1] == 0
    before = saved(tmp_path)
    with session(tmp_path, adapters={}) as fourth:       # nobody can say which adapter this is
        assert fourth.ask(LONG + "!", adapter="poet")[1] == 0
    assert saved(tmp_path) == before


def test_running_conversations_are_saved_when_the_engine_closes(tmp_path) -> None:
    reached, go = threading.Event(), threading.Event()

    def hold(plan) -> None:
        if plan.decodes:
            reached.set()
            assert go.wait(60)

    with session(tmp_path, before_forward=hold) as first:
        stream = first.engine.generate(LONG)
        assert reached.wait(60)
        closing = threading.Thread(target=first.engine.close)
        closing.start()
        go.set()
        closing.join()
        assert stream.wait(60) and stream.error is not None
    with session(tmp_path) as second:
        assert second.ask(LONG)[1] == 399


def test_what_a_context_shift_moved_is_not_saved(tmp_path) -> None:
    with session(tmp_path, n_ctx=500) as first:
        first.backend._next = lambda tokens: ord("z")
        text = first.engine.generate(LONG, context_policy="shift", max_tokens=200).text()
        assert text == "z" * 200
    entries = KVStore(tmp_path, max_bytes=1 << 20).entries(kv_spill.key_of(first.backend.info))
    assert not [entry for entry in entries if entry.tokens.tolist() != list(LONG.encode())[: len(entry.tokens)]]


def test_a_failed_disk_hurts_no_request(tmp_path, monkeypatch) -> None:
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with session(tmp_path, max_slots=1) as one:
        monkeypatch.setattr(kv_file, "write", full)
        assert one.ask(LONG)[0] == one.ask(OTHER)[0] == "abc"
        one.persistence.drain()
        assert any("No space left" in notice for notice in one.persistence.notices)
    assert saved(tmp_path) == 0 and not list(tmp_path.iterdir())


def test_a_damaged_file_costs_only_its_reuse(tmp_path) -> None:
    with session(tmp_path) as first:
        first.ask(LONG)
    path, = tmp_path.glob("*.kv")
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    with session(tmp_path) as second:
        assert second.ask(LONG) == ("abc", 0, 403)
        assert any("damaged" in notice for notice in second.persistence.notices)
    assert saved(tmp_path) == 1                          # and saved anew


def test_an_export_that_fails_hurts_no_request(tmp_path) -> None:
    with session(tmp_path, max_slots=1) as one:
        def broken(slot: int) -> bytes:
            raise BackendFailed("nothing to be had")

        one.backend.export_slot = broken
        assert one.ask(LONG)[0] == one.ask(OTHER)[0] == "abc"
        assert any("nothing to be had" in notice for notice in one.persistence.notices)
    assert one.backend.closed


def test_what_the_backend_does_not_take_back_is_computed(tmp_path) -> None:
    with session(tmp_path) as first:
        first.ask(LONG)
    with session(tmp_path) as second:
        second.backend.import_slot = lambda slot, data: False
        assert second.ask(LONG) == ("abc", 0, 403) and second.persistence.restored == 0
        assert any("not taken back" in notice for notice in second.persistence.notices)


def test_kv_that_cannot_be_cut_back_is_used_whole_or_not_at_all(tmp_path) -> None:
    """A sliding window: of a longer conversation nothing is left that a shorter one could use."""
    with session(tmp_path) as first:
        first.ask(LONG)
    with session(tmp_path) as second:
        second.backend.reusable = lambda slot, length, wanted: wanted if wanted == length else 0
        reads = []
        read, second.persistence._store.read = second.persistence._store.read, lambda found: reads.append(found) or read(found)
        for _ in range(2):
            assert second.ask(LONG[:300] + "!")[1] == 0
        assert len(reads) == 1                           # it is not read again for nothing
        assert second.ask(LONG + "abc!")[1] == 403


def test_a_seeded_request_alone_is_computed_as_in_an_empty_cache(tmp_path) -> None:
    with session(tmp_path, info={"shared_cells": True}) as first:
        first.ask(LONG)
    with session(tmp_path, info={"shared_cells": True}) as second:
        assert second.ask(LONG, seed=7, temperature=1.0)[1] == 0


def test_a_disk_that_is_too_slow_is_left_alone(tmp_path, monkeypatch) -> None:
    """Exports wait in memory only up to a bound."""
    monkeypatch.setattr(kv_spill, "_PENDING_BYTES", 1000)
    go = threading.Event()
    with session(tmp_path, max_slots=1) as one:
        save, one.persistence._writer.save = one.persistence._writer.save, lambda *entry: go.wait(60) and save(*entry)
        for prompt in (LONG, OTHER, "#" * 300, "!" * 300):
            one.ask(prompt)
        assert one.persistence.spilled == 1
        assert any("slower" in notice for notice in one.persistence.notices)
        go.set()


def test_backends_that_cannot_export_or_name_their_model_are_refused(tmp_path) -> None:
    for change in ({"can_export": False}, {"fingerprint": ""}):
        backend = ScriptedBackend()
        backend.info = replace(backend.info, **change)
        with pytest.raises(UnsupportedParameter, match="kv_cache_dir"):
            KVPersistence(backend, KVStore(tmp_path, max_bytes=1000))


def test_a_failed_engine_saves_nothing(tmp_path) -> None:
    """What a backend holds that failed in an unknown way may be anything."""
    backend = ScriptedBackend(n_ctx=2048)
    persistence = KVPersistence(backend, KVStore(tmp_path, max_bytes=1 << 20))
    core = EngineCore(backend, SchedulerOptions(), persistence=persistence)
    slot = core.slots.slots[0]
    slot.tokens, slot.length = list(range(300)), 300
    backend._slots[0] = list(range(300))
    core.abandon(BackendFailed("over"))
    core.close()
    assert saved(tmp_path) == 0 and backend.closed


def test_no_thread_outlives_its_engine(tmp_path) -> None:
    before = threading.active_count()
    for _ in range(3):
        with session(tmp_path, max_slots=1) as one:
            one.ask(LONG)
            one.ask(OTHER)
    gc.collect()
    assert threading.active_count() == before


def test_a_fault_in_the_writing_thread_is_told(tmp_path) -> None:
    with session(tmp_path, max_slots=1) as one:
        def broken(*_):
            raise ValueError("a fault of ours")

        one.persistence._writer.save = broken
        assert one.ask(LONG)[0] == one.ask(OTHER)[0] == "abc"
        one.persistence.drain()
        assert any("ValueError: a fault of ours" in notice for notice in one.engine.notices)


def test_an_import_that_fails_hurts_no_request(tmp_path) -> None:
    with session(tmp_path) as first:
        first.ask(LONG)
    with session(tmp_path) as second:
        def broken(slot: int, data: bytes) -> bool:
            raise BackendFailed("nothing to be given")

        second.backend.import_slot = broken
        assert second.ask(LONG) == ("abc", 0, 403)
        assert any("nothing to be given" in notice for notice in second.engine.notices)


# ----------------------------------------------------------------------------------------------------------------- properties

PIECES = [bytes([97 + number]) * 9 for number in range(4)]
STEPS = st.lists(
    st.one_of(
        st.just("restart"),
        st.tuples(st.lists(st.sampled_from(PIECES), min_size=1, max_size=5), st.sampled_from([None, "poet"]), st.booleans()),
    ),
    min_size=2, max_size=12,
)


def told(tokens: list[int]) -> int:
    """A token that depends on every one before it: with a wrong one in the KV, another answer."""
    return 33 + sum((place + 1) * token for place, token in enumerate(tokens)) % 60


def answer_to(prompt: bytes, length: int) -> str:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + length:
        tokens.append(told(tokens))
    return bytes(tokens[len(prompt):]).decode()


@settings(max_examples=40, deadline=None)
@given(STEPS, st.integers(1, 3), st.sampled_from([0, 70, 120]), st.sampled_from([600, 2000, 1 << 20]))
def test_whatever_comes_back_is_what_was_there(steps, max_slots: int, kv_cells: int, max_bytes: int) -> None:
    """Answers depend on prompts alone, whatever was evicted, saved, replaced and restored; every prompt token is either cached or computed."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_spill, "MIN_TOKENS", 8)
        patch.setattr(kv_spill, "MIN_GAIN", 2)
        options = {"max_slots": max_slots, "kv_cells": kv_cells or None, "n_ctx": 64, "max_bytes": max_bytes}
        steps = [*steps, "restart"]
        while steps:
            run, steps = steps[: steps.index("restart")], steps[steps.index("restart") + 1 :]
            with session(Path(name), **options) as one:
                one.backend._next = told
                for pieces, adapter, patient in run:
                    if patient:
                        one.persistence.drain()
                    prompt = b"".join(pieces)
                    text, cached, computed = one.ask(prompt.decode(), adapter=adapter, max_tokens=3)
                    assert text == answer_to(prompt, 3) and cached + computed == len(prompt) + 2
                assert not one.persistence.notices
            assert KVStore(name, max_bytes=max_bytes).total_bytes <= max_bytes
