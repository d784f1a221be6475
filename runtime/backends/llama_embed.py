"""Embeddings through a second llama.cpp context over the same weights, so that running chats, their KV and their logits are not touched.

It is made when the first input comes, as large as that input asks for, and made anew when a longer one comes. How an input is cut into native calls
depends on nothing but its length, and nothing else is ever in this context: an input's vector is bit for bit the same whatever is embedded with it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence as Seq
from typing import Any

import numpy as np

from edgeinfer.errors import BackendFailed, OutOfMemory
from edgeinfer.models.gguf_header import GGUFHeader
from edgeinfer.models.memory import attention_depth, available_memory, estimate, format_bytes, parse_bytes
from edgeinfer.models.native import NativeModel, captured_logs, last_error, llama
from edgeinfer.runtime.backends.llama_abort import AbortFlag
from edgeinfer.runtime.backends.llama_batch import Batch
from edgeinfer.runtime.backends.llama_memory import long_rope
from edgeinfer.runtime.backends.llama_options import LlamaOptions, ggml_type, usable_cores
from edgeinfer.runtime.values import Chunk

_OK, _ABORTED = 0, 2                                     # what llama_decode returns
_MEAN, _CLS, _LAST = 1, 2, 3                             # llama.cpp's pooling types; 0 is none, 4 a reranker's
_SMALLEST = 512                                          # tokens of the smallest context
_PIECE, _LEAST = 128, 64                                 # tokens of one native call, with a small vocabulary and with a large one:
_ROWS_BYTES = 64 << 20                                   # logits come with every row, wanted or not
_FEWEST = 32                                             # and far into a long input


def can_embed(model: NativeModel, header: GGUFHeader) -> bool:
    """False for rerankers, whose output is a score, and for models with an encoder and a decoder."""
    return header.get("pooling_type", 0) in (0, _MEAN, _CLS, _LAST) and not llama().llama_model_has_encoder(model.handle)


class EmbeddingContext:
    """Belongs to the thread that computes. Free it with `close`.

    causal: whether a token sees only those before it; where it sees all, an input is one native call, however long.
    held: bytes that loading the model was estimated to take; those for embeddings come on top, also against ``max_memory``.
    """

    def __init__(
        self, model: NativeModel, header: GGUFHeader, options: LlamaOptions,
        *, n_ctx: int, causal: bool, flash: int, gpu_layers: int, held: int, abort: AbortFlag,
    ):
        self._model = model
        self._header = header
        self._options = options
        self._n_ctx = n_ctx
        self._causal = causal
        self._flash = flash
        self._gpu_layers = gpu_layers
        self._held = held
        self._abort = abort
        self._pooling = header.get("pooling_type") or _MEAN
        self._width = llama().llama_model_n_embd_out(model.handle)
        rows = _ROWS_BYTES // (4 * model.n_vocab)
        self._depth = attention_depth(header)
        self._piece = min(options.ubatch_size, options.batch_size, max(_LEAST, min(_PIECE, rows)))
        self._cells = 0
        self._context: Any = None
        self._memory: Any = None
        self._batch = Batch(1)

    def embed(self, tokens: Seq[int]) -> Generator[None, None, np.ndarray]:
        """Compute one piece of ``tokens`` between two yields; the generator returns the pooled last hidden states, float32 of shape (n_embd,).

        One at a time: a new one ends the one before. A piece that was aborted is computed again.
        """
        lib = llama()
        total, start = np.zeros(self._width, np.float64), 0
        lib.llama_memory_clear(self._memory, False)
        while True:
            if len(tokens) > self._cells:                # also where the memory was given back between two pieces
                self._make(len(tokens))
                total[:], start = 0, 0
            part = tokens[start : start + self._size(len(tokens), start)]
            self._batch.fill((Chunk(0, start, part, len(part)),))
            with self._abort:
                status = lib.llama_decode(self._context, self._batch.native)
            if status == _ABORTED:
                # A recurrent state cannot go back to where the piece began.
                if not lib.llama_memory_seq_rm(self._memory, 0, start, -1):
                    lib.llama_memory_clear(self._memory, False)
                    total[:], start = 0, 0
                yield
                continue
            if status != _OK:
                raise BackendFailed(f"llama.cpp failed to compute an embedding (llama_decode returned {status}).")
            rows = np.ctypeslib.as_array(lib.llama_get_embeddings(self._context), shape=(len(part), self._width))
            if self._pooling == _MEAN:
                total += rows.sum(axis=0, dtype=np.float64)
            elif self._pooling == _LAST or start == 0:
                total[:] = rows[-1 if self._pooling == _LAST else 0]
            start += len(part)
            if start == len(tokens):
                return (total / start if self._pooling == _MEAN else total).astype(np.float32)
            yield

    def _size(self, tokens: int, start: int) -> int:
        """Tokens of the piece that begins at ``start``: the further in, the fewer, which take as long; all, where attention looks both ways."""
        if not self._causal:
            return tokens
        return max(_FEWEST, self._piece * self._depth // (self._depth + start)) if self._depth else self._piece

    def _make(self, tokens: int) -> None:
        """A context that holds ``tokens``, in place of the one before."""
        self.close()
        lib = llama()
        options = self._options
        cells = _SMALLEST
        while cells < tokens:
            cells *= 2
        # Which of two sets of rope factors applies may follow from the size of the context; it is the one that chats have.
        cells = self._n_ctx if long_rope(self._header, self._n_ctx) else min(cells, self._n_ctx)
        rows = min(self._piece, cells) if self._causal else cells
        self._check_memory(cells, rows)
        params = lib.llama_context_default_params()
        params.n_ctx = cells
        params.n_batch = params.n_ubatch = rows
        params.n_seq_max = 1
        params.n_threads = options.threads or usable_cores()
        params.n_threads_batch = options.threads_batch or params.n_threads
        params.type_k = ggml_type(options.cache_type_k)
        params.type_v = ggml_type(options.cache_type_v)
        params.flash_attn_type = self._flash
        params.embeddings = True
        params.pooling_type = lib.LLAMA_POOLING_TYPE_NONE       # llama.cpp pools within one native call only
        params.no_perf = True
        self._abort.attach(params)
        with captured_logs() as lines:
            context = lib.llama_init_from_model(self._model.handle, params)
        if not context:
            reason = last_error(lines) or "llama.cpp gave no reason"
            raise OutOfMemory(f"No context of {cells:,} tokens could be made for embeddings ({reason}); embed shorter inputs.")
        self._context, self._memory, self._cells = context, lib.llama_get_memory(context), cells
        self._batch = Batch(rows)

    def _check_memory(self, cells: int, rows: int) -> None:
        options = self._options
        need = estimate(
            self._header, ctx=cells, kv_type_k=options.cache_type_k, kv_type_v=options.cache_type_v, n_ubatch=rows, flash_attention=self._flash != 0,
        )
        size = need.kv + need.compute + 4 * rows * (self._model.n_vocab + self._width)
        room = [] if self._gpu_layers else [available_memory()]
        if options.max_memory is not None:
            room.append(parse_bytes(options.max_memory) - self._held)
        if room and size > min(room):
            raise OutOfMemory(
                f"Embedding an input of this length takes a context of {cells:,} tokens, {format_bytes(size)}, and "
                f"{format_bytes(max(0, min(room)))} are left; embed shorter inputs or load the model with a smaller --ctx-size or --parallel."
            )

    def close(self) -> None:
        """Free its memory; the next input takes it again."""
        self._cells = 0
        if self._context:
            context, self._context, self._memory = self._context, None, None
            llama().llama_free(context)
