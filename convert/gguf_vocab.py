"""A `GGUFVocab` as tokenizer.* metadata, filled up to the rows of the embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgeinfer.convert.gguf_metadata import KeyValue

if TYPE_CHECKING:
    from edgeinfer.convert.vocab import GGUFVocab

UNUSED = 5                                               # token type of rows that no text reaches
PADDING_SCORE = -1000.0


def size_problem(vocab: GGUFVocab, rows: int) -> str | None:
    """What is wrong between the tokenizer's size and the embedding's rows, or None."""
    if vocab.size > rows:
        return f"The tokenizer has {vocab.size:,} tokens and the embedding {rows:,} rows: the tokens beyond would have no weights."
    return None


def vocabulary(vocab: GGUFVocab, rows: int) -> list[KeyValue]:
    """All tokenizer.* entries. Rows beyond the tokenizer become unused tokens named [PADn] by their id."""
    missing = rows - vocab.size
    tokens = [*vocab.tokens, *(f"[PAD{vocab.size + index}]" for index in range(missing))]
    values = [
        KeyValue("tokenizer.ggml.model", "str", vocab.model),
        KeyValue("tokenizer.ggml.pre", "str", vocab.pre),
        KeyValue("tokenizer.ggml.tokens", "str[]", tokens),
        KeyValue("tokenizer.ggml.token_type", "i32[]", [*vocab.token_types, *[UNUSED] * missing]),
    ]
    if vocab.scores:
        values.append(KeyValue("tokenizer.ggml.scores", "f32[]", [*vocab.scores, *[PADDING_SCORE] * missing]))
    if vocab.merges:
        values.append(KeyValue("tokenizer.ggml.merges", "str[]", list(vocab.merges)))
    for key, number in (("bos", vocab.bos_id), ("eos", vocab.eos_id), ("eot", vocab.eot_id), ("unknown", vocab.unk_id), ("padding", vocab.pad_id)):
        if number is not None:
            values.append(KeyValue(f"tokenizer.ggml.{key}_token_id", "u32", number))
    for key, flag in (("add_bos_token", vocab.add_bos), ("add_eos_token", vocab.add_eos), ("add_space_prefix", vocab.add_space_prefix)):
        if flag is not None:
            values.append(KeyValue(f"tokenizer.ggml.{key}", "bool", flag))
    if vocab.chat_template:
        values.append(KeyValue("tokenizer.chat_template", "str", vocab.chat_template))
    return values
