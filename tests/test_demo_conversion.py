"""What the demo model says after its conversion: close to the package's own GGUF, token by token, and right in its answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from edgeinfer.convert import convert
from llama_logits import logits

TEXT = (Path(__file__).parent / "text_1000.txt").read_text("utf-8")
PIECE = 250                                              # tokens read at a time, each piece from an empty context

# Questions that llama.cpp's own four conversions of these weights answer alike; others flip between quantisations of so small a model.
ANSWERS = {
    "What is the capital of Japan?": "Tokyo",
    "What is the opposite of hot?": "cold",
    "How many days are in a week?": "7",
    "What is the chemical symbol for water?": "H2O",
    "Who wrote Romeo and Juliet?": "Shakesp",
}
TARGETS = {"gguf-f16": "F16", "gguf-q8": "Q8_0", "gguf-q4": "Q4_K_M", "gguf-q4_0": "Q4_0"}


@pytest.fixture(scope="module")
def converted(demo_checkpoint, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("converted")
    return {target: convert(demo_checkpoint, target, folder / f"{target}.gguf").output for target in TARGETS}


def log_softmax(rows: np.ndarray) -> np.ndarray:
    shifted = rows.astype(np.float64) - rows.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def test_the_f16_conversion_says_what_the_packaged_model_says(converted, smollm2_gguf) -> None:
    from edgeinfer.models.native import NativeModel

    model = NativeModel(smollm2_gguf, vocab_only=True)
    tokens = model.tokenize(TEXT, add_special=False, parse_special=False)[:1000]
    model.close()
    assert len(tokens) == 1000
    divergences, agreements = [], []
    for start in range(0, len(tokens), PIECE):
        piece = tokens[start : start + PIECE]
        reference, ours = (log_softmax(logits(path, piece, PIECE)) for path in (smollm2_gguf, converted["gguf-f16"]))
        divergences.append((np.exp(reference) * (reference - ours)).sum(axis=1))
        agreements.append(reference.argmax(axis=1) == ours.argmax(axis=1))
    divergence, agreement = np.concatenate(divergences).mean(), np.concatenate(agreements).mean()
    print(f"mean KL divergence {divergence:.4f}, top-1 agreement {agreement:.3f}")
    assert divergence < 0.01 and agreement > 0.95


@pytest.mark.parametrize("target", TARGETS)
def test_greedy_answers_hold(converted, target) -> None:
    with edgeinfer.load(converted[target], ctx_size=512) as engine:
        assert engine.info.quantization == TARGETS[target]
        streams = {
            question: engine.chat([{"role": "user", "content": question}], temperature=0, max_tokens=20) for question in ANSWERS
        }
        said = {question: stream.text() for question, stream in streams.items()}
    wrong = {question: text for question, text in said.items() if ANSWERS[question] not in text}
    assert not wrong
