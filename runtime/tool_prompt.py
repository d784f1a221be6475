"""Tools for models whose chat template does not know any, or not in a way that is known here: told in words, asked for as JSON.

The template gets an ordinary conversation: definitions in the system turn, earlier calls as what the assistant said, results as what the user says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edgeinfer.models.chat_messages import normalise_messages

_INTRODUCTION = """You can call these functions, each described by JSON:
{definitions}

To call one, answer with nothing but a JSON object: {{"name": the function's name, "arguments": an object of its arguments}}. \
Several calls go one on each line. Call a function only if it is needed, otherwise answer in words."""


def told_in_words(messages: Iterable[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """New messages that need no template with tools. Raises `BadRequest` for malformed ones."""
    told: list[dict[str, Any]] = []
    names: dict[str, str] = {}                           # of earlier calls, by their ids
    for message in normalise_messages(messages):
        if message["role"] == "assistant" and "tool_calls" in message:
            functions = [call.get("function", call) for call in message["tool_calls"]]
            names |= {
                call["id"]: function["name"] for call, function in zip(message["tool_calls"], functions) if isinstance(call.get("id"), str)
            }
            lines = [json.dumps({"name": one["name"], "arguments": one.get("arguments", {})}, ensure_ascii=False) for one in functions]
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            told.append({**kept, "content": "\n".join([*([message["content"]] if message["content"] else []), *lines])})
        elif message["role"] == "tool":
            name = message.get("name") or names.get(str(message.get("tool_call_id")), "the function")
            _say(told, f"Result of {name}: {message['content']}")
        elif message["role"] == "user" and told and told[-1].get("role") == "user" and told[-1].get("name") == _RESULTS:
            _say(told, message["content"])
        else:
            told.append(message)
    for message in told:
        if message.get("name") == _RESULTS:
            del message["name"]
    return _introduced(told, tools) if tools else told


_RESULTS = "\0results"                                   # marks a user turn of our own while it may still grow


def _say(told: list[dict[str, Any]], text: str) -> None:
    """Results of several calls make one turn: templates want users and assistants to take turns."""
    if told and told[-1].get("name") == _RESULTS:
        told[-1]["content"] += f"\n\n{text}"
    else:
        told.append({"role": "user", "name": _RESULTS, "content": text})


def _introduced(told: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    definitions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(definitions=definitions)
    if told[0]["role"] in ("system", "developer"):
        first = told[0]
        text = f"{first['content']}\n\n{introduction}" if first["content"] else introduction
        return [{**first, "content": text}, *told[1:]]
    return [{"role": "system", "content": introduction}, *told]
