"""The parity check sees what is wrong, names it, and lets only known limits pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tiny import tiny
from vocab_folders import change
from vocab_gguf import load_vocab, write_vocab_gguf

from edgeinfer.convert import convert
from edgeinfer.convert.parity import Mismatch, check_parity, reference_tokenizer, template_parity
from edgeinfer.convert.parity_probes import CASED, PLAIN, probes
from edgeinfer.convert.vocab import read_vocab
from edgeinfer.convert.vocab_tables import CONTROL, NORMAL
from edgeinfer.errors import ConversionFailed
from edgeinfer.models.checkpoint import Checkpoint
from edgeinfer.models.tokenizer_text import prepare_text


@pytest.fixture
def make(tmp_path):
    """A checkpoint of a kind, and its vocabulary."""

    def build(kind="llama-bpe", **options):
        checkpoint = Checkpoint.open(tiny(tmp_path / "model", "llama", tokenizer=kind, **options))
        return checkpoint, read_vocab(checkpoint)

    return build


def refusal(checkpoint, vocab, written, tmp_path) -> ConversionFailed:
    """What check_parity says of a file that holds ``written`` in place of ``vocab``."""
    with pytest.raises(ConversionFailed) as caught:
        check_parity(checkpoint, write_vocab_gguf(tmp_path / "wrong.gguf", written), vocab=vocab)
    return caught.value


def test_the_demo_checkpoint_and_the_packages_file_agree(demo_checkpoint, smollm2_gguf):
    texts, chats = check_parity(Checkpoint.open(demo_checkpoint), smollm2_gguf)
    assert texts.ok and texts.checked > 1000 and not texts.tolerated
    assert chats.ok and chats.checked == 8


def test_a_wrong_pre_tokenizer_shows_the_first_piece_that_differs(make, tmp_path):
    checkpoint, vocab = make()
    error = refusal(checkpoint, vocab, replace(vocab, pre="qwen2"), tmp_path)
    assert "texts differ" in str(error)
    assert "the source gives" in error.problems[0] and "llama.cpp gives" in error.problems[0]
    assert len(error.problems) == 4 and "more texts differ" in error.problems[3]


def test_swapped_tokens_are_seen(make, tmp_path):
    checkpoint, vocab = make("spm")
    tokens = list(vocab.tokens)
    one, other = tokens.index("the"), tokens.index("and")
    tokens[one], tokens[other] = tokens[other], tokens[one]
    assert "and" in str(refusal(checkpoint, vocab, replace(vocab, tokens=tuple(tokens)), tmp_path))


# case 7, case 8
@pytest.mark.parametrize("text", ["<|im_start|>", "<think>"])
def test_a_marker_that_became_plain_text_is_seen(make, tmp_path, text):
    checkpoint, vocab = make(added_tokens=[("<think>", False)])
    types = list(vocab.token_types)
    types[vocab.tokens.index(text)] = NORMAL
    assert text in str(refusal(checkpoint, vocab, replace(vocab, token_types=tuple(types)), tmp_path))


def test_a_missing_or_doubled_first_token_is_seen(make, tmp_path):
    checkpoint, vocab = make()
    assert vocab.add_bos
    assert "<|begin_of_text|>" in str(refusal(checkpoint, vocab, replace(vocab, add_bos=False), tmp_path))


def test_wrong_scores_are_seen(make, tmp_path):
    checkpoint, vocab = make("spm")
    assert refusal(checkpoint, vocab, replace(vocab, scores=tuple(-score for score in vocab.scores)), tmp_path).problems


# case 45
def test_a_lost_stop_token_is_seen(make, tmp_path):
    checkpoint, vocab = make(added_tokens=[("<|bye|>", True)])
    bye = vocab.tokens.index("<|bye|>")
    wanted = replace(vocab, stop_ids=tuple(sorted({*vocab.stop_ids, bye})))
    assert "'<|bye|>'" in str(refusal(checkpoint, wanted, vocab, tmp_path))


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
def test_another_template_is_seen(make, tmp_path, template):
    checkpoint, vocab = make()
    written = replace(vocab, chat_templates={} if template is None else {"default": template})
    assert "chat template" in str(refusal(checkpoint, vocab, written, tmp_path))
    assert "chat template" in str(refusal(checkpoint, replace(vocab, chat_templates={}), vocab, tmp_path))


def test_a_template_that_refuses_system_turns_is_still_compared(make, tmp_path):
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
    )
    checkpoint, vocab = make(chat_template=template)
    _texts, chats = check_parity(checkpoint, write_vocab_gguf(tmp_path / "right.gguf", vocab), vocab=vocab)
    assert chats.ok and chats.checked > 0


def test_a_template_that_refuses_everything_fails(make, tmp_path):
    checkpoint, vocab = make(chat_template="{{ raise_exception('never') }}")
    model = load_vocab(tmp_path / "right.gguf", vocab)
    result = template_parity(checkpoint, model, vocab=vocab)
    model.close()
    assert not result.ok and "never" in result.problems[0]


def test_no_template_on_either_side_is_nothing_to_compare(make, tmp_path):
    checkpoint, vocab = make(chat_template=None)
    _texts, chats = check_parity(checkpoint, write_vocab_gguf(tmp_path / "right.gguf", vocab), vocab=vocab)
    assert chats.ok and chats.checked == 0


def test_whitespace_that_a_marker_swallows_is_known_and_not_fatal(make, tmp_path):
    checkpoint, vocab = make(added_tokens=[("<|tool|>", True)])
    change(checkpoint.folder / "tokenizer.json", lambda document: document["added_tokens"][-1].update(rstrip=True, lstrip=True))
    vocab = read_vocab(Checkpoint.open(checkpoint.folder))
    assert "Whitespace beside <|tool|>" in vocab.warnings[0]
    texts, _chats = check_parity(checkpoint, write_vocab_gguf(tmp_path / "right.gguf", vocab), vocab=vocab)
    assert texts.tolerated and {one.lenient for one in texts.tolerated} == {"whitespace beside a marker"}


def test_without_a_vocabulary_the_file_says_which_name_was_given_by_hand(make, tmp_path):
    checkpoint = Checkpoint.open(tiny(tmp_path / "unknown", "llama", tokenizer="unknown"))
    written = read_vocab(checkpoint, pre="gpt-2")
    with pytest.raises(ConversionFailed, match="does not treat text as the tokenizer of the source"):
        check_parity(checkpoint, write_vocab_gguf(tmp_path / "by_hand.gguf", written))


def test_the_probes_hold_what_they_are_for():
    texts = [probe.text for probe in probes(["<|m|>"], [], ["sample"], approximate=False)]
    assert len(set(texts)) == len(texts) >= len(PLAIN) + len(CASED) + 8
    assert {"<|m|>", "a<|m|>b", " <|m|> ", "sample"} <= set(texts)
    assert all("\0" not in text and text.encode("utf-8") for text in texts)
    assert not any(probe.lenient for probe in probes(["<|m|>"], [], [], approximate=False))
    lenient = {probe.text for probe in probes([], [], [], approximate=True) if probe.lenient}
    assert {"приВЕТ МиР", "e\u0301", "ÀB cÉD ǅ ǈx"} <= lenient and not {"Hello world", "Привет, как дела?", "日本語のテキスト。カタカナひらがな"} & lenient


def test_a_mismatch_is_described_around_its_first_difference():
    found = Mismatch("x" * 200, tuple(range(10)), (0, 1, 2, 9), 3)
    said = found.describe(tuple("abcdefghij"))
    assert "differs from token 3 on" in said and "1:'b' 2:'c' 3:'d'" in said and "2:'c' 9:'j'" in said and "0:'a'" not in said and "..." in said
    assert "nothing" in Mismatch("", (), (1,), 0).describe(("a", "b"))


@pytest.mark.parametrize(("text", "options", "wanted"), [
    ("e\u0301", {"normalizer": "NFC"}, "é"),
    ("e\u0301", {}, "e\u0301"),
    ("word", {"space_prefix": "first"}, " word"),
    (" word", {"space_prefix": "first"}, " word"),
    ("\u2581word", {"space_prefix": "first"}, "\u2581word"),
    ("word", {"space_prefix": "first", "first": False}, "word"),
    ("", {"space_prefix": "first"}, ""),
])
def test_what_is_done_to_a_text_before_llama_cpp(text, options, wanted):
    assert prepare_text(text, **options) == wanted


@pytest.fixture(scope="module")
def spm(tmp_path_factory):
    """Both sides of a SentencePiece-style vocabulary whose scores come from its merges."""
    folder = tmp_path_factory.mktemp("spm")
    checkpoint = Checkpoint.open(tiny(folder / "model", "llama", tokenizer="spm", added_tokens=[("<think>", False)]))
    vocab = read_vocab(checkpoint)
    model = load_vocab(folder / "vocabulary.gguf", vocab)
    yield reference_tokenizer(checkpoint, vocab), model
    model.close()


_pieces = st.sampled_from(["<think>", "<|im_end|>", "</s>", " ", "  ", "\n", "the", "tion", "capital", "to", "wa", "é", "日", "\u2581", "🙂", "12"])
_any = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
_texts = st.one_of(_any, st.lists(_pieces, max_size=20).map("".join))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=_texts)
@example(text=" ")
@example(text="<think> <think>")
def test_scores_from_merges_join_as_the_merges_do(spm, text):
    reference, model = spm
    assert model.tokenize(text, add_special=True, parse_special=True) == reference.encode(text, add_special=True)


def test_a_control_token_is_reached_only_as_a_marker(make, tmp_path):
    """With parse_special off its text is text: the ids are those of its characters."""
    checkpoint, vocab = make("smollm")
    model = load_vocab(tmp_path / "right.gguf", vocab)
    ids = model.tokenize("<|im_end|>", add_special=False, parse_special=False)
    model.close()
    assert len(ids) > 1 and not any(vocab.token_types[token] == CONTROL for token in ids)


@pytest.mark.parametrize("sentencepiece", ["none", "also", "only"])
@pytest.mark.parametrize("added_tokens", [(), (("<tool>", False),)])
def test_markers_that_swallow_whitespace_agree_whatever_the_files(tmp_path, sentencepiece: str, added_tokens) -> None:
    """Phi-3's markers drop the whitespace after them, whether tokenizer.json or tokenizer.model with its config says so."""
    folder = tiny(tmp_path / "model", "phi3", tokenizer="spm-phi3", sentencepiece=sentencepiece, added_tokens=added_tokens)
    convert(folder, "gguf-f16", tmp_path / "out.gguf")
