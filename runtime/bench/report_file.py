"""Reports as JSON files: written whole or not at all, read with every field checked."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import types
import typing
from pathlib import Path
from typing import Any

from edgeinfer.errors import BadRequest
from edgeinfer.runtime.bench.values import KIND, SCHEMA, Report


def as_document(report: Report) -> dict[str, Any]:
    """JSON-ready; what `read` takes back. Derived figures are written too, for readers that are not this program."""
    document = dataclasses.asdict(report)
    document = {"kind": document.pop("kind"), "schema": document.pop("schema"), **document}
    for entry, step in zip(document["profile"], report.profile, strict=True):
        entry["python_percent"] = step.python_percent
    return document


def read(path: Path) -> Report:
    """An earlier report. Raises `BadRequest` when the file is something else or of another schema version."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise BadRequest(f"There is no file {path} to compare with; edgeinfer bench MODEL --json > FILE makes one.") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadRequest(f"{path} is not JSON ({error}); give a file made by edgeinfer bench MODEL --json.") from error
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise BadRequest(f"{path} is not a report of edgeinfer bench; give a file made by edgeinfer bench MODEL --json.")
    if document.get("schema") != SCHEMA:
        raise BadRequest(f"{path} has schema version {document.get('schema')!r} and this edgeinfer reads version {SCHEMA}; measure again with this version.")
    try:
        report: Report = _decode(Report, document, "")
        return report
    except _Wrong as wrong:
        raise BadRequest(f"{path} is not a whole report of edgeinfer bench: {wrong}; measure again.") from wrong


def check_writable(path: Path) -> None:
    """Say before hours are spent that the result could not be written. Raises `BadRequest`."""
    if path.is_dir():
        raise BadRequest(f"{path} is a folder; name a file.")
    if not path.absolute().parent.is_dir():
        raise BadRequest(f"There is no folder {path.absolute().parent} to write {path.name} into; make it first.")


def write_text(path: Path, text: str) -> None:
    """Write under a temporary name beside ``path`` and rename; interrupted or out of room, ``path`` is what it was."""
    handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.", suffix=".partial")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o666 & ~_umask())                # mkstemp makes it private; a report is an ordinary file
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


# ------------------------------------------------------------------------------------------------------------------ decoding


class _Wrong(Exception):
    """A field that is not what the values say."""


def _decode(kind: Any, value: Any, where: str) -> Any:
    """``value`` from JSON as the annotated type ``kind``: scalars, optionals, tuples, dictionaries by string, dataclasses of these.

    Unknown fields are ignored: additions do not change the schema version. Missing ones take their default, where they have one.
    """
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        _expect(value, dict, where)
        make: Any = kind
        hints = typing.get_type_hints(kind)
        found = {}
        for field in dataclasses.fields(kind):
            if field.name in value:
                found[field.name] = _decode(hints[field.name], value[field.name], f"{where}.{field.name}".lstrip("."))
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise _Wrong(f"{f'{where}.{field.name}'.lstrip('.')} is missing")
        return make(**found)
    if origin is tuple:
        _expect(value, list, where)
        return tuple(_decode(typing.get_args(kind)[0], each, f"{where}[{index}]") for index, each in enumerate(value))
    if origin is dict:
        _expect(value, dict, where)
        return {name: _decode(typing.get_args(kind)[1], each, f"{where}.{name}") for name, each in value.items()}
    if origin is types.UnionType:
        return None if value is None else _decode(next(each for each in typing.get_args(kind) if each is not types.NoneType), value, where)
    if kind is float:
        _expect(value, int | float, where, "a number")
        if isinstance(value, bool) or not 0 <= value <= sys.float_info.max:     # NaN compares false
            raise _Wrong(f"{where} is {value!r} instead of a number from 0")
        return float(value)
    _expect(value, kind, where)
    return value


def _expect(value: Any, kind: Any, where: str, name: str = "") -> None:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _Wrong(f"{where} is {type(value).__name__} instead of {name or kind.__name__}")
