"""Clients that run a scenario and note what they see, here against an engine in this process, through its public API.

All clients are tasks of one event loop, as behind a server: reading costs one thread, whatever their number.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from edgeinfer.errors import EdgeInferError
from edgeinfer.runtime.bench import event_loop
from edgeinfer.runtime.bench.scenarios import Message, Scenario, Turn
from edgeinfer.runtime.bench.values import KindFigures, ScenarioFigures, Spread
from edgeinfer.runtime.service import Engine
from edgeinfer.runtime.values import TextDelta

WARM_UP = ({"role": "user", "content": "hello"},)


@dataclass
class Shot:
    """One request as its client saw it. Times are seconds of one monotonic clock."""

    kind: str
    sent: float
    texts: list[float] = field(default_factory=list)     # when each piece of text came
    ended: float = 0.0
    answer: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


Ask = Callable[[list[Message], Turn], Awaitable[Shot]]   # sends a conversation; a failure is in the shot
Count = Callable[[int, int], None]                       # (done, requests)


def run(engine: Engine, scenario: Scenario, progress: Count = lambda done, total: None) -> ScenarioFigures:
    """Run a scenario once, after one warm-up request that is not counted. Failed requests are counted, not raised."""
    return event_loop.run(drive(partial(_ask, engine), scenario, progress))


async def drive(ask: Ask, scenario: Scenario, progress: Count) -> ScenarioFigures:
    """`run`, whoever answers."""
    await ask(list(WARM_UP), Turn("warm-up", (), 8))
    queue = deque(scenario.conversations)
    shots: list[Shot] = []
    progress(0, scenario.requests)

    async def client() -> None:
        while queue:
            history: list[Message] = []
            for turn in queue.popleft():
                shot = await ask([*history, *turn.messages], turn)
                shots.append(shot)
                progress(len(shots), scenario.requests)
                if shot.error:                           # there is no conversation to go on with
                    break
                history += [*turn.messages, {"role": "assistant", "content": shot.answer}]

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(scenario.clients)))
    return summarize(scenario, shots, time.perf_counter() - begin)


async def _ask(engine: Engine, messages: list[Message], turn: Turn) -> Shot:
    shot = Shot(turn.kind, sent=time.perf_counter())
    pieces: list[str] = []
    try:
        # Rendering and tokenising a long prompt takes milliseconds, in which the other clients must go on reading.
        stream = await asyncio.to_thread(engine.chat, messages, max_tokens=turn.max_tokens, temperature=0.0)
        with stream:
            async for event in stream.aevents():
                if isinstance(event, TextDelta):
                    shot.texts.append(time.perf_counter())
                    pieces.append(event.text)
            shot.ended = time.perf_counter()
            if stream.error is not None:
                raise stream.error
            usage = stream.usage
    except EdgeInferError as error:                      # a failed request is a finding, not the end of the measurement
        shot.error = str(error)
        return shot
    shot.answer = "".join(pieces)
    shot.prompt_tokens, shot.cached_tokens, shot.output_tokens = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
    return shot


def summarize(scenario: Scenario, shots: Sequence[Shot], wall: float) -> ScenarioFigures:
    """Figures of one run that took ``wall`` seconds."""
    good = [shot for shot in shots if not shot.error]
    kinds = {kind: [shot for shot in good if shot.kind == kind] for kind in sorted({shot.kind for shot in good})}
    output = sum(shot.output_tokens for shot in good)
    rate = output / wall if wall > 0 else 0.0
    return ScenarioFigures(
        name=scenario.name,
        clients=scenario.clients,
        requests=len(shots),
        failed=len(shots) - len(good),
        errors=dict(Counter(shot.error for shot in shots if shot.error)),
        wall_s=wall,
        output_tokens=output,
        output_tokens_per_second=rate,
        kinds={kind: _of_kind(of_kind) for kind, of_kind in kinds.items()},
        samples=(rate,),
    )


def _of_kind(shots: Sequence[Shot]) -> KindFigures:
    latency = Spread.of([1e3 * (shot.ended - shot.sent) for shot in shots])
    assert latency is not None                           # there is at least one request of every kind
    return KindFigures(
        requests=len(shots),
        ttft_ms=Spread.of([1e3 * (shot.texts[0] - shot.sent) for shot in shots if shot.texts]),
        itl_ms=Spread.of([1e3 * (later - earlier) for shot in shots for earlier, later in zip(shot.texts, shot.texts[1:])]),
        latency_ms=latency,
        prompt_tokens_mean=statistics.fmean(shot.prompt_tokens for shot in shots),
        cached_tokens_mean=statistics.fmean(shot.cached_tokens for shot in shots),
        output_tokens_mean=statistics.fmean(shot.output_tokens for shot in shots),
    )


# --------------------------------------------------------------------------------------------------------------- several rounds


def median_of(rounds: Sequence[ScenarioFigures]) -> ScenarioFigures:
    """Several runs of one scenario as one: the median of each figure, all failures."""
    if len(rounds) == 1:
        return rounds[0]
    kinds = {kind: None for each in rounds for kind in each.kinds}
    errors: Counter[str] = Counter()
    for each in rounds:
        errors.update(each.errors)
    return ScenarioFigures(
        name=rounds[0].name,
        clients=rounds[0].clients,
        requests=max(each.requests for each in rounds),
        failed=sum(each.failed for each in rounds),
        errors=dict(errors),
        wall_s=statistics.median(each.wall_s for each in rounds),
        output_tokens=round(statistics.median(each.output_tokens for each in rounds)),
        output_tokens_per_second=statistics.median(each.output_tokens_per_second for each in rounds),
        kinds={kind: _median_kind([each.kinds[kind] for each in rounds if kind in each.kinds]) for kind in kinds},
        samples=tuple(each.output_tokens_per_second for each in rounds),
    )


def _median_kind(rounds: Sequence[KindFigures]) -> KindFigures:
    latency = _median_spread([each.latency_ms for each in rounds])
    assert latency is not None
    return KindFigures(
        requests=max(each.requests for each in rounds),
        ttft_ms=_median_spread([each.ttft_ms for each in rounds]),
        itl_ms=_median_spread([each.itl_ms for each in rounds]),
        latency_ms=latency,
        prompt_tokens_mean=statistics.median(each.prompt_tokens_mean for each in rounds),
        cached_tokens_mean=statistics.median(each.cached_tokens_mean for each in rounds),
        output_tokens_mean=statistics.median(each.output_tokens_mean for each in rounds),
    )


def _median_spread(spreads: Sequence[Spread | None]) -> Spread | None:
    known = [spread for spread in spreads if spread is not None]
    if not known:
        return None
    return Spread(*(statistics.median(getattr(spread, name) for spread in known) for name in ("p50", "p90", "p99")))
