"""benchmarks/honesty.py counts the claims of simulated studies, and finds hardly any where all points are the same."""

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def honesty(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("honesty")


def test_script_prints_a_row_for_each_cell_asked_for():
    command = [sys.executable, str(BENCHMARKS / "honesty.py"), "--rounds", "2", "--jobs", "1", "--only", "width.*n=20$"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    rows = [line for line in done.stdout.splitlines() if "bar ≤ 0.0330" in line]
    assert len(rows) == 1 and "width of a ratio" in rows[0] and "±" in rows[0], done.stdout + done.stderr
    assert done.returncode == 0


def test_cells_have_titles_of_their_own_and_a_measure(honesty):
    cells = [*honesty.cells()]
    assert len({cell.title for cell in cells}) == len(cells) > 150
    small = {cell.kind: cell for cell in reversed(cells)}
    assert small.keys() == honesty.MEASURES.keys()
    for cell in small.values():
        outcome = cell.run(2, 0) + cell.run(2, 1)
        assert outcome.num_runs == 4 and outcome.value >= 0 and outcome.error >= 0
        assert cell.run(2, 0) == cell.run(2, 0)


# Each with the claim that many of these studies made.
ONCE_FALSE = {
    "8 points, n=6, CV 0.5 %": "recommended",
    "2 points, n=6, clean": "recommended",
    "grid 4 × 2, n=6, clean": "scaling",
    "grid 4 × 2, n=6, noisy epochs": "batch size",
    "8 points, no baseline, n=6, clean": "dominated",
}


@pytest.mark.parametrize("name", ONCE_FALSE)
def test_points_that_are_all_the_same_are_said_to_be(honesty, name):
    (cell,) = (cell for cell in honesty.cells() if cell.title == f"A/A, {name}: any claim")
    outcome = cell.run(12, 0)
    assert outcome.counts[ONCE_FALSE[name]] <= 1 and outcome.sums <= 2


def test_points_that_differ_are_claimed_to_in_every_view(honesty):
    rng = np.random.default_rng(0)
    noise = honesty.Noise(cv=0.02, metric_sd=0.001)
    study = honesty.simulate(rng, honesty.dummies(4), 6, noise, {3: 2.0}, {3: 0.05})
    assert {"speedup", "verdict", "recommended", "dominated", "excluded"} <= {*honesty.false_claims(study, noise)}
    sentences = honesty.analyse(study.question, study.results).statements
    assert [bool(honesty.HEDGES.search(sentence)) for sentence in sentences] == [False, False]


def test_true_median_of_times_with_outliers_is_that_of_many_draws(honesty):
    logs = honesty.OUTLIERS.log_times(np.random.default_rng(0), 1, 400_000)
    assert honesty.OUTLIERS.median_log_time() == pytest.approx(float(np.median(logs)), abs=5e-4)
