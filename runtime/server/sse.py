"""Server-sent events: JSON chunks, comments while there is nothing to say, and an error where something breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from starlette.types import Message, Receive, Scope, Send

from edgeinfer.runtime.server.error_replies import refusal_of
from edgeinfer.runtime.server.json_out import event, json_text

DONE = b"data: [DONE]\n\n"
_PING = b": ping\n\n"


class EventStream:
    """Sends chunks (whole ``data:`` lines) as they come; a response in the sense of ASGI.

    The reply begins with the first chunk or the first ping, so that what fails before is an ordinary error with its status. What fails later is one
    ``data: {"error": ...}``, and no ``[DONE]`` follows.
    """

    def __init__(self, chunks: AsyncIterator[bytes], *, ping_seconds: float):
        self._chunks = chunks
        self._ping_seconds = ping_seconds
        self._started = False
        self._sent = 0
        self._quiet = True                               # nothing was sent since the last ping was due

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pinging = asyncio.create_task(self._ping(send))
        try:
            async with aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    await self._send(send, chunk)
            last = DONE
        except Exception as error:
            if not self._started:
                raise
            last = event(json_text(refusal_of(error).as_dict()))
        finally:
            pinging.cancel()
        await self._send(send, last, more=False)

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        self._quiet = False
        if not self._started:
            self._started = True
            await send(_START)
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._sent += 1
        if self._sent % 4 == 0:
            # Chunks that are all there at once would keep the event loop from everybody else, and from learning that the client has left.
            await asyncio.sleep(0)

    async def _ping(self, send: Send) -> None:
        while True:
            self._quiet = True
            await asyncio.sleep(self._ping_seconds)
            if self._quiet:
                await self._send(send, _PING)


_START: Message = {
    "type": "http.response.start", "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")],
}
