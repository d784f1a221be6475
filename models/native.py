"""The one door to llama.cpp: import, logs, loading a model file, its vocabulary.

Both the converter (to test what it wrote) and the runtime come through here, so that nobody prints native logs to the terminal, loads a file whose
header was not checked, or frees a handle twice. Nothing heavy is imported before the first call.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from edgeinfer.errors import Cancelled, ModelDamaged

_recent_logs: deque[str] = deque(maxlen=400)
_listeners: list[list[str]] = []
_logs_lock = threading.Lock()
_import_lock = threading.Lock()
_log_callback: Any = None                                # llama.cpp keeps the pointer: it must outlive every call


def _low_level(name: str) -> ModuleType:
    """A module of the package llama_cpp without the package's ``__init__``, whose high-level classes cost every command 0.1 s and 8 MB.

    The package itself is left unimported: a program that wants it imports it as ever, over the same low-level module.
    """
    with _import_lock:
        spec = None if "llama_cpp" in sys.modules else importlib.util.find_spec("llama_cpp")
        if spec is None:                                 # imported whole by somebody else, or not installed: the import says so
            return importlib.import_module(f"llama_cpp.{name}")
        sys.modules["llama_cpp"] = importlib.util.module_from_spec(spec)
        try:
            return importlib.import_module(f"llama_cpp.{name}")
        finally:
            del sys.modules["llama_cpp"]


@cache
def llama() -> ModuleType:
    """The low-level llama.cpp module, its backend initialised and its logs captured."""
    module = _low_level("llama_cpp")

    global _log_callback

    def keep(_level: int, text: bytes | None, _user: int) -> None:
        line = (text or b"").decode("utf-8", "replace")
        with _logs_lock:
            _recent_logs.append(line)
            for lines in _listeners:
                lines.append(line)

    _log_callback = module.llama_log_callback(keep)
    module.llama_log_set(_log_callback, ctypes.c_void_p(0))
    module.llama_backend_init()
    return module


def native_function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """A quick function of llama.cpp's library, under a signature of the caller's (an address instead of a pointer object, say).

    The call keeps the interpreter lock, so use it only for what returns at once.
    """
    return ctypes.PYFUNCTYPE(result, *arguments)((name, llama()._lib))


@cache
def _openmp() -> ctypes.CDLL | None:
    """GNU OpenMP, which ggml computes with on Linux; None elsewhere."""
    try:
        library = ctypes.CDLL("libgomp.so.1")
        return library if library.omp_pause_resource and library.omp_get_initial_device else None
    except (OSError, AttributeError):
        return None


def release_compute_threads() -> None:
    """End the OpenMP workers of the calling thread; its next computation starts new ones (0.1 ms).

    Every thread that ever computed keeps its own workers. As soon as they outnumber the cores, OpenMP stops spinning at barriers and sleeps instead,
    which more than halves the speed of everybody in the process: a second engine, idle or not, or one conversion is enough. So whoever has finished
    computing calls this.
    """
    library = _openmp()
    if library is not None:
        library.omp_pause_resource(1, library.omp_get_initial_device())      # 1: soft, keep the settings


@cache
def ggml() -> ctypes.CDLL:
    """ggml's own library beside llama.cpp's: tensor types and the kernels that quantise rows. Calls release the interpreter lock."""
    llama()
    lib = _low_level("_ggml").libggml
    for name, result, arguments in (
        ("ggml_type_name", ctypes.c_char_p, [ctypes.c_int]),
        ("ggml_blck_size", ctypes.c_int64, [ctypes.c_int]),
        ("ggml_row_size", ctypes.c_size_t, [ctypes.c_int, ctypes.c_int64]),
        ("ggml_validate_row_data", ctypes.c_bool, [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]),
        # type, float32 rows, destination, first element, rows, elements a row, importance of each column or null
        ("ggml_quantize_chunk", ctypes.c_size_t, [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


@contextmanager
def captured_logs() -> Iterator[list[str]]:
    """Native log lines written while the block runs (by any thread: llama.cpp has one log)."""
    llama()
    lines: list[str] = []
    with _logs_lock:
        _listeners.append(lines)
    try:
        yield lines
    finally:
        with _logs_lock:
            # By identity: two captures that have seen the same lines compare equal.
            _listeners[:] = [other for other in _listeners if other is not lines]


def last_error(lines: list[str]) -> str:
    """The line of a native log that names the cause, without llama.cpp's function prefix; "" when none does."""
    for line in reversed("".join(lines).splitlines()):
        text = line.strip()
        if ("error" in text.lower() or "fail" in text.lower()) and "failed to load model" not in text.lower():
            return text.split("error loading model: ")[-1].strip()
    return ""


def recent_logs() -> str:
    """The last few hundred native log pieces: what a bug report wants."""
    with _logs_lock:
        return "".join(_recent_logs)


class NativeModel:
    """A loaded ``llama_model``. Free it with `close`; dropping the last reference frees it too.

    vocab_only: load the tokenizer alone, no weights.
    no_alloc: check every tensor's name and shape without loading one; such a model computes nothing.
    progress: called with 0.0 .. 1.0 while weights load; returning False stops, which raises `Cancelled`, and what it raises itself stops too.
    Raises `ModelDamaged` with llama.cpp's own reason. Callers check the header first (`edgeinfer.models.gguf_header`), since llama.cpp says little.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        vocab_only: bool = False,
        no_alloc: bool = False,
        gpu_layers: int = 0,
        mmap: bool = True,
        progress: Callable[[float], bool] | None = None,
    ):
        lib = llama()
        params = lib.llama_model_default_params()
        params.vocab_only = vocab_only
        params.no_alloc = no_alloc
        params.n_gpu_layers = gpu_layers
        # llama.cpp ends the process when asked to map a file and to allocate nothing.
        params.load_mode = lib.LLAMA_LOAD_MODE_MMAP if mmap and not no_alloc else lib.LLAMA_LOAD_MODE_NONE
        stopped: list[BaseException] = []
        if progress is not None:
            # No exception passes through native code: it is kept until the native call has returned.
            def report(share: float, _user: int) -> bool:
                try:
                    if progress(share) is False:
                        stopped.append(Cancelled(f"Loading {path} was stopped."))
                except BaseException as error:
                    stopped.append(error)
                return not stopped

            params.progress_callback = lib.llama_progress_callback(report)
        with captured_logs() as lines:
            handle = lib.llama_model_load_from_file(str(path).encode(), params)
        if stopped:
            if handle:
                lib.llama_model_free(handle)
            raise stopped.pop()
        if not handle:
            reason = last_error(lines) or "llama.cpp gave no reason"
            raise ModelDamaged(f"llama.cpp cannot load {path}: {reason}.")
        self.path = Path(path)
        self.handle = handle
        self.load_log = "".join(lines)
        self.vocab = lib.llama_model_get_vocab(handle)
        self.n_vocab: int = lib.llama_vocab_n_tokens(self.vocab)
        self._free = weakref.finalize(self, lib.llama_model_free, handle)

    def close(self) -> None:
        """Free the model now. The handle and everything made from it must not be used afterwards."""
        self._free()

    def metadata(self, key: str) -> str | None:
        """A scalar GGUF metadata value as llama.cpp prints it, or None."""
        size = llama().llama_model_meta_val_str(self.handle, key.encode(), None, 0)
        if size < 0:
            return None
        buffer = ctypes.create_string_buffer(size + 1)
        llama().llama_model_meta_val_str(self.handle, key.encode(), buffer, size + 1)
        return buffer.value.decode("utf-8", "replace")

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of ``text``. Safe from any thread: llama.cpp only reads the vocabulary."""
        lib = llama()
        data = text.encode("utf-8", "surrogatepass")
        room = len(data) + 8
        tokens = (lib.llama_token * room)()
        count = lib.llama_tokenize(self.vocab, data, len(data), tokens, room, add_special, parse_special)
        if count < 0:                                    # the size it wants, negated
            tokens = (lib.llama_token * -count)()
            count = lib.llama_tokenize(self.vocab, data, len(data), tokens, -count, add_special, parse_special)
        return list(tokens[:count])

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """The bytes a token stands for; ``special`` renders control tokens by their text instead of as nothing."""
        lib = llama()
        buffer = ctypes.create_string_buffer(64)
        size = lib.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special)
        if size < 0:
            buffer = ctypes.create_string_buffer(-size)
            size = lib.llama_token_to_piece(self.vocab, token, buffer, -size, 0, special)
        return buffer.raw[:size]
