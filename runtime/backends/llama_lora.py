"""LoRA adapters of the llama.cpp backend: what was asked for, whether the files fit the model, and which one is set."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeinfer.errors import BackendFailed, BadRequest, ModelDamaged, UnsupportedModel
from edgeinfer.models.fingerprint import fingerprint
from edgeinfer.models.gguf_header import GGUFHeader, read_header
from edgeinfer.models.native import NativeModel, captured_logs, last_error, llama

_SPEC = re.compile(r"(?:(?P<name>[\w.+-]+)=)?(?P<path>.+?)(?::(?P<scale>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?))?", re.DOTALL)
_PARTS = (".lora_a", ".lora_b")
_MULTIPLIED = re.compile(r"F32|F16|BF16|I?Q\d.*|TQ\d.*|MXFP4|NVFP4")     # types that ggml multiplies with


@dataclass(frozen=True)
class LoraSpec:
    """One adapter to load."""

    name: str
    path: Path
    scale: float


def parse_lora(texts: Iterable[str]) -> tuple[LoraSpec, ...]:
    """``[NAME=]PATH[:SCALE]`` each; without a name the file's, without its suffix. A path with "=" in it: write ./a=b.gguf.

    Raises `BadRequest`.
    """
    specs: dict[str, LoraSpec] = {}
    for text in (texts,) if isinstance(texts, str) else texts:
        match = _SPEC.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise BadRequest(f"--lora takes [NAME=]PATH[:SCALE], not {text!r}.")
        path = Path(match["path"])
        spec = LoraSpec(match["name"] or path.stem, path, float(match["scale"] or 1))
        if not math.isfinite(spec.scale):
            raise BadRequest(f"The scale of the adapter {spec.name!r} is no finite number: {match['scale']}.")
        if spec.name in specs:
            raise BadRequest(f"Two adapters are called {spec.name!r}; name one of them: --lora NAME={path}.")
        specs[spec.name] = spec
    return tuple(specs.values())


def check_adapter(spec: LoraSpec, base: GGUFHeader) -> GGUFHeader:
    """The adapter's header, if llama.cpp can apply it to ``base``. Raises `ModelNotFound`, `ModelDamaged` or `UnsupportedModel`."""
    header = read_header(spec.path)
    what = header.metadata.get("general.type", "model")
    if what != "adapter":
        raise UnsupportedModel(f"{spec.path} is no LoRA adapter: its general.type is {what!r}. Make one with llama.cpp's convert_lora_to_gguf.py.")
    kind = header.metadata.get("adapter.type")
    if kind != "lora" or "adapter.alora.invocation_tokens" in header.metadata:
        raise UnsupportedModel(f"{spec.path} is an adapter of the kind {kind if kind != 'lora' else 'aLoRA'!r}; only plain LoRA is supported.")
    if header.architecture != base.architecture:
        raise UnsupportedModel(f"The adapter {spec.path} was made for {header.architecture or '?'} models, and {base.path.name} is a {base.architecture} model.")
    if not isinstance(header.metadata.get("adapter.lora.alpha", 0.0), float):
        raise ModelDamaged(f"{spec.path} has an adapter.lora.alpha that is no float32 number: {header.metadata['adapter.lora.alpha']!r}.")
    for tensor in header.tensors.values():
        target = next((tensor.name[: -len(part)] for part in _PARTS if tensor.name.endswith(part)), None)
        if target is None and not tensor.name.endswith("_norm.weight"):
            raise UnsupportedModel(f"{spec.path} holds {tensor.name!r}, which is no part of a LoRA adapter.")
        if target is not None and target not in base.tensors:
            raise UnsupportedModel(f"{spec.path} changes {target!r}, which {base.path.name} does not have: it was made for another model.")
        if not _MULTIPLIED.fullmatch(tensor.type):
            raise UnsupportedModel(f"{spec.path} stores {tensor.name!r} as {tensor.type}; convert the adapter to F16 or F32.")
    return header


class Adapters:
    """The loaded adapters of one model, none at first. Free them with `close`, after the context and before the model."""

    def __init__(self) -> None:
        self.current: str | None = None                  # what is set in the context
        self.identities: dict[str, str] = {}             # name -> what its weights and its scale are known by
        self._scales: dict[str, float] = {}
        self._handles: dict[str, Any] = {}

    def load(self, model: NativeModel, specs: Sequence[LoraSpec], headers: Sequence[GGUFHeader]) -> None:
        """Load checked adapters. Raises `ModelDamaged` with llama.cpp's reason."""
        for spec, header in zip(specs, headers, strict=True):
            with captured_logs() as lines:
                handle = llama().llama_adapter_lora_init(model.handle, str(spec.path).encode())
            if not handle:
                raise ModelDamaged(f"llama.cpp cannot load the adapter {spec.path}: {last_error(lines) or 'it gave no reason'}.")
            self._handles[spec.name] = handle
            self._scales[spec.name] = spec.scale
            self.identities[spec.name] = f"{fingerprint(header)}:{spec.scale:g}"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._scales)

    def select(self, context: Any, name: str | None) -> None:
        """Compute with adapter ``name`` from now on (None: with the base model alone)."""
        lib = llama()
        if name is None:
            status = lib.llama_set_adapters_lora(context, None, 0, None)
        else:
            status = lib.llama_set_adapters_lora(
                context, (lib.llama_adapter_lora_p_ctypes * 1)(self._handles[name]), 1, (ctypes.c_float * 1)(self._scales[name])
            )
        if status != 0:
            raise BackendFailed(f"llama.cpp did not switch to the adapter {name!r} (it returned {status}).")
        self.current = name

    def close(self) -> None:
        while self._handles:
            llama().llama_adapter_lora_free(self._handles.popitem()[1])
