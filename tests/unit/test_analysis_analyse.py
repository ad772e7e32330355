"""Analysis of results: times, speedups, efficiencies and energies of the points."""

import random
from dataclasses import replace
from itertools import product

import pytest
from results import make_result, make_spec, stored_conditions

from raypar import Study, Workload, grid, uniform
from raypar.analysis.analyse import Question, analyse, pair_speedups, question_of
from raypar.analysis.recommend import Constraints, recommend
from raypar.analysis.stats import reference
from raypar.analysis.time_to_target import Start, Target
from raypar.errors import RayparError
from raypar.predict.calibration import choose_results
from raypar.study.trial import TrialState

QUESTION = Question("mnist", {"num_workers": 1}, ("batch_size", "num_workers"), num_repeats=3)
WORKERS = Question("mnist", {"num_workers": 1}, ("num_workers",))
WORKLOAD = Workload(name="mnist_mlp", model=lambda config: None, data=lambda config: None)
BOTH = {"batch_size": 64, "num_workers": 1}, {"batch_size": 64, "num_workers": 2}


def trials(point, times, **more):
    return [make_result(point, repeat, time_s, **more) for repeat, time_s in enumerate(times)]


def scaling(*, one=(4.0, 4.4, 4.2), two=(2.0, 2.2, 2.1), batch_size=64):
    points = ({**point, "batch_size": batch_size} for point in BOTH)
    return [result for point, times in zip(points, (one, two), strict=True) for result in trials(point, times)]


def at(analysis, **point):
    return next(p for p in analysis.points if p.point == point)


def two_workers(results):
    return at(analyse(QUESTION, results), **BOTH[1])


def test_speedups_compare_trials_of_one_block():
    results = [*scaling(), *scaling(batch_size=128, one=(9.0, 9.9, 9.45), two=(3.0, 3.3, 3.15))]
    one, two = (at(analyse(QUESTION, results), **point) for point in BOTH)
    assert (one.is_baseline, one.speedup) == (True, reference(3))
    # Every pair has a ratio of exactly 2, even though the blocks differ.
    assert (two.speedup.value, two.speedup.low, two.speedup.high) == pytest.approx((2.0, 2.0, 2.0))
    assert (two.speedup.num_samples, two.time_s.value) == (3, 2.1)
    # A point is compared with the one that differs only in the baseline.
    assert at(analyse(QUESTION, results), batch_size=128, num_workers=2).speedup.value == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("key", "base", "other", "times", "speedup", "efficiency"),
    [
        ("num_workers", 2, 8, (4.0, 2.0), 2.0, 0.5),
        ("optimizer", "sgd", "adam", (4.0, 5.0), 0.8, None),  # no parallel efficiency: workers are not compared
    ],
)
def test_efficiency_is_per_worker_and_relative_to_the_baseline(key, base, other, times, speedup, efficiency):
    results = [*trials({key: base}, times[:1] * 3), *trials({key: other}, times[1:] * 3)]
    point = at(analyse(Question("s", {key: base}, (key,)), results), **{key: other})
    assert point.speedup.value == pytest.approx(speedup)
    assert (point.efficiency and point.efficiency.value) == (efficiency and pytest.approx(efficiency))


def test_a_study_without_baseline_has_no_speedups():
    analysis = analyse(replace(QUESTION, baseline={}), scaling())
    assert all(p.speedup is None and p.efficiency is None and not p.is_baseline for p in analysis.points)


def test_rates_are_compared_if_the_work_is_unequal():
    of_one, of_two = trials({"num_workers": 1}, (4.0,) * 3, num_samples=1000), ({"num_workers": 2}, (2.0,) * 3)
    results = [*of_one, *trials(*of_two, num_samples=900)]
    assert at(analyse(WORKERS, results), num_workers=2).speedup.value == pytest.approx(450 / 250)
    assert sorted(pair_speedups(WORKERS, results).values()) == pytest.approx([1.0] * 3 + [1.8] * 3)


def test_stopped_and_failed_trials_are_counted_but_not_timed():
    stopped = make_result(BOTH[1], 3, 0.01, state=TrialState.STOPPED)
    two = two_workers([*scaling(), stopped, make_result(BOTH[1], 4, state=TrialState.FAILED)])
    assert [sum(r.state is state for r in two.results) for state in TrialState] == [3, 1, 0, 0, 1]
    assert two.time_s.value == 2.1


# The baseline's times by repeat; the first three repeats have one with two workers.
BASELINES = {
    "a repeat without a baseline": ({0: 4.0, 1: 4.4}, 2, 2.0),
    "a single common block": ({2: 4.0, 8: 4.2, 9: 4.1}, 3, 4.1 / 2.1),
    "no common block": ({7: 4.0, 8: 4.2, 9: 4.1}, 3, 4.1 / 2.1),
}


@pytest.mark.parametrize(("base", "num_samples", "ratio"), BASELINES.values(), ids=BASELINES)
def test_trials_are_paired_if_they_share_two_blocks(base, num_samples, ratio):
    estimate = two_workers([*(make_result(BOTH[0], r, t) for r, t in base.items()), *scaling()[3:]]).speedup
    assert (estimate.num_samples, estimate.value) == (num_samples, pytest.approx(ratio))
    # Pairs have a ratio of exactly 2; independent samples scatter.
    assert (estimate.high - estimate.low > 0.1) == (num_samples == 3)


def test_a_memory_only_trial_has_no_time():
    counted = {"train_time_s": None, "warmup_s": 0.2, "wall_s": 0.5}
    counted |= {"conditions": stored_conditions({"peak_memory_bytes": [3e8], "is_untrained": [True]})}
    only = [replace(make_result({"num_workers": n}), **counted) for n in (1, 2)]
    for point in analyse(WORKERS, only).points:
        assert (point.time_s, point.speedup, point.memory_bytes.value) == (None, None, 3e8)
    assert analyse(Question("s", {}, ("num_workers",)), [replace(only[0], reports=())]).verdict.answer == ""
    # It doesn't change the times of trained trials or of train loops either.
    two = trials({"num_workers": 2}, (2.0, 2.2, 2.1))
    assert at(analyse(WORKERS, [only[0], *two]), num_workers=2).time_s.value == 2.1
    loops = [replace(result, train_time_s=None) for result in two]
    assert at(analyse(WORKERS, [only[0], *loops]), num_workers=2).time_s.value == pytest.approx(3.1)


def test_a_stalled_trial_counts_for_its_metric_and_not_for_its_time():
    results = [make_result({"num_workers": w}, r, 4.0 / w, 0.9 + 0.01 * r) for w in (1, 2) for r in range(4)]
    stalled = replace(results[5], train_time_s=12.0, energy_j=9.0, conditions=stored_conditions({"stalls_s": [10.0]}))
    results[5] = stalled
    point = analyse(WORKERS, results).points[1]
    assert point.time_s.value == pytest.approx(2.0) and point.time_s.num_samples == point.speedup.num_samples == 3
    assert point.throughput.num_samples == 3 and point.energy_j is None
    assert point.metric.num_samples == 4 and len(point.results) == 4
    assert stalled.spec.identity not in pair_speedups(WORKERS, results) and stalled.is_complete
    target = recommend(WORKERS, results, Constraints(target=Target("accuracy", 0.9))).candidates
    assert {c.point["num_workers"]: c.time_s.num_samples for c in target} == {1: 4, 2: 3}
    assert len(choose_results(results, {})) == 7  # a prediction doesn't use it


def test_the_last_complete_result_of_a_trial_counts():
    again = [
        make_result(BOTH[1], 0, 9.0, started_at=50.0),
        make_result(BOTH[1], 1, state=TrialState.FAILED, started_at=90.0),
        make_result(BOTH[1], 2, state=TrialState.FAILED, started_at=-1.0),
    ]
    two = two_workers([*again, *scaling(), *again])
    assert len(two.samples) == len(two.results) == 3
    assert two.time_s.value == 2.2  # of 9.0, 2.2 and 2.1


def test_the_wall_clock_counts_for_train_loops():
    results = [make_result({"num_workers": n}, r, None, wall_s=t) for n, t in ((1, 8.0), (2, 5.0)) for r in range(3)]
    analysis = analyse(WORKERS, results)
    two = at(analysis, num_workers=2)
    assert (analysis.time_metric, two.speedup.value, two.throughput) == ("wall_s", pytest.approx(1.6), None)


def test_step_times_are_of_the_slowest_rank_and_the_metric_of_the_last_report():
    steps = (tuple([0.1] * 100), tuple([0.2] * 90 + [0.5] * 10))
    result = make_result({"num_workers": 2}, step_times_s=steps)
    result = replace(result, reports=({"val_loss": 0.9}, {"val_loss": 0.4}))
    (point,) = analyse(Question("s", {}, ("num_workers",), metric="val_loss", mode="min"), [result]).points
    assert (point.step_time_median_s, point.step_time_p95_s) == pytest.approx((0.2, 0.5))
    assert point.metric.value == 0.4


def test_points_are_sorted_by_value_and_words_in_the_studys_order():
    values = {"batch_size": (8, 16, 128), "num_workers": (1, 2, 10), "compression": ("none", "fp16", "bf16")}
    points = [dict(zip(values, point, strict=True)) for point in product(*values.values())]
    question = Question("s", {}, tuple(values), points=tuple(points))
    results = [make_result(point) for point in points]
    random.Random(1).shuffle(results)
    assert [p.point for p in analyse(question, results).points] == points


def test_values_of_different_types_differ_and_have_an_order():
    values = (True, 1, None, "a", (64, 32), 2.5)
    points = analyse(Question("s", {"x": 1.0}, ("x",)), [make_result({"x": value}) for value in values]).points
    assert len(points) == len(values) and [p.is_baseline for p in points].count(True) == 1


def test_a_study_lists_points_without_results_and_a_search_does_not():
    space = {"batch_size": grid(64, 128), "num_workers": grid(1, 2)}
    study = Study(name="scaling", workload=WORKLOAD, space=space, baseline={"num_workers": 1}, num_repeats=5)
    question = question_of(study)
    assert (question.study_name, question.num_repeats, len(question.points)) == ("scaling", 5, 4)
    analysis = analyse(study, [replace(r, spec=study.trial(r.spec.point, r.spec.repeat)) for r in scaling()])
    assert [len(p.results) for p in analysis.points] == [3, 3, 0, 0]
    assert at(analysis, batch_size=128, num_workers=2).time_s is None
    search = Study(name="s", workload=WORKLOAD, space={"lr": uniform(0.1, 0.2), "num_workers": grid(1, 2)})
    assert question_of(search).points == analyse(QUESTION, []).points == ()


def test_each_trial_has_a_speedup_over_the_baseline_of_its_own_block():
    results = scaling(one=(4.0, 6.0, 4.0), two=(2.0, 2.0, 1.0))
    ratios = pair_speedups(QUESTION, results[1:])  # the first baseline trial is missing
    two = [make_spec(BOTH[1], repeat).identity for repeat in range(3)]
    assert [ratios.get(i) for i in two] == [None, 3.0, 4.0]
    assert pair_speedups(replace(QUESTION, baseline={}), results) == {}


# ---- energy

PACKAGES = {"energy_of": "CPU packages"}


def measured(joules, environment=PACKAGES, num_repeats=6):
    """Trials in which twice the workers take half the time."""
    return [
        replace(
            make_result({"num_workers": w}, r, 40.0 / w * (1 + 0.002 * r), environment={"cores": [[0]], **environment}),
            energy_j=j and j * (1 + 0.001 * r),
        )
        for w, j in joules.items()
        for r in range(num_repeats)
    ]


def test_a_points_energy_is_the_median_of_its_trials_with_an_interval():
    one, two = (p.energy_j for p in analyse(WORKERS, measured({1: 4000.0, 2: 5000.0})).points)
    assert one.value == pytest.approx(4010) and two.value == pytest.approx(5012.5)
    assert 4000 <= one.low < 4003 and 4017 < one.high <= 4020  # between the outermost of the six and the next ones


@pytest.mark.parametrize(
    ("first", "second", "source"),
    [
        ("CPU packages", "CPU packages and GPUs", "CPU packages and GPUs"),  # a CPU's trials have no GPUs to count
        ("GPUs", "GPUs", "GPUs"),
        ("CPU packages", "GPUs", ""),
        ("CPU packages and GPUs", "GPUs", ""),
    ],
)
def test_energies_are_compared_if_they_cover_the_same_parts(first, second, source):
    results = [*measured({1: 4000.0}, {"energy_of": first}), *measured({2: 5000.0}, {"energy_of": second})]
    analysis = analyse(WORKERS, results)
    assert analysis.energy_source == source
    assert [p.energy_j is not None for p in analysis.points] == [bool(source)] * 2


@pytest.mark.parametrize(
    ("joules", "front", "exclusions"),
    [
        ({1: 4000.0, 2: 5000.0, 4: 6000.0}, [1, 2, 4], ["", "", "energy above 5.50 kJ"]),
        ({1: 4000.0, 2: 3000.0, 4: 3500.0}, [2, 4], ["", "", ""]),
        ({1: 4000.0, 2: 5000.0, 4: None}, [4], ["", "", "energy unknown"]),  # then energy is not an axis
    ],
)
def test_energy_is_an_axis_of_the_front_and_can_be_limited(joules, front, exclusions):
    candidates = recommend(WORKERS, measured(joules), Constraints()).candidates
    assert [c.point["num_workers"] for c in candidates if c.is_on_front] == front
    limited = recommend(WORKERS, measured(joules), Constraints(limits={"energy_j": 5500.0})).candidates
    assert [c.exclusion for c in limited] == exclusions


def test_the_energy_to_a_target_is_a_share_of_the_trainings():
    epochs = [{"accuracy": 0.9 + 0.02 * e, "train_time_s": 10.0, "eval_time_s": 1.0} for e in range(1, 5)]
    results = [replace(r, reports=tuple(epochs)) for r in measured({1: 4000.0}, num_repeats=1)]
    limits = Constraints(target=Target("accuracy", 0.95), limits={"energy_j": 3500.0})
    (candidate,) = recommend(WORKERS, results, limits).candidates
    assert candidate.energy_j.value == pytest.approx(3000.0)  # three of four epochs
    with pytest.raises(RayparError, match=r"--max-energy 3.50 kJ: energy is known from the first timed step on"):
        recommend(WORKERS, results, replace(limits, start=Start.LAUNCH))


@pytest.mark.parametrize(
    ("results", "reason"),
    [
        (measured({1: None}, {}), "no trial has its energy recorded"),
        (measured({1: None}, {"no_energy": "no CPU package has a counter"}), "no CPU package has a counter"),
        (measured({1: 1.0}) + measured({2: 1.0}, {"energy_of": "GPUs"}), "the energy of some trials includes the CPU"),
    ],
)
def test_a_limit_on_an_unknown_energy_is_refused_with_the_reason(results, reason):
    assert analyse(WORKERS, results).energy_source == ""
    with pytest.raises(RayparError, match=rf"--max-energy 50.0 J: {reason}") as error:
        recommend(WORKERS, results, Constraints(limits={"energy_j": 50.0}))
    assert error.value.hint == "leave it out, or run the study where it can be read"
