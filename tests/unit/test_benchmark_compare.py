"""benchmarks/honesty_compare.py and predict_published.py: their cells run, and missed bars are reported."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from raypar.predict.step_model import one_layer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_every_kind_of_comparison_is_simulated(benchmark):
    honesty = benchmark("honesty_compare")
    cells = list(honesty.cells())
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in {cell.title: cell for cell in cells}.values():
        row = replace(cell, num_points=2, size=3).simulate(2, 0)
        assert row.cell.startswith(cell.title) and row.share in (0.0, 0.5, 1.0) and row.error > 0


@pytest.mark.parametrize(("share", "is_reached"), [(0.05, True), (0.06, True), (0.07, False)])
def test_a_bar_is_reached_within_two_standard_errors(benchmark, share, is_reached):
    honesty = benchmark("honesty_compare")
    assert honesty.is_reached(honesty.Row("", share, 0.006, (0.0, 0.05))) is is_reached


def test_published_systems_are_slower_than_predicted(benchmark):
    published = benchmark("predict_published")
    case = next(case for case in published.CASES if case.published == 0.68)
    few, many = published.predicted(case, one_layer(138_357_544 * 4))
    assert 0 < many < few <= 1
    assert published.is_missed(case, 0.8) and not published.is_missed(case, 0.7)
