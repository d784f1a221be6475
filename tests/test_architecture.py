"""The dependency rule, the doors of the heavy packages, and that the front door stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("edgeinfer", "models", "convert", "runtime", "tui")

# May import: who is left of the arrow. edgeinfer/cli.py is the one place where everything meets, inside its commands.
ALLOWED = {
    "models": {"models"},
    "convert": {"convert", "models"},
    "runtime": {"runtime", "models"},
    "tui": {"tui", "runtime", "models"},
}

# Each heavy package has one door (a module, or a package where a module would be absurd).
DOORS = {
    "llama_cpp": {"models/native.py"},
    "huggingface_hub": {"models/hub.py"},
    "jinja2": {"models/chat_template.py"},
    "gguf": {"convert/gguf_write.py"},
    "tokenizers": {"convert/hf_tokenizer.py"},
    "sentencepiece": {"convert/sentencepiece_tokenizer.py"},
    "textual": {"tui/"},
    "rich": {"tui/"},
    "llguidance": {"runtime/structured.py"},
    "pydantic": {"runtime/server/"},
    "starlette": {"runtime/server/"},
    "uvicorn": {"runtime/server/"},
    "prometheus_client": {"runtime/server/metrics.py"},
}
NEVER = {"torch", "transformers", "onnxruntime", "onnx", "optimum", "safetensors"}


def modules() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imports(path: Path) -> set[str]:
    """Full names of everything the file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_rule_sees_the_files() -> None:
    assert len(modules()) > 30
    assert any(name.startswith("edgeinfer.models.") for name in imports(ROOT / "runtime" / "load.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_dependencies_point_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    relative = str(path.relative_to(ROOT))
    for name in imports(path):
        top = name.split(".")[0]
        assert top not in NEVER, f"{relative} imports {name}"
        if top in DOORS:
            assert any(relative == door or (door.endswith("/") and relative.startswith(door)) for door in DOORS[top]), f"{relative} imports {name} past its door"
        if top == "edgeinfer" and package != "edgeinfer":
            part = name.split(".")[1] if "." in name else ""
            assert part == "errors" or part in ALLOWED[package], f"{relative} imports {name}"


def test_only_load_knows_the_backends() -> None:
    for path in modules():
        relative = str(path.relative_to(ROOT))
        if relative != "runtime/load.py" and not relative.startswith("runtime/backends/"):
            assert not any("runtime.backends" in name for name in imports(path)), relative


HEAVY = ("numpy", "llama_cpp", "gguf", "tokenizers", "sentencepiece", "jinja2", "huggingface_hub", "textual", "rich", "psutil", "platformdirs", "llguidance", "pydantic", "starlette", "uvicorn", "prometheus_client")


@pytest.mark.parametrize("code", ["import edgeinfer", "import edgeinfer.cli; edgeinfer.cli._parser()", "import edgeinfer.models.spec, edgeinfer.errors"])
def test_the_front_door_is_light(code: str) -> None:
    loaded = subprocess.run([sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"], capture_output=True, text=True, check=True).stdout.split()
    assert not [name for name in HEAVY if name in loaded]


def test_what_is_exported_can_be_imported() -> None:
    import edgeinfer

    for name in edgeinfer.__all__:
        assert getattr(edgeinfer, name) is not None


def test_packages_are_all_listed_for_the_wheel() -> None:
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values()
    folders = {str(path.parent.relative_to(ROOT)) for path in modules()}
    assert folders == set(listed)
