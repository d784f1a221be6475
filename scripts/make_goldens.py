"""Make the golden logits in tests/goldens/ with transformers (float32, eager attention) from the checkpoints of tests/tiny.py.

    pip install torch==2.13.0 transformers==5.24.0 && python scripts/make_goldens.py [NAME...]

Only this script needs torch and transformers. Run it when tests/golden_cases.py or tests/tiny.py change what a checkpoint holds.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import golden_cases  # noqa: E402  (tests/ is no package: the path above makes it importable)
import tiny  # noqa: E402


def reference_logits(folder: Path, tokens: list[int]) -> np.ndarray:
    """float32 (n_tokens, n_vocab). Refuses a checkpoint that transformers does not read whole."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, local_files_only=True)
    wrong = {kind: found for kind, found in report.items() if found}
    if wrong:
        raise SystemExit(f"transformers did not read {folder.name} whole: {wrong}")
    with torch.inference_mode():
        return model.eval()(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    golden_cases.FOLDER.mkdir(exist_ok=True)
    made_with = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__, "numpy": np.__version__}
    for name in names or golden_cases.CASES:
        case = golden_cases.CASES[name]
        with tempfile.TemporaryDirectory() as scratch:
            folder = tiny.tiny(Path(scratch) / name, case.family, **case.switches)
            rows = len(tiny.read_weights(folder)["model.embed_tokens.weight"])
            tokens = golden_cases.draw_tokens(case.tokens, rows)
            golden = golden_cases.Golden.from_logits(tokens, reference_logits(folder, tokens), tiny.weights_sha256(folder), made_with)
        path = golden_cases.FOLDER / f"{name}.json"
        golden.write(path)
        low, high = golden.logits_PC.min(), golden.logits_PC.max()
        print(f"{name}: spread {golden.spread:.3f}, logits {low:.2f} to {high:.2f}, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
