"""The one door to llguidance: answers that follow a JSON schema, a regular expression or a grammar.

What is asked for is compiled in the caller's thread, once for each source, and remembered. The rule is to fail closed: whatever llguidance does not
support exactly is a `BadRequest` that names the place; nothing is ignored or approximated. The values end at their last character: no white space
follows, and between the tokens of JSON there is a bounded amount of it.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from edgeinfer.errors import BackendFailed, BadRequest, EngineBusy
from edgeinfer.runtime.backend import Vocab
from edgeinfer.runtime.gbnf import gbnf_to_lark

MAX_SCHEMA = 256 * 1024                  # characters of JSON
MAX_SOURCE = 64 * 1024                   # characters of a regular expression or a grammar
MAX_DEPTH = 64                           # objects and lists inside one another in a schema; brackets in a grammar
MAX_REMEMBERED = 128                     # compiled constraints
_MAX_MULTIPLE = 10_000                   # compiling multipleOf takes time and memory in proportion
_PATIENCE = 10.0                         # seconds that a request waits for others to be compiled
_SEARCHED = 200                          # parts of a schema that are looked at to find the one at fault
# What one mask may take: about 5 ms for the heaviest expressions that are accepted.
_LIMITS = LLParserLimits(initial_lexer_fuel=200_000, step_lexer_fuel=50_000, step_max_items=50_000, verbose_errors=False)
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
        self._compiling = threading.Lock()               # one at a time: a flood of new sources does not take every core
        self._tokenizer: LLTokenizer | None = None

    def json_schema(self, schema: dict[str, Any] | bool) -> CompiledConstraint:
        """JSON values that the schema (draft 2020-12 and what it kept of earlier ones) admits."""
        if schema is False:
            raise BadRequest("The schema false admits no value.")
        if schema is not True and not isinstance(schema, dict):
            raise BadRequest(f"A JSON schema must be an object or true, not {schema!r}."[:200])
        schema = {} if schema is True else {key: value for key, value in schema.items() if key != "x-guidance"}
        source = _schema_text(schema)
        return self._remembered("JSON schema", source, lambda: _schema_grammar(source), lambda error: _locate(schema, error))

    def json_object(self) -> CompiledConstraint:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def regex(self, pattern: str) -> CompiledConstraint:
        """Texts that the whole of a regular expression matches (Rust's syntax: no look-around, no back-references)."""
        source = _text("regular expression", pattern)
        return self._remembered("regular expression", source, lambda: LLMatcher.grammar_from_regex(source))

    def lark(self, source: str) -> CompiledConstraint:
        """Texts of a Lark grammar in llguidance's dialect; its first rule is ``start``."""
        source = _text("grammar", source)
        return self._remembered("Lark grammar", source, lambda: LLMatcher.grammar_from_lark(source))

    def gbnf(self, source: str) -> CompiledConstraint:
        """Texts of a grammar in llama.cpp's GBNF; its first rule is ``root``."""
        source = _text("grammar", source)
        return self._remembered("GBNF grammar", source, lambda: LLMatcher.grammar_from_lark(gbnf_to_lark(source)))

    # ----------------------------------------------------------------------------------------------------------- internals

    def _remembered(
        self, kind: str, source: str, grammar: Callable[[], str], place: Callable[[str], str] = lambda error: ""
    ) -> CompiledConstraint:
        key = (kind, source)
        found = self._find(key)
        if found is not None:
            return found
        if not self._compiling.acquire(timeout=_PATIENCE):
            raise EngineBusy("Other schemas and grammars are being compiled; try again in a moment.")
        try:
            found = self._find(key)                      # somebody waited for by us may have wanted the same
            if found is not None:
                return found
            matcher = LLMatcher(self._llguidance(), grammar(), log_level=0, limits=_LIMITS)
            if matcher.is_error():
                error = matcher.get_error()
                raise BadRequest(f"The {kind} cannot be used{place(error)}: {_one_line(error)}.")
            found = CompiledConstraint(matcher, self._n_vocab)
            _try_first_token(found, kind)
        finally:
            self._compiling.release()
        with self._lookup:
            self._compiled[key] = found
            while len(self._compiled) > MAX_REMEMBERED:
                self._compiled.popitem(last=False)
        return found

    def _find(self, key: tuple[str, str]) -> CompiledConstraint | None:
        with self._lookup:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
            return found

    def _llguidance(self) -> LLTokenizer:
        if self._tokenizer is None:
            wrapper = TokenizerWrapper(_Tokens(self._vocab, self._n_vocab))
            self._tokenizer = LLTokenizer(wrapper, n_vocab=self._n_vocab, eos_token=sorted(self._vocab.end_ids))
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

    def allowed(self) -> np.ndarray:
        self._matcher.unsafe_compute_mask_ptr(self._address, self._bytes)
        if self._matcher.is_error():
            raise BackendFailed(f"The grammar of this answer is too complex to follow: {_one_line(self._matcher.get_error())}.")
        return self._mask

    def accept(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise BackendFailed(f"Token {token} does not follow the grammar of this answer: {_one_line(self._matcher.get_error())}.")

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped()


def _try_first_token(constraint: CompiledConstraint, kind: str) -> None:
    try:
        possible = bool(constraint.start().allowed().any())
    except BackendFailed as error:
        raise BadRequest(f"The {kind} admits no text, or none that can be found in a short time.") from error
    if not possible:
        raise BadRequest(f"The {kind} admits no text.")


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


def _schema_text(schema: dict[str, Any]) -> str:
    for path, value in _walk(schema):                    # before anything recursive sees it
        if path.count("/") > MAX_DEPTH:
            raise BadRequest(f"The JSON schema is more than {MAX_DEPTH} levels deep at '{path[:200]}'.")
        if isinstance(value, dict) and _too_fine(value.get("multipleOf")):
            raise BadRequest(f"The JSON schema cannot be used at {repr(path) if path else 'its root'}: multipleOf is supported up to {_MAX_MULTIPLE:,}, not {value['multipleOf']}.")
    try:
        source = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadRequest(f"The schema is not JSON: {error}.") from error
    if len(source) > MAX_SCHEMA:
        raise BadRequest(f"The JSON schema has {len(source):,} characters; at most {MAX_SCHEMA:,} are accepted.")
    return source


def _too_fine(multiple: Any) -> bool:
    return isinstance(multiple, (int, float)) and multiple > _MAX_MULTIPLE


def _schema_grammar(source: str) -> str:
    return LLMatcher.grammar_from_json_schema(source, overrides=_JSON_OPTIONS)


def _walk(schema: Any) -> Iterator[tuple[str, Any]]:
    """Every object and list inside, with its JSON pointer; without recursion."""
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        path, value = waiting.pop()
        yield path, value
        items = value.items() if isinstance(value, dict) else enumerate(value)
        waiting += [(f"{path}/{str(key).replace('~', '~0').replace('/', '~1')}", item) for key, item in items if isinstance(item, (dict, list))]


def _locate(schema: dict[str, Any], error: str) -> str:
    """Where in a schema that does not compile the fault is: the deepest part that on its own does not compile either."""
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    at: Any = schema
    place, tries, going = "", 0, True
    while going:
        going = False
        for step, part in _subschemas(at):
            tries += 1
            if tries > _SEARCHED:
                break
            alone = {**shared, **part} if not step.startswith(("/$defs", "/definitions")) else part
            wrong, _ = LLMatcher.validate_grammar_with_warnings(_schema_grammar(json.dumps(alone)), limits=_LIMITS)
            if wrong:
                at, place, going = part, place + step, True
                break
    return f" at '{place}'" if place else " at its root"


def _subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas directly inside, definitions first: what refers to them fails because of them."""
    for key in sorted(schema, key=lambda key: key not in ("$defs", "definitions")):
        value = schema[key]
        if key in ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas") and isinstance(value, dict):
            yield from ((f"/{key}/{name.replace('~', '~0').replace('/', '~1')}", part) for name, part in value.items() if isinstance(part, dict))
        elif key in ("allOf", "anyOf", "oneOf", "prefixItems", "items") and isinstance(value, list):
            yield from ((f"/{key}/{index}", part) for index, part in enumerate(value) if isinstance(part, dict))
        elif key in ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames") and isinstance(value, dict):
            yield f"/{key}", value


_REGEX_ERROR = re.compile(r"regex parse error:\s*(.*?)\n\s*\^+\s*error: (.*)", re.DOTALL)


def _one_line(error: str) -> str:
    """llguidance's message as the end of a sentence."""
    error = error.replace("<non-verbose/>", "")
    error = _REGEX_ERROR.sub(lambda found: f"in the regular expression {found[1].strip()}: {found[2]}", error)
    return " ".join(error.split()).rstrip(".")[:300]
