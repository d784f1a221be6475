"""One event loop for all clients of a measurement."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, where a kill that a program turned into ``KeyboardInterrupt`` ends ``work`` as Ctrl-C does.

    asyncio cancels the work at Ctrl-C and raises afterwards. An exception that a signal raises in the middle of some task would leave the others
    half done instead, and asyncio complaining about them.
    """
    async def main() -> T:
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
            return await work
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
        try:
            return await work
        finally:
            signal.signal(signal.SIGTERM, handler)

    return asyncio.run(main())
