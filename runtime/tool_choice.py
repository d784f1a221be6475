"""A grammar for answers that must call a tool: the family's own syntax around arguments that fit the function's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgeinfer.errors import BadRequest, UnsupportedParameter
from edgeinfer.runtime.answer_format import AnswerFormat
from edgeinfer.runtime.backend import Vocab
from edgeinfer.runtime.constraint import Constraint
from edgeinfer.runtime.tool_formats.gemma_grammar import GemmaGrammar, any_text
from edgeinfer.runtime.tool_formats.table import ToolFormat
from edgeinfer.runtime.tool_formats.xml_calls import json_types
from edgeinfer.runtime.tools import ToolChoice, chosen, parameters_of

if TYPE_CHECKING:
    from edgeinfer.runtime.structured import Grammars

MAX_CALLS = 16                            # in one answer that must call


def control_tokens(tags: Sequence[str], vocab: Vocab) -> dict[str, int]:
    """Those of ``tags`` that the vocabulary holds as one control token, which has no text of its own."""
    found = {}
    for tag in tags:
        ids = vocab.encode(tag, add_special=False, parse_special=True, opening=False)
        if len(ids) == 1 and not vocab.token_bytes(ids[0]) and vocab.token_text(ids[0]) == tag:
            found[tag] = ids[0]
    return found


def tool_choice_constraint(
    format: AnswerFormat, tools: Sequence[Mapping[str, Any]], tool_choice: Any, grammars: Grammars, *, vocab: Vocab, parallel: bool = True
) -> Constraint | None:
    """What makes an answer call one of the valid ``tools`` as ``tool_choice`` demands; None where it demands nothing. Raises as `calls_only` does."""
    choice = chosen(tools, tool_choice)
    return calls_only(format, tools, choice, grammars, vocab=vocab, parallel=parallel) if choice.mode == "required" else None


def calls_only(
    format: AnswerFormat, tools: Sequence[Mapping[str, Any]], choice: ToolChoice, grammars: Grammars, *, vocab: Vocab, parallel: bool = True
) -> Constraint:
    """What lets an answer say nothing but calls of those of the valid ``tools`` that ``choice`` names.

    Takes as long as compiling the schemas does. Raises `BadRequest` naming the definition whose parameters no grammar can follow, and
    `UnsupportedParameter` for a format in which calls cannot be demanded.
    """
    for number, tool in enumerate(tools):
        if tool in choice.tools:
            try:
                grammars.json_schema(dict(parameters_of(tool)))
            except BadRequest as error:
                raise BadRequest(f"tools[{number}].function.parameters: {error}") from error
    return grammars.lark(call_grammar(format, choice.tools, vocab=vocab, single=choice.single or not parallel), simple=True)


def call_grammar(format: AnswerFormat, tools: Sequence[Mapping[str, Any]], *, vocab: Vocab, single: bool) -> str:
    """Lark source, in llguidance's dialect, of one call of ``tools`` or several."""
    family = format.tools
    write = _Writer(control_tokens(family.tags, vocab))
    between: str | None = "\n"
    opening = closing = ""
    if family.wrapper:
        calls = [_xml_call(number, tool, family.wrapper, write) for number, tool in enumerate(tools)]
    elif family.quote:
        calls = [_gemma_call(number, tool, family, write) for number, tool in enumerate(tools)]
        between = ""
    elif family.syntax is not None:
        syntax = family.syntax
        calls = [
            f"call_{number}: {write(syntax.before_name + tool['function']['name'] + syntax.before_arguments)} arguments_{number} "
            f"{write(syntax.after_arguments)}\narguments_{number}: {_json(parameters_of(tool))}"
            for number, tool in enumerate(tools)
        ]
        opening, between, closing = syntax.opening, syntax.between, syntax.closing
    else:
        raise UnsupportedParameter(
            f"This model writes calls in the format {family.name}, for which there is no grammar; use tool_choice auto without a response_format."
        )
    more = "" if single or between is None else f" ({write(between)} call){{0,{MAX_CALLS - 1}}}"
    choices = " | ".join(f"call_{number}" for number in range(len(tools)))
    return "\n".join([f"start: {write(opening)} call{more} {write(closing)}", f"call: {choices}", *calls]) + "\n"


def _json(schema: Mapping[str, Any]) -> str:
    # Written as templates write it: a small model let loose on white space may never stop.
    layout = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return f"%json {json.dumps({**schema, 'x-guidance': layout})}"


class _Writer:
    """Literal text as terminals: strings, and control tokens by their ids."""

    def __init__(self, control: Mapping[str, int]):
        self._control = control
        self._tags = re.compile("(" + "|".join(map(re.escape, control)) + ")") if control else None

    def __call__(self, text: str) -> str:
        pieces = self._tags.split(text) if self._tags else [text]
        return " ".join(f"<[{self._control[piece]}]>" if piece in self._control else json.dumps(piece) for piece in pieces if piece)


def _gemma_call(number: int, tool: Mapping[str, Any], family: ToolFormat, write: _Writer) -> str:
    grammar = GemmaGrammar(family.quote, write)
    name = tool["function"]["name"]
    arguments = grammar.value(f"arguments_{number}", {"type": "object", **parameters_of(tool)}, f"tools: the parameters of {name}")
    head, foot = write(f"{family.tags[0]}call:{name}"), write(family.tags[1])
    return "\n".join([f"call_{number}: {head} {arguments} {foot}", *grammar.rules])


def _xml_call(number: int, tool: Mapping[str, Any], wrapper: str, write: _Writer) -> str:
    name, schema = tool["function"]["name"], parameters_of(tool)
    required = schema.get("required", [])
    parts, rules = [], []
    for at, (key, value) in enumerate(schema.get("properties", {}).items()):
        if re.search(r"[<>\n]", key):
            raise BadRequest(f"The parameter {key!r} of the function {name!r} cannot be written in this model's format; rename it.")
        rule = f"parameter_{number}_{at}"
        parts.append(rule if key in required else f"{rule}?")
        if _is_text(value) and (bounds := sorted({"pattern", "format"}.intersection(value))):
            raise UnsupportedParameter(
                f"tools: {bounds[0]} of the parameter {key!r} of {name} cannot be demanded in the way this model writes calls; use tool_choice auto."
            )
        rules += [f"{rule}: {write(f'<parameter={key}>' + chr(10))} {_xml_value(rule, value, schema)}", *_text_rule(rule, value)]
    head, foot = write(f"{wrapper}\n<function={name}>\n"), write(f"</function>\n</{wrapper[1:]}")
    return "\n".join([f"call_{number}: {head} {' '.join(parts)} {foot}", *rules])


_END_PARAMETER = "\n</parameter>\n"


def _is_text(value: Any) -> bool:
    """Whether a parser would take anything for this value."""
    return isinstance(value, Mapping) and "string" in json_types(value) and "enum" not in value and "const" not in value


def _xml_value(rule: str, value: Any, schema: Mapping[str, Any]) -> str:
    if _is_text(value):
        return f"{rule}_text"
    if isinstance(value, Mapping) and value.get("type") == "string":
        texts = [text for text in value.get("enum", [value.get("const")]) if isinstance(text, str)]
        return f"({' | '.join(map(json.dumps, texts))}) {json.dumps(_END_PARAMETER)}"
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    inner = {**value, **definitions} if isinstance(value, Mapping) else definitions
    return f"{rule}_json {json.dumps(_END_PARAMETER)}\n{rule}_json: {_json(inner)}"


def _text_rule(rule: str, value: Any) -> list[str]:
    # The parser ends a text at the first tag that could close it, whatever stands before it.
    return [f"{rule}_text: {rule}_said \"\\n\"", f'{rule}_said[suffix="</parameter>"]: /{any_text(value)}\\n/'] if _is_text(value) else []
