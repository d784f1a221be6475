"""The door to llama.cpp loads the low-level module alone, and leaves the package to whoever wants it."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(code: str) -> list[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout.split()


def test_the_high_level_package_is_not_loaded() -> None:
    code = "from edgeinfer.models.native import ggml, llama; llama(); ggml(); import sys; print('llama_cpp.llama' in sys.modules, 'llama_cpp' in sys.modules)"
    assert run(code) == ["False", "False"]


@pytest.mark.parametrize("first", ["import llama_cpp", "pass"])
def test_the_package_can_be_imported_before_and_after(first: str) -> None:
    code = f"""
from edgeinfer.models.native import ggml, llama
{first}
low, shared = llama(), ggml()
import llama_cpp
import llama_cpp.llama_cpp as again
from llama_cpp._ggml import libggml
print(again is low, llama_cpp.llama_decode is low.llama_decode, libggml is shared, llama_cpp.Llama.__name__)
"""
    assert run(code) == ["True", "True", "True", "Llama"]
