"""Logits of a GGUF file through llama.cpp, computed as exactly as it can: float32 KV cache, no flash attention, one batch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from edgeinfer.models.native import NativeModel, llama

F32 = 0                                                  # ggml_type


def logits(path: Path, tokens: Sequence[int], n_ctx: int) -> np.ndarray:
    """float32 (n_tokens, n_vocab): the logits after each token.

    n_ctx: context to allocate, which llama.cpp rounds up to a multiple of 256; longrope models choose their factors by it.
    """
    lib = llama()
    model = NativeModel(path)
    try:
        params = lib.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = len(tokens)
        params.n_seq_max = 1
        params.n_threads = params.n_threads_batch = 2
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.type_k = params.type_v = F32
        context = lib.llama_init_from_model(model.handle, params)
        if not context:
            raise RuntimeError(f"llama.cpp made no context for {path}.")
        try:
            batch = lib.llama_batch_init(len(tokens), 0, 1)
            try:
                batch.n_tokens = len(tokens)
                for place, token in enumerate(tokens):
                    batch.token[place] = token
                    batch.pos[place] = place
                    batch.n_seq_id[place] = 1
                    batch.seq_id[place][0] = 0
                    batch.logits[place] = 1
                status = lib.llama_decode(context, batch)
            finally:
                lib.llama_batch_free(batch)
            if status != 0:
                raise RuntimeError(f"llama_decode returned {status} for {path}.")
            pointer = ctypes.cast(lib.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
            return np.ctypeslib.as_array(pointer, shape=(len(tokens), model.n_vocab)).copy()
        finally:
            lib.llama_free(context)
    finally:
        model.close()
