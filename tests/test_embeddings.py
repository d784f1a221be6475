"""Embeddings through the engine: what they are, what they depend on, and what they do to those who are answered meanwhile."""

from __future__ import annotations

import asyncio
import gc
import struct
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import edgeinfer
import gguf
import numpy as np
import pytest
from edgeinfer.convert import convert
from edgeinfer.errors import BackendFailed, BadRequest, ContextLengthExceeded, EngineBusy, EngineClosed, OutOfMemory, UnsupportedParameter
from edgeinfer.runtime.backends.fake import ScriptedBackend
from edgeinfer.runtime.health import EngineOptions
from edgeinfer.runtime.scheduler import SchedulerOptions
from edgeinfer.runtime.service import Engine
from embedding_oracle import CLS, LAST, MEAN, oracle
from tiny import tiny

TEXTS = ["a", "the cat sat on the mat", "x" * 200, "the cat sat on the mat", "\u00e9\u65e5\u672c\U0001f642"]


def same(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


class Gate:
    """Lets pieces through one by one, or all."""

    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.inside = threading.Semaphore(0)
        self.permits = threading.Semaphore(0)
        self.open = False

    def __call__(self, piece: Sequence[int]) -> None:
        self.pieces.append(list(piece))
        self.inside.release()
        if not self.open:
            assert self.permits.acquire(timeout=60)

    def entered(self) -> None:
        assert self.inside.acquire(timeout=60)

    def release(self) -> None:
        self.open = True
        for _ in range(1000):
            self.permits.release()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.release()


# ---------------------------------------------------------------------------------------------------------- what they are


def test_a_list_is_one_by_one() -> None:
    with Engine(ScriptedBackend()) as engine:
        together = engine.embed(TEXTS)
        assert same(together.vectors, [engine.embed([text]).vectors[0] for text in TEXTS])
        assert together.prompt_tokens == sum(engine.embed([text]).prompt_tokens for text in TEXTS) == sum(len(text.encode()) for text in TEXTS)
        for vector in together.vectors:
            assert vector.dtype == np.float32 and vector.shape == (engine.info.n_embd,) and abs(np.linalg.norm(vector) - 1) < 1e-6
        assert same(engine.embed([list(text.encode()) for text in TEXTS]).vectors, together.vectors)


def test_what_cannot_be_embedded_is_said_before_anything_is_computed() -> None:
    gate = Gate()
    gate.open = True
    with Engine(ScriptedBackend(n_ctx=50, before_embed=gate)) as engine:
        for inputs, words in (
            ([], "nothing to embed"), ("text", "as a list"), (None, "as a list"), (["fine", ""], "Input 1 to embed is empty"), (["fine", []], "Input 1 to embed is empty"),
            ([[1, 2], [5, 9999]], "token id 9999"), ([[-1]], "token id -1"), ([[True]], "Input 0"), ([1, 2], "Input 0"), ([["a"]], "Input 0"), ([None], "not NoneType"), ([b"ab"], "not bytes"),
        ):
            with pytest.raises(BadRequest, match=words):
                engine.embed(inputs)
        with pytest.raises(ContextLengthExceeded, match="input 1 of 2") as caught:
            engine.embed(["fine", "x" * 51])
        assert (caught.value.needed, caught.value.available) == (51, 50)
        assert not gate.pieces
        assert engine.embed(["x" * 50]).prompt_tokens == 50


def test_models_that_only_answer_and_models_that_only_embed() -> None:
    backend = ScriptedBackend()
    backend.info = replace(backend.info, can_embed=False)
    with Engine(backend) as engine, pytest.raises(UnsupportedParameter, match="no embeddings"):
        engine.embed(["text"])
    backend = ScriptedBackend()
    backend.info = replace(backend.info, can_generate=False)
    with Engine(backend) as engine:
        with pytest.raises(UnsupportedParameter, match="encoder"):
            engine.generate("text")
        assert engine.embed(["text"]).vectors


# ------------------------------------------------------------------------------------------------------------- in company


def test_between_two_steps_of_an_answer_lies_at_most_one_piece() -> None:
    happened: list[str] = []
    queued = threading.Event()

    def step(_plan: object) -> None:
        happened.append("s")
        assert queued.wait(60)

    backend = ScriptedBackend([b"a"] * 200, max_batch=8, before_forward=step, before_embed=lambda _piece: happened.append("p"))
    with Engine(backend) as engine:
        answers = [engine.generate("hello") for _ in range(2)]
        inputs = [[120] * 100, [121] * 50]
        found = [engine._embedder.submit(inputs) for _ in range(3)]
        queued.set()
        vectors = [each.result(60).vectors for each in found]
        assert all(answer.text() == "a" * 200 for answer in answers)
        pieces = 3 * (13 + 7)
        assert "".join(happened).strip("s") == "ps" * (pieces - 1) + "p"
        assert all(same(each, engine.embed(inputs).vectors) for each in vectors)


def test_callers_take_turns(gate: Gate) -> None:
    with Engine(ScriptedBackend(max_batch=8, before_embed=gate)) as engine, ThreadPoolExecutor(2) as threads:
        many = threads.submit(engine.embed, ["x" * 20] * 100)
        gate.entered()
        few = threads.submit(engine.embed, ["y"])
        while not few.done():
            gate.permits.release()
            gate.entered()
        assert few.result().prompt_tokens == 1 and not many.done()
        gate.release()
        assert len(many.result().vectors) == 100
        # An input is not left half done: the pieces of one follow one another.
        lengths = [len(piece) for piece in gate.pieces if piece != [ord("y")]]
        assert lengths == [8, 8, 4] * 100


def test_from_many_threads_at_once_beside_answers() -> None:
    with Engine(ScriptedBackend([b"a"] * 30, max_batch=16)) as engine, ThreadPoolExecutor(8) as threads:
        expected = engine.embed(TEXTS).vectors
        found = [threads.submit(engine.embed, TEXTS) for _ in range(40)]
        answers = [engine.generate(f"hello {n}") for n in range(20)]
        assert all(same(each.result().vectors, expected) for each in found)
        assert all(answer.text() == "a" * 30 for answer in answers)
        counters = engine.stats().counters
        assert counters.submitted == counters.finished == 20


def test_who_leaves_takes_the_inputs_along(gate: Gate) -> None:
    with Engine(ScriptedBackend(max_batch=8, before_embed=gate)) as engine:

        async def leave() -> None:
            task = asyncio.create_task(engine.aembed(["x" * 500] * 50))
            await asyncio.to_thread(gate.entered)
            other = asyncio.create_task(engine.aembed(["y"]))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.release()
            assert (await other).prompt_tokens == 1

        asyncio.run(leave())
        assert sum(piece[0] == ord("x") for piece in gate.pieces) == 1


def test_only_so_many_may_wait(gate: Gate) -> None:
    with Engine(ScriptedBackend(before_embed=gate), options=SchedulerOptions(max_waiting=2)) as engine:
        waiting = [engine._embedder.submit([[number]]) for number in range(2)]
        with pytest.raises(EngineBusy, match="2 requests for embeddings"):
            engine.embed(["one more"])
        gate.release()
        assert [each.result(60).prompt_tokens for each in waiting] == [1, 1]
        assert engine.embed(["one more"]).vectors


# ---------------------------------------------------------------------------------------------------------------- faults


def test_closing_ends_those_who_wait(gate: Gate) -> None:
    engine = Engine(ScriptedBackend(max_batch=8, before_embed=gate))
    with ThreadPoolExecutor(4) as threads:
        found = [threads.submit(engine.embed, ["x" * 100]) for _ in range(3)]
        gate.entered()
        closing = threads.submit(engine.close)
        gate.release()
        closing.result(timeout=60)
        for each in found:
            assert isinstance(each.exception(timeout=60), EngineClosed)
    with pytest.raises(EngineClosed):
        engine.embed(["x"])
    assert len(gate.pieces) <= 2


@pytest.mark.parametrize("fault", [ValueError("broken"), BackendFailed("broken"), None], ids=["unplanned", "planned", "nan"])
def test_a_fault_is_its_callers_alone(fault) -> None:
    class Faulty(ScriptedBackend):
        def embed(self, tokens):
            if tokens[0] == ord("!"):
                yield
                if fault is None:
                    return np.array([1, np.nan], np.float32)
                raise fault
            return (yield from super().embed(tokens))

    with Engine(Faulty([b"a"] * 50)) as engine, ThreadPoolExecutor(2) as threads:
        answer = engine.generate("hello")
        bad = threads.submit(engine.embed, ["fine", "!", "fine"])
        good = threads.submit(engine.embed, ["fine"] * 20)
        assert isinstance(bad.exception(), BackendFailed) and ("numbers" if fault is None else "broken") in str(bad.exception())
        assert len(good.result().vectors) == 20 and answer.text() == "a" * 50
        assert engine.health.status == "ok"


def test_an_aborted_piece_is_computed_again() -> None:
    pieces: list[int] = []

    def abort_some(piece: Sequence[int]) -> None:
        pieces.append(len(piece))
        if len(pieces) % 2:
            backend.abort()

    backend = ScriptedBackend(max_batch=8, before_embed=abort_some)
    with Engine(backend) as engine, Engine(ScriptedBackend(max_batch=8)) as plain:
        assert same(engine.embed(["x" * 20, "abc"]).vectors, plain.embed(["x" * 20, "abc"]).vectors)
    assert pieces == [8, 8, 8, 8, 4, 4, 3, 3]


def test_a_piece_that_never_ends_fails_those_who_wait_and_is_survived(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.runtime.health._GRACE_S", 0.05)
    engine = Engine(ScriptedBackend([b"a"], before_embed=gate), engine_options=EngineOptions(step_timeout_s=0.2))
    with engine, ThreadPoolExecutor(3) as threads:
        found = [threads.submit(engine.embed, ["x"] * 3) for _ in range(3)]
        for each in found:
            assert isinstance(each.exception(timeout=60), BackendFailed) and "has not finished" in str(each.exception())
        with pytest.raises(BackendFailed, match="has not finished"):
            engine.embed(["more"])
        gate.release()
        while engine.health.status != "ok":
            threading.Event().wait(0.002)
        assert engine.embed(["again"]).prompt_tokens == 5 and engine.generate("x").text() == "a"


def test_a_step_that_hangs_does_not_keep_callers_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.runtime.health._GRACE_S", 0.05)
    inside, release = threading.Event(), threading.Event()

    def hang(_plan: object) -> None:
        inside.set()
        assert release.wait(60)

    with Engine(ScriptedBackend([b"a"], before_forward=hang), engine_options=EngineOptions(step_timeout_s=0.2)) as engine:
        answer = engine.generate("x")
        assert inside.wait(60)
        with pytest.raises(BackendFailed, match="has not finished"):
            engine.embed(["x"])
        release.set()
        assert answer.wait(60)
        while engine.health.status != "ok":
            threading.Event().wait(0.002)
        assert engine.embed(["x"]).prompt_tokens == 1


def test_a_forgotten_engine_is_collected() -> None:
    engine = Engine(ScriptedBackend())
    engine.embed(["x"])
    loop, gone = engine._loop, weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    loop.wait_closed()


# ------------------------------------------------------------------------------------------------------------- real models

SENTENCES = [
    "The cat sat on the mat.", "Paris is the capital of France, and has been for most of a thousand years.", "def add(a, b):\n    return a + b", "?",
    " ".join(f"Line {n}: the quick brown fox jumps over the lazy dog." for n in range(10)),      # more than one piece
]
LONG = " ".join(f"Line {n}: the quick brown fox jumps over the lazy dog." for n in range(37))   # longer than llama.cpp's batch of 512


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf) -> Iterator[Engine]:
    with edgeinfer.load(smollm2_gguf, ctx_size=2048, parallel=2) as engine:
        yield engine


def test_against_llama_cpp_itself(smollm2, smollm2_gguf) -> None:
    texts = [*SENTENCES[:4], LONG]
    found = smollm2.embed(texts)
    assert len(smollm2.tokenize(LONG)) > 513 and found.vectors[0].shape == (576,)
    for ours, theirs in zip(found.vectors, oracle(smollm2_gguf, MEAN, texts), strict=True):
        assert ours @ theirs > 0.9999                    # quantised weights: products round differently in batches of another size


def test_company_changes_no_bit_and_is_not_changed(smollm2) -> None:
    question = [{"role": "user", "content": "Name three colours."}]
    alone = smollm2.chat(question, temperature=0, seed=1, max_tokens=12).text()
    assert 128 < len(smollm2.tokenize(SENTENCES[-1])) < 256
    vectors = [smollm2.embed([text]).vectors[0] for text in SENTENCES]
    with ThreadPoolExecutor(1) as threads:
        answer = smollm2.chat(question, temperature=0, seed=1, max_tokens=12)
        found = threads.submit(smollm2.embed, SENTENCES[::-1])
        assert answer.text() == alone
        assert same(found.result().vectors[::-1], vectors)
    # The memory may be given back at any time.
    smollm2.drop_cache()
    assert same(smollm2.embed(SENTENCES[:2]).vectors, vectors[:2])
    assert smollm2.chat(question, temperature=0, seed=1, max_tokens=12).text() == alone


def test_memory_for_embeddings_is_held_against_the_budget(smollm2_gguf) -> None:
    options = {"ctx_size": 256, "parallel": 1, "kv_unified": True, "cache_slots": 0}
    with edgeinfer.load(smollm2_gguf, **options) as engine:
        held = engine._core.backend._embedding._held
    with edgeinfer.load(smollm2_gguf, **options, max_memory=held + (1 << 20)) as engine:
        with pytest.raises(OutOfMemory, match="context of 256 tokens.*1.0 MiB are left"):
            engine.embed(["text"])
        assert engine.generate("Once", max_tokens=2, temperature=0).text()
    with edgeinfer.load(smollm2_gguf, **options, max_memory=held + (200 << 20)) as engine:
        assert engine.embed(["text"]).vectors


def test_an_abort_in_the_middle_changes_nothing(smollm2) -> None:
    """Aborts are meant for prompts that are read; one may fall on a piece at any point."""
    texts = [SENTENCES[0], SENTENCES[3]]
    expected = smollm2.embed(texts).vectors
    over = threading.Event()

    def abort() -> None:
        for _ in range(10):
            smollm2._core.backend.abort()
            over.wait(0.02)

    aborting = threading.Thread(target=abort)
    aborting.start()
    found = smollm2.embed(texts).vectors
    over.set()
    aborting.join()
    assert same(found, expected)


# -------------------------------------------------------------------------------------------------------------- pooling

EXACT = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attn": "off"}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("decoder")
    convert(tiny(folder / "hf", "llama", dtype="f32"), "gguf-f32", folder / "model.gguf")
    return folder / "model.gguf"


def with_pooling(path: Path, pooling: int) -> Path:
    """A copy that names a pooling type."""
    data = path.read_bytes()
    _, version, tensors, keys = struct.unpack_from("<4sIQQ", data)
    added = _integer(b"llama.pooling_type", pooling)
    added += _integer(b"x" * (-(len(added) + 16) % 32), 0)        # tensors stay where they are aligned
    copy = path.with_name(f"pooling-{pooling}.gguf")
    copy.write_bytes(struct.pack("<4sIQQ", b"GGUF", version, tensors, keys + 2) + added + data[24:])
    return copy


def _integer(name: bytes, value: int) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<II", 4, value)


@pytest.mark.parametrize("pooling", [0, MEAN, CLS, LAST])
def test_a_decoder_pools_as_its_file_says(decoder, pooling) -> None:
    texts = ["hello world", "a " * 150, "b"]
    path = with_pooling(decoder, pooling) if pooling else decoder
    with edgeinfer.load(path, ctx_size=512, threads=1, **EXACT) as engine:
        found = engine.embed(texts)
        assert any(len(engine.tokenize(text)) > 128 for text in texts), "none takes more than one piece"
        for ours, theirs in zip(found.vectors, oracle(path, pooling or MEAN, texts, exact=True), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
        assert same(found.vectors, [engine.embed([text]).vectors[0] for text in texts])


def test_a_reranker_gives_no_embeddings(decoder) -> None:
    with edgeinfer.load(with_pooling(decoder, 4), ctx_size=256, threads=1) as engine, pytest.raises(UnsupportedParameter):
        engine.embed(["x"])


def encoder(path: Path, pooling: int) -> Path:
    """A BERT of two layers with random weights and 640 positions: attention looks both ways, so an input is one native call."""
    width, inner, layers, positions = 64, 128, 2, 640
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *("\u2581" + letter for letter in "abcdefghijklmnopqrstuvwxyz"), "\u2581cat", "\u2581dog"]
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(positions)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(pooling))
    writer.add_token_type_count(2)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([3] * 5 + [1] * (len(words) - 5))
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(3)
    writer.add_unk_token_id(1)
    writer.add_sep_token_id(3)
    writer.add_pad_token_id(0)
    rng = np.random.default_rng(0)
    shapes = {"attn_q": (width, width), "attn_k": (width, width), "attn_v": (width, width), "attn_output": (width, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}
    for name, shape in (("token_embd", (len(words), width)), ("token_types", (2, width)), ("position_embd", (positions, width))):
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32))
    norms = ["token_embd_norm", *(f"blk.{layer}.{name}" for layer in range(layers) for name in ("attn_output_norm", "layer_output_norm"))]
    for layer in range(layers):
        for name, shape in shapes.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", rng.normal(scale=0.2, size=shape).astype(np.float32))
            writer.add_tensor(f"blk.{layer}.{name}.bias", rng.normal(scale=0.2, size=shape[0]).astype(np.float32))
    for name in norms:
        writer.add_tensor(f"{name}.weight", rng.normal(1, 0.1, width).astype(np.float32))
        writer.add_tensor(f"{name}.bias", rng.normal(scale=0.1, size=width).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("pooling", [MEAN, CLS])
def test_an_encoder_embeds_and_does_not_answer(tmp_path, pooling) -> None:
    path = encoder(tmp_path / "bert.gguf", pooling)
    texts = ["cat dog", "a", "a b c d " * 150]           # the last: 602 tokens
    with edgeinfer.load(path, threads=1, **EXACT) as engine:
        assert engine.info.n_ctx == 640 and not engine.info.can_generate
        found = engine.embed(texts)
        assert found.prompt_tokens == 4 + 3 + 602        # [CLS] and [SEP] around each
        for ours, theirs in zip(found.vectors, oracle(path, pooling, texts, exact=True), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
        assert same(found.vectors, [engine.embed([text]).vectors[0] for text in texts])
        for prompt in ("cat", "cat " * 300):
            with pytest.raises(UnsupportedParameter, match="encoder"):
                engine.generate(prompt, max_tokens=2)
        with pytest.raises(ContextLengthExceeded):
            engine.embed(["a " * 700])


def test_a_context_beyond_learned_positions_is_refused(tmp_path) -> None:
    with pytest.raises(BadRequest, match="640 positions"):
        edgeinfer.load(encoder(tmp_path / "bert.gguf", MEAN), ctx_size=1024)
