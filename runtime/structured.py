"""The one door to llguidance: answers that follow a JSON schema, a regular expression or a grammar.

What is asked for is compiled in the caller's thread, once for each source, and remembered; unless it is short and simple it is tried in a process of
its own first (`grammar_check`). The rule is to fail closed: whatever llguidance does not support exactly is a `BadRequest` that names the place, and
nothing is ignored or approximated. Values end at their last character: no white space follows, and between the tokens of JSON it is bounded.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from edgeinfer.errors import BackendFailed, BadRequest, EngineBusy
from edgeinfer.runtime.backend import Vocab
from edgeinfer.runtime.gbnf import gbnf_to_lark
from edgeinfer.runtime.grammar_check import first_failure
from edgeinfer.runtime.json_schema import parts, place, schema_text

MAX_SOURCE = 64 * 1024                   # characters of a regular expression or a grammar
MAX_DEPTH = 64                           # brackets inside one another
MAX_REMEMBERED = 128                     # compiled constraints
_PATIENCE = 10.0                         # seconds that a request waits for others to be compiled
_LOCATING = 3.0                          # seconds to find the part of a schema that is at fault, and the largest one that is searched
_LOCATED = 16 * 1024
_TRIED_TOKENS = 8
_SIMPLE = 2_000                          # characters of a schema that is compiled without trying, if it has none of the keywords that may take long
_INTRICATE = re.compile(r'"(pattern|patternProperties|multipleOf|allOf|format)"')
# Seconds of computing that the masks of one answer may take: to begin with, and more for each token. Far above what schemas and sane grammars need.
_MASKS, _MASKS_PER_TOKEN = 1.0, 0.01
_LIMITS = {"initial_lexer_fuel": 200_000, "step_lexer_fuel": 50_000, "step_max_items": 50_000, "max_items_in_row": 2_000, "max_lexer_states": 50_000}
# Tokens that llguidance allows or refuses together where an expression takes all of them: beside its own, which are made for JSON, words as regular
# expressions know them. Without these each such mask walks through the whole vocabulary.
_WORDS = "[a-zA-Z ]{1,20}"
_CHECK = f"""
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

class Bytes:
    eos_token_id, bos_token_id, special_token_ids = 256, None, [256]
    tokens = [bytes([value]) for value in range(256)] + [b"<end>"]

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())

tokenizer = LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=257)

def check(source):
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(verbose_errors=False, **{_LIMITS!r}))
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error()
"""
# A schema's own "x-guidance" is removed, so that these hold. Enough white space for a pretty-printed value, an end to a model that writes nothing else.
_JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\t]{1,32}", "lenient": False, "coerce_one_of": False}


class Grammars:
    """Compiles constraints for one vocabulary. Thread-safe; each method may take up to a second where the source is new and large.

    All raise `BadRequest` for what is malformed, too large or not supported, and `EngineBusy` where others' sources take too long to compile.
    """

    def __init__(self, vocab: Vocab, n_vocab: int):
        self._vocab = vocab
        self._n_vocab = n_vocab
        self._compiled: OrderedDict[tuple[str, str], CompiledConstraint] = OrderedDict()
        self._lookup = threading.Lock()
        self._trying = threading.Lock()                  # one at a time: a flood of new sources does not take every core
        self._building = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def json_schema(self, schema: dict[str, Any] | bool) -> CompiledConstraint:
        """JSON values that the schema (draft 2020-12 and what it kept of earlier ones) admits."""
        if schema is False:
            raise BadRequest("The schema false admits no value.")
        if schema is not True and not isinstance(schema, dict):
            raise BadRequest(f"A JSON schema must be an object or true, not {schema!r}."[:200])
        schema = {} if schema is True else {key: value for key, value in schema.items() if key != "x-guidance"}
        source = schema_text(schema)
        simple = len(source) <= _SIMPLE and not _INTRICATE.search(source)
        return self._remembered("JSON schema", source, lambda: _schema_grammar(source), simple=simple, where=lambda: _locate(schema, simple))

    def json_object(self) -> CompiledConstraint:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def regex(self, pattern: str) -> CompiledConstraint:
        """Texts that the whole of a regular expression matches (Rust's syntax: no look-around, no back-references)."""
        source = _text("regular expression", pattern)
        return self._remembered("regular expression", source, lambda: LLMatcher.grammar_from_regex(source))

    def lark(self, source: str, *, simple: bool = False) -> CompiledConstraint:
        """Texts of a Lark grammar in llguidance's dialect; its first rule is ``start``. It can name no control tokens: they are not text.

        simple: a grammar of our own making, of literals and of schemas that `json_schema` has taken. It may name control tokens.
        """
        source = _text("grammar", source)
        return self._remembered("Lark grammar", source, lambda: LLMatcher.grammar_from_lark(source), simple=simple)

    def gbnf(self, source: str) -> CompiledConstraint:
        """Texts of a grammar in llama.cpp's GBNF; its first rule is ``root``."""
        source = _text("grammar", source)
        return self._remembered("GBNF grammar", source, lambda: LLMatcher.grammar_from_lark(gbnf_to_lark(source)))

    # ----------------------------------------------------------------------------------------------------------- internals

    def _remembered(
        self, kind: str, source: str, grammar: Callable[[], str], *, simple: bool = False, where: Callable[[], str] = lambda: ""
    ) -> CompiledConstraint:
        key = (kind, source)
        found = self._find(key)
        if found is not None:
            return found
        if not simple and not self._trying.acquire(timeout=_PATIENCE):
            raise EngineBusy("Other schemas and grammars are being compiled; try again in a moment.")
        try:
            found = self._find(key) or self._compile(kind, grammar(), simple, where)     # another one, waited for, may have wanted the same
        finally:
            if not simple:
                self._trying.release()
        with self._lookup:
            self._compiled[key] = found
            while len(self._compiled) > MAX_REMEMBERED:
                self._compiled.popitem(last=False)
        return found

    def _compile(self, kind: str, grammar: str, simple: bool, where: Callable[[], str]) -> CompiledConstraint:
        failure = None if simple else first_failure(_CHECK, [grammar])
        if failure is not None:
            raise BadRequest(f"The {kind} cannot be used{where()}: {_one_line(failure[1])}.")
        matcher = LLMatcher(self._llguidance(), grammar, log_level=0, limits=LLParserLimits(verbose_errors=False, **_LIMITS))
        if matcher.is_error():
            raise BadRequest(f"The {kind} cannot be used{where()}: {_one_line(matcher.get_error())}.")
        constraint = CompiledConstraint(matcher, self._n_vocab)
        self._try_out(constraint, kind)
        return constraint

    def _try_out(self, constraint: CompiledConstraint, kind: str) -> None:
        """Follow it for a few tokens: what cannot be followed is better refused now."""
        state = constraint.start()
        try:
            for step in range(_TRIED_TOKENS):
                possible = np.flatnonzero(np.unpackbits(state.allowed(), count=self._n_vocab, bitorder="little"))
                if not len(possible) and not step:
                    raise BadRequest(f"The {kind} admits no text.")
                token = next((int(token) for token in possible if token not in self._vocab.end_ids), None)
                if token is None:
                    return
                state.accept(token)
                if state.complete:
                    return
        except BackendFailed as error:
            raise BadRequest(f"The {kind} cannot be used: it admits no text, or is too complex to follow.") from error

    def _find(self, key: tuple[str, str]) -> CompiledConstraint | None:
        with self._lookup:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
            return found

    def _llguidance(self) -> LLTokenizer:
        with self._building:
            if self._tokenizer is None:
                wrapper = TokenizerWrapper(_Tokens(self._vocab, self._n_vocab))
                slices = [*LLTokenizer.general_slices(), _WORDS]
                self._tokenizer = LLTokenizer(wrapper, n_vocab=self._n_vocab, eos_token=sorted(self._vocab.end_ids), slices=slices)
            return self._tokenizer


class CompiledConstraint:
    """See `edgeinfer.runtime.constraint.Constraint`."""

    def __init__(self, matcher: LLMatcher, n_vocab: int):
        self._matcher = matcher                          # never advanced, only copied
        self._n_vocab = n_vocab
        self._copying = threading.Lock()

    def start(self) -> _State:
        with self._copying:
            return _State(self._matcher.deep_copy(), self._n_vocab)


class _State:
    """See `edgeinfer.runtime.constraint.ConstraintState`."""

    def __init__(self, matcher: LLMatcher, n_vocab: int):
        self._matcher = matcher
        words = np.zeros((n_vocab + 31) // 32, np.uint32)
        self._address, self._bytes = words.ctypes.data, words.nbytes
        self._mask = words.view(np.uint8)[: (n_vocab + 7) // 8]
        self._seconds = _MASKS

    def allowed(self) -> np.ndarray:
        began = time.thread_time()                       # of this thread alone: a busy machine is not the grammar's fault
        self._matcher.unsafe_compute_mask_ptr(self._address, self._bytes)
        self._seconds += began - time.thread_time()
        self._check()
        return self._mask

    def accept(self, token: int) -> None:
        began = time.thread_time()
        followed = self._matcher.consume_token(token)
        self._seconds += began - time.thread_time() + _MASKS_PER_TOKEN
        self._check()
        if not followed:
            raise BackendFailed(f"Token {token} does not follow the grammar of this answer.")

    def _check(self) -> None:
        if self._seconds < 0:
            raise BackendFailed("The grammar of this answer takes too long to follow; make it less ambiguous.")
        if self._matcher.is_error():
            raise BackendFailed(f"The grammar of this answer is too complex to follow: {_one_line(self._matcher.get_error())}.")

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped()


class _Tokens:
    """A vocabulary in the form that llguidance asks for. Control tokens are special: no text, however constrained, turns into one."""

    def __init__(self, vocab: Vocab, n_vocab: int):
        self._vocab = vocab
        pieces = [vocab.token_bytes(token) for token in range(n_vocab)]
        control = {token for token, piece in enumerate(pieces) if not piece and vocab.token_text(token)} | vocab.end_ids
        self.special_token_ids = sorted(control)
        self.tokens = [vocab.token_text(token).encode() if token in control else piece for token, piece in enumerate(pieces)]
        self.eos_token_id = vocab.eos_id if vocab.eos_id is not None else min(vocab.end_ids)
        self.bos_token_id = vocab.bos_id
        self._by_bytes = {piece: token for token, piece in enumerate(pieces) if piece and token not in control}
        self._longest = max(map(len, self._by_bytes), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids of text that a grammar forces; exactly its bytes, also where the vocabulary puts a space before every text."""
        data = text.encode() if isinstance(text, str) else text
        ids = self._vocab.encode(data.decode("utf-8", "replace"), add_special=False, parse_special=False, opening=False)
        if b"".join(map(self._vocab.token_bytes, ids)) == data:
            return ids
        ids = []
        while data:
            size = next((size for size in range(min(self._longest, len(data)), 0, -1) if data[:size] in self._by_bytes), 0)
            if not size:
                break                                    # llguidance spells the rest byte by byte
            ids.append(self._by_bytes[data[:size]])
            data = data[size:]
        return ids


# ------------------------------------------------------------------------------------------------------------------ sources


def _text(kind: str, source: str) -> str:
    if not isinstance(source, str):
        raise BadRequest(f"A {kind} must be a string, not {source!r}."[:200])
    if len(source) > MAX_SOURCE:
        raise BadRequest(f"The {kind} has {len(source):,} characters; at most {MAX_SOURCE:,} are accepted.")
    depth = deepest = 0
    for character in source:
        depth += (character in "([{") - (character in ")]}" and depth > 0)
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise BadRequest(f"The {kind} has brackets inside one another {deepest} deep; at most {MAX_DEPTH} are accepted.")
    return source


def _schema_grammar(source: str) -> str:
    return LLMatcher.grammar_from_json_schema(source, overrides=_JSON_OPTIONS)


def _locate(schema: dict[str, Any], simple: bool) -> str:
    """Where in a schema that does not compile the fault is: the deepest part that on its own does not compile either."""
    if len(json.dumps(schema)) > _LOCATED:
        return ""
    at, path = schema, ""
    until = time.monotonic() + _LOCATING
    while (left := until - time.monotonic()) > 0:
        inside = parts(at, schema)
        grammars = [_schema_grammar(json.dumps(part)) for _, part in inside]
        failure = _first_failure_here(grammars) if simple else first_failure(_CHECK, grammars, left)
        if failure is None:
            break
        step, at = inside[failure[0]]
        at = {key: value for key, value in at.items() if key not in ("$defs", "definitions")}        # they are looked at once
        path += step
    return place(path)


def _first_failure_here(grammars: list[str]) -> tuple[int, str] | None:
    errors = (LLMatcher.validate_grammar_with_warnings(grammar, limits=LLParserLimits(verbose_errors=False, **_LIMITS)) for grammar in grammars)
    return next(((index, messages[0]) for index, (wrong, messages) in enumerate(errors) if wrong), None)


_REGEX_ERROR = re.compile(r"regex parse error:\s*(.*?)\n\s*\^+\s*error: (.*)", re.DOTALL)


def _one_line(error: str) -> str:
    """llguidance's message as the end of a sentence."""
    error = error.replace("<non-verbose/>", "")
    if error.startswith("NoExtension"):
        return "it admits no text"
    if error.startswith("oneOf constraints are not supported"):
        return "of oneOf's alternatives no two may admit the same value; use anyOf where that does no harm"
    error = _REGEX_ERROR.sub(lambda found: f"in the regular expression {found[1].strip()}: {found[2]}", error)
    return " ".join(error.split()).rstrip(".")[:300]
