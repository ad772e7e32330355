"""Studies that run until they are settled: intervals stay valid after each block, and studies stop when they should."""

import itertools

import numpy as np
import pytest
from results import make_result
from scipy.special import ndtri
from scipy.stats import multivariate_normal

from raypar.analysis.pairwise import MIN_BLOCKS, TIME_ERROR, Family, family_of
from raypar.analysis.question import Question, collect
from raypar.analysis.settle import Stopped, stop_sentence, stop_status, what_is_open
from raypar.analysis.stats import sequential_errors
from raypar.study.trial import TrialState


@pytest.mark.parametrize(("error", "first", "last"), [(0.05, 3, 5), (0.004, 3, 6), (0.2, 1, 4)])
def test_the_error_spent_by_each_look_is_exact(error, first, last):
    sizes = np.arange(first, last + 1)
    bounds = -ndtri(np.array(sequential_errors(error, first, last)) / 2) * np.sqrt(sizes)
    for i in range(1, len(sizes) + 1):
        covariance = np.minimum.outer(sizes[:i], sizes[:i])
        never = multivariate_normal.cdf(bounds[:i], cov=covariance, lower_limit=-bounds[:i], abseps=1e-7)
        assert 1 - never == pytest.approx(error * sizes[i - 1] / last, rel=2e-3)


def test_one_look_has_all_of_the_error_and_several_share_it():
    assert sequential_errors(0.05, 6, 6) == (pytest.approx(0.05),)
    looks = sequential_errors(0.05, 3, 100)
    assert all(error < 0.05 for error in looks)
    assert looks[0] == pytest.approx(0.05 * 3 / 100)


def times_of(points, num_blocks, cv=0.02, seed=0):
    rng = np.random.default_rng(seed)
    return [
        make_result(point, repeat, 4.0 * float(np.exp(rng.normal(0, cv))))
        for repeat, point in itertools.product(range(num_blocks), points)
    ]


def test_an_interval_has_the_level_of_the_look_after_its_blocks_in_every_view():
    points = tuple({"num_workers": n} for n in (1, 2))
    question = Question("s", {"num_workers": 1}, ("num_workers",), points=points, num_repeats=3, max_repeats=30)
    for num_blocks in (3, 7):
        gathered = collect(question, times_of(points, num_blocks), "train_time_s")
        family = family_of(question, gathered)
        look = sequential_errors(TIME_ERROR, MIN_BLOCKS, 30)[num_blocks - MIN_BLOCKS]
        estimate = family.speedup(*gathered)
        assert estimate.level == pytest.approx(1 - look)
        once = family_of(Question("s", {"num_workers": 1}, ("num_workers",), points=points), gathered)
        assert once.speedup(*gathered).level == pytest.approx(1 - TIME_ERROR)
        assert estimate.low < once.speedup(*gathered).low


def test_blocks_beyond_the_looks_have_the_level_of_the_nearest():
    family = Family(max_blocks=10)
    assert family.time_level(2) == family.time_level(3) > family.time_level(10) == family.time_level(40)


WORKERS = (1, 2, 4)


def question_of_workers(**changes):
    points = tuple({"num_workers": n} for n in WORKERS)
    chosen = {"baseline": {"num_workers": 1}, "points": points, "num_repeats": 3, "max_repeats": 30, "margin": 0.05}
    return Question("s", space_keys=("num_workers",), **{**chosen, **changes})


def trials(speedups, num_blocks=3, spread=0.002, first=0):
    return [
        make_result(
            {"num_workers": n},
            repeat,
            8.0 / speedup * (1 + spread * ((repeat + n) % 3 - 1)),
            wall_s=10.0,
        )
        for repeat in range(first, first + num_blocks)
        for n, speedup in speedups.items()
    ]


def labels(points):
    return [point["num_workers"] for point in points]


@pytest.mark.parametrize(
    ("speedups", "spread", "open_points", "needed"),
    [
        ({1: 1.0, 2: 1.5, 4: 2.0}, 0.002, [], []),
        ({1: 1.0, 2: 0.5, 4: 0.6}, 0.002, [], []),
        ({1: 1.0, 2: 1.0, 4: 2.0}, 0.0005, [], []),  # within 5 % of 1
        ({1: 1.0, 2: 1.05, 4: 2.0}, 0.01, [2], [1, 2]),  # above 1, or within the margin
        ({1: 1.0, 2: 1.98, 4: 2.0}, 0.008, [4], [2, 4]),  # both are faster than 1; which one is the best?
        ({1: 1.0, 2: 1.05, 4: 1.05}, 0.01, [2, 4], [1, 2, 4]),
    ],
    ids=["above", "below", "within", "one is open", "the best is open", "all are open"],
)
def test_open_points_get_another_block_with_their_references(speedups, spread, open_points, needed):
    of = what_is_open(question_of_workers(), trials(speedups, spread=spread))
    assert labels(p.point for p in of.points) == open_points
    assert labels(of.needed) == needed
    assert (of.repeat, of.num_trials, of.stuck) == (3, 9, ())
    assert of.stopped is (None if open_points else Stopped.SETTLED)
    assert of.block_s == 10.0 * len(needed)
    assert of.cost_s >= of.block_s


def test_open_points_agree_with_the_report_and_the_recommendation():
    from raypar.analysis.analyse import analyse
    from raypar.analysis.recommend import Constraints, Decision, recommend

    question = question_of_workers()
    for num_blocks, seed in itertools.product((3, 5, 9), range(8)):
        results = times_of(question.points, num_blocks, cv=0.01, seed=seed)
        of, report = what_is_open(question, results), analyse(question, results)
        ratios = {p.num_workers: p.speedup for p in report.points if not p.is_baseline}
        unsettled = {n for n, s in ratios.items() if not (s.excludes(1) or 1 / 1.05 <= s.low <= s.high <= 1.05)}
        assert unsettled <= set(labels(p.point for p in of.points))
        is_clear = recommend(question, results, Constraints()).decision in (Decision.CLEAR, Decision.TIED)
        assert (of.stopped is Stopped.SETTLED) == (is_clear and not unsettled)


def test_a_faster_point_whose_accuracy_may_be_worse_is_open_together_with_the_best():
    question = question_of_workers(baseline={})
    results = [
        make_result({"num_workers": n}, repeat, time_s * (1 + 0.001 * ((repeat + n) % 3)), accuracy + slip * repeat)
        for repeat in range(3)
        for n, time_s, accuracy, slip in ((1, 8.0, 0.97, 0.0), (2, 4.0, 0.966, 0.004), (4, 9.0, 0.96, 0.0))
    ]
    of = what_is_open(question, results)
    assert labels(p.point for p in of.points) == [2]
    assert "accuracy could be" in str(of.points[0])
    assert labels(of.needed) == [1, 2]


def test_points_without_a_comparison_are_settled_at_once():
    question = question_of_workers(baseline={}, points=({"num_workers": 1},))
    assert what_is_open(question, trials({1: 1.0})).stopped is Stopped.SETTLED


def test_a_point_that_lags_behind_catches_up_first():
    noisy = {1: 1.0, 2: 1.05, 4: 2.0}
    results = [*trials(noisy, spread=0.01), *trials({1: 1.0}, 1, first=3, spread=0.01)]
    of = what_is_open(question_of_workers(), results)
    assert (labels(of.needed), of.repeat) == ([2], 3)
    results += trials({2: 1.05}, 1, first=3, spread=0.01)
    of = what_is_open(question_of_workers(), results)
    assert (labels(of.needed), of.repeat) == ([1, 2], 4)


def test_the_minimum_number_of_repeats_comes_first():
    of = what_is_open(question_of_workers(num_repeats=5), trials({1: 1.0, 2: 1.5, 4: 2.0}, 4))
    assert [str(p) for p in of.points] == [f"num_workers={n} 4 of 5 repeats" for n in WORKERS]
    assert (labels(of.needed), of.repeat, of.points[0].num_more) == ([1, 2, 4], 4, 1)


def test_a_study_stops_at_the_maximum_of_repeats():
    results = trials({1: 1.0, 2: 1.05, 4: 2.0}, 4, spread=0.02)
    of = what_is_open(question_of_workers(max_repeats=4), results)
    assert of.stopped is Stopped.MAXIMUM
    assert stop_sentence(of, of.stopped).startswith(
        "Stopped at the maximum of 4 repeats, after 12 trials; still open: num_workers=2 1.0"
    )
    assert what_is_open(question_of_workers(max_repeats=5), results).stopped is None


@pytest.mark.parametrize("state", [TrialState.FAILED, TrialState.DIVERGED])
@pytest.mark.parametrize("num_workers", [1, 2], ids=["the baseline", "the point"])
def test_failing_points_are_not_repeated(state, num_workers):
    results = trials({1: 1.0, 2: 1.05, 4: 2.0}, 4, spread=0.01)
    last = {"num_workers": num_workers}
    results = [r for r in results if (r.spec.point, r.spec.repeat) != (last, 3)] + [make_result(last, 3, state=state)]
    of = what_is_open(question_of_workers(baseline={"num_workers": 1}), results)
    assert (of.points, of.stopped) == ((), Stopped.STUCK)
    assert labels(p.point for p in of.stuck) == [2]
    assert "as more of them would not help; still open: num_workers=2 1.0" in stop_sentence(of, of.stopped)


def test_points_of_an_earlier_space_are_not_run_again():
    question = question_of_workers(points=({"num_workers": 1}, {"num_workers": 4}))
    of = what_is_open(question, trials({1: 1.0, 2: 1.05, 4: 2.0}, spread=0.005))
    assert (of.points, of.stuck, of.stopped) == ((), (), Stopped.SETTLED)


def test_sentences_say_why_a_study_stopped():
    settled = what_is_open(question_of_workers(), trials({1: 1.0, 2: 1.5, 4: 2.0}))
    assert stop_sentence(settled, settled.stopped) == "Settled after 9 trials."
    of = what_is_open(question_of_workers(), trials({1: 1.0, 2: 1.05, 4: 2.0}, spread=0.01))
    assert of.text.startswith("1 point open: num_workers=2 1.0")
    left = f"; still open: {of.points[0]}."
    assert stop_sentence(of, Stopped.BUDGET) == f"Stopped after 9 trials, as the budget allows no further block{left}"
    assert stop_sentence(of, None) == f"Not settled yet, after 9 trials{left}"
    # On a busy machine, the status is always the same.
    assert {stop_status(why, is_disturbed=True) for why in (*Stopped, None)} == {"not settled (disturbed)"}
