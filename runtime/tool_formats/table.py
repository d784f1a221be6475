"""Which family of models writes calls in which way, told by what its chat template mentions."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgeinfer.runtime.tool_formats.base import CallParser, new_call_id
from edgeinfer.runtime.tool_formats.held_calls import HeldCalls, gemma_calls, python_calls
from edgeinfer.runtime.tool_formats.json_calls import JsonCalls
from edgeinfer.runtime.tool_formats.xml_calls import XmlCalls

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class CallSyntax:
    """How calls are written, for a grammar that demands them: ``opening``, calls divided by ``between``, ``closing``."""

    before_name: str
    before_arguments: str
    after_arguments: str
    between: str | None = "\n"           # None: one call an answer
    opening: str = ""
    closing: str = ""


@dataclass(frozen=True)
class ToolFormat:
    """One way of writing calls. ``parser`` makes a parser for one answer, from the request's tools where it knows them."""

    name: str
    parser: Callable[[Tools], CallParser] = field(repr=False, compare=False)
    tags: tuple[str, ...] = ()           # texts that may be control tokens, which are not shown unless asked for
    syntax: CallSyntax | None = None     # None: calls cannot be demanded in this format
    wrapper: str = ""                    # of XML calls: the tag around one
    quote: str = ""                      # of Gemma's calls: the marker around strings, between the tags of a call

    @property
    def one_call(self) -> bool:
        """The template takes back one call an answer only."""
        return self.syntax is not None and self.syntax.between is None


def _json(
    name: str, sections: dict[str, str], syntax: CallSyntax, *, bare: bool = False, named: bool = False, new_id: Callable[[], str] = new_call_id
) -> ToolFormat:
    tags = tuple(tag for pair in sections.items() for tag in pair if tag) + (("[ARGS]", "[CALL_ID]") if named else ())
    return ToolFormat(name, lambda tools: JsonCalls(sections, bare=bare, named=named, new_id=new_id), tags, syntax)


def _mistral_id() -> str:
    return secrets.token_hex(5)[:9]                      # nine letters or digits, or the template refuses the conversation


_NAME, _ARGUMENTS = '{"name": "', '", "arguments": '

HERMES = _json(
    "hermes", {"<tool_call>": "</tool_call>"}, CallSyntax("<tool_call>\n" + _NAME, _ARGUMENTS, "}\n</tool_call>")
)
# Llama's template takes back one call an answer only.
LLAMA3 = _json("llama3", {"<|python_tag|>": ""}, CallSyntax(_NAME, '", "parameters": ', "}", between=None), bare=True)
MISTRAL = _json(
    "mistral", {"[TOOL_CALLS]": ""}, CallSyntax(_NAME, _ARGUMENTS, "}", ", ", "[TOOL_CALLS][", "]"), named=True, new_id=_mistral_id
)
MISTRAL_NAMED = _json("mistral_named", {"[TOOL_CALLS]": ""}, CallSyntax("[TOOL_CALLS]", "[ARGS]", "", ""), named=True, new_id=_mistral_id)
TOOL_CALLS_LINES = _json(
    "tool_calls_lines", {"<tool_calls>": "</tool_calls>"}, CallSyntax(_NAME, _ARGUMENTS, "}", "\n", "<tool_calls>\n", "\n</tool_calls>")
)
TOOL_CALLS_LIST = _json(
    "tool_calls_list", {"<tool_calls>": "</tool_calls>"}, CallSyntax(_NAME, _ARGUMENTS, "}", ", ", "<tool_calls>[", "]</tool_calls>")
)
NEMOTRON = _json("nemotron", {"<TOOLCALL>": "</TOOLCALL>"}, CallSyntax(_NAME, _ARGUMENTS, "}", ", ", "<TOOLCALL>[", "]</TOOLCALL>"))
GRANITE = _json("granite", {"<|tool_call|>": "<|/tool_call|>"}, CallSyntax(_NAME, _ARGUMENTS, "}", ", ", "<|tool_call|>[", "]"))
GENERIC = _json("json", {}, CallSyntax(_NAME, _ARGUMENTS, "}"), bare=True)


def _xml(name: str, wrapper: str) -> ToolFormat:
    return ToolFormat(name, lambda tools: XmlCalls(wrapper, tools), (wrapper, f"</{wrapper[1:]}"), wrapper=wrapper)


QWEN_XML = _xml("qwen_xml", "<tool_call>")
SEED_XML = _xml("seed_xml", "<seed:tool_call>")


def _held(name: str, open_tag: str, close_tag: str, quote: str | None) -> ToolFormat:
    read = python_calls if quote is None else gemma_calls(quote)
    tags = (open_tag, close_tag, *([quote] if quote else []))
    return ToolFormat(name, lambda tools: HeldCalls({open_tag: close_tag}, read, quote=quote or ""), tags, quote=quote or "")


GEMMA4 = _held("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _held("function_gemma", "<start_function_call>", "<end_function_call>", "<escape>")
LFM2 = _held("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", None)


def tool_format(source: str) -> ToolFormat | None:
    """The way of the family that the template belongs to; None for one that is not known. ``source`` without comments."""
    for format, *signs in _SIGNS:
        if all(sign in source for sign in signs):
            return format
    return None


# The first of which the template mentions everything.
_SIGNS: tuple[tuple[ToolFormat | None, *tuple[str, ...]], ...] = (
    (GEMMA4, "<|tool_call>call:"),
    (FUNCTION_GEMMA, "<start_function_call>"),
    (LFM2, "<|tool_call_start|>"),
    (MISTRAL_NAMED, "[TOOL_CALLS]", "[ARGS]"),
    (MISTRAL, "[TOOL_CALLS]"),
    (SEED_XML, "<seed:tool_call>", "<function=", "<parameter="),
    (QWEN_XML, "<tool_call>", "<function=", "<parameter="),
    (TOOL_CALLS_LIST, "<tool_calls>["),
    (TOOL_CALLS_LINES, "<tool_calls>\\n"),
    (NEMOTRON, "<TOOLCALL>"),
    (None, "<tool_call>", "<arg_key>"),  # GLM's, which is not known here
    (HERMES, "<tool_call>", '"name'),
    (HERMES, "<tool_call>", '\\"name'),
    (GRANITE, "<|tool_call|>"),
    (LLAMA3, "<|start_header_id|>", '"parameters": '),
)
