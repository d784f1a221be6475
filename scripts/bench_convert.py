"""Time and peak memory of converting a checkpoint to Q4_K_M: edgeinfer against llama.cpp's two programs.

    python scripts/bench_convert.py CHECKPOINT --llama-cpp SRC/llama.cpp --llama-python VENV/bin/python [--rounds 5]
    python scripts/bench_convert.py CHECKPOINT --billion   # edgeinfer alone on a random checkpoint of about 1.1 billion parameters

SRC/llama.cpp is a source tree with build/bin/llama-quantize; VENV is an environment with what its convert_hf_to_gguf.py needs (torch, transformers).
Each round runs both ways in alternating order, each as processes of their own; the table shows medians. Peak memory is the largest resident size that
the system reports for a process (of two programs run one after the other, the larger).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BILLION = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
    "num_attention_heads": 32, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "hidden_act": "silu",
    "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


@dataclass(frozen=True)
class Run:
    """One measured command line, or several in a row."""

    seconds: float
    peak_bytes: int


def measure(*commands: list[str]) -> Run:
    """Run the commands one after the other. Raises SystemExit with a command's output when it fails."""
    start, peak = time.monotonic(), 0
    for command in commands:
        with tempfile.TemporaryFile() as output:
            process = os.posix_spawn(
                command[0], command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, output.fileno(), 1), (os.POSIX_SPAWN_DUP2, output.fileno(), 2)]
            )
            _, status, usage = os.wait4(process, 0)
            if status:
                output.seek(0)
                raise SystemExit(f"{' '.join(command)} failed:\n{output.read().decode(errors='replace')[-3000:]}")
        peak = max(peak, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))
    return Run(time.monotonic() - start, peak)


def edgeinfer(checkpoint: Path, out: Path, target: str) -> list[str]:
    return [sys.executable, "-m", "edgeinfer", "convert", str(checkpoint), "--to", target, "--out", str(out)]


def compare(checkpoint: Path, llama_cpp: Path, python: str, rounds: int, folder: Path) -> None:
    """Print the table of medians and the ratios."""
    theirs = [
        [python, str(llama_cpp / "convert_hf_to_gguf.py"), str(checkpoint), "--outtype", "f16", "--outfile", str(folder / "f16.gguf")],
        [str(llama_cpp / "build" / "bin" / "llama-quantize"), str(folder / "f16.gguf"), str(folder / "theirs.gguf"), "Q4_K_M"],
    ]
    ours = [edgeinfer(checkpoint, folder / "ours.gguf", "gguf-q4")]
    ways = {"convert_hf_to_gguf.py + llama-quantize": theirs, "edgeinfer convert --to gguf-q4": ours}
    for commands in ways.values():                       # once unmeasured: files and libraries come from memory in every round
        measure(*commands)
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
            runs[name].append(measure(*ways[name]))
    print(f"| {checkpoint.name} to Q4_K_M, median of {rounds} | wall time | peak memory | file |")
    print("|---|---|---|---|")
    medians = {name: (statistics.median(r.seconds for r in found), statistics.median(r.peak_bytes for r in found)) for name, found in runs.items()}
    for (name, (seconds, peak)), file in zip(medians.items(), ("theirs.gguf", "ours.gguf"), strict=True):
        print(f"| {name} | {seconds:.2f} s | {peak / 1e6:.0f} MB | {(folder / file).stat().st_size / 1e6:.1f} MB |")
    (base_s, base_b), (our_s, our_b) = medians.values()
    print(f"| ratio | {our_s / base_s:.2f} | {our_b / base_b:.2f} | |")


def make_billion(folder: Path, tokenizer: Path) -> int:
    """Write a random BF16 checkpoint with the tokenizer files of another; returns its parameters. Tensors are cut from one block of noise."""
    folder.mkdir()
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, folder / name)
    rows = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    config = BILLION | {"vocab_size": rows}
    (folder / "config.json").write_text(json.dumps(config))
    hidden, inner, kv = config["hidden_size"], config["intermediate_size"], config["hidden_size"] // 8
    shapes = {"model.embed_tokens.weight": (rows, hidden), "model.norm.weight": (hidden,), "lm_head.weight": (rows, hidden)}
    for layer in range(config["num_hidden_layers"]):
        parts = {
            "self_attn.q_proj": (hidden, hidden), "self_attn.o_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    block = (np.random.default_rng(0).standard_normal(1 << 22, np.float32) * 0.02).view(np.uint32)
    noise = memoryview((block >> 16).astype(np.uint16)).cast("B")
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in header.values():
            left = entry["data_offsets"][1] - entry["data_offsets"][0]
            while left:
                left -= file.write(noise[: min(left, len(noise))])
    return at // 2


def billion(tokenizer: Path, targets: list[str], folder: Path) -> None:
    """Print time and peak memory for a model much larger than any buffer."""
    parameters = make_billion(folder / "billion", tokenizer)
    size = (folder / "billion" / "model.safetensors").stat().st_size
    print(f"| random checkpoint, {parameters / 1e9:.2f} billion parameters, {size / 1e6:,.0f} MB | wall time | peak memory | file |")
    print("|---|---|---|---|")
    for target in targets:
        run, out = measure(edgeinfer(folder / "billion", folder / "out.gguf", target)), folder / "out.gguf"
        print(f"| edgeinfer convert --to {target} | {run.seconds:.1f} s | {run.peak_bytes / 1e6:.0f} MB | {out.stat().st_size / 1e6:,.0f} MB |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint folder (scripts/make_demo_checkpoint.py makes one); --billion takes its tokens")
    parser.add_argument("--llama-cpp", type=Path, help="llama.cpp source tree with build/bin")
    parser.add_argument("--llama-python", default=sys.executable, help="Python that can run convert_hf_to_gguf.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--billion", action="store_true", help="convert a random checkpoint of about 1.1 billion parameters (needs 5 GB of disk)")
    parser.add_argument("--targets", nargs="+", default=["gguf-q4", "gguf-f16"], help="of --billion")
    parser.add_argument("--work", type=Path, help="folder for temporary files (default: the system's)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        if options.llama_cpp:
            compare(options.checkpoint, options.llama_cpp, options.llama_python, options.rounds, Path(folder))
        if options.billion:
            billion(options.checkpoint, options.targets, Path(folder))
    if not options.llama_cpp and not options.billion:
        parser.error("give --llama-cpp, --billion or both")


if __name__ == "__main__":
    main()
