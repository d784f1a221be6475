"""Alarms: what raises and clears them, that they neither flap nor repeat themselves, and what a settings file may say."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer import cli
from edgeinfer.errors import BadRequest
from edgeinfer.runtime.alarms import DEFAULT_RULES, AlarmRule, Alarms, rules_from
from edgeinfer.runtime.readings import NUMBERS, ModelReadings, Sample, Snapshot, read
from edgeinfer.runtime.server.watch import look, watch

MODEL = ModelReadings("m", "llamacpp", loaded=True)
SLOW = AlarmRule("slow", "first_token_ms", "above", 800.0, for_seconds=10.0)
IDLE = AlarmRule("idle", "utilisation", "below", 0.5, for_seconds=10.0, while_waiting=True)


def course(rule: AlarmRule, *values: float | None, every: float = 5.0, **fields) -> list[bool]:
    """Whether the alarm is raised after each of the readings."""
    alarms = Alarms([rule])
    return [alarms.look([replace(MODEL, **{rule.metric: value}, **fields)], at * every)[0].raised for at, value in enumerate(values)]


def test_it_is_raised_after_its_time_and_not_before():
    assert course(SLOW, 900, 900, 900, 900) == [False, False, True, True]
    assert course(SLOW, 900, 900, 700, 900, 900, 900) == [False, False, False, False, False, True]
    assert course(replace(SLOW, for_seconds=0.0), 900, 700) == [True, False]


def test_it_is_cleared_clearly_on_the_good_side_and_after_the_same_time():
    high = [900, 900, 900]
    assert course(SLOW, *high, 799, 790, 721, 725) == [False, False, True, True, True, True, True]      # within a tenth of the threshold: it stays
    assert course(SLOW, *high, 700, 700, 700)[3:] == [True, True, False]
    assert course(SLOW, *high, 700, 790, 700, 700, 700)[3:] == [True, True, True, True, False]


def test_what_is_not_known_raises_nothing_and_lets_an_alarm_go():
    assert course(SLOW, None, None, None, None) == [False] * 4
    assert course(SLOW, 900, 900, 900, None, None, None)[2:] == [True, True, True, False]


def test_underuse_counts_only_while_requests_wait():
    assert course(IDLE, 0.2, 0.2, 0.2, waiting=3)[-1] is True
    assert course(IDLE, 0.2, 0.2, 0.2, 0.2, waiting=0)[-1] is False
    assert course(IDLE, 0.5, 0.5, 0.5, waiting=3)[-1] is False


@given(st.lists(st.floats(0, 2000), min_size=1, max_size=40), st.floats(0, 20))
def test_it_never_turns_twice_within_its_time(values, for_seconds):
    states = course(replace(SLOW, for_seconds=for_seconds), *values, every=1.0)
    turns = [at for at, (before, after) in enumerate(zip([False, *states], states)) if before != after]
    assert all(later - earlier > for_seconds or for_seconds < 1 for earlier, later in zip(turns, turns[1:]))
    for at in turns:
        assert values[at] > 800 if states[at] else values[at] <= 720


def test_each_change_is_logged_once_on_one_line(caplog):
    caplog.set_level(logging.WARNING, "edgeinfer.alarms")
    course(SLOW, *[1204.4] * 6, *[100] * 6)
    assert caplog.messages == [
        "alarm slow raised: m: first_token_ms is 1204 (first_token_ms above 800 for 10 s)", "alarm slow cleared: m: first_token_ms is 100",
    ]


def test_models_have_alarms_of_their_own_and_take_them_along(caplog):
    rule = replace(SLOW, for_seconds=0.0)
    alarms = Alarms([rule])
    slow, quick, gone = replace(MODEL, first_token_ms=900.0), ModelReadings("n", "llamacpp", loaded=True), replace(MODEL, loaded=False)
    assert [(state.model, state.raised) for state in alarms.look([slow, quick], 0.0)] == [("m", True), ("n", False)]
    assert [state.model for state in alarms.look([gone, quick], 1.0)] == ["n"]
    assert caplog.messages[-1] == "alarm slow cleared: m: the model is no longer loaded"
    assert [state.raised for state in alarms.look([replace(slow, first_token_ms=None)], 2.0)] == [False]


def test_the_defaults_are_those_that_are_promised():
    assert {(rule.metric, rule.comparison, rule.threshold, rule.while_waiting) for rule in DEFAULT_RULES} == {
        ("first_token_ms", "above", 800.0, False), ("utilisation", "below", 0.5, True),
    }
    assert rules_from({}) == DEFAULT_RULES and set(NUMBERS) <= set(ModelReadings.__dataclass_fields__)


def test_a_table_changes_drops_and_adds():
    rules = {rule.name: rule for rule in rules_from({
        "first_token_slow": {"above": 1500}, "underused": False, "kv": {"metric": "kv_fill", "above": 0.9, "for_seconds": 0, "while_waiting": True},
    })}
    assert set(rules) == {"first_token_slow", "kv"}
    assert (rules["first_token_slow"].threshold, rules["first_token_slow"].metric) == (1500, "first_token_ms")
    assert rules["kv"] == AlarmRule("kv", "kv_fill", "above", 0.9, 0, True)


@pytest.mark.parametrize(("table", "said"), [
    ({"x": {"metric": "speed", "above": 1}}, "alarms.x: there is no metric 'speed'; known are running, "),
    ({"x": {"above": 1}}, "alarms.x needs a metric: one of "),
    ({"x": {"metric": "running"}}, "alarms.x needs one of above and below."),
    ({"x": {"metric": "running", "above": 1, "below": 2}}, "alarms.x needs one of above and below."),
    ({"x": {"metric": "running", "over": 1}}, "alarms.x has no key 'over'; known are metric, above, below, for_seconds, while_waiting."),
    ({"x": {"metric": "running", "above": "1"}}, "alarms.x: above must be a number from 0, not '1'."),
    ({"x": {"metric": "running", "above": float("nan")}}, "alarms.x: above must be a number from 0, not nan."),
    ({"x": {"metric": "running", "above": True}}, "alarms.x: above must be a number from 0, not True."),
    ({"underused": {"below": 50}}, "alarms.underused: utilisation is a share from 0 to 1; below = 50 would mean 5000 %."),
    ({"underused": {"for_seconds": -1}}, "alarms.underused: for_seconds must be a number from 0, not -1."),
    ({"underused": {"while_waiting": "yes"}}, "alarms.underused: while_waiting must be true or false, not 'yes'."),
    ({"first_token_slow": 900}, "alarms.first_token_slow is a table, "),
    ({"x": {"metric": ["running"], "above": 1}}, "alarms.x: there is no metric ['running']"),
])
def test_a_wrong_rule_is_one_sentence_that_names_it(table, said):
    with pytest.raises(BadRequest) as refused:
        rules_from(table)
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)


def test_the_settings_file_has_a_table_for_them(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EDGEINFER_CONFIG", raising=False)
    assert cli._alarm_rules() == DEFAULT_RULES
    Path("edgeinfer.toml").write_text("threads = 2\n[alarms.first_token_slow]\nabove = 300\n[alarms]\nunderused = false\n")
    assert cli._alarm_rules() == (replace(DEFAULT_RULES[0], threshold=300),)
    assert cli._settings_file("chat")[1] == {"threads": 2}
    Path("edgeinfer.toml").write_text("[alarms]\nunderused = 3\n")
    with pytest.raises(BadRequest, match="^edgeinfer.toml: alarms.underused is a table"):
        cli._alarm_rules()
    Path("edgeinfer.toml").write_text("alarms = 3\n")
    with pytest.raises(BadRequest, match="alarms"):
        cli._alarm_rules()
    Path("edgeinfer.toml").write_text("[alarm]\n")
    with pytest.raises(BadRequest, match="no command 'alarm'; known are .* and the table alarms"):
        cli._settings_file("chat")


# ------------------------------------------------------------------------------------------------------------ on real counters

LABELS = {"model_name": "m", "engine": "fake"}


def metrics_at(at: float, *, first_tokens: float, seconds: float, busy: float, waiting: float = 0.0) -> Snapshot:
    values = {
        "time_to_first_token_seconds_count": first_tokens, "time_to_first_token_seconds_sum": seconds, "engine_busy_seconds_total": busy,
        "num_requests_waiting": waiting, "engine_info": 1.0,
    }
    return Snapshot(at, tuple(Sample(f"edgeinfer_{name}", LABELS, value) for name, value in values.items()))


class Recorder:
    """The part of the metrics that the watcher uses."""

    def __init__(self, snapshots=()):
        self.snapshots, self.states = list(snapshots), []

    def snapshot(self):
        return self.snapshots.pop(0) if len(self.snapshots) > 1 else self.snapshots[0]

    def set_alarms(self, states):
        self.states.append({state.rule.name: (state.raised, state.value) for state in states})


def test_the_window_is_what_was_added_within_it():
    recorder, alarms, looks = Recorder(), Alarms([replace(SLOW, for_seconds=0.0), replace(IDLE, for_seconds=0.0)]), deque(maxlen=2)
    look(recorder, alarms, looks, metrics_at(0, first_tokens=100, seconds=500.0, busy=1000.0))      # slow long ago
    look(recorder, alarms, looks, metrics_at(10, first_tokens=110, seconds=501.0, busy=1009.0, waiting=2))
    look(recorder, alarms, looks, metrics_at(20, first_tokens=112, seconds=505.0, busy=1010.0, waiting=2))
    look(recorder, alarms, looks, metrics_at(30, first_tokens=112, seconds=505.0, busy=1010.0, waiting=2))
    assert recorder.states[0] == {"slow": (False, None), "idle": (False, None)}
    assert recorder.states[1] == {"slow": (False, pytest.approx(100)), "idle": (False, pytest.approx(0.9))}
    assert recorder.states[2] == {"slow": (False, pytest.approx(5000 / 12)), "idle": (False, pytest.approx(0.5))}
    assert recorder.states[3] == {"slow": (True, pytest.approx(2000)), "idle": (True, pytest.approx(0.05))}


def test_a_request_that_waits_for_its_first_token_is_slow_before_it_is_over():
    now = metrics_at(10, first_tokens=2, seconds=0.4, busy=5.0)
    for waited, shown in ((0.0, 200), (0.1, 200), (1.5, 1500)):
        (readings,) = read(replace(now, samples=(*now.samples, Sample("edgeinfer_first_token_wait_seconds", LABELS, waited))))
        assert readings.first_token_ms == pytest.approx(shown)


def test_a_server_started_anew_counts_from_zero():
    old, new = metrics_at(0, first_tokens=100, seconds=500.0, busy=1000.0), metrics_at(10, first_tokens=2, seconds=0.4, busy=5.0)
    (readings,) = read(new, old, old)
    assert readings.first_token_ms == pytest.approx(200) and readings.utilisation == pytest.approx(0.5)


def test_the_background_task_looks_until_it_is_cancelled():
    recorder = Recorder([metrics_at(at, first_tokens=at, seconds=2.0 * at, busy=at) for at in range(6)])

    async def run():
        task = asyncio.create_task(watch(recorder, [replace(SLOW, for_seconds=0.0)], every_s=0.001))
        while len(recorder.states) < 6:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert recorder.states[-1] == {"slow": (True, pytest.approx(2000))}
