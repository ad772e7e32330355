"""What a study asks, as it stands in a store."""

from __future__ import annotations

from raypar import Study, choice, grid, loguniform
from raypar.execution.results import describe
from raypar.workloads import digits


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
