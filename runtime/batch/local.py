"""The server's application over a model that is loaded here: a batch is answered by the very code that answers clients."""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from edgeinfer.runtime.batch.senders import InProcess
from edgeinfer.runtime.load import load
from edgeinfer.runtime.server.app import create_app
from edgeinfer.runtime.server.metrics import Metrics
from edgeinfer.runtime.server.options import ServerOptions
from edgeinfer.runtime.server.pool import ModelPool, ModelSource
from edgeinfer.runtime.service import Engine

MAX_BODY = 256 * 1024 * 1024             # the file is the user's own, and is read line by line anyway
MAX_WAITING = 1 << 16                    # the batch itself limits how many are under way


@asynccontextmanager
async def local_sender(name: str, path: Path, options: dict[str, Any], progress: Callable[[str, int, int], None]) -> AsyncIterator[InProcess]:
    """Load the model and answer with it, whatever model the lines name. An interrupt stops loading, too."""
    leaving = threading.Event()

    def make(source: ModelSource) -> Engine:
        def loaded(part: float) -> bool:
            progress("loading", round(100 * part), 100)
            return not leaving.is_set()

        return load(source.path, progress=loaded, max_waiting=MAX_WAITING, **options)

    async with application(name, path, make, leaving.set) as app:
        yield InProcess(app, changes={"model": name})


@asynccontextmanager
async def application(name: str, path: Path, make: Callable[[ModelSource], Engine], leave: Callable[[], None] = lambda: None) -> AsyncIterator[Any]:
    """The application over the one engine that ``make`` gives, in use until the block is left; ``leave`` is called before it is closed."""
    pool = ModelPool([ModelSource(name, path, pinned=True)], load=make)
    try:
        await pool.start()
        for served in pool.loaded():
            for notice in served.engine.notices:
                print(f"edgeinfer: {notice}", file=sys.stderr)
        yield create_app(pool, Metrics(pool), ServerOptions(max_body_bytes=MAX_BODY))
    finally:
        leave()
        await pool.close()
