"""`edgeinfer run` beside llama.cpp's own programs: decode rate against llama-bench, time to the first token against llama-cli.

    python scripts/bench_run.py MODEL.gguf --llama-bin llama.cpp/build/bin [--rounds 5] [--threads 2]

Each round runs every program once, as a process of its own, in turning order; printed are medians and ratios. Machines drift by a third within minutes, so
only figures of one run may be compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PROMPT = "What is the capital of Japan?"


def llama_bench(binary: Path, model: Path, threads: int, depth: int = 0) -> float:
    """tg128 in tokens a second, from an empty cache or after ``depth`` tokens."""
    command = [str(binary / "llama-bench"), "-m", str(model), "-p", "0", "-n", "128", "-d", str(depth), "-t", str(threads), "-r", "1", "-o", "json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)[0]["avg_ts"]


def edgeinfer_run(model: Path, threads: int, *sampling: str) -> dict[str, dict[str, float]]:
    """What `edgeinfer run --json` reports of 128 tokens."""
    command = [sys.executable, "-m", "edgeinfer", "run", str(model), PROMPT, "--json", "-n", "128", "--ignore-eos", "-t", str(threads), *sampling]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def edgeinfer_decode(model: Path, threads: int, *sampling: str) -> float:
    """Tokens a second, without the prompt."""
    return edgeinfer_run(model, threads, *sampling)["timings"]["predicted_per_second"]


def first_output(command: list[str], after: str = "") -> float:
    """Seconds from process start to the first visible character, after ``after`` when that is given."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    seen = b""
    while True:
        piece = process.stdout.read1(4096)
        if not piece:
            raise RuntimeError(f"{command[0]} printed no answer:\n{seen.decode('utf-8', 'replace')}")
        seen += piece
        if seen.partition(after.encode())[2].strip() if after else seen.strip():
            break
    elapsed = time.perf_counter() - start
    process.stdout.read()
    process.wait()
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-bin", type=Path, required=True, help="folder with llama-bench and llama-cli of the same llama.cpp")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    cli = [str(args.llama_bin / "llama-cli"), "-m", str(args.model), "-p", PROMPT, "-n", "16", "-t", str(args.threads), "-st", "--simple-io", "--temp", "0"]
    run = [sys.executable, "-m", "edgeinfer", "run", str(args.model), PROMPT, "-n", "16", "-t", str(args.threads), "--temp", "0"]
    depth = int(edgeinfer_run(args.model, args.threads)["usage"]["prompt_tokens"])
    programs: dict[str, Callable[[], float]] = {
        "llama-bench tg128, tok/s": lambda: llama_bench(args.llama_bin, args.model, args.threads),
        f"the same after {depth} tokens": lambda: llama_bench(args.llama_bin, args.model, args.threads, depth),
        "edgeinfer greedy, tok/s": lambda: edgeinfer_decode(args.model, args.threads, "--temp", "0"),
        "edgeinfer sampling, tok/s": lambda: edgeinfer_decode(args.model, args.threads),
        "llama-cli first token, s": lambda: first_output(cli, after=f"> {PROMPT}"),
        "edgeinfer run first token, s": lambda: first_output(run),
    }
    measured: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(args.rounds):
        names = list(programs) if turn % 2 == 0 else list(reversed(programs))
        for name in names:
            measured[name].append(programs[name]())
    median = {name: statistics.median(values) for name, values in measured.items()}
    for name, values in measured.items():
        print(f"{name:<30} {median[name]:8.2f}   ({', '.join(f'{value:.2f}' for value in values)})")
    bench, deep, greedy, sampling, cli_first, run_first = median.values()
    print(f"decode: greedy {greedy / bench:.3f}, sampling {sampling / bench:.3f} of llama-bench, and {greedy / deep:.3f}, {sampling / deep:.3f} after as long a prompt")
    print(f"first token: {run_first / cli_first:.2f} times llama-cli's")


if __name__ == "__main__":
    main()
