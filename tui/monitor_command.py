"""``edgeinfer monitor``: the dashboard, or one look in plain text."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import asdict
from functools import partial

from edgeinfer.runtime.http_client import Address, HttpClient
from edgeinfer.runtime.readings import ServerReadings, read_server
from edgeinfer.runtime.server.scrape import scrape
from edgeinfer.tui.monitor_text import server_rows


def run_monitor(url: str, *, api_key: str | None = None, interval: float = 1.0) -> int:
    """Take over the terminal until the reader quits. A server that is not there yet is waited for."""
    from edgeinfer.tui.monitor import MonitorApp

    async def watch() -> int:
        async with HttpClient(address, api_key=api_key) as client:
            app = MonitorApp(partial(scrape, client), url=address.url, interval=interval)
            await app.run_async()
            return app.return_code or 0

    address = Address.of(url)
    return asyncio.run(watch())


def print_once(url: str, *, api_key: str | None = None, interval: float = 1.0, as_json: bool = False) -> None:
    """Two looks, ``interval`` seconds apart: rates between them, latencies since the server started. Raises what `scrape` raises."""

    async def look() -> ServerReadings:
        async with HttpClient(Address.of(url), api_key=api_key) as client:
            before = await scrape(client)
            await asyncio.sleep(interval)
            return read_server(await scrape(client), before)

    readings = asyncio.run(look())
    if as_json:
        print(json.dumps(asdict(readings), ensure_ascii=False, indent=2))
        return
    blocks = server_rows(readings, max(60, shutil.get_terminal_size((100, 24)).columns))
    print("\n\n".join("\n".join(text.rstrip() for _, text in rows) for rows in blocks))
