"""Prompts of a given length that repeat with their seed and are natural enough for a tokenizer: about one token a word."""

from __future__ import annotations

import random

_WORDS = (
    "river stone garden window table bread market winter summer morning evening mountain forest ocean island bridge street village teacher doctor "
    "farmer painter letter paper pencil music dance color shadow light silver copper iron glass cotton wool sugar salt pepper apple orange "
    "horse sheep bird fish tree flower grass leaf seed rain snow wind storm cloud star moon earth fire smoke ash engine wheel road train ship "
    "plane ticket journey border map north south east west corner floor roof wall door key lock chair lamp clock bell mirror picture story"
).split()


def text(rng: random.Random, words: int) -> str:
    """``words`` words in sentences of eight to twelve."""
    sentences = []
    while words > 0:
        length = min(words, rng.randint(8, 12))
        sentence = " ".join(rng.choice(_WORDS) for _ in range(length))
        sentences.append(f"{sentence.capitalize()}.")
        words -= length
    return " ".join(sentences)


def token_ids(rng: random.Random, count: int, n_vocab: int) -> list[int]:
    """Token ids drawn evenly from the vocabulary, as llama-bench does: no two prompts share a prefix worth reusing."""
    return [rng.randrange(n_vocab) for _ in range(count)]
