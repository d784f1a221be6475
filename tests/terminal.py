"""A program in a real terminal: tmux runs it, tests press its keys and read its screen."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PATIENCE = 120.0    # seconds until a wait gives up; only a hang is that slow


class Terminal:
    """One program in a tmux window of its own server. Use it as a context manager: leaving ends the program.

        with Terminal([sys.executable, "-m", "edgeinfer", "chat", path]) as terminal:
            terminal.wait_for("ready")
            terminal.type("hello")
            terminal.press("Enter")
    """

    def __init__(self, command: Sequence[str], *, columns: int = 80, rows: int = 24, env: Mapping[str, str] | None = None, cwd: Path | None = None):
        self._directory = tempfile.TemporaryDirectory(prefix="terminal-")
        self._socket = str(Path(self._directory.name) / "tmux")
        self._status = Path(self._directory.name) / "status"
        # The shell stays after the program, so that the last screen and the exit status can be read.
        script = f"{shlex.join(command)}; echo $? > {shlex.quote(str(self._status))}; sleep 1000"
        settings = [word for name, value in (env or {}).items() for word in ("-e", f"{name}={value}")]
        self._tmux(
            "-f", "/dev/null", "new-session", "-d", "-x", str(columns), "-y", str(rows), *settings, *(["-c", str(cwd)] if cwd else []), "sh", "-c", script,
            ";", "set-option", "-g", "escape-time", "0",
        )

    @staticmethod
    def missing() -> str | None:
        """Why no terminal can be had here, or None."""
        return None if shutil.which("tmux") else "tmux is not installed"

    def _tmux(self, *arguments: str, input: str | None = None) -> str:
        command = ["tmux", "-u", "-S", self._socket, *arguments]
        environment = {**os.environ, "TERM": "xterm-256color"}
        environment.pop("TMUX", None)
        return subprocess.run(command, input=input, capture_output=True, text=True, check=True, env=environment, timeout=PATIENCE).stdout

    def press(self, *keys: str) -> None:
        """Press keys by tmux's names: ``Enter``, ``Escape``, ``C-j``, ``M-Enter``, ``Up``, ``PPage``."""
        self._tmux("send-keys", *keys)

    def type(self, text: str) -> None:
        """Type printable characters."""
        self._tmux("send-keys", "-l", "--", text)

    def paste(self, text: str) -> None:
        """Paste as a terminal does it: bracketed when the program asked for that, line ends as CR."""
        self._tmux("load-buffer", "-b", "draft", "-", input=text)
        self._tmux("paste-buffer", "-p", "-d", "-b", "draft")

    def resize(self, columns: int, rows: int) -> None:
        """Change the window's size."""
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    def screen(self) -> str:
        """What is visible now, one line a row, trailing spaces removed."""
        return self._tmux("capture-pane", "-p")

    def wait_until(self, condition: Callable[[str], bool], what: str) -> str:
        """The first screen for which ``condition`` holds; `AssertionError` with the last screen when it never does."""
        limit = time.monotonic() + PATIENCE
        while not condition(screen := self.screen()):
            if time.monotonic() > limit:
                raise AssertionError(f"never saw {what}; the screen was:\n{screen}")
            time.sleep(0.05)
        return screen

    def wait_for(self, text: str) -> str:
        """The first screen that shows ``text``."""
        return self.wait_until(lambda screen: text in screen, repr(text))

    def wait_gone(self, text: str) -> str:
        """The first screen that does not show ``text``."""
        return self.wait_until(lambda screen: text not in screen, f"a screen without {text!r}")

    def wait_exit(self) -> int:
        """The program's exit status, once it has ended."""
        limit = time.monotonic() + PATIENCE
        while not self._status.exists() or not self._status.read_text().strip():
            if time.monotonic() > limit:
                raise AssertionError(f"the program did not end; the screen was:\n{self.screen()}")
            time.sleep(0.05)
        return int(self._status.read_text())

    def close(self) -> None:
        """End the program and its terminal."""
        subprocess.run(["tmux", "-S", self._socket, "kill-server"], capture_output=True, timeout=PATIENCE)
        self._directory.cleanup()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
