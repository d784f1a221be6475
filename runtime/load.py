"""From a path and options to a running engine: the only module that knows the backends by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from edgeinfer.errors import BadRequest, UnsupportedModel
from edgeinfer.models.resolve import resolve
from edgeinfer.runtime.backends.llamacpp import LlamaCppBackend, LlamaOptions
from edgeinfer.runtime.scheduler import SchedulerOptions
from edgeinfer.runtime.service import Engine


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
    progress: called with 0.0 .. 1.0 while weights load; return False to stop.
    options: fields of `LlamaOptions` (ctx_size, parallel, threads, gpu_layers, cache_type_k, ...) and of `SchedulerOptions` (prefill_chunk, ...).
    Raises `ModelNotFound`, `ModelDamaged`, `OutOfMemory`, `BadRequest` and their kin.
    """
    backend_options = _pick(LlamaOptions, options)
    scheduler_options = _pick(SchedulerOptions, options)
    if options:
        known = ", ".join(field.name for kind in (LlamaOptions, SchedulerOptions) for field in fields(kind))
        raise BadRequest(f"Unknown option {sorted(options)[0]!r}; known are {known}.")
    found = resolve(str(model), offline=offline)
    if found.kind != "gguf":
        raise UnsupportedModel(f"{found.path} is a Hugging Face checkpoint, which the runtime does not open; convert it: edgeinfer convert {found.path} --to gguf-q4")
    backend = LlamaCppBackend(found.path, backend_options, progress=progress)
    try:
        return Engine(backend, chat_template=chat_template, options=scheduler_options)
    except BaseException:
        backend.close()
        raise


def _pick(kind: type, options: dict[str, Any]) -> Any:
    """An instance of a dataclass from those of ``options`` that are its fields; they are taken out."""
    return kind(**{field.name: options.pop(field.name) for field in fields(kind) if field.name in options})
