"""What can be asked of the llama.cpp backend, and the checks that need no model."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from edgeinfer.errors import BadRequest, DeviceUnavailable
from edgeinfer.models.ggml_types import TYPES
from edgeinfer.models.memory import KV_TYPES
from edgeinfer.models.native import llama

DEFAULT_CONTEXT = 8192
SHIFTABLE = ("f32", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")     # types of K whose rotation llama.cpp can change


@dataclass(frozen=True)
class LlamaOptions:
    """Names follow llama.cpp's flags. Sizes are tokens."""

    ctx_size: int = 0                    # positions one sequence may use; 0: what the model was trained for, at most DEFAULT_CONTEXT
    parallel: int = 4                    # sequences that may run at once
    cache_slots: int = -1                # idle conversations held beside them; -1: 2 * parallel + 2 in a shared KV cache, where they cost nothing, else 0
    kv_unified: bool | None = None       # one KV cache that all sequences share, or (False) ctx_size tokens for each, faster and so many times the memory;
                                         # None: each its own where that is little of this machine's memory
    kv_size: int = 0                     # tokens the shared cache holds; 0: ctx_size
    batch_size: int = 2048
    ubatch_size: int = 512
    max_draft_rows: int = 32             # drafted tokens that one step may check, over all sequences
    threads: int = 0                     # 0: one per core this process may use
    threads_batch: int = 0               # 0: like threads
    gpu_layers: str | int = "auto"       # "auto", "all" or a count
    device: str = "auto"                 # "auto", "cpu", "cuda"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attn: str = "auto"             # "auto" (on a CPU: on), "on", "off"
    mmap: bool = True
    lora: tuple[str, ...] = ()           # adapters that requests may name: [NAME=]PATH[:SCALE] each
    max_memory: str | int | None = None  # of weights, KV cache and compute buffers: bytes or "2GiB"

    @property
    def slots(self) -> int:
        """Conversations held, running and idle."""
        idle = self.cache_slots if self.cache_slots >= 0 else 2 * self.parallel + 2 if self.kv_unified else 0
        return self.parallel + idle


def check_options(options: LlamaOptions) -> None:
    """Raises `BadRequest` for what no model could be loaded with."""
    for flag, value in (("-ctk", options.cache_type_k), ("-ctv", options.cache_type_v)):
        if value not in KV_TYPES:
            raise BadRequest(f"{flag} {value} is no KV cache type; known are {', '.join(KV_TYPES)}.")
    if options.flash_attn not in ("auto", "on", "off"):
        raise BadRequest(f"-fa takes auto, on or off, not {options.flash_attn!r}.")
    lowest = {"ctx_size": 0, "parallel": 1, "batch_size": 1, "ubatch_size": 1, "threads": 0, "threads_batch": 0, "kv_size": 0, "cache_slots": -1, "max_draft_rows": 0}
    for name, low in lowest.items():
        if getattr(options, name) < low:
            raise BadRequest(f"{name} must be at least {low}, not {getattr(options, name)}.")
    most = llama().llama_max_parallel_sequences()
    if options.slots > most:
        raise BadRequest(f"llama.cpp can hold {most} conversations; parallel and cache_slots together ask for {options.slots}.")


def flash_attention(options: LlamaOptions, gpu_layers: int, notices: list[str]) -> int:
    """llama.cpp's enum: -1 auto, 0 off, 1 on. A quantised V cache works only with flash attention.

    On a CPU it is on unless switched off: prompts are read faster with it, short conversations decode faster, and the cells of other sequences are
    skipped. What is slower is decoding far into a long context; docs/architecture.md has the figures.
    """
    quantised_v = options.cache_type_v not in ("f32", "f16", "bf16")
    if quantised_v and options.flash_attn == "off":
        raise BadRequest(f"A {options.cache_type_v} V cache needs flash attention; drop -fa off or use -ctv f16.")
    if options.flash_attn == "auto" and gpu_layers and quantised_v:
        notices.append(f"Flash attention was switched on, which the {options.cache_type_v} V cache needs.")
        return 1
    return {"auto": -1 if gpu_layers else 1, "off": 0, "on": 1}[options.flash_attn]


def gpu_layers(options: LlamaOptions, notices: list[str]) -> int:
    """Layers to put on a GPU: 0 without one, 999 for all."""
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


def ggml_type(name: str) -> int:
    """ggml's number of a KV cache type."""
    return next(number for number, kind in TYPES.items() if kind.name == name.upper())


def usable_cores() -> int:
    """Physical cores this process may use. Two threads of one core share its multipliers: cores are as fast and leave room for everybody else."""
    import psutil

    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(affinity, psutil.cpu_count(logical=False) or affinity))
