"""The identity of weights: equal for copies, different for anything that computes differently."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from edgeinfer.models.fingerprint import fingerprint
from edgeinfer.models.gguf_header import read_header


def write(path: Path, *, shift: int | None = None, tensors: int = 5, name: str = "m") -> Path:
    """A GGUF of small tensors; all values of tensor ``shift`` are one higher."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    for number in range(tensors):
        writer.add_tensor(f"blk.{number}.weight", np.arange(4096, dtype=np.float32).reshape(64, 64) + (number == shift))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def of(path: Path) -> str:
    return fingerprint(read_header(path))


def test_copies_are_the_same_model(tmp_path) -> None:
    path = write(tmp_path / "a.gguf")
    shutil.copy(path, tmp_path / "b.gguf")
    assert of(path) == of(tmp_path / "b.gguf") == of(path) and len(of(path)) == 32


@pytest.mark.parametrize("number", range(5))
def test_a_changed_tensor_is_another_model(tmp_path, number: int) -> None:
    assert of(write(tmp_path / "a.gguf")) != of(write(tmp_path / "b.gguf", shift=number))


def test_changed_metadata_or_shapes_are_another_model(tmp_path) -> None:
    prints = {of(write(tmp_path / "a.gguf")), of(write(tmp_path / "b.gguf", name="n")), of(write(tmp_path / "c.gguf", tensors=4))}
    assert len(prints) == 3


def test_every_tensor_of_a_real_model_counts(smollm2_gguf, tmp_path) -> None:
    """A fine-tune that changed one layer of the demo model."""
    path = Path(shutil.copy(smollm2_gguf, tmp_path / "m.gguf"))
    header = read_header(path)
    before = fingerprint(header)
    assert before == of(smollm2_gguf)
    for name in list(header.tensors)[::40]:
        tensor = header.tensors[name]
        with open(path, "r+b") as file:
            file.seek(tensor.offset)
            data = file.read(tensor.nbytes)
            file.seek(tensor.offset)
            file.write(bytes(byte ^ 1 for byte in data))
            file.flush()
            assert fingerprint(header) != before, name
            file.seek(tensor.offset)
            file.write(data)
    assert fingerprint(header) == before


def test_all_parts_of_a_split_model_count(tmp_path) -> None:
    def split(folder: Path, last: int) -> Path:
        folder.mkdir()
        for number in range(3):
            writer = gguf.GGUFWriter(folder / f"m-{number + 1:05d}-of-00003.gguf", "llama")
            for key, value in (("split.no", number), ("split.count", 3), ("split.tensors.count", 2)):
                writer.add_uint16(key, value)
            if number:                                   # the first part of some models holds no tensor
                writer.add_tensor(f"t{number}", np.full(64, last if number == 2 else 0, np.float32))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
        return folder / "m-00001-of-00003.gguf"

    assert of(split(tmp_path / "a", 0)) == of(split(tmp_path / "b", 0)) != of(split(tmp_path / "c", 1))
