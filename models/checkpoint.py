"""A Hugging Face checkpoint folder: configs, tokenizer files, chat template and lazily read tensors. Never pickle.

Files may be symbolic links, as in the hub's cache where ``snapshots/<rev>/x`` points to ``../../blobs/<hash>``: names are joined to the folder as
given, never resolved first, and a shard name from an index may not leave the folder.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.errors import ConversionFailed, EdgeInferError, ModelDamaged, ModelNotFound, UnsupportedModel
from edgeinfer.models.config import ConfigReading, read_config
from edgeinfer.models.config_reader import LIMIT
from edgeinfer.models.families import expected_tensors
from edgeinfer.models.folder import chat_templates, read_json, weight_files
from edgeinfer.models.safetensors import TensorInfo, read_header
from edgeinfer.models.spec import ModelSpec

WEIGHT_DTYPES = ("F32", "F16", "BF16")
NUMPY_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "<u1", "BOOL": "?",
}
HARMLESS_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "self_attn.bias", "self_attn.masked_bias")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
COMPARED_AT_ONCE = 1 << 24                               # bytes


def as_float32(array: np.ndarray, dtype: str) -> np.ndarray:
    """The values of an array from `Checkpoint.read` as float32, same shape. F32 is returned as it is, without a copy; others are exact copies."""
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if dtype not in WEIGHT_DTYPES:
        raise UnsupportedModel(f"Weights of type {dtype} are not supported; known are {', '.join(WEIGHT_DTYPES)}.")
    return array.astype(np.float32, copy=False)


@dataclass
class Checkpoint:
    """An opened checkpoint folder. Make one with `Checkpoint.open`; call `check` before trusting ``tensors``.

    One from `Checkpoint.inspect` may have ``errors``, which ``error_problems`` list one sentence each. It is there to be checked further, so that all
    that is wrong is heard at once: ``spec`` is None or good for names and shapes of tensors only, and what could not be read is empty. ``complete`` is
    false where that may be a file which names tokens.

    ``tensors`` holds what a converter should use: of a tied model whose ``lm_head.weight`` repeats the embedding bit by bit the copy is left out, one
    that differs stays and ``has_own_head`` is true. An untied model always has its own head.
    """

    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer_config: dict[str, Any]
    spec: ModelSpec | None                               # never None after `open`
    tensors: Mapping[str, TensorInfo]
    tokenizer_json: Path | None = None
    tokenizer_model: Path | None = None
    special_tokens_map: dict[str, Any] = field(default_factory=dict)
    added_tokens: dict[str, Any] = field(default_factory=dict)       # added_tokens.json: text -> id
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # by name; "default" is the one chats use
    has_own_head: bool = False
    errors: tuple[EdgeInferError, ...] = ()
    error_problems: tuple[str, ...] = ()
    complete: bool = True
    _problems: list[str] = field(default_factory=list, repr=False)   # of the weight files, found on opening
    _listed: bool = True                                             # it is known which tensors there are
    _maps: dict[Path, mmap.mmap] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: Path | str, *, name: str = "") -> Checkpoint:
        """Read the configs and the headers of the weight files of a local folder; no weights.

        Raises `ModelNotFound` (no such folder), `ConversionFailed` (no config.json, bad keys), `UnsupportedModel` (unknown kind, pickle weights only)
        and `ModelDamaged` (unreadable JSON). What is wrong with the weight files is left to `check`, so that all of it is heard at once.
        """
        checkpoint = cls.inspect(path, name=name)
        if checkpoint.errors:
            raise checkpoint.errors[0]
        return checkpoint

    @classmethod
    def inspect(cls, path: Path | str, *, name: str = "") -> Checkpoint:
        """As `open`, but what cannot be read or used is kept in ``errors``. Raises `ModelNotFound` only."""
        folder = Path(path)
        if not folder.is_dir():
            raise ModelNotFound(f"{folder} is not a folder." if folder.exists() else f"The folder {folder} does not exist.")
        errors: list[EdgeInferError] = []
        said: list[str] = []
        problems: list[str] = []

        def attempt(read: Callable[[], Any], instead: Any) -> Any:
            try:
                return read()
            except EdgeInferError as error:
                errors.append(error)
                said.append(str(error))
                return instead

        def optional(file: str) -> dict[str, Any]:
            return attempt(lambda: read_json(folder / file), None) or {}

        config = attempt(lambda: _config(folder), None)
        generation_config = optional("generation_config.json")
        reading = ConfigReading(None)
        if config is not None:
            where = str(folder / "config.json")
            reading = read_config(config, generation_config=generation_config, name=name or folder.absolute().name, where=where)
        tokenizer_config = optional("tokenizer_config.json")
        special_tokens_map, added_tokens = optional("special_tokens_map.json"), optional("added_tokens.json")
        templates = attempt(lambda: chat_templates(folder, tokenizer_config), {})
        complete = not errors
        if reading.error is not None:
            errors.insert(0, reading.error)
            said[:0] = [f"config.json: {problem}" for problem in reading.problems]
        tensors = attempt(lambda: _read_tensors(folder, problems), None)
        listed, tensors, spec = tensors is not None, tensors or {}, reading.spec
        checkpoint = cls(
            folder=folder,
            config=config or {},
            generation_config=generation_config,
            tokenizer_config=tokenizer_config,
            spec=spec,
            tensors=tensors,
            tokenizer_json=_file(folder / "tokenizer.json"),
            tokenizer_model=_file(folder / "tokenizer.model"),
            special_tokens_map=special_tokens_map,
            added_tokens=added_tokens,
            chat_templates=templates,
            errors=tuple(errors),
            error_problems=tuple(said),
            complete=complete,
            _problems=problems,
            _listed=listed,
        )
        tied = spec is not None and spec.tied_embeddings
        checkpoint.has_own_head = HEAD in tensors and not (tied and checkpoint._same_bits(HEAD, EMBEDDING))
        if HEAD in tensors and not checkpoint.has_own_head:
            del tensors[HEAD]
        return checkpoint

    @property
    def chat_template(self) -> str | None:
        """The template chats are rendered with, or None for a model without one."""
        return self.chat_templates.get("default")

    @property
    def vocab_rows(self) -> int | None:
        """Rows of the embedding as config.json has it; None only where ``errors`` say that it has not."""
        rows = self.config.get("vocab_size")
        return rows if isinstance(rows, int) and not isinstance(rows, bool) and 0 < rows <= LIMIT else None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def check(self) -> list[str]:
        """Everything wrong with the weights, one sentence each; empty when a converter may go ahead."""
        problems = list(self._problems)
        if self.spec is None or not self._listed:
            return problems                              # of names and shapes nothing can be asked
        expected = expected_tensors(self.spec)
        missing = [name for name in expected if name not in self.tensors]
        if HEAD in missing:
            missing.remove(HEAD)
            problems.append(
                f"{HEAD} is missing, and config.json says the embeddings are not tied. "
                "If the head shares the embedding's weights, set 'tie_word_embeddings' to true in config.json."
            )
        extra = [name for name in self.tensors if name not in expected and not name.endswith(HARMLESS_SUFFIXES) and name != HEAD]
        problems += _listed(missing, "missing")
        problems += _listed(extra, "not known in this architecture")
        shapes = {**expected, HEAD: expected[EMBEDDING]}
        for name, shape in shapes.items():
            tensor = self.tensors.get(name)
            if tensor is not None and tensor.shape != shape:
                problems.append(f"{name} has shape {list(tensor.shape)}, and config.json asks for {list(shape)}.")
            if tensor is not None and tensor.dtype not in WEIGHT_DTYPES:
                problems.append(f"{name} is of type {tensor.dtype}; known are {', '.join(WEIGHT_DTYPES)}.")
        return problems

    def require_sound(self) -> None:
        """Raise `ConversionFailed` with all that `check` lists."""
        problems = self.check()
        if problems:
            raise ConversionFailed(f"The weights in {self.folder} do not match its config.json:", problems)

    def read(self, name: str) -> np.ndarray:
        """A read-only view of a tensor in its file, nothing copied. BF16 comes as uint16: see `as_float32`."""
        tensor = self.tensors[name]
        if tensor.dtype not in NUMPY_DTYPES:
            raise UnsupportedModel(f"{name} is of type {tensor.dtype}; known are {', '.join(WEIGHT_DTYPES)}.")
        if tensor.nbytes == 0:
            return np.zeros(tensor.shape, NUMPY_DTYPES[tensor.dtype])
        dtype = np.dtype(NUMPY_DTYPES[tensor.dtype])
        return np.frombuffer(self._map(tensor.file), dtype, tensor.nbytes // dtype.itemsize, tensor.offset).reshape(tensor.shape)

    def release(self, name: str) -> None:
        """Give a tensor's pages back to the system. Views stay valid and are read again from the file when touched."""
        tensor = self.tensors[name]
        page = mmap.PAGESIZE
        start = tensor.offset // page * page
        if tensor.file in self._maps and hasattr(mmap, "MADV_DONTNEED"):
            self._maps[tensor.file].madvise(mmap.MADV_DONTNEED, start, tensor.offset + tensor.nbytes - start)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with open(file, "rb") as handle:
                self._maps[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[file]

    def _same_bits(self, one: str, other: str) -> bool:
        a, b = self.tensors.get(one), self.tensors.get(other)
        if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        left, right = (np.frombuffer(self._map(t.file), np.uint8, t.nbytes, t.offset) for t in (a, b))
        step = COMPARED_AT_ONCE
        same = all(np.array_equal(left[at : at + step], right[at : at + step]) for at in range(0, a.nbytes, step))
        self.release(one)
        self.release(other)
        return same


def _config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "config.json")
    if config is None:
        raise ConversionFailed(f"{folder} has no config.json, so it is not a Hugging Face checkpoint.")
    return config


def _file(path: Path) -> Path | None:
    return path if path.is_file() else None


def _listed(names: list[str], what: str, shown: int = 8) -> list[str]:
    more = [f"{len(names) - shown} more tensors are {what}."] if len(names) > shown else []
    return [f"{name} is {what}." for name in names[:shown]] + more


def _read_tensors(folder: Path, problems: list[str]) -> dict[str, TensorInfo]:
    files, index = weight_files(folder)
    tensors: dict[str, TensorInfo] = {}
    unread: set[str] = set()
    for file in files:
        if not file.is_file():
            broken = "points to a file that does not exist" if file.is_symlink() else "is missing"
            problems.append(f"The weight file {file} {broken}.")
            unread.add(file.name)
            continue
        try:
            header = read_header(file)
        except ModelDamaged as error:
            problems.append(str(error))
            unread.add(file.name)
            continue
        for name, tensor in header.items():
            if name in tensors:
                problems.append(f"{name} is in {tensors[name].file.name} and in {file.name}.")
            tensors[name] = tensor
    if index is not None:
        for name, shard in index.items():
            if name not in tensors and Path(shard).name not in unread:
                problems.append(f"The index says {name} is in {shard}, and it is not.")
            elif name in tensors and tensors[name].file != folder / shard:
                problems.append(f"The index says {name} is in {shard}, and it is in {tensors[name].file.name}.")
        problems += [f"{name} is in {tensor.file.name} and not in the index." for name, tensor in tensors.items() if name not in index]
    return tensors
