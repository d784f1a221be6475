"""How another thread ends a running ``llama_decode``."""

from __future__ import annotations

import ctypes
import os
import threading
from types import TracebackType
from typing import Any

from edgeinfer.models.native import llama


class AbortFlag:
    """``with flag:`` around native calls; `set` from any thread ends those soon, and does nothing outside.

    llama.cpp asks its abort callback once per graph node, about 700 times a token. A Python callback would take the GIL each time; strlen, given a
    buffer that holds "" or "x", answers 0 or 1 in native code.
    """

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(2)
        self._lock = threading.Lock()
        self._running = False

    def attach(self, params: Any) -> None:
        """Let a context that is made with ``params`` ask this flag, which must outlive it."""
        params.abort_callback = ctypes.cast(_strlen(), llama().ggml_abort_callback)
        params.abort_callback_data = ctypes.cast(self._buffer, ctypes.c_void_p)

    @property
    def is_set(self) -> bool:
        return bool(self._buffer.value)

    def set(self) -> None:
        with self._lock:
            if self._running:
                self._buffer.value = b"x"

    def __enter__(self) -> None:
        with self._lock:
            self._running = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self._running, self._buffer.value = False, b""


def _strlen() -> ctypes.c_void_p:
    library = ctypes.CDLL("msvcrt" if os.name == "nt" else None)
    return ctypes.cast(library.strlen, ctypes.c_void_p)
