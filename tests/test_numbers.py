"""How far numbers may move: computed beside others against alone, with reused KV against fresh.

Kernels round differently by the number of rows in a batch, so bits are not promised; that the distribution of the next token stays the same is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from edgeinfer.convert import convert
from edgeinfer.runtime.backends.llamacpp import LlamaCppBackend, LlamaOptions
from edgeinfer.runtime.values import Chunk, StepPlan

TEXT = (Path(__file__).parent / "text_1000.txt").read_text("utf-8")
DECODED = 12                              # tokens of each text that are decoded one by one, the text itself deciding which
TEXTS = 6


class Reader:
    """Computes texts on a backend and keeps the rows of their last `DECODED` tokens and the one before."""

    def __init__(self, backend: LlamaCppBackend):
        self.backend = backend

    def clear(self) -> None:
        for slot in range(self.backend.info.max_slots):
            self.backend.truncate(slot, 0)

    def prefill(self, slot: int, tokens: list[int], start: int = 0, size: int = 512) -> np.ndarray:
        """The row after the last token; ``tokens[:start]`` are in the slot already."""
        for begin in range(start, len(tokens), size):
            chunk = tokens[begin : begin + size]
            result = self.backend.forward(StepPlan((), (Chunk(slot, begin, chunk, 1),)))
        return result.logits[slot][0].copy()

    def decode(self, texts: dict[int, list[int]]) -> dict[int, list[np.ndarray]]:
        """The rows of the last tokens of each slot's text, all slots in one batch a step."""
        rows: dict[int, list[np.ndarray]] = {slot: [] for slot in texts}
        for back in range(DECODED, 0, -1):
            chunks = tuple(Chunk(slot, len(text) - back, text[len(text) - back :][:1], 1) for slot, text in texts.items())
            result = self.backend.forward(StepPlan(chunks, ()))
            for slot in texts:
                rows[slot].append(result.logits[slot][0].copy())
        return rows

    def alone(self, text: list[int]) -> np.ndarray:
        """(DECODED + 1, n_vocab), with nothing else in the KV."""
        self.clear()
        first = self.prefill(0, text[:-DECODED])
        return np.stack([first, *self.decode({0: text})[0]])


def divergence(a: np.ndarray, b: np.ndarray) -> float:
    """Mean Kullback-Leibler divergence of the rows' softmax, in nats."""
    log_p, log_q = (x - x.max(-1, keepdims=True) for x in (a.astype(np.float64), b.astype(np.float64)))
    log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
    log_q -= np.log(np.exp(log_q).sum(-1, keepdims=True))
    return float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean())


MODELS = {"smollm2-q4": 1e-2, "smollm2-f32": 1e-4, "gemma-3-q4": 1e-2}      # and the mean divergence that is allowed


@pytest.fixture(scope="module", params=MODELS)
def limit_and_path(request, tmp_path_factory) -> tuple[float, Path]:
    if request.param == "gemma-3-q4":
        path = request.getfixturevalue("gemma_gguf")
    elif request.param == "smollm2-q4":
        path = request.getfixturevalue("smollm2_gguf")
    else:
        path = tmp_path_factory.mktemp("f32") / "smollm2-f32.gguf"
        convert(request.getfixturevalue("demo_checkpoint"), "gguf-f32", path)
    return MODELS[request.param], path


@pytest.fixture(scope="module", params=[True, False], ids=["unified", "streams"])
def reader(request, limit_and_path) -> Iterator[Reader]:
    # The context holds more than twice Gemma's sliding window of 512 tokens.
    backend = LlamaCppBackend(limit_and_path[1], LlamaOptions(
        ctx_size=1280, kv_size=4096 if request.param else 0, parallel=TEXTS, cache_slots=0, kv_unified=request.param,
    ))
    yield Reader(backend)
    backend.close()


@pytest.fixture(scope="module")
def limit(limit_and_path) -> float:
    return limit_and_path[0]


def tokens_of(reader: Reader, text: str) -> list[int]:
    return reader.backend.vocab.encode(text, add_special=True, parse_special=False)


def test_batched_equals_alone(reader: Reader, limit: float) -> None:
    paragraphs = [paragraph for paragraph in TEXT.split("\n") if paragraph.strip()]
    texts = [tokens_of(reader, paragraph)[: 60 + 5 * at] for at, paragraph in enumerate(paragraphs[:TEXTS])]
    assert all(len(text) > DECODED + 8 for text in texts)
    alone = [reader.alone(text) for text in texts]
    reader.clear()
    first = [reader.prefill(slot, text[:-DECODED]) for slot, text in enumerate(texts)]
    together = reader.decode(dict(enumerate(texts)))
    for slot, rows in enumerate(alone):
        assert divergence(rows, np.stack([first[slot], *together[slot]])) < limit


@pytest.mark.parametrize("shared", [37, 700])            # 700 is beyond Gemma's window
def test_a_copied_prefix_equals_fresh(reader: Reader, limit: float, shared: int) -> None:
    text = tokens_of(reader, TEXT)[: shared + 90]
    fresh = reader.alone(text)
    reader.clear()
    reader.prefill(0, [*text[:shared], *reversed(text[10:60])], size=200)       # the donor goes on differently, and was read in other chunks
    assert reader.backend.reusable(0, shared + 50, shared) == shared
    reader.backend.copy_prefix(0, 1, shared)
    first = reader.prefill(1, text[:-DECODED], start=shared)
    assert divergence(fresh, np.stack([first, *reader.decode({1: text})[1]])) < limit


@pytest.mark.parametrize(("long", "short"), [(1200, 256), (60, 20)])
def test_a_cut_back_slot_equals_fresh(reader: Reader, limit: float, long: int, short: int) -> None:
    """cases 57 and 58: far more tokens than the window holds, then a shorter beginning of the same text, or another text after a few shared tokens."""
    words = tokens_of(reader, f"{TEXT}\n{TEXT}")
    text = [*words[:short], *words[long : long + 40]]
    fresh = reader.alone(text)
    reader.clear()
    reader.prefill(0, words[:long])
    usable = reader.backend.reusable(0, long, short)
    assert usable in (0, short) and reader.backend.truncate(0, usable)
    first = reader.prefill(0, text[:-DECODED], start=usable)
    assert divergence(fresh, np.stack([first, *reader.decode({0: text})[0]])) < limit


def test_the_same_prompt_again_gives_the_same_again(reader: Reader, limit: float) -> None:
    """case 54: with all but the last token reused, five times; nothing drifts."""
    prompt = tokens_of(reader, TEXT)[:80]
    reader.clear()
    rows = [reader.prefill(0, prompt)]
    for _ in range(5):
        assert reader.backend.truncate(0, len(prompt) - 1)
        rows.append(reader.prefill(0, prompt, start=len(prompt) - 1))
    # The first time one batch holds all 80 tokens and then only one, which rounds differently: at a near tie the two may swap, never more than that.
    assert rows[1].max() - rows[1][rows[0].argmax()] < 0.5
    assert divergence(np.stack(rows[:1] * 5), np.stack(rows[1:])) < limit
    assert all(np.array_equal(row, rows[1]) for row in rows[2:])
