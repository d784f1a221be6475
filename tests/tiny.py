"""Random Hugging Face checkpoints of every family, small enough to convert and run in milliseconds.

    tiny(tmp_path / "model", "qwen3", dtype="f16", shards=3, added_tokens=[("<think>", False)])

Weights come from the integers of a PCG64 bit stream, seeded by tensor name, and are odd multiples of a power of two with eight significant bits:
they are the same on every machine and exact in float32, float16 and bfloat16, so one set of golden logits serves all three source types.
What no switch covers, `edit` changes afterwards in any of the JSON files.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tiny_tokenizer

Weights = dict[str, np.ndarray]
LOCAL_THETA = 4_000.0                                    # of Gemma's windowed layers; not llama.cpp's default of 10,000, so that a lost key shows
DROP = object()                                          # for `edit`: remove the key

# family -> (architecture, default tokenizer, tied by default, dimensions)
FAMILIES: dict[str, tuple[str, str, bool, dict[str, int]]] = {
    "llama": ("LlamaForCausalLM", "llama-bpe", False, {"heads": 6, "kv_heads": 2, "head_dim": 16}),
    "mistral": ("MistralForCausalLM", "spm", False, {"heads": 4, "kv_heads": 2, "head_dim": 32}),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", True, {"heads": 6, "kv_heads": 2, "head_dim": 16}),
    "qwen3": ("Qwen3ForCausalLM", "qwen2", True, {"heads": 4, "kv_heads": 2, "head_dim": 32}),
    "gemma3": ("Gemma3ForCausalLM", "spm-gemma", True, {"heads": 4, "kv_heads": 2, "head_dim": 32, "layers": 7}),
    "phi3": ("Phi3ForCausalLM", "spm", False, {"heads": 3, "kv_heads": 3, "head_dim": 32}),
}

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {},                                      # factors depend on the rotated size: see _rope
    "spiral": {"factor": 2.0},                           # no such type exists
}


def tiny(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: Literal["bf16", "f16", "f32"] = "bf16",
    head: Literal["default", "tied", "untied", "copied", "different", "unsaid"] = "default",
    shards: int = 1,
    shard_name: str | None = None,
    tokenizer: str | None = None,
    sentencepiece: Literal["none", "also", "only"] = "none",
    added_tokens: Iterable[tuple[str, bool]] = (),
    chat_template: str | None = tiny_tokenizer.CHATML,
    extra_rows: int = 0,
    rope: str | Mapping[str, Any] | None = None,
    rope_keys: Literal["rope_type", "type", "rope_parameters"] = "rope_type",
    partial_rotary: float | None = None,
    config: Mapping[str, Any] | None = None,
    drop: Iterable[str] = (),
    **dims: int,
) -> Path:
    """Write a whole checkpoint into ``folder`` (created) and return it.

    family: a key of FAMILIES.
    head: "copied" says tied and stores a copy of the embedding as lm_head too, "different" says tied and stores another matrix,
        "unsaid" has neither the flag nor an lm_head.
    shards, shard_name: number of files and their name with {i} and {n}; the index is written unless there is one file under the usual name.
    tokenizer: a key of tiny_tokenizer.KINDS. sentencepiece: write tokenizer.model too, or alone.
    added_tokens: (text, special) pairs, after all other ids.
    extra_rows: embedding rows beyond (negative: short of) the tokenizer's ids.
    rope: a key of ROPES, or a dict with "rope_type". rope_keys: the key that names the type in rope_scaling, or transformers 5's rope_parameters.
    config: keys of config.json to set; drop: keys to leave out.
    dims: layers, hidden, intermediate, heads, kv_heads, head_dim, window, window_pattern, max_context.
    """
    architecture, default_kind, tied_by_default, family_dims = FAMILIES[family]
    unknown = set(dims) - {"layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "window", "window_pattern", "max_context"}
    if unknown:
        raise TypeError(f"tiny() knows no {', '.join(sorted(unknown))}.")
    size = {"layers": 2, "hidden": 96, "intermediate": 160, "window": 32, "window_pattern": 6, "max_context": 1024} | family_dims | dims
    if head == "default":
        head = "tied" if tied_by_default else "untied"
    files = tiny_tokenizer.build(tokenizer or default_kind, added_tokens, chat_template)
    rows = files.size + extra_rows

    folder.mkdir(parents=True, exist_ok=True)
    said = _config(family, architecture, size, rows, files, head, rope, rope_keys, partial_rotary) | dict(config or {})
    said["torch_dtype" if rope_keys != "rope_parameters" else "dtype"] = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}[dtype]
    _write_json(folder / "config.json", {key: value for key, value in said.items() if key not in set(drop)})
    stops = [files.tokenizer_config["eos_token"], "<|im_end|>"]
    generation = {"bos_token_id": said["bos_token_id"], "eos_token_id": list(dict.fromkeys(files.ids[text] for text in stops)), "do_sample": True}
    _write_json(folder / "generation_config.json", generation)
    if sentencepiece != "only":
        _write_json(folder / "tokenizer.json", files.tokenizer_json)
    if sentencepiece != "none":
        if files.sentencepiece is None:
            raise ValueError(f"A tokenizer of kind {tokenizer or default_kind} has no tokenizer.model.")
        (folder / "tokenizer.model").write_bytes(files.sentencepiece)
    _write_json(folder / "tokenizer_config.json", files.tokenizer_config)
    _write_shards(folder, dict(_weights(family, size, rows, head, seed)), dtype, shards, shard_name)
    return folder


def edit(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; the value DROP removes one."""
    content = json.loads(path.read_text()) | changes
    _write_json(path, {key: value for key, value in content.items() if value is not DROP})


def read_weights(folder: Path) -> Weights:
    """Every tensor of a checkpoint in float32, by name."""
    return {name: values for path in sorted(folder.glob("*.safetensors")) for name, values in _read_safetensors(path)[0].items()}


def change_weights(folder: Path, change: Callable[[str, np.ndarray], np.ndarray | None]) -> None:
    """Replace each tensor (float32) by ``change(name, values)``, or drop it where that is None; files and their type stay as they are."""
    for path in sorted(folder.glob("*.safetensors")):
        weights, dtype = _read_safetensors(path)
        changed = {name: change(name, values) for name, values in weights.items()}
        _write_safetensors(path, {name: values for name, values in changed.items() if values is not None}, dtype)


def weights_sha256(folder: Path) -> str:
    """Fingerprint of names, shapes and float32 values: the same for every source type and number of shards."""
    digest = hashlib.sha256()
    for name, values in sorted(read_weights(folder).items()):
        digest.update(f"{name} {values.shape}\n".encode() + np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


# --- config.json ----------------------------------------------------------------------------------------------------------------------------

def _config(
    family: str, architecture: str, size: dict[str, int], rows: int, files: tiny_tokenizer.TokenizerFiles, head: str,
    rope: str | Mapping[str, Any] | None, rope_keys: str, partial_rotary: float | None,
) -> dict[str, Any]:
    special = files.tokenizer_config
    said: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "gemma3_text" if family == "gemma3" else family,
        "vocab_size": rows,
        "hidden_size": size["hidden"],
        "intermediate_size": size["intermediate"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv_heads"],
        "max_position_embeddings": size["max_context"],
        "rms_norm_eps": 1e-6 if family in ("qwen2", "qwen3", "gemma3") else 1e-5,
        "hidden_act": "silu",
        "bos_token_id": files.ids[special["bos_token"]] if special["bos_token"] else files.ids[special["pad_token"]],
        "eos_token_id": files.ids[special["eos_token"]],
        "use_cache": True,
    }
    if head != "unsaid":
        said["tie_word_embeddings"] = head != "untied"
    if family in ("phi3", "gemma3"):                     # transformers' own default may lie outside so small a vocabulary
        said["pad_token_id"] = files.ids[special["pad_token"] or special["eos_token"]]
    if family in ("mistral", "qwen3", "gemma3") or size["head_dim"] * size["heads"] != size["hidden"]:
        said["head_dim"] = size["head_dim"]
    if family == "llama":
        said |= {"attention_bias": False, "mlp_bias": False}
    elif family in ("mistral", "phi3"):
        said["sliding_window"] = None
    elif family in ("qwen2", "qwen3"):
        said |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": size["layers"]}
        if family == "qwen3":
            said["attention_bias"] = False
    if family == "gemma3":
        del said["hidden_act"]
        said |= {
            "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": size["head_dim"], "attention_bias": False,
            "attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": size["window"],
        }
        if rope_keys == "rope_parameters":
            pattern = size["window_pattern"]
            said["layer_types"] = ["full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(size["layers"])]
        else:
            said["sliding_window_pattern"] = size["window_pattern"]
    return said | _rope(family, size, rope, rope_keys, partial_rotary)


def _rope(family: str, size: dict[str, int], rope: str | Mapping[str, Any] | None, keys: str, partial_rotary: float | None) -> dict[str, Any]:
    """The config keys that speak of rotary embedding, in the asked spelling."""
    theta = 1_000_000.0 if family in ("qwen3", "gemma3") else 10_000.0
    scaling = {} if rope is None else {"rope_type": rope} | ROPES[rope] if isinstance(rope, str) else dict(rope)
    beside: dict[str, Any] = {}
    if scaling.get("rope_type") == "longrope":
        pairs = int(size["head_dim"] * (partial_rotary or 1.0)) // 2
        defaults = {"short_factor": [1.0 + 0.03125 * pair for pair in range(pairs)], "long_factor": [1.0 + 0.5 * pair for pair in range(pairs)]}
        scaling = defaults | scaling
        # Above 256: llama.cpp rounds every context up to a multiple of 256, and chooses the short factors only for contexts up to this.
        beside["original_max_position_embeddings"] = 256
    if keys == "rope_parameters":
        said = {"rope_type": "default", "rope_theta": theta} | scaling | beside
        if partial_rotary is not None:
            said["partial_rotary_factor"] = partial_rotary
        if family == "gemma3":
            return {"rope_parameters": {"full_attention": said, "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL_THETA}}}
        return {"rope_parameters": said} | beside
    if scaling and keys == "type":
        scaling["type"] = scaling.pop("rope_type")
    old: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling or None} | beside
    if family == "gemma3":
        old["rope_local_base_freq"] = LOCAL_THETA
    if partial_rotary is not None:
        old["partial_rotary_factor"] = partial_rotary
    return old


# --- weights --------------------------------------------------------------------------------------------------------------------------------

def _bytes(seed: int, name: str, count: int) -> np.ndarray:
    """``count`` reproducible bytes. `random_raw` is the bit stream itself, which numpy promises to keep."""
    start = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")
    return np.random.PCG64(start).random_raw(-(-count // 8)).astype("<u8").view(np.uint8)[:count]


def _uniform(seed: int, name: str, shape: tuple[int, ...], exponent: int) -> np.ndarray:
    """Odd numbers -255 .. 255 times 2 ** -exponent (standard deviation about 148 times that)."""
    values = 2 * _bytes(seed, name, int(np.prod(shape))).astype(np.int32) - 255
    return (values.astype(np.float32) * np.float32(2.0 ** -exponent)).reshape(shape)


def _matrix(seed: int, name: str, out_rows: int, in_columns: int, gain: int = 1) -> np.ndarray:
    """A linear layer's weight whose outputs are about ``gain`` times as large as its inputs (within a factor of two)."""
    exponent = 0
    while gain * gain * 4 ** (exponent + 1) <= 148 * 148 * in_columns * 2:
        exponent += 1
    return _uniform(seed, name, (out_rows, in_columns), exponent)


def _norm(seed: int, name: str, length: int, offset: float) -> np.ndarray:
    """Norm weights 0.75 .. 1.25 less ``offset`` in steps of 1/128."""
    steps = _bytes(seed, name, length).astype(np.int32) % 65 - 32
    return np.float32(1.0 - offset) + steps.astype(np.float32) / np.float32(128)


def _weights(family: str, size: dict[str, int], rows: int, head: str, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor, under its Hugging Face name."""
    hidden, inner, query, kv = size["hidden"], size["intermediate"], size["heads"] * size["head_dim"], size["kv_heads"] * size["head_dim"]
    gemma = family == "gemma3"
    offset = 1.0 if gemma else 0.0

    # Gain 2 for q and k: scores spread far enough for a wrong position or head to show.
    def matrix(name: str, out_rows: int, in_columns: int, gain: int = 1) -> tuple[str, np.ndarray]:
        return name, _matrix(seed, name, out_rows, in_columns, gain)

    def norm(name: str, length: int = hidden) -> tuple[str, np.ndarray]:
        return name, _norm(seed, name, length, offset)

    # Gemma multiplies embeddings by sqrt(D): smaller ones keep the layers' share of the residual stream visible.
    embedding = _uniform(seed, "model.embed_tokens.weight", (rows, hidden), 11 if gemma else 8)
    yield "model.embed_tokens.weight", embedding
    for layer in range(size["layers"]):
        here = f"model.layers.{layer}"
        yield norm(f"{here}.input_layernorm.weight")
        if family == "phi3":
            yield matrix(f"{here}.self_attn.qkv_proj.weight", query + 2 * kv, hidden, 2)
        else:
            for part, width in (("q", query), ("k", kv), ("v", kv)):
                yield matrix(f"{here}.self_attn.{part}_proj.weight", width, hidden, 1 if part == "v" else 2)
                if family == "qwen2":
                    yield f"{here}.self_attn.{part}_proj.bias", _uniform(seed, f"{here}.self_attn.{part}_proj.bias", (width,), 8)
        yield matrix(f"{here}.self_attn.o_proj.weight", hidden, query)
        if family in ("qwen3", "gemma3"):
            yield norm(f"{here}.self_attn.q_norm.weight", size["head_dim"])
            yield norm(f"{here}.self_attn.k_norm.weight", size["head_dim"])
        yield norm(f"{here}.post_attention_layernorm.weight")
        if gemma:
            yield norm(f"{here}.pre_feedforward_layernorm.weight")
            yield norm(f"{here}.post_feedforward_layernorm.weight")
        if family == "phi3":
            yield matrix(f"{here}.mlp.gate_up_proj.weight", 2 * inner, hidden)
        else:
            yield matrix(f"{here}.mlp.gate_proj.weight", inner, hidden)
            yield matrix(f"{here}.mlp.up_proj.weight", inner, hidden)
        yield matrix(f"{here}.mlp.down_proj.weight", hidden, inner)
    yield norm("model.norm.weight")
    if head == "copied":
        yield "lm_head.weight", embedding
    elif head in ("untied", "different"):
        yield matrix("lm_head.weight", rows, hidden, 4)


# --- safetensors ----------------------------------------------------------------------------------------------------------------------------

def _write_shards(folder: Path, weights: Weights, dtype: str, shards: int, shard_name: str | None) -> None:
    usual = "model.safetensors" if shards == 1 else "model-{i:05d}-of-{n:05d}.safetensors"
    files = [(shard_name or usual).format(i=i + 1, n=shards) for i in range(shards)]
    if len(set(files)) != shards:
        raise ValueError(f"{shard_name!r} gives two shards the same name: put {{i}} into it.")
    names = list(weights)
    places = {name: files[place * shards // len(names)] for place, name in enumerate(names)}
    total = 0
    for file in files:
        total += _write_safetensors(folder / file, {name: weights[name] for name in names if places[name] == file}, dtype)
    if shards > 1 or shard_name:
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})


def _read_safetensors(path: Path) -> tuple[Weights, str]:
    """All tensors in float32, and the type they are stored in."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    weights: Weights = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        raw = data[8 + length + start:8 + length + end]
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
        else:
            values = np.frombuffer(raw, {"F16": "<f2", "F32": "<f4"}[entry["dtype"]]).astype("<f4")
        weights[name] = values.reshape(entry["shape"])
    return weights, next(iter(header.values()))["dtype"].lower()


def _write_safetensors(path: Path, weights: Weights, dtype: str) -> int:
    """Write one file by hand (numpy has no bfloat16) and return the bytes of its tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, values in weights.items():
        data = _encode(np.ascontiguousarray(values), dtype)
        header[name] = {"dtype": dtype.upper(), "shape": list(values.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return len(body)


def _encode(values: np.ndarray, dtype: str) -> bytes:
    if dtype == "bf16":
        bits = values.astype("<f4").view("<u4")
        rounded = bits + 0x7FFF + (bits >> 16 & 1)       # to nearest, ties to even; our own weights need none
        return (rounded >> 16).astype("<u2").tobytes()
    return values.astype({"f16": "<f2", "f32": "<f4"}[dtype]).tobytes()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
