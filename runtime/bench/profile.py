"""What the Python side of a decode step costs.

The engine is not changed for it: for the time of a profile, the callables that a step is made of are wrapped from outside. Time between two steps belongs to
the later one.

All parts are wall time of the engine's thread. Answers are read as they come, by tasks of one event loop in another thread, and one interpreter serves
both: "deliver" includes the reading that goes on while the engine wakes the reader, and waiting for the interpreter after a native call counts as native.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from edgeinfer.errors import BackendFailed
from edgeinfer.runtime.bench import event_loop, prompts
from edgeinfer.runtime.bench.values import StepProfile
from edgeinfer.runtime.sequence import Sequence
from edgeinfer.runtime.service import Engine
from edgeinfer.runtime.values import SamplingParams, StepPlan

SAMPLING = SamplingParams(ignore_eos=True)               # the defaults: top-k, top-p, min-p and a temperature
PARTS = ("plan", "batch", "sample", "detokenize", "deliver", "other")
_NATIVE_CALL = "_decode"                                 # where a backend keeps the native function; without it, all of forward() counts as native


class StepClock:
    """Adds up exclusive time by part over the steps in which exactly ``sequences`` decode and none is being read."""

    def __init__(self, sequences: int):
        self._sequences = sequences
        self._now: defaultdict[str, float] = defaultdict(float)              # of the step under way
        self._inside = 0.0                               # time of wrapped calls inside the wrapped call under way
        self._steady = False
        self._last_end: float | None = None
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.total = 0.0
        self.python_percents: list[float] = []           # of each step

    @property
    def steps(self) -> int:
        return len(self.python_percents)

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, its time added to ``part``, without the wrapped calls inside it."""
        def wrapper(*args: Any) -> Any:
            outer, self._inside = self._inside, 0.0
            begin = time.perf_counter()
            try:
                return call(*args)
            finally:
                elapsed = time.perf_counter() - begin
                self._now[part] += elapsed - self._inside
                self._inside = outer + elapsed
        return wrapper

    def forward(self, call: Callable[[StepPlan], Any], part: str) -> Callable[[StepPlan], Any]:
        """``Backend.forward``, timed; its plan tells what kind of step this is."""
        timed = self.timed(part, call)

        def wrapper(plan: StepPlan) -> Any:
            self._steady = len(plan.decodes) == self._sequences and not plan.prefills
            return timed(plan)
        return wrapper

    def step(self, call: Callable[[], None]) -> Callable[[], None]:
        """``EngineCore.step``, from the end of the one before to its own."""
        timed = self.timed("other", call)

        def wrapper() -> None:
            self._now.clear()
            self._steady = False
            self._inside = 0.0
            begin = time.perf_counter()
            timed()
            end = time.perf_counter()
            if self._steady and self._last_end is not None:
                gap = begin - self._last_end
                self._now["other"] += gap
                for part, spent in self._now.items():
                    self.spent[part] += spent
                whole = end - self._last_end
                self.total += whole
                self.python_percents.append(100 * (1 - self._now["native"] / whole))
            self._last_end = end if self._steady else None
        return wrapper

    def profile(self) -> StepProfile:
        """Means over the steps seen. Raises `BackendFailed` when there was none."""
        if not self.steps:
            raise BackendFailed(f"No step was seen in which {self._sequences} sequences decode; the KV cache may be too small for as many at once.")
        each = {part: 1e3 * self.spent[part] / self.steps for part in (*PARTS, "native")}
        native, step = each.pop("native"), 1e3 * self.total / self.steps
        each["other"] += max(0.0, step - native - sum(each.values()))    # the wrappers' own cost is nobody's part
        return StepProfile(self._sequences, self.steps, step, native, each, _describe(SAMPLING), statistics.median(self.python_percents))


def profile(engine: Engine, rng: random.Random, sequences: int, n_gen: int, *, words: int = 48) -> StepProfile:
    """Profile ``sequences`` answers of ``n_gen`` tokens each, read by clients as they come."""
    clock = StepClock(sequences)
    with _watched(engine, clock):
        event_loop.run(_answers(engine, [prompts.text(rng, words) for _ in range(sequences)], n_gen))
    return clock.profile()


async def _answers(engine: Engine, texts: list[str], n_gen: int) -> None:
    async def answer(text: str) -> None:
        with engine.chat([{"role": "user", "content": text}], SAMPLING, max_tokens=n_gen, speculative=False) as stream:
            async for _ in stream:
                pass

    await asyncio.gather(*(answer(text) for text in texts))


@contextmanager
def _watched(engine: Engine, clock: StepClock) -> Iterator[None]:
    """The engine's parts, wrapped; called while it is idle, and every request in the ``with`` block must end there."""
    core = engine._core
    backend = core.backend
    native = getattr(backend, _NATIVE_CALL, None)
    submit = core.submit

    def watched_submit(seq: Sequence) -> None:
        for part, owner, names in (("sample", seq.sampler, ("sample", "accept")), ("detokenize", seq.detokenizer, ("push",)), ("detokenize", seq.stops, ("push",))):
            for name in names:
                setattr(owner, name, clock.timed(part, getattr(owner, name)))
        seq.emit = clock.timed("deliver", seq.emit)
        submit(seq)

    with ExitStack() as stack:
        if native is not None:
            stack.enter_context(_replaced(backend, _NATIVE_CALL, clock.timed("native", native)))
        stack.enter_context(_replaced(backend, "forward", clock.forward(backend.forward, "native" if native is None else "batch")))
        stack.enter_context(_replaced(core.scheduler, "schedule", clock.timed("plan", core.scheduler.schedule)))
        stack.enter_context(_replaced(core, "step", clock.step(core.step)))
        stack.enter_context(_replaced(core, "submit", watched_submit))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = vars(owner)
    before = own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)                         # the class's method shows again
        else:
            setattr(owner, name, before)


def _describe(params: SamplingParams) -> str:
    return f"temperature {params.temperature:g}, top-k {params.top_k}, top-p {params.top_p:g}, min-p {params.min_p:g}"
