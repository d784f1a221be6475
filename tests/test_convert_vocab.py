"""Vocabularies by the rules in their files: kinds, added tokens, padding, refusals."""

from __future__ import annotations

import json

import pytest
import tiny_tokenizer
from tiny import tiny
from vocab_folders import change, closed_merges, differing, edit_rows, parity, put_tokenizer, train_byte_level, train_sentencepiece

from edgeinfer.convert.sentencepiece_model import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, read_sentencepiece
from edgeinfer.convert.vocab import read_vocab
from edgeinfer.errors import ConversionFailed, ModelDamaged
from edgeinfer.models.checkpoint import Checkpoint

KNOWN_KINDS = [kind for kind in tiny_tokenizer.KINDS if kind != "unknown"]
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
VARIANTS = [(kind, "none") for kind in KNOWN_KINDS] + [(kind, files) for kind in KNOWN_KINDS if kind.startswith("spm") for files in ("also", "only")]


def problems_of(folder, **options) -> str:
    with pytest.raises(ConversionFailed) as caught:
        read_vocab(Checkpoint.open(folder), **options)
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize(("kind", "sentencepiece"), VARIANTS)
def test_every_kind_gives_the_sources_ids(tmp_path, kind, sentencepiece):
    tokens = [("<think>", False), ("</think>", False), ("<|tool|>", True)]
    folder = tiny(tmp_path / "model", "llama", tokenizer=kind, sentencepiece=sentencepiece, added_tokens=tokens, extra_rows=3)
    vocab, texts, chats = parity(folder, tmp_path)
    assert (vocab.model, vocab.pre) == (("llama", "default") if kind.startswith("spm") else ("gpt2", kind))
    assert differing(vocab, texts, chats) == []
    assert texts.checked > 500 and chats.checked == 8
    kinds = dict(zip(vocab.tokens, vocab.token_types, strict=True))
    assert (kinds["<think>"], kinds["<|tool|>"], kinds["<|im_end|>"]) == (USER_DEFINED, CONTROL, CONTROL)
    if vocab.model == "llama":
        assert kinds["<0x0A>"] == BYTE and kinds["<unk>"] == UNKNOWN and len(vocab.scores) == len(vocab.tokens) and not vocab.merges
    else:
        assert vocab.scores is None and vocab.merges


# case 1
def test_an_unknown_pre_tokenizer_is_refused_with_a_way_out(tmp_path):
    said = problems_of(tiny(tmp_path / "model", "llama", tokenizer="unknown"))
    assert tiny_tokenizer.UNKNOWN_SPLIT.replace("\\", "\\\\") in said and "--pre NAME" in said
    assert "smollm" in said and "llama-bpe" in said and "tekken" in said


# cases 1, 5
def test_an_unknown_rule_hides_no_other_problem(tmp_path):
    folder = tiny(tmp_path / "model", "llama", tokenizer="unknown", extra_rows=-2)
    change(folder / "tokenizer.json", lambda document: document.update(normalizer={"type": "Lowercase"}))
    change(folder / "tokenizer_config.json", lambda config: config.update(bos_token="<|nowhere|>"))
    said = problems_of(folder)
    assert all(words in said for words in ("Lowercase", "--pre NAME", "2 tokens have no weights", "<|nowhere|>")) and said.count("\n") == 3


def test_an_id_that_is_no_number_is_refused(tmp_path):
    for value in ("7", -1, None):
        folder = tiny(tmp_path / "model", "llama")
        change(folder / "tokenizer.json", lambda document, value=value: document["model"]["vocab"].update(a=value))
        assert "'a' an id that is not a number" in problems_of(folder)


# case 1
def test_a_trained_tokenizer_with_its_own_split_is_refused_and_can_be_named_by_hand(tmp_path):
    from tokenizers import Regex, pre_tokenizers

    own = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\p{L}{1,4}|[^\p{L}]"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    folder = put_tokenizer(tmp_path / "model", train_byte_level(own, size=500), eos_token="<|end|>")
    assert "rule that is not known: Split" in problems_of(folder)
    by_hand, texts, _chats = parity(folder, tmp_path, pre="gpt-2")
    assert by_hand.pre == "gpt-2" and not texts.ok       # it was the wrong name, and the parity check says so
    assert "--pre nonsense" in problems_of(folder, pre="nonsense")


# case 5
def test_more_tokens_than_rows_are_refused_with_both_numbers(tmp_path):
    folder = tiny(tmp_path / "model", "llama", extra_rows=-6)
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    said = problems_of(folder)
    assert f"{rows + 6} tokens" in said and f"{rows} rows" in said


# case 5
@pytest.mark.parametrize("kind", ["llama-bpe", "spm"])
def test_rows_beyond_the_tokenizer_become_unused_tokens(tmp_path, kind):
    folder = tiny(tmp_path / "model", "llama", tokenizer=kind, extra_rows=5)
    vocab = read_vocab(Checkpoint.open(folder))
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert len(vocab.tokens) == len(vocab.token_types) == rows and vocab.used == rows - 5
    assert vocab.tokens[-5:] == tuple(f"[PAD{token}]" for token in range(rows - 5, rows)) and vocab.token_types[-5:] == (UNUSED,) * 5


def test_a_hole_between_ids_is_filled(tmp_path):
    folder = tiny(tmp_path / "model", "llama", added_tokens=[("<a>", True)], extra_rows=1)

    def further(document):
        document["added_tokens"][-1]["id"] += 1

    change(folder / "tokenizer.json", further)
    change(folder / "tokenizer_config.json", lambda config: config.pop("added_tokens_decoder"))
    vocab = read_vocab(Checkpoint.open(folder))
    assert vocab.tokens[-1] == "<a>" and vocab.tokens[-2].startswith("[PAD") and vocab.token_types[-2:] == (UNUSED, CONTROL)


# case 7
@pytest.mark.parametrize("sentencepiece", ["none", "also", "only"])
@pytest.mark.parametrize("where", ["added_tokens_decoder", "added_tokens.json"])
def test_markers_that_only_one_file_beside_the_tokenizer_names_stay_markers(tmp_path, sentencepiece, where):
    folder = tiny(tmp_path / "model", "llama", tokenizer="spm", sentencepiece=sentencepiece, added_tokens=[("<tool>", False)])
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    ids = {entry["content"]: int(token) for token, entry in settings["added_tokens_decoder"].items()}
    beside = {text: ids[text] for text in ("<|im_start|>", "<|im_end|>", "<tool>")}
    if sentencepiece != "only":
        change(folder / "tokenizer.json", lambda document: document.update(
            added_tokens=[entry for entry in document["added_tokens"] if entry["content"] not in beside]))
    if where == "added_tokens.json":
        (folder / "added_tokens.json").write_text(json.dumps(beside))
        change(folder / "tokenizer_config.json", lambda config: (
            config.pop("added_tokens_decoder"), config.update(additional_special_tokens=["<|im_start|>", "<|im_end|>"])))
    vocab, texts, chats = parity(folder, tmp_path)
    assert differing(vocab, texts, chats) == []
    assert {text: vocab.tokens.index(text) for text in beside} == beside
    assert [vocab.token_types[beside[text]] for text in ("<|im_start|>", "<|im_end|>", "<tool>")] == [CONTROL, CONTROL, USER_DEFINED]


# case 8
@pytest.mark.parametrize("kind", ["smollm", "qwen2", "spm", "spm-gemma"])
def test_added_tokens_tags_and_runs_of_spaces_keep_their_ids(tmp_path, kind):
    run = "\u2581" * 6
    added = [(text, False) for text in (run, "<think>", "<table>", "<td>", "</td>", "\n\n\n", "\t\t")]
    folder = tiny(tmp_path / "model", "llama", tokenizer=kind, added_tokens=added)
    if kind.startswith("spm"):

        def merge_runs(document):                        # as Gemma's file has it: merges for its added runs too, before all others
            vocab = document["model"]["vocab"]
            vocab |= {entry["content"]: entry["id"] for entry in document["added_tokens"]}
            document["model"]["merges"] = closed_merges(vocab, [run]) + document["model"]["merges"]

        change(folder / "tokenizer.json", merge_runs)
    vocab, texts, chats = parity(folder, tmp_path)
    assert differing(vocab, texts, chats) == []
    assert vocab.token_types[vocab.tokens.index("<td>")] == USER_DEFINED


def test_files_that_contradict_each_other_are_refused_with_all_contradictions(tmp_path):
    folder = tiny(tmp_path / "model", "llama", added_tokens=[("<a>", True), ("<b>", True)])
    settings = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    ids = {entry["content"]: int(token) for token, entry in settings.items()}

    def swap(config):
        decoder = config["added_tokens_decoder"]
        decoder[str(ids["<a>"])]["content"] = "<other>"
        config["added_tokens_decoder"] = decoder | {"3": {"content": "<b>", "special": True}}
        config["eos_token"] = "<nowhere>"

    change(folder / "tokenizer_config.json", swap)
    said = problems_of(folder)
    assert f"token {ids['<a>']} is '<a>'" in said and "'<other>'" in said
    assert f"'<b>' the id {ids['<b>']}" in said and "gives it 3" in said
    assert "eos_token is '<nowhere>'" in said


# --- what decides the kind --------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["smollm", "gpt-2"])
def test_a_byte_level_file_that_claims_to_be_llama_goes_by_its_rules(tmp_path, kind):
    """What is written by tools that open a GGUF and save it again: class LlamaTokenizer, byte_fallback, and an SPM-style decoder beside ByteLevel."""
    folder = tiny(tmp_path / "model", "llama", tokenizer=kind)

    def claim(document):
        document["model"]["byte_fallback"] = True
        document["normalizer"] = {"type": "Sequence", "normalizers": []}
        document["decoder"] = {"type": "Sequence", "decoders": [document["decoder"], {"type": "ByteFallback"}, {"type": "Fuse"}]}

    change(folder / "tokenizer.json", claim)
    change(folder / "tokenizer_config.json", lambda config: config.update(tokenizer_class="LlamaTokenizer", add_prefix_space=True, legacy=True))
    vocab, texts, chats = parity(folder, tmp_path)
    assert (vocab.model, vocab.pre, vocab.scores) == ("gpt2", kind, None)
    assert differing(vocab, texts, chats) == []


@pytest.mark.parametrize("kind", ["smollm", "spm"])
def test_rules_of_one_kind_over_contents_of_the_other_are_refused(tmp_path, kind):
    folder = tiny(tmp_path / "model", "llama", tokenizer=kind)

    def exchange(document):
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        document["pre_tokenizer"] = document["decoder"] = byte_level if kind == "spm" else None

    change(folder / "tokenizer.json", exchange)
    assert ("works on bytes" if kind == "spm" else "neither its pre-tokenizer nor its decoder is ByteLevel") in problems_of(folder)


@pytest.mark.parametrize(("edit", "said"), [
    (lambda d: d.update(normalizer={"type": "Lowercase"}), "The normaliser Lowercase"),
    (lambda d: d.update(pre_tokenizer={"type": "Whitespace"}), "The pre-tokenizer Whitespace"),
    (lambda d: d.update(normalizer=None), "does not write spaces as"),
    (lambda d: d["model"].update(byte_fallback=False), "byte_fallback with all 256 tokens"),
    (lambda d: d["model"].update(type="Unigram", vocab=[["a", 0.0]]), "Unigram model, and only BPE"),
    (lambda d: d["model"].update(type="WordPiece"), "WordPiece model, and only BPE"),
    (lambda d: d["model"].update(end_of_word_suffix="</w>"), "end_of_word_suffix"),
    (lambda d: d.update(pre_tokenizer=METASPACE | {"prepend_scheme": "always"}), "prepend_scheme 'always'"),
    (lambda d: d.update(pre_tokenizer=METASPACE | {"split": True}), "Metaspace with split"),
])
def test_rules_that_llama_cpp_has_no_place_for_are_refused(tmp_path, edit, said):
    folder = tiny(tmp_path / "model", "llama", tokenizer="spm")
    change(folder / "tokenizer.json", edit)
    assert said in problems_of(folder)


def test_no_tokenizer_at_all(tmp_path):
    folder = tiny(tmp_path / "model", "llama")
    (folder / "tokenizer.json").unlink()
    assert "neither a tokenizer.json nor a tokenizer.model" in problems_of(folder)


def test_a_space_before_the_first_word_only_is_left_to_whoever_feeds_llama_cpp(tmp_path):
    folder = tiny(tmp_path / "model", "llama", tokenizer="spm")
    change(folder / "tokenizer.json", lambda document: document.update(normalizer=None, pre_tokenizer=METASPACE))
    vocab, texts, chats = parity(folder, tmp_path)
    assert differing(vocab, texts, chats) == []
    assert not vocab.add_space_prefix and vocab.space_prefix == "first"
    assert ("edgeinfer.tokenizer.space_prefix", "first") in [(entry.key, entry.value) for entry in vocab.metadata()]


def test_a_rule_for_whitespace_after_markers_goes_by_the_models_name(tmp_path):
    folder = tiny(tmp_path / "Phi-3-x", "phi3", tokenizer="spm-phi3")
    vocab, texts, chats = parity(folder, tmp_path)
    assert vocab.name_must_contain == "phi-3" and vocab.model_name("mine") == "mine phi-3" and vocab.model_name("Phi-3-mini") == "Phi-3-mini"
    assert differing(vocab, texts, chats) == [] and not texts.tolerated and not chats.tolerated
    other = read_vocab(Checkpoint.open(tiny(tmp_path / "other", "llama", tokenizer="spm")))
    assert other.model_name("my-phi3-distill") == "my-phi 3-distill"      # llama.cpp would not even load it under that name


def test_tokens_before_and_after_a_text_come_from_the_template_then_the_settings(tmp_path):
    spm = tiny(tmp_path / "spm", "llama", tokenizer="spm")
    assert read_vocab(Checkpoint.open(spm)).add_bos
    change(spm / "tokenizer_config.json", lambda config: config.update(add_bos_token=False))
    assert read_vocab(Checkpoint.open(spm)).add_bos      # its template still does
    change(spm / "tokenizer.json", lambda document: document.update(post_processor=None))
    assert not read_vocab(Checkpoint.open(spm)).add_bos
    change(spm / "tokenizer_config.json", lambda config: config.update(add_bos_token=True, add_eos_token=True))
    vocab = read_vocab(Checkpoint.open(spm))
    assert vocab.add_bos and vocab.add_eos
    assert ("tokenizer.ggml.add_eos_token", True) in [(entry.key, entry.value) for entry in vocab.metadata()]


def test_named_templates_are_kept(tmp_path):
    folder = tiny(tmp_path / "model", "llama")
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    change(folder / "tokenizer_config.json", lambda config: config.update(chat_template=named))
    written = {entry.key: entry.value for entry in read_vocab(Checkpoint.open(folder)).metadata()}
    assert (written["tokenizer.chat_template"], written["tokenizer.chat_template.tool_use"]) == ("A", "B")
    assert written["tokenizer.chat_templates"] == ["tool_use"]


# --- tokenizer.model --------------------------------------------------------------------------------------------------------------------------------

def alone(folder, **options):
    """A checkpoint whose only tokenizer is a SentencePiece model trained now."""
    tiny(folder, "llama")
    (folder / "tokenizer.json").unlink()
    (folder / "generation_config.json").write_text("{}")
    model = read_sentencepiece(train_sentencepiece(folder / "tokenizer.model", **options))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}))
    edit_rows(folder, len(model.pieces) + 2)
    return folder


@pytest.mark.parametrize("options", [
    {},
    {"add_dummy_prefix": False},
    {"user_defined_symbols": ["<tag>", "\u2581\u2581\u2581"], "add_dummy_prefix": False},
    {"user_defined_symbols": ["<tag>"]},
    {"control_symbols": ["<|im_end|>"]},
])
def test_a_trained_sentencepiece_model(tmp_path, options):
    vocab, texts, _chats = parity(alone(tmp_path / "model", **options), tmp_path)
    assert differing(vocab, texts) == []
    assert vocab.add_bos and vocab.tokens[vocab.bos_id] == "<s>" and vocab.add_space_prefix == options.get("add_dummy_prefix", True)
    assert {UNKNOWN, CONTROL, BYTE, NORMAL, UNUSED} <= set(vocab.token_types)


@pytest.mark.parametrize(("options", "said"), [
    ({"model_type": "unigram"}, "of the unigram kind"),
    ({"byte_fallback": False}, "does not fall back to bytes"),
    ({"normalization_rule_name": "nmt_nfkc"}, "character map"),
    ({"remove_extra_whitespaces": True}, "removes repeated spaces"),
])
def test_sentencepiece_models_that_cannot_be_carried_over_are_refused(tmp_path, options, said):
    assert said in problems_of(alone(tmp_path / "model", **options))


@pytest.mark.parametrize("damage", [
    lambda data: b"",
    lambda data: data[: len(data) // 2],
    lambda data: b"version https://git-lfs.github.com/spec/v1\n",
    lambda data: b"\x0a" + b"\xff" * 40,
])
def test_a_damaged_sentencepiece_model_is_named(tmp_path, damage):
    path = train_sentencepiece(tmp_path / "tokenizer.model")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelDamaged, match=r"tokenizer\.model is not a SentencePiece model"):
        read_sentencepiece(path)


def test_a_damaged_tokenizer_json_is_named(tmp_path):
    folder = tiny(tmp_path / "model", "llama")
    (folder / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ModelDamaged, match=r"tokenizer\.json is not valid JSON"):
        read_vocab(Checkpoint.open(folder))
