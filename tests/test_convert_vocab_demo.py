"""The demo checkpoint's vocabulary is the one inside the package's own GGUF, and both sides give the same ids for any text."""

import pytest
from gguf import GGUFReader
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from vocab_folders import change, differing, parity

from edgeinfer.convert.parity import reference_tokenizer
from edgeinfer.convert.vocab import read_vocab
from edgeinfer.models.checkpoint import Checkpoint
from edgeinfer.models.native import NativeModel, llama


@pytest.fixture(scope="module")
def checkpoint(demo_checkpoint):
    return Checkpoint.open(demo_checkpoint)


@pytest.fixture(scope="module")
def vocab(checkpoint):
    return read_vocab(checkpoint)


@pytest.fixture(scope="module")
def native(smollm2_gguf):
    model = NativeModel(smollm2_gguf, vocab_only=True)
    yield model
    model.close()


@pytest.fixture(scope="module")
def reference(checkpoint, vocab):
    return reference_tokenizer(checkpoint, vocab)


def test_every_tokenizer_key_of_the_package_is_ours_too(vocab, smollm2_gguf):
    ours = {entry.key: entry.value for entry in vocab.metadata()}
    theirs = {key: field.contents() for key, field in GGUFReader(smollm2_gguf).fields.items() if key.startswith("tokenizer.")}
    assert len(theirs["tokenizer.ggml.tokens"]) == 49152 and len(theirs["tokenizer.ggml.merges"]) == 48900
    assert {key for key in ours if ours[key] != theirs.get(key)} == set()
    assert ours.keys() == theirs.keys()
    assert vocab.warnings == ()


def test_stops_at_the_end_of_a_turn(vocab, native):
    assert vocab.stop_ids == (2,) and vocab.tokens[2] == "<|im_end|>"
    assert llama().llama_vocab_is_eog(native.vocab, 2)


# Any text that UTF-8 can carry, and texts full of what this vocabulary treats specially.
_pieces = st.sampled_from([
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<empty_output>", " ", "  ", "\n", "\t", "'s", "1", "23", "é", "e\u0301", "🙂", "日本", "the", "The",
])
_any = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60)
_texts = st.one_of(_any, st.lists(_pieces, max_size=20).map("".join))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=_texts)
@example(text="x" * 3000)
@example(text=" " * 513 + "\n")
def test_any_text_has_the_same_ids_on_both_sides(reference, native, text):
    assert native.tokenize(text, add_special=False, parse_special=True) == reference.encode(text)


def as_saved_from_a_gguf(folder):
    """What comes out when a GGUF of this vocabulary is opened and saved by a tool that takes every llama for a SentencePiece one."""

    def claim(document):
        document["model"] |= {"byte_fallback": True, "fuse_unk": True}
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
        to_space = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
        document["normalizer"] = {"type": "Sequence", "normalizers": []}
        document["pre_tokenizer"] = byte_level
        document["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}, to_space, byte_level]}

    change(folder / "tokenizer.json", claim)
    change(folder / "tokenizer_config.json", lambda config: config.update(tokenizer_class="LlamaTokenizer", legacy=True, add_prefix_space=True))


def test_a_folder_that_claims_to_be_llama_goes_by_its_rules(demo_checkpoint, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in demo_checkpoint.iterdir():
        (folder / path.name).write_bytes(path.read_bytes()) if path.suffix == ".json" else (folder / path.name).symlink_to(path)
    as_saved_from_a_gguf(folder)
    vocab, texts, chats = parity(folder, tmp_path)
    assert (vocab.model, vocab.pre, vocab.scores) == ("gpt2", "gpt-2", None)         # digits are no longer cut one by one: so it says
    assert differing(vocab, texts, chats) == []


def test_a_wrong_name_for_the_pre_tokenizer_does_not_pass(demo_checkpoint, tmp_path):
    vocab, texts, _chats = parity(demo_checkpoint, tmp_path, pre="gpt-2")
    assert not texts.ok and "differs from token" in differing(vocab, texts)[0]
