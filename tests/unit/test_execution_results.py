"""Curves over the number of workers and the description of a study, as an execution stores them."""

from __future__ import annotations

import pytest
from results import make_result

from raypar import Study, choice, grid, loguniform
from raypar.analysis.analyse import analyse
from raypar.analysis.question import Question
from raypar.execution.results import describe, scaling_metrics
from raypar.workloads import digits

QUESTION = Question("s", {"num_workers": 1}, ("batch_size", "num_workers"))


def test_speedup_efficiency_and_serial_fraction_are_metrics_over_the_number_of_workers() -> None:
    times = {1: 8.0, 2: 5.0, 4: 3.5}
    results = [
        make_result({"batch_size": b, "num_workers": n}, r, t * (1 + 0.01 * ((r + n) % 3)))
        for b in (32, 64)
        for n, t in times.items()
        for r in range(2)
    ]
    metrics = {(name, num_workers): value for name, value, num_workers in scaling_metrics(analyse(QUESTION, results))}
    for b in (32, 64):
        speedup, low, high = (metrics[f"scaling/speedup batch_size {b}{side}", 4] for side in ("", " low", " high"))
        assert metrics[f"scaling/efficiency batch_size {b}", 4] == pytest.approx(speedup / 4)
        assert metrics[f"scaling/karp_flatt batch_size {b}", 4] == pytest.approx((1 / speedup - 1 / 4) / (3 / 4))
        assert metrics[f"scaling/karp_flatt batch_size {b} low", 4] == pytest.approx((1 / high - 1 / 4) / (3 / 4))
        assert metrics[f"scaling/karp_flatt batch_size {b} high", 4] == pytest.approx((1 / low - 1 / 4) / (3 / 4))
        assert metrics[f"scaling/speedup batch_size {b}", 1] == 1
        assert (f"scaling/karp_flatt batch_size {b}", 1) not in metrics
    assert {n: metrics["scaling/ideal", n] for n in times} == {1: 1.0, 2: 2.0, 4: 4.0}


def test_without_points_that_differ_in_their_workers_alone_there_is_no_serial_fraction() -> None:
    results = [make_result({"batch_size": b}, 0) for b in (32, 64)]
    question = Question("s", {"batch_size": 32}, ("batch_size",))
    names = {name for name, _, _ in scaling_metrics(analyse(question, results))}
    assert "scaling/speedup batch_size 64" in names
    assert not any("karp_flatt" in name or "ideal" in name for name in names)


def test_a_timed_study_tells_its_question_space_baseline_and_command() -> None:
    study = Study(
        workload=digits,
        space={"batch_size": grid(64, 256), "num_workers": grid(1, 2)},
        baseline={"num_workers": 1},
        num_repeats=2,
        config={"epochs": 4, "lr": 0.1},
        description="Does a second worker pay off?",
    )
    text = describe(study, ("raypar", "study", "a.py"))
    assert text.startswith("Does a second worker pay off?\n\n- **Trains:** `digits` (")
    for line in (
        "- **Sweeps:** `batch_size` 64, 256; `num_workers` 1, 2",
        "- **Runs:** 4 points × 2 repeats, timed",
        "- **Compares with:** `num_workers` 1 (else alike)",
        "- **Judges by:** accuracy (the higher the better)",
        "- **Holds fixed:** `epochs` 4, `lr` 0.1",
        "- **Run by:** `raypar study a.py`",
    ):
        assert line in text.splitlines()


def test_a_search_tells_what_its_points_are_drawn_from() -> None:
    study = Study(workload=digits, space={"lr": loguniform(1e-3, 1), "optimizer": choice("sgd", "adam")}, num_trials=8)
    lines = describe(study).splitlines()
    assert "- **Sweeps:** `lr` loguniform(0.001, 1); `optimizer` choice(sgd, adam)" in lines
    assert "- **Runs:** 8 trials, whose points are drawn" in lines
    assert not [line for line in lines if "Compares" in line or "Holds" in line or "Run by" in line]


def test_a_study_of_one_point_sweeps_nothing() -> None:
    lines = describe(Study(workload=digits, num_repeats=1)).splitlines()
    assert {"- **Sweeps:** nothing", "- **Runs:** 1 point × 1 repeat, timed"} <= set(lines)
