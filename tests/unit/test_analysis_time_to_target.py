"""Time to target: of one trial, and of a point with trials that never reach it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import make_result, stored_conditions

from raypar.analysis.question import Question, collect
from raypar.analysis.stats import Estimate, Method
from raypar.analysis.time_to_target import Start, Target, TargetStatus, metric_of, time_to_target, trial_to_target
from raypar.study.trial import TrialState

TARGET = Target("accuracy", 0.9)
REACHED, MISSED, UNKNOWN, FAILED = TargetStatus


def trial(accuracies, repeat=0, *, metric="accuracy"):
    """A trial with a report per epoch, of 1,000 samples in 2 s and an evaluation of 0.5 s."""
    num = len(accuracies)
    made = make_result({"num_workers": 2}, repeat, 2.0 * num, num_samples=1000 * num)
    epoch = {"train_time_s": 2.0, "eval_time_s": 0.5, "throughput_samples_per_s": 500.0}
    reports = tuple({**epoch, **({} if a is None else {metric: a})} for a in accuracies)
    return replace(made, reports=reports, startup_s=3.0, warmup_s=0.25)


def point(*results):
    (samples,) = collect(Question("s", {}, ("num_workers",)), results, "train_time_s")
    return time_to_target(samples, TARGET)


def foreign(accuracies, *since_launch_s):
    """A trial of training code that raypar can't instrument, with the times of its reports since launch."""
    made = trial(accuracies)
    reports = made.reports
    if since_launch_s:
        reports = tuple({**r, "since_launch_s": at_s} for r, at_s in zip(reports, since_launch_s, strict=True))
    return replace(
        made,
        reports=reports,
        conditions=stored_conditions({**made.conditions.to_stored(), "steps_from": ["reports"]}),
    )


PLAIN = make_result({}, 0, 4.0)  # whose reports have no times
LOSS = Target("val_loss", 0.3, "min")
CASES = {
    "up to the first report that reaches it": (trial([0.5, 0.91, 0.89, 0.95]), TARGET, (REACHED, 4.0, 2000.0, 0.95)),
    "a loss": (trial([0.5, 0.2, 0.3], metric="val_loss"), LOSS, (REACHED, 4.0, 2000.0, 0.2)),
    "missed": (trial([0.5, 0.6]), TARGET, (MISSED, None, None, 0.6)),
    "never reported": (trial([None]), TARGET, (UNKNOWN, None, None, None)),
    "no number": (trial([math.nan, None, math.inf, 0.95]), TARGET, (REACHED, 8.0, 4000.0, 0.95)),
    # For the last report, the trial's time is known; for an earlier one, it isn't.
    "no times, at the end": (PLAIN, TARGET, (REACHED, 4.0, 180_000.0, 0.97)),
    "no times": (replace(PLAIN, reports=({"accuracy": 0.95}, {"accuracy": 0.96})), TARGET, (UNKNOWN, None, None, 0.96)),
    "a train loop": (replace(trial([0.95]), train_time_s=None), TARGET, (UNKNOWN, None, None, 0.95)),
    "a train loop of an earlier version": (foreign([0.95]), TARGET, (UNKNOWN, None, None, 0.95)),
    "a script": (foreign([0.5, 0.91, 0.95], 7.5, 12.0, 20.0), TARGET, (REACHED, 12.0, None, 0.95)),
    "stopped": (replace(trial([0.92]), state=TrialState.STOPPED), TARGET, (REACHED, 2.0, 1000.0, 0.92)),
    "failed": (replace(trial([0.95]), state=TrialState.FAILED), TARGET, (FAILED, None, None, None)),
}


@pytest.mark.parametrize(("result", "target", "expected"), CASES.values(), ids=CASES)
def test_the_time_is_that_of_the_timed_steps(result, target, expected):
    to_target = trial_to_target(result, target)
    assert (to_target.status, to_target.time_s, to_target.num_samples, to_target.best) == expected


def test_start_up_warm_up_and_evaluations_count_from_launch_on():
    result = trial([0.5, 0.91, 0.95])
    assert trial_to_target(result, TARGET, Start.LAUNCH).time_s == 4.0 + 3.0 + 0.25 + 2 * 0.5
    assert trial_to_target(replace(result, startup_s=None), TARGET, Start.LAUNCH).status is UNKNOWN


def test_trials_that_missed_the_target_count_as_longer():
    most = point(trial([0.5, 0.91]), trial([0.5, 0.6], 1), trial([0.95], 2))
    assert (most.num_in(REACHED), most.num_in(MISSED), most.is_always_reached) == (2, 1, False)
    assert most.times == {0: 4.0, 2: 2.0}
    assert most.time_s is not None and (most.time_s.value, most.time_s.num_samples) == (4.0, 3)
    half = point(trial([0.95]), trial([0.5], 1))
    assert half.times == {0: 2.0} and half.time_s is None
    many = point(*(trial([0.5] * i + [0.95], i) for i in range(5)), trial([0.1], 5), trial([0.1], 6))
    assert many.time_s == Estimate(8.0, 2.0, math.inf, 7, pytest.approx(1 - 2 / 2**7), Method.CENSORED)


def test_failed_trials_do_not_affect_others():
    failed = make_result({"num_workers": 2}, 1, state=TrialState.FAILED)
    assert point(trial([0.95]), failed).is_always_reached and not point(failed).is_always_reached


def test_less_is_better_for_a_loss_unless_the_study_says_otherwise():
    question = Question("s", {}, (), metric="score", mode="min")
    assert [metric_of(question, m, ()).mode for m in ("score", "val_loss", "accuracy")] == ["min", "min", "max"]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted))
def test_a_higher_target_is_never_reached_earlier(accuracies, values):
    easy, hard = (trial_to_target(trial(accuracies), Target("accuracy", value)) for value in values)
    if hard.time_s is not None:
        assert easy.time_s is not None and easy.time_s <= hard.time_s
    assert (hard.status is REACHED) == (max(accuracies) >= values[1])
