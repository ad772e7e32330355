"""Speedup and efficiency over the number of workers: what stands in the figures, and in their words."""

from __future__ import annotations

import pytest
from figure_parts import made, own_rows, rows_of
from results import make_result

from raypar.analysis.analyse import StudyAnalysis
from raypar.report.figures import IDEAL
from raypar.report.vega import MAX_SERIES, Figure


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


def test_without_a_law_there_is_no_empty_layer_for_it() -> None:
    _, figures = made([make_result({"num_workers": n}, r, 4.0 / n + r / 9) for n in (1, 2) for r in range(3)])
    layers = figures["speedup"].spec["layer"]
    assert all(layer["data"]["values"] for layer in layers if "data" in layer)
    assert "no law" in figures["speedup"].alternative


def test_groups_stand_beside_each_other_in_their_order(full: tuple[StudyAnalysis, dict[str, Figure]]) -> None:
    places = [(row["beside"], row["series"]) for row in rows_of(full[1]["speedup"]) if row["workers"] == 2]
    assert [series for _, series in sorted(places)] == ["lr=0.1", "lr=0.2"]
    assert all(1.9 < at < 2.1 and at != 2 for at, _ in places)


def test_an_interval_of_a_factor_of_thousands_does_not_dwarf_the_values() -> None:
    times = {(1, 0): 1.0, (1, 1): 1.1, (2, 0): 0.5, (2, 1): 5.0}
    _, figures = made([make_result({"num_workers": n}, r, time_s) for (n, r), time_s in times.items()])
    for key in ("speedup", "efficiency", "times", "pareto"):
        assert "drawn in part" in figures[key].alternative
    (row,) = [row for row in rows_of(figures["speedup"]) if row["workers"] == 2]
    highest = max(row["value"] for row in rows_of(figures["speedup"]))
    assert row["value"] < row["value_high"] <= 4 * highest
    assert row["shown"] in figures["speedup"].alternative and "M]" in row["shown"]
