"""Parity: the source's own tokenizer and llama.cpp on the converted file must give the same ids, for texts and for rendered chats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edgeinfer.convert.hf_tokenizer import HFTokenizer
from edgeinfer.convert.parity_probes import Probe, probes
from edgeinfer.convert.sentencepiece_tokenizer import SPMTokenizer
from edgeinfer.convert.vocab import GGUFVocab, read_vocab
from edgeinfer.convert.vocab_tables import CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from edgeinfer.errors import BadRequest, ConversionFailed
from edgeinfer.models.checkpoint import Checkpoint
from edgeinfer.models.native import NativeModel, llama
from edgeinfer.models.tokenizer_text import prepare_text

SAMPLED_TOKENS = 400
PROBED_MARKERS = 48
AROUND = 6                                               # ids shown on each side of the first difference
CHATS = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "What is 12 * 345?\n\nShow  it."}],
    [
        {"role": "user", "content": " leading and trailing "},
        {"role": "assistant", "content": "Sure:\n```python\nprint('é 🙂')\n```\n"},
        {"role": "user", "content": "日本語で\u2014please"},
    ],
    [
        {"role": "system", "content": "A\n\nB"}, {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"}, {"role": "assistant", "content": "4"}, {"role": "user", "content": "5"},
    ],
)


class Reference(Protocol):
    """The source's own tokenizer."""

    def encode(self, text: str, *, add_special: bool = False) -> list[int]: ...


@dataclass(frozen=True)
class Mismatch:
    """One text that came out differently. ``at``: index of the first id that differs. ``lenient``: why that is known and not fatal, or ""."""

    text: str
    expected: tuple[int, ...]
    got: tuple[int, ...]
    at: int
    lenient: str = ""

    def describe(self, texts: tuple[str, ...]) -> str:
        """Two lines of ids with their texts around the first difference."""
        start = max(0, self.at - 2)

        def shown(ids: tuple[int, ...]) -> str:
            window = ids[start : self.at + AROUND]
            return " ".join(f"{token}:{texts[token]!r}" if 0 <= token < len(texts) else str(token) for token in window) or "nothing"

        text = self.text if len(self.text) <= 80 else self.text[:77] + "..."
        return f"{text!r} differs from token {self.at} on: the source gives {shown(self.expected)}, llama.cpp gives {shown(self.got)}."


@dataclass(frozen=True)
class ParityResult:
    """``checked`` texts were compared; ``mismatches`` are fatal, ``tolerated`` are known limits of llama.cpp. ``problems`` is neither: sentences."""

    checked: int
    mismatches: tuple[Mismatch, ...] = ()
    tolerated: tuple[Mismatch, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.mismatches and not self.problems


def tokenizer_parity(
    checkpoint: Checkpoint, model: NativeModel, *, vocab: GGUFVocab | None = None, reference: Reference | None = None
) -> ParityResult:
    """Compare ids on the fixed probes, on this vocabulary's markers and on a sample of its tokens, and what is put before and after a text.

    ``model`` may be loaded with ``vocab_only``. Raises what `read_vocab` raises when no ``vocab`` is given.
    """
    vocab = vocab or _vocab(checkpoint, model)
    reference = reference or reference_tokenizer(checkpoint, vocab)
    mismatches, tolerated = [], []
    tried = probes(_markers(vocab), _stripping(vocab), _samples(vocab, model), approximate=vocab.approximate)
    for probe in tried:
        found = _compare(probe, reference, model, vocab)
        if found is not None:
            (tolerated if found.lenient else mismatches).append(found)
    for text in ("Hello world", ""):
        found = _compare(Probe(text), reference, model, vocab, add_special=True)
        if found is not None:
            mismatches.append(found)
    problems = [
        f"The source stops at token {token} ({vocab.tokens[token]!r}), and neither llama.cpp nor the key for it does."
        for token in vocab.stop_ids
        if token not in vocab.unreached_stop_ids and not llama().llama_vocab_is_eog(model.vocab, token)
    ]
    return ParityResult(len(tried) + 2, tuple(mismatches), tuple(tolerated), tuple(problems))


def template_parity(
    checkpoint: Checkpoint, model: NativeModel, *, vocab: GGUFVocab | None = None, reference: Reference | None = None
) -> ParityResult:
    """Compare the stored template with the source's, and the ids of several rendered chats. Without a template there is nothing to compare."""
    from edgeinfer.models.chat_template import ChatTemplate

    vocab = vocab or _vocab(checkpoint, model)
    source = vocab.chat_template
    stored = _stored_template(model)
    if source is None:
        return ParityResult(0, problems=() if stored is None else ("The converted file has a chat template, and the source has none.",))
    if stored != source:
        return ParityResult(0, problems=("The chat template in the converted file is not the source's.",))
    reference = reference or reference_tokenizer(checkpoint, vocab)
    names = {name: "" if token is None else vocab.tokens[token] for name, token in (("bos_text", vocab.bos_id), ("eos_text", vocab.eos_id))}
    template = ChatTemplate(source, **names)
    texts, refused = [], ""
    for messages in CHATS:
        for generate in (True, False):
            try:
                texts.append(template.render(messages, add_generation_prompt=generate))
            except BadRequest as error:                  # a template may refuse a kind of chat, but not all of them
                refused = str(error)
    if not texts:
        return ParityResult(0, problems=(refused,))
    strips = "whitespace beside a marker" if _stripping(vocab) else ""
    found = [_compare(Probe(text, strips), reference, model, vocab) for text in texts]
    return ParityResult(
        len(texts), tuple(one for one in found if one and not one.lenient), tuple(one for one in found if one and one.lenient)
    )


def check_parity(checkpoint: Checkpoint, path: Path, *, vocab: GGUFVocab | None = None) -> tuple[ParityResult, ParityResult]:
    """`tokenizer_parity` and `template_parity` of a written file. Raises `ConversionFailed` with the first texts or chats that differ."""
    with _opened(path) as model:
        vocab = vocab or _vocab(checkpoint, model)
        reference = reference_tokenizer(checkpoint, vocab)
        tokenizer = tokenizer_parity(checkpoint, model, vocab=vocab, reference=reference)
        _require(tokenizer, vocab, "the tokenizer")
        template = template_parity(checkpoint, model, vocab=vocab, reference=reference)
        _require(template, vocab, "the chat template")
    return tokenizer, template


def _require(result: ParityResult, vocab: GGUFVocab, what: str) -> ParityResult:
    if not result.ok:
        shown = [*result.problems, *(one.describe(vocab.tokens) for one in result.mismatches[:3])]
        more = len(result.mismatches) - 3
        raise ConversionFailed(
            f"The converted file does not treat text as {what} of the source does ({len(result.mismatches)} of {result.checked} texts differ):",
            shown + ([f"{more} more texts differ."] if more > 0 else []),
        )
    return result


def reference_tokenizer(checkpoint: Checkpoint, vocab: GGUFVocab) -> Reference:
    """The source's own tokenizer: tokenizer.json with every added token of the folder, or tokenizer.model where there is nothing else."""
    if checkpoint.tokenizer_json is not None:
        return HFTokenizer(checkpoint.tokenizer_json, vocab.extra)
    markers = {vocab.tokens[token]: token for token, kind in enumerate(vocab.token_types) if kind in (CONTROL, USER_DEFINED, UNKNOWN)}
    return SPMTokenizer(
        checkpoint.tokenizer_model,
        markers,
        bos_id=vocab.bos_id if vocab.add_bos else None,
        lstrip={token.text for token in vocab.added if token.lstrip},
        rstrip={token.text for token in vocab.added if token.rstrip},
    )


@contextmanager
def _opened(path: Path) -> Iterator[NativeModel]:
    model = NativeModel(path, vocab_only=True)
    try:
        yield model
    finally:
        model.close()


def _vocab(checkpoint: Checkpoint, model: NativeModel) -> GGUFVocab:
    # The name in the file may have been given by hand, and the rules alone would not lead to it.
    byte_level = model.metadata("tokenizer.ggml.model") == "gpt2"
    return read_vocab(checkpoint, pre=model.metadata("tokenizer.ggml.pre") if byte_level else None)


def _compare(probe: Probe, reference: Reference, model: NativeModel, vocab: GGUFVocab, *, add_special: bool = False) -> Mismatch | None:
    first = not any(probe.text.startswith(token.text) for token in vocab.added)
    text = prepare_text(probe.text, normalizer=vocab.normalizer, space_prefix=vocab.space_prefix, first=first)
    expected = reference.encode(probe.text, add_special=add_special)
    got = model.tokenize(text, add_special=add_special, parse_special=True)
    if expected == got:
        return None
    at = next((place for place, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got)))
    return Mismatch(probe.text, tuple(expected), tuple(got), at, probe.lenient)


def _markers(vocab: GGUFVocab) -> list[str]:
    """All markers of a small vocabulary; of one with hundreds of reserved ones, those with a role and a spread of the rest."""
    texts = [vocab.tokens[token] for token, kind in enumerate(vocab.token_types[: vocab.used]) if kind in (CONTROL, USER_DEFINED)]
    roles = [vocab.tokens[token] for token in (vocab.bos_id, vocab.pad_id, *vocab.stop_ids) if token is not None]
    rest = [text for text in texts if text not in roles]
    step = max(1, len(rest) // PROBED_MARKERS)
    return [text for text in roles if text in texts] + rest[::step]


def _stripping(vocab: GGUFVocab) -> list[str]:
    return [] if vocab.name_must_contain else [token.text for token in vocab.added if token.lstrip or token.rstrip or token.single_word]


def _samples(vocab: GGUFVocab, model: NativeModel) -> list[str]:
    """What a spread of normal tokens prints; those that are no whole characters are left out."""
    normal = [token for token, kind in enumerate(vocab.token_types[: vocab.used]) if kind == NORMAL]
    texts = []
    for token in normal[:: max(1, len(normal) // SAMPLED_TOKENS)]:
        try:
            texts.append(model.token_bytes(token).decode("utf-8"))
        except UnicodeDecodeError:
            continue
    return [text for text in texts if text]


def _stored_template(model: NativeModel) -> str | None:
    text = llama().llama_model_chat_template(model.handle, None)
    return None if text is None else text.decode("utf-8", "replace")
