"""Compiling other people's schemas and grammars is tried in a process of its own first.

There are sources for which a compiler takes for ever, all memory, or more stack than a thread has, and that would take the engine with it. A process
can be stopped. It has a smaller stack than any thread that compiles afterwards, so what it survives is safe here.
"""

from __future__ import annotations

import json
import subprocess
import sys

TIMEOUT_S = 5.0
_STACK = 1 << 20                         # bytes; the threads of CPython have at least twice as much on all systems that we know
_MAIN = f"""
import json, sys, threading

def run():
    for index, source in enumerate(json.loads(sys.stdin.buffer.read())):
        print(json.dumps([index, None]), flush=True)
        problem = check(source)
        if problem:
            print(json.dumps([index, problem]), flush=True)
            return
    print("null", flush=True)

threading.stack_size({_STACK})
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


def first_failure(check: str, sources: list[str], timeout_s: float = TIMEOUT_S) -> tuple[int, str] | None:
    """Index and message of the first of ``sources`` that does not compile in time; None where all do.

    check: Python source that defines ``check(source)``, which returns what is wrong with it, "" where nothing is.
    """
    if not sources:
        return None
    if not sys.executable or getattr(sys, "frozen", False):
        return 0, "it must be tried in a process of its own, and this program cannot start one"
    try:
        done = subprocess.run([sys.executable, "-c", check + _MAIN], input=json.dumps(sources).encode(), capture_output=True, timeout=timeout_s)
        said, problem = done.stdout, "it is too deep or too large to compile"
    except subprocess.TimeoutExpired as error:
        said, problem = error.stdout or b"", f"it takes more than {timeout_s:g} s to compile"
    lines = said.decode().splitlines()
    if not lines:
        return 0, problem
    last = json.loads(lines[-1])
    return None if last is None else (last[0], last[1] or problem)
