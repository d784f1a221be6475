"""From a path and options to a running engine: the only module that knows the backends by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from edgeinfer.errors import BadRequest, UnsupportedModel, UnsupportedParameter
from edgeinfer.models.gguf_header import read_header
from edgeinfer.models.resolve import resolve
from edgeinfer.runtime.backends.llama_memory import context_size, memory_needed as estimate_llamacpp
from edgeinfer.runtime.backends.llamacpp import LlamaCppBackend, LlamaOptions
from edgeinfer.runtime.draft_model import DraftModel
from edgeinfer.runtime.health import EngineOptions
from edgeinfer.runtime.kv_spill import KVPersistence
from edgeinfer.runtime.kv_store import KVStore, KVStoreOptions
from edgeinfer.runtime.prompt_lookup import PromptLookup
from edgeinfer.runtime.scheduler import SchedulerOptions
from edgeinfer.runtime.service import Engine
from edgeinfer.runtime.speculative import Speculator


@dataclass(frozen=True)
class SpeculativeOptions:
    """Guessing answers ahead; the text stays what it would be without."""

    speculative: str = "off"             # "off", or "prompt_lookup": guess what followed the same words earlier in the conversation
    draft_model: str | Path | None = None   # guess with a smaller model of the same vocabulary instead
    draft_max: int = 15                  # tokens guessed ahead in one step

    def __post_init__(self) -> None:
        if self.speculative not in ("off", "prompt_lookup"):
            raise BadRequest(f"speculative must be off or prompt_lookup, not {self.speculative!r}.")
        if self.draft_model is not None and self.speculative != "off":
            raise BadRequest("Give either a draft model or speculative=prompt_lookup, not both.")


def load(
    model: str | Path,
    *,
    chat_template: str | None = None,
    offline: bool = True,
    progress: Callable[[float], bool] | None = None,
    **options: Any,
) -> Engine:
    """Load a model and start its engine. Blocks while the weights load.

    model: a .gguf file, a name in the store, a catalogue name (``smollm2-135m``) or a hub id; the network is used only with ``offline=False``.
    chat_template: jinja source that replaces the model's own.
    progress: called with 0.0 .. 1.0 while weights load; return False to stop, which raises `Cancelled`. What it raises itself stops too.
    options: fields of `LlamaOptions` (ctx_size, parallel, threads, gpu_layers, cache_type_k, ...), of `SchedulerOptions` (prefill_chunk, ...), of
        `SpeculativeOptions`, of `KVStoreOptions` (kv_cache_dir, kv_cache_bytes) and of `EngineOptions` (step_timeout_s).
    Raises `ModelNotFound`, `ModelDamaged`, `OutOfMemory`, `BadRequest` and their kin.
    """
    backend_options, scheduler_options, speculative_options, store_options, engine_options = _picked(options)
    path = _gguf(model, offline)
    draft_path = _gguf(speculative_options.draft_model, offline) if speculative_options.draft_model is not None else None
    store = KVStore(store_options.kv_cache_dir, max_bytes=store_options.kv_cache_bytes) if store_options.kv_cache_dir is not None else None
    with ExitStack() as loaded:
        backend = LlamaCppBackend(path, backend_options, progress=progress)
        loaded.callback(backend.close)
        speculator = None
        if speculative_options.speculative == "prompt_lookup":
            speculator = Speculator(PromptLookup(end_ids=backend.vocab.end_ids), max_draft=speculative_options.draft_max)
        elif draft_path is not None:
            draft = LlamaCppBackend(draft_path, _draft_options(backend_options, backend.info.n_ctx))
            loaded.callback(draft.close)
            speculator = Speculator(DraftModel(draft, backend), max_draft=speculative_options.draft_max)
        if speculator is not None and not backend.info.can_copy_prefix:
            raise UnsupportedParameter(f"{path.name} cannot take tokens back, which speculative decoding needs; load it without.")
        persistence = None
        if store is not None:
            persistence = KVPersistence(backend, store, layout=backend.kv_layout, adapters=backend.adapter_identities)
        engine = Engine(
            backend, chat_template=chat_template, options=scheduler_options, speculator=speculator, persistence=persistence, engine_options=engine_options,
        )
        loaded.pop_all()                                 # from here on the engine closes them
    return engine


def memory_needed(model: str | Path, *, chat_template: str | None = None, offline: bool = True, **options: Any) -> int:
    """The bytes that `load` with these options would take (weights, KV cache and compute buffers), estimated without loading; arguments and errors as there."""
    del chat_template                                    # takes nothing worth counting
    backend_options, _, speculative_options, _, _ = _picked(options)
    path = _gguf(model, offline)
    needed = estimate_llamacpp(path, backend_options).total
    if speculative_options.draft_model is not None:
        n_ctx = context_size(read_header(path), backend_options, [])
        needed += estimate_llamacpp(_gguf(speculative_options.draft_model, offline), _draft_options(backend_options, n_ctx)).total
    return needed


def _draft_options(options: LlamaOptions, n_ctx: int) -> LlamaOptions:
    return replace(options, ctx_size=n_ctx, lora=(), cache_slots=0)


def _gguf(model: str | Path, offline: bool) -> Path:
    found = resolve(str(model), offline=offline)
    if found.kind != "gguf":
        raise UnsupportedModel(f"{found.path} is a Hugging Face checkpoint, which the runtime does not open; convert it: edgeinfer convert {found.path} --to gguf-q4")
    return found.path


def _picked(options: dict[str, Any]) -> tuple[LlamaOptions, SchedulerOptions, SpeculativeOptions, KVStoreOptions, EngineOptions]:
    """``options`` by kind; one that no kind knows is a `BadRequest`."""
    rest = dict(options)
    picked = (_pick(LlamaOptions, rest), _pick(SchedulerOptions, rest), _pick(SpeculativeOptions, rest), _pick(KVStoreOptions, rest), _pick(EngineOptions, rest))
    if rest:
        known = ", ".join(field.name for part in picked for field in fields(part))
        raise BadRequest(f"Unknown option {sorted(rest)[0]!r}; known are {known}.")
    return picked


def _pick(kind: type, options: dict[str, Any]) -> Any:
    """An instance of a dataclass from those of ``options`` that are its fields; they are taken out."""
    return kind(**{field.name: options.pop(field.name) for field in fields(kind) if field.name in options})
