"""Names of pre-tokenizers: each name in the table cuts text as the structure it stands for, and nothing else gets a name."""

from __future__ import annotations

import copy

import pytest
from vocab_folders import differing, parity, put_tokenizer, train_byte_level

from edgeinfer.convert import pretokenizers
from edgeinfer.convert.pretokenizers import APPROXIMATE, NAMES, SPLITS, TABLE, identify
from edgeinfer.errors import ConversionFailed

EXPRESSIONS = {name: expression for expression, name in SPLITS.items()}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT4 = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
DIGITS = {"type": "Digits", "individual_digits": True}


def split(expression: str, **changes) -> dict:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False} | changes


def sequence(*steps: dict) -> dict:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def document(pre_tokenizer, *, ignore_merges: bool = False, normalizer=None) -> dict:
    return {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "model": {"ignore_merges": ignore_merges}}


def structure(steps: tuple[str, ...]) -> dict:
    """The usual way of writing ``steps``."""
    return sequence(*(DIGITS if step == "digit" else split(EXPRESSIONS[step]) for step in steps), BYTE_LEVEL)


@pytest.mark.parametrize(("steps", "ignore_merges"), list(TABLE), ids=lambda value: "+".join(value) if isinstance(value, tuple) else None)
def test_each_name_cuts_as_its_structure_does(tmp_path, steps, ignore_merges):
    from tokenizers import Regex, pre_tokenizers

    def cut(step):
        return pre_tokenizers.Digits(individual_digits=True) if step == "digit" else pre_tokenizers.Split(Regex(EXPRESSIONS[step]), "isolated")

    trained = train_byte_level(
        pre_tokenizers.Sequence([*map(cut, steps), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
        size=2400, added=("<think>",), ignore_merges=ignore_merges,
    )
    vocab, texts, _chats = parity(put_tokenizer(tmp_path / "model", trained, eos_token="<|end|>"), tmp_path)
    assert vocab.pre == TABLE[steps, ignore_merges]
    assert differing(vocab, texts) == []
    assert bool(texts.tolerated) == (vocab.pre in APPROXIMATE)     # the known limits are real ones, and nobody else has them


def test_names_are_names_that_llama_cpp_accepts(tmp_path):
    assert set(TABLE.values()) | APPROXIMATE <= NAMES
    from tokenizers import pre_tokenizers
    from vocab_gguf import load_vocab

    from edgeinfer.convert.vocab import read_vocab
    from edgeinfer.models.checkpoint import Checkpoint

    trained = train_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), size=300)
    checkpoint = Checkpoint.open(put_tokenizer(tmp_path / "model", trained, eos_token="<|end|>", bos_token="<|end|>"))
    for name in sorted(NAMES - {"jina-v2-de", "jina-v2-es", "jina-v2-code"}):       # those three ask for a <mask> token
        load_vocab(tmp_path / "one.gguf", read_vocab(checkpoint, pre=name)).close()


@pytest.mark.parametrize(("name", "wanted"), [
    ("smollm", document(sequence(DIGITS, BYTE_LEVEL | {"use_regex": True}))),
    ("smollm", document(sequence(DIGITS, sequence(split(EXPRESSIONS["gpt2"]), BYTE_LEVEL)))),
    ("gpt-2", document(BYTE_LEVEL | {"use_regex": True})),
    ("gpt-2", document({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True})),          # older files do not say use_regex
    ("llama-bpe", document(sequence(split(EXPRESSIONS["llama3"]), BYTE_LEVEL), ignore_merges=True)),
    ("dbrx", document(sequence(split(EXPRESSIONS["llama3"], behavior="Removed", invert=True), BYTE_LEVEL))),
    ("dbrx", document(sequence(split(GPT4), BYTE_LEVEL))),
    ("qwen2", document(sequence(split(EXPRESSIONS["qwen2"]), BYTE_LEVEL), normalizer={"type": "NFC"})),
    ("tekken", document(sequence(split(EXPRESSIONS["tekken"]), BYTE_LEVEL), ignore_merges=True)),
    ("gpt-4o", document(sequence(split(EXPRESSIONS["o200k"], behavior="Removed", invert=True), BYTE_LEVEL))),
])
def test_ways_in_which_files_write_the_same_cuts(name, wanted):
    found = identify(wanted)
    assert (found.name, found.normalizer) == (name, "NFC" if wanted["normalizer"] else "")


# case 1
@pytest.mark.parametrize(("wanted", "said"), [
    (document(sequence(split(EXPRESSIONS["llama3"]), BYTE_LEVEL | {"use_regex": True}), ignore_merges=True), "llama3 then gpt2"),
    (document(sequence(split(EXPRESSIONS["llama3"].replace("{1,3}", "{1,2}")), BYTE_LEVEL), ignore_merges=True), r"\\p{N}{1,2}"),
    (document(sequence(split(EXPRESSIONS["qwen2"], behavior="Removed"), BYTE_LEVEL)), "behavior=Removed"),
    (document(sequence(split(EXPRESSIONS["qwen2"], behavior="MergedWithPrevious"), BYTE_LEVEL)), "MergedWithPrevious"),
    (document(sequence(split(EXPRESSIONS["qwen2"]), BYTE_LEVEL), ignore_merges=True), "ignore_merges=True"),
    (document(sequence(split(EXPRESSIONS["digits3"], behavior="Removed", invert=True), BYTE_LEVEL)), "invert=True"),
    (document(BYTE_LEVEL | {"use_regex": True, "add_prefix_space": True}), "add_prefix_space=True"),
    (document(sequence({"type": "Digits", "individual_digits": False}, BYTE_LEVEL | {"use_regex": True})), "individual_digits=False"),
    (document(sequence({"type": "Punctuation", "behavior": "Contiguous"}, BYTE_LEVEL | {"use_regex": True})), "Punctuation(behavior='Contiguous')"),
    (document(BYTE_LEVEL), "does not cut text at all"),
    (document(None), "does not cut text at all"),
    (document(sequence({"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated", "invert": False}, BYTE_LEVEL)), "'String': ' '"),
])
def test_what_is_not_exactly_known_is_refused_by_the_rule_that_differs(wanted, said):
    with pytest.raises(ConversionFailed) as caught:
        identify(wanted)
    assert said in str(caught.value)
    assert "--pre NAME" in str(caught.value) and all(name in str(caught.value) for name in TABLE.values())


@pytest.mark.parametrize("kinds", [["NFKC"], ["NFD"], ["Lowercase"], ["NFC", "Lowercase"]])
def test_normalisers_other_than_nfc_are_refused_even_by_hand(kinds):
    wanted = document(structure(("gpt2",)), normalizer={"type": "Sequence", "normalizers": [{"type": kind} for kind in kinds]})
    for pre in (None, "gpt-2"):
        with pytest.raises(ConversionFailed, match=", ".join(kinds)):
            identify(copy.deepcopy(wanted), pre=pre)


def test_a_name_by_hand_has_to_exist():
    with pytest.raises(ConversionFailed, match="--pre llama-9 is not a pre-tokenizer"):
        identify(document(None), pre="llama-9")
    assert identify(document(None), pre="starcoder").name == "starcoder"


def test_canonical_leaves_other_expressions_alone():
    assert pretokenizers.canonical(r"a++|b?+") == r"a++|b?+"
