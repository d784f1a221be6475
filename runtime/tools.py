"""A request's tools and its choice among them, checked before anything is computed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from edgeinfer.errors import BadRequest

MAX_TOOLS = 256
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True)
class ToolChoice:
    """What the answer may or must call: ``tools`` are those it may choose from, all definitions where the mode is "auto"."""

    mode: Literal["none", "auto", "required"]
    tools: tuple[Mapping[str, Any], ...] = ()
    single: bool = False                 # exactly one call: a function was named


def validate_tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    """The definitions, unchanged. Raises `BadRequest` that names the place of the first that is none. None is no tools."""
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise BadRequest(f"tools must be a list of function definitions, not {type(tools).__name__}.")
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"tools holds {len(tools):,} definitions; at most {MAX_TOOLS} are accepted.")
    seen: set[str] = set()
    for number, tool in enumerate(tools):
        _validate(tool, f"tools[{number}]", seen)
    return tuple(tools)


def _validate(tool: Any, where: str, seen: set[str]) -> None:
    if not isinstance(tool, Mapping):
        raise BadRequest(f"{where} must be an object, not {type(tool).__name__}.")
    if tool.get("type") != "function":
        raise BadRequest(f'{where}.type must be "function", not {tool.get("type")!r}.')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise BadRequest(f"{where}.function must be an object with a name and parameters.")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadRequest(f"{where}.function.name must have 1 to 128 of the characters a-z, A-Z, 0-9, _, . and -, not {name!r}.")
    if name in seen:
        raise BadRequest(f"{where}.function.name {name!r} names an earlier function too; give each a name of its own.")
    seen.add(name)
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise BadRequest(f"{where}.function.description must be a string, not {type(description).__name__}.")
    _validate_parameters(function.get("parameters"), f"{where}.function.parameters")


def _validate_parameters(parameters: Any, where: str) -> None:
    """The shape that templates and parsers rely on; what a grammar makes of the schema is its own affair."""
    if parameters is None:
        return
    if not isinstance(parameters, Mapping):
        raise BadRequest(f"{where} must be a JSON schema, an object, not {type(parameters).__name__}.")
    if parameters.get("type", "object") != "object":
        raise BadRequest(f'{where}.type must be "object", not {parameters["type"]!r}.')
    properties = parameters.get("properties", {})
    if not isinstance(properties, Mapping):
        raise BadRequest(f"{where}.properties must be an object, not {type(properties).__name__}.")
    for name, schema in properties.items():
        if not isinstance(schema, (Mapping, bool)):
            raise BadRequest(f"{where}.properties.{name} must be a JSON schema, an object, not {type(schema).__name__}.")
    required = parameters.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise BadRequest(f"{where}.required must be a list of names.")


def parameters_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's arguments; of one without parameters that of an empty object."""
    parameters: Mapping[str, Any] | None = tool["function"].get("parameters")
    return parameters if parameters is not None else {"type": "object", "properties": {}, "additionalProperties": False}


def chosen(tools: Sequence[Mapping[str, Any]], tool_choice: Any) -> ToolChoice:
    """What ``tool_choice`` says about valid ``tools``: "none", "auto" (also None), "required", a named function, or some allowed ones."""
    if tool_choice is None or tool_choice == "auto":
        return ToolChoice("auto" if tools else "none", tuple(tools))
    if tool_choice == "none":
        return ToolChoice("none")
    if not tools:
        raise BadRequest("tool_choice asks for a call, but the request has no tools.")
    if tool_choice in ("required", "any"):
        return ToolChoice("required", tuple(tools))
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function":
        return ToolChoice("required", (_named(tools, tool_choice, "tool_choice"),), single=True)
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "allowed_tools":
        allowed = tool_choice.get("allowed_tools")
        listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
        if not isinstance(allowed, Mapping) or allowed.get("mode") not in ("auto", "required") or not isinstance(listed, list) or not listed:
            raise BadRequest("tool_choice.allowed_tools must have a mode, auto or required, and a list of tools.")
        some = tuple(_named(tools, one, f"tool_choice.allowed_tools.tools[{number}]") for number, one in enumerate(listed))
        return ToolChoice(allowed["mode"], some)
    raise BadRequest('tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}.')


def _named(tools: Sequence[Mapping[str, Any]], choice: Any, where: str) -> Mapping[str, Any]:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise BadRequest(f"{where} must name a function: {{\"type\": \"function\", \"function\": {{\"name\": ...}}}}.")
    found = next((tool for tool in tools if tool["function"]["name"] == name), None)
    if found is None:
        raise BadRequest(f"{where} names the function {name!r}, which is not among the tools.")
    return found
