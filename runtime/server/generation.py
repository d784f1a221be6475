"""What the endpoints that run a model share: the model held, the streams opened and, whatever happens, ended and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from edgeinfer.runtime.server.choices import Choices
from edgeinfer.runtime.server.records import Record
from edgeinfer.runtime.stream import Stream

if TYPE_CHECKING:
    from edgeinfer.runtime.server.pool import Served


async def use_model(request: Request, name: str | None, *, prompt: Any = None) -> Served:
    """The model a request names (none: the only or first one), held until the reply has been sent."""
    record: Record = request.state.record
    if request.app.state.options.log_prompts:
        record.prompt = prompt
    served = await request.state.hold.enter_async_context(request.app.state.pool.use(name or None))
    record.model = served.name
    return served


async def open_choices(request: Request, submit: Callable[[], Iterator[Stream]], n: int) -> Choices:
    """The streams that ``submit`` makes, in a thread. They end with the reply at the latest, and are then counted as requests for ``n`` answers."""
    record: Record = request.state.record
    choices = Choices(partial(request.app.state.metrics.ended, record.model, n=n))
    request.state.hold.push_async_callback(choices.close)
    record.streams = choices.streams
    await choices.submit(submit)
    return choices
