"""An engine's core with requests that have names, stepped by hand: what it plans is read as text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from hypothesis import HealthCheck, settings

from edgeinfer.runtime.backends.fake import ScriptedBackend
from edgeinfer.runtime.detokenizer import Detokenizer
from edgeinfer.runtime.engine import EngineCore
from edgeinfer.runtime.sampling import Sampler
from edgeinfer.runtime.scheduler import SchedulerOptions
from edgeinfer.runtime.sequence import Sequence
from edgeinfer.runtime.values import Event, Failed, Finished, RequestOptions, SamplingParams, StepPlan, TextDelta

SYSTEM = "You are a helpful assistant. Be brief, now:"    # 43 tokens
# Of the state machines: the same examples on every run, so that a suite that passed passes again.
PROFILE = settings(
    max_examples=100, stateful_step_count=40, derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


class Recorded(Sequence):
    """A sequence that keeps its events and its sampled tokens.

    sampler_seed: seed of the sampler alone. ``seed`` among the parameters makes the request reproducible, which changes how it is scheduled.
    """

    def __init__(self, backend: ScriptedBackend, prompt: str | Iterable[int], *, keep: int = 0, sampler_seed: int | None = None, **params: Any):
        tokens = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        options = RequestOptions(**{field.name: params.pop(field.name) for field in fields(RequestOptions) if field.name in params})
        asked = SamplingParams.of(None, **params)
        sampler = Sampler(asked if sampler_seed is None else SamplingParams.of(asked, seed=sampler_seed), n_vocab=backend.info.n_vocab, prompt=tokens)
        self.events: list[Event] = []
        self.sampled: list[int] = []
        accept = sampler.accept

        def note(token: int) -> None:
            self.sampled.append(token)
            accept(token)

        sampler.accept = note
        super().__init__(tokens, asked, sampler=sampler, detokenizer=Detokenizer(backend.vocab), emit=self.events.append, options=options, keep=keep)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, TextDelta))

    @property
    def end(self) -> Finished | Failed | None:
        """The last event, if the request is over."""
        last = self.events[-1] if self.events else None
        return last if isinstance(last, Finished | Failed) else None


class Run:
    """Requests by name on one core. `step` makes one step and says what it planned: decoding requests, a bar, and the prompts with their tokens.

        "a b | c16 d4"   a and b decode (a token each; "a3": with two drafted ones), 16 prompt tokens of c and 4 of d are read
    """

    def __init__(self, backend: ScriptedBackend, **options: Any):
        self.backend = backend
        self.core = EngineCore(backend, SchedulerOptions(**options))
        self.sequences: dict[str, Recorded] = {}

    def add(self, name: str, prompt: str | Iterable[int], **params: Any) -> Recorded:
        params = {"temperature": 0, "max_tokens": 100, **params}
        seq = self.sequences[name] = Recorded(self.backend, prompt, **params)
        self.core.counters.submitted += 1
        self.core.submit(seq)
        return seq

    def __getitem__(self, name: str) -> Recorded:
        return self.sequences[name]

    def step(self) -> str:
        self.core.scheduler.schedule, schedule = self._noting(self.core.scheduler.schedule), self.core.scheduler.schedule
        try:
            self._said = ""
            self.core.step()
        finally:
            self.core.scheduler.schedule = schedule
        return self._said

    def steps(self, count: int) -> list[str]:
        return [self.step() for _ in range(count)]

    def finish(self, most: int = 10_000) -> list[str]:
        """Step until nothing is left to do."""
        plans = []
        while self.core.has_work:
            plans.append(self.step())
            assert len(plans) <= most, f"still at work after {most} steps: {plans[-5:]}"
        return plans

    def finish_one(self, seq: Recorded, most: int = 10_000) -> list[str]:
        """Step until this request is over."""
        plans = []
        while seq.end is None:
            plans.append(self.step())
            assert len(plans) <= most, f"not over after {most} steps: {plans[-5:]}"
        return plans

    def _noting(self, schedule):
        def noted() -> StepPlan:
            plan = schedule()
            names = {seq.slot: name for name, seq in self.sequences.items() if seq in self.core.scheduler.running}
            decodes = [names[chunk.slot] + (str(len(chunk.tokens)) if len(chunk.tokens) > 1 else "") for chunk in plan.decodes]
            prefills = [f"{names[chunk.slot]}{len(chunk.tokens)}" for chunk in plan.prefills]
            self._said = " ".join([*decodes, "|", *prefills])
            return plan

        return noted


def endless(tokens: list[int]) -> int:
    return ord("z")


def start(*, prefill_chunk: int = 16, prefill_chunk_busy: int = 4, backend: type[ScriptedBackend] = ScriptedBackend, **fields) -> Run:
    """A run on the fake; ``fields`` are those of the backend and of the scheduler."""
    options = {name: fields.pop(name) for name in SchedulerOptions.__dataclass_fields__ if name in fields}
    fields = {"n_ctx": 1 << 20, "max_batch": 1 << 20, "max_slots": 8, **fields}
    return Run(backend(endless, **fields), prefill_chunk=prefill_chunk, prefill_chunk_busy=prefill_chunk_busy, **options)
