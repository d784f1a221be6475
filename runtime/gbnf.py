"""llama.cpp's grammar format, GBNF, in the Lark dialect of llguidance.

llguidance reads a text as lexemes, each as long as it can be, and GBNF knows no lexemes: in ``[a-z]* "z"`` the z may be the last of many. So what
needs no recursion becomes one lexeme, as far as it goes: every rule that never comes back to itself, and inside the others every run of such parts.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass

from edgeinfer.errors import BadRequest

_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_MAX_REPEAT = 10_000


@dataclass(frozen=True)
class Literal:
    text: str


@dataclass(frozen=True)
class Characters:
    ranges: tuple[tuple[str, str], ...]
    negated: bool


@dataclass(frozen=True)
class Rule:
    name: str


@dataclass(frozen=True)
class Repeated:
    node: Node
    least: int
    most: int | None


@dataclass(frozen=True)
class Sequence:
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    nodes: tuple[Node, ...]


Node = Literal | Characters | Rule | Repeated | Sequence | Choice
_ANY = Characters((("\0", "\U0010ffff"),), False)


def gbnf_to_lark(source: str) -> str:
    """The same language; the rule ``root`` becomes ``start``. Raises `BadRequest` that names the line. Brackets must not be nested without bound."""
    return _Writer(_Parser(source).rules()).text()


# ----------------------------------------------------------------------------------------------------------------- reading


class _Parser:
    def __init__(self, source: str):
        self._source = source
        self._at = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._space(newlines=True)
        while self._at < len(self._source):
            name = self._name()
            self._space()
            self._expect("::=")
            self._space(newlines=True)
            if name in rules:
                raise self._wrong(f"the rule '{name}' is there twice")
            rules[name] = self._choice(nested=False)
            if self._next() not in ("", "\r", "\n"):
                raise self._wrong(f"unexpected {self._next()!r}")
            self._space(newlines=True)
        for name, node in rules.items():
            missing = next((ref for ref in _references(node) if ref not in rules), None)
            if missing is not None:
                raise BadRequest(f"The GBNF grammar cannot be used: the rule '{name}' needs '{missing}', and there is no such rule.")
        if "root" not in rules:
            raise BadRequest("The GBNF grammar cannot be used: it has no rule 'root'.")
        return rules

    def _choice(self, nested: bool) -> Node:
        nodes = [self._sequence(nested)]
        while self._next() == "|":
            self._at += 1
            self._space(newlines=True)
            nodes.append(self._sequence(nested))
        return nodes[0] if len(nodes) == 1 else Choice(tuple(nodes))

    def _sequence(self, nested: bool) -> Node:
        nodes: list[Node] = []
        while (node := self._item()) is not None:
            self._space(newlines=nested)
            while (repeated := self._repetition(node)) is not None:
                node = repeated
                self._space(newlines=nested)
            nodes.append(node)
        return nodes[0] if len(nodes) == 1 else Sequence(tuple(nodes))

    def _item(self) -> Node | None:
        character = self._next()
        if character == '"':
            return self._literal()
        if character == "[":
            return self._characters()
        if character == ".":
            self._at += 1
            return _ANY
        if character == "(":
            self._at += 1
            self._space(newlines=True)
            node = self._choice(nested=True)
            self._expect(")")
            return node
        return Rule(self._name()) if _is_name(character) else None

    def _repetition(self, node: Node) -> Node | None:
        character = self._next()
        simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(character)
        if simple is not None:
            self._at += 1
            return Repeated(node, *simple)
        if character != "{":
            return None
        self._at += 1
        least = self._number()
        most: int | None = least
        if self._next() == ",":
            self._at += 1
            self._space()
            most = self._number() if self._next().isdigit() else None
        self._expect("}")
        if least is None or max(least, most or 0) > _MAX_REPEAT or (most is not None and most < least):
            raise self._wrong(f"a repetition must be from 0 to {_MAX_REPEAT:,} times, the smaller number first")
        return Repeated(node, least, most)

    def _number(self) -> int | None:
        self._space()
        start = self._at
        while self._next() in tuple("0123456789"):
            self._at += 1
        digits = self._source[start : self._at]
        self._space()
        return int(digits[:6]) if digits else None

    def _literal(self) -> Node:
        self._at += 1
        text = ""
        while self._next() != '"':
            text += self._character()
        self._at += 1
        return Literal(text)

    def _characters(self) -> Node:
        self._at += 1
        negated = self._next() == "^"
        self._at += negated
        ranges = []
        while self._next() != "]":
            first = last = self._character()
            if self._next() == "-" and self._source[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = self._character()
            if last < first:
                raise self._wrong(f"the range {first!r} to {last!r} is empty")
            ranges.append((first, last))
        self._at += 1
        if not ranges and not negated:
            raise self._wrong("[] is no character")
        return Characters(tuple(ranges), negated) if ranges else _ANY

    def _character(self) -> str:
        character = self._next()
        if character in ("", "\r", "\n"):
            raise self._wrong("a text or a set of characters has no end")
        self._at += 1
        if character != "\\":
            return character
        escape = self._next()
        self._at += 1
        if escape in _ESCAPES:
            return _ESCAPES[escape]
        digits = self._source[self._at : self._at + _HEX_ESCAPES.get(escape, 0)]
        if escape not in _HEX_ESCAPES or len(digits) < _HEX_ESCAPES[escape] or set(digits) - set("0123456789abcdefABCDEF"):
            raise self._wrong(f"\\{escape}{digits} is no escape sequence")
        self._at += len(digits)
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise self._wrong(f"\\{escape}{digits} is no character")
        return chr(code)

    def _name(self) -> str:
        start = self._at
        while _is_name(self._next()):
            self._at += 1
        if start == self._at:
            raise self._wrong("a rule must begin with its name")
        return self._source[start : self._at]

    def _space(self, newlines: bool = False) -> None:
        while (character := self._next()) and character in (" \t\r\n" if newlines else " \t") or character == "#":
            if character == "#":
                end = self._source.find("\n", self._at)
                self._at = len(self._source) if end < 0 else end
            else:
                self._at += 1

    def _expect(self, text: str) -> None:
        if not self._source.startswith(text, self._at):
            raise self._wrong(f"'{text}' is expected" + (f" instead of {self._next()!r}" if self._next() else ""))
        self._at += len(text)

    def _next(self) -> str:
        return self._source[self._at : self._at + 1]

    def _wrong(self, what: str) -> BadRequest:
        line = self._source.count("\n", 0, self._at) + 1
        return BadRequest(f"The GBNF grammar cannot be used: in line {line}, {what}.")


def _is_name(character: str) -> bool:
    return character.isascii() and (character.isalnum() or character in ("-", "_"))


def _references(node: Node) -> list[str]:
    if isinstance(node, Rule):
        return [node.name]
    if isinstance(node, Repeated):
        return _references(node.node)
    return [name for part in node.nodes for name in _references(part)] if isinstance(node, (Sequence, Choice)) else []


# ----------------------------------------------------------------------------------------------------------------- writing


class _Writer:
    """Rules without recursion become terminals (``T3``), all others rules (``r3``); runs of terminals inside a rule become terminals of their own."""

    def __init__(self, rules: dict[str, Node]):
        self._rules = rules
        self._flat = _without_recursion(rules)
        number = {name: index for index, name in enumerate(rules)}
        self._names = {name: f"T{number[name]}" if name in self._flat else f"r{number[name]}" for name in rules}
        self._runs: dict[str, str] = {}

    def text(self) -> str:
        lines = [f"{self._names[name]}: {self._lexeme(node) if name in self._flat else self._rule(node)}" for name, node in self._rules.items()]
        runs = [f"{name}: {lexeme}" for lexeme, name in self._runs.items()]
        return "\n".join(["%llguidance {}", f"start: {self._names['root']}", *lines, *runs]) + "\n"

    def _is_flat(self, node: Node) -> bool:
        return all(name in self._flat for name in _references(node))

    def _rule(self, node: Node) -> str:
        if self._is_flat(node):
            return self._run(node)
        if isinstance(node, Rule):
            return self._names[node.name]
        if isinstance(node, Repeated):
            return f"({self._rule(node.node)}){_times(node)}"
        if isinstance(node, Choice):
            return "(" + " | ".join(map(self._rule, node.nodes)) + ")"
        assert isinstance(node, Sequence)
        parts: list[str] = []
        run: list[Node] = []
        for part in (*node.nodes, None):
            if part is not None and self._is_flat(part):
                run.append(part)
                continue
            if run:
                parts.append(self._run(Sequence(tuple(run))))
                run = []
            if part is not None:
                parts.append(self._rule(part))
        return " ".join(parts)

    def _run(self, node: Node) -> str:
        lexeme = self._lexeme(node)
        if lexeme == '""':
            return lexeme
        return self._runs.setdefault(lexeme, f"RUN{len(self._runs)}")

    def _lexeme(self, node: Node) -> str:
        if isinstance(node, Literal):
            return json.dumps(node.text, ensure_ascii=False)
        if isinstance(node, Characters):
            inside = "".join(_code(first) if first == last else f"{_code(first)}-{_code(last)}" for first, last in node.ranges)
            return f"/[{'^' if node.negated else ''}{inside}]/"
        if isinstance(node, Rule):
            return self._names[node.name]
        if isinstance(node, Repeated):
            return f"({self._lexeme(node.node)}){_times(node)}"
        if isinstance(node, Choice):
            return "(" + " | ".join(map(self._lexeme, node.nodes)) + ")"
        return " ".join(map(self._lexeme, node.nodes)) or '""'


def _without_recursion(rules: dict[str, Node]) -> set[str]:
    """Names of the rules that need only such rules, in the end none."""
    needs = {name: set(_references(node)) for name, node in rules.items()}
    needed_by: dict[str, list[str]] = defaultdict(list)
    for name, others in needs.items():
        for other in others:
            needed_by[other].append(name)
    left = {name: len(others) for name, others in needs.items()}
    ready = [name for name, count in left.items() if not count]
    flat: set[str] = set()
    while ready:
        name = ready.pop()
        flat.add(name)
        for other in needed_by[name]:
            left[other] -= 1
            if not left[other]:
                ready.append(other)
    return flat


def _times(node: Repeated) -> str:
    plain = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((node.least, node.most))
    return plain or f"{{{node.least},{'' if node.most is None else node.most}}}"


def _code(character: str) -> str:
    return f"\\x{{{ord(character):x}}}"
