"""How long a trial trains until a metric reaches a target, and what is said of trials that never do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import make_result

from raypar.analysis.question import Question, collect
from raypar.analysis.stats import Estimate, Method
from raypar.analysis.time_to_target import (
    PointToTarget,
    Start,
    Target,
    TargetStatus,
    mode_of,
    time_to_target,
    trial_to_target,
)
from raypar.study.trial import TrialResult, TrialState

TARGET = Target("accuracy", 0.9)


def trial(
    accuracies: Sequence[float | None],
    repeat: int = 0,
    *,
    epoch_s: float = 2.0,
    state: TrialState = TrialState.FINISHED,
) -> TrialResult:
    """A trial with a report per epoch of 1,000 samples, half a second of evaluation after each."""
    made = make_result({"num_workers": 2}, repeat, epoch_s * len(accuracies), num_samples=1000 * len(accuracies))
    reports = tuple(
        {
            "epoch": i + 1.0,
            "train_time_s": epoch_s,
            "eval_time_s": 0.5,
            "throughput_samples_per_s": 1000 / epoch_s,
            **({} if accuracy is None else {"accuracy": accuracy}),
        }
        for i, accuracy in enumerate(accuracies)
    )
    return replace(made, state=state, reports=reports, startup_s=3.0, warmup_s=0.25)


def point(*results: TrialResult, target: Target = TARGET) -> PointToTarget:
    (samples,) = collect(Question("s", {}, ("num_workers",)), results, "train_time_s")
    return time_to_target(samples, target)


def test_the_time_is_that_of_the_timed_steps_up_to_the_first_report_that_reaches_the_target() -> None:
    found = trial_to_target(trial([0.5, 0.91, 0.89, 0.95]), TARGET)
    assert (found.status, found.time_s, found.num_samples, found.best) == (TargetStatus.REACHED, 4.0, 2000.0, 0.95)


def test_from_the_launch_on_start_up_warm_up_and_evaluations_count() -> None:
    result = trial([0.5, 0.91, 0.95])
    assert trial_to_target(result, TARGET, Start.LAUNCH).time_s == 4.0 + 3.0 + 0.25 + 2 * 0.5
    assert trial_to_target(replace(result, startup_s=None), TARGET, Start.LAUNCH).status is TargetStatus.UNKNOWN


def test_a_trial_that_never_reaches_it_has_no_time_and_is_counted() -> None:
    found = point(trial([0.5, 0.91]), trial([0.5, 0.6], 1), trial([0.95], 2))
    assert found.num_in(TargetStatus.REACHED) == 2 and found.num_in(TargetStatus.MISSED) == 1
    assert not found.is_always_reached
    assert found.times == {0: 4.0, 2: 2.0}
    assert found.time_s is not None and (found.time_s.value, found.time_s.num_samples) == (4.0, 3)
    assert point(trial([0.1])).time_s is None


def test_trials_that_missed_it_count_as_longer_and_a_median_needs_more_than_half() -> None:
    half = point(trial([0.95]), trial([0.5], 1))
    assert half.times == {0: 2.0} and half.time_s is None
    most = point(*(trial([0.5] * i + [0.95], i) for i in range(5)), trial([0.1], 5), trial([0.1], 6))
    assert most.time_s == Estimate(8.0, 2.0, math.inf, 7, pytest.approx(1 - 2 / 2**7), Method.CENSORED)


def test_a_trial_that_was_stopped_counts_by_what_it_had_reached() -> None:
    stopped = [trial(accuracies, i, state=TrialState.STOPPED) for i, accuracies in enumerate(([0.92], [0.3]))]
    found = point(*stopped)
    assert [t.status for t in found.trials] == [TargetStatus.REACHED, TargetStatus.MISSED]


def test_failed_trials_are_told_as_such_and_spoil_no_others() -> None:
    found = point(trial([0.95]), make_result({"num_workers": 2}, 1, state=TrialState.FAILED))
    assert found.num_in(TargetStatus.FAILED) == 1 and found.is_always_reached
    assert not point(make_result({"num_workers": 2}, 1, state=TrialState.FAILED)).is_always_reached


def test_less_is_better_for_a_loss() -> None:
    result = replace(trial([None]), reports=tuple({"val_loss": v, "train_time_s": 1.0} for v in (0.5, 0.2, 0.3)))
    found = trial_to_target(result, Target("val_loss", 0.3, "min"))
    assert (found.time_s, found.best) == (2.0, 0.2)
    question = Question("s", {}, (), metric="score", mode="min")
    assert [mode_of(question, m) for m in ("score", "val_loss", "accuracy")] == ["min", "min", "max"]


def test_reports_without_times_leave_only_the_end_of_the_training() -> None:
    """Of the last report the trial's own time is that of all steps; of an earlier one nothing is known."""
    assert trial_to_target(make_result({}, 0, 4.0, 0.97), TARGET).time_s == 4.0
    two = replace(make_result({}, 0, 4.0), reports=({"accuracy": 0.95}, {"accuracy": 0.96}))
    assert trial_to_target(two, TARGET).status is TargetStatus.UNKNOWN


def test_the_times_in_a_train_loops_reports_are_not_taken_for_raypars() -> None:
    loop = replace(trial([0.95]), train_time_s=None)
    found = trial_to_target(loop, TARGET)
    assert (found.status, found.time_s, found.best) == (TargetStatus.UNKNOWN, None, 0.95)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_what_is_no_number_reaches_nothing(value: float | None) -> None:
    assert not TARGET.is_reached_by(value)
    assert trial_to_target(trial([value, 0.95]), TARGET).time_s == 4.0


@given(
    accuracies=st.lists(st.floats(0, 1), min_size=1, max_size=8),
    values=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
)
def test_a_higher_target_is_never_reached_earlier(accuracies: list[float], values: list[float]) -> None:
    easy, hard = (trial_to_target(trial(accuracies), Target("accuracy", value)) for value in values)
    if hard.time_s is not None:
        assert easy.time_s is not None and easy.time_s <= hard.time_s
    assert (hard.status is TargetStatus.REACHED) == (max(accuracies) >= values[1])
