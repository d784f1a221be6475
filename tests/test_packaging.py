"""A built wheel is whole: the packages under their public names, the files beside them, the command."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ("edgeinfer", "models", "convert", "runtime", "tui")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    copy = tmp_path_factory.mktemp("source")             # building leaves folders behind; not in somebody's checkout
    for name in PARTS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(out), str(copy)], check=True)
    return next(out.glob("edgeinfer-*.whl"))


def test_the_wheel_holds_every_module_and_data_file(wheel) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    for part in PARTS:
        for path in (ROOT / part).rglob("*"):
            if path.suffix in (".py", ".tcss") or path.name == "py.typed":
                relative = path.relative_to(ROOT).as_posix()
                assert (relative if part == "edgeinfer" else f"edgeinfer/{relative}") in inside
    assert not {name.split("/")[0] for name in inside} & {"models", "convert", "runtime", "tui", "tests", "scripts"}


def test_the_wheel_imports_from_anywhere(wheel, tmp_path) -> None:
    target = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(target)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import edgeinfer, edgeinfer.runtime.service, edgeinfer.convert.pipeline, edgeinfer.tui.app\n"
        "print(edgeinfer.__file__)"
    )
    # -S -E: without the editable install, whose finder would answer for the wheel; the dependencies come from where they are installed.
    paths = [path for path in sys.path if path and "edgeinfer" not in path]
    code = f"import sys; sys.path += {paths!r}\n" + code
    done = subprocess.run([sys.executable, "-S", "-E", "-c", code, str(target)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and str(target) in done.stdout, done.stderr


def test_the_command_is_installed() -> None:
    command = Path(sys.executable).parent / "edgeinfer"
    done = subprocess.run([str(command), "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("edgeinfer ")
