"""llama.cpp behind the `Backend` seam, through its low-level API.

A slot is a llama.cpp sequence id; all sequences share one KV cache. Under unified cells every token of a native batch is masked against the cells of
all sequences, so one call that mixes decoders with a prompt chunk costs about twice what two calls cost on a CPU: decoders go first in one call, each
prompt chunk follows in its own.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgeinfer.errors import BadRequest, DeviceUnavailable, OutOfMemory
from edgeinfer.models.gguf_header import GGUFHeader, read_header
from edgeinfer.models.memory import KV_TYPES, kv_bytes_per_token
from edgeinfer.models.native import NativeModel, captured_logs, last_error, llama, native_function, release_compute_threads
from edgeinfer.runtime.backends.llama_vocab import LlamaVocab
from edgeinfer.runtime.values import BackendInfo, Chunk, StepPlan, StepResult

_OK, _NO_ROOM, _ABORTED = 0, 1, 2                        # what llama_decode returns; below zero the call failed


@dataclass(frozen=True)
class LlamaOptions:
    """Names follow llama.cpp's flags. Sizes are tokens."""

    ctx_size: int = 0                    # positions one sequence may use; 0: what the model was trained for, at most DEFAULT_CONTEXT
    parallel: int = 4                    # sequences held at once
    kv_unified: bool = True              # one KV cache that all sequences share, or (False) ctx_size tokens for each, parallel times the memory
    kv_size: int = 0                     # tokens the shared cache holds; 0: ctx_size
    batch_size: int = 2048
    ubatch_size: int = 512
    threads: int = 0                     # 0: one per core this process may use
    threads_batch: int = 0               # 0: like threads
    gpu_layers: str | int = "auto"       # "auto", "all" or a count
    device: str = "auto"                 # "auto", "cpu", "cuda"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attn: str = "auto"             # "auto", "on", "off"
    mmap: bool = True


DEFAULT_CONTEXT = 8192


class LlamaCppBackend:
    """One model, one context. Everything but `abort` belongs to the thread that runs `forward`."""

    def __init__(self, path: Path, options: LlamaOptions = LlamaOptions(), *, progress: Callable[[float], bool] | None = None):
        header = read_header(path)                       # llama.cpp says little about damaged files; this says what and where
        notices: list[str] = []
        _check_types(options)
        flash = _flash_attention(options, notices)
        gpu_layers = _gpu_layers(options, notices)
        self._model = NativeModel(path, gpu_layers=gpu_layers, mmap=options.mmap, progress=progress)
        try:
            self._context = self._make_context(header, options, flash)
        except BaseException:
            self._model.close()
            raise
        lib = llama()
        trained = lib.llama_model_n_ctx_train(self._model.handle)
        if self._n_ctx > trained > 0:
            notices.append(f"A context of {self._n_ctx:,} tokens was asked for; this model was trained for {trained:,}, and answers get worse beyond.")
        self._memory = lib.llama_get_memory(self._context)
        self.vocab = LlamaVocab(self._model, header)
        self.info = self._describe(header, options, notices)
        self._batch = _Batch(options.batch_size)
        self._n_vocab = self._model.n_vocab
        self._get_logits = native_function("llama_get_logits", ctypes.c_void_p, ctypes.c_void_p)
        self._decode = lib.llama_decode
        self._views: dict[tuple[int, int], list[np.ndarray]] = {}

    # ------------------------------------------------------------------------------------------------------------- loading

    def _make_context(self, header: GGUFHeader, options: LlamaOptions, flash: int) -> int:
        lib = llama()
        trained = lib.llama_model_n_ctx_train(self._model.handle)
        self._n_ctx = options.ctx_size or min(trained, DEFAULT_CONTEXT)
        cells = options.kv_size or self._n_ctx
        if cells < self._n_ctx:
            raise BadRequest(f"The KV cache of {cells} tokens is smaller than the context of {self._n_ctx}; raise it or lower --ctx-size.")
        threads = options.threads or _cores()
        params = lib.llama_context_default_params()
        params.n_ctx = cells if options.kv_unified else self._n_ctx * options.parallel
        params.n_batch = min(options.batch_size, cells)
        params.n_ubatch = min(options.ubatch_size, params.n_batch)
        params.n_seq_max = options.parallel
        params.n_threads = threads
        params.n_threads_batch = options.threads_batch or threads
        params.type_k = _ggml_type(options.cache_type_k)
        params.type_v = _ggml_type(options.cache_type_v)
        params.flash_attn_type = flash
        params.kv_unified = options.kv_unified
        params.n_outputs_max = options.parallel          # one row of logits a chunk; the default reserves one a token: 80 MB for SmolLM2
        params.no_perf = True
        # llama.cpp asks this callback once per graph node, about 700 times a token. A Python callback would take the GIL each time; strlen, given
        # a buffer that holds "" or "x", answers 0 or 1 in native code.
        self._abort_flag = ctypes.create_string_buffer(2)
        params.abort_callback = ctypes.cast(_strlen(), lib.ggml_abort_callback)
        params.abort_callback_data = ctypes.cast(self._abort_flag, ctypes.c_void_p)
        with captured_logs() as lines:
            context = lib.llama_init_from_model(self._model.handle, params)
        if not context:
            reason = last_error(lines) or "llama.cpp gave no reason"
            raise OutOfMemory(
                f"No context of {cells:,} tokens could be made for {self._model.path.name} ({reason}); lower --ctx-size or use a smaller KV type (-ctk q8_0 -ctv q8_0)."
            )
        return context

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
            max_slots=options.parallel,
            max_batch=lib.llama_n_batch(self._context),
            kv_type=k if k == v else f"{k}/{v}",
            kv_bytes_per_token=kv_bytes_per_token(header, type_k=k, type_v=v),
            weight_bytes=lib.llama_model_size(model.handle),
            can_copy_prefix=not lib.llama_model_is_recurrent(model.handle),
            can_shift=bool(lib.llama_memory_can_shift(self._memory)),
            layers_offloaded=on_gpu,
            layers=layers,
            system=(lib.llama_print_system_info() or b"").decode("utf-8", "replace").strip(),
            notices=tuple(notices),
        )

    # ------------------------------------------------------------------------------------------------------------- stepping

    def forward(self, plan: StepPlan) -> StepResult:
        self._abort_flag.value = b""
        groups = _groups(plan)
        logits: dict[int, np.ndarray] = {}
        no_room: list[int] = []
        aborted: list[int] = []
        failed: dict[int, str] = {}
        for index, group in enumerate(groups):
            if self._abort_flag.value:
                aborted += [chunk.slot for chunk in group]
                continue
            self._batch.fill(group)
            status = self._decode(self._context, self._batch.native)
            if status == _OK:
                # The native rows are overwritten by the next call of this step, if there is one.
                logits |= self._rows(group, copy=index + 1 < len(groups))
                continue
            slots = [chunk.slot for chunk in group]
            for chunk in group:                          # whatever part of the batch went in must go out again
                llama().llama_memory_seq_rm(self._memory, chunk.slot, chunk.start, -1)
            if status == _NO_ROOM:
                no_room += slots
            elif status == _ABORTED:
                aborted += slots
            else:
                failed |= {slot: f"llama.cpp failed to compute a step (llama_decode returned {status})." for slot in slots}
        return StepResult(logits, tuple(no_room), tuple(aborted), failed)

    def _rows(self, group: tuple[Chunk, ...], *, copy: bool) -> dict[int, np.ndarray]:
        wanting = [chunk.slot for chunk in group if chunk.wants_logits]
        if not wanting:
            return {}
        rows = self._logits_views(self._get_logits(self._context), len(wanting))
        return {slot: row.copy() if copy else row for slot, row in zip(wanting, rows, strict=True)}

    def _logits_views(self, address: int, count: int) -> list[np.ndarray]:
        # llama.cpp keeps its output buffer; making views anew costs 0.1 ms, for every step of every answer.
        views = self._views.get((address, count))
        if views is None:
            buffer = (ctypes.c_float * (count * self._n_vocab)).from_address(address)
            views = self._views[address, count] = list(np.frombuffer(buffer, np.float32).reshape(count, self._n_vocab))
        return views

    # --------------------------------------------------------------------------------------------------------------- slots

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        # Between streams llama.cpp copies whole sequences only (a part of one ends the process); unified cells are shared, so all of it costs nothing.
        llama().llama_memory_seq_cp(self._memory, src, dst, -1, -1)
        llama().llama_memory_seq_rm(self._memory, dst, length, -1)

    def truncate(self, slot: int, length: int) -> bool:
        return bool(llama().llama_memory_seq_rm(self._memory, slot, length, -1))

    def reusable(self, slot: int, length: int, wanted: int) -> int:
        # A sliding window that dropped early cells leaves a hole at the start; the prefix is then not all there.
        return min(length, wanted) if llama().llama_memory_seq_pos_min(self._memory, slot) == 0 else 0

    def rest(self) -> None:
        release_compute_threads()

    def abort(self) -> None:
        self._abort_flag.value = b"x"

    def close(self) -> None:
        if self._context:
            llama().llama_free(self._context)
            self._context = 0
            self._model.close()


def _groups(plan: StepPlan) -> list[tuple[Chunk, ...]]:
    """What goes into one native call each: the decoders together, but for those that must be alone; every prompt chunk by itself."""
    if not plan.prefills and len(plan.decodes) == 1:
        return [plan.decodes]
    together = tuple(chunk for chunk in plan.decodes if not chunk.alone)
    return ([together] if together else []) + [(chunk,) for chunk in plan.decodes if chunk.alone] + [(chunk,) for chunk in plan.prefills]


class _Batch:
    """A ``llama_batch`` over numpy arrays of our own, so that filling it is a few array assignments and allocates nothing."""

    def __init__(self, capacity: int):
        lib = llama()
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(capacity, np.int32)
        self._counts = np.ones(capacity, np.int32)
        self._sequences = np.zeros(capacity, np.int32)
        # seq_id is an array of pointers, one per token; ours point at consecutive elements of one array for good.
        self._pointers = self._sequences.ctypes.data + np.arange(capacity, dtype=np.uintp) * self._sequences.itemsize
        self._wanted = np.zeros(capacity, np.int8)
        self.native = lib.llama_batch(
            n_tokens=0,
            token=self._tokens.ctypes.data_as(ctypes.POINTER(lib.llama_token)),
            embd=None,
            pos=self._positions.ctypes.data_as(ctypes.POINTER(lib.llama_pos)),
            n_seq_id=self._counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=ctypes.cast(self._pointers.ctypes.data, ctypes.POINTER(ctypes.POINTER(lib.llama_seq_id))),
            logits=self._wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def fill(self, chunks: tuple[Chunk, ...]) -> None:
        end = 0
        for chunk in chunks:
            if len(chunk.tokens) == 1:                   # a decoder: single elements are set several times faster than slices
                self._tokens[end] = chunk.tokens[0]
                self._positions[end] = chunk.start
                self._sequences[end] = chunk.slot
                self._wanted[end] = chunk.wants_logits
                end += 1
                continue
            begin, end = end, end + len(chunk.tokens)
            self._tokens[begin:end] = chunk.tokens
            self._positions[begin:end] = range(chunk.start, chunk.start + len(chunk.tokens))
            self._sequences[begin:end] = chunk.slot
            self._wanted[begin:end] = 0
            self._wanted[end - 1] = chunk.wants_logits
        self.native.n_tokens = end


# ------------------------------------------------------------------------------------------------------------ what was asked for


def _check_types(options: LlamaOptions) -> None:
    for flag, value in (("-ctk", options.cache_type_k), ("-ctv", options.cache_type_v)):
        if value not in KV_TYPES:
            raise BadRequest(f"{flag} {value} is no KV cache type; known are {', '.join(KV_TYPES)}.")
    if options.flash_attn not in ("auto", "on", "off"):
        raise BadRequest(f"-fa takes auto, on or off, not {options.flash_attn!r}.")
    for name, low in (("ctx_size", 0), ("parallel", 1), ("batch_size", 1), ("ubatch_size", 1), ("threads", 0), ("threads_batch", 0), ("kv_size", 0)):
        if getattr(options, name) < low:
            raise BadRequest(f"{name} must be at least {low}, not {getattr(options, name)}.")


def _flash_attention(options: LlamaOptions, notices: list[str]) -> int:
    """llama.cpp's enum: -1 auto, 0 off, 1 on. A quantised V cache works only with flash attention."""
    quantised_v = options.cache_type_v not in ("f32", "f16", "bf16")
    if quantised_v and options.flash_attn == "off":
        raise BadRequest(f"A {options.cache_type_v} V cache needs flash attention; drop -fa off or use -ctv f16.")
    if quantised_v and options.flash_attn == "auto":
        notices.append(f"Flash attention was switched on, which the {options.cache_type_v} V cache needs.")
        return 1
    return {"auto": -1, "off": 0, "on": 1}[options.flash_attn]


def _gpu_layers(options: LlamaOptions, notices: list[str]) -> int:
    has_gpu = bool(llama().llama_supports_gpu_offload())
    if options.device not in ("auto", "cpu", "cuda"):
        raise BadRequest(f"--device takes auto, cpu or cuda, not {options.device!r}.")
    asked = options.gpu_layers
    if isinstance(asked, str) and asked not in ("auto", "all"):
        if not re.fullmatch(r"-?\d+", asked):
            raise BadRequest(f"-ngl takes auto, all or a number of layers, not {asked!r}.")
        asked = int(asked)
    if options.device == "cuda" and not has_gpu:
        raise DeviceUnavailable(
            "--device cuda was asked for, but this build of llama-cpp-python has no GPU support; reinstall it with CMAKE_ARGS=-DGGML_CUDA=on, or use --device auto."
        )
    if options.device == "cpu":
        return 0
    wants = asked == "all" or (isinstance(asked, int) and asked != 0)
    if wants and not has_gpu:
        notices.append("No layer runs on a GPU: this build of llama-cpp-python has no GPU support (-ngl has no effect).")
    if not has_gpu or asked == 0:
        return 0
    return asked if isinstance(asked, int) and asked > 0 else 999


def _ggml_type(name: str) -> int:
    return int(getattr(llama(), f"GGML_TYPE_{name.upper()}"))


def _cores() -> int:
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    import psutil

    # Two threads of one core share its multipliers: physical cores are as fast and leave room for everybody else.
    return max(1, min(affinity, psutil.cpu_count(logical=False) or affinity))


def _strlen() -> ctypes.c_void_p:
    library = ctypes.CDLL("msvcrt" if os.name == "nt" else None)
    return ctypes.cast(library.strlen, ctypes.c_void_p)
