"""Memory of this process: what it took at most, and giving back what it no longer needs."""

from __future__ import annotations

import ctypes
import sys


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def give_back_freed() -> None:
    """Return freed memory to the system now. glibc keeps it for later: some 20 MB after reading a vocabulary. Other C libraries do not."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
