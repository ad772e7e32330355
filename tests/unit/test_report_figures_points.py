"""The figures of points: times, where time goes, the Pareto front, heat maps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from figure_parts import made, rows_of
from results import make_result

from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.candidates import Constraints
from raypar.analysis.question import Question
from raypar.analysis.recommend import recommend
from raypar.report import figures as all_figures
from raypar.report.vega import Figure
from raypar.study.trial import point_label


def test_the_parts_of_a_step_add_up_to_it(full: tuple[StudyAnalysis, dict[str, Figure]]) -> None:
    analysis, figures = full
    assert len(analysis.profiles) == 6
    totals: dict[str, float] = {}
    for row in rows_of(figures["breakdown"]):
        totals[row["point"]] = totals.get(row["point"], 0.0) + row["value"]
    assert sorted(totals.values()) == pytest.approx(sorted(1e3 * p.mean.step_s for _, p in analysis.profiles))


def test_the_front_is_that_of_recommend() -> None:
    accuracies = {1: 0.97, 2: 0.99, 4: 0.95, 8: 0.95}
    times = {1: (40.0, 41.0, 42.0), 2: (22.0, 23.0, 24.0), 4: (12.0, 13.0, 14.0), 8: (15.2, 13.2, 11.2)}
    for repeats in (1, 3):
        trials = [
            make_result({"num_workers": n}, r, times[n][r], accuracies[n] - r / 1e4)
            for n in accuracies
            for r in range(repeats)
        ]
        asked = Question("s", {}, ("num_workers",))
        _, figures = made(trials, asked)
        drawn = {r["point"] for r in rows_of(figures["pareto"]) if r["series"] == all_figures.ON_FRONT}
        marked = {point_label(c.point) for c in recommend(asked, trials, Constraints()).candidates if c.is_on_front}
        assert drawn == marked >= {"num_workers=2", "num_workers=4"}
        assert ("num_workers=8" in drawn) == (repeats > 1)  # no significant difference from 4


def test_a_metric_that_is_to_be_small_turns_the_front_round() -> None:
    trials = [
        replace(make_result({"lr": lr}, 0, time_s), reports=({"epoch": 1, "loss": loss},))
        for lr, time_s, loss in ((0.1, 1.0, 0.5), (0.2, 2.0, 0.9), (0.3, 3.0, 0.1))
    ]
    fronts = []
    for mode in ("min", "max"):
        _, figures = made(trials, Question("s", {}, ("lr",), metric="loss", mode=mode))
        on_it = [r["point"] for r in rows_of(figures["pareto"]) if r["series"] == all_figures.ON_FRONT]
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


def test_the_heat_map_is_for_two_hyperparameters_that_fill_a_grid(
    full: tuple[StudyAnalysis, dict[str, Figure]],
) -> None:
    cells = rows_of(full[1]["heat_map"])
    assert {(row["across"], row["down"]) for row in cells} == {(x, y) for x in ("0.1", "0.2") for y in "124"}
    drawn = [make_result({"lr": i / 7, "momentum": i / 9}, 0, 1.0 + i) for i in range(1, 9)]
    _, figures = made(drawn, Question("s", {}, ("lr", "momentum"), num_repeats=1))
    assert "heat_map" not in figures


def test_the_parts_of_a_trial_add_up_to_the_mean_of_its_points_trials() -> None:
    trials = [
        replace(
            make_result({"num_workers": n}, r, 4.0, wall_s=10.0 + r),
            startup_s=1.0,
            data_time_s=0.25,
            warmup_s=0.5,
            eval_time_s=0.75,
        )
        for n in (1, 2)
        for r in (0, 1)
    ]
    _, figures = made(trials)
    rows = rows_of(figures["trial_parts"])
    for name in ("1", "2"):
        parts = {row["part"]: row["value"] for row in rows if row["point"] == name}
        assert sum(parts.values()) == pytest.approx(10.5)
        assert (parts["start-up"], parts["loading data"], parts["training"]) == (0.75, 0.25, 4.0)
    assert "num_workers=1: 10.5 s, of it training 38 %" in figures["trial_parts"].alternative


def test_points_are_called_by_their_values_with_the_keys_as_title(
    full: tuple[StudyAnalysis, dict[str, Figure]],
) -> None:
    for key in ("times", "trial_parts", "breakdown"):
        y = full[1][key].spec["layer"][0]["encoding"]["y"]
        assert y["title"] == "lr, num_workers"
        assert {row["point"] for row in rows_of(full[1][key])} == {f"{lr}, {n}" for lr in (0.1, 0.2) for n in (1, 2, 4)}


def test_of_many_points_the_fastest_are_drawn_and_that_is_said() -> None:
    trials = [make_result({"lr": i / 7}, 0, 100.0 - i) for i in range(50)]
    _, figures = made(trials, Question("s", {}, ("lr",), num_repeats=1))
    drawn = [row["value"] for row in rows_of(figures["times"])]
    assert drawn == [51.0 + i for i in range(40)]
    assert "The 40 fastest of 50 points." in figures["times"].alternative


def test_the_metric_has_a_heat_map_of_its_own(full: tuple[StudyAnalysis, dict[str, Figure]]) -> None:
    analysis, figures = full
    cells = {(row["across"], row["down"]): row["value"] for row in rows_of(figures["metric_heat_map"])}
    for point in analysis.points:
        if point.metric is not None:
            assert cells.pop((f"{point.point['lr']}", f"{point.point['num_workers']}")) == point.metric.value
    assert not cells
