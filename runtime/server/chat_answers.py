"""What a chat's answers are bound to and how they are read: tools, thinking, and the objects that OpenAI's API makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgeinfer.errors import BadRequest, UnsupportedParameter
from edgeinfer.runtime.answer_format import detect_format, template_kwargs_for
from edgeinfer.runtime.answer_parser import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from edgeinfer.runtime.answer_plan import AnswerPlan, plan_answer
from edgeinfer.runtime.server.bodies import ChatBody
from edgeinfer.runtime.server.error_replies import bad_field
from edgeinfer.runtime.server.json_out import json_text
from edgeinfer.runtime.server.parameters import Judge, constraint_of
from edgeinfer.runtime.service import Engine
from edgeinfer.runtime.values import FinishReason, TokenLogprob


def plan_of(engine: Engine, body: ChatBody, judge: Judge) -> AnswerPlan:
    """How ``body`` is answered. Compiles what it demands: call it in a thread."""
    variables = dict(body.chat_template_kwargs or {})
    asked = {"reasoning_effort": body.reasoning_effort, "enable_thinking": variables.pop("enable_thinking", None)}
    format = detect_format(engine.chat_template_source)
    for name, value in asked.items():
        try:
            template_kwargs_for(format, **{name: value})
        except UnsupportedParameter as error:
            judge.unsupported(name, str(error))
            asked[name] = None
        except BadRequest as error:
            raise bad_field(name, str(error)) from error
    try:
        return plan_answer(
            engine, body.messages, tools=body.tools, tool_choice=body.tool_choice, parallel_tool_calls=body.parallel_tool_calls, **asked,
            thinking_budget=None if body.thinking_budget == -1 else body.thinking_budget, reasoning=body.reasoning_format != "none",
            template_kwargs=variables, constraint=constraint_of(body, engine),
        )
    except BadRequest as error:
        param = next((name for name in ("tools", "tool_choice", "thinking_budget", "reasoning_effort") if str(error).startswith(name)), None)
        if param is None:
            raise
        raise bad_field(param, str(error), code=error.code) from error


class Answer:
    """One choice: what it said so far, and log-probabilities that no chunk has carried yet."""

    def __init__(self, plan: AnswerPlan):
        self._parser = plan.parser()
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._entries: list[TokenLogprob] = []

    def push(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> list[Delta]:
        self._entries += logprobs
        return self._noted(self._parser.push(text))

    def finish(self) -> list[Delta]:
        return self._noted(self._parser.finish())

    def take_logprobs(self) -> list[TokenLogprob]:
        """The log-probabilities of tokens since the last call."""
        entries, self._entries = self._entries, []
        return entries

    def finish_reason(self, reason: FinishReason) -> str:
        """OpenAI's: an answer that ends after a call ends for the call."""
        return "tool_calls" if self._calls and reason is FinishReason.STOP else reason.value

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def message(self) -> dict[str, Any]:
        """The whole answer; its content is null where it only calls."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not self._calls else None}
        if self._reasoning:
            message["reasoning_content"] = self.reasoning
        if self._calls:
            message["tool_calls"] = [
                {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": "".join(call["arguments"])}}
                for call in self._calls
            ]
        return message

    def _noted(self, deltas: list[Delta]) -> list[Delta]:
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                self._content.append(delta.text)
            elif isinstance(delta, ReasoningDelta):
                self._reasoning.append(delta.text)
            elif delta.id is not None:
                self._calls.append({"id": delta.id, "name": delta.name, "arguments": [delta.arguments]})
            else:
                self._calls[delta.index]["arguments"].append(delta.arguments)
        return deltas


def delta_json(delta: Delta) -> str:
    """The ``delta`` of a chunk."""
    if isinstance(delta, ContentDelta):
        return f'{{"content":{json_text(delta.text)}}}'
    if isinstance(delta, ReasoningDelta):
        return f'{{"reasoning_content":{json_text(delta.text)}}}'
    return json_text({"tool_calls": [_call_chunk(delta)]})


def _call_chunk(delta: ToolCallDelta) -> dict[str, Any]:
    if delta.id is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": delta.arguments}}
