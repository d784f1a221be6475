"""What every endpoint with a body has in common: the body is read within bounds, and a client that leaves ends the work at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from edgeinfer.runtime.server.body_reader import read_body
from edgeinfer.runtime.server.error_replies import Refusal, refusal_of, reply_to
from edgeinfer.runtime.server.records import Record

Function = Callable[[Request], Awaitable[ASGIApp]]


class Endpoint:
    """``async def function(request) -> response`` as an ASGI application.

    The function finds in ``request.state``: ``body`` (bytes), ``record``, and ``hold``, an `AsyncExitStack` that is closed when the reply has been
    sent or the client has left. Leaving cancels the function, or the sending of its reply, wherever it is; what it holds is then released.
    """

    def __init__(self, function: Function, *, generates: bool = False):
        self._function = function
        self._generates = generates                      # refusals are counted: they are requests that a model should have served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        record: Record = request.state.record
        try:
            request.state.body = await read_body(scope, receive, request.app.state.options.max_body_bytes)
        except ClientDisconnect:
            return
        except Refusal as refusal:
            await self._refuse(request, refusal, receive, send)
            return
        work = asyncio.create_task(self._work(request, receive, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if record.complete:                          # "disconnected" also follows the last byte
                await asyncio.wait((work,))
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait((work,))
        if not work.cancelled():
            work.result()

    async def _work(self, request: Request, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as hold:
            request.state.hold = hold
            try:
                response = await self._function(request)
                await response(request.scope, receive, send)
            except Exception as error:
                if request.state.record.status:
                    raise
                await self._refuse(request, error, receive, send)

    async def _refuse(self, request: Request, error: Exception, receive: Receive, send: Send) -> None:
        refusal = refusal_of(error)
        record: Record = request.state.record
        if self._generates and not record.streams:
            request.app.state.metrics.refused(record.model, refusal.code or "error")
        await reply_to(refusal)(request.scope, receive, send)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
