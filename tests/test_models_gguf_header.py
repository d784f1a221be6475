"""The GGUF header reader: reads what the `gguf` package writes, refuses the rest with a reason."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import gguf
import mutate
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeinfer.errors import EdgeInferError, ModelDamaged, ModelNotFound, UnsupportedModel
from edgeinfer.models.ggml_types import BY_NAME, TYPES
from edgeinfer.models.gguf_header import read_header
from edgeinfer.models.native import ggml


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return mutate.tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def write(folder: Path, data: bytes, name: str = "damaged.gguf") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def test_reads_what_the_gguf_package_writes(tiny: Path) -> None:
    header = read_header(tiny)
    assert (header.version, header.architecture, header.name, header.quantization) == (3, "llama", "tiny", "Q8_0")
    assert header.metadata["tokenizer.ggml.tokens"] == mutate.TOKENS
    assert header.metadata["tokenizer.ggml.tokens"][6] == "日本"
    assert list(header.metadata["tokenizer.ggml.tokens"].raw())[7] == "🙂".encode()
    assert header.metadata["tokenizer.ggml.token_type"].tolist() == [2, 3, 3, 1, 1, 1, 1, 1]
    assert header.metadata["tokenizer.ggml.scores"].tolist() == [0.5 * i for i in range(8)]
    assert header.metadata["test.flags"].tolist() == [True, False, True]
    assert header.metadata["test.flag"] is True
    assert header.metadata["test.double"] == 0.1
    assert header.metadata["test.negative"] == -(2**40)
    assert (header.get("context_length"), header.get("missing", 7), header.vocab_size) == (128, 7, 8)
    assert header.chat_template == "{{ messages }}"
    assert header.file_size == tiny.stat().st_size


def test_tensor_table_equals_the_gguf_packages(smollm2_gguf: Path) -> None:
    header = read_header(smollm2_gguf)
    theirs = gguf.GGUFReader(smollm2_gguf).tensors
    assert list(header.tensors) == [tensor.name for tensor in theirs]
    for tensor in theirs:
        ours = header.tensors[tensor.name]
        assert (ours.offset, ours.nbytes, ours.type) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type.name)
        assert ours.shape == tuple(int(size) for size in tensor.shape)
    assert (header.quantization, header.vocab_size, header.parameters) == ("Q4_1", 49152, 134_515_008)


def test_type_sizes_are_those_of_the_installed_llama_cpp() -> None:
    lib = ggml()
    known = {}
    for number in range(43):                             # GGML_TYPE_COUNT of the pinned version; beyond it the calls read past their table
        if lib.ggml_type_size(number):
            known[number] = (lib.ggml_blck_size(number), lib.ggml_type_size(number))
    assert {number: (kind.block, kind.block_bytes) for number, kind in TYPES.items()} == known
    assert len(BY_NAME) == len(TYPES)


@pytest.mark.parametrize("name", mutate.NOT_GGUF)
def test_says_what_it_is_instead(name: str, tmp_path: Path) -> None:  # case 96
    data, words = mutate.NOT_GGUF[name]
    with pytest.raises(ModelDamaged) as caught:
        read_header(write(tmp_path, data))
    assert words in str(caught.value)
    assert "damaged.gguf" in str(caught.value)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_truncated_file_names_both_sizes(share: float, smollm2_gguf: Path, tmp_path: Path) -> None:  # case 96
    whole = smollm2_gguf.stat().st_size
    size = int(whole * share)
    path = tmp_path / "cut.gguf"
    with open(smollm2_gguf, "rb") as source, open(path, "wb") as target:
        target.write(source.read(2_000_000))
        target.truncate(size)                            # sparse: only the length matters
    with pytest.raises(ModelDamaged) as caught:
        read_header(path)
    assert f"expected {whole:,} bytes, has {size:,}" in str(caught.value)


def test_cut_at_every_byte_is_refused(tiny: Path, tmp_path: Path) -> None:  # case 96
    data = tiny.read_bytes()
    end = max(tensor.offset + tensor.nbytes for tensor in read_header(tiny).tensors.values())
    for size in [*range(read_header(tiny).data_offset + 1), *range(read_header(tiny).data_offset + 1, end, 997), end - 1]:
        with pytest.raises(ModelDamaged):
            read_header(write(tmp_path, data[:size]))
    assert read_header(write(tmp_path, data[:end])).vocab_size == 8


@pytest.mark.parametrize("name", mutate.MALFORMED)
def test_malformed_header_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:  # cases 97, 98
    data, words = mutate.MALFORMED[name]
    with pytest.raises(ModelDamaged) as caught:
        read_header(write(tmp_path, data))
    assert words in str(caught.value)


def test_empty_key_file_is_the_reported_one() -> None:  # case 97
    assert len(mutate.MALFORMED["empty key, 37 bytes"][0]) == 37


@pytest.mark.parametrize(("version", "words"), [(1, "version 1"), (4, "version 4"), (0x03000000, "big-endian")])
def test_other_versions_and_byte_order_are_unsupported(version: int, words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        read_header(write(tmp_path, b"GGUF" + struct.pack("<IQQ", version, 0, 0)))


def test_version_2_and_no_tensors_are_fine(tmp_path: Path) -> None:
    header = read_header(write(tmp_path, mutate.header(keys=1, version=2) + mutate.key(b"a", mutate.U8, b"\7")))
    assert (header.version, dict(header.metadata), len(header.tensors), header.quantization) == (2, {"a": 7}, 0, "none")


def test_vocabulary_only_file_of_the_gguf_package_is_fine(tmp_path: Path) -> None:
    assert read_header(mutate.tiny_gguf(tmp_path / "vocab.gguf", tensors=False)).vocab_size == 8


def test_missing_file_folder_and_pipe(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="does not exist"):
        read_header(tmp_path / "none.gguf")
    with pytest.raises(ModelNotFound, match="is a folder"):
        read_header(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelDamaged, match="not a regular file"):
        read_header(tmp_path / "pipe.gguf")


def test_empty_array_and_empty_strings(tmp_path: Path) -> None:
    data = mutate.header(keys=2)
    data += mutate.key(b"none", mutate.ARRAY, struct.pack("<IQ", mutate.STRING, 0))
    data += mutate.key(b"blank", mutate.ARRAY, struct.pack("<IQ", mutate.STRING, 3) + mutate.text(b"") * 3)
    header = read_header(write(tmp_path, data))
    assert list(header.metadata["none"]) == []
    assert header.metadata["blank"] == ["", "", ""]


def split(folder: Path, count: int, **changes: dict[str, int]) -> list[Path]:
    """A model in ``count`` parts of one tensor each. ``changes``: part1=..., overriding its keys."""
    paths = []
    for number in range(count):
        keys = {"split.no": number, "split.count": count, "split.tensors.count": count} | changes.get(f"part{number + 1}", {})
        data = mutate.header(tensors=1, keys=len(keys)) + b"".join(mutate.key(k.encode(), mutate.U32, struct.pack("<I", v)) for k, v in keys.items())
        data += mutate.tensor(f"w{number}".encode(), (8,))
        data += bytes(-len(data) % 32) + np.full(8, number, np.float32).tobytes()
        paths.append(write(folder, data, f"m-{number + 1:05d}-of-{count:05d}.gguf"))
    return paths


def test_split_model_has_the_tensors_of_all_parts(tmp_path: Path) -> None:
    paths = split(tmp_path, 3)
    header = read_header(paths[0])
    assert [tensor.file for tensor in header.tensors.values()] == paths
    assert header.parts == tuple(paths)
    assert header.file_size == sum(path.stat().st_size for path in paths)


def test_split_model_with_a_part_missing_cut_or_foreign(tmp_path: Path) -> None:
    paths = split(tmp_path, 3)
    with pytest.raises(ModelDamaged, match="m-00001-of-00003"):
        read_header(paths[1])
    whole = paths[2].read_bytes()
    paths[2].write_bytes(whole[:-1])
    with pytest.raises(ModelDamaged, match=f"m-00003-of-00003.gguf is incomplete: expected {len(whole)} bytes, has {len(whole) - 1}"):
        read_header(paths[0])
    paths[2].unlink()
    with pytest.raises(ModelDamaged, match="m-00003-of-00003"):
        read_header(paths[0])
    with pytest.raises(ModelDamaged, match="belongs to another"):
        read_header(split(tmp_path, 2, part2={"split.no": 5})[0])
    with pytest.raises(ModelDamaged, match="hold 2 tensors, and should hold 9"):
        read_header(split(tmp_path, 2, part1={"split.tensors.count": 9})[0])
    renamed = split(tmp_path, 2)[0].rename(tmp_path / "other.gguf")
    with pytest.raises(ModelDamaged, match="one of 2 parts"):
        read_header(renamed)


MUTATIONS = st.lists(st.tuples(st.integers(0, 2**16), st.sampled_from([0, 1, 2, 127, 128, 254, 255]) | st.integers(0, 255)), min_size=1, max_size=8)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutations=MUTATIONS, cut=st.none() | st.integers(0, 2**16))
def test_any_damage_ends_in_an_error_of_ours_or_a_header(tiny: Path, tmp_path: Path, mutations: list[tuple[int, int]], cut: int | None) -> None:
    """Random bytes changed and the file cut anywhere: never another exception, and never a tensor outside the file."""  # cases 96-98
    data = bytearray(tiny.read_bytes())
    reach = read_header(tiny).data_offset
    for at, byte in mutations:
        data[at % reach] = byte
    if cut is not None:
        del data[cut % len(data) :]
    path = write(tmp_path, bytes(data))
    try:
        header = read_header(path)
    except EdgeInferError as error:
        assert isinstance(error, (ModelDamaged, UnsupportedModel))
        assert str(path) in str(error)
        return
    assert all(0 <= tensor.offset and tensor.offset + tensor.nbytes <= len(data) for tensor in header.tensors.values())
    for value in header.metadata.values():               # lazily decoded values must be sound too
        if not isinstance(value, (str, int, float)):
            assert len(list(value)) == len(value)


