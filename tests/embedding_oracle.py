"""Embeddings of a GGUF file through llama-cpp-python's own class, in one native batch with llama.cpp's own pooling: how else they could be computed.

In a process of its own, since that class takes llama.cpp's log away from everybody else.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

MEAN, CLS, LAST = 1, 2, 3

_PROGRAM = """
import json, sys
from llama_cpp import Llama
path, pooling, exact, texts = json.load(sys.stdin)
kind = {"type_k": 0, "type_v": 0, "flash_attn": False} if exact else {"flash_attn": True}
llama = Llama(path, embedding=True, n_ctx=2048, n_batch=2048, n_ubatch=2048, n_threads=2, pooling_type=pooling, verbose=False, **kind)
print(json.dumps([llama.embed([text], normalize=True, truncate=False)[0] for text in texts]))
"""


def oracle(path: Path, pooling: int, texts: list[str], *, exact: bool = False) -> list[np.ndarray]:
    """float32 (n_embd,) of length 1, text by text. exact: keys and values in float32."""
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM], input=json.dumps([str(path), pooling, exact, texts]), capture_output=True, text=True, check=False, timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return [np.array(vector, np.float32) for vector in json.loads(ran.stdout)]
