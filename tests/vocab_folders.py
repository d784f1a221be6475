"""Checkpoint folders whose tokenizer is the point: those of `tiny`, and small ones trained on the spot."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny import tiny
from vocab_gguf import load_vocab

from edgeinfer.convert.parity import ParityResult, template_parity, tokenizer_parity
from edgeinfer.convert.parity_probes import CASED, PLAIN
from edgeinfer.convert.vocab import GGUFVocab, read_vocab
from edgeinfer.models.checkpoint import Checkpoint
from edgeinfer.models.native import llama

SPACE = "\u2581"


def change(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Let ``edit`` alter the content of a JSON file."""
    content = json.loads(path.read_text("utf-8"))
    edit(content)
    path.write_text(json.dumps(content, ensure_ascii=False), "utf-8")


def put_tokenizer(folder: Path, document: dict[str, Any], *, rows: int | None = None, **config: Any) -> Path:
    """A checkpoint in ``folder`` with this tokenizer.json and tokenizer_config.json, no other word about tokens, and as many rows as tokens."""
    tiny(folder, "llama")
    (folder / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    (folder / "generation_config.json").write_text("{}")
    ids = [*document["model"]["vocab"].values(), *(token["id"] for token in document["added_tokens"])]
    edit_rows(folder, rows or max(ids) + 1)
    return folder


def edit_rows(folder: Path, rows: int) -> None:
    def edit(config: dict[str, Any]) -> None:
        config["vocab_size"] = rows
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            config.pop(name, None)

    change(folder / "config.json", edit)


def train_byte_level(pre_tokenizer: Any, *, special: tuple[str, ...] = ("<|end|>",), added: tuple[str, ...] = (), normalizer: Any = None,
                     size: int = 900, **model: Any) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE trained on the parity texts, with the cuts of ``pre_tokenizer``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator([*PLAIN, *CASED] * 2, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    document = json.loads(tokenizer.to_str())
    document["model"] |= model
    return document


def train_sentencepiece(path: Path, **options: Any) -> Path:
    """A tokenizer.model trained on the parity texts. ``options`` replace those of a Llama-like BPE."""
    import sentencepiece

    texts = [line for text in (*PLAIN, *CASED) for line in text.splitlines() if line.strip()]
    stream = io.BytesIO()
    wanted = {
        "model_type": "bpe", "vocab_size": 700, "byte_fallback": True, "character_coverage": 0.98, "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False, "add_dummy_prefix": True, "minloglevel": 2, "num_threads": 1, "hard_vocab_limit": False,
    } | options
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts * 3), model_writer=stream, **wanted)
    path.write_bytes(stream.getvalue())
    return path


def closed_merges(vocab: dict[str, int], order: list[str]) -> list[list[str]]:
    """Every way to join two pieces of ``vocab`` into one of ``order``, in that order: the merges of a vocabulary that came from SentencePiece."""
    return [[piece[:cut], piece[cut:]] for piece in order for cut in range(1, len(piece)) if piece[:cut] in vocab and piece[cut:] in vocab]


def parity(folder: Path, tmp_path: Path, *, pre: str | None = None) -> tuple[GGUFVocab, ParityResult, ParityResult]:
    """(vocabulary, its text parity, its chat parity) of a checkpoint folder, through a GGUF that holds the vocabulary alone."""
    checkpoint = Checkpoint.open(folder)
    vocab = read_vocab(checkpoint, pre=pre)
    model = load_vocab(tmp_path / "vocabulary.gguf", vocab, name=vocab.model_name("vocabulary"))
    try:
        return vocab, tokenizer_parity(checkpoint, model, vocab=vocab), template_parity(checkpoint, model, vocab=vocab)
    finally:
        model.close()


def differing(vocab: GGUFVocab, *results: ParityResult) -> list[str]:
    """All that is fatal in ``results``, in words."""
    return [text for result in results for text in (*result.problems, *(one.describe(vocab.tokens) for one in result.mismatches))]


def ends_generation(tmp_path: Path, vocab: GGUFVocab) -> set[int]:
    """The tokens that llama.cpp stops at when it loads ``vocab``."""
    model = load_vocab(tmp_path / "stops.gguf", vocab)
    try:
        return {token for token in range(len(vocab.tokens)) if llama().llama_vocab_is_eog(model.vocab, token)}
    finally:
        model.close()
