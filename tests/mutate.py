"""Small GGUF files and damaged versions of them: one way of damage per function, each returning the bytes of a whole file."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np

TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "é", "日本", "🙂"]


def tiny_gguf(path: Path, *, tensors: bool = True) -> Path:
    """A well-formed GGUF with values of every kind, written by the `gguf` package. No model: no engine could run it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(7)
    writer.add_token_list(TOKENS)
    writer.add_token_types([2, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_scores([0.5 * i for i in range(len(TOKENS))])
    writer.add_array("test.flags", [True, False, True])
    writer.add_bool("test.flag", True)
    writer.add_float64("test.double", 0.1)
    writer.add_int64("test.negative", -(2**40))
    writer.add_chat_template("{{ messages }}")
    if tensors:
        rng = np.random.default_rng(0)
        writer.add_tensor("token_embd.weight", rng.standard_normal((len(TOKENS), 64)).astype(np.float32))
        writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
        writer.add_tensor("blk.0.attn_q.weight", gguf.quantize(rng.standard_normal((64, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0),
                          raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor("blk.0.ffn_up.weight", rng.standard_normal((3, 7)).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def text(value: bytes) -> bytes:
    """A GGUF string."""
    return struct.pack("<Q", len(value)) + value


def header(*, tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes, dims: tuple[int, ...], *, kind: int = 0, offset: int = 0, n_dims: int | None = None) -> bytes:
    count = len(dims) if n_dims is None else n_dims
    return text(name) + struct.pack("<I", count) + b"".join(struct.pack("<Q", size) for size in dims) + struct.pack("<IQ", kind, offset)


U8, U32, STRING, ARRAY = 0, 4, 8, 9

# name -> (bytes of the file, words that the message must hold)
MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty key, 37 bytes": (header(keys=1) + key(b"", U8, b"\0"), "key is empty"),                              # case 97
    "dimension 0": (header(tensors=1) + tensor(b"w", (32, 0)) + bytes(64), "impossible shape"),                 # case 97
    "dimensions that wrap 64 bits": (header(tensors=1) + tensor(b"w", (2**32, 2**32)) + bytes(64), "impossible shape"),   # cases 97, 98
    "one dimension of 2^63": (header(tensors=1) + tensor(b"w", (2**63,)) + bytes(64), "impossible shape"),
    "a million dimensions": (header(tensors=1) + tensor(b"w", (1,), n_dims=1_000_000), "1,000,000 dimensions"),  # case 98
    "2^32-1 dimensions": (header(tensors=1) + tensor(b"w", (1,), n_dims=2**32 - 1), "4,294,967,295 dimensions"),  # case 98
    "five dimensions": (header(tensors=1) + tensor(b"w", (1,) * 5), "5 dimensions"),
    "no dimensions": (header(tensors=1) + tensor(b"w", ()), "0 dimensions"),
    "2^64-1 tensors": (header(tensors=2**64 - 1), "claims"),
    "2^64-1 keys": (header(keys=2**64 - 1), "claims"),
    "2^62 keys": (header(keys=2**62) + key(b"a", U8, b"\0"), "claims"),
    "key of 2^63 bytes": (header(keys=1) + struct.pack("<Q", 2**63), "key is"),
    "string of 2^64-1 bytes": (header(keys=1) + key(b"a", STRING, struct.pack("<Q", 2**64 - 1)), "bytes long"),
    "array of 2^64-1 numbers": (header(keys=1) + key(b"a", ARRAY, struct.pack("<IQ", U32, 2**64 - 1)), "elements"),
    "array of 2^64-1 strings": (header(keys=1) + key(b"a", ARRAY, struct.pack("<IQ", STRING, 2**64 - 1)), "strings"),
    "array longer than the file": (header(keys=1) + key(b"a", ARRAY, struct.pack("<IQ", U32, 1000)), "incomplete"),
    "a string of an array leaves the file": (
        header(keys=1) + key(b"a", ARRAY, struct.pack("<IQ", STRING, 2) + text(b"x") + struct.pack("<Q", 2**64 - 9)), "incomplete"),
    "array of arrays": (header(keys=1) + key(b"a", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(16)), "nested type"),
    "array of an unknown type": (header(keys=1) + key(b"a", ARRAY, struct.pack("<IQ", 77, 1) + bytes(16)), "unknown type 77"),
    "unknown value type": (header(keys=1) + key(b"a", 13, bytes(8)), "unknown type 13"),
    "duplicate key": (header(keys=2) + key(b"a", U8, b"\1") * 2, "'a' appears twice"),
    "duplicate tensor": (header(tensors=2) + tensor(b"w", (8,)) + tensor(b"w", (8,), offset=32) + bytes(128), "'w' appears twice"),
    "nameless tensor": (header(tensors=1) + tensor(b"", (8,)) + bytes(64), "tensor name is empty"),
    "tensor name of 64 bytes": (header(tensors=1) + tensor(b"w" * 64, (8,)) + bytes(64), "64 bytes long"),
    "key that is not UTF-8": (header(keys=1) + key(b"\xff\xfe", U8, b"\0"), "not UTF-8"),
    "unknown tensor type": (header(tensors=1) + tensor(b"w", (8,), kind=4) + bytes(64), "unknown type 4"),
    "rows that do not fill blocks": (header(tensors=1) + tensor(b"w", (40,), kind=8) + bytes(64), "32 at a time"),
    "tensors that overlap": (header(tensors=2) + tensor(b"v", (8,)) + tensor(b"w", (8,)) + bytes(128), "should be at 32"),
    "offset beyond everything": (header(tensors=1) + tensor(b"w", (8,), offset=2**63) + bytes(64), "should be at 0"),
    "alignment 0": (header(keys=1) + key(b"general.alignment", U32, struct.pack("<I", 0)), "no power of two"),
    "alignment 24": (header(keys=1) + key(b"general.alignment", U32, struct.pack("<I", 24)), "no power of two"),
    "alignment 2^31": (header(keys=1) + key(b"general.alignment", U32, struct.pack("<I", 2**31)), "no power of two"),
    "alignment that is text": (header(keys=1) + key(b"general.alignment", STRING, text(b"32")), "no power of two"),
}

# name -> (bytes of the file, words that the message must hold)
NOT_GGUF: dict[str, tuple[bytes, str]] = {                                                                       # case 96
    "empty": (b"", "empty"),
    "text": (b"Hello, this is a text file.\n", "text"),
    "HTML error page": (b"\n<!DOCTYPE html><html><body>404</body></html>", "an HTML page"),
    "XML error": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "an XML document"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
    "JSON": (b'{"error": "not found"}', "JSON"),
    "ZIP": (b"PK\x03\x04" + bytes(60), "ZIP"),
    "pickle": (b"\x80\x02}q\x00.", "pickle"),
    "safetensors": (struct.pack("<Q", 80) + b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "safetensors"),
    "zeros": (bytes(4096), "zeros"),
    "old GGML": (b"tjgg" + bytes(60), "older than GGUF"),
    "noise": (bytes((i * 97 + 13) % 256 for i in range(512)), "unknown binary"),
}
