"""The server's metrics in Prometheus' format: what the endpoints report of each answer, and what the engines say of themselves when they are asked.

Names follow vLLM's with the prefix ``edgeinfer_``; labels are ``model_name`` and ``engine``. See docs/monitoring.md for the list.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from itertools import pairwise
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from edgeinfer.errors import BadRequest
from edgeinfer.runtime.readings import PREFIX, Sample, Snapshot
from edgeinfer.runtime.server.engine_totals import EngineTotals, Key
from edgeinfer.runtime.server.histogram import Histogram
from edgeinfer.runtime.server.nvml import GPU, open_nvml

if TYPE_CHECKING:
    from edgeinfer.runtime.alarms import AlarmState
    from edgeinfer.runtime.server.pool import ModelPool, Served
    from edgeinfer.runtime.stats import EngineStats
    from edgeinfer.runtime.stream import Stream

LABELS = ("model_name", "engine")

_SECONDS = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1., 2.5, 5., 7.5, 10., 20., 40., 80., 160., 640., 2560.)
_GAPS = (.001, .0025, .005, .0075, .01, .015, .02, .03, .04, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1., 2.5, 5., 10., 20., 40., 80.)
_TOKENS = (1., 2., 5., 10., 20., 50., 100., 200., 500., 1000., 2000., 5000., 10000., 20000., 50000., 100000.)
_CHOICES = (1., 2., 5., 10., 20.)

HISTOGRAMS: dict[str, tuple[tuple[float, ...], str]] = {
    "time_to_first_token_seconds": (_SECONDS, "From the request's arrival to its first token."),
    "inter_token_latency_seconds": (_GAPS, "Between one token of an answer and the next."),
    "e2e_request_latency_seconds": (_SECONDS, "From the request's arrival to its last token."),
    "request_queue_time_seconds": (_SECONDS, "From arrival to the first time it was scheduled."),
    "request_prefill_time_seconds": (_SECONDS, "From first scheduled to the first token."),
    "request_decode_time_seconds": (_SECONDS, "From the first token to the last."),
    "request_inference_time_seconds": (_SECONDS, "From first scheduled to the last token."),
    "request_prompt_tokens": (_TOKENS, "Prompt tokens of a request."),
    "request_generation_tokens": (_TOKENS, "Tokens of an answer."),
    "request_params_n": (_CHOICES, "Answers asked for at once, counted once for each of them."),
}
"""Observed once for each answer that ended, however it did, as far as it got."""

ENGINE_COUNTERS: dict[str, tuple[str, str]] = {
    "prompt_tokens_total": ("prompt_tokens", "Prompt tokens of requests that ended, reused ones too."),
    "generation_tokens_total": ("generated_tokens", "Tokens generated."),
    "prefill_tokens_total": ("prefill_tokens", "Prompt tokens computed, again after preemptions too."),
    "prefix_cache_queries_total": ("prompt_tokens", "Prompt tokens that were looked for in the KV cache."),
    "prefix_cache_hits_total": ("cached_tokens", "Prompt tokens whose KV was reused."),
    "num_preemptions_total": ("preemptions", "Times a running request lost its KV to others and was computed again."),
    "context_shifts_total": ("shifts", "Times an answer dropped old tokens to go on."),
    "kv_evictions_total": ("evictions", "Times an idle conversation's KV was dropped to make room."),
    "spec_decode_num_draft_tokens_total": ("draft_tokens", "Tokens guessed ahead."),
    "spec_decode_num_accepted_tokens_total": ("draft_tokens_accepted", "Guessed tokens that were right."),
    "requests_submitted_total": ("submitted", "Requests that the engine took."),
    "engine_steps_total": ("steps", "Steps computed."),
    "engine_busy_seconds_total": ("busy_seconds", "Seconds spent computing steps."),
    "decode_steps_total": ("decode_steps", "Steps in which anybody decoded."),
    "decode_rows_total": ("decode_rows", "Tokens decoded in them; by decode_steps_total, the batch fill."),
}

ENGINE_GAUGES: dict[str, tuple[Callable[[Served, EngineStats], float], str]] = {
    "num_requests_running": (lambda _, stats: stats.running, "Requests that have a slot."),
    "num_requests_waiting": (lambda _, stats: stats.waiting, "Requests that wait for one."),
    "first_token_wait_seconds": (lambda _, stats: stats.first_token_wait_seconds, "Longest that a request has been waiting for its first token now."),
    "max_num_seqs": (lambda served, _: served.engine.info.max_seqs or served.engine.info.max_slots, "Requests that may run at once."),
    "kv_cache_usage_perc": (
        lambda _, stats: _share(stats.kv_used_tokens - stats.kv_idle_tokens, stats.kv_cells), "KV cells of running requests, 0 to 1."),
    "kv_cache_idle_perc": (lambda _, stats: _share(stats.kv_idle_tokens, stats.kv_cells), "KV cells of conversations kept for reuse, 0 to 1."),
    "engine_healthy": (lambda _, stats: stats.health.status == "ok", "1 while the engine makes progress."),
}

MISS_REASONS = {
    "nothing is cached yet for": "adapter",
    "nothing is cached yet": "cold",
    "no cached conversation": "no_match",
    "the cached conversation differs": "diverged",
    "the sliding window": "window",
    "this model's memory": "uncuttable",
    "computed sooner than copied": "short",
}
"""What the engine's sentences about a cache miss contain, and the word for it. The words are few and fixed: each is a time series."""

COMPATIBLE = {
    **{f"vllm:{name}": name for name in HISTOGRAMS},
    **{f"vllm:{name}": name for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "request_success_total")},
    **{f"vllm:{name}": name for name in ENGINE_COUNTERS if name.startswith(("prompt_", "generation_", "prefix_", "num_", "spec_"))},
    "llamacpp:prompt_tokens_total": "prefill_tokens_total",
    "llamacpp:tokens_predicted_total": "generation_tokens_total",
    "llamacpp:requests_processing": "num_requests_running",
    "llamacpp:requests_deferred": "num_requests_waiting",
    "llamacpp:n_decode_total": "engine_steps_total",
}
"""Other servers' names for the same numbers, exported too where that was asked for."""


class Metrics:
    """Counts what the endpoints tell it, and asks the engines of ``pool`` when it is read. Any thread may call anything.

    compat: export the names of `COMPATIBLE` too.
    """

    def __init__(self, pool: ModelPool, *, compat: bool = False, gpus: Callable[[], tuple[GPU, ...]] | None = None):
        self._pool = pool
        self._compat = compat
        self._gpus = gpus or open_nvml() or tuple
        self._lock = threading.Lock()
        self._engines = EngineTotals(pool)
        self._histograms: dict[str, dict[Key, Histogram]] = {name: {} for name in HISTOGRAMS}
        self._counts: dict[str, dict[tuple[str, ...], int]] = {name: {} for name in _COUNTS}
        self._alarms: tuple[AlarmState, ...] = ()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    # ------------------------------------------------------------------------------------------------------- from endpoints

    def ended(self, model: str, stream: Stream, *, n: int = 1) -> None:
        """An answer is over: finished, failed or cancelled. Once for each stream; ``n`` is how many the request asked for."""
        usage, timings = stream.usage, stream.timings
        error, reason = stream.error, stream.finish_reason
        began = timings.first_token_ms is not None
        values: dict[str, Iterable[float]] = {
            "request_queue_time_seconds": (timings.queue_ms / 1e3,),
            "e2e_request_latency_seconds": ((timings.queue_ms + timings.prompt_ms + timings.predicted_ms) / 1e3,),
            "request_prompt_tokens": (usage.prompt_tokens,),
            "request_generation_tokens": (usage.completion_tokens,),
            "request_params_n": (n,),
        }
        if timings.first_token_ms is not None:
            values["time_to_first_token_seconds"] = (timings.first_token_ms / 1e3,)
            values["request_decode_time_seconds"] = (timings.predicted_ms / 1e3,)
            values["inter_token_latency_seconds"] = (after - before for before, after in pairwise(stream.token_times))
        if began or timings.prompt_n:
            values["request_prefill_time_seconds"] = (timings.prompt_ms / 1e3,)
            values["request_inference_time_seconds"] = ((timings.prompt_ms + timings.predicted_ms) / 1e3,)
        with self._lock:
            key = self._engines.key(model)
            for name, observed in values.items():
                bounds, _ = HISTOGRAMS[name]
                self._histograms[name].setdefault(key, Histogram(bounds)).observe(observed)
            if error is not None:
                self._count("request_failed_total", *key, getattr(error, "code", "error"))
            elif reason is not None:
                self._count("request_success_total", *key, reason.value)
            if usage.cache_miss is not None:
                self._count("prefix_cache_misses_total", *key, miss_reason(usage.cache_miss))

    def refused(self, model: str, code: str) -> None:
        """A request that never became an answer. ``code`` is the server's own word; a name that no model has is left out, it is the client's."""
        known = any(status.name == model for status in self._pool.status())
        with self._lock:
            self._count("request_refused_total", model if known else "", code)

    def embedded(self, model: str, *, inputs: int, prompt_tokens: int) -> None:
        """Vectors were made of ``inputs`` texts."""
        with self._lock:
            key = self._engines.key(model)
            self._count("embedding_inputs_total", *key, by=inputs)
            self._count("embedding_tokens_total", *key, by=prompt_tokens)

    def set_alarms(self, states: Iterable[AlarmState]) -> None:
        """The alarms as they are now; they are exported until the next call."""
        with self._lock:
            self._alarms = tuple(states)

    def _count(self, name: str, *labels: str, by: int = 1) -> None:
        counts = self._counts[name]
        counts[labels] = counts.get(labels, 0) + by

    # -------------------------------------------------------------------------------------------------------------- reading

    def render(self) -> tuple[bytes, str]:
        """The exposition and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def snapshot(self) -> Snapshot:
        """The same as values."""
        return Snapshot(time.monotonic(), tuple(_samples(self._registry.collect())))

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for."""
        gpus = self._gpus()
        with self._lock:
            families = list(self._families())
        yield from families
        yield from _gpu_families(gpus)
        if self._compat:
            by_name = {family.name + ("_total" if family.type == "counter" else ""): family for family in families}
            for alias, name in COMPATIBLE.items():
                yield _renamed(by_name[PREFIX + name], alias.removesuffix("_total"))

    def _families(self) -> Iterator[Metric]:
        loaded = [(served, served.engine.stats()) for served in self._engines.look()]
        for served, stats in loaded:
            self._engines.evicted(served, stats.evictions)
        for name, (bounds, text) in HISTOGRAMS.items():
            histograms = HistogramMetricFamily(PREFIX + name, text, labels=LABELS)
            for key, histogram in self._histograms[name].items():
                histograms.add_metric(key, histogram.buckets(), histogram.sum)
            yield histograms
        for name, (labels, text) in _COUNTS.items():
            yield _counter(name, text, self._counts[name], labels)
        totals = self._engines.totals()
        for name, (field, text) in ENGINE_COUNTERS.items():
            yield _counter(name, text, {key: values[field] for key, values in totals.items()}, LABELS)
        for name, (value, text) in ENGINE_GAUGES.items():
            yield _gauge(name, text, {_key(served): value(served, stats) for served, stats in loaded}, LABELS)
        yield _gauge("build_info", "The version of edgeinfer; always 1.", {(version("edgeinfer"),): 1}, ("version",))
        yield from self._about(loaded)
        yield from self._alarm_families()

    def _about(self, loaded: list[tuple[Served, EngineStats]]) -> Iterator[Metric]:
        memory: dict[tuple[str, ...], float] = {}
        infos: dict[tuple[str, ...], float] = {}
        for served, stats in loaded:
            info = served.engine.info
            memory[*_key(served), "weights"] = info.weight_bytes
            memory[*_key(served), "kv"] = info.kv_bytes_per_token * stats.kv_cells
            infos[*_key(served), info.device, info.quantization, info.kv_type, str(info.n_ctx)] = 1
        yield _gauge("memory_bytes", "Memory of a loaded model by what it holds.", memory, (*LABELS, "kind"))
        yield _gauge("engine_info", "What a loaded model runs on; always 1.", infos, (*LABELS, "device", "quantization", "kv_type", "n_ctx"))

    def _alarm_families(self) -> Iterator[Metric]:
        labels = (*LABELS, "name")
        yield _gauge("alarm", "1 while the alarm is raised.", {(*_alarm_key(state), state.rule.name): state.raised for state in self._alarms}, labels)
        values = {(*_alarm_key(state), state.rule.name): state.value for state in self._alarms if state.value is not None}
        yield _gauge("alarm_value", "What the alarm's rule looks at, when it last did.", values, labels)
        thresholds = {(state.rule.name,): state.rule.threshold for state in self._alarms}
        yield _gauge("alarm_threshold", "Where the alarm is raised.", thresholds, ("name",))


_COUNTS = {
    "request_success_total": ((*LABELS, "finished_reason"), "Answers that ended without an error, by reason."),
    "request_failed_total": ((*LABELS, "code"), "Answers that ended with an error, by its code."),
    "request_refused_total": (("model_name", "code"), "Requests that were refused, by the error's code."),
    "prefix_cache_misses_total": ((*LABELS, "reason"), "Requests that reused less than hoped of the KV cache, by reason."),
    "embedding_inputs_total": (LABELS, "Inputs of which vectors were made."),
    "embedding_tokens_total": (LABELS, "Tokens of these inputs."),
}
"""Counted by the endpoints' reports."""


def miss_reason(sentence: str) -> str:
    """The word for why a prompt was not reused; "other" for a sentence nobody foresaw."""
    return next((word for part, word in MISS_REASONS.items() if part in sentence), "other")


def parse(text: str) -> list[Sample]:
    """The samples of an exposition; those that are no finite numbers are left out. Raises `BadRequest` for what is none."""
    try:
        return list(_samples(text_string_to_metric_families(text)))
    except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        # The parser raises all of these for text that merely looks like an exposition.
        raise BadRequest("The answer is not in Prometheus' text format.") from error


def _samples(families: Iterable[Metric]) -> Iterator[Sample]:
    for family in families:
        for sample in family.samples:
            if math.isfinite(sample.value):
                yield Sample(sample.name, sample.labels, float(sample.value))


def _counter(name: str, text: str, values: Mapping[tuple[str, ...], float], labels: tuple[str, ...]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _gauge(name: str, text: str, values: Mapping[tuple[str, ...], float], labels: tuple[str, ...]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, float(value))
    return family


def _renamed(family: Metric, name: str) -> Metric:
    renamed = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        renamed.add_sample(name + sample.name.removeprefix(family.name), sample.labels, sample.value)
    return renamed


def _gpu_families(gpus: tuple[GPU, ...]) -> Iterator[Metric]:
    if not gpus:
        return
    for name, text, value in (
        ("gpu_utilization_ratio", "How much of the time the GPU was computing, 0 to 1.", lambda gpu: gpu.utilisation),
        ("gpu_memory_used_bytes", "Memory in use on the GPU, by all processes.", lambda gpu: gpu.memory_used),
        ("gpu_memory_total_bytes", "Memory of the GPU.", lambda gpu: gpu.memory_total),
    ):
        yield _gauge(name, text, {(str(gpu.index), gpu.name): value(gpu) for gpu in gpus if value(gpu) is not None}, ("gpu", "gpu_name"))
    energy = {(str(gpu.index), gpu.name): gpu.energy_joules for gpu in gpus if gpu.energy_joules is not None}
    yield _counter("energy_joules_total", "Energy the GPU has used, by all processes.", energy, ("gpu", "gpu_name"))


def _key(served: Served) -> Key:
    return served.name, served.engine.info.engine


def _alarm_key(state: AlarmState) -> Key:
    return state.model, state.engine


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole else 0.0
