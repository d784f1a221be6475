"""What the streams of a chat request say: one JSON document, or chunks."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from edgeinfer.runtime.answer_plan import AnswerPlan
from edgeinfer.runtime.server.bodies import ChatBody
from edgeinfer.runtime.server.chat_answers import Answer, delta_json
from edgeinfer.runtime.server.choices import Choices, usage_object
from edgeinfer.runtime.server.json_out import event, fields_of, json_text
from edgeinfer.runtime.server.logprobs import chat_entries
from edgeinfer.runtime.values import Finished, PrefillProgress, TextDelta, TokenLogprob

if TYPE_CHECKING:
    from edgeinfer.runtime.server.pool import Served

_ROLE = '{"role":"assistant","content":""}'


class ChatReply:
    """Use either `whole` or `chunks`, once."""

    def __init__(self, served: Served, body: ChatBody, plan: AnswerPlan, choices: Choices, warnings: list[str]):
        self._engine = served.engine
        self._body = body
        self._choices = choices
        self._warnings = {"warnings": warnings} if warnings else {}
        self._splits_reasoning = plan.reasoning and plan.format.reasoning is not None
        self._answers = [Answer(plan) for _ in choices.streams]
        self._common = {
            "id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": served.name,
            "system_fingerprint": f"fp_{served.engine.info.fingerprint[:12]}",
        }

    async def whole(self) -> dict[str, Any]:
        answers, reasons = self._answers, [""] * len(self._answers)
        async for index, happened in self._choices.events():
            if isinstance(happened, TextDelta):
                answers[index].push(happened.text, happened.logprobs)
            elif isinstance(happened, Finished):
                answers[index].finish()
                reasons[index] = answers[index].finish_reason(happened.reason)
        usages = self._choices.usages
        return {
            **self._common, "object": "chat.completion",
            "choices": [
                {
                    "index": index, "message": answer.message(), "finish_reason": reasons[index],
                    "logprobs": self._logprobs(answer.take_logprobs()), "seed": usages[index].seed,
                }
                for index, answer in enumerate(answers)
            ],
            "usage": usage_object(usages, reasoning_tokens=await self._reasoning_tokens()), "timings": self._timings(0), **self._warnings,
        }

    async def chunks(self) -> AsyncIterator[bytes]:
        """Role first, then what is said, one finish reason for each choice, the usage where it was asked for."""
        usage = bool(self._body.stream_options and self._body.stream_options.include_usage)
        per_token, progress = bool(self._body.timings_per_token), bool(self._body.return_progress)
        common = {**self._common, "object": "chat.completion.chunk"}
        # What is the same in all chunks is written once.
        head = "{" + fields_of(common | ({"usage": None} if usage else {})) + ',"choices":[{"index":'

        def chunk(index: int, delta: str, logprobs: str = "null", finish: str = "null", extra: dict[str, Any] | None = None) -> bytes:
            tail = "," + fields_of(extra) if extra else ""
            return event(f'{head}{index},"delta":{delta},"logprobs":{logprobs},"finish_reason":{finish}}}]{tail}}}')

        began = False
        async for index, happened in self._choices.events():
            if not began:
                began = True
                for number in range(len(self._answers)):
                    yield chunk(number, _ROLE, extra=self._warnings)
            answer = self._answers[index]
            if isinstance(happened, TextDelta | Finished):
                deltas = answer.push(happened.text, happened.logprobs) if isinstance(happened, TextDelta) else answer.finish()
                for delta in deltas:
                    yield chunk(index, delta_json(delta), self._taken(answer), extra={"timings": self._timings(index)} if per_token else None)
                if isinstance(happened, Finished):
                    finish = f'"{answer.finish_reason(happened.reason)}","seed":{happened.usage.seed}'
                    yield chunk(index, "{}", self._taken(answer), finish, {"timings": happened.timings.as_dict()})
            elif progress and isinstance(happened, PrefillProgress):
                yield chunk(index, "{}", extra={"prompt_progress": progress_object(happened)})
        if usage:
            total = usage_object(self._choices.usages, reasoning_tokens=await self._reasoning_tokens())
            yield event(json_text({**common, "choices": [], "usage": total}))

    def _timings(self, index: int) -> dict[str, Any]:
        return self._choices.streams[index].timings.as_dict()

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return {"content": chat_entries(self._engine, entries), "refusal": None} if self._body.logprobs else None

    def _taken(self, answer: Answer) -> str:
        """The log-probabilities not sent yet, as JSON."""
        entries = answer.take_logprobs() if self._body.logprobs else ()
        return json_text(self._logprobs(entries)) if entries else "null"

    async def _reasoning_tokens(self) -> int | None:
        """Tokens of what was thought, as its text is tokenised now; None for a model that does not think."""
        if not self._splits_reasoning:
            return None
        texts = [answer.reasoning for answer in self._answers]
        return await asyncio.to_thread(lambda: sum(len(self._engine.tokenize(text, parse_special=False)) for text in texts))


def progress_object(happened: PrefillProgress) -> dict[str, Any]:
    """llama-server's ``prompt_progress``."""
    return {"total": happened.total, "cache": happened.cached, "processed": happened.done, "time_ms": round(happened.elapsed_ms, 3)}
