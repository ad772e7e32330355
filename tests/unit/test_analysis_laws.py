"""What the laws of scaling say about times that a law has made."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from law_runs import COUNTS, as_times, fit_of, holds, runs_of

from raypar.analysis.laws import AMDAHL, GUSTAFSON, NO_EFFECT, USL, Law, Refused, Scaling
from raypar.analysis.scaling import Runs, analyse_scaling

SOME_COUNTS = st.lists(st.integers(1, 512), min_size=4, max_size=8, unique=True).map(sorted)
SHARES = st.floats(0, 1)
RATES = st.floats(1e-6, 1e6)


@given(fraction=SHARES, rate=RATES, counts=SOME_COUNTS)
def test_times_made_by_amdahls_law_give_back_its_serial_fraction(
    fraction: float, rate: float, counts: list[int]
) -> None:
    fit = fit_of(analyse_scaling(as_times(runs_of(AMDAHL, fraction, counts=counts, rate=rate))), AMDAHL)
    assert fit.parameters[0].value == pytest.approx(fraction, rel=1e-3, abs=2 * NO_EFFECT / max(counts))
    assert max(map(abs, fit.residuals.values())) < 2 * NO_EFFECT
    assert fit.rate.value == pytest.approx(rate, rel=1e-2)


@given(fraction=SHARES, rate=RATES, counts=SOME_COUNTS)
def test_times_made_by_gustafsons_law_give_back_its_serial_fraction(
    fraction: float, rate: float, counts: list[int]
) -> None:
    runs = as_times(runs_of(GUSTAFSON, fraction, counts=counts, rate=rate), Scaling.WEAK)
    fit = fit_of(analyse_scaling(runs, Scaling.WEAK), GUSTAFSON)
    assert max(map(abs, fit.residuals.values())) < 2 * NO_EFFECT
    if min(counts) == 1:  # without it, the law is all but a straight line through 0, whatever f
        assert fit.parameters[0].value == pytest.approx(fraction, abs=1e-2)


@given(contention=st.floats(0, 0.9), coherence=st.floats(1e-4, 0.1))
def test_rates_made_by_the_universal_law_give_back_its_parameters_and_its_peak(
    contention: float, coherence: float
) -> None:
    fit = fit_of(analyse_scaling(runs_of(USL, contention, coherence, counts=(1, 2, 4, 8, 16, 32))), USL)
    assert [p.value for p in fit.parameters] == pytest.approx([contention, coherence], rel=1e-3, abs=1e-5)
    assert fit.peak is not None
    assert fit.peak.value == pytest.approx(math.sqrt((1 - contention) / coherence), rel=1e-2)


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
