"""Drift, slow first trials and outliers: found where they were made, and not where there are none."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import make_result

from raypar.analysis.analyse import Question, analyse
from raypar.analysis.checks import (
    Check,
    Evidence,
    Finding,
    Series,
    drift_in_trials,
    drift_over_study,
    outliers,
    slow_first_trial,
    trend_of,
)
from raypar.analysis.question import collect
from raypar.study.trial import TrialResult

QUESTION = Question("mnist", {"num_workers": 1}, ("num_workers",))
NOISE = 0.03
TRIAL_S = 10.0


def study(
    seed: int,
    *,
    num_repeats: int = 6,
    workers: tuple[int, ...] = (1, 2, 4),
    drift: float = 0.0,
    first: float = 1.0,
) -> list[TrialResult]:
    """Log-normal times in blocks; `drift` is the relative change over the study, `first` what slows its first trial."""
    rng = np.random.default_rng(seed)
    results = []
    order = [(r, int(w)) for r in range(num_repeats) for w in rng.permutation(workers)]
    # In the first block the baseline comes first, so that a test knows whose trial is slowed.
    order[: len(workers)] = [(0, w) for w in workers]
    for i, (repeat, num_workers) in enumerate(order):
        time_s = 8.0 / num_workers * math.exp(rng.normal(0, NOISE)) * (1 + drift) ** (i / (len(order) - 1))
        time_s *= first if i == 0 else 1.0
        results.append(make_result({"num_workers": num_workers}, repeat, time_s, started_at=1000.0 + TRIAL_S * i))
    return results


def findings(results: list[TrialResult]) -> dict[Check, Finding]:
    """What the checks of this module's subject find; they look at the trials alone, not at the points' numbers."""
    evidence = Evidence(QUESTION, "train_time_s", collect(QUESTION, results, "train_time_s"), ())
    checks = (drift_over_study, drift_in_trials, slow_first_trial, outliers)
    return {f.check: f for check in checks for f in check(evidence)}


def share_of_studies(check: Check, num_studies: int = 300, **made) -> float:
    return sum(check in findings(study(seed, **made)) for seed in range(num_studies)) / num_studies


@pytest.mark.parametrize("num_repeats", [3, 6, 10])
def test_a_steady_study_is_said_to_drift_in_fewer_than_one_of_twenty(num_repeats: int) -> None:
    assert share_of_studies(Check.DRIFT_OVER_STUDY, num_repeats=num_repeats) <= 0.05 + 0.02  # 300 draws waver by 0.013


def test_a_drift_that_was_made_is_found_and_told_by_its_size() -> None:
    assert share_of_studies(Check.DRIFT_OVER_STUDY, num_studies=50, num_repeats=10, drift=0.2) > 0.95
    detail = findings(study(1, num_repeats=20, drift=0.2))[Check.DRIFT_OVER_STUDY].detail
    told = int(detail.split("became ")[1].split(" %")[0])
    assert told == pytest.approx(20, abs=5)
    assert detail.startswith("The baseline became") and "slower" in detail


def test_three_baseline_trials_can_not_tell_and_all_points_are_asked() -> None:
    detail = findings(study(0, num_repeats=3, workers=(1, 2, 4, 8, 16), drift=0.4))[Check.DRIFT_OVER_STUDY].detail
    assert detail.startswith("Trials of the same point became")


@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 1000).map(float), st.floats(0.1, 100.0)),
            min_size=2,
            max_size=8,
            unique_by=lambda t: t[0],
        ),
        min_size=2,
        max_size=5,
    ),
    st.randoms(use_true_random=False),
)
def test_a_trend_is_the_same_whatever_the_order_of_points_and_trials(
    points: list[list[tuple[float, float]]], rng: random.Random
) -> None:
    shuffled: list[Series] = [rng.sample(series, len(series)) for series in rng.sample(points, len(points))]
    one, other = trend_of(points), trend_of(shuffled)
    assert (one is None) == (other is None)
    if one and other:
        assert other.change == pytest.approx(one.change, rel=1e-9, abs=1e-12)
        assert (other.tau, other.num_trials) == (pytest.approx(one.tau), one.num_trials)
        assert other.p_value == pytest.approx(one.p_value)


@given(
    st.floats(-0.5, 1.0),
    st.lists(st.floats(0.1, 1000.0), min_size=1, max_size=4),
    st.integers(5, 9),
)
def test_an_exact_exponential_drift_is_recovered(drift: float, levels: list[float], num_trials: int) -> None:
    span = 100.0
    rate = math.log1p(drift) / span
    starts = [span * i / (num_trials - 1) for i in range(num_trials)]
    trend = trend_of([[(at, level * math.exp(rate * at)) for at in starts] for level in levels])
    assert trend is not None
    assert trend.change == pytest.approx(drift, rel=1e-6, abs=1e-9)
    if abs(drift) > 1e-6:
        assert trend.tau == pytest.approx(math.copysign(1, drift))
        assert trend.p_value < 0.05


def test_too_few_trials_have_no_trend() -> None:
    assert trend_of([[(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]]) is None
    assert trend_of([]) is None
    assert trend_of([[(0.0, 1.0 + i) for i in range(9)]]) is None  # nobody knows which came first


def test_a_slow_first_trial_is_told_and_not_counted_as_an_outlier_again() -> None:
    found = findings(study(3, first=1.5))
    assert "num_workers=1 #1" in found[Check.SLOW_FIRST_TRIAL].detail
    assert Check.OUTLIERS not in found
    assert share_of_studies(Check.SLOW_FIRST_TRIAL, num_studies=100, first=1.5) > 0.95


@pytest.mark.parametrize("num_repeats", [3, 6])
def test_the_first_trial_of_a_steady_study_is_seldom_called_slow(num_repeats: int) -> None:
    assert share_of_studies(Check.SLOW_FIRST_TRIAL, num_repeats=num_repeats) <= 0.03


def test_an_outlier_is_counted_and_named_and_stays_in_the_numbers() -> None:
    results = study(5)
    results[10] = replace(results[10], train_time_s=results[10].train_time_s * 1.6)
    analysis = analyse(QUESTION, results)
    detail = next(f.detail for f in analysis.warnings if f.check is Check.OUTLIERS)
    assert ": 1 of 18 trials: " in detail and results[10].spec.label in detail
    assert sum(p.time_s.num_samples for p in analysis.points) == 18


def test_of_two_trials_neither_is_an_outlier() -> None:
    results = [make_result({"num_workers": w}, r, 8.0 / w * (1 + (w == 2) * r)) for w in (1, 2, 4) for r in range(2)]
    assert Check.OUTLIERS not in findings(results)


@pytest.mark.parametrize("num_repeats", [3, 6, 10])
def test_ordinary_noise_seldom_makes_an_outlier(num_repeats: int) -> None:
    assert share_of_studies(Check.OUTLIERS, num_repeats=num_repeats) <= 0.15


def with_rates(results: list[TrialResult], factor: float) -> list[TrialResult]:
    """Trials of nine epochs, the last of which runs at `factor` times the rate of the first."""
    rng = np.random.default_rng(7)
    return [
        replace(
            r,
            reports=tuple(
                {**r.final, "throughput_samples_per_s": 1e4 * factor ** (i / 8) * math.exp(rng.normal(0, 0.01))}
                for i in range(9)
            ),
        )
        for r in results
    ]


@pytest.mark.parametrize(("factor", "told"), [(0.85, "slower"), (1.2, "faster"), (1.0, None)])
def test_steps_that_change_within_trials_are_told_by_the_direction(factor: float, told: str | None) -> None:
    found = findings(with_rates(study(0), factor)).get(Check.DRIFT_IN_TRIALS)
    assert (found is None) if told is None else (found is not None and f"% {told} from the first third" in found.detail)


def test_trials_of_a_few_epochs_say_nothing_of_a_drift_within_them() -> None:
    short = [replace(r, reports=r.reports[:3]) for r in with_rates(study(0), 0.5)]
    assert Check.DRIFT_IN_TRIALS not in findings(short)
