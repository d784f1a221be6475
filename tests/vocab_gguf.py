"""A GGUF that holds a vocabulary and nothing else, for llama.cpp to tokenize with."""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFValueType, GGUFWriter

from edgeinfer.convert.vocab import GGUFVocab
from edgeinfer.models.native import NativeModel

SHAPE = {
    "context_length": 64, "embedding_length": 64, "block_count": 1, "feed_forward_length": 64, "attention.head_count": 4,
    "attention.head_count_kv": 4, "rope.dimension_count": 16,
}
TYPES = {
    "str": GGUFValueType.STRING, "u32": GGUFValueType.UINT32, "i32": GGUFValueType.INT32, "f32": GGUFValueType.FLOAT32, "bool": GGUFValueType.BOOL,
}


def write_vocab_gguf(path: Path, vocab: GGUFVocab, *, name: str = "vocabulary") -> Path:
    """Write ``vocab`` to ``path`` and return it."""
    writer = GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_vocab_size(len(vocab.tokens))
    for key, value in SHAPE.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    for entry in vocab.metadata():
        if entry.kind.endswith("[]"):
            writer.add_key_value(entry.key, entry.value, GGUFValueType.ARRAY, sub_type=TYPES[entry.kind[:-2]])
        else:
            writer.add_key_value(entry.key, entry.value, TYPES[entry.kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


def load_vocab(path: Path, vocab: GGUFVocab, **kwargs: str) -> NativeModel:
    """``vocab`` as llama.cpp sees it."""
    return NativeModel(write_vocab_gguf(path, vocab, **kwargs), vocab_only=True)
