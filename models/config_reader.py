"""Reads the keys of a Hugging Face config.json and collects everything that is wrong with them, so that a user hears of it all at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from edgeinfer.errors import ConversionFailed, EdgeInferError, UnsupportedModel

REQUIRED: Final = object()
LIMIT = 2**31 - 1                                        # no dimension, count or id of a real model reaches it


class ConfigReader:
    """Typed look-ups in one config. A bad or missing key is noted and a harmless value returned; `error` is what was noted.

    ``where`` names the config in messages ("/models/x/config.json").
    """

    def __init__(self, config: Mapping[str, Any], where: str):
        self.config = config
        self.where = where
        self.unknown: list[str] = []                     # well formed, of a kind we do not know
        self.wrong: list[str] = []                       # missing or impossible
        self.bad: set[str] = set()                       # keys whose value says nothing about the model

    def reject(self, key: str, problem: str) -> None:
        """Note that ``key`` is missing or impossible."""
        self.wrong.append(problem)
        self.bad.add(key)

    def sound(self, *keys: str) -> bool:
        """None of ``keys`` was rejected. Ask before comparing their values, or one mistake is reported again by its consequences."""
        return self.bad.isdisjoint(keys)

    def has(self, key: str) -> bool:
        """The key is there and not null."""
        return self.config.get(key) is not None

    def _value(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        if value is None and default is REQUIRED:
            self.reject(key, f"The key '{key}' is missing.")
        return value

    def integer(self, key: str, default: Any = REQUIRED, *, low: int = 1, high: int = LIMIT) -> int:
        """A whole number ``low <= n <= high``. Null counts as absent."""
        value = self._value(key, default)
        if value is None:
            return low if default is REQUIRED else default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            upper = "" if high == LIMIT else f" to {high:,}"
            self.reject(key, f"'{key}' must be a whole number from {low}{upper}, not {value!r}.")
            return low
        return value

    def number(self, key: str, default: Any = REQUIRED, *, source: Mapping[str, Any] | None = None, label: str | None = None) -> Any:
        """A finite number above 0, as float. ``source`` reads another mapping than the config, which ``label`` names."""
        value = self.config.get(key) if source is None else source.get(key)
        name = label or key
        if value is None:
            if default is REQUIRED:
                self.reject(name, f"The key '{name}' is missing.")
                return 1.0
            return default
        # An int too large for a float would overflow in float(): compare before converting.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30 or not math.isfinite(value):
            self.reject(name, f"'{name}' must be a number above 0, not {value!r}.")
            return 1.0 if default is REQUIRED else default
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false. Null counts as absent."""
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.reject(key, f"'{key}' must be true or false, not {value!r}.")
            return default
        return value

    def activation(self, key: str, default: str, known: Mapping[str, Any]) -> Any:
        """The entry of ``known`` that the config names."""
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, str) or value not in known:
            self.unknown.append(f"'{key}' is {value!r}; this family is known with {', '.join(known)} only.")
            return next(iter(known.values()))
        return known[value]

    def refuse_flag(self, key: str, why: str) -> None:
        """Note ``key`` as unsupported when the config turns it on."""
        if self.flag(key, False):
            self.unknown.append(f"'{key}' is true, and {why}.")
            self.bad.add(key)

    @property
    def problems(self) -> list[str]:
        """Everything noted, one sentence each."""
        return self.wrong + self.unknown

    def error(self) -> EdgeInferError | None:
        """Everything noted: `UnsupportedModel` when the config is well formed but unknown, else `ConversionFailed`; None when all is well."""
        message = f"{self.where} cannot be used:"
        if self.wrong:
            return ConversionFailed(message, self.problems)
        if len(self.unknown) == 1:
            return UnsupportedModel(f"{message} {self.unknown[0]}")
        return UnsupportedModel("\n  - ".join([message, *self.unknown])) if self.unknown else None


def token_ids(reader: ConfigReader, key: str, *configs: Mapping[str, Any] | None) -> tuple[int, ...]:
    """The union of a token-id key (a number or a list of them) over several configs, in order of appearance."""
    found: list[int] = []
    for config in configs:
        value = (config or {}).get(key)
        for item in value if isinstance(value, list) else [value]:
            if item is None:
                continue
            if isinstance(item, bool) or not isinstance(item, int) or not -1 <= item <= LIMIT:
                reader.wrong.append(f"'{key}' must be a token id or a list of them, not {value!r}.")
                break
            if item >= 0 and item not in found:          # -1 is how some exporters write "none"
                found.append(item)
    return tuple(found)
