"""Times of observed training code: of its ranks together, and long steps that are no stalls."""

import pytest
from results import make_spec

from raypar.measure.laps import BY_REPORT, BY_STEP, StepTimes
from raypar.observe.ranks import RankSteps
from raypar.run.ranks import RankEnd, trial_result
from raypar.study.observation import BY_OPTIMIZER, ObservedLoader, ObservedRank
from raypar.study.profile import PARTS, Breakdown
from raypar.train.job import RankOutcome
from raypar.train.script_times import with_times


def rank(number=0, step_s=0.1, num_steps=400, samples=8.0, first_batch_s=0.1, long=()):
    times = tuple(long.get(i, step_s) for i in range(num_steps)) if long else (step_s,) * num_steps
    loader = ObservedLoader(num_iterations=4, first_batch_s=first_batch_s)
    return RankSteps(
        ObservedRank(
            rank=number,
            num_ranks=2,
            num_steps=num_steps,
            samples_per_step=samples,
            loaders=(loader,),
            breakdown=Breakdown(step_s, dict.fromkeys(PARTS, 0.0), 0.0),
        ),
        times,
    )


UNTIMED = StepTimes()


def result_of(*ranks, laps=UNTIMED):
    outcome = with_times(RankOutcome(), laps, ranks, "" if ranks else "no torch")
    return trial_result(make_spec({"num_workers": 2}), {0: RankEnd(outcome)})


def test_the_slowest_rank_counts_and_the_samples_of_all():
    result = result_of(rank(0), rank(1, step_s=0.2))
    assert result.train_time_s == pytest.approx(80.0)
    assert result.throughput_samples_per_s == pytest.approx(2 * 8 * 400 / 80)
    assert len(result.step_times_s) == 2 and result.conditions.of_ranks("steps_from") == [BY_OPTIMIZER]


def test_a_throughput_is_known_if_the_samples_of_all_ranks_are():
    assert result_of(rank(0), rank(1, samples=0.0)).throughput_samples_per_s is None


def test_marked_steps_take_precedence_over_observed_ones_and_these_over_reports():
    by_step = result_of(rank(), laps=StepTimes(BY_STEP, times_s=(1.0, 1.0), train_time_s=2.0))
    assert by_step.train_time_s == 2.0 and by_step.throughput_samples_per_s is None and by_step.observation
    by_report = result_of(rank(), laps=StepTimes(BY_REPORT, "epochs 1 to 2", (1.0, 1.0), 2.0))
    assert by_report.train_time_s == pytest.approx(40.0) and by_report.conditions.of_ranks("laps_cover") == [""]


def test_unobserved_code_says_why():
    result = result_of()
    assert result.observation is None and result.conditions.of_ranks("not_observed") == ["no torch"]


@pytest.mark.parametrize(("first_batch_s", "stalls_s"), [(0.1, (4.0, 4.0)), (3.9, ())])
def test_a_step_that_waits_for_the_first_batch_of_an_epoch_is_no_stall(first_batch_s, stalls_s):
    result = result_of(rank(first_batch_s=first_batch_s, long={100: 4.0, 200: 4.0}))
    assert result.conditions.stalls_s == stalls_s
