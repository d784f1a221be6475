"""Tests on a finished file, before it gets its name."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np

from edgeinfer.errors import ConversionFailed, ModelDamaged
from edgeinfer.models.checkpoint import Checkpoint
from edgeinfer.models.native import NativeModel, llama, release_compute_threads

# A decode maps the whole file into memory; above this size only the tensors' names and shapes are tried.
DECODE_UP_TO = 512 * 1024**2
CONTEXT = 64
PROBE = "The quick brown fox, 1 2 3."
PROBE_TOKENS = 8


def verify_file(path: Path, checkpoint: Checkpoint | None, progress: Callable[[int], None]) -> tuple[str, ...]:
    """Everything tested on ``path``, in words; with a checkpoint, its tokenizer and template too. ``progress`` gets bytes, the file's size in all.

    Raises `ConversionFailed` with the first thing that is wrong.
    """
    size = path.stat().st_size
    checks = [try_model(path, decode=size <= DECODE_UP_TO)]
    progress(size // 2)
    if checkpoint is not None:
        from edgeinfer.convert.parity import check_parity

        check_parity(checkpoint, path)
        checks.append("its tokenizer gives the source's ids")
        if checkpoint.chat_template:
            checks.append("its chat template gives the source's ids")
    progress(size - size // 2)
    return tuple(checks)


def try_model(path: Path, *, decode: bool) -> str:
    """Load ``path`` with llama.cpp and, with ``decode``, run a few tokens; returns what was tested.

    Raises `ConversionFailed` when llama.cpp refuses the file or computes something that is not a number.
    """
    try:
        model = NativeModel(path) if decode else NativeModel(path, no_alloc=True)
    except ModelDamaged as error:
        raise ConversionFailed(f"The converted file does not load, so it was removed: {error}") from error
    try:
        if not decode:
            return "llama.cpp takes every tensor"
        _decode(model)
        return "llama.cpp loads it and computes finite logits"
    finally:
        model.close()


def _decode(model: NativeModel) -> None:
    lib = llama()
    tokens = model.tokenize(PROBE, add_special=True, parse_special=False)[:PROBE_TOKENS] or [0]
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = CONTEXT, PROBE_TOKENS, PROBE_TOKENS, 1
    context = lib.llama_init_from_model(model.handle, params)
    if not context:
        raise ConversionFailed("llama.cpp loads the converted file and cannot open a context on it, so it was removed.")
    try:
        array = (lib.llama_token * len(tokens))(*tokens)  # the batch only points to it
        batch = lib.llama_batch_get_one(array, len(tokens))
        status = lib.llama_decode(context, batch)
        if status != 0:
            raise ConversionFailed(f"llama.cpp cannot run the converted file (llama_decode returned {status}), so it was removed.")
        pointer = ctypes.cast(lib.llama_get_logits_ith(context, -1), ctypes.POINTER(ctypes.c_float))
        if not pointer:
            raise ConversionFailed("The converted file computes no logits, so it was removed: it is no model that generates text.")
        if not np.isfinite(np.ctypeslib.as_array(pointer, shape=(model.n_vocab,))).all():
            raise ConversionFailed(
                "The converted file computes logits that are not numbers, so it was removed. Something overflows: try gguf-bf16 or gguf-f32."
            )
    finally:
        lib.llama_free(context)
        release_compute_threads()
