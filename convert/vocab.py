"""The vocabulary of a checkpoint as llama.cpp wants it: read from tokenizer.json or tokenizer.model and everything beside them that names a token."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from edgeinfer.convert import stop_tokens, vocab_tables
from edgeinfer.convert.added_tokens import AddedToken, gather, named_token
from edgeinfer.convert.gguf_metadata import KeyValue
from edgeinfer.convert.pretokenizers import PreTokenizer, identify
from edgeinfer.convert.sentencepiece_model import SentencePieceModel, read_sentencepiece
from edgeinfer.convert.vocab_tables import Table
from edgeinfer.errors import ConversionFailed, ModelDamaged
from edgeinfer.models.checkpoint import Checkpoint
from edgeinfer.models.folder import read_text
from edgeinfer.models.tokenizer_text import NORMALIZER_KEY, SPACE_PREFIX_KEY

STOP_KEY = "edgeinfer.stop_token_ids"


@dataclass(frozen=True)
class GGUFVocab:
    """A vocabulary ready to be written. Tuples are indexed by token id and are as long as the embedding has rows.

    model: "gpt2" (byte-level BPE) or "llama" (SentencePiece-style). scores: None for the first kind; merges: () for the second.
    stop_ids: every token the source stops at; unreached_stop_ids: those that llama.cpp by itself would not stop at.
    normalizer: "" or "NFC", space_prefix: "" or "first" (one space before a text that does not begin with a marker): what whoever feeds llama.cpp
    has to do to a text, because llama.cpp does not. extra: added tokens (id, text, special) that tokenizer.json does not list.
    name_must_contain: what general.name has to contain for llama.cpp to treat whitespace after markers as the source does; "" for nothing.
    """

    model: Literal["gpt2", "llama"]
    pre: str
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    scores: tuple[float, ...] | None
    merges: tuple[str, ...]
    used: int
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    eom_id: int | None
    unk_id: int | None
    pad_id: int | None
    sep_id: int | None
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    stop_ids: tuple[int, ...]
    unreached_stop_ids: tuple[int, ...] = ()
    normalizer: str = ""
    space_prefix: str = ""
    approximate: bool = False
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    added: tuple[AddedToken, ...] = ()
    extra: tuple[tuple[int, str, bool], ...] = ()
    warnings: tuple[str, ...] = ()
    name_must_contain: str = ""

    @property
    def size(self) -> int:
        """Ids, unused ones included."""
        return len(self.tokens)

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    def model_name(self, name: str) -> str:
        """``name`` as general.name has to be.

        llama.cpp takes "phi-3" or "phi3" in it for the whitespace rule of that model's tokenizer, which others must not get.
        """
        if self.name_must_contain:
            return name if self.name_must_contain in name.lower() else f"{name} {self.name_must_contain}"
        return re.sub("(?i)(phi)-?(?=3)", r"\1 ", name)

    def metadata(self) -> list[KeyValue]:
        """The tokenizer.* keys of a GGUF, and ours where llama.cpp has none."""
        keys = [
            KeyValue("tokenizer.ggml.model", "str", self.model),
            KeyValue("tokenizer.ggml.pre", "str", self.pre),
            KeyValue("tokenizer.ggml.tokens", "str[]", list(self.tokens)),
            KeyValue("tokenizer.ggml.token_type", "i32[]", list(self.token_types)),
        ]
        if self.scores is not None:
            keys.append(KeyValue("tokenizer.ggml.scores", "f32[]", list(self.scores)))
        if self.merges:
            keys.append(KeyValue("tokenizer.ggml.merges", "str[]", list(self.merges)))
        ids = {
            "bos": self.bos_id, "eos": self.eos_id, "eot": self.eot_id, "eom": self.eom_id,
            "unknown": self.unk_id, "seperator": self.sep_id, "padding": self.pad_id,      # "seperator" is how the format spells it
        }
        keys += [KeyValue(f"tokenizer.ggml.{name}_token_id", "u32", token) for name, token in ids.items() if token is not None]
        keys += [
            KeyValue("tokenizer.ggml.add_bos_token", "bool", self.add_bos),
            KeyValue("tokenizer.ggml.add_space_prefix", "bool", self.add_space_prefix),
        ]
        if self.add_eos:
            keys.append(KeyValue("tokenizer.ggml.add_eos_token", "bool", True))
        named = [name for name in self.chat_templates if name != "default"]
        if self.chat_template is not None:
            keys.append(KeyValue("tokenizer.chat_template", "str", self.chat_template))
        if named:
            keys.append(KeyValue("tokenizer.chat_templates", "str[]", named))
            keys += [KeyValue(f"tokenizer.chat_template.{name}", "str", self.chat_templates[name]) for name in named]
        if self.unreached_stop_ids:
            keys.append(KeyValue(STOP_KEY, "i32[]", list(self.stop_ids)))
        if self.normalizer:
            keys.append(KeyValue(NORMALIZER_KEY, "str", self.normalizer))
        if self.space_prefix:
            keys.append(KeyValue(SPACE_PREFIX_KEY, "str", self.space_prefix))
        return keys


@dataclass(frozen=True)
class _Read:
    """What the two kinds of file have in common once read."""

    model: Literal["gpt2", "llama"]
    pre: PreTokenizer
    table: Table
    merges: tuple[str, ...]
    prefix: vocab_tables.SpacePrefix
    unk: str | None
    defaults: Mapping[str, int]                          # ids a tokenizer.model itself names
    starts: bool | None                                  # what the file says about adding bos; None when it is silent
    ends: bool | None


def read_vocab(checkpoint: Checkpoint, *, pre: str | None = None) -> GGUFVocab:
    """The vocabulary of an opened checkpoint; no weight is touched. ``pre`` names a byte-level pre-tokenizer by hand.

    Raises `ConversionFailed` whose ``problems`` list everything that is wrong, an unknown pre-tokenizer included. Of a checkpoint with errors (see
    `Checkpoint.inspect`) what can be looked at without the missing parts is; they are no problems of the tokenizer.
    """
    problems: list[str] = []
    document = _document(checkpoint)
    added = gather(checkpoint, document, problems)
    read = _from_json(checkpoint, document, added, pre, problems) if document is not None else _from_proto(checkpoint, added, problems)
    vocab = None if read is None else _assemble(checkpoint, read, added, problems)
    if problems or vocab is None:
        raise ConversionFailed(f"The tokenizer in {checkpoint.folder} cannot be converted:", problems)
    return vocab


def _document(checkpoint: Checkpoint) -> dict[str, Any] | None:
    if checkpoint.tokenizer_json is None:
        return None
    try:
        document = json.loads(read_text(checkpoint.tokenizer_json))
    except (ValueError, RecursionError) as error:
        raise ModelDamaged(f"{checkpoint.tokenizer_json} is not valid JSON: {error}.") from error
    if not isinstance(document, dict):
        raise ModelDamaged(f"{checkpoint.tokenizer_json} must hold a JSON object.")
    return document


def _from_json(
    checkpoint: Checkpoint, document: dict[str, Any], added: dict[int, AddedToken], pre: str | None, problems: list[str]
) -> _Read | None:
    kind = vocab_tables.kind_of(document, problems)
    if kind is None:
        return None
    pairs = vocab_tables.merge_pairs(document["model"], problems)
    starts, ends = _post_processor(document.get("post_processor"))
    unk = document["model"].get("unk_token")
    if kind == "byte-level":
        try:
            found = identify(document, pre=pre)
        except ConversionFailed as error:
            problems += error.problems or [str(error)]
            found = PreTokenizer("default")              # stands in while the rest is looked at
        table = vocab_tables.byte_level_table(document["model"]["vocab"], added, problems)
        merges = tuple(f"{left} {right}" for left, right in pairs)
        return _Read("gpt2", found, table, merges, "never", unk, {}, starts, ends)
    if pre is not None:
        problems.append(f"--pre {pre} is for byte-level vocabularies, and this one is of the SentencePiece kind, which has no pre-tokenizer.")
    prefix = vocab_tables.space_prefix(document, document["model"]["vocab"], problems)
    table = vocab_tables.sentencepiece_table(document, pairs, added, problems)
    return _Read("llama", PreTokenizer("default"), table, (), prefix, unk, {}, starts, ends)


def _from_proto(checkpoint: Checkpoint, added: dict[int, AddedToken], problems: list[str]) -> _Read | None:
    if checkpoint.tokenizer_model is None:
        problems.append("There is neither a tokenizer.json nor a tokenizer.model; saving the tokenizer once with transformers writes the first.")
        return None
    model = read_sentencepiece(checkpoint.tokenizer_model)
    problems += _refusals(model)
    ids = {"unk": model.unk_id, "bos": model.bos_id, "eos": model.eos_id, "pad": model.pad_id}
    table = vocab_tables.proto_table(model, added, problems)
    return _Read("llama", PreTokenizer("default"), table, (), "always" if model.add_dummy_prefix else "never", None, ids, None, None)


def _refusals(model: SentencePieceModel) -> list[str]:
    found = []
    if model.kind != "BPE":
        found.append(f"tokenizer.model is of the {model.kind} kind, and only BPE is used by the supported families.")
    if not model.byte_fallback:
        found.append("tokenizer.model does not fall back to bytes, and llama.cpp's vocabularies of this kind do.")
    if model.normalizes:
        found.append("tokenizer.model normalises text with a character map, which llama.cpp does not apply to BPE vocabularies.")
    if model.remove_extra_whitespaces:
        found.append("tokenizer.model removes repeated spaces, which llama.cpp does not do for BPE vocabularies.")
    return found


def _post_processor(part: dict[str, Any] | None) -> tuple[bool | None, bool | None]:
    """(puts a token before the text, puts one after it), or Nones when there is no template."""
    if part is None:
        return None, None
    if part.get("type") == "Sequence":
        for processor in part.get("processors") or []:
            found = _post_processor(processor)
            if found != (None, None):
                return found
        return None, None
    if part.get("type") != "TemplateProcessing":
        return None, None
    kinds = ["Sequence" if "Sequence" in piece else "SpecialToken" for piece in part.get("single") or []]
    if "Sequence" not in kinds:
        return None, None
    at = kinds.index("Sequence")
    return "SpecialToken" in kinds[:at], "SpecialToken" in kinds[at:]


def _assemble(checkpoint: Checkpoint, read: _Read, added: dict[int, AddedToken], problems: list[str]) -> GGUFVocab | None:
    rows, table = checkpoint.vocab_rows, read.table
    if rows is not None and len(table.texts) > rows:
        more = len(table.texts) - rows
        problems.append(f"The tokenizer has {len(table.texts)} tokens and the embedding has {rows} rows: the last {more} tokens have no weights.")
    size = max(rows or 0, len(table.texts))
    table = vocab_tables.padded(table, size)
    problems += vocab_tables.duplicates(table)
    if not checkpoint.complete:
        return None                                      # a file that may name tokens could not be read
    by_text = {text: token for token, text in enumerate(table.texts)}
    ids = {name: _special_id(checkpoint, name, read, by_text, problems) for name in ("bos", "eos", "unk", "pad", "sep")}
    markers = {token.text: token.id for token in added.values()}
    markers |= {text: token for token, text in enumerate(table.texts) if table.types[token] in (vocab_tables.CONTROL, vocab_tables.USER_DEFINED)}
    configs = [checkpoint.config, checkpoint.generation_config]
    stops = stop_tokens.collect(ids["eos"], configs, checkpoint.chat_template, markers, table.texts)
    if rows is not None:
        beyond = {name: token for name, token in ids.items() if token is not None and token >= size}
        problems += [f"{name}_token_id is {token}, and there are {size} tokens." for name, token in beyond.items()]
        problems += [f"config.json or generation_config.json stops at token {token}, and there are {size}." for token in stops.ids if token >= size]
    if stops.eos is None and named_token(checkpoint, "eos_token") is None:
        # Without a key llama.cpp takes some fixed id for it, and would stop at an ordinary word.
        problems.append("No file names a token that ends a text: set eos_token in tokenizer_config.json or eos_token_id in config.json.")
    starts, ends = _adds(checkpoint, read, ids["bos"])
    if starts and ids["bos"] is None and named_token(checkpoint, "bos_token") is None:
        problems.append("The tokenizer puts a token before every text, and no file says which one is bos_token.")
    if problems:
        return None
    warnings, must_contain = _warnings(read, stops, added, table)
    return GGUFVocab(
        model=read.model,
        pre=read.pre.name,
        tokens=table.texts,
        token_types=table.types,
        scores=table.scores,
        merges=read.merges,
        used=table.used,
        bos_id=ids["bos"],
        eos_id=stops.eos,
        eot_id=stops.eot,
        eom_id=stops.eom,
        unk_id=ids["unk"],
        pad_id=ids["pad"],
        sep_id=ids["sep"],
        add_bos=starts,
        add_eos=ends,
        # llama.cpp puts the space after every marker or nowhere: "only before the first word" is nowhere, and `prepare_text` adds it.
        add_space_prefix=read.prefix == "always",
        stop_ids=stops.ids,
        unreached_stop_ids=stops.unreached,
        normalizer=read.pre.normalizer,
        space_prefix="first" if read.prefix == "first" else "",
        approximate=read.pre.approximate,
        chat_templates=dict(checkpoint.chat_templates),
        added=tuple(added.values()),
        extra=tuple((token.id, token.text, token.special) for token in added.values() if token.source != "tokenizer.json"),
        warnings=warnings,
        name_must_contain=must_contain,
    )


def _special_id(checkpoint: Checkpoint, name: str, read: _Read, by_text: Mapping[str, int], problems: list[str]) -> int | None:
    """The id of a named token: by its text in the tokenizer's files, else by number in config.json, else as tokenizer.model says."""
    text = named_token(checkpoint, f"{name}_token") or (read.unk if name == "unk" else None)
    if text is not None:
        if text not in by_text:
            problems.append(f"{name}_token is {text!r}, which is not in the vocabulary.")
        return by_text.get(text)
    for config in (checkpoint.config, checkpoint.generation_config):
        for token in stop_tokens.as_ids(config.get(f"{name}_token_id"))[:1]:
            # bos in a config says how the model was trained; whether it is added is another question.
            return token
    token = read.defaults.get(name, -1)
    return token if token >= 0 else None


def _adds(checkpoint: Checkpoint, read: _Read, bos_id: int | None) -> tuple[bool, bool]:
    """(add bos, add eos): as the template in tokenizer.json says, else tokenizer_config.json. Families with a tokenizer.model alone add bos."""
    settings = checkpoint.tokenizer_config
    starts, ends = read.starts, read.ends
    if starts is None and isinstance(settings.get("add_bos_token"), bool):
        starts = settings["add_bos_token"]
    if ends is None and isinstance(settings.get("add_eos_token"), bool):
        ends = settings["add_eos_token"]
    if starts is None:
        starts = checkpoint.tokenizer_json is None and bos_id is not None
    return starts, bool(ends)


def _warnings(read: _Read, stops: stop_tokens.StopTokens, added: Mapping[int, AddedToken], table: Table) -> tuple[tuple[str, ...], str]:
    found = []
    if stops.unreached:
        texts = ", ".join(f"{token} {table.texts[token]!r}" for token in stops.unreached)
        found.append(f"A GGUF has room for three stop tokens, so other programs will not stop at {texts}; edgeinfer does ({STOP_KEY}).")
    if read.pre.normalizer:
        found.append(f"llama.cpp does not bring text into form {read.pre.normalizer} as this tokenizer does; edgeinfer does it before.")
    if read.prefix == "first":
        found.append("This tokenizer puts a space before the first word of a prompt only, which llama.cpp cannot; edgeinfer does it before.")
    if read.pre.approximate:
        found.append(f"llama.cpp's {read.pre.name} pre-tokenizer is only close to this one where capitals outside ASCII and combining marks are cut.")
    greedy = [token for token in added.values() if token.lstrip or token.rstrip or token.single_word]
    needed = ("</s>", "<unk>", "<s>", "<|endoftext|>")
    markers = [token for token in added.values() if token.text not in needed[1:]]
    if greedy and read.model == "llama" and set(needed) <= set(table.texts) and all(token.rstrip and not token.lstrip for token in markers):
        return tuple(found), "phi-3"
    if greedy:
        texts = ", ".join(token.text for token in greedy[:6])
        found.append(f"Whitespace beside {texts} is dropped by this tokenizer and kept by llama.cpp.")
    return tuple(found), ""
