"""llama.cpp behind the `Backend` seam, through its low-level API.

A slot is a llama.cpp sequence id; all sequences share one KV cache. Under unified cells every token of a native batch is masked against the cells of
all sequences, so one call that mixes decoders with a prompt chunk costs about twice what two calls cost on a CPU: decoders go first in one call, each
prompt chunk follows in its own.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Generator, Mapping, Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.errors import BackendFailed, OutOfMemory, UnsupportedParameter
from edgeinfer.models.fingerprint import fingerprint
from edgeinfer.models.gguf_header import GGUFHeader, read_header
from edgeinfer.models.memory import attention_depth, kv_bytes_per_token
from edgeinfer.models.native import NativeModel, captured_logs, last_error, llama, native_function, release_compute_threads
from edgeinfer.runtime.backends.llama_abort import AbortFlag
from edgeinfer.runtime.backends.llama_batch import Batch, Group, groups
from edgeinfer.runtime.backends.llama_embed import EmbeddingContext, can_embed
from edgeinfer.runtime.backends.llama_lora import Adapters, check_adapter, parse_lora
from edgeinfer.runtime.backends.llama_memory import check_memory, choose_layout, context_size, kv_cells, long_rope, output_rows
from edgeinfer.runtime.backends.llama_options import SHIFTABLE, LlamaOptions, check_options, flash_attention, ggml_type, gpu_layers, usable_cores
from edgeinfer.runtime.backends.llama_state import layout_digest, read_slot, seal, sealed_tokens, write_slot
from edgeinfer.runtime.backends.llama_vocab import LlamaVocab
from edgeinfer.runtime.values import BackendInfo, Chunk, StepPlan, StepResult

__all__ = ["LlamaCppBackend", "LlamaOptions"]

_OK, _NO_ROOM, _ABORTED = 0, 1, 2                        # what llama_decode returns; below zero the call failed


class LlamaCppBackend:
    """One model, one context for answers, and where asked for one for embeddings. Everything but `abort` belongs to the thread that runs `forward`."""

    def __init__(self, path: Path, options: LlamaOptions = LlamaOptions(), *, progress: Callable[[float], bool] | None = None):
        # llama.cpp says little about damaged files and ends the process over some: all that can be checked is, before it sees any.
        header = read_header(path)
        notices: list[str] = []
        check_options(options)
        adapters = parse_lora(options.lora)
        adapter_headers = [check_adapter(spec, header) for spec in adapters]
        self._n_ctx = context_size(header, options, notices)
        options = choose_layout(header, options, self._n_ctx)
        check_options(options)
        layers = gpu_layers(options, notices)
        flash = flash_attention(options, layers, notices)
        need = check_memory(header, options, self._n_ctx, flash, layers, sum(adapter.weight_bytes for adapter in adapter_headers), notices)
        self._unified = bool(options.kv_unified)
        self._copying = False                            # a copy between streams waits for the next decode
        self._abort = AbortFlag()
        self._context: Any = None
        self._embedding: EmbeddingContext | None = None
        self._adapters = Adapters()
        self._model = NativeModel(path, gpu_layers=layers, mmap=options.mmap, progress=progress)
        try:
            self._adapters.load(self._model, adapters, adapter_headers)
            self._new_context = partial(self._make_context, options, flash)
            self._open_context()
            self._window = llama().llama_model_n_swa(self._model.handle)
            self.vocab = LlamaVocab(self._model, header)
            self.info = self._describe(header, options, notices)
            self._layout = layout_digest(self.info.fingerprint, self.info.kv_type, long_rope(header, self._n_ctx))
            self._batch = Batch(self.info.max_batch)
            if self.info.can_embed:
                self._embedding = EmbeddingContext(
                    self._model, header, options,
                    n_ctx=self._n_ctx, causal=self.info.can_generate, flash=flash, gpu_layers=layers, held=need.total, abort=self._abort,
                )
        except BaseException:
            self.close()
            raise
        self._n_vocab = self._model.n_vocab
        self._get_logits = native_function("llama_get_logits", ctypes.c_void_p, ctypes.c_void_p)
        self._decode = llama().llama_decode
        self._views: dict[tuple[int, int], tuple[np.ndarray, list[np.ndarray]]] = {}

    # ------------------------------------------------------------------------------------------------------------- loading

    def _make_context(self, options: LlamaOptions, flash: int) -> Any:
        lib = llama()
        cells = kv_cells(options, self._n_ctx)
        threads = options.threads or usable_cores()
        params = lib.llama_context_default_params()
        params.n_ctx = cells
        params.n_batch = min(options.batch_size, options.kv_size or self._n_ctx)
        params.n_ubatch = min(options.ubatch_size, params.n_batch)
        params.n_seq_max = options.slots
        params.n_threads = threads
        params.n_threads_batch = options.threads_batch or threads
        params.type_k = ggml_type(options.cache_type_k)
        params.type_v = ggml_type(options.cache_type_v)
        params.flash_attn_type = flash
        params.kv_unified = options.kv_unified
        # A row for every sequence and every drafted token; the default reserves one a token of a ubatch: 80 MB for SmolLM2. llama.cpp ends the
        # process when asked for more, and when this is less than n_seq_max.
        params.n_outputs_max = output_rows(options)
        params.no_perf = True
        self._abort.attach(params)
        with captured_logs() as lines:
            context = lib.llama_init_from_model(self._model.handle, params)
        if not context:
            reason = last_error(lines) or "llama.cpp gave no reason"
            raise OutOfMemory(
                f"No context of {cells:,} tokens could be made for {self._model.path.name} ({reason}); lower --ctx-size or use a smaller KV type (-ctk q8_0 -ctv q8_0)."
            )
        return context

    def _open_context(self) -> None:
        self._context = self._new_context()
        self._memory = llama().llama_get_memory(self._context)

    def _describe(self, header: GGUFHeader, options: LlamaOptions, notices: list[str]) -> BackendInfo:
        lib = llama()
        model = self._model
        layers = lib.llama_model_n_layer(model.handle)
        offloaded = re.findall(r"offloaded (\d+)/(\d+) layers", model.load_log)
        on_gpu = int(offloaded[-1][0]) if offloaded and lib.llama_supports_gpu_offload() else 0
        k, v = options.cache_type_k, options.cache_type_v
        return BackendInfo(
            engine="llamacpp",
            device="cuda:0" if on_gpu else "cpu",
            model=header.name or model.path.stem,
            quantization=header.quantization,
            n_vocab=model.n_vocab,
            n_ctx=self._n_ctx,
            n_ctx_train=lib.llama_model_n_ctx_train(model.handle),
            max_slots=options.slots,
            max_seqs=options.parallel,
            max_logits=min(output_rows(options), lib.llama_n_batch(self._context)),
            kv_cells=lib.llama_n_ctx(self._context),
            max_batch=lib.llama_n_batch(self._context),
            kv_type=k if k == v else f"{k}/{v}",
            kv_bytes_per_token=kv_bytes_per_token(header, type_k=k, type_v=v),
            weight_bytes=lib.llama_model_size(model.handle),
            can_copy_prefix=not lib.llama_model_is_recurrent(model.handle),
            shared_cells=self._unified,
            # A stream is copied whole, used or not: 4 ms for each 1,024 cells of SmolLM2, in which 2 tokens of a prompt are computed.
            copy_tokens=0 if self._unified else self._n_ctx // 512,
            fingerprint=fingerprint(header),
            adapters=self._adapters.names,
            can_shift=bool(lib.llama_memory_can_shift(self._memory)) and k in SHIFTABLE,
            can_export=True,
            can_generate=bool(self._memory) and lib.llama_get_causal_attn(self._context) and lib.llama_model_has_decoder(model.handle),
            can_embed=can_embed(model, header),
            n_embd=lib.llama_model_n_embd_out(model.handle),
            layers_offloaded=on_gpu,
            layers=layers,
            attention_depth=attention_depth(header),
            threads=options.threads or usable_cores(),
            system=(lib.llama_print_system_info() or b"").decode("utf-8", "replace").strip(),
            notices=tuple(notices),
        )

    # ------------------------------------------------------------------------------------------------------------- stepping

    def forward(self, plan: StepPlan) -> StepResult:
        if self._context is None:
            self._open_context()
        with self._abort:
            return self._forward(groups(plan, self._adapters.current))

    def _forward(self, queue: list[Group]) -> StepResult:
        logits: dict[int, np.ndarray] = {}
        no_room: list[int] = []
        aborted: list[int] = []
        failed: dict[int, str] = {}
        for index, group in enumerate(queue):
            if self._abort.is_set:
                aborted += [chunk.slot for chunk in group]
                continue
            if len(group) > 1 or len(group[0].tokens) > 1:
                self._check(group)
            adapter = group[0].adapter
            if adapter != self._adapters.current:
                if adapter is not None and adapter not in self._adapters.names:
                    failed |= {chunk.slot: f"There is no adapter {adapter!r}; known are {', '.join(self._adapters.names) or 'none'}." for chunk in group}
                    continue
                self._adapters.select(self._context, adapter)
            self._batch.fill(group)
            status = self._decode(self._context, self._batch.native)
            self._copying = False
            if status == _OK:
                # The native rows are overwritten by the next call of this step that wants logits, if there is one.
                logits |= self._rows(group, copy=any(chunk.n_logits for later in queue[index + 1 :] for chunk in later))
                continue
            for chunk in group:                          # whatever part of the batch went in must go out again
                self.truncate(chunk.slot, chunk.start)
            slots = [chunk.slot for chunk in group]
            if status == _NO_ROOM:
                no_room += slots
            elif status == _ABORTED:
                aborted += slots
            elif len(group) > 1:                         # one of them did it: find out which, so that the others do not suffer
                queue[index + 1 : index + 1] = [(chunk,) for chunk in group]
            else:
                failed[slots[0]] = f"llama.cpp failed to compute a step (llama_decode returned {status})."
        return StepResult(logits, tuple(no_room), tuple(aborted), failed)

    def _check(self, group: Group) -> None:
        """llama.cpp ends the process where either limit is exceeded."""
        rows, tokens = sum(chunk.n_logits for chunk in group), sum(len(chunk.tokens) for chunk in group)
        if rows > self.info.max_logits:
            raise BackendFailed(f"A step asks for {rows} rows of logits, and at most {self.info.max_logits} can be had; draft less or raise max_draft_rows.")
        if tokens > self.info.max_batch:
            raise BackendFailed(f"A step has {tokens} tokens in one native call, and a batch holds {self.info.max_batch}; raise --batch-size.")

    def _rows(self, group: Group, *, copy: bool) -> dict[int, np.ndarray]:
        """Logits by slot of the native call that just ended."""
        total = sum(chunk.n_logits for chunk in group)
        if not total:
            return {}
        matrix, rows = self._logits_views(self._get_logits(self._context), total)
        found: dict[int, np.ndarray] = {}
        row = 0
        for chunk in group:
            count = chunk.n_logits
            if count:
                view = rows[row] if count == 1 else matrix[row : row + count]
                found[chunk.slot] = view.copy() if copy else view
                row += count
        return found

    def _logits_views(self, address: int, count: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """llama.cpp's output buffer as (count, n_vocab), and each row of it as (1, n_vocab)."""
        # llama.cpp keeps its output buffer; making views anew costs 0.1 ms, for every step of every answer.
        views = self._views.get((address, count))
        if views is None:
            buffer = (ctypes.c_float * (count * self._n_vocab)).from_address(address)
            matrix = np.frombuffer(buffer, np.float32).reshape(count, self._n_vocab)
            views = self._views[address, count] = (matrix, [matrix[row : row + 1] for row in range(count)])
        return views

    # --------------------------------------------------------------------------------------------------------------- slots

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        # Between streams llama.cpp copies whole sequences only (a part of one ends the process); unified cells are shared, so all of it costs nothing.
        llama().llama_memory_seq_cp(self._memory, src, dst, -1, -1)
        llama().llama_memory_seq_rm(self._memory, dst, length, -1)
        self._copying = not self._unified

    def truncate(self, slot: int, length: int) -> bool:
        return self._context is None or bool(llama().llama_memory_seq_rm(self._memory, slot, length, -1))

    def reusable(self, slot: int, length: int, wanted: int) -> int:
        kept, first = min(length, wanted), llama().llama_memory_seq_pos_min(self._memory, slot)
        # A sliding window that dropped early cells leaves a hole at the start: fine while the next token does not look into it.
        return kept if first == 0 or 0 < first <= kept - self._window + 1 else 0

    def shift(self, slot: int, keep: int, drop: int) -> None:
        if not self.info.can_shift:
            raise BackendFailed(f"The memory of {self.info.model} cannot shift; start over with a shorter conversation.")
        llama().llama_memory_seq_rm(self._memory, slot, keep, keep + drop)
        llama().llama_memory_seq_add(self._memory, slot, keep + drop, -1, -drop)
        self._settle(slot)

    @property
    def kv_layout(self) -> str:
        """What the bytes of `export_slot` depend on beside tokens and adapter; KV of another layout is not taken."""
        return self._layout.hex()

    @property
    def adapter_identities(self) -> Mapping[str, str]:
        """Of each adapter, what its weights and its scale are known by."""
        return self._adapters.identities

    def export_slot(self, slot: int) -> bytes:
        if self._copying:
            self._settle(slot)
        state = read_slot(self._context, slot)
        if not state:
            raise BackendFailed(f"llama.cpp did not save the KV of slot {slot}.")
        return seal(state, self._layout, llama().llama_memory_seq_pos_max(self._memory, slot) + 1)

    def import_slot(self, slot: int, data: bytes) -> bool:
        tokens = sealed_tokens(data, self._layout)
        if tokens is None or tokens > self._n_ctx:
            return False
        if self._context is None:
            self._open_context()
        if self._copying:                                # the slot may be what a copy is still to be made of
            self._settle(slot)
        if write_slot(self._context, slot, data) and llama().llama_memory_seq_pos_max(self._memory, slot) + 1 == tokens:
            return True
        self.truncate(slot, 0)
        return False

    def _settle(self, slot: int) -> None:
        """Let llama.cpp do now what it puts off until the next decode: moving keys to new positions and copying streams.

        Until then the KV is not what a reader of its bytes takes it for, and an abort in the middle would leave some layers moved and others not.
        """
        end = llama().llama_memory_seq_pos_max(self._memory, slot) + 1
        self._batch.fill((Chunk(slot, end, (0,), 0),))
        self._decode(self._context, self._batch.native)  # without room for the token, the work was done all the same
        llama().llama_memory_seq_rm(self._memory, slot, end, -1)
        self._copying = False

    def rest(self) -> None:
        release_compute_threads()

    def drop_kv(self) -> None:
        # llama.cpp has the KV and the compute buffers in one context and gives neither back alone; empty cells take as much memory as full ones.
        self._close_contexts()

    def abort(self) -> None:
        self._abort.set()

    def embed(self, tokens: Seq[int]) -> Generator[None, None, np.ndarray]:
        if self._embedding is None:
            raise UnsupportedParameter(f"{self.info.model} gives no embeddings.")
        return self._embedding.embed(tokens)

    def close(self) -> None:
        self._close_contexts()
        self._adapters.close()
        self._model.close()

    def _close_contexts(self) -> None:
        if self._embedding is not None:
            self._embedding.close()
        if self._context is not None:
            llama().llama_free(self._context)
            self._context, self._memory, self._views, self._copying = None, None, {}, False
            self._adapters.current = None
