"""The figures of a study: what stands in each, in words as well, and why one is left out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from html_studies import question, results
from hypothesis import given
from hypothesis import strategies as st
from results import make_result

from raypar.analysis.pareto import pareto_front
from raypar.analysis.question import Question
from raypar.analysis.speedup import StudyAnalysis, analyse
from raypar.errors import RayparError
from raypar.report import figures_points, figures_trials
from raypar.report.figures import IDEAL, figures_of, write_figures
from raypar.report.figures_vega import MAX_SERIES, Figure, LeftOut, for_page, static_svg, thinned
from raypar.study.trial import TrialResult

HOSTILE = "</script><script>alert(1)</script> a.b['c'] \" ' & {{7*7}}"


def made(trials: list[TrialResult], asked: Question | None = None) -> tuple[StudyAnalysis, dict[str, Figure]]:
    analysis = analyse(asked or question(), trials)
    return analysis, {f.key: f for f in figures_of(analysis, trials) if isinstance(f, Figure)}


@pytest.fixture(scope="module")
def full() -> tuple[StudyAnalysis, dict[str, Figure]]:
    return made(results())


def walk(node: Any) -> Iterator[dict[str, Any]]:
    """Every object of a spec, the rows of its data left out."""
    if isinstance(node, dict):
        yield node
        for key, value in node.items():
            if key != "values":
                yield from walk(value)
    elif isinstance(node, list):
        for value in node:
            yield from walk(value)


def rows_of(figure: Figure) -> list[dict[str, Any]]:
    return list(figure.spec["data"]["values"])


def own_rows(figure: Figure, layer: int) -> list[dict[str, Any]]:
    return list(figure.spec["layer"][layer]["data"]["values"])


def test_a_study_with_everything_has_every_figure_with_a_title_and_words(
    full: tuple[StudyAnalysis, dict[str, Figure]],
) -> None:
    _, figures = full
    assert list(figures) == [
        "speedup",
        "efficiency",
        "times",
        "breakdown",
        "pareto",
        "learning",
        "heat_map",
        "drift",
    ]
    for figure in figures.values():
        assert figure.title and len(figure.alternative) > 80
        json.dumps(for_page(figure), allow_nan=False)


def test_every_figure_can_be_drawn_in_the_colour_of_the_page(full: tuple[StudyAnalysis, dict[str, Figure]]) -> None:
    for figure in full[1].values():
        svg = static_svg(figure)
        assert svg.startswith("<svg") and "currentColor" in svg and "NaN" not in svg, figure.key


def test_a_study_without_a_result_has_no_figure_and_says_why_of_each() -> None:
    left_out = figures_of(analyse(question(), []), [])
    assert len(left_out) == 8
    for figure in left_out:
        assert isinstance(figure, LeftOut) and figure.reason and not figure.reason.endswith(".")


def test_speedups_stand_in_the_figure_with_their_intervals_and_in_its_words(
    full: tuple[StudyAnalysis, dict[str, Figure]],
) -> None:
    analysis, figures = full
    drawn = {(row["series"], row["workers"]): row for row in rows_of(figures["speedup"])}
    for group in analysis.worker_groups:
        for workers, speedup in group.speedups.items():
            row = drawn.pop((group.label, workers))
            assert row["value"] == speedup.value
            assert row["value_low"] <= row["value"] <= row["value_high"]
            assert (row["value_low"], row["value_high"]) == (speedup.low or 1.0, speedup.high or 1.0)
            assert row["shown"] in figures["speedup"].alternative
    assert not drawn


def test_the_ideal_line_and_the_laws_stand_in_the_figure(full: tuple[StudyAnalysis, dict[str, Figure]]) -> None:
    figure = full[1]["speedup"]
    ideal, laws = own_rows(figure, 0), own_rows(figure, 1)
    assert [(row["workers"], row["value"]) for row in ideal] == [(1, 1.0), (4, 4.0)]
    assert {row["kind"] for row in ideal} == {IDEAL}
    assert {row["kind"] for row in laws} == {"Amdahl's law"}  # Gunther's takes four worker counts
    for row in laws:
        if row["workers"] == 1:
            assert row["value"] == pytest.approx(1.0)
        assert row["value"] <= row["workers"] * 1.0001
    assert "Amdahl's law" in figure.alternative


def test_efficiency_is_speedup_over_workers(full: tuple[StudyAnalysis, dict[str, Figure]]) -> None:
    figures = full[1]
    for one, other in zip(rows_of(figures["speedup"]), rows_of(figures["efficiency"]), strict=True):
        assert other["value"] == pytest.approx(one["value"] / one["workers"])
        assert other["value_low"] == pytest.approx(one["value_low"] / one["workers"])


def test_of_more_groups_than_there_are_colours_the_first_are_drawn_and_that_is_said() -> None:
    trials = [
        make_result({"lr": lr / 10, "num_workers": n}, r, 4.0 / n + lr / 100)
        for lr in range(1, MAX_SERIES + 3)
        for n in (1, 2)
        for r in range(2)
    ]
    _, figures = made(trials)
    assert len({row["series"] for row in rows_of(figures["speedup"])}) == MAX_SERIES
    assert f"The first {MAX_SERIES} of {MAX_SERIES + 2} groups" in figures["speedup"].alternative


def test_colour_never_stands_alone(full: tuple[StudyAnalysis, dict[str, Figure]]) -> None:
    for key in ("speedup", "efficiency", "pareto", "learning"):
        marks = [layer for layer in full[1][key].spec["layer"] if "tooltip" in layer["encoding"]]
        assert marks, key
        for layer in marks:
            scales = [layer["encoding"][channel]["scale"] for channel in ("color", "shape")]
            assert scales[0]["domain"] == scales[1]["domain"]
            assert all(len(set(scale["range"])) == len(scale["domain"]) for scale in scales)


def test_the_parts_of_a_step_add_up_to_it(full: tuple[StudyAnalysis, dict[str, Figure]]) -> None:
    analysis, figures = full
    assert len(analysis.profiles) == 6
    totals: dict[str, float] = {}
    for row in rows_of(figures["breakdown"]):
        totals[row["point"]] = totals.get(row["point"], 0.0) + row["value"]
    assert sorted(totals.values()) == pytest.approx(sorted(1e3 * p.mean.step_s for _, p in analysis.profiles))


@given(
    st.lists(st.tuples(st.integers(1, 6).map(float), st.integers(1, 6).map(float)), min_size=1, max_size=30),
)
def test_the_front_is_that_of_all_pairs(medians: list[tuple[float, float]]) -> None:
    assert figures_points._front(medians) == set(pareto_front(medians))


def test_a_metric_that_is_to_be_small_turns_the_front_round() -> None:
    trials = [
        replace(make_result({"lr": lr}, 0, time_s), reports=({"epoch": 1, "loss": loss},))
        for lr, time_s, loss in ((0.1, 1.0, 0.5), (0.2, 2.0, 0.9), (0.3, 3.0, 0.1))
    ]
    fronts = []
    for mode in ("min", "max"):
        _, figures = made(trials, Question("s", {}, ("lr",), metric="loss", mode=mode))
        on_it = [r["point"] for r in rows_of(figures["pareto"]) if r["series"] == figures_points.ON_FRONT]
        fronts.append(on_it)
    assert fronts == [["lr=0.1", "lr=0.3"], ["lr=0.1", "lr=0.2"]]


def test_the_interval_of_an_accuracy_ends_at_100_percent_and_that_of_a_loss_does_not() -> None:
    trials = [
        replace(make_result({"lr": 0.1}, r, 4.0 + r), reports=({"epoch": 1, "accuracy": value, "loss": value},))
        for r, value in enumerate((0.5, 1.0))
    ]
    highs = []
    for metric in ("accuracy", "loss"):
        _, figures = made(trials, Question("s", {}, ("lr",), metric=metric))
        (row,) = rows_of(figures["pareto"])
        highs.append(row["value_high"])
    assert highs[0] == 1.0 < highs[1]


def test_without_a_law_there_is_no_empty_layer_for_it() -> None:
    _, figures = made([make_result({"num_workers": n}, r, 4.0 / n + r / 9) for n in (1, 2) for r in range(3)])
    layers = figures["speedup"].spec["layer"]
    assert all(layer["data"]["values"] for layer in layers if "data" in layer)
    assert "no law" in figures["speedup"].alternative


def test_a_learning_curve_is_over_the_time_trained_so_far(full: tuple[StudyAnalysis, dict[str, Figure]]) -> None:
    rows = [row for row in rows_of(full[1]["learning"]) if row["trial"] == "lr=0.1 num_workers=1 #1"]
    trial = results()[0]
    assert trial.train_time_s is not None
    assert [row["time"] for row in rows] == pytest.approx([trial.train_time_s * i / 4 for i in (1, 2, 3, 4)])
    assert [row["value"] for row in rows] == [report["accuracy"] for report in trial.reports]


def test_long_studies_are_thinned_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures_trials, "MAX_REPORTS", 24)
    monkeypatch.setattr(figures_trials, "MAX_CURVES", 1)
    _, figures = made(results())
    rows = rows_of(figures["learning"])
    assert len(rows) == 24 and len({row["trial"] for row in rows}) == 6
    assert "6 of 18 trials" in figures["learning"].alternative


@given(st.integers(0, 50), st.integers(1, 20))
def test_thinned_rows_are_few_enough_and_end_with_the_last(num_rows: int, most: int) -> None:
    rows = [{"i": i} for i in range(num_rows)]
    kept = thinned(rows, most)
    assert len(kept) <= most or num_rows <= most
    assert kept == sorted(kept, key=lambda row: int(row["i"])) and kept[-1:] == rows[-1:]
    assert num_rows > most or kept == rows


def test_the_heat_map_is_for_two_hyperparameters_that_fill_a_grid(
    full: tuple[StudyAnalysis, dict[str, Figure]],
) -> None:
    cells = rows_of(full[1]["heat_map"])
    assert {(row["across"], row["down"]) for row in cells} == {(x, y) for x in ("0.1", "0.2") for y in "124"}
    drawn = [make_result({"lr": i / 7, "momentum": i / 9}, 0, 1.0 + i) for i in range(1, 9)]
    _, figures = made(drawn, Question("s", {}, ("lr", "momentum"), num_repeats=1))
    assert "heat_map" not in figures


def test_drift_is_each_trials_time_over_its_points_median(full: tuple[StudyAnalysis, dict[str, Figure]]) -> None:
    analysis, figures = full
    rows = rows_of(figures["drift"])
    assert len(rows) == 18 and rows[0]["minutes"] == 0
    assert [row["minutes"] for row in rows] == pytest.approx([i * 0.2 for i in range(18)])
    medians = {f"{p.point['lr']:g} {p.point['num_workers']}": p.time_s for p in analysis.points}
    for trial, row in zip(results()[:18], rows, strict=True):
        median = medians[f"{trial.spec.point['lr']:g} {trial.spec.point['num_workers']}"]
        assert median is not None and trial.train_time_s is not None
        assert row["value"] == pytest.approx(trial.train_time_s / median.value)


def test_numbers_that_can_not_be_drawn_leave_a_gap_and_no_broken_json() -> None:
    bad = [replace(r, reports=(*r.reports, {"epoch": 5, "accuracy": np.nan, "train_time_s": 1.0})) for r in results()]
    _, figures = made(bad)
    for figure in figures.values():
        json.dumps(for_page(figure), allow_nan=False)
    assert len(rows_of(figures["learning"])) == 18 * 4


def test_names_of_a_study_are_values_and_titles_only() -> None:
    trials = [
        replace(r, spec=replace(r.spec, point={HOSTILE: HOSTILE, "num_workers": r.spec.point["num_workers"]}))
        for r in results(metric=HOSTILE)
        if r.spec.point["lr"] == 0.1
    ]
    _, figures = made(trials, question(metric=HOSTILE, keys=(HOSTILE, "num_workers")))
    assert {"speedup", "pareto", "learning", "times", "drift"} <= figures.keys()
    for figure in figures.values():
        for part in walk(figure.spec):
            assert HOSTILE not in json.dumps({k: part[k] for k in ("field", "test", "expr", "signal") if k in part})
            assert all(re.fullmatch(r"[\w$]+", key) for key in part)
        svg = static_svg(figure)
        assert "<script" not in svg and "alert(1)<" not in svg


@pytest.mark.parametrize(("kind", "magic"), [("svg", b"<svg"), ("png", b"\x89PNG")])
def test_each_figure_is_written_into_a_file_of_its_own(
    full: tuple[StudyAnalysis, dict[str, Figure]], tmp_path: Path, kind: Any, magic: bytes
) -> None:
    some = [full[1]["speedup"], LeftOut("Heat map", "none"), full[1]["drift"]]
    written = write_figures(some, tmp_path / "new" / "folder", kind)
    assert [path.name for path in written] == [f"speedup.{kind}", f"drift.{kind}"]
    for path in written:
        content = path.read_bytes()
        assert content.startswith(magic) and b"currentColor" not in content


def test_a_folder_that_can_not_be_written_is_told(
    full: tuple[StudyAnalysis, dict[str, Figure]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RayparError, match="can't be written"):
        write_figures([full[1]["times"]], tmp_path / "file", "svg")
