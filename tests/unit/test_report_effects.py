"""What a report says of the effects of hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from results import make_result

from raypar.analysis.analyse import Question, StudyAnalysis, analyse
from raypar.report.sentences import effect_lines
from raypar.study.space import Value


def analysed(
    key: str,
    values: Sequence[Value],
    *,
    num_repeats: int = 3,
    per_level: float = 0.5,
    workers_gain: float = 1.0,
    accuracy: float = 0.0,
    noise: float = 0.005,
    baseline: dict[str, Value] | None = None,
) -> StudyAnalysis:
    """A grid of one hyperparameter and two worker counts.

    Each level takes `per_level` times as long as the one before, and changes the speedup of two workers by
    `workers_gain` and the accuracy by `accuracy`.
    """
    rng = np.random.default_rng(1)
    points = tuple({key: value, "num_workers": w} for value, w in product(values, (1, 2)))
    question = Question(
        "s", baseline or {"num_workers": 1}, (key, "num_workers"), points=points, num_repeats=num_repeats
    )
    results = [
        make_result(
            point,
            repeat,
            20 * per_level**at / (1.8 * workers_gain**at) ** (w - 1) * math.exp(rng.normal(0, noise)),
            accuracy=0.9 + accuracy * at + rng.normal(0, 1e-4),
        )
        for repeat in range(num_repeats)
        for point, (at, w) in zip(points, product(range(len(values)), (1, 2)), strict=True)
    ]
    return analyse(question, results)


def texts(analysis: StudyAnalysis) -> list[str]:
    return [text for _, text in effect_lines(analysis)]


def test_a_number_is_told_by_its_ends_with_time_and_accuracy() -> None:
    lines = texts(analysed("batch_size", (32, 64, 128, 256), accuracy=-0.01))
    assert lines[0] == "What each hyperparameter does, at equal values of the others:"
    sizes = lines[1]
    assert sizes.startswith("batch_size: 256 trains ") and "] as fast as 32" in sizes
    assert ", accuracy -3.0 points [-3." in sizes
    assert ";" not in sizes  # nothing of what lies between
    assert lines[2].startswith("num_workers: 2 trains 1.")


def test_a_baseline_in_the_middle_is_compared_with_both_ends() -> None:
    line = texts(analysed("batch_size", (32, 64, 128), baseline={"batch_size": 64}))[1]
    assert line.startswith("batch_size: 32 trains 0.") and "; 128 trains " in line and line.count("as fast as 64") == 2


def test_words_are_all_told_and_ties_are_called_ties() -> None:
    line = texts(analysed("optimizer", ("sgd", "adam", "lion"), per_level=1.0, noise=0.02))[1]
    assert line.count("can't be told apart in time (") == 2
    assert "adam and sgd" in line and "lion and sgd" in line


def test_a_difference_in_accuracy_that_is_not_there_is_not_told() -> None:
    line = texts(analysed("batch_size", (32, 64)))[1]
    assert line.endswith((", accuracy the same.", "points [-0.1, +0.1])."))


def test_a_speedup_that_depends_on_a_level_is_told_with_both_speedups() -> None:
    line = texts(analysed("batch_size", (32, 512), workers_gain=1.5))[-1]
    assert line.startswith("The speedup of 2 workers over 1 depends on batch_size: 1.")
    assert " at 32, 2." in line and " at 512 (1." in line and line.endswith("] as large).")


def test_whether_a_speedup_depends_on_a_level_may_not_be_told() -> None:
    line = texts(analysed("batch_size", (32, 512)))[-1]
    assert line.startswith("Whether the speedup of 2 workers over 1 depends on batch_size (")
    assert line.endswith("]) can't be told.")


def test_one_block_is_said_to_give_no_intervals() -> None:
    lines = texts(analysed("batch_size", (32, 64), num_repeats=1, workers_gain=3.0))
    assert lines[0].endswith("(one block: no intervals):") and "[" not in "".join(lines)
    assert lines[-1].endswith("can't be told.")


def test_a_loss_is_told_as_a_number() -> None:
    question = Question("s", {}, ("lr", "num_workers"), "val_loss", "min")
    results = [
        make_result({"lr": lr, "num_workers": w}, r, 4.0 / w, accuracy=None)
        for lr in (0.1, 0.2)
        for w in (1, 2)
        for r in range(3)
    ]
    scored = [replace(r, reports=({"epoch": 1, "val_loss": 0.5 + 0.1 * (r.spec.point["lr"] == 0.2)},)) for r in results]
    assert ", val_loss +0.1000 [+0.1000, +0.1000]" in texts(analyse(question, scored))[1]
    assert "val_loss" not in texts(analyse(question, results))[1]


def test_one_swept_hyperparameter_has_no_section_and_a_search_says_why() -> None:
    one = Question("s", {"num_workers": 1}, ("num_workers",))
    assert effect_lines(analyse(one, [make_result({"num_workers": w}, r, 4.0) for w in (1, 2) for r in range(3)])) == ()
    search = Question("s", {}, ("lr", "batch_size"), num_repeats=1)
    drawn = [make_result({"lr": 0.1 * i, "batch_size": 2**i}, 0, 4.0) for i in range(1, 5)]
    assert texts(analyse(search, drawn)) == [
        "Effects of the hyperparameters are not told: the points are drawn, not a grid."
    ]
