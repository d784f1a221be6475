"""What NVIDIA's management library says about the GPUs, where there are any and nvidia-ml-py is installed (the extra `gpu`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GPU:
    """One GPU now. ``index`` counts as CUDA does, so that it is the N of a device ``cuda:N``. None: this one does not tell."""

    index: int
    name: str
    utilisation: float | None            # 0 .. 1
    memory_used: int | None              # bytes, by all processes
    memory_total: int | None
    energy_joules: float | None          # since the driver was loaded


def open_nvml() -> Callable[[], tuple[GPU, ...]] | None:
    """A function that reads all GPUs this process may use; None where there is no library, no driver or no GPU."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handles = tuple(_handles(pynvml))
    except pynvml.NVMLError:
        return None
    return (lambda: tuple(_read(pynvml, index, handle) for index, handle in enumerate(handles))) if handles else None


def _handles(nvml: Any) -> Iterator[Any]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        yield from map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        return
    for name in filter(None, map(str.strip, visible.split(","))):
        if name.isdigit():
            yield nvml.nvmlDeviceGetHandleByIndex(int(name))
        elif name.startswith("GPU-"):
            yield nvml.nvmlDeviceGetHandleByUUID(name)
        else:
            return                                       # CUDA too stops at the first that it does not know


def _read(nvml: Any, index: int, handle: Any) -> GPU:
    def ask(function: str) -> Any:
        try:
            return getattr(nvml, function)(handle)
        except nvml.NVMLError:                           # not every GPU tells everything
            return None

    utilisation, memory, energy = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetTotalEnergyConsumption")
    name = ask("nvmlDeviceGetName") or ""
    return GPU(
        index, name.decode("utf-8", "replace") if isinstance(name, bytes) else name,
        utilisation.gpu / 100 if utilisation is not None else None,
        memory.used if memory is not None else None,
        memory.total if memory is not None else None,
        energy / 1e3 if energy is not None else None,
    )
