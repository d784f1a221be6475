"""edgeinfer: convert, run and chat with language models on your own machine.

    import edgeinfer

    with edgeinfer.load("model.gguf") as engine:
        for piece in engine.chat([{"role": "user", "content": "Hello!"}], max_tokens=100):
            print(piece, end="", flush=True)

Conversion is ``from edgeinfer.convert import convert``. Importing this package loads nothing heavy; the names below load what they need when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from edgeinfer.errors import EdgeInferError

if TYPE_CHECKING:
    from edgeinfer.runtime.load import load
    from edgeinfer.runtime.service import Engine
    from edgeinfer.runtime.stream import Stream
    from edgeinfer.runtime.values import FinishReason, SamplingParams, Timings, Usage

__version__ = "0.1.0"

_HOMES = {
    "load": "edgeinfer.runtime.load",
    "Engine": "edgeinfer.runtime.service",
    "Stream": "edgeinfer.runtime.stream",
    "SamplingParams": "edgeinfer.runtime.values",
    "FinishReason": "edgeinfer.runtime.values",
    "Usage": "edgeinfer.runtime.values",
    "Timings": "edgeinfer.runtime.values",
}

__all__ = ["EdgeInferError", "Engine", "FinishReason", "SamplingParams", "Stream", "Timings", "Usage", "__version__", "load"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'edgeinfer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
