"""A bench report on its way to disk, terminal and browser."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.errors import BadRequest
from edgeinfer.runtime.bench import command, comparison, page, report_file, svg, table
from edgeinfer.runtime.bench.values import Batched, KindFigures, Machine, Model, Rate, Report, ScenarioFigures, Settings, Spread, StepProfile


def kind(p50: float, requests: int = 4) -> KindFigures:
    return KindFigures(requests, Spread(p50, 2 * p50, 3 * p50), Spread(8.0, 9.0, 20.0), Spread(10 * p50, 20 * p50, 30 * p50), 150.0, 30.0, 32.0)


REPORT = Report(
    started="2026-01-02T03:04:05+00:00",
    machine=Machine("0.1.0", "3.11.7", "Linux 6.1 x86_64", "Some CPU & <Co>", 2, 2, "AVX2 = 1 | OPENMP = 1"),
    model=Model("Tiny <model> & more", "Q4_0", "llamacpp", "cpu", 0, 8192, 16, 16384, "f16", 23040, 91_700_000),
    settings=Settings(),
    rates=(Rate.of("pp512", [600.0, 610.0]), Rate.of("tg128", [130.0, 131.0])),
    batched=(Batched(1, 128, 64, 0.2, 640.0, 0.5, 128.0, 274.3), Batched(16, 128, 64, 3.3, 620.6, 2.5, 409.6, 529.7)),
    scenarios=(
        ScenarioFigures("single", 1, 8, 0, {}, 9.0, 900, 100.0, {"single": kind(180.0)}, (100.0,)),
        ScenarioFigures("mixed", 10, 44, 1, {"It <broke>.": 1}, 30.0, 1376, 45.9, {"long": kind(4000.0), "short": kind(400.0)}, (45.9,)),
        ScenarioFigures("turns", 4, 1, 1, {"All failed.": 1}, 1.0, 0, 0.0, {}, (0.0,)),
    ),
    profile=(StepProfile(1, 127, 7.7, 7.4, {"plan": 0.1, "batch": 0.05, "sample": 0.1, "detokenize": 0.01, "deliver": 0.02, "other": 0.02}, "temperature 0.8", 3.5),),
    notices=("Something & else.",),
)
EMPTY = Report(started=REPORT.started, machine=REPORT.machine, model=REPORT.model, settings=REPORT.settings, interrupted=True)


def faster(report: Report = REPORT) -> Report:
    """pp twice as fast, tg within noise, single's latencies half, mixed without its short ones, one failure fewer."""
    single, mixed, turns = report.scenarios
    return dataclasses.replace(
        report,
        rates=(Rate.of("pp512", [1200.0, 1220.0]), Rate.of("tg128", [131.0, 132.0])),
        scenarios=(
            dataclasses.replace(single, kinds={"single": kind(90.0)}, output_tokens_per_second=80.0),
            dataclasses.replace(mixed, failed=0, kinds={"long": kind(4000.0)}), turns,
        ),
        machine=dataclasses.replace(report.machine, threads=4),
    )


# -------------------------------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize("report", [REPORT, EMPTY, faster()], ids=["whole", "empty", "faster"])
def test_a_report_survives_its_file(report, tmp_path) -> None:
    path = tmp_path / "run.json"
    document = report_file.as_document(report)
    report_file.write_text(path, json.dumps(document, allow_nan=False))
    assert report_file.read(path) == report
    assert list(document)[:2] == ["kind", "schema"] and document["kind"] == "edgeinfer-bench" and document["schema"] == 1
    assert [each["python_percent"] for each in document["profile"]] == [pytest.approx(3.896, abs=0.01)] * len(report.profile)


def test_a_file_with_more_than_is_known_is_read(tmp_path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**report_file.as_document(REPORT), "comparison": {"rows": []}, "later": 1}))
    assert report_file.read(path) == REPORT


@pytest.mark.parametrize(("content", "named"), [
    ("not json", "not JSON"), ("[1, 2]", "not a report"), ('{"kind": "other", "schema": 1}', "not a report"), ("", "not JSON"),
    ('{"kind": "edgeinfer-bench", "schema": 2}', "schema version 2"), ('{"kind": "edgeinfer-bench"}', "schema version None"),
    ('{"kind": "edgeinfer-bench", "schema": 1}', "started is missing"),
])
def test_other_files_are_refused_with_the_reason(content, named, tmp_path) -> None:
    path = tmp_path / "run.json"
    path.write_text(content)
    with pytest.raises(BadRequest, match=named) as refusal:
        report_file.read(path)
    assert str(path) in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_missing_or_binary_file_is_refused(tmp_path) -> None:
    with pytest.raises(BadRequest, match="no file"):
        report_file.read(tmp_path / "gone.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadRequest, match="not JSON"):
        report_file.read(tmp_path / "binary")


def places(value: object, at: tuple = ()) -> list[tuple]:
    """The way to every value inside a JSON document."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at] * bool(at) + [place for key, each in inside for place in places(each, (*at, key))]


PLAIN = json.loads(json.dumps(report_file.as_document(REPORT)))
OTHER = st.one_of(st.none(), st.booleans(), st.text(max_size=3), st.integers(), st.floats(allow_nan=False), st.just([]), st.just({}))


@given(st.sampled_from(places(PLAIN)), OTHER)
def test_a_changed_file_is_read_or_refused_never_a_crash(tmp_path_factory, place, value) -> None:
    document = copy.deepcopy(PLAIN)
    owner = document
    for key in place[:-1]:
        owner = owner[key]
    owner[place[-1]] = value
    path = tmp_path_factory.getbasetemp() / "changed-bench.json"
    path.write_text(json.dumps(document))
    try:
        read = report_file.read(path)
    except BadRequest as refusal:
        assert str(path) in str(refusal)
    else:
        table.render(read, comparison.compare(REPORT, read))


def test_a_wrong_type_is_named_by_its_place(tmp_path) -> None:
    for place, named in (((("scenarios", 1, "kinds", "long", "latency_ms", "p50"), "x"), r"scenarios\[1\].kinds.long.latency_ms.p50 is str instead of a number"),
                         ((("rates", 0, "samples"), 3), r"rates\[0\].samples is int instead of list"), ((("machine", "cores"), True), "machine.cores is bool instead of int"),
                         ((("rates", 0, "mean"), -1), "rates.0..mean is -1 instead of a number from 0"), ((("rates", 0, "sd"), float("nan")), "sd is nan instead")):
        (way, value), document = place, copy.deepcopy(PLAIN)
        owner = document
        for key in way[:-1]:
            owner = owner[key]
        owner[way[-1]] = value
        (tmp_path / "run.json").write_text(json.dumps(document))
        with pytest.raises(BadRequest, match=named):
            report_file.read(tmp_path / "run.json")


# -------------------------------------------------------------------------------------------------------------------- files


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report_file.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        report_file.write_text(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_written_file_is_an_ordinary_one(tmp_path) -> None:
    report_file.write_text(tmp_path / "a", "ä")
    (tmp_path / "b").write_text("ä")
    assert (tmp_path / "a").read_text("utf-8") == "ä" and (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_where_nothing_can_be_written_is_said_first(tmp_path) -> None:
    with pytest.raises(BadRequest, match="folder"):
        report_file.check_writable(tmp_path)
    with pytest.raises(BadRequest, match="gone"):
        report_file.check_writable(tmp_path / "gone" / "page.html")
    report_file.check_writable(Path("page.html"))


# --------------------------------------------------------------------------------------------------------------- comparison


def test_ratios_and_directions() -> None:
    found = comparison.compare(REPORT, faster())
    rows = {row.name: row for row in found.rows}
    assert (rows["pp512"].verdict, rows["pp512"].ratio) == ("better", 2.0)
    assert rows["tg128"].verdict == "same"                                           # less than the noise
    assert (rows["single output"].verdict, rows["single output"].ratio) == ("worse", 0.8)
    assert (rows["single TTFT p90"].verdict, rows["single TTFT p90"].ratio) == ("better", 0.5)
    assert (rows["mixed failed"].verdict, rows["mixed failed"].ratio) == ("better", 0.0)
    assert (rows["single failed"].verdict, rows["single failed"].ratio) == ("same", None)
    assert rows["16 sequences S_TG"].ratio == 1 and rows["1 sequence S_PP"].verdict == "same" and rows["Python share at 1"].verdict == "same"
    assert found.differences == ("threads: 2 before, 4 now",)
    # The name of a kind does not depend on whether the other kind is there.
    assert any(name.startswith("mixed short TTFT") for name in found.only_before) and rows["mixed long TTFT p50"].verdict == "same"
    assert found.only_now == ()


def test_the_way_back_turns_better_into_worse() -> None:
    opposite = {"better": "worse", "worse": "better", "same": "same"}
    there, back = comparison.compare(REPORT, faster()), comparison.compare(faster(), REPORT)
    assert {row.name: opposite[row.verdict] for row in there.rows} == {row.name: row.verdict for row in back.rows}
    assert back.only_now == there.only_before


def test_a_run_is_the_same_as_itself() -> None:
    found = comparison.compare(REPORT, REPORT)
    assert {row.verdict for row in found.rows} == {"same"} and found.differences == found.only_now == found.only_before == ()
    assert len(found.rows) == len({row.name for row in found.rows}) > 40


# -------------------------------------------------------------------------------------------------------------------- table


def test_the_table_says_all_figures() -> None:
    text = table.render(REPORT, comparison.compare(REPORT, faster()))
    for part in (
        "Tiny <model> & more, Q4_0", "23,040 bytes a token", "weights 91.7 MB", "2 threads", "AVX2", "note: Something & else.", "605.00", "7.07", "pp512", "tg128",
        "S_PP", "409.6", "mixed short", "mixed: 1 failed: It <broke>.", "180 ms", "4.00 s", "12.0 s", "3.9 %", "3.5 %", "better", "worse", "not the same: threads: 2 before, 4 now",
    ):
        assert part in text, part
    assert "Interrupted" not in text and max(map(len, text.splitlines())) <= 130
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_columns_are_aligned() -> None:
    lines = table.render(REPORT).splitlines()
    start = next(index for index, line in enumerate(lines) if "TTFT p50" in line)
    header, rows = lines[start], lines[start + 1 : start + 4]
    ends = [match.end() for match in re.finditer(r"p50|p90|p99|prompt|cached", header)]
    for row in rows:
        assert all(row[end - 1].isalnum() and row[end : end + 1] in ("", " ") for end in ends), row


def test_an_interrupted_report_says_so() -> None:
    assert "Interrupted" in table.render(EMPTY) and "Interrupted" in page.render(EMPTY)


def test_terminals_without_block_characters_get_ascii() -> None:
    text = table.render(REPORT, encoding="ascii")
    assert text.isascii() and "#####" in text
    assert "█" in table.render(REPORT, encoding="utf-8")


@pytest.mark.parametrize(("milliseconds", "text"), [(0, "0.00 ms"), (8.314, "8.31 ms"), (99.96, "100 ms"), (184.4, "184 ms"), (999.6, "1.00 s"), (2412, "2.41 s"), (33_000, "33.0 s"), (3.6e6, "3,600 s")])
def test_durations_have_three_digits(milliseconds, text) -> None:
    assert table.duration(milliseconds) == text


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_bars_are_as_long_as_their_share(value: float, longest: float) -> None:
    value = min(value, longest)
    drawn = table.bar(value, longest)
    assert len(drawn) <= 32 and (not longest or abs(len(drawn) - 32 * value / longest) <= 1)


@given(st.lists(st.floats(0, 1e6), min_size=3, max_size=3).map(sorted), st.floats(1, 2))
def test_layered_bars_keep_their_order(values: list[float], room: float) -> None:
    drawn = table.layered(Spread(*values), values[2] * room)
    assert re.fullmatch("█*▓*░*", drawn) and len(drawn) <= 32


# --------------------------------------------------------------------------------------------------------------------- page


@pytest.mark.parametrize("report", [REPORT, EMPTY, faster()], ids=["whole", "empty", "faster"])
def test_the_page_is_well_formed_and_stands_alone(report) -> None:
    text = page.render(report, comparison.compare(REPORT, report))
    root = ET.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
    assert not re.search(r"https?:|//|url\(|@import|src=|href=|<script|<link", text)
    assert "prefers-color-scheme: dark" in text and root.find(".//h1").text == "Tiny <model> & more"
    for drawing in root.iter("svg"):
        assert drawing.get("role") == "img" and drawing.get("aria-label") == drawing.find("title").text


def test_the_page_has_the_charts_and_the_figures() -> None:
    root = ET.fromstring(page.render(REPORT, comparison.compare(REPORT, faster())).removeprefix("<!DOCTYPE html>\n"))
    assert [drawing.get("aria-label") for drawing in root.iter("svg")] == [
        "tokens a second", "tokens a second of all sequences together", "output tokens a second by scenario", "Time to first token", "Inter-token latency", "Whole request",
        "Python side of a decode step in percent",
    ]
    said = " ".join(root.itertext())
    for part in ("605.0 ± 7.1", "mixed short", "It <broke>.", "23,040 bytes", "409.6", "3.9 %", "Not the same: threads: 2 before, 4 now."):
        assert part in said, part
    assert {row.get("class") for row in root.iter("tr")} >= {"better", "worse", "same"}


def test_every_class_in_a_drawing_has_a_style() -> None:
    text = page.render(REPORT)
    used = {name for drawing in re.findall(r"<svg.*?</svg>", text) for classes in re.findall(r'class="([^"]+)"', drawing) for name in classes.split()}
    styled = set(re.findall(r"\.([a-z]+\d*)", page._STYLE))
    assert used <= styled


def numbers(drawing: str, name: str) -> list[float]:
    return [float(value) for value in re.findall(rf' {name}="(-?[\d.]+)"', drawing)]


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=8))
def test_bars_stay_in_the_drawing_and_in_proportion(values: list[float]) -> None:
    drawing = svg.bars("t", [(f"row {index}", value, "") for index, value in enumerate(values)])
    ET.fromstring(drawing)
    widths = numbers(drawing, "width")
    assert len(widths) == len(values) and all(0 <= width <= svg.WIDTH for width in widths)
    if max(values) > 0:
        assert all(abs(width - max(widths) * value / max(values)) < 0.11 for width, value in zip(widths, values, strict=True))


@given(st.lists(st.integers(1, 64), min_size=1, max_size=6, unique=True).map(sorted), st.data())
def test_lines_stay_in_the_drawing(xs: list[int], data) -> None:
    ys = data.draw(st.lists(st.floats(0, 1e6), min_size=len(xs), max_size=len(xs)))
    drawing = svg.lines("t", xs, [("one", ys)], x_label="x")
    ET.fromstring(drawing)
    assert len(numbers(drawing, "cx")) == len(xs)
    assert all(0 <= x <= svg.WIDTH for x in numbers(drawing, "cx")) and all(0 <= y <= 250 for y in numbers(drawing, "cy"))


# --------------------------------------------------------------------------------------------------------------------- show


def test_json_is_one_document_and_the_page_is_written(tmp_path, capsys) -> None:
    status = command.show(REPORT, comparison.compare(REPORT, faster()), as_json=True, html=tmp_path / "page.html")
    document = json.loads(capsys.readouterr().out)
    assert status == 0 and document["comparison"]["rows"][0]["name"] == "pp512" and document["model"]["kv_type"] == "f16"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_an_interrupted_run_is_shown_and_has_status_130(capsys) -> None:
    assert command.show(EMPTY, None, as_json=False, html=None) == 130
    assert "Interrupted" in capsys.readouterr().out
