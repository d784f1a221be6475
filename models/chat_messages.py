"""Chat messages in the one shape that templates may rely on.

Clients send ``content`` as null, leave it out, or send a list of parts; templates slice it, strip it and add it to strings. Normalising comes first,
so that no template meets a shape its author did not think of.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from edgeinfer.errors import BadRequest

# Characters that survive whatever a template does to text, for callers who must find message text again in the result: symbols of an ancient
# divination book that nobody types. Not white space (strip), no letters (upper), printable (a printed list or dictionary shows them as they are,
# which it does not with Unicode's noncharacters).
MARKS = tuple(map(chr, range(0x1D300, 0x1D357)))

ROLES = ("system", "developer", "user", "assistant", "tool")


def normalise_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """New messages, the given ones unchanged. Normalising twice changes nothing more.

    ``content`` becomes a string: "" for None or a missing one, text parts joined without a separator. An empty or null ``tool_calls`` is dropped, and
    arguments that are a JSON object in a string become the object, since templates iterate over them. Other keys pass as they are.
    Raises `BadRequest` with the position (from 1) of a message that is not a mapping, has an unknown role, or holds parts that are not text.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise BadRequest(f"messages must be a list of {{'role': ..., 'content': ...}}, not {type(messages).__name__}.")
    normal = [_normalise(message, number) for number, message in enumerate(messages, 1)]
    if not normal:
        raise BadRequest("messages must hold at least one message.")
    return normal


def _normalise(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadRequest(f"Message {number} must be an object with role and content, not {type(message).__name__}.")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(f"Message {number} has the role {role!r}; known roles are {', '.join(ROLES)}.")
    normal = {**message, "role": role, "content": _content(message.get("content"), number)}
    calls = normal.pop("tool_calls", None)
    if calls:
        normal["tool_calls"] = _tool_calls(calls, number)
    return normal


def _content(content: Any, number: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise BadRequest(f"The content of message {number} must be a string or a list of text parts, not {type(content).__name__}.")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise BadRequest(f"Message {number} holds a content part of type {kind!r}; only text parts are supported.")
    return "".join(texts)


def _tool_calls(calls: Any, number: int) -> list[dict[str, Any]]:
    if not isinstance(calls, (list, tuple)) or not all(isinstance(call, Mapping) for call in calls):
        raise BadRequest(f"tool_calls of message {number} must be a list of objects.")
    normal = []
    for call in calls:
        call = dict(call)
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRequest(f"A tool call of message {number} has no function name.")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _object_in(arguments)
            if "function" in call:
                call["function"] = {**function, "arguments": arguments}
            else:
                call["arguments"] = arguments
        normal.append(call)
    return normal


def _object_in(text: str) -> Any:
    """The JSON object that ``text`` spells; ``text`` itself when it spells anything else (a model's broken call must stay sayable)."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
