"""JSON schemas as values: their bounds, and the places in them. What a schema means is left to the compiler (`structured`)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from edgeinfer.errors import BadRequest

MAX_SCHEMA = 256 * 1024                  # characters of JSON
MAX_DEPTH = 64                           # objects and lists inside one another
MAX_OPTIONAL = 400                       # properties of one object that are not required: each takes several items of the parser's row
_DEFINITIONS = ("$defs", "definitions")
_REFERENCE = re.compile(r'"\$ref": "#/((?:\$defs|definitions)/[^/"]+)')


def schema_text(schema: Any) -> str:
    """The schema as JSON; its properties keep their order, which is that of the answer. Raises `BadRequest` for what is not JSON or too large."""
    for path, value in _inside(schema):                  # before anything recursive sees it
        if path.count("/") > MAX_DEPTH:
            raise BadRequest(f"The JSON schema is more than {MAX_DEPTH} levels deep{place(path[:200])}.")
        optional = _optional(value)
        if optional > MAX_OPTIONAL:
            raise BadRequest(f"The JSON schema cannot be used{place(path)}: at most {MAX_OPTIONAL} properties may be optional, not {optional}.")
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadRequest(f"The schema is not JSON: {error}.") from error
    if len(text) > MAX_SCHEMA:
        raise BadRequest(f"The JSON schema has {len(text):,} characters; at most {MAX_SCHEMA:,} are accepted.")
    return text


def place(path: str) -> str:
    """A JSON pointer as part of a sentence."""
    return f" at '{path}'" if path else " at its root"


def parts(schema: dict[str, Any], root: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The schemas directly inside one of ``root``'s, each with its pointer from there, and with the definitions that it refers to.

    Definitions come first, those that refer to the fewest others before: when one is at fault, whatever refers to it is too.
    """
    found = []
    for step, child in _children(schema):
        needed = _needed(child, root)
        with_them: dict[str, Any] = {}
        for where, key in needed:
            with_them.setdefault(where, {})[key] = root[where][key]
        is_definition = step.startswith(("/$defs/", "/definitions/"))
        found.append((not is_definition, len(needed) if is_definition else 0, step, {**with_them, **child}))
    return [(step, part) for _, _, step, part in sorted(found, key=lambda entry: entry[:2])]


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, value in schema.items():
        if key in (*_DEFINITIONS, "properties", "patternProperties", "dependentSchemas") and isinstance(value, dict):
            yield from ((f"/{key}/{_escaped(name)}", part) for name, part in value.items() if isinstance(part, dict))
        elif key in ("allOf", "anyOf", "oneOf", "prefixItems", "items") and isinstance(value, list):
            yield from ((f"/{key}/{index}", part) for index, part in enumerate(value) if isinstance(part, dict))
        elif key in ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames") and isinstance(value, dict):
            yield f"/{key}", value


def _needed(schema: dict[str, Any], root: dict[str, Any]) -> list[tuple[str, str]]:
    """The definitions it refers to, directly or not."""
    reached: dict[tuple[str, str], None] = {}
    waiting: list[Any] = [schema]
    while waiting:
        for name in _REFERENCE.findall(json.dumps(waiting.pop())):
            where, key = name.split("/", 1)
            if (where, key) not in reached and isinstance(root.get(where), dict) and key in root[where]:
                reached[where, key] = None
                waiting.append(root[where][key])
    return list(reached)


def _optional(schema: Any) -> int:
    properties, required = (schema.get("properties"), schema.get("required")) if isinstance(schema, dict) else (None, None)
    if not isinstance(properties, dict):
        return 0
    return len(properties.keys() - {name for name in required if isinstance(name, str)}) if isinstance(required, list) else len(properties)


def _inside(schema: Any) -> Iterator[tuple[str, Any]]:
    """Every object and list inside, with its JSON pointer; without recursion."""
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        path, value = waiting.pop()
        yield path, value
        items = value.items() if isinstance(value, dict) else enumerate(value)
        waiting += [(f"{path}/{_escaped(str(key))}", item) for key, item in items if isinstance(item, (dict, list))]


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
