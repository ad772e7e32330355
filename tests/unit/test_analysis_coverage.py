"""Intervals on made-up samples whose truth is known: 95 % of them hold it, within what simulation can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

from raypar.analysis.stats import difference_estimate, median_estimate, ratio_estimate

Draw: TypeAlias = Callable[[np.random.Generator, int], NDArray[np.float64]]

NUM_STUDIES = 500
# Of few repeats, Welch's degrees of freedom and the median's error are on the safe side.
AT_MOST_FOR_FEW = 0.998
RATIO = 1.5


def log_normal(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    return np.exp(rng.normal(0, 0.1, count))


def skewed(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    """A floor, and delays on top of it: what a busy machine's times look like."""
    return 1 + rng.exponential(0.2, count)


def coverage(draw: Draw, size: int, *, paired: bool) -> float:
    rng = np.random.default_rng(size)
    hits = 0
    for _ in range(NUM_STUDIES):
        blocks = np.exp(rng.normal(0, 0.2, size)) if paired else 1.0
        estimate = ratio_estimate(RATIO * draw(rng, size) * blocks, draw(rng, size) * blocks, paired=paired)
        hits += not estimate.excludes(RATIO)
    return hits / NUM_STUDIES


@pytest.mark.parametrize("draw", [log_normal, skewed])
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("paired", [True, False])
def test_a_ratio_of_few_repeats_lies_in_its_interval(draw: Draw, size: int, paired: bool) -> None:
    assert 0.93 <= coverage(draw, size, paired=paired) <= AT_MOST_FOR_FEW


@pytest.mark.parametrize("draw", [log_normal, skewed])
@pytest.mark.parametrize("size", [6, 10])
@pytest.mark.parametrize("paired", [True, False])
def test_a_ratio_of_six_repeats_or_more_lies_in_its_bootstrap_interval(draw: Draw, size: int, paired: bool) -> None:
    assert 0.905 <= coverage(draw, size, paired=paired) <= 0.985


@pytest.mark.parametrize(("draw", "median"), [(log_normal, 1.0), (skewed, 1 + 0.2 * np.log(2))])
@pytest.mark.parametrize("size", [2, 3, 5, 6, 9, 20])
def test_a_median_lies_in_its_interval(draw: Draw, median: float, size: int) -> None:
    rng = np.random.default_rng(size)
    hits = sum(not median_estimate(draw(rng, size)).excludes(median) for _ in range(NUM_STUDIES))
    assert 0.93 <= hits / NUM_STUDIES <= 0.995


@pytest.mark.parametrize("size", [3, 6, 12])
def test_a_difference_of_metrics_lies_in_its_interval(size: int) -> None:
    rng = np.random.default_rng(size)
    hits = 0
    for _ in range(NUM_STUDIES):
        sides = [median_estimate(rng.normal(mean, 0.01, size), log_scale=False) for mean in (0.90, 0.92)]
        hits += not difference_estimate(*sides).excludes(0.02)
    assert 0.93 <= hits / NUM_STUDIES <= AT_MOST_FOR_FEW
