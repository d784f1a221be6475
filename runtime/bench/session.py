"""A benchmark from its settings to its report, part by part; interrupted, it still says what it has."""

from __future__ import annotations

import os
import platform
import random
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from edgeinfer.errors import BadRequest
from edgeinfer.runtime.bench import clients, profile, scenarios, throughput
from edgeinfer.runtime.bench.scenarios import Scenario
from edgeinfer.runtime.bench.values import Batched, Machine, Model, Rate, Report, ScenarioFigures, Settings, StepProfile
from edgeinfer.runtime.service import Engine

Progress = Callable[[str, int, int], None]               # (what is being measured, done, of)


class Session:
    """Measures one engine. `run` fills it; `report` is valid at any time and holds the parts that were finished until then."""

    def __init__(self, engine: Engine, settings: Settings, *, threads: int = 0, version: str = "", progress: Progress = lambda what, done, total: None):
        """Raises `BadRequest` when the engine cannot hold what is to be measured. ``version``: of edgeinfer, for the report."""
        throughput.check(settings, engine.info)
        if settings.profile and max(_profiled(engine)) == 1:
            raise BadRequest("--profile compares one sequence with many; load the engine with -np 2 or more.")
        self._engine = engine
        self._settings = settings
        self._progress = progress
        self._started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._machine = machine(version, threads=threads or engine.info.threads, build=engine.info.system)
        self._rates: dict[str, list[float]] = {}
        self._batched: dict[int, list[Batched]] = {}
        self._scenarios: dict[str, list[ScenarioFigures]] = {}
        self._profile: list[StepProfile] = []
        self._interrupted = False

    def run(self) -> None:
        """Measure everything that was asked for. ``KeyboardInterrupt`` ends it early, without being raised."""
        try:
            self._run_rates()
            for turn in range(self._settings.rounds):
                self._run_batched(turn)
                self._run_scenarios(turn)
            if self._settings.profile:
                self._run_profile()
        except KeyboardInterrupt:
            self._interrupted = True

    def report(self) -> Report:
        info = self._engine.info
        return Report(
            started=self._started,
            machine=self._machine,
            model=Model(
                info.model, info.quantization, info.engine, info.device, info.layers_offloaded, info.n_ctx, info.max_seqs or info.max_slots,
                info.kv_cells or info.n_ctx * info.max_slots, info.kv_type, info.kv_bytes_per_token, info.weight_bytes,
            ),
            settings=self._settings,
            rates=tuple(Rate.of(name, samples) for name, samples in self._rates.items()),
            batched=tuple(throughput.median_batched(rounds) for rounds in self._batched.values()),
            scenarios=tuple(clients.median_of(rounds) for rounds in self._scenarios.values()),
            profile=tuple(self._profile),
            notices=info.notices,
            interrupted=self._interrupted,
        )

    # --------------------------------------------------------------------------------------------------------------- parts

    def _run_rates(self) -> None:
        settings = self._settings
        rng = random.Random(settings.seed)
        for name, measure, sizes in (("pp", throughput.prompt_rate, settings.n_prompt), ("tg", throughput.decode_rate, settings.n_gen)):
            for size in sizes:
                for turn in range(settings.repetitions + 1):
                    self._progress(f"{name}{size}", turn, settings.repetitions + 1)
                    rate = measure(self._engine, rng, size)
                    if turn:                             # the first one warms up
                        self._rates.setdefault(f"{name}{size}", []).append(rate)

    def _run_batched(self, turn: int) -> None:
        settings = self._settings
        rng = random.Random(settings.seed + 1000 + turn)
        for done, sequences in enumerate(settings.parallel):
            self._progress(f"batched{_round(settings, turn)}", done, len(settings.parallel))
            figures = throughput.batched(self._engine, rng, sequences, settings.batched_prompt, settings.batched_gen)
            self._batched.setdefault(sequences, []).append(figures)

    def _run_scenarios(self, turn: int) -> None:
        scenario_round(partial(clients.run, self._engine), self._settings, turn, self._progress, self._scenarios)

    def _run_profile(self) -> None:
        rng = random.Random(self._settings.seed)
        counts = _profiled(self._engine)
        for done, sequences in enumerate(counts):
            self._progress("profile", done, len(counts))
            self._profile.append(profile.profile(self._engine, rng, sequences, 128 if sequences == 1 else 64))


def scenario_round(
    run: Callable[[Scenario, clients.Count], ScenarioFigures], settings: Settings, turn: int, progress: Progress,
    found: dict[str, list[ScenarioFigures]],
) -> None:
    """Every scenario once, each added to ``found`` when it is done. Every turn has words of its own: nothing of an earlier one is in the cache."""
    for name in settings.scenarios:
        scenario = scenarios.build(name, seed=settings.seed + turn, quick=settings.quick)
        figures = run(scenario, partial(progress, f"{name}{_round(settings, turn)}"))
        found.setdefault(name, []).append(figures)


def machine(version: str, *, threads: int, build: str) -> Machine:
    """This one. ``version``: of edgeinfer."""
    return Machine(
        edgeinfer=version,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=threads,
        build=build,
    )


def _round(settings: Settings, turn: int) -> str:
    return f", round {turn + 1}" if settings.rounds > 1 else ""


def _profiled(engine: Engine) -> tuple[int, ...]:
    return tuple(sorted({1, min(16, engine.info.max_seqs or engine.info.max_slots)}))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:                                      # not Linux
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
