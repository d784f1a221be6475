"""Answers as families of models write them, and what a parser makes of a text however it is divided."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from edgeinfer.runtime.answer_format import AnswerFormat
from edgeinfer.runtime.answer_parser import AnswerParser, ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from edgeinfer.runtime.backends.fake import ByteVocab
from edgeinfer.runtime.tool_formats import table

THINK = ("<think>", "</think>")
FORMATS = {
    format.name: format
    for format in (
        table.HERMES, table.LLAMA3, table.MISTRAL, table.MISTRAL_NAMED, table.TOOL_CALLS_LINES, table.TOOL_CALLS_LIST, table.NEMOTRON, table.GRANITE,
        table.GENERIC, table.QWEN_XML, table.SEED_XML, table.GEMMA4, table.FUNCTION_GEMMA, table.LFM2,
    )
}


class TagVocab(ByteVocab):
    """Bytes, and ``tags`` as control tokens from 258 on."""

    def __init__(self, tags=(), **options):
        super().__init__([tag.encode() for tag in tags], **options)

    def token_bytes(self, token):
        return super().token_bytes(token) if token < 258 else b""

    def token_text(self, token):
        return super().token_text(token) if token < 258 else self.extra[token - 258].decode()

    def encode(self, text, *, add_special, parse_special, opening=True):
        whole = text.encode() if parse_special else None
        return [258 + self.extra.index(whole)] if whole in self.extra else super().encode(
            text, add_special=add_special, parse_special=parse_special, opening=opening
        )


def answers(name: str, reasoning: tuple[str, str] | None = THINK) -> AnswerFormat:
    return AnswerFormat(FORMATS[name], renders_tools=True, reasoning=reasoning)


def parse(format: AnswerFormat, *pieces: str, tools=True, reasoning: bool = True, thinking: bool = False) -> list[Delta]:
    """Neighbouring deltas of one kind joined; ids, which are drawn, replaced by "id"."""
    parser = AnswerParser(format, tools=tools, reasoning=reasoning, thinking=thinking)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return joined([*deltas, *parser.finish()])


def joined(deltas: list[Delta]) -> list[Delta]:
    found: list[Delta] = []
    for delta in deltas:
        last = found[-1] if found else None
        match delta:
            case ToolCallDelta(index, id, name, arguments):
                assert (id is None) == (name is None)
                if id is None:
                    at = max(at for at, one in enumerate(found) if isinstance(one, ToolCallDelta))
                    assert found[at].index == index and arguments
                    found[at] = replace(found[at], arguments=found[at].arguments + arguments)
                else:
                    assert id and name and index == sum(isinstance(one, ToolCallDelta) for one in found)
                    found.append(ToolCallDelta(index, "id", name, arguments))
            case ContentDelta(text) | ReasoningDelta(text):
                assert text
                if type(last) is type(delta):
                    found[-1] = type(delta)(last.text + text)
                else:
                    found.append(delta)
    return found


def call(index: int, name: str, arguments: str) -> ToolCallDelta:
    return ToolCallDelta(index, "id", name, arguments)


def said(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))


def thought(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))


def cut(text: str, places: list[int]) -> list[str]:
    at = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in pairwise(at)]
