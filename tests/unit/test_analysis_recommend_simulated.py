"""Recommendations on made-up studies whose truth is known: a winner is rarely named by chance, and found if clear."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from results import make_result

from raypar.analysis.candidates import Constraints
from raypar.analysis.pairwise import joint_share
from raypar.analysis.question import Question
from raypar.analysis.recommend import Decision, Recommendation, recommend
from raypar.study.trial import TrialResult

QUESTION = Question("s", {}, ("lr",))


def study(rng: np.random.Generator, medians_s: Sequence[float], num_repeats: int, noise: float) -> list[TrialResult]:
    """Log-normal times; what disturbs a block disturbs all its trials alike."""
    blocks = rng.normal(0, noise, num_repeats)
    return [
        make_result({"lr": float(i)}, repeat, float(median_s * np.exp(rng.normal(blocks[repeat], noise))))
        for i, median_s in enumerate(medians_s)
        for repeat in range(num_repeats)
    ]


def found_in(seed: int, medians_s: Sequence[float], num_repeats: int, noise: float, count: int) -> list[Recommendation]:
    rng = np.random.default_rng(seed)
    return [recommend(QUESTION, study(rng, medians_s, num_repeats, noise), Constraints()) for _ in range(count)]


@pytest.mark.parametrize(("num_points", "num_repeats"), [(2, 3), (2, 6), (2, 10), (5, 3), (5, 6)])
def test_of_equal_points_a_winner_is_named_in_no_more_than_one_study_of_twenty(
    num_points: int, num_repeats: int
) -> None:
    found = found_in(1, [10.0] * num_points, num_repeats, 0.1, 60)
    assert sum(f.decision is Decision.CLEAR for f in found) <= 3


@pytest.mark.parametrize("num_repeats", [3, 6])
def test_a_point_that_is_clearly_faster_is_found(num_repeats: int) -> None:
    found = found_in(2, [10.0, 8.0, 10.0, 10.0], num_repeats, 0.03, 40)
    assert {f.chosen.point["lr"] for f in found if f.chosen} == {1.0}
    assert sum(f.decision is Decision.CLEAR for f in found) >= 32


def test_what_is_said_to_be_sure_is_right_as_often_or_more_whatever_the_number_of_points() -> None:
    """The winner of many owes part of its lead to luck; its share must allow for that."""
    shares, right = [], []
    for seed in range(2):
        for f in found_in(seed, [10.0, 10.2, 10.2, 10.2], 6, 0.03, 25):
            assert f.confidence is not None and f.chosen is not None
            if f.chosen is f.leader and f.confidence.share > 0.5:
                shares.append(f.confidence.share)
                right.append(f.chosen.point["lr"] == 0.0)
    assert len(shares) > 5
    assert np.mean(right) > np.mean(shares) - 0.1


def test_the_repeats_that_would_settle_it_do() -> None:
    """By a test of 80 % power, with a spread that is itself an estimate: most studies of as many repeats can tell."""
    medians_s, noise = [10.0, 9.0], 0.09
    unclear = [f for f in found_in(3, medians_s, 4, noise, 80) if f.decision is Decision.UNCLEAR]
    counts = [f.settling.num_repeats for f in unclear if f.settling and f.settling.num_repeats]
    assert len(counts) > 20
    settled = Counter(
        found_in(seed, medians_s, count, noise, 1)[0].decision is not Decision.UNCLEAR
        for seed, count in enumerate(counts)
    )
    as_before = found_in(4, medians_s, 4, noise, 40)
    assert settled[True] >= 0.7 * settled.total()
    assert sum(f.decision is not Decision.UNCLEAR for f in as_before) < 0.6 * len(as_before)


def test_shares_of_several_claims_hold_together() -> None:
    assert joint_share([0.9]) == pytest.approx(0.9)
    assert joint_share([0.99, 0.98, 0.97]) == pytest.approx(0.94)
    assert joint_share([0.6, 0.6, 0.6]) == pytest.approx(0.25)  # one of four
