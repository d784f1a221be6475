"""Which type each tensor gets. llama.cpp itself is asked, so that a file of ours mixes types exactly as ``llama-quantize`` does.

The question is put as a *skeleton*: a GGUF file with the model's hyper-parameters and tensor names whose tensors have their true row length but only
two rows, run through ``llama_model_quantize`` with ``dry_run``. No rule of llama.cpp looks at the number of rows. A second skeleton, its rows rounded
up to whole blocks, tells what the types would have been if every row were divisible: where the answers differ, llama.cpp fell back.
"""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.convert.ggml_types import tensor_bytes, type_ids
from edgeinfer.convert.gguf_names import Mapped
from edgeinfer.convert.gguf_write import Metadata, TensorEntry, padded, render_header
from edgeinfer.convert.targets import Target
from edgeinfer.errors import BadRequest, ConversionFailed

SKELETON_ROWS = 2                                        # fewer would make the tensor a vector, which is never quantised
LARGEST_BLOCK = 256
LOG_LINE = re.compile(r"\[ *\d+/ *\d+\] +(\S+) +- \[[^\]]*\], type = +(\w+), size = +[\d.]+ MiB(?: -> +[\d.]+ MiB \((\w+)\))?")


@dataclass(frozen=True)
class Choice:
    """``used`` is the tensor's type, ``wanted`` the one it would have if its rows divided into blocks; both are names in capitals."""

    used: str
    wanted: str


def choose_types(target: Target, metadata: Metadata, tensors: Sequence[Mapped]) -> dict[str, Choice]:
    """The type of every tensor by name. ``metadata`` needs the hyper-parameters only, no vocabulary."""
    if target.plain:
        return {tensor.name: Choice(*[target.name if len(tensor.shape) > 1 else "F32"] * 2) for tensor in tensors}
    used = _ask(target, metadata, tensors, row_multiple=1)
    wanted = _ask(target, metadata, tensors, row_multiple=LARGEST_BLOCK)
    return {name: Choice(used[name], wanted[name]) for name in used}


def _ask(target: Target, metadata: Metadata, tensors: Sequence[Mapped], row_multiple: int) -> dict[str, str]:
    entries = []
    for tensor in tensors:
        row, name, shape = tensor.shape[-1], "F32", tensor.shape
        if len(shape) > 1:
            name, shape = "F16", (*shape[:-2], SKELETON_ROWS, -(-row // row_multiple) * row_multiple)
        entries.append(TensorEntry(tensor.name, shape, type_ids()[name], tensor_bytes(name, shape)))
    with tempfile.TemporaryDirectory(prefix="edgeinfer-") as folder:
        path = Path(folder) / "skeleton.gguf"
        header = render_header(metadata, entries)
        path.write_bytes(header)
        os.truncate(path, len(header) + sum(padded(entry.nbytes) for entry in entries))
        log = dry_run(path, target)
    types = {name: (new or old).upper() for name, old, new in LOG_LINE.findall(log)}
    missing = [tensor.name for tensor in tensors if types.get(tensor.name) not in type_ids()]
    if missing:
        raise ConversionFailed(f"llama.cpp named no type for {missing[0]} in a {target.name} file; its dry-run log may have changed.")
    return types


def dry_run(path: Path, target: Target) -> str:
    """llama.cpp's log of what quantising ``path`` would do. Raises `BadRequest` when the target needs an importance matrix."""
    from edgeinfer.models.native import captured_logs, last_error, llama

    params = llama().llama_model_quantize_default_params()
    params.ftype, params.dry_run, params.nthread = target.number, True, 1
    with captured_logs() as lines:
        status = llama().llama_model_quantize(str(path).encode(), str(path.with_suffix(".none")).encode(), ctypes.byref(params))
    log = "".join(lines)
    if status:
        raise ConversionFailed(f"llama.cpp cannot plan a {target.name} file: {last_error(lines) or 'it gave no reason'}.")
    if "will require an imatrix" in log:
        raise BadRequest(f"{target.word} needs an importance matrix, which edgeinfer does not make; gguf-q3_k_m and gguf-iq4_xs work without one.")
    return log
