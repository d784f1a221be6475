"""What a model's answers look like, read from the source of its chat template: tags of thinking, syntax of tool calls, switches."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any, Literal

from edgeinfer.errors import BadRequest, UnsupportedParameter
from edgeinfer.runtime.tool_formats.base import SPACE
from edgeinfer.runtime.tool_formats.table import GENERIC, ToolFormat, tool_format

_REASONING_TAGS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("◁think▷", "◁/think▷"),
)
# What is not closed runs to the end, so that no source takes longer than its length.
_TEXT = re.compile(r"""'(?:[^'\\]|\\.)*(?:'|\Z)|"(?:[^"\\]|\\.)*(?:"|\Z)""", re.DOTALL)
_COMMENT_OR_CODE = re.compile(rf"""\{{\#.*?(?:\#\}}|\Z)|(\{{[%{{](?:{_TEXT.pattern}|[^'"])*?(?:[%}}]\}}|\Z))""", re.DOTALL)
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
_TAKES_CALLS = re.compile(r"""[.'"]tool_calls\b""")
_SWITCHES = ("enable_thinking", "thinking", "thinking_budget", "reasoning_effort")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


@dataclass(frozen=True)
class AnswerFormat:
    """How a model writes what is more than words."""

    tools: ToolFormat
    renders_tools: bool                  # the template shows tools to the model; otherwise `edgeinfer.runtime.tool_prompt` does
    reasoning: tuple[str, str] | None    # the tags around thinking
    switches: frozenset[str] = frozenset()  # variables of the template that say whether, or how much, to think


@functools.lru_cache(maxsize=32)
def detect_format(template_source: str | None) -> AnswerFormat:
    """The format of models with this chat template. One that is not known calls tools as JSON, as `edgeinfer.runtime.tool_prompt` tells it to."""
    source = _COMMENT_OR_CODE.sub(lambda found: found[1] or "", template_source or "")
    # Names that the template's code uses: not those in texts, and no attributes.
    code = " ".join(found[1] for found in _COMMENT_OR_CODE.finditer(source))
    names = set(_NAME.findall(_TEXT.sub("''", code)))
    # A family is of use where its template takes both: the tools, and what was called before.
    family = tool_format(source) if "tools" in names and _TAKES_CALLS.search(source) else None
    return AnswerFormat(
        tools=family or GENERIC,
        renders_tools=family is not None,
        reasoning=next((tags for tags in _REASONING_TAGS if tags[0] in source or tags[1] in source), None),
        switches=frozenset(names.intersection(_SWITCHES)),
    )


def thinking_at_start(format: AnswerFormat, rendered_prompt: str) -> Literal["open", "closed", "free"]:
    """Where an answer to the prompt begins: inside an opened block of thinking, after a closed one, or where the model may open one."""
    if format.reasoning is None:
        return "closed"
    open_tag, close_tag = format.reasoning
    end = rendered_prompt.rstrip(SPACE)
    return "open" if end.endswith(open_tag) else "closed" if end.endswith(close_tag) else "free"


def opens_thinking(format: AnswerFormat, rendered_prompt: str) -> bool:
    """Whether the prompt ends inside an opened block of thinking."""
    return thinking_at_start(format, rendered_prompt) == "open"


def template_kwargs_for(format: AnswerFormat, reasoning_effort: str | None = None, enable_thinking: bool | None = None) -> dict[str, Any]:
    """The template's variables for what a request asks of thinking.

    A template that knows no efforts gets thinking switched off for "none" and on for all others. Raises `UnsupportedParameter` where the template
    cannot do what is asked, and `BadRequest` for what means nothing.
    """
    if enable_thinking is not None and not isinstance(enable_thinking, bool):
        raise BadRequest(f"enable_thinking must be true or false, not {enable_thinking!r}.")
    variables: dict[str, Any] = {}
    if reasoning_effort is not None:
        if reasoning_effort not in EFFORTS:
            raise BadRequest(f"reasoning_effort must be one of {', '.join(EFFORTS)}, not {reasoning_effort!r}.")
        on = reasoning_effort != "none"
        if enable_thinking not in (None, on):
            raise BadRequest(f"reasoning_effort {reasoning_effort!r} contradicts enable_thinking; give one of them.")
        only_efforts = format.switches == {"reasoning_effort"}
        if "reasoning_effort" in format.switches and (on or only_efforts):
            variables["reasoning_effort"] = reasoning_effort
        if not only_efforts:
            variables |= _switched(format, on, "reasoning_effort")
    elif enable_thinking is not None:
        variables |= _switched(format, enable_thinking, "enable_thinking")
    return variables


def _switched(format: AnswerFormat, on: bool, parameter: str) -> dict[str, Any]:
    for name in ("enable_thinking", "thinking"):
        if name in format.switches:
            return {name: on}
    if "thinking_budget" in format.switches:
        return {"thinking_budget": -1 if on else 0}
    if on == (format.reasoning is not None):             # it thinks always, or never
        return {}
    state = "thinks before every answer" if format.reasoning else "does not think"
    raise UnsupportedParameter(f"This model {state} and its chat template has no switch for that; leave {parameter} out.")
