"""The terminal application. This package is the only one that imports textual."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgeinfer.runtime.values import SamplingParams


def run_chat(
    loader: Callable[[], Any],
    *,
    title: str = "",
    params: SamplingParams | None = None,
    system_prompt: str | None = None,
    context_policy: str = "error",
    theme: str | None = None,
) -> int:
    """Open the chat on the terminal and return its exit status.

    ``loader`` loads and returns the engine; it runs in a thread while the screen is already up, and the engine is closed when the chat ends.
    ``title`` names the model until it is loaded. When loading fails, the chat ends and the error's sentence goes to standard error.
    """
    from edgeinfer.tui.app import ChatApp

    app = ChatApp(loader, title=title, params=params, system_prompt=system_prompt, context_policy=context_policy, theme=theme)
    try:
        app.run()
    finally:
        app.close_engine()
    if app.load_error is not None:
        print(f"edgeinfer: {app.load_error}", file=sys.stderr)
        return app.load_error.exit_status
    return app.return_code or 0
