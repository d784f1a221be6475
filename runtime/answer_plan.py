"""A chat request with tools and thinking, worked out for a model: what its template is given, what the answer is bound to, how it is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from edgeinfer.runtime.answer_format import AnswerFormat, detect_format, template_kwargs_for, thinking_at_start
from edgeinfer.runtime.answer_parser import AnswerParser
from edgeinfer.runtime.constraint import Constraint
from edgeinfer.runtime.either import Either
from edgeinfer.runtime.one_call import OneCall
from edgeinfer.runtime.thinking import thinking_constraint
from edgeinfer.runtime.tool_choice import calls_only, control_tokens
from edgeinfer.runtime.tool_prompt import told_in_words
from edgeinfer.runtime.tools import chosen, validate_tools

if TYPE_CHECKING:
    from edgeinfer.runtime.service import Engine


@dataclass(frozen=True)
class AnswerPlan:
    """What to pass to `Engine.chat`, and a parser for each answer."""

    messages: Sequence[Mapping[str, Any]]
    tools: list[Any] | None              # for the template
    template_kwargs: dict[str, Any]
    constraint: Constraint | None
    shown: frozenset[int]
    format: AnswerFormat = field(repr=False)
    callable: tuple[Mapping[str, Any], ...] = ()  # tools that the answer may call
    thinking: bool = False               # the answer begins with thinking
    reasoning: bool = True

    @property
    def chat_fields(self) -> dict[str, Any]:
        """Keyword arguments of `Engine.chat`."""
        return {"tools": self.tools, "template_kwargs": self.template_kwargs, "constraint": self.constraint, "shown": self.shown}

    def parser(self) -> AnswerParser:
        """A fresh parser for one answer."""
        return AnswerParser(self.format, tools=self.callable or False, reasoning=self.reasoning, thinking=self.thinking)


def plan_answer(
    engine: Engine,
    messages: Iterable[Mapping[str, Any]],
    *,
    tools: Any = None,
    tool_choice: Any = None,
    parallel_tool_calls: bool | None = None,
    reasoning_effort: str | None = None,
    enable_thinking: bool | None = None,
    thinking_budget: int | None = None,
    reasoning: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
    constraint: Constraint | None = None,
) -> AnswerPlan:
    """Work a request out. Takes as long as compiling what it demands: call it off any event loop.

    reasoning: split thinking off the content. template_kwargs: the template's variables as the caller wants them, over those that follow from
    ``reasoning_effort`` and ``enable_thinking``. constraint: what an answer must be like that calls nothing; it binds what comes after thinking.
    Raises `BadRequest` and its kin, naming the field.
    """
    definitions = validate_tools(tools)
    choice = chosen(definitions, tool_choice)
    format = detect_format(engine.chat_template_source)
    variables = {**template_kwargs_for(format, reasoning_effort, enable_thinking), **(template_kwargs or {})}
    offered: Sequence[Mapping[str, Any]] = () if choice.mode == "none" else definitions
    said: Sequence[Mapping[str, Any]] = list(messages)
    if not format.renders_tools:
        # Where nothing is about tools the messages stay the caller's own.
        if offered or any(isinstance(one, Mapping) and (one.get("tool_calls") or one.get("role") == "tool") for one in said):
            said = told_in_words(said, offered)
    shown_tools = list(offered) if format.renders_tools and offered else None

    demanded = constraint
    if choice.mode == "required" or (choice.mode == "auto" and constraint is not None):
        calls = calls_only(format, definitions, choice, engine.grammars, vocab=engine.vocab, parallel=parallel_tool_calls is not False)
        demanded = calls if choice.mode == "required" or constraint is None else Either([constraint, calls])
    start = "closed" if format.reasoning is None else thinking_at_start(format, engine.render_chat(said, shown_tools, variables))
    bound = thinking_constraint(format, start, engine.vocab, engine.info.n_vocab, limit=thinking_budget, inner=demanded)
    tags = (*(format.tools.tags if offered else ()), *(format.reasoning or ()))
    plan = AnswerPlan(
        messages=said, tools=shown_tools, template_kwargs=variables, constraint=bound,
        shown=frozenset(control_tokens(tags, engine.vocab).values()), format=format, callable=choice.tools if offered else (),
        thinking=start == "open", reasoning=reasoning,
    )
    if choice.mode == "auto" and (parallel_tool_calls is False or format.tools.one_call):
        split = replace(plan, reasoning=True)            # what is thought is no call, whoever wants to see it
        return replace(plan, constraint=OneCall(split.parser, engine.vocab, plan.shown, bound))
    return plan
