"""Stop tokens: whatever file of the source names one, llama.cpp stops there."""

from __future__ import annotations

import json

import pytest
from tiny import tiny
from vocab_folders import change, ends_generation

from edgeinfer.convert.stop_tokens import KNOWN_TO_LLAMA_CPP
from edgeinfer.convert.vocab import STOP_KEY, read_vocab
from edgeinfer.errors import ConversionFailed
from edgeinfer.models.checkpoint import Checkpoint

ADDED = [(f"<|stop{number}|>", True) for number in range(5)]


def folder_with(tmp_path, *, template="{{ messages[0].content }}", tokenizer="llama-bpe", config=(), generation=(), added=ADDED):
    """A checkpoint whose tokenizer ends at <|end_of_text|> and whose files list the given texts as further ends."""
    folder = tiny(tmp_path / "model", "llama", tokenizer=tokenizer, added_tokens=added, chat_template=template)
    decoder = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    ids = {entry["content"]: int(token) for token, entry in decoder.items()}
    change(folder / "config.json", lambda content: content.update(eos_token_id=[ids[text] for text in config] or None))
    change(folder / "generation_config.json", lambda content: content.update(eos_token_id=[ids[text] for text in generation] or None))
    return folder, ids


# case 45
@pytest.mark.parametrize("place", ["tokenizer", "config", "generation", "template", "special_tokens_map", "number"])
def test_one_stop_token_in_one_place_only(tmp_path, place):
    marker = "<|eot_id|>" if place == "template" else "<|stop0|>"
    folder, ids = folder_with(
        tmp_path,
        template="{{ messages[0].content }}<|eot_id|>" if place == "template" else "{{ messages[0].content }}",
        config=[marker] if place == "config" else (),
        generation=[marker] if place == "generation" else (),
    )
    if place == "tokenizer":
        change(folder / "tokenizer_config.json", lambda config: config.update(eos_token={"content": marker, "special": True}))
    if place == "special_tokens_map":
        change(folder / "tokenizer_config.json", lambda config: config.pop("eos_token"))
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": marker}}))
    if place == "number":
        change(folder / "config.json", lambda config: config.update(eos_token_id=ids[marker]))
    vocab = read_vocab(Checkpoint.open(folder))
    assert ids[marker] in vocab.stop_ids and not vocab.unreached_stop_ids
    assert set(vocab.stop_ids) <= ends_generation(tmp_path, vocab)


# case 45
def test_a_turn_end_that_is_not_eos_gets_its_own_key(tmp_path):
    folder, ids = folder_with(tmp_path, template="<|im_start|>{{ messages[0].content }}<|im_end|>")
    vocab = read_vocab(Checkpoint.open(folder))
    written = {entry.key: entry.value for entry in vocab.metadata()}
    assert written["tokenizer.ggml.eos_token_id"] == ids["<|end_of_text|>"]
    assert written["tokenizer.ggml.eot_token_id"] == ids["<|im_end|>"]
    assert STOP_KEY not in written
    assert set(vocab.stop_ids) <= ends_generation(tmp_path, vocab)


# case 45
def test_three_lists_are_united(tmp_path):
    folder, ids = folder_with(tmp_path, config=["<|end_of_text|>", "<|stop1|>"], generation=["<|stop1|>", "<|stop2|>"])
    vocab = read_vocab(Checkpoint.open(folder))
    wanted = {ids[text] for text in ("<|end_of_text|>", "<|stop1|>", "<|stop2|>")}
    assert set(vocab.stop_ids) == wanted <= ends_generation(tmp_path, vocab)
    assert not vocab.unreached_stop_ids and vocab.warnings == ()


# case 45
def test_more_stop_tokens_than_a_gguf_has_keys_for_are_stored_and_said(tmp_path):
    folder, ids = folder_with(tmp_path, config=[text for text, _special in ADDED], generation=["<|eot_id|>"])
    vocab = read_vocab(Checkpoint.open(folder))
    ends = ends_generation(tmp_path, vocab)
    assert set(vocab.unreached_stop_ids) == set(vocab.stop_ids) - ends and len(vocab.unreached_stop_ids) == 3
    written = {entry.key: entry.value for entry in vocab.metadata()}
    assert written[STOP_KEY] == sorted(ids[text] for text in ("<|end_of_text|>", "<|eot_id|>", *dict(ADDED)))
    (warning,) = vocab.warnings
    assert all(repr(vocab.tokens[token]) in warning for token in vocab.unreached_stop_ids)


def test_texts_that_need_no_key_are_known_to_llama_cpp(tmp_path):
    undoing = {"<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>"}       # together these take <|end|> or </s> off the list
    texts = sorted(KNOWN_TO_LLAMA_CPP - undoing)
    folder, ids = folder_with(tmp_path, added=[(text, True) for text in texts if text not in ("<|eot_id|>", "<|im_end|>", "<|end_of_text|>")])
    ends = ends_generation(tmp_path, read_vocab(Checkpoint.open(folder)))
    assert {text for text in texts if ids[text] not in ends} == set()


def test_a_stop_token_that_does_not_exist_is_refused(tmp_path):
    folder, _ids = folder_with(tmp_path)
    change(folder / "generation_config.json", lambda config: config.update(eos_token_id=[99999]))
    with pytest.raises(ConversionFailed, match="stops at token 99999"):
        read_vocab(Checkpoint.open(folder))


def test_a_model_without_any_end_is_refused(tmp_path):
    folder, _ids = folder_with(tmp_path)
    change(folder / "tokenizer_config.json", lambda config: config.pop("eos_token"))
    with pytest.raises(ConversionFailed, match="No file names a token that ends a text"):
        read_vocab(Checkpoint.open(folder))
