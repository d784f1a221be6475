"""Small tokenizers of the kinds real checkpoints have, built from a word list: nothing is trained, so every machine makes the same files.

A `TokenizerFiles` value holds tokenizer.json, tokenizer_config.json and, for the SentencePiece kinds, the bytes of a tokenizer.model that
says the same. Byte-level kinds are named after llama.cpp's name of their pre-tokenizer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2_SPLIT = LLAMA3_SPLIT.replace("{1,3}", "")
UNKNOWN_SPLIT = r"\p{L}{1,5}|\p{N}{1,2}|[^\p{L}\p{N}]"           # no known model splits like this

CHATML = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_WORDS = (
    "the", "and", "capital", "of", "is", "what", "hello", "world", "ing", "tion", "Tokyo", "Japan", "user", "assistant", "system", "model", "token",
)
_LEADING = (*_WORDS, "a", "in", "to", "water", "you", "are")     # these also exist with a space before them
_OTHER = ("12", "123", "2026", "  ", "    ", "\n\n", "...", "é", "naïve", "日本", "🙂", "слово")


@dataclass(frozen=True)
class Special:
    """Ids' texts of a kind's special tokens. `first`: they open the vocabulary instead of following it."""

    bos: str | None
    eos: str
    pad: str | None = None
    unk: str | None = None
    more: tuple[str, ...] = ()
    first: bool = False
    rstrip: tuple[str, ...] = ()                         # these swallow the white space that follows them


# kind -> (tokenizer_class, special tokens)
KINDS: dict[str, tuple[str, Special]] = {
    "llama-bpe": ("PreTrainedTokenizerFast", Special("<|begin_of_text|>", "<|end_of_text|>", more=("<|eot_id|>", "<|im_start|>", "<|im_end|>"))),
    "qwen2": ("Qwen2Tokenizer", Special(None, "<|im_end|>", pad="<|endoftext|>", more=("<|im_start|>",))),
    "gpt-2": ("GPT2Tokenizer", Special("<|endoftext|>", "<|endoftext|>", more=("<|im_start|>", "<|im_end|>"))),
    "smollm": ("GPT2Tokenizer", Special("<|im_start|>", "<|im_end|>", pad="<|im_end|>", unk="<|endoftext|>", first=True)),
    "unknown": ("PreTrainedTokenizerFast", Special("<|begin_of_text|>", "<|end_of_text|>", more=("<|im_start|>", "<|im_end|>"))),
    "spm": ("LlamaTokenizer", Special("<s>", "</s>", unk="<unk>", more=("<|im_start|>", "<|im_end|>"))),
    # Phi-3's own: llama.cpp knows of the swallowed white space only from a model name that holds "phi-3" or "phi3".
    "spm-phi3": ("LlamaTokenizer", Special(
        "<s>", "<|endoftext|>", pad="<|endoftext|>", unk="<unk>", more=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        rstrip=("</s>", "<|im_start|>", "<|im_end|>"))),
    "spm-gemma": ("GemmaTokenizer", Special("<bos>", "<eos>", pad="<pad>", unk="<unk>", more=("<|im_start|>", "<|im_end|>"))),
}


@dataclass(frozen=True)
class TokenizerFiles:
    """Contents of a checkpoint's tokenizer files."""

    tokenizer_json: dict[str, Any]
    tokenizer_config: dict[str, Any]
    sentencepiece: bytes | None             # tokenizer.model; None for the byte-level kinds
    size: int                               # ids in use: vocabulary and added tokens
    ids: dict[str, int]                     # special and added texts -> id


def build(kind: str, added: Iterable[tuple[str, bool]] = (), chat_template: str | None = CHATML) -> TokenizerFiles:
    """A complete tokenizer of ``kind`` (a key of KINDS) with ``added`` tokens (text, special) after all others."""
    if kind not in KINDS:
        raise ValueError(f"Unknown tokenizer kind {kind!r}: choose one of {', '.join(KINDS)}.")
    return (_sentencepiece if kind.startswith("spm") else _byte_level)(kind, tuple(added), chat_template)


# --- byte-level BPE -------------------------------------------------------------------------------------------------------------------------

def byte_letters() -> list[str]:
    """GPT-2's printable stand-in for each byte 0..255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def _byte_level(kind: str, added: tuple[tuple[str, bool], ...], chat_template: str | None) -> TokenizerFiles:
    tokenizer_class, special = KINDS[kind]
    letters = byte_letters()
    special_texts = list(dict.fromkeys(text for text in (special.unk, special.bos, special.eos, special.pad, *special.more) if text))
    pieces = (special_texts if special.first else []) + letters
    merges: list[list[str]] = []
    for word in [" " + word for word in _LEADING] + [*_WORDS, *_OTHER]:
        spelled = [letters[byte] for byte in word.encode()]
        left = spelled[0]
        for letter in spelled[1:]:                       # each prefix of a word is a piece, so that every merge can be reached
            if left + letter not in pieces:
                pieces.append(left + letter)
                merges.append([left, letter])
            left += letter
    vocab = {piece: place for place, piece in enumerate(pieces)}
    appended = [] if special.first else special_texts
    ids = {text: vocab[text] for text in special_texts if text in vocab}
    ids |= {text: len(pieces) + place for place, text in enumerate([*appended, *(text for text, _ in added)])}

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": kind in ("gpt-2", "smollm")}
    split = {"llama-bpe": LLAMA3_SPLIT, "qwen2": QWEN2_SPLIT, "unknown": UNKNOWN_SPLIT}.get(kind)
    if split:
        rule = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        pre_tokenizer: dict[str, Any] = {"type": "Sequence", "pretokenizers": [rule, byte_level]}
    elif kind == "smollm":
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]}
    else:
        pre_tokenizer = byte_level
    post = _prepend(special.bos, ids, [byte_level]) if kind in ("llama-bpe", "unknown") else None if kind == "smollm" else byte_level
    return TokenizerFiles(
        tokenizer_json=_tokenizer_json(
            special, ids, added, special_texts,
            normalizer={"type": "NFC"} if kind == "qwen2" else None,
            pre_tokenizer=pre_tokenizer, post_processor=post,
            decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            model={
                "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
                "byte_fallback": False, "ignore_merges": kind == "llama-bpe", "vocab": vocab, "merges": merges,
            },
        ),
        tokenizer_config=_tokenizer_config(tokenizer_class, special, ids, added, chat_template),
        sentencepiece=None,
        size=len(pieces) + len(appended) + len(added),
        ids=ids,
    )


# --- SentencePiece-style BPE with byte fallback ---------------------------------------------------------------------------------------------

def _sentencepiece(kind: str, added: tuple[tuple[str, bool], ...], chat_template: str | None) -> TokenizerFiles:
    tokenizer_class, special = KINDS[kind]
    gemma = kind == "spm-gemma"
    control = ["<pad>", "<eos>", "<bos>", "<unk>"] if gemma else ["<unk>", "<s>", "</s>"]
    words = ["\u2581" + word for word in _LEADING] + list(_WORDS) + [word.replace(" ", "\u2581") for word in _OTHER if "\n" not in word]
    # A word's prefixes are pieces too; the merged ones come in order of merit, the single letters last, as SentencePiece writes them.
    merged = list(dict.fromkeys(word[:end] for word in words for end in range(2, len(word) + 1)))
    letters = list(dict.fromkeys("\u2581" + "".join(chr(code) for code in range(33, 127)) + "".join(words)))
    pieces = [*control, *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *letters]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    normal = {piece for piece in (*merged, *letters)}
    # SentencePiece joins any two neighbours that make a piece, so every split of a piece is a merge.
    merges = [[piece[:cut], piece[cut:]] for piece in merged for cut in range(1, len(piece)) if piece[:cut] in normal and piece[cut:] in normal]
    ids = {text: vocab[text] for text in control}
    ids |= {text: len(pieces) + place for place, text in enumerate([*special.more, *(text for text, _ in added)])}

    to_mark = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    from_mark = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    strip = [] if gemma else [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    return TokenizerFiles(
        tokenizer_json=_tokenizer_json(
            special, ids, added, [*control, *special.more],
            normalizer=to_mark if gemma else {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, to_mark]},
            pre_tokenizer={"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False} if gemma else None,
            post_processor=_prepend(special.bos, ids, []),
            decoder={"type": "Sequence", "decoders": [from_mark, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
            model={
                "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": True,
                "byte_fallback": True, "ignore_merges": False, "vocab": vocab, "merges": merges,
            },
        ),
        tokenizer_config={"add_bos_token": True, "add_eos_token": False} | _tokenizer_config(tokenizer_class, special, ids, added, chat_template),
        sentencepiece=_model_proto(pieces, control, normal, dummy_prefix=not gemma, ids=ids, special=special),
        size=len(pieces) + len(special.more) + len(added),
        ids=ids,
    )


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _field(number: int, value: int | float | str | bytes) -> bytes:
    """One protobuf field: varint, float or length-delimited, by the value's type."""
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _model_proto(pieces: list[str], control: list[str], normal: set[str], *, dummy_prefix: bool, ids: dict[str, int], special: Special) -> bytes:
    """A SentencePiece ModelProto (sentencepiece_model.proto): pieces, the trainer's BPE kind and ids, an identity normaliser."""
    out = bytearray()
    merged = len(control) + 256
    for place, piece in enumerate(pieces):
        kind = 1 if piece in normal else 2 if piece == special.unk else 3 if piece in control else 6      # normal, unknown, control, byte
        out += _field(1, _field(1, piece) + _field(2, float(-(place - merged)) if kind == 1 else 0.0) + _field(3, kind))
    eos = "<eos>" if "<eos>" in control else "</s>"
    no_id = 2**64 - 1                                                                                     # -1 as protobuf writes it
    trainer = _field(3, 2) + _field(35, 1) + _field(40, ids["<unk>"]) + _field(41, ids[special.bos or ""]) + _field(42, ids[eos])
    trainer += _field(43, ids["<pad>"] if "<pad>" in control else no_id) + _field(4, len(pieces))
    trainer += _field(45, "<unk>") + _field(46, special.bos or "") + _field(47, eos) + _field(48, "<pad>")
    out += _field(2, trainer)
    out += _field(3, _field(1, "identity") + _field(3, int(dummy_prefix)) + _field(4, 0) + _field(5, 1))
    return bytes(out)


# --- shared parts ---------------------------------------------------------------------------------------------------------------------------

def _prepend(bos: str | None, ids: dict[str, int], before: list[dict[str, Any]]) -> dict[str, Any]:
    """The post-processor that puts ``bos`` before every text."""
    if bos is None:
        raise ValueError("A post-processor that adds the first token needs one.")
    first, second = ([{"SpecialToken": {"id": bos, "type_id": number}}, {"Sequence": {"id": "AB"[number], "type_id": number}}] for number in (0, 1))
    template = {
        "type": "TemplateProcessing",
        "single": first,
        "pair": first + second,
        "special_tokens": {bos: {"id": bos, "ids": [ids[bos]], "tokens": [bos]}},
    }
    return {"type": "Sequence", "processors": [*before, template]} if before else template


def _added_token(text: str, special: bool, kind: Special) -> dict[str, Any]:
    return {"content": text, "single_word": False, "lstrip": False, "rstrip": text in kind.rstrip, "normalized": False, "special": special}


def _tokenizer_json(
    special: Special, ids: dict[str, int], added: tuple[tuple[str, bool], ...], special_texts: list[str], **parts: Any
) -> dict[str, Any]:
    kinds = {text: True for text in special_texts} | dict(added)
    in_order = sorted(kinds.items(), key=lambda item: ids[item[0]])
    entries = [{"id": ids[text]} | _added_token(text, is_special, special) for text, is_special in in_order]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": entries} | parts


def _tokenizer_config(
    tokenizer_class: str, special: Special, ids: dict[str, int], added: tuple[tuple[str, bool], ...], chat_template: str | None
) -> dict[str, Any]:
    kinds = {text: True for text in ids} | dict(added)
    in_order = sorted(ids.items(), key=lambda item: item[1])
    config: dict[str, Any] = {
        "added_tokens_decoder": {str(place): _added_token(text, kinds[text], special) for text, place in in_order},
        "bos_token": special.bos, "eos_token": special.eos, "pad_token": special.pad, "unk_token": special.unk,
        "clean_up_tokenization_spaces": False, "model_max_length": 2048, "tokenizer_class": tokenizer_class,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    return config
