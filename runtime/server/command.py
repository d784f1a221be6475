"""``edgeinfer serve``: the options, the socket, the models, and how it all ends."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from edgeinfer.errors import BadRequest, EdgeInferError
from edgeinfer.runtime.server.app import create_app
from edgeinfer.runtime.server.options import ServerOptions
from edgeinfer.runtime.server.pool import ModelPool


class DrainingServer(uvicorn.Server):
    """uvicorn's server, told to stop by SIGINT or SIGTERM: running requests get ``drain_seconds``, then their engines are closed, which ends them with
    an error they can read. A second signal stops waiting."""

    def __init__(self, config: uvicorn.Config, pool: ModelPool, drain_seconds: float):
        super().__init__(config)
        self._pool = pool
        self._drain_seconds = drain_seconds

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn raises the signal again when it has stopped, which would make a clean end an interrupt.
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self._told_to_stop)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _told_to_stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(self._close_late())
        try:
            await super().shutdown(sockets)
        finally:
            closing.cancel()

    async def _close_late(self) -> None:
        await asyncio.sleep(self._drain_seconds)
        await self._pool.close()
