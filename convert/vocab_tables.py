"""The table of a vocabulary: text, score and type of every id, from the rules and the contents of tokenizer.json or tokenizer.model.

Kinds are told apart by the rules alone. Byte-level BPE writes a space as a letter of its byte alphabet and needs no unknown token;
SentencePiece-style BPE writes it as U+2581 and falls back to <0xXX> tokens. A file whose rules and contents disagree is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from edgeinfer.convert.added_tokens import AddedToken
from edgeinfer.convert.pretokenizers import flatten
from edgeinfer.convert.sentencepiece_model import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, SentencePieceModel

SPACE = "\u2581"                                         # how SentencePiece writes a space
SPACE_LETTER = "\u0120"                                  # how the byte alphabet writes one
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
Kind = Literal["byte-level", "sentencepiece"]
SpacePrefix = Literal["never", "always", "first"]


@dataclass(frozen=True)
class Table:
    """Texts, types (llama.cpp's numbers) and scores by id; ``scores`` is None for byte-level BPE. ``used`` ids come before any padding."""

    texts: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...] | None
    used: int


def kind_of(document: dict[str, Any], problems: list[str]) -> Kind | None:
    """What a parsed tokenizer.json is, or None after saying in ``problems`` why it cannot be told or is not supported."""
    model = document.get("model") or {}
    kind, vocab = model.get("type") or "BPE", model.get("vocab")
    if kind != "BPE" or not isinstance(vocab, dict) or not vocab:
        problems.append(f"tokenizer.json holds a {kind} model, and only BPE vocabularies are converted.")
        return None
    wrong = [text for text, token in vocab.items() if not isinstance(token, int) or token < 0]
    if wrong:
        problems.append(f"tokenizer.json gives {wrong[0]!r} an id that is not a number from 0 on.")
        return None
    steps = [step.get("type") for step in (*flatten(document.get("pre_tokenizer"), "pretokenizers"), *flatten(document.get("decoder"), "decoders"))]
    letters = SPACE_LETTER in vocab and SPACE not in vocab
    fallback = all(text in vocab for text in BYTE_TOKENS)
    if "ByteLevel" in steps and letters:
        return "byte-level"                              # a byte_fallback flag means nothing here: there are no <0xXX> tokens to fall back to
    if "ByteLevel" not in steps and fallback and model.get("byte_fallback"):
        return "sentencepiece"
    if "ByteLevel" in steps:
        problems.append(f"tokenizer.json works on bytes (ByteLevel), and its vocabulary has no letter {SPACE_LETTER} or writes spaces as {SPACE}.")
    elif letters:
        problems.append("tokenizer.json has a byte-level vocabulary, and neither its pre-tokenizer nor its decoder is ByteLevel.")
    else:
        problems.append("tokenizer.json is neither byte-level nor falls back to bytes (byte_fallback with all 256 tokens <0x00> to <0xFF>).")
    return None


def merge_pairs(model: dict[str, Any], problems: list[str]) -> list[tuple[str, str]]:
    """The merges of a BPE model, in order, in either of the two forms files have."""
    pairs = []
    for merge in model.get("merges") or []:
        pair = tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge)
        if len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
            problems.append(f"tokenizer.json has a merge that is not two pieces: {merge!r}.")
            return []
        pairs.append((pair[0], pair[1]))
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(name):
            problems.append(f"tokenizer.json sets {name} to {model[name]!r}, which llama.cpp has no place for.")
    if not pairs:
        problems.append("tokenizer.json has no merges.")
    return pairs


def space_prefix(document: dict[str, Any], vocab: Mapping[str, int], problems: list[str]) -> SpacePrefix:
    """Where a SentencePiece-style tokenizer.json puts a space that the text has not; checks that it does nothing else to a text."""
    prefix: SpacePrefix = "never"
    escapes = False
    for step in flatten(document.get("normalizer"), "normalizers"):
        kind = step.get("type")
        if kind == "Prepend" and step.get("prepend") == SPACE:
            prefix = "always"
        elif kind == "Replace" and step.get("pattern") == {"String": " "} and step.get("content") == SPACE:
            escapes = True
        else:
            problems.append(f"The normaliser {kind} of tokenizer.json is not supported: llama.cpp only writes spaces as {SPACE}.")
    for step in flatten(document.get("pre_tokenizer"), "pretokenizers"):
        kind = step.get("type")
        if kind == "Metaspace" and step.get("replacement") == SPACE:
            escapes = True
            scheme = step.get("prepend_scheme") or ("always" if step.get("add_prefix_space", True) else "never")
            if scheme not in ("first", "never"):
                problems.append(
                    f"tokenizer.json says Metaspace with prepend_scheme {scheme!r}, which adds no space where there is one, and llama.cpp would."
                )
            prefix = "first" if scheme == "first" else prefix
            inside = next((text for text in vocab if SPACE in text[1:]), None) if step.get("split", True) else None
            if inside:
                problems.append(f"tokenizer.json cuts text before every space (Metaspace with split), and llama.cpp would still join {inside!r}.")
        elif kind == "Split" and step.get("pattern") == {"String": " "} and escapes:
            continue                                     # Gemma's: no space is left to split at
        else:
            problems.append(f"The pre-tokenizer {kind} of tokenizer.json is not supported with byte fallback: llama.cpp merges over the whole text.")
    if not escapes:
        problems.append(f"tokenizer.json does not write spaces as {SPACE}, as llama.cpp's SentencePiece vocabularies do.")
    return prefix


def byte_level_table(vocab: Mapping[str, int], added: Mapping[int, AddedToken], problems: list[str]) -> Table:
    texts = _texts(vocab, added, problems)
    types = [UNUSED if text is None else NORMAL for text in texts]
    for token in added.values():
        types[token.id] = CONTROL if token.special else USER_DEFINED
    return Table(_filled(texts, len(texts)), tuple(types), None, len(texts))


def sentencepiece_table(
    document: dict[str, Any], pairs: list[tuple[str, str]], added: Mapping[int, AddedToken], problems: list[str]
) -> Table:
    """From tokenizer.json, whose merges are the reference even where a tokenizer.model lies beside it.

    llama.cpp joins the neighbours whose union has the highest score, so a piece scores by the rank of the first merge that makes it, negated.
    """
    vocab = document["model"]["vocab"]
    texts = _texts(vocab, added, problems)
    lowest = -float(len(pairs) + 1)                      # pieces that no merge makes, control tokens among them: never preferred
    scores = [lowest] * len(texts)
    for rank, (left, right) in reversed(list(enumerate(pairs))):
        if left + right in vocab:
            scores[vocab[left + right]] = -float(rank)
    unknown = document["model"].get("unk_token")
    types = [_spm_type(text, unknown, added.get(token)) for token, text in enumerate(texts)]
    return Table(_filled(texts, len(texts)), tuple(types), tuple(scores), len(texts))


def proto_table(model: SentencePieceModel, added: Mapping[int, AddedToken], problems: list[str]) -> Table:
    """From tokenizer.model alone; ``added`` tokens come after its pieces or take the place of one."""
    size = max([len(model.pieces), *(token + 1 for token in added)])
    texts: list[str | None] = [piece.text for piece in model.pieces] + [None] * (size - len(model.pieces))
    types = [piece.type for piece in model.pieces] + [UNUSED] * (size - len(model.pieces))
    lowest = min(piece.score for piece in model.pieces) - 1.0
    scores = [piece.score if piece.type == NORMAL else lowest for piece in model.pieces] + [lowest] * (size - len(model.pieces))
    for token in added.values():
        renamed = texts[token.id] != token.text
        texts[token.id] = token.text
        if token.special and types[token.id] != UNKNOWN:
            types[token.id] = CONTROL
        elif renamed or types[token.id] == UNUSED:
            types[token.id] = USER_DEFINED
    for token, kind in enumerate(types):
        if kind == USER_DEFINED and texts[token]:
            # SentencePiece looks for these in text whose spaces are already written as U+2581, llama.cpp in the text as it came.
            texts[token] = str(texts[token]).replace(SPACE, " ")
    return Table(_filled(texts, size), tuple(types), tuple(scores), size)


def padded(table: Table, rows: int) -> Table:
    """The table with unused tokens up to ``rows``, the embedding's height."""
    more = rows - len(table.texts)
    return Table(
        _filled(list(table.texts), rows),
        table.types + (UNUSED,) * more,
        None if table.scores is None else table.scores + (min(table.scores) - 1.0,) * more,
        table.used,
    )


def duplicates(table: Table) -> list[str]:
    """Ids that share a text, which llama.cpp cannot load."""
    seen: dict[str, int] = {}
    found = []
    for token, text in enumerate(table.texts):
        if text in seen:
            found.append(f"The tokens {seen[text]} and {token} have the same text {text!r}, and llama.cpp needs every text once.")
        seen.setdefault(text, token)
    return found


def _texts(vocab: Mapping[str, int], added: Mapping[int, AddedToken], problems: list[str]) -> list[str | None]:
    texts: list[str | None] = [None] * (max([*vocab.values(), *added]) + 1)
    for text, token in vocab.items():
        if texts[token] is not None:
            problems.append(f"tokenizer.json gives the id {token} to {texts[token]!r} and to {text!r}.")
        texts[token] = text
    for token in added.values():
        if texts[token.id] not in (None, token.text):
            problems.append(f"{token.source} says token {token.id} is {token.text!r}, and the vocabulary in tokenizer.json says {texts[token.id]!r}.")
        elif vocab.get(token.text, token.id) != token.id:
            other = vocab[token.text]
            problems.append(f"{token.source} gives {token.text!r} the id {token.id}, and the vocabulary in tokenizer.json gives it {other}.")
        texts[token.id] = token.text
    return texts


def _filled(texts: list[str | None], size: int) -> tuple[str, ...]:
    """Texts for ids that have none: [PADn], as every GGUF writes them."""
    taken = {text for text in texts if text is not None}
    filled = []
    for token in range(size):
        text = texts[token] if token < len(texts) else None
        if text is None:
            text = f"[PAD{token}]"
            while text in taken:
                text = f"[{text}]"
        filled.append(text)
    return tuple(filled)


def _spm_type(text: str | None, unknown: str | None, added: AddedToken | None) -> int:
    if text is None:
        return UNUSED
    if _BYTE_TOKEN.fullmatch(text):
        return BYTE
    if text == unknown:
        return UNKNOWN
    if added is None or not text.strip(SPACE):
        # A run of U+2581 is reached by merges, and only as a normal token does it print as spaces.
        return NORMAL
    return CONTROL if added.special else USER_DEFINED
