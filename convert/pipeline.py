"""`convert`: a Hugging Face checkpoint (or an unquantised GGUF file) in, a tested GGUF file out.

    open -> check everything, list all problems -> choose types -> plan -> write under a temporary name -> test -> rename
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.convert import gguf_metadata as metadata
from edgeinfer.convert.gguf_names import map_tensors
from edgeinfer.convert.gguf_write import write_header
from edgeinfer.convert.partial import partial_file, publish
from edgeinfer.convert.plan import Plan, make_plan, parameter_count
from edgeinfer.convert.report import ConversionReport, megabytes, peak_memory
from edgeinfer.convert.stream import write_tensors
from edgeinfer.convert.targets import Target, parse_target
from edgeinfer.convert.tensor_types import choose_types
from edgeinfer.convert.verify import DECODE_UP_TO, try_model
from edgeinfer.convert.weights import scan_all
from edgeinfer.errors import ConversionFailed, EdgeInferError
from edgeinfer.models.checkpoint import Checkpoint

if TYPE_CHECKING:
    from edgeinfer.convert.vocab import GGUFVocab

Progress = Callable[[str, int, int], None]               # stage ("scan", "write", "verify"), bytes done, bytes in all
NO_SPACE = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up", errno.EFBIG: "files of this size are not allowed here"}


def convert(
    source: Checkpoint | Path | str,
    to: str,
    out: Path | str | None = None,
    *,
    dry_run: bool = False,
    verify: bool = True,
    pre: str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert ``source`` to the target ``to`` ("gguf-q4", "gguf-f16", "gguf-q5_k_m", ...).

    source: an opened checkpoint, its folder, or a GGUF file in F32, F16 or BF16 to be quantised.
    out: file, or folder for the default name ``<name>-<TYPE>.gguf``; the current folder when None. An existing file is replaced by the last step only.
    dry_run: plan only. The report has the exact size of the file; nothing is written.
    verify: load the result, run it, and compare tokenizer and chat template with the checkpoint's before it gets its name.
    pre: name of the pre-tokenizer, for a tokenizer whose rules edgeinfer does not know.
    threads: default one for each core. progress: called on this thread, tensor by tensor.

    Raises `BadRequest` (no such target), `ModelNotFound`, `ModelDamaged`, `UnsupportedModel`, and `ConversionFailed` with every problem listed. Whatever
    is raised, and even when the process is killed, nothing is left under the final name that was not there before.
    """
    target = parse_target(to)
    stages = Stages(progress)
    threads = threads or os.cpu_count() or 1
    if not isinstance(source, Checkpoint) and Path(source).suffix == ".gguf" and not Path(source).is_dir():
        from edgeinfer.convert.requantize import requantize

        return requantize(Path(source), target, out, dry_run=dry_run, verify=verify, threads=threads, stages=stages)
    with stages.timed("plan"):
        checkpoint = source if isinstance(source, Checkpoint) else Checkpoint.open(Path(source))
        vocab = check(checkpoint, pre)
        final = output_path(out, checkpoint.spec.name, target)
    with stages.timed("scan"):
        used = [checkpoint.tensors[name] for name in dict.fromkeys(m.source for m in mapped_tensors(checkpoint) if m.source)]
        scans = scan_all(used, threads, stages.counter("scan", sum(tensor.nbytes for tensor in used)))
    with stages.timed("plan"):
        plan = plan_gguf(checkpoint, vocab, target, scans)
    report = ConversionReport(
        source=checkpoint.folder,
        output=final,
        target=target.name,
        dry_run=dry_run,
        bytes=0,
        source_bytes=checkpoint.weight_bytes,
        parameters=plan.parameters,
        tensors=plan.totals,
        fallbacks=plan.fallbacks,
        kept=plan.kept,
        warnings=(*metadata.warnings(checkpoint.spec), *vocab.warnings),
    )
    if dry_run:
        size = header_size(plan) + plan.data_bytes
        return replace(report, bytes=size, seconds=stages.seconds, peak_memory_bytes=peak_memory())
    size, checks = _write(checkpoint, plan, final, threads, verify, stages)
    return replace(report, bytes=size, checks=checks, seconds=stages.seconds, peak_memory_bytes=peak_memory())


def check(checkpoint: Checkpoint, pre: str | None = None) -> GGUFVocab:
    """The checkpoint's vocabulary, once weights, config and tokenizer have all been looked at. Raises `ConversionFailed` with every problem."""
    from edgeinfer.convert.vocab import read_vocab

    problems = checkpoint.check() + metadata.problems(checkpoint.spec)
    vocab = None
    try:
        vocab = read_vocab(checkpoint, pre=pre)
    except EdgeInferError as error:
        problems += error.problems if isinstance(error, ConversionFailed) and error.problems else [str(error)]
    if problems or vocab is None:
        raise ConversionFailed(f"{checkpoint.folder} cannot be converted:", problems)
    return vocab


def output_path(out: Path | str | None, name: str, target: Target) -> Path:
    """Where the file goes. Raises `ConversionFailed` when the folder does not exist or is not writable."""
    default = f"{name.replace('/', '-')}-{target.name}.gguf"
    path = Path(default) if out is None else Path(out)
    path = path / default if path.is_dir() else path
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConversionFailed(f"The folder {folder} for the output does not exist.")
    if not os.access(folder, os.W_OK):
        raise ConversionFailed(f"The folder {folder} for the output is not writable.")
    return path


def mapped_tensors(checkpoint: Checkpoint) -> list:
    """The GGUF file's tensors (`gguf_names.Mapped`), in order."""
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    return map_tensors(checkpoint.spec, shapes, own_head=checkpoint.has_own_head)


def plan_gguf(checkpoint: Checkpoint, vocab: GGUFVocab, target: Target, scans: dict) -> Plan:
    """The file in advance, from a checkpoint that `check` let pass and what `scan_all` found in it."""
    spec = checkpoint.spec
    mapped = mapped_tensors(checkpoint)
    # llama.cpp recognises some tokenizers' whitespace rules by the model's name.
    name = spec.name if vocab.name_must_contain in spec.name.lower() else f"{spec.name} {vocab.name_must_contain}"
    values = metadata.general(name, file_type=target.number, parameters=parameter_count(mapped)) + metadata.hyperparameters(spec)
    choices = choose_types(target, spec.family, values, mapped)
    return make_plan(spec.family, target, values + vocab.metadata(), mapped, checkpoint.tensors, choices, scans)


def header_size(plan: Plan) -> int:
    """Exact offset of the tensor data."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="edgeinfer-") as folder:
        return write_header(Path(folder) / "header.gguf", plan.architecture, plan.values, [tensor.entry for tensor in plan.tensors])


def _write(checkpoint: Checkpoint, plan: Plan, final: Path, threads: int, verify: bool, stages: Stages) -> tuple[int, tuple[str, ...]]:
    with partial_file(final) as path, plain_disk_errors(final):
        require_space(final, plan.data_bytes)
        with stages.timed("write"):
            data_offset = write_header(path, plan.architecture, plan.values, [tensor.entry for tensor in plan.tensors])
            count = stages.counter("write", sum(tensor.nbytes for tensor in plan.tensors))
            write_tensors(path, plan, checkpoint.spec, data_offset, threads, count)
        with ThreadPoolExecutor(1) as background, stages.timed("verify"):
            synced = background.submit(sync, path)       # the disk works while the file, still in memory, is tested
            checks = _verify(checkpoint, path, stages) if verify else ()
            synced.result()
        size = path.stat().st_size
        publish(path, final)
    return size, checks


def _verify(checkpoint: Checkpoint, path: Path, stages: Stages) -> tuple[str, ...]:
    from edgeinfer.convert.parity import check_template, check_tokenizer

    size = path.stat().st_size
    count = stages.counter("verify", size)
    checks = [try_model(path, decode=size <= DECODE_UP_TO)]
    count(size // 2)
    check_tokenizer(checkpoint, path)
    checks.append("its tokenizer gives the same ids")
    if checkpoint.chat_template:
        check_template(checkpoint, path)
        checks.append("its chat template gives the same ids")
    count(size - size // 2)
    return tuple(checks)


def sync(path: Path) -> None:
    """Have everything of the file on the disk."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_space(final: Path, size: int) -> None:
    """Raise `ConversionFailed` when the disk has less room than the file will take."""
    folder = final.absolute().parent
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ConversionFailed(f"The file takes {megabytes(size)} and {folder} has {megabytes(free)} free; make room or choose another place with --out.")


@contextmanager
def plain_disk_errors(final: Path) -> Iterator[None]:
    """Turn a failed write into one sentence."""
    try:
        yield
    except OSError as error:
        reason = NO_SPACE.get(error.errno, error.strerror or str(error))
        raise ConversionFailed(f"{final} could not be written: {reason}. Nothing was left behind; make room or choose another place with --out.") from error


class Stages:
    """Time spent in each stage, and progress passed on."""

    def __init__(self, progress: Progress | None):
        self.seconds: dict[str, float] = {}
        self._progress = progress

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start

    def counter(self, name: str, total: int) -> Callable[[int], None]:
        """A function that takes the bytes just done; progress hears 0 at once."""
        done = 0

        def add(size: int) -> None:
            nonlocal done
            done += size
            if self._progress is not None:
                self._progress(name, done, total)

        add(0)
        return add
