"""Alarms: rules over a model's readings, with patience before one is raised and before it is cleared.

    value   ─────────╮      ╭── threshold crossed for `for_seconds`: raised
                     ╰──────╯              back by a tenth of the threshold, for as long: cleared
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from edgeinfer.errors import BadRequest
from edgeinfer.runtime.readings import NUMBERS, SHARES, ModelReadings

LOG = logging.getLogger("edgeinfer.alarms")
MARGIN = 0.1                             # a raised alarm is cleared only this share of the threshold on the good side of it


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class AlarmRule:
    """Raised when ``metric`` has been above or below ``threshold`` for ``for_seconds``; ``while_waiting``: and requests wait all that time."""

    name: str
    metric: str                          # one of `readings.NUMBERS`
    comparison: str                      # "above" or "below"
    threshold: float
    for_seconds: float = 10.0
    while_waiting: bool = False

    def __post_init__(self) -> None:
        where = f"alarms.{self.name}"
        if self.metric not in NUMBERS:
            raise BadRequest(f"{where}: there is no metric {self.metric!r}; known are {', '.join(NUMBERS)}.")
        if self.comparison not in ("above", "below"):
            raise BadRequest(f"{where}: the comparison is above or below, not {self.comparison!r}.")
        if not _is_number(self.threshold) or self.threshold < 0:
            raise BadRequest(f"{where}: {self.comparison} must be a number from 0, not {self.threshold!r}.")
        if self.metric in SHARES and self.threshold > 1:
            percent = f"{self.comparison} = {self.threshold:g} would mean {100 * self.threshold:g} %"
            raise BadRequest(f"{where}: {self.metric} is a share from 0 to 1; {percent}.")
        if not _is_number(self.for_seconds) or self.for_seconds < 0:
            raise BadRequest(f"{where}: for_seconds must be a number from 0, not {self.for_seconds!r}.")
        if not isinstance(self.while_waiting, bool):
            raise BadRequest(f"{where}: while_waiting must be true or false, not {self.while_waiting!r}.")

    def breached(self, readings: ModelReadings) -> bool:
        """The threshold is crossed now. What is not known is not crossed."""
        value = getattr(readings, self.metric)
        if value is None or (self.while_waiting and not readings.waiting):
            return False
        return value > self.threshold if self.comparison == "above" else value < self.threshold

    def recovered(self, readings: ModelReadings) -> bool:
        """It is so far on the good side that a raised alarm may be cleared."""
        value = getattr(readings, self.metric)
        if value is None or (self.while_waiting and not readings.waiting):
            return True
        return value <= self.threshold * (1 - MARGIN) if self.comparison == "above" else value >= self.threshold * (1 + MARGIN)

    def __str__(self) -> str:
        waiting = " while requests wait" if self.while_waiting else ""
        return f"{self.metric} {self.comparison} {self.threshold:g}{waiting} for {self.for_seconds:g} s"


DEFAULT_RULES = (
    AlarmRule("first_token_slow", "first_token_ms", "above", 800.0, for_seconds=10.0),
    AlarmRule("underused", "utilisation", "below", 0.5, for_seconds=30.0, while_waiting=True),
)


def rules_from(table: Mapping[str, Any]) -> tuple[AlarmRule, ...]:
    """The default rules as changed by the table [alarms] of a settings file, and those it adds.

    Keys are names of alarms; ``false`` drops one, a table gives ``above`` or ``below`` and any of ``metric``, ``for_seconds``, ``while_waiting``; of
    a default rule only what changes. Raises `BadRequest` that names the alarm.
    """
    rules = {rule.name: rule for rule in DEFAULT_RULES}
    for name, value in table.items():
        if value is False:
            rules.pop(name, None)
        elif isinstance(value, Mapping):
            rules[name] = _rule(name, value, rules.get(name))
        else:
            raise BadRequest(f"alarms.{name} is a table, such as {{ metric = \"first_token_ms\", above = 800 }}, or false; it is {value!r}.")
    return tuple(rules.values())


_KEYS = ("metric", "above", "below", *(field.name for field in fields(AlarmRule) if field.name in ("for_seconds", "while_waiting")))


def _rule(name: str, table: Mapping[str, Any], base: AlarmRule | None) -> AlarmRule:
    unknown = next((key for key in table if key not in _KEYS), None)
    if unknown is not None:
        raise BadRequest(f"alarms.{name} has no key {unknown!r}; known are {', '.join(_KEYS)}.")
    changes = {key: table[key] for key in ("metric", "for_seconds", "while_waiting") if key in table}
    sides = [side for side in ("above", "below") if side in table]
    if len(sides) > 1 or (base is None and not sides):
        raise BadRequest(f"alarms.{name} needs one of above and below.")
    if sides:
        changes |= {"comparison": sides[0], "threshold": table[sides[0]]}
    if base is not None:
        return replace(base, **changes)
    if "metric" not in changes:
        raise BadRequest(f"alarms.{name} needs a metric: one of {', '.join(NUMBERS)}.")
    return AlarmRule(name, **changes)


@dataclass(frozen=True)
class AlarmState:
    """One rule applied to one model."""

    rule: AlarmRule
    model: str
    engine: str
    raised: bool
    value: float | None


@dataclass
class _Watch:
    raised: bool = False
    since: float | None = None           # when the readings began to ask for the other state


class Alarms:
    """The rules' memory. `look` after every reading; it logs each change once."""

    def __init__(self, rules: Iterable[AlarmRule] = DEFAULT_RULES):
        self.rules = tuple(rules)
        self._watches: dict[tuple[str, str, str], _Watch] = {}

    def look(self, readings: Iterable[ModelReadings], now: float) -> tuple[AlarmState, ...]:
        """Every rule for every loaded model. ``now``: seconds of a monotonic clock. A model that is gone takes its alarms with it."""
        states, watches = [], {}
        for model in readings:
            for rule in self.rules if model.loaded else ():
                key = (model.model, model.engine, rule.name)
                watch = watches[key] = self._watches.pop(key, None) or _Watch()
                value = getattr(model, rule.metric)
                if self._turns(rule, watch, model, now):
                    watch.raised, watch.since = not watch.raised, None
                    _log(rule, model.model, value, raised=watch.raised)
                states.append(AlarmState(rule, model.model, model.engine, watch.raised, value))
        for (model_name, _, rule_name), watch in self._watches.items():
            if watch.raised:
                LOG.warning("alarm %s cleared: %s: the model is no longer loaded", rule_name, model_name)
        self._watches = watches
        return tuple(states)

    @staticmethod
    def _turns(rule: AlarmRule, watch: _Watch, readings: ModelReadings, now: float) -> bool:
        if not (rule.recovered(readings) if watch.raised else rule.breached(readings)):
            watch.since = None
            return False
        watch.since = now if watch.since is None else watch.since
        return now - watch.since >= rule.for_seconds


def _log(rule: AlarmRule, model: str, value: float | None, *, raised: bool) -> None:
    shown = "unknown" if value is None else f"{value:.4g}"
    if raised:
        LOG.warning("alarm %s raised: %s: %s is %s (%s)", rule.name, model, rule.metric, shown, rule)
    else:
        LOG.warning("alarm %s cleared: %s: %s is %s", rule.name, model, rule.metric, shown)
