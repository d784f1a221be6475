"""What metrics say about each model: rates, quantiles and shares, from two looks at the same counters.

The server's alarms read its own metrics this way and `edgeinfer monitor` those of any server, so both show what a Prometheus server would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

PREFIX = "edgeinfer_"
_PROCESS_MEMORY = "process_resident_memory_bytes"
_FIRST_TOKEN, _GAP = "time_to_first_token_seconds", "inter_token_latency_seconds"
NEEDED = (
    _PROCESS_MEMORY, *(f"{PREFIX}{name}" for name in (
        _FIRST_TOKEN, _GAP, "first_token_wait_seconds", "alarm", "build_info", "decode_", "engine_", "generation_tokens_total", "gpu_", "kv_cache_",
        "max_num_seqs", "memory_bytes", "num_requests_", "prefill_tokens_total", "prefix_cache_hits_total", "prefix_cache_queries_total",
        "request_failed_total", "request_success_total", "spec_decode_",
    )),
)
"""What the names of all samples begin with that `read_server` looks at."""


class Sample(NamedTuple):
    """One line of an exposition: ``name{labels} value``."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Snapshot:
    """All samples of one look; ``at`` is a monotonic clock in seconds."""

    at: float
    samples: tuple[Sample, ...]

    @cached_property
    def _by_name(self) -> dict[str, list[Sample]]:
        names: dict[str, list[Sample]] = {}
        for sample in self.samples:
            names.setdefault(sample.name, []).append(sample)
        return names

    def named(self, name: str, /, **labels: str) -> Iterator[Sample]:
        """Samples of ``edgeinfer_<name>`` that carry all of ``labels``."""
        for sample in self._by_name.get(PREFIX + name, ()):
            if all(sample.labels.get(key) == value for key, value in labels.items()):
                yield sample

    def total(self, name: str, /, **labels: str) -> float | None:
        """Their sum; None where there is none, or it is no number."""
        values = [sample.value for sample in self.named(name, **labels)]
        total = sum(values)
        return total if values and math.isfinite(total) else None


@dataclass(frozen=True)
class Alarm:
    """An alarm's state as a server exports it."""

    name: str
    raised: bool
    value: float | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class ModelReadings:
    """One model of a server. None: nothing to tell it from. Latencies in milliseconds, shares 0 .. 1."""

    model: str
    engine: str
    loaded: bool = False                 # now; what was counted before it was unloaded is kept
    healthy: bool = True
    device: str = ""
    quantization: str = ""
    max_seqs: float | None = None        # requests that may run at once
    running: float | None = None
    waiting: float | None = None
    first_token_ms: float | None = None  # mean; or how long a request has been waiting for its first token now, where that is more
    first_token_p50_ms: float | None = None
    first_token_p99_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    prefix_hit_share: float | None = None
    accept_rate: float | None = None
    decode_tokens_per_second: float | None = None
    prompt_tokens_per_second: float | None = None
    utilisation: float | None = None     # of the GPU where the model is on one, else how much of the time the engine was computing
    batch_fill: float | None = None      # tokens decoded together in a step
    kv_fill: float | None = None         # KV cells that running requests hold
    kv_idle: float | None = None         # and those that hold conversations nobody continues at the moment
    memory: Mapping[str, float] = field(default_factory=dict)    # bytes by kind
    requests: Mapping[str, float] = field(default_factory=dict)  # ended ones by reason, "failed" among them, since the server started
    alarms: tuple[Alarm, ...] = ()


@dataclass(frozen=True)
class GPUReadings:
    """One GPU of the server's machine, all its users together."""

    index: str
    name: str
    utilisation: float | None            # 0 .. 1
    memory_used: float | None            # bytes
    memory_total: float | None


@dataclass(frozen=True)
class ServerReadings:
    """All of one look at a server."""

    models: tuple[ModelReadings, ...]
    resident_bytes: float | None = None  # memory of the server's process
    gpus: tuple[GPUReadings, ...] = ()


SHARES = ("prefix_hit_share", "accept_rate", "utilisation", "kv_fill", "kv_idle")
NUMBERS = (
    "running", "waiting", "first_token_ms", "first_token_p50_ms", "first_token_p99_ms", "itl_p50_ms", "itl_p99_ms", "decode_tokens_per_second",
    "prompt_tokens_per_second", "batch_fill", *SHARES,
)
"""Fields of `ModelReadings` that an alarm may watch."""


def read(now: Snapshot, recent: Snapshot | None = None, base: Snapshot | None = None) -> tuple[ModelReadings, ...]:
    """Every model that ``now`` knows, by name.

    Rates are those between ``recent`` and ``now``; None without it. The mean of the first-token times and the batch fill are of what was added since
    ``recent``, quantiles and the other shares since ``base``; without them, since the server started. A counter that is smaller than it was belongs
    to a server that was started anew, and counts from zero.
    """
    keys = {(sample.labels.get("model_name", ""), sample.labels.get("engine", "")) for sample in now.named("engine_busy_seconds_total")}
    return tuple(_read_model(model, engine, now, recent, base) for model, engine in sorted(keys))


def read_server(now: Snapshot, recent: Snapshot | None = None, base: Snapshot | None = None) -> ServerReadings:
    """The models as by `read`, and the machine below them."""
    resident = next((sample.value for sample in now.samples if sample.name == _PROCESS_MEMORY), None)
    names = {sample.labels.get("gpu", ""): sample.labels.get("gpu_name", "") for sample in now.named("gpu_memory_total_bytes")}
    metrics = ("gpu_utilization_ratio", "gpu_memory_used_bytes", "gpu_memory_total_bytes")
    gpus = (GPUReadings(index, name, *(now.total(metric, gpu=index) for metric in metrics)) for index, name in sorted(names.items()))
    return ServerReadings(read(now, recent, base), resident, tuple(gpus))


def _read_model(model: str, engine: str, now: Snapshot, recent: Snapshot | None, base: Snapshot | None) -> ModelReadings:
    labels = {"model_name": model, "engine": engine}
    seconds = now.at - recent.at if recent is not None else 0.0

    def rate(name: str) -> float | None:
        grown = _grown(name, labels, now, recent) if seconds > 0 else None
        return None if grown is None else grown / seconds

    def share(part: str, whole: str, since: Snapshot | None) -> float | None:
        of = _grown(whole, labels, now, since)
        return (_grown(part, labels, now, since) or 0.0) / of if of else None

    def milliseconds(name: str, quantile: float) -> float | None:
        value = quantile_of(_buckets(name, labels, now, base), quantile)
        return None if value is None else 1e3 * value

    info = next(now.named("engine_info", **labels), None)
    about = info.labels if info is not None else {}
    device = about.get("device", "")
    # A time is counted when its answer is over, which may be too late for whoever waits.
    first_tokens = (share(f"{_FIRST_TOKEN}_sum", f"{_FIRST_TOKEN}_count", recent), now.total("first_token_wait_seconds", **labels) or None)
    slowest = max(filter(None, first_tokens), default=None)
    busy = rate("engine_busy_seconds_total")
    gpu = _gpu(device, now)
    return ModelReadings(
        model, engine,
        loaded=info is not None,
        healthy=now.total("engine_healthy", **labels) != 0,
        device=device,
        quantization=about.get("quantization", ""),
        max_seqs=now.total("max_num_seqs", **labels),
        running=now.total("num_requests_running", **labels),
        waiting=now.total("num_requests_waiting", **labels),
        first_token_ms=None if slowest is None else 1e3 * slowest,
        first_token_p50_ms=milliseconds(_FIRST_TOKEN, 0.5),
        first_token_p99_ms=milliseconds(_FIRST_TOKEN, 0.99),
        itl_p50_ms=milliseconds(_GAP, 0.5),
        itl_p99_ms=milliseconds(_GAP, 0.99),
        prefix_hit_share=share("prefix_cache_hits_total", "prefix_cache_queries_total", base),
        accept_rate=share("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total", base),
        decode_tokens_per_second=rate("generation_tokens_total"),
        prompt_tokens_per_second=rate("prefill_tokens_total"),
        utilisation=gpu if gpu is not None else None if busy is None else min(1.0, busy),
        batch_fill=share("decode_rows_total", "decode_steps_total", recent),
        kv_fill=now.total("kv_cache_usage_perc", **labels),
        kv_idle=now.total("kv_cache_idle_perc", **labels),
        memory={sample.labels.get("kind", ""): sample.value for sample in now.named("memory_bytes", **labels)},
        requests=_requests(labels, now),
        alarms=_alarms(labels, now),
    )


def _grown(name: str, labels: Mapping[str, str], now: Snapshot, before: Snapshot | None) -> float | None:
    after = now.total(name, **labels)
    if after is None:
        return None
    earlier = (before.total(name, **labels) if before is not None else None) or 0.0
    return after - earlier if after >= earlier else after


def _buckets(name: str, labels: Mapping[str, str], now: Snapshot, before: Snapshot | None) -> list[tuple[float, float]]:
    """(upper bound, how many values up to it) of what was added, ascending."""
    after = {_bound(sample): sample.value for sample in now.named(f"{name}_bucket", **labels)}
    earlier = {_bound(sample): sample.value for sample in before.named(f"{name}_bucket", **labels)} if before is not None else {}
    if any(after.get(bound, 0.0) < count for bound, count in earlier.items()):
        earlier = {}
    return sorted((bound, count - earlier.get(bound, 0.0)) for bound, count in after.items() if not math.isnan(bound))


def _bound(sample: Sample) -> float:
    try:
        return float(sample.labels.get("le", "nan"))
    except ValueError:
        return math.nan


def quantile_of(buckets: list[tuple[float, float]], quantile: float) -> float | None:
    """Of a histogram's cumulative buckets, even within a bucket as Prometheus has it. None of nothing; beyond the last bound, that bound."""
    if not buckets or not buckets[-1][1] > 0:
        return None
    rank = quantile * buckets[-1][1]
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (count - below)
        if not math.isinf(bound):
            low = bound
        below = count
    return low


def _gpu(device: str, now: Snapshot) -> float | None:
    kind, _, index = device.partition(":")
    return now.total("gpu_utilization_ratio", gpu=index or "0") if kind == "cuda" else None


def _requests(labels: Mapping[str, str], now: Snapshot) -> dict[str, float]:
    requests: dict[str, float] = {}
    for sample in now.named("request_success_total", **labels):
        reason = sample.labels.get("finished_reason", "")
        requests[reason] = requests.get(reason, 0.0) + sample.value
    failed = now.total("request_failed_total", **labels)
    return requests | {"failed": failed} if failed else requests


def _alarms(labels: Mapping[str, str], now: Snapshot) -> tuple[Alarm, ...]:
    return tuple(
        Alarm(name, sample.value > 0, now.total("alarm_value", name=name, **labels), now.total("alarm_threshold", name=name))
        for sample in now.named("alarm", **labels) for name in (sample.labels.get("name", ""),)
    )
