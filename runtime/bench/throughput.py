"""What the kernels give, asked through the engine: pp and tg as llama-bench names them, several sequences as llama-batched-bench does."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

from edgeinfer.errors import BadRequest
from edgeinfer.runtime.bench import prompts
from edgeinfer.runtime.bench.values import Batched, Settings
from edgeinfer.runtime.service import Engine
from edgeinfer.runtime.stream import Stream
from edgeinfer.runtime.values import BackendInfo, SamplingParams


def check(settings: Settings, info: BackendInfo) -> None:
    """Say before anything is measured that the engine was loaded too small. Raises `BadRequest`."""
    for name, tokens in [*((f"pp{n}", n + 1) for n in settings.n_prompt), *((f"tg{n}", n + 2) for n in settings.n_gen)]:
        if tokens > info.n_ctx:
            raise BadRequest(f"{name} needs a context of {tokens:,} tokens and this one has {info.n_ctx:,}; raise -c or measure less.")
    if not settings.parallel:
        return
    each = settings.batched_prompt + settings.batched_gen + 1
    if each > info.n_ctx:
        wanted = f"-npp {settings.batched_prompt} -ntg {settings.batched_gen} needs a context of {each:,} tokens"
        raise BadRequest(f"{wanted} and this one has {info.n_ctx:,}; raise -c or lower them.")
    most = max(settings.parallel)
    limit = info.max_seqs or info.max_slots
    if most > limit:
        raise BadRequest(f"-npl {most} needs {most} sequences at once and the engine runs {limit}; raise -np or lower -npl.")
    cells = info.kv_cells or info.n_ctx * info.max_slots
    if most * each > cells:
        raise BadRequest(f"{most} sequences of {each:,} tokens do not fit the KV cache of {cells:,} tokens; raise --kv-size or lower -npl.")


def prompt_rate(engine: Engine, rng: random.Random, n_prompt: int) -> float:
    """Tokens a second at which a prompt of ``n_prompt`` tokens is read, up to its first new token."""
    stream = engine.generate(prompts.token_ids(rng, n_prompt, engine.info.n_vocab), _greedy(1), speculative=False)
    return _ended(stream).timings.prompt_per_second


def decode_rate(engine: Engine, rng: random.Random, n_gen: int) -> float:
    """Tokens a second of one sequence that starts from an empty context and generates ``n_gen`` tokens after its first."""
    stream = engine.generate(prompts.token_ids(rng, 1, engine.info.n_vocab), _greedy(n_gen + 1), speculative=False)
    return _ended(stream).timings.predicted_per_second


def batched(engine: Engine, rng: random.Random, sequences: int, n_prompt: int, n_gen: int) -> Batched:
    """``sequences`` unrelated prompts at once, in two phases: all prompts are read, then all sequences decode, their prompts coming from the cache.

    An engine that serves does both at once, which is what the scenarios measure; here each phase is measured by itself.
    """
    each = [prompts.token_ids(rng, n_prompt, engine.info.n_vocab) for _ in range(sequences)]
    begin = time.perf_counter()
    first = [start for start, _ in _spans(engine, each, 1)]
    t_pp = max(first) - begin
    s_tg = shared_decode_rate(_spans(engine, each, n_gen + 1), n_gen)
    t_tg = sequences * n_gen / s_tg
    return Batched(
        sequences, n_prompt, n_gen, t_pp=t_pp, s_pp=sequences * n_prompt / t_pp, t_tg=t_tg, s_tg=s_tg, s=sequences * (n_prompt + n_gen) / (t_pp + t_tg),
    )


def shared_decode_rate(spans: Sequence[tuple[float, float]], n_gen: int) -> float:
    """Tokens a second of all sequences together, from the moment when the last of them has begun. ``spans``: first and last token of each, in seconds.

    A sequence's tokens count as spread evenly over its span; one that ended before that moment contributes nothing.
    """
    begin, end = max(start for start, _ in spans), max(stop for _, stop in spans)
    tokens = sum(n_gen * max(0.0, stop - begin) / (stop - start) for start, stop in spans)
    return tokens / (end - begin)


def median_batched(rounds: Sequence[Batched]) -> Batched:
    """The same figure of several rounds as one: the median of each field."""
    first = rounds[0]
    measured = {name: statistics.median(getattr(each, name) for each in rounds) for name in ("t_pp", "s_pp", "t_tg", "s_tg", "s")}
    return Batched(first.sequences, first.n_prompt, first.n_gen, **measured)


def _spans(engine: Engine, each: Sequence[Sequence[int]], max_tokens: int) -> list[tuple[float, float]]:
    """First and last token of each answer, in seconds of the engine's clock, all requested at once."""
    sent: list[tuple[float, Stream]] = []
    try:
        for tokens in each:
            now = time.perf_counter()
            sent.append((now, engine.generate(tokens, _greedy(max_tokens), speculative=False)))
        spans = []
        for begin, stream in sent:
            timings = _ended(stream).timings
            assert timings.first_token_ms is not None    # an answer that ended well has a first token
            first = begin + timings.first_token_ms / 1e3
            spans.append((first, first + timings.predicted_ms / 1e3))
        return spans
    finally:
        for _, stream in sent:
            stream.cancel()


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def _ended(stream: Stream) -> Stream:
    with stream:                                         # an interrupt while waiting cancels it
        stream.wait()
    if stream.error is not None:
        raise stream.error
    return stream
