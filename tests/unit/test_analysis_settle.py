"""Studies that run until they are settled: looking after each block breaks no promise, and stops where it should."""

import itertools

import numpy as np
import pytest
from results import make_result
from scipy.special import ndtri
from scipy.stats import multivariate_normal

from raypar.analysis.pairwise import MIN_BLOCKS, TIME_ERROR, Family, family_of
from raypar.analysis.question import Question, collect
from raypar.analysis.stats import sequential_errors


@pytest.mark.parametrize(("error", "first", "last"), [(0.05, 3, 5), (0.004, 3, 6), (0.2, 1, 4)])
def test_a_normal_sum_crosses_the_bounds_by_each_look_as_often_as_is_spent(error, first, last):
    sizes = np.arange(first, last + 1)
    bounds = -ndtri(np.array(sequential_errors(error, first, last)) / 2) * np.sqrt(sizes)
    for i in range(1, len(sizes) + 1):
        covariance = np.minimum.outer(sizes[:i], sizes[:i])
        never = multivariate_normal.cdf(bounds[:i], cov=covariance, lower_limit=-bounds[:i], abseps=1e-7)
        assert 1 - never == pytest.approx(error * sizes[i - 1] / last, rel=2e-3)


def test_in_simulation_thirty_looks_err_as_often_as_one():
    looks = np.array(sequential_errors(0.05, 3, 30))
    sums = np.random.default_rng(1).standard_normal((40_000, 30)).cumsum(axis=1)[:, 2:]
    crossed = np.abs(sums) > -ndtri(looks / 2) * np.sqrt(np.arange(3, 31))
    assert crossed.any(axis=1).mean() == pytest.approx(0.05, abs=0.0033)  # three standard errors


def test_one_look_has_all_of_the_error_and_many_have_less_each():
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
