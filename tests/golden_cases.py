"""The checkpoints that have golden logits, how their tokens are drawn, and how a golden is stored and compared.

Shared by scripts/make_goldens.py, which needs torch and transformers, and by the tests, which need neither.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "goldens"
COLUMNS = 64                                             # vocabulary columns kept per position


@dataclass(frozen=True)
class Case:
    """One golden: the arguments of `tiny`, the number of tokens to run and the context to run them in."""

    family: str
    switches: dict[str, Any] = field(default_factory=dict)
    tokens: int = 96
    n_ctx: int = 256
    tolerance: float = 1e-4                              # of the logits' spread (their standard deviation)


# llama.cpp looks GELU up in a float16 table, so Gemma's logits part from exact ones by up to 2e-3; the other families' by less than 1e-5.
_GELU = 3e-3
_PHI4 = {"partial_rotary": 0.75, "kv_heads": 1, "tokenizer": "gpt-2", "head": "tied", "rope": "longrope"}
# longrope: transformers chooses long factors by the sequence's length, llama.cpp by the context's size; both change above 256 (see tiny._rope).
_LONG = {"tokens": 272, "n_ctx": 512}

CASES: dict[str, Case] = {
    "llama": Case("llama"),
    "llama-tied-576": Case("llama", {"hidden": 576, "heads": 9, "kv_heads": 3, "head_dim": 64, "intermediate": 320, "head": "tied"}, tokens=64),
    "llama-tied": Case("llama", {"head": "tied"}),
    "llama-wide-heads": Case("llama", {"head_dim": 32}),
    "llama-llama3": Case("llama", {"rope": "llama3"}),
    "llama-linear": Case("llama", {"rope": "linear"}),
    "llama-yarn": Case("llama", {"rope": "yarn"}),
    "llama-yarn-attention-factor": Case("llama", {"rope": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.25}}),
    # Betas other than 32 and 1, which llama.cpp's own yarn rule has no key for.
    "llama-yarn-betas": Case("llama", {"rope": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.25, "beta_fast": 1.5, "beta_slow": 0.1}}),
    "mistral": Case("mistral"),
    "qwen2": Case("qwen2"),
    "qwen2-yarn": Case("qwen2", {"rope": "yarn", "head": "untied"}),
    "qwen3": Case("qwen3"),
    "gemma3": Case("gemma3", tolerance=_GELU),
    "gemma3-linear": Case(
        "gemma3", {"rope": "linear", "rope_keys": "rope_parameters", "layers": 4, "window_pattern": 3, "head_dim": 16}, tolerance=_GELU),
    "phi3": Case("phi3"),
    "phi3-longrope-short": Case("phi3", {"rope": "longrope", "rope_keys": "type"}),
    "phi3-longrope-long": Case("phi3", {"rope": "longrope", "rope_keys": "type"}, **_LONG),
    "phi4-mini-short": Case("phi3", _PHI4),
    "phi4-mini-long": Case("phi3", _PHI4, **_LONG),
}


def draw_tokens(count: int, rows: int) -> list[int]:
    """``count`` token ids below ``rows``, the same for every case with as many rows."""
    return (np.random.PCG64(rows).random_raw(count) % np.uint64(rows)).astype(int).tolist()


@dataclass(frozen=True)
class Golden:
    """Logits that transformers gave in float32 for a few positions P and columns C, and each whole row's argmax and logsumexp."""

    tokens: list[int]
    positions: list[int]
    columns: list[int]
    logits_PC: np.ndarray
    argmax_P: list[int]
    logsumexp_P: np.ndarray
    spread: float                                        # standard deviation over all rows and columns
    weights_sha256: str
    made_with: dict[str, str]

    @classmethod
    def from_logits(cls, tokens: list[int], logits_TV: np.ndarray, weights_sha256: str, made_with: dict[str, str]) -> Golden:
        """Keep eight positions from the first to the last, and COLUMNS columns that include the first and the last."""
        positions = sorted({round(share * (len(tokens) - 1) / 7) for share in range(8)})
        columns = sorted({round(share * (logits_TV.shape[1] - 1) / (COLUMNS - 1)) for share in range(COLUMNS)})
        rows_PV = logits_TV[positions].astype(np.float64)
        top_P = rows_PV.max(axis=1)
        return cls(
            tokens, positions, columns, logits_TV[np.ix_(positions, columns)].astype(np.float32), rows_PV.argmax(axis=1).tolist(),
            top_P + np.log(np.exp(rows_PV - top_P[:, None]).sum(axis=1)), float(logits_TV.std(dtype=np.float64)), weights_sha256, made_with,
        )

    def write(self, path: Path) -> None:
        content = {
            "made_with": self.made_with, "weights_sha256": self.weights_sha256, "spread": round(self.spread, 6), "tokens": self.tokens,
            "positions": self.positions, "columns": self.columns, "argmax": self.argmax_P,
            "logsumexp": [round(float(v), 6) for v in self.logsumexp_P],
            "logits_float32_base64": base64.b64encode(self.logits_PC.astype("<f4").tobytes()).decode(),
        }
        path.write_text("{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()) + "\n}\n")

    @classmethod
    def read(cls, path: Path) -> Golden:
        said = json.loads(path.read_text())
        logits = np.frombuffer(base64.b64decode(said["logits_float32_base64"]), "<f4").reshape(len(said["positions"]), len(said["columns"]))
        return cls(
            said["tokens"], said["positions"], said["columns"], logits, said["argmax"], np.array(said["logsumexp"]), said["spread"],
            said["weights_sha256"], said["made_with"],
        )

    def distance(self, logits_TV: np.ndarray) -> float:
        """Largest difference of a kept logit or of a row's logsumexp, as a share of the golden logits' standard deviation."""
        rows_PV = logits_TV[self.positions].astype(np.float64)
        top_P = rows_PV.max(axis=1)
        logsumexp_P = top_P + np.log(np.exp(rows_PV - top_P[:, None]).sum(axis=1))
        worst = max(np.abs(rows_PV[:, self.columns] - self.logits_PC).max(), np.abs(logsumexp_P - self.logsumexp_P).max())
        return float(worst / self.spread)
