"""The server's metrics: what they count, that they add up and never go backwards, and that another program can read them."""

from __future__ import annotations

import json
import re
import sys
import threading
import tomllib
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from edgeinfer.errors import BadRequest
from edgeinfer.runtime.alarms import Alarms, rules_from
from edgeinfer.runtime.backends.fake import ScriptedBackend
from edgeinfer.runtime.readings import NEEDED, NUMBERS, Snapshot, quantile_of, read, read_server
from edgeinfer.runtime.server.histogram import Histogram
from edgeinfer.runtime.server.metrics import COMPATIBLE, ENGINE_COUNTERS, HISTOGRAMS, MISS_REASONS, Metrics, miss_reason, parse
from edgeinfer.runtime.server.nvml import GPU, open_nvml
from edgeinfer.runtime.service import Engine

ANSWER = [bytes([letter]) for letter in b"hello there"]


@dataclass
class Served:
    name: str
    engine: Engine


@dataclass
class Pool:
    """What the metrics need of a pool: who is loaded, and the names there are."""

    engines: dict[str, Engine] = field(default_factory=dict)

    def loaded(self):
        return tuple(Served(name, engine) for name, engine in self.engines.items())

    def status(self):
        return tuple(SimpleNamespace(name=name) for name in self.engines)


@pytest.fixture
def pool():
    it = Pool()
    yield it
    for engine in it.engines.values():
        engine.close()


def engine(**options) -> Engine:
    return Engine(ScriptedBackend(ANSWER, **options))


def ask(metrics: Metrics, pool: Pool, text: str = "hi", name: str = "m", **fields):
    stream = pool.engines[name].generate(text, temperature=0, **fields)
    stream.wait()
    metrics.ended(name, stream)
    return stream


def totals(metrics: Metrics, **labels: str) -> dict[str, float]:
    """Every metric's sum over the samples with these labels, histograms by their ``_count`` and ``_sum``."""
    found: Counter[str] = Counter()
    for sample in metrics.snapshot().samples:
        if all(sample.labels.get(key) == value for key, value in labels.items()) and not sample.name.endswith("_bucket"):
            found[sample.name.removeprefix("edgeinfer_")] += sample.value
    return found


def test_an_answer_is_counted_with_its_times(pool):
    pool.engines["m"] = engine()
    metrics = Metrics(pool)
    stream = ask(metrics, pool, "what", max_tokens=8)
    found, timings = totals(metrics, model_name="m", engine="fake"), stream.timings
    assert found["generation_tokens_total"] == found["request_generation_tokens_sum"] == stream.usage.completion_tokens == 8
    assert found["prompt_tokens_total"] == found["request_prompt_tokens_sum"] == stream.usage.prompt_tokens == 4
    assert found["time_to_first_token_seconds_sum"] == pytest.approx(timings.first_token_ms / 1e3)
    assert found["inter_token_latency_seconds_count"] == 7
    assert found["inter_token_latency_seconds_sum"] == pytest.approx(stream.token_times[-1] - stream.token_times[0])
    assert found["e2e_request_latency_seconds_sum"] == pytest.approx(
        found["request_queue_time_seconds_sum"] + found["request_prefill_time_seconds_sum"] + found["request_decode_time_seconds_sum"])
    assert found["request_inference_time_seconds_sum"] == pytest.approx(
        found["request_prefill_time_seconds_sum"] + found["request_decode_time_seconds_sum"])
    assert totals(metrics, finished_reason="length")["request_success_total"] == 1
    assert totals(metrics, reason="cold")["prefix_cache_misses_total"] == 1


def test_tokens_are_counted_while_an_answer_runs(pool):
    gate = threading.Event()
    steps = 0

    def hold(plan):
        nonlocal steps
        steps += 1
        if steps == 5:
            gate.wait()

    pool.engines["m"] = engine(before_forward=hold)
    metrics = Metrics(pool)
    stream = pool.engines["m"].generate("hi", temperature=0)
    events = stream.events()
    while stream.usage.completion_tokens < 4:
        next(events)
    found = totals(metrics)
    assert found["generation_tokens_total"] == 4 and found["num_requests_running"] == 1 and found["prefill_tokens_total"] == 2
    assert found["time_to_first_token_seconds_count"] == 0       # known when the endpoint says that the answer is over
    gate.set()
    stream.wait()
    metrics.ended("m", stream)
    assert totals(metrics)["num_requests_running"] == 0


def test_every_end_has_its_counter_and_they_add_up(pool):
    pool.engines["m"] = engine(before_forward=lambda plan: fail() if any(len(chunk.tokens) == 13 for chunk in plan.prefills) else None)

    def fail():
        from edgeinfer.errors import BackendFailed
        raise BackendFailed("It broke.")

    metrics = Metrics(pool)
    ask(metrics, pool, "stops by itself")
    ask(metrics, pool, "length", max_tokens=2)
    ask(metrics, pool, "thirteen long")
    stream = pool.engines["m"].generate("x" * 300)
    stream.cancel()
    stream.wait()
    metrics.ended("m", stream)
    metrics.refused("m", "engine_busy")
    metrics.refused("no such model, and\na long tale", "model_not_found")
    samples = metrics.snapshot().samples
    ends = {sample.labels["finished_reason"]: sample.value for sample in samples if sample.name == "edgeinfer_request_success_total"}
    assert ends == {"stop": 1, "length": 1, "cancelled": 1}
    found = totals(metrics)
    assert totals(metrics, code="backend_failed")["request_failed_total"] == found["request_failed_total"] == 1
    assert found["request_success_total"] + found["request_failed_total"] == found["requests_submitted_total"] == 4
    refused = {(sample.labels["model_name"], sample.labels["code"]) for sample in samples if sample.name == "edgeinfer_request_refused_total"}
    assert refused == {("m", "engine_busy"), ("", "model_not_found")}


def test_counters_of_a_model_survive_its_unloading_and_go_on(pool):
    metrics = Metrics(pool)
    seen = []
    for round_ in range(3):
        pool.engines["m"] = engine()
        ask(metrics, pool, "hi", max_tokens=4)
        seen.append(totals(metrics)["generation_tokens_total"])
        old = pool.engines.pop("m")
        seen.append(totals(metrics)["generation_tokens_total"])
        old.close()
        seen.append(totals(metrics)["generation_tokens_total"])
        assert totals(metrics)["engine_info"] == totals(metrics)["num_requests_running"] == 0
    assert seen == [4, 4, 4, 8, 8, 8, 12, 12, 12]


def test_an_engine_that_left_the_pool_while_it_answers_is_still_counted(pool):
    gate = threading.Event()
    pool.engines["m"] = leaving = engine(before_forward=lambda plan: gate.wait())
    metrics = Metrics(pool)
    assert totals(metrics)["first_token_wait_seconds"] == 0
    stream = leaving.generate("hi", max_tokens=5, temperature=0)
    assert totals(metrics)["first_token_wait_seconds"] > 0
    before = totals(metrics)["generation_tokens_total"]
    pool.engines.clear()
    assert totals(metrics)["generation_tokens_total"] == before == 0
    gate.set()
    stream.wait()
    metrics.ended("m", stream)
    leaving.close()
    found = totals(metrics, model_name="m", engine="fake")
    assert found["generation_tokens_total"] == found["request_generation_tokens_sum"] == 5


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["load", "unload", "ask", "read"]), max_size=25))
def test_no_counter_ever_goes_backwards(acts):
    pool, last, generated = Pool(), Counter(), 0
    metrics = Metrics(pool, gpus=tuple)
    try:
        for act in acts:
            if act == "load" and not pool.engines:
                pool.engines["m"] = engine()
            elif act == "unload" and pool.engines:
                pool.engines.pop("m").close()
            elif act == "ask" and pool.engines:
                generated += ask(metrics, pool, max_tokens=3).usage.completion_tokens
            elif act == "read":
                now = totals(metrics)
                assert all(now[name] >= last[name] for name in ENGINE_COUNTERS)
                last = now
        assert totals(metrics)["generation_tokens_total"] == generated
    finally:
        for left in pool.engines.values():
            left.close()


def test_what_the_monitor_takes_of_an_exposition_is_enough(pool):
    pool.engines["m"] = engine()
    metrics = Metrics(pool, gpus=lambda: (GPU(0, "H200", 0.5, 1, 2, 3.0),))
    metrics.set_alarms(Alarms().look(read(metrics.snapshot()), 0.0))
    for _ in range(3):
        ask(metrics, pool)
    now = metrics.snapshot()
    taken = replace(now, samples=tuple(sample for sample in now.samples if sample.name.startswith(NEEDED)))
    assert read_server(taken) == read_server(now) and len(taken.samples) < len(now.samples) / 2


def test_embeddings_are_counted(pool):
    pool.engines["m"] = engine()
    metrics = Metrics(pool)
    metrics.embedded("m", inputs=3, prompt_tokens=40)
    metrics.embedded("m", inputs=1, prompt_tokens=2)
    found = totals(metrics, model_name="m", engine="fake")
    assert (found["embedding_inputs_total"], found["embedding_tokens_total"]) == (4, 42)


def test_misses_become_a_few_stable_words(pool):
    pool.engines["m"] = engine(adapters=("style",), max_slots=2)
    metrics = Metrics(pool)
    ask(metrics, pool, "the first conversation")
    ask(metrics, pool, "another one")
    ask(metrics, pool, "the first conversion")
    ask(metrics, pool, "the first conversion", adapter="style")
    words = {sample.labels["reason"]: sample.value for sample in metrics.snapshot().samples if sample.name == "edgeinfer_prefix_cache_misses_total"}
    assert words == {"cold": 1, "no_match": 1, "diverged": 1, "adapter": 1}
    assert miss_reason("the sliding window has moved past the 7 shared tokens") == "window"
    assert miss_reason("the 7 shared tokens are computed sooner than copied") == "short"
    assert miss_reason("something new with 12345 in it") == "other"


def test_the_exposition_is_what_prometheus_reads(pool):
    pool.engines['we"ird\\name\n[/]'] = engine()
    metrics = Metrics(pool, compat=True)
    ask(metrics, pool, name='we"ird\\name\n[/]')
    body, kind = metrics.render()
    assert kind.startswith("text/plain; version=")
    families = list(text_string_to_metric_families(body.decode()))
    assert len({family.name for family in families}) == len(families)
    assert all(family.documentation for family in families if family.name.startswith("edgeinfer"))
    names = {sample.name for family in families for sample in family.samples}
    assert {f"edgeinfer_{name}" for name in (*ENGINE_COUNTERS, *(f"{name}_bucket" for name in HISTOGRAMS))} <= names
    assert {sample.labels["model_name"] for family in families for sample in family.samples if "model_name" in sample.labels} == {'we"ird\\name\n[/]'}
    by_name = {sample.name: sample.value for family in families for sample in family.samples if not sample.name.endswith("_bucket")}
    for alias, name in COMPATIBLE.items():
        suffix = "_count" if name in HISTOGRAMS else ""
        assert by_name[alias + suffix] == by_name[f"edgeinfer_{name}{suffix}"], alias
    # The process's own figures move between two looks; everything else is the same read either way.
    parsed, own = ([sample for sample in samples if "process" not in sample.name] for samples in (parse(body.decode()), metrics.snapshot().samples))
    assert parsed == own


def test_other_names_are_only_exported_on_request(pool):
    pool.engines["m"] = engine()
    assert b"vllm:" not in Metrics(pool).render()[0]


PIECES = ["edgeinfer_x", "{", "}", 'a="b', '"', ",", " ", "1", "nan", "\n", "# TYPE ", "histogram", "_bucket", "le=", "\\"]


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES)).map("".join)))
def test_what_is_no_exposition_is_refused_in_one_way(text):
    try:
        samples = parse(text)
    except BadRequest:
        return
    read(Snapshot(0.0, tuple(samples)))


@settings(deadline=None)
@given(st.lists(st.floats(0, 50), min_size=1, max_size=80), st.floats(0, 1))
def test_a_quantile_is_in_the_bucket_of_the_value_it_stands_for(values, share):
    bounds = (1.0, 2.0, 5.0, 10.0, 100.0)
    histogram = Histogram(bounds)
    histogram.observe(values)
    assert histogram.buckets()[-1] == ("+Inf", len(values)) and histogram.sum == pytest.approx(sum(values))
    found = quantile_of([(float(bound), count) for bound, count in histogram.buckets()], share)
    rank = max(1, -int(-share * len(values) // 1))
    value = sorted(values)[min(rank, len(values)) - 1]
    low, high = max((b for b in (0.0, *bounds) if b < value), default=0.0), min(b for b in bounds if b >= value)
    assert low <= found <= high


def test_a_gpu_is_exported_and_is_the_utilisation_of_a_model_on_it(pool):
    gpus = (GPU(0, "other", 0.9, 1, 2, None), GPU(1, "H200", 0.25, 40, 100, 1234.5))
    pool.engines["m"] = engine()
    pool.engines["m"].info = replace(pool.engines["m"].info, device="cuda:1")
    metrics = Metrics(pool, gpus=lambda: gpus)
    found = totals(metrics, gpu="1")
    assert (found["gpu_utilization_ratio"], found["gpu_memory_used_bytes"], found["energy_joules_total"]) == (0.25, 40, 1234.5)
    assert read(metrics.snapshot())[0].utilisation == 0.25


def fake_nvml(monkeypatch, count=2):
    """A stand-in for the library: the module's functions that are used, under its names."""
    module = ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def unsupported(handle):
        raise NVMLError

    module.NVMLError = NVMLError
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetCount = lambda: count
    module.nvmlDeviceGetHandleByIndex = lambda index: f"gpu{index}"
    module.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    module.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=50)
    module.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=3, total=9)
    module.nvmlDeviceGetTotalEnergyConsumption = unsupported
    module.nvmlDeviceGetName = lambda handle: str(handle).encode()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_nvml_is_read_where_it_is(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake_nvml(monkeypatch)
    assert open_nvml()() == (GPU(0, "gpu0", 0.5, 3, 9, None), GPU(1, "gpu1", 0.5, 3, 9, None))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-7")
    assert [gpu.name for gpu in open_nvml()()] == ["gpu1", "GPU-7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert open_nvml() is None


def test_no_library_or_driver_means_no_gpu(monkeypatch, pool):
    module = fake_nvml(monkeypatch)

    def missing():
        raise module.NVMLError

    module.nvmlInit = missing
    assert open_nvml() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_nvml() is None
    assert not any(name.startswith("gpu_") for name in totals(Metrics(pool)))


# ---------------------------------------------------------------------------------------------------------- documents about them

DOCS = Path(__file__).parent.parent / "docs"


def exported(pool, metrics) -> set[str]:
    """Names of everything that this server can export: families, and what Prometheus sees of a histogram."""
    names = set()
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        if family.type == "histogram":
            names |= {f"{family.name}{suffix}" for suffix in ("_bucket", "_count", "_sum")}
        names.add(family.name + ("_total" if family.type == "counter" else ""))
    return names


@pytest.fixture
def everything(pool):
    pool.engines["m"] = engine()
    return exported(pool, Metrics(pool, gpus=lambda: (GPU(0, "H200", 0.5, 1, 2, 3.0),)))


def test_the_dashboard_shows_what_is_exported(everything):
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text("utf-8"))
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    shown = set()
    for panel in panels:
        assert panel["title"] and panel["targets"] and panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert all(target["expr"].count(left) == target["expr"].count(right) for left, right in ("()", "[]", "{}"))
            shown |= set(re.findall(r"\b(?:edgeinfer|process)_\w+", target["expr"]))
    assert shown <= everything, shown - everything
    shown = {name.removesuffix("_bucket").removesuffix("_count") for name in shown}
    assert {f"edgeinfer_{name}" for name in (*HISTOGRAMS, *ENGINE_COUNTERS)} <= shown
    cells = [(panel["gridPos"]["x"], panel["gridPos"]["y"], panel["gridPos"]["w"], panel["gridPos"]["h"]) for panel in dashboard["panels"]]
    for at, (x, y, w, h) in enumerate(cells):
        assert x + w <= 24 and not any(x < x2 + w2 and x2 < x + w and y < y2 + h2 and y2 < y + h for x2, y2, w2, h2 in cells[at + 1:])


def test_the_manual_lists_exactly_what_is_exported(everything):
    manual = (DOCS / "monitoring.md").read_text("utf-8")
    listed = {name for name in re.findall(r"`(?:edgeinfer_)?([a-z0-9_]+)(?:\{[^`]*\})?`", manual.partition("## Metrics")[2].partition("\n## ")[0])}
    ours = {name.removeprefix("edgeinfer_") for name in everything if name.startswith("edgeinfer_")}
    ours = {name for name in ours if not name.endswith(("_bucket", "_count", "_sum"))}
    assert listed >= ours, ours - listed
    assert listed <= ours | WORDS, listed - ours - WORDS
    assert set(NUMBERS) <= set(re.findall(r"`(\w+)`", manual))
    rules = rules_from(tomllib.loads(re.search(r"```toml\n(.*?)```", manual, re.DOTALL)[1])["alarms"])
    assert {(rule.name, rule.threshold) for rule in rules} == {("first_token_slow", 1500), ("full", 0.9)}


WORDS = {*MISS_REASONS.values(), "other", "stop", "length", "cancelled", "edgeinfer_", "model_name", "engine", "process_resident_memory_bytes"}
