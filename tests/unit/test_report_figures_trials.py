"""The figures of trials: learning curves and drift."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from figure_parts import made, rows_of
from html_studies import results
from results import make_result

from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.question import Question
from raypar.report import figures_trials
from raypar.report.vega import Figure, for_page


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


def test_of_many_points_the_best_have_curves() -> None:
    trials = [
        replace(
            make_result({"lr": i / 7}, 0, 4.0),
            reports=tuple({"accuracy": 0.5 + i / 100, "train_time_s": 2.0} for _ in range(2)),
        )
        for i in range(9)
    ]
    _, figures = made(trials, Question("s", {}, ("lr",), num_repeats=1))
    assert {row["value"] for row in rows_of(figures["learning"])} == {0.5 + i / 100 for i in range(3, 9)}
    assert "The 6 best points of 9." in figures["learning"].alternative


def test_a_loop_that_tells_no_times_has_its_curves_from_report_to_report() -> None:
    trials = [
        replace(make_result({"num_workers": n}, 0, None), reports=tuple({"accuracy": a} for a in (0.5, 0.7)))
        for n in (1, 2)
    ]
    _, figures = made(trials)
    figure = figures["learning"]
    assert figure.title.endswith("from report to report")
    assert [(row["time"], row["value"]) for row in rows_of(figure)] == [(1, 0.5), (2, 0.7)] * 2
    assert figure.spec["layer"][0]["encoding"]["x"]["title"] == "report"
