"""`convert`: a Hugging Face checkpoint (or an unquantised GGUF file) in, a tested GGUF file out.

    open -> check everything, list all problems -> scan weights -> choose types -> plan -> write under a temporary name -> test -> rename
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

from edgeinfer.convert.memory import give_back_freed, peak_memory
from edgeinfer.convert.partial import partial_file, publish
from edgeinfer.convert.plan import Plan, make_plan
from edgeinfer.convert.report import ConversionReport, megabytes
from edgeinfer.convert.sources import open_source
from edgeinfer.convert.stream import write_tensors
from edgeinfer.convert.targets import Target, parse_target
from edgeinfer.convert.tensor_types import choose_types
from edgeinfer.convert.verify import verify_file
from edgeinfer.convert.weights import scan_all
from edgeinfer.errors import ConversionFailed
from edgeinfer.models.checkpoint import Checkpoint

Progress = Callable[[str, int, int], None]               # stage ("scan", "write", "verify"), bytes done, bytes in all
WAY_OUT = "make room or choose another place with --out"
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
    out: file, or folder for the default name ``<name>-<TYPE>.gguf``; the current folder when None. An existing file is replaced by the last step.
    dry_run: plan only. The report has the exact size of the file; nothing is written.
    verify: load the result, run it, and compare tokenizer and chat template with the checkpoint's before it gets its name.
    pre: name of the pre-tokenizer, for a tokenizer whose rules edgeinfer does not know.
    threads: default one for each core. progress: called on this thread, tensor by tensor.

    Raises `BadRequest` (no such target), `ModelNotFound`, `ModelDamaged`, `UnsupportedModel`, and `ConversionFailed` with every problem listed.
    Whatever is raised, and even when the process is killed, nothing is left under the final name that was not there before.
    """
    target = parse_target(to)
    stages = Stages(progress)
    threads = threads or os.cpu_count() or 1
    plan, report, checkpoint = _prepare(source, target, out, pre, threads, stages)
    report = replace(report, dry_run=dry_run)
    if not dry_run:
        report = replace(report, checks=_write(plan, report.output, checkpoint, threads, verify, stages))
    return replace(report, seconds=stages.seconds, peak_memory_bytes=peak_memory())


def _prepare(
    source: Checkpoint | Path | str, target: Target, out: Path | str | None, pre: str | None, threads: int, stages: Stages
) -> tuple[Plan, ConversionReport, Checkpoint | None]:
    """Check and plan. What is left afterwards is small: the vocabulary's many strings are part of the plan's header by then."""
    with stages.timed("plan"):
        opened = open_source(source, target, pre)
        final = output_path(out, opened.name, target)
    with stages.timed("scan"):
        scans = scan_all(opened.used, threads, stages.counter("scan", sum(tensor.nbytes for tensor in opened.used)))
    with stages.timed("plan"):
        choices = choose_types(target, opened.hyperparameters, opened.mapped)
        plan = make_plan(opened.metadata, opened.mapped, opened.stored, choices, scans, head_dim=opened.head_dim, norm_offset=opened.norm_offset)
    report = ConversionReport(
        source=opened.path,
        output=final,
        target=target.name,
        bytes=plan.size,
        source_bytes=sum(tensor.nbytes for tensor in opened.stored.values()),
        parameters=plan.parameters,
        tensors=plan.totals,
        fallbacks=plan.fallbacks,
        kept=plan.kept,
        warnings=opened.warnings,
    )
    return plan, report, opened.checkpoint


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


def _write(plan: Plan, final: Path, checkpoint: Checkpoint | None, threads: int, verify: bool, stages: Stages) -> tuple[str, ...]:
    """Make the file; returns what was tested on it."""
    with partial_file(final) as path, plain_disk_errors(final):
        require_space(final, plan.size)
        with stages.timed("write"):
            count = stages.counter("write", sum(tensor.nbytes for tensor in plan.tensors))
            write_tensors(path, plan, threads, count)
        with ThreadPoolExecutor(1) as background, stages.timed("verify"):
            give_back_freed()                            # before llama.cpp maps the whole file
            synced = background.submit(sync, path)       # the disk works while the file, still in memory, is tested
            checks = verify_file(path, checkpoint, stages.counter("verify", plan.size)) if verify else ()
            synced.result()
        publish(path, final)
    return checks


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
        raise ConversionFailed(f"The file takes {megabytes(size)} and {folder} has {megabytes(free)} free; {WAY_OUT}.")


@contextmanager
def plain_disk_errors(final: Path) -> Iterator[None]:
    """Turn a failed write into one sentence."""
    try:
        yield
    except OSError as error:
        reason = NO_SPACE.get(error.errno, error.strerror or str(error))
        raise ConversionFailed(f"{final} could not be written: {reason}. Nothing was left behind; {WAY_OUT}.") from error


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
