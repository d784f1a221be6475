"""A benchmark of a server: the scenarios only, since kernels cannot be asked for over HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from functools import partial

from edgeinfer.runtime.bench import clients, http_clients
from edgeinfer.runtime.bench.http_clients import Target
from edgeinfer.runtime.bench.session import Progress, machine, scenario_round
from edgeinfer.runtime.bench.values import Model, Report, ScenarioFigures, Settings

_UNRELATED = ("single", "burst", "mixed")                # prompts of these share no more than what the chat template puts in front


class UrlSession:
    """Measures one server. Used as `session.Session` is."""

    def __init__(self, target: Target, settings: Settings, *, version: str = "", progress: Progress = lambda what, done, total: None):
        self._target = target
        self._settings = settings
        self._progress = progress
        self._started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._machine = machine(version, threads=0, build="")
        self._scenarios: dict[str, list[ScenarioFigures]] = {}
        self._interrupted = False

    def run(self) -> None:
        """Measure everything that was asked for. ``KeyboardInterrupt`` ends it early, without being raised."""
        try:
            for turn in range(self._settings.rounds):
                scenario_round(partial(http_clients.run, self._target), self._settings, turn, self._progress, self._scenarios)
        except KeyboardInterrupt:
            self._interrupted = True

    def report(self) -> Report:
        target = self._target
        found = tuple(clients.median_of(rounds) for rounds in self._scenarios.values())
        return Report(
            started=self._started,
            machine=self._machine,
            model=Model(
                target.model, target.quantization, target.engine, "", 0, target.n_ctx, 0, 0, "", 0, target.weight_bytes, url=target.address.url,
            ),
            settings=self._settings,
            scenarios=found,
            notices=tuple(_notices(target, found)),
            interrupted=self._interrupted,
        )


def _notices(target: Target, found: Sequence[ScenarioFigures]) -> Iterator[str]:
    if not target.counts_tokens:
        yield "The server sends no usage; output tokens are counted as pieces of text."
    for scenario in found:
        if scenario.name in _UNRELATED and any(2 * each.cached_tokens_mean > each.prompt_tokens_mean for each in scenario.kinds.values()):
            earlier = "as after an earlier run with this --seed; give another one, or start the server anew"
            yield f"Prompts of {scenario.name} were in the server's cache, {earlier}."
