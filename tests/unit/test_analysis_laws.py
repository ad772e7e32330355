"""Speedups, and what the laws of scaling say about times that a law has made."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypar.analysis.laws import (
    AMDAHL,
    GUSTAFSON,
    NO_EFFECT,
    USL,
    Fit,
    Law,
    Refused,
    Scaling,
    ScalingAnalysis,
    analyse_scaling,
    karp_flatt,
)
from raypar.analysis.stats import Estimate
from raypar.analysis.table import Quantity, Runs
from raypar.errors import RayparError

COUNTS = (1, 2, 4, 8, 16)
SOME_COUNTS = st.lists(st.integers(1, 512), min_size=4, max_size=8, unique=True).map(sorted)
SHARES = st.floats(0, 1)
RATES = st.floats(1e-6, 1e6)


def runs_of(
    law: Law,
    *parameters: float,
    counts: Iterable[int] = COUNTS,
    rate: float = 0.01,
    noise: float = 0.0,
    num_repeats: int = 1,
    seed: int = 0,
) -> Runs:
    """Throughputs as a law has them, with log-normal noise."""
    rng = np.random.default_rng(seed)
    values = {}
    for n in counts:
        factors = np.exp(noise * rng.standard_normal(num_repeats))
        values[n] = tuple(float(rate * law.speedup(n, *parameters) * factor) for factor in factors)
    return Runs(values, Quantity.THROUGHPUT)


def as_times(runs: Runs, scaling: Scaling = Scaling.STRONG) -> Runs:
    return Runs({n: tuple((n if scaling is Scaling.WEAK else 1) / r for r in v) for n, v in runs.values.items()})


def fit_of(analysis: ScalingAnalysis, law: Law) -> Fit:
    (fit,) = [found for found in analysis.laws if isinstance(found, Fit) and found.law is law]
    return fit


def holds(estimate: Estimate | None, truth: float) -> bool:
    assert estimate is not None and estimate.low is not None and estimate.high is not None
    return estimate.low <= truth <= estimate.high


@settings(max_examples=25, deadline=None)
@given(fraction=SHARES, rate=RATES, counts=SOME_COUNTS)
def test_times_made_by_amdahls_law_give_back_its_serial_fraction(
    fraction: float, rate: float, counts: list[int]
) -> None:
    fit = fit_of(analyse_scaling(as_times(runs_of(AMDAHL, fraction, counts=counts, rate=rate))), AMDAHL)
    assert fit.parameters[0].value == pytest.approx(fraction, rel=1e-3, abs=2 * NO_EFFECT / max(counts))
    assert max(map(abs, fit.residuals.values())) < 2 * NO_EFFECT
    assert fit.rate.value == pytest.approx(rate, rel=1e-2)


@settings(max_examples=25, deadline=None)
@given(fraction=SHARES, rate=RATES, counts=SOME_COUNTS)
def test_times_made_by_gustafsons_law_give_back_its_serial_fraction(
    fraction: float, rate: float, counts: list[int]
) -> None:
    runs = as_times(runs_of(GUSTAFSON, fraction, counts=counts, rate=rate), Scaling.WEAK)
    fit = fit_of(analyse_scaling(runs, Scaling.WEAK), GUSTAFSON)
    assert max(map(abs, fit.residuals.values())) < 2 * NO_EFFECT
    if min(counts) == 1:  # without it, the law is all but a straight line through 0, whatever f
        assert fit.parameters[0].value == pytest.approx(fraction, abs=1e-2)


@settings(max_examples=25, deadline=None)
@given(contention=st.floats(0, 0.9), coherence=st.floats(1e-4, 0.1))
def test_rates_made_by_the_universal_law_give_back_its_parameters_and_its_peak(
    contention: float, coherence: float
) -> None:
    fit = fit_of(analyse_scaling(runs_of(USL, contention, coherence, counts=(1, 2, 4, 8, 16, 32))), USL)
    assert [p.value for p in fit.parameters] == pytest.approx([contention, coherence], rel=1e-3, abs=1e-5)
    assert fit.peak is not None
    assert fit.peak.value == pytest.approx(math.sqrt((1 - contention) / coherence), rel=1e-2)


@given(speedup=st.floats(0.1, 1000), num_workers=st.integers(2, 1000))
def test_karp_flatt_is_the_serial_fraction_with_which_amdahl_has_that_speedup(speedup: float, num_workers: int) -> None:
    assert AMDAHL.speedup(num_workers, karp_flatt(speedup, num_workers)) == pytest.approx(speedup)


@settings(max_examples=25, deadline=None)
@given(times=st.lists(st.floats(0.1, 100), min_size=2, max_size=2), data=st.data())
def test_efficiency_is_the_speedup_per_worker_whatever_the_baseline(times: list[float], data: st.DataObject) -> None:
    base = data.draw(st.sampled_from([2, 8]))
    runs = Runs({2: (times[0],), 8: (times[1],)})
    for scaling, work in ((Scaling.STRONG, 1), (Scaling.WEAK, 4)):
        low, high = analyse_scaling(runs, scaling, base).points
        assert high.speedup.value / low.speedup.value == pytest.approx(work * times[0] / times[1])
        for point in (low, high):
            assert point.efficiency.value == pytest.approx(point.speedup.value * base / point.num_workers)
        (of_base,) = [p for p in (low, high) if p.num_workers == base]
        assert (of_base.speedup.value, of_base.karp_flatt) == (1, None)


def test_constant_times_are_no_gain_in_strong_and_perfect_in_weak_scaling() -> None:
    runs = Runs(dict.fromkeys(COUNTS, (10.0,)))
    strong, weak = analyse_scaling(runs), analyse_scaling(runs, Scaling.WEAK)
    assert [p.speedup.value for p in strong.points] == [1] * 5
    assert [p.efficiency.value for p in weak.points] == pytest.approx([1] * 5)
    assert fit_of(strong, AMDAHL).parameters[0].value == pytest.approx(1, abs=1e-6)
    assert fit_of(weak, GUSTAFSON).parameters[0].value == 0
    assert [law.law for law in weak.laws] == [GUSTAFSON, USL]


def test_a_throughput_is_a_rate_in_both_ways_to_scale() -> None:
    runs = runs_of(AMDAHL, 0.1)
    strong, weak = (analyse_scaling(runs, scaling) for scaling in Scaling)
    assert strong.points == weak.points


def test_noisy_repeats_give_intervals_that_hold_the_truth() -> None:
    runs = runs_of(USL, 0.05, 0.002, counts=(1, 2, 4, 8, 16, 32), noise=0.02, num_repeats=5, seed=7)
    analysis = analyse_scaling(as_times(runs), num_resamples=200)
    fit = fit_of(analysis, USL)
    assert analysis.why_no_interval == ""
    assert analysis.better is USL
    assert holds(fit.parameters[0], 0.05) and holds(fit.parameters[1], 0.002) and holds(fit.rate, 0.01)
    assert holds(fit.peak, math.sqrt(0.95 / 0.002))
    assert holds(fit.peak_speedup, USL.speedup(math.sqrt(0.95 / 0.002), 0.05, 0.002))
    assert list(fit.extrapolated) == [64, 128]
    assert holds(fit.extrapolated[64], USL.speedup(64, 0.05, 0.002))


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    held = 0
    for seed in range(20):
        runs = runs_of(AMDAHL, 0.05, noise=0.03, num_repeats=4, counts=(1, 4, 16), seed=seed)
        fit = fit_of(analyse_scaling(runs, num_resamples=100), AMDAHL)
        held += holds(fit.parameters[0], 0.05)
    assert held >= 16


def test_amdahls_limit_is_one_over_the_serial_fraction_and_relative_to_the_baseline() -> None:
    runs = runs_of(AMDAHL, 0.05, noise=0.01, num_repeats=3)
    of_one = fit_of(analyse_scaling(runs, num_resamples=100), AMDAHL)
    of_four = fit_of(analyse_scaling(runs, baseline=4, num_resamples=100), AMDAHL)
    assert holds(of_one.limit, 20)
    assert holds(of_four.limit, 20 / AMDAHL.speedup(4, 0.05))
    assert of_four.parameters == of_one.parameters


def test_without_a_clear_bend_there_is_no_peak_and_no_limit() -> None:
    analysis = analyse_scaling(Runs({n: (100 / n, 101 / n, 99 / n, 100.5 / n) for n in COUNTS}), num_resamples=100)
    assert (fit_of(analysis, USL).peak, fit_of(analysis, AMDAHL).limit) == (None, None)


def test_the_same_runs_give_the_same_intervals_and_another_seed_gives_others() -> None:
    runs = runs_of(AMDAHL, 0.1, noise=0.05, num_repeats=3, counts=(1, 2, 4))
    first, again, other = (analyse_scaling(runs, num_resamples=50, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_one_repeat_gives_parameters_without_intervals_and_says_why() -> None:
    runs = Runs({1: (10.0, 10.1), 2: (5.5,), 4: (3.1, 3.0), 8: (2.0,)})
    analysis = analyse_scaling(runs)
    assert analysis.why_no_interval == "2, 8 workers ran only once"
    assert all(p.low is None for law in (AMDAHL, USL) for p in fit_of(analysis, law).parameters)


@pytest.mark.parametrize(("num_counts", "refused"), [(1, [AMDAHL, USL]), (2, [AMDAHL, USL]), (3, [USL]), (4, [])])
def test_too_few_worker_counts_are_refused_with_the_reason(num_counts: int, refused: list[Law]) -> None:
    analysis = analyse_scaling(runs_of(AMDAHL, 0.1, counts=COUNTS[:num_counts], num_repeats=9))
    found = {law.law.name: law.reason for law in analysis.laws if isinstance(law, Refused)}
    assert found == {
        law.name: f"it takes {law.min_counts} distinct worker counts or more, and there are {num_counts}"
        for law in refused
    }
    if refused:
        assert (analysis.better, analysis.why_no_better) == (None, "fewer than two laws could be fitted")


def test_laws_that_say_the_same_are_not_told_apart() -> None:
    # With k = 0, the universal law is Amdahl's.
    analysis = analyse_scaling(runs_of(AMDAHL, 0.1))
    assert analysis.better is None
    assert analysis.why_no_better == "they predict left-out points about equally well"


def test_the_law_that_made_the_times_is_the_better_one() -> None:
    weak = analyse_scaling(as_times(runs_of(GUSTAFSON, 0.3), Scaling.WEAK), Scaling.WEAK)
    assert weak.better is GUSTAFSON
    assert analyse_scaling(runs_of(USL, 0.02, 0.01)).better is USL


def test_faster_than_perfect_is_a_fraction_of_0_and_a_karp_flatt_below() -> None:
    analysis = analyse_scaling(Runs({n: (100 / n**1.2,) for n in COUNTS}))
    assert fit_of(analysis, AMDAHL).parameters[0].value == 0
    assert all(p.karp_flatt is not None and p.karp_flatt < 0 for p in analysis.points[1:])


def test_a_baseline_without_runs_is_refused_with_those_that_have_some() -> None:
    with pytest.raises(RayparError, match="no run with 3 workers") as told:
        analyse_scaling(Runs({1: (1.0,), 2: (0.6,)}), baseline=3)
    assert told.value.hint == "worker counts that have runs: 1, 2"
    with pytest.raises(RayparError, match="no runs to look at"):
        analyse_scaling(Runs({}))
