"""Make docs/chat.svg: a picture of the chat, taken from a real session with a real model.

    python scripts/screenshot_chat.py MODEL.gguf [-o docs/chat.svg] [--ask QUESTION ...] [--theme edgeinfer-light]

The session runs without a terminal; its answers are greedy, so the text is the same each time, while the figures are those of this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path

from edgeinfer.runtime.load import load
from edgeinfer.runtime.values import SamplingParams
from edgeinfer.tui.app import ChatApp
from edgeinfer.tui.readings import Phase
from edgeinfer.tui.widgets.prompt import PromptEditor

QUESTIONS = ("What is the capital of Japan?", "Write a Python function that reverses a string.")


async def take(model: str, output: Path, questions: list[str], theme: str | None, columns: int, rows: int) -> None:
    """Ask the questions one after the other and save the last screen."""
    app = ChatApp(lambda: load(model, ctx_size=2048), params=SamplingParams(temperature=0, max_tokens=220), theme=theme)
    app.title = "edgeinfer chat"
    async with app.run_test(size=(columns, rows)) as pilot:

        async def idle() -> None:
            while app.phase is not Phase.IDLE:
                await asyncio.sleep(0.05)
            await pilot.pause()

        await idle()
        for question in questions:
            app.query_one(PromptEditor).text = question
            await pilot.press("enter")
            await idle()
        picture = app.export_screenshot(title=f"edgeinfer chat {Path(model).name}")
        # Whoever looks at the picture should not fetch fonts from somewhere: the viewer's own monospace one does.
        output.write_text(re.sub(r"@font-face\s*\{.*?\}", "", picture, flags=re.DOTALL), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent.parent / "docs" / "chat.svg")
    parser.add_argument("--ask", nargs="+", default=list(QUESTIONS))
    parser.add_argument("--theme")
    parser.add_argument("--size", nargs=2, type=int, default=(92, 24), metavar=("COLUMNS", "ROWS"))
    args = parser.parse_args()
    asyncio.run(take(args.model, args.output, args.ask, args.theme, *args.size))
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
