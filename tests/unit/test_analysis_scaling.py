"""Speedups, serial fractions and laws: of simulated runs, and of a study's groups."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from results import make_result

from raypar.analysis.analyse import analyse
from raypar.analysis.laws import AMDAHL, GUSTAFSON, NO_EFFECT, USL, Fit, Scaling
from raypar.analysis.question import Question, collect, current_results
from raypar.analysis.scaling import (
    SAMPLES_PER_S,
    TRAININGS_PER_S,
    Measurement,
    Runs,
    ScalingPoint,
    analyse_scaling,
    karp_flatt,
    worker_groups,
)
from raypar.analysis.stats import Estimate, Method, median_estimate
from raypar.errors import RayparError
from raypar.study.trial import TrialState

COUNTS = (1, 2, 4, 8, 16)


def runs_of(law, *parameters, counts=COUNTS, rate=0.01, noise=0.0, num_repeats=1, seed=0):
    """Throughputs by a law, with log-normal noise."""
    rng = np.random.default_rng(seed)
    factors = {n: np.exp(noise * rng.standard_normal(num_repeats)) for n in counts}
    rates = {n: tuple((rate * law.speedup(n, *parameters) * f).tolist()) for n, f in factors.items()}
    return Runs(rates, Measurement.THROUGHPUT)


def as_times(runs, scaling=Scaling.STRONG):
    return Runs({n: tuple((n if scaling is Scaling.WEAK else 1) / r for r in v) for n, v in runs.values.items()})


def fit_of(analysis, law):
    (fit,) = [law_fit for law_fit in analysis.laws if isinstance(law_fit, Fit) and law_fit.law is law]
    return fit


def holds(estimate, truth):
    return estimate.low <= truth <= estimate.high


# ---- laws


@pytest.mark.parametrize(
    ("law", "scaling", "bounds"),
    [
        (AMDAHL, Scaling.STRONG, [(0, 1)]),
        (GUSTAFSON, Scaling.WEAK, [(0, 1)]),
        (USL, Scaling.STRONG, [(0, 0.9), (1e-4, 0.1)]),
    ],
)
@given(data=st.data(), rate=st.floats(1e-6, 1e6))
def test_the_parameters_of_simulated_times_are_recovered(law, scaling, bounds, data, rate):
    parameters = [data.draw(st.floats(*each)) for each in bounds]
    runs = as_times(runs_of(law, *parameters, counts=(1, 2, 4, 8, 16, 32), rate=rate), scaling)
    fit = fit_of(analyse_scaling(runs, scaling), law)
    assert [p.value for p in fit.parameters] == pytest.approx(parameters, rel=1e-3, abs=2 * NO_EFFECT)
    assert max(map(abs, fit.residuals.values())) < 2 * NO_EFFECT


@pytest.mark.parametrize(("law", "parameters"), [(AMDAHL, (0.2,)), (GUSTAFSON, (0.2,)), (USL, (0.2, 0.05))])
@given(baseline=st.sampled_from(COUNTS))
def test_parameters_are_relative_to_the_baseline(law, parameters, baseline):
    runs = runs_of(law, *parameters)
    fit = fit_of(analyse_scaling(runs, Scaling.WEAK if law is GUSTAFSON else Scaling.STRONG, baseline), law)
    for n in COUNTS:
        expected = law.speedup(n, *parameters) / law.speedup(baseline, *parameters)
        assert law.speedup(n / baseline, *(p.value for p in fit.parameters)) == pytest.approx(expected, rel=1e-3)


def test_intervals_of_noisy_repeats_contain_the_truth():
    runs = runs_of(USL, 0.05, 0.002, counts=(1, 2, 4, 8, 16, 32), noise=0.02, num_repeats=5, seed=7)
    analysis = analyse_scaling(as_times(runs))
    fit = fit_of(analysis, USL)
    assert analysis.why_no_interval == ""
    assert holds(fit.parameters[0], 0.05) and holds(fit.parameters[1], 0.002)
    assert holds(fit.peak, math.sqrt(0.95 / 0.002))
    assert holds(fit.peak_speedup, USL.speedup(math.sqrt(0.95 / 0.002), 0.05, 0.002))
    assert list(fit.extrapolated) == [64, 128]
    assert holds(fit.extrapolated[64], USL.speedup(64, 0.05, 0.002))


@pytest.mark.parametrize(
    ("law", "scaling", "parameters", "noises"),
    [
        (AMDAHL, Scaling.STRONG, (0.05,), (0.03,) * 6),
        (GUSTAFSON, Scaling.WEAK, (0.3,), (0.03,) * 6),
        (USL, Scaling.STRONG, (0.05, 0.01), (0.03,) * 6),
        (USL, Scaling.STRONG, (0.05, 0.01), (0.01,) * 5 + (0.1,)),
    ],
)
@pytest.mark.parametrize("num_repeats", [2, 3, 5])
def test_intervals_have_their_stated_coverage(law, scaling, parameters, noises, num_repeats):
    counts, rng = (1, 2, 3, 4, 6, 8), np.random.default_rng(5)
    held = []
    for _ in range(40):
        rates = {
            n: tuple(law.speedup(n, *parameters) * np.exp(noise * rng.standard_normal(num_repeats)))
            for n, noise in zip(counts, noises, strict=True)
        }
        fit = fit_of(analyse_scaling(Runs(rates, Measurement.THROUGHPUT), scaling), law)
        held += [holds(p, truth) for p, truth in zip(fit.parameters, parameters, strict=True)]
    assert np.mean(held) >= 0.88  # of 40 and 80 intervals of 95 %


def test_a_disturbed_block_does_not_widen_intervals_of_paired_repeats():
    rng = np.random.default_rng(3)
    blocks = np.exp(0.2 * rng.standard_normal(5))
    quiet = runs_of(AMDAHL, 0.1, noise=0.01, num_repeats=5)
    noisy = {n: tuple(v * blocks) for n, v in quiet.values.items()}
    widths = [
        fit_of(analyse_scaling(Runs(values, Measurement.THROUGHPUT, are_paired)), AMDAHL).parameters[0]
        for values, are_paired in ((quiet.values, True), (noisy, True), (noisy, False))
    ]
    paired, disturbed, pooled = (p.high - p.low for p in widths)
    assert disturbed == pytest.approx(paired, rel=0.01) and pooled > 5 * paired


def test_amdahls_limit_is_one_over_the_serial_fraction_and_relative_to_the_baseline():
    runs = runs_of(AMDAHL, 0.05, noise=0.01, num_repeats=3)
    of_one = fit_of(analyse_scaling(runs), AMDAHL)
    of_four = fit_of(analyse_scaling(runs, baseline=4), AMDAHL)
    assert holds(of_one.limit, 20)
    assert holds(of_four.limit, 20 / AMDAHL.speedup(4, 0.05))
    assert of_four.parameters[0].value * of_four.limit.value == pytest.approx(1)


def test_without_a_clear_bend_there_is_no_peak_and_no_limit():
    analysis = analyse_scaling(Runs({n: (100 / n, 101 / n, 99 / n, 100.5 / n) for n in COUNTS}))
    assert (fit_of(analysis, USL).peak, fit_of(analysis, AMDAHL).limit) == (None, None)
    assert fit_of(analysis, USL).extrapolated == {} and not fit_of(analysis, USL).is_bent


@pytest.mark.parametrize("parameters", [(0.02, 0.02), (0.5, 0.03)])
def test_single_runs_have_no_peak_no_limit_and_no_better_law(parameters):
    analysis = analyse_scaling(runs_of(USL, *parameters, counts=(1, 2, 3, 4, 6, 8)))
    fits = [fit_of(analysis, law) for law in (AMDAHL, USL)]
    assert [(f.peak, f.limit, f.extrapolated, f.parameters[0].low) for f in fits] == [(None, None, {}, None)] * 2
    assert analysis.better is None and analysis.last_step is None


def test_the_peak_can_be_one_worker():
    runs = runs_of(USL, 0.5, 0.6, noise=0.01, num_repeats=3)
    fit = fit_of(analyse_scaling(runs), USL)
    assert fit.peak.high < 1.5 and fit.peak_speedup.value == 1


SATURATED = {n: float(min(n, 4)) for n in (1, 2, 3, 4, 6, 8)}


def test_rates_that_stay_at_their_highest_have_no_peak():
    rates = {n: tuple(rate * np.array([1.0, 1.02, 0.98])) for n, rate in SATURATED.items()}
    analysis = analyse_scaling(Runs(rates, Measurement.THROUGHPUT))
    fit = fit_of(analysis, USL)
    assert not fit.holds and fit.peak is None and fit.extrapolated == {} and analysis.better is None
    assert (analysis.last_step.start, analysis.last_step.end) == (4, 8)


@pytest.mark.parametrize(
    ("law", "parameters", "scaling", "better"),
    [
        (GUSTAFSON, (0.3,), Scaling.WEAK, GUSTAFSON),
        (USL, (0.02, 0.01), Scaling.STRONG, USL),
        (AMDAHL, (0.1,), Scaling.STRONG, None),  # with k = 0, the universal law is Amdahl's
    ],
)
def test_the_simulated_law_is_the_better_one(law, parameters, scaling, better):
    runs = runs_of(law, *parameters, noise=0.005, num_repeats=3)
    assert analyse_scaling(as_times(runs, scaling), scaling).better is better


# ---- steps

STEADY = (1.0, 1.01, 0.99)


@pytest.mark.parametrize(
    ("rates", "gains", "last"),
    [
        ({1: 1, 2: 2, 4: 3.6, 8: 4.0}, {(1, 2): 2, (2, 4): 1.8, (4, 8): 4 / 3.6}, (4, 8)),
        ({1: 1, 2: 0.7, 3: 0.8}, {(1, 2): 0.7}, (1, 2)),
        ({1: 1, 4: 2.25, 6: 2.5, 8: 3.4}, {(1, 4): 1.5, (4, 8): 3.4 / 2.25}, None),
        ({1: 1, 2: 0.9, 4: 1.7}, {(1, 2): 0.9, (2, 4): 1.7 / 0.9}, None),  # the later step pays off
        ({1: 1, 2: 1.3}, {(1, 2): 1.3}, None),
        ({2: 1, 3: 1.4}, {}, None),
    ],
)
def test_the_last_worthwhile_step_is_found(rates, gains, last):
    runs = Runs({n: tuple(rate * s for s in STEADY) for n, rate in rates.items()}, Measurement.THROUGHPUT)
    analysis = analyse_scaling(runs)
    assert {(s.start, s.end): s.gain.value for s in analysis.steps} == pytest.approx(gains)
    assert (analysis.last_step and (analysis.last_step.start, analysis.last_step.end)) == last


@given(rates=st.lists(st.floats(0.1, 10), min_size=2, max_size=2), end=st.integers(2, 64))
def test_the_cost_of_a_step_is_the_change_in_worker_seconds(rates, end):
    runs = Runs({1: (1 / rates[0],), end: (1 / rates[1],)})
    (step,) = analyse_scaling(runs).steps
    assert step.cost == pytest.approx(end / rates[1] * rates[0])


def test_a_step_is_the_ratio_of_the_speedups_that_the_table_shows():
    # The median of the blocks' ratios is 0.80, the ratio of the medians 0.75.
    times = {1: (3.0, 4.0, 6.0), 2: (3.75, 5.3, 7.5), 4: (2.0, 2.6, 3.9)}
    results = [make_result({"num_workers": n}, r, t) for n, of in times.items() for r, t in enumerate(of)]
    question = Question("s", {"num_workers": 1}, ("num_workers",))
    (group,) = worker_groups(question, collect(question, results, "train_time_s"))
    analysis = group.analysis
    of = {p.num_workers: p.speedup for p in analysis.points}
    first, second = analysis.steps
    assert first.gain == of[2] and first.gain.value != pytest.approx(4.0 / 5.3, abs=0.01)
    assert first.cost == pytest.approx(2 / of[2].value)
    assert second.gain.value == pytest.approx(of[4].value / of[2].value)
    assert second.gain.low < second.gain.value < second.gain.high


@given(st.integers(2, 64), st.floats(0.05, 0.95))
def test_weak_scaling_has_one_serial_fraction_that_of_gustafsons_law(most, fraction):
    counts = sorted({1, most, 2 * most})
    runs = Runs({n: (GUSTAFSON.speedup(n, fraction),) for n in counts}, Measurement.THROUGHPUT)
    analysis = analyse_scaling(runs, Scaling.WEAK)
    assert [p.serial_fraction.value for p in analysis.points[1:]] == pytest.approx([fraction] * (len(counts) - 1))
    assert fit_of(analysis, GUSTAFSON).parameters[0].value == pytest.approx(fraction, rel=1e-3)


# ---- runs


@given(speedup=st.floats(0.1, 1000), num_workers=st.integers(2, 1000))
def test_karp_flatt_inverts_amdahls_law(speedup, num_workers):
    assert AMDAHL.speedup(num_workers, karp_flatt(speedup, num_workers)) == pytest.approx(speedup)


@pytest.mark.parametrize(
    ("num", "bounds", "reason"),
    [
        (16, (1.2, 1.5, 1.9), ""),
        (16, (0.8, 0.9, 0.95), "slower than 8 workers"),
        (16, (0.8, 0.9, 1.2), "inconclusive, needs more repeats"),
        (16, (2.1, 2.2, 2.3), "faster than perfect scaling"),
        (16, (1.9, 2.1, 2.3), "inconclusive, needs more repeats"),
        (16, (0.5, 1.5, 3.0), "inconclusive, needs more repeats"),
        (4, (0.6, 0.7, 0.8), ""),
        (4, (1.1, 1.2, 1.3), "faster than 8 workers"),
        (16, (None, 0.9, None), "inconclusive, needs more repeats"),
        (8, (1.0, 1.0, 1.0), ""),
    ],
)
def test_a_serial_fraction_outside_0_to_1_is_not_given(num, bounds, reason):
    low, value, high = bounds
    point = ScalingPoint(num, 8, median_estimate([1.0]), Estimate(value, low, high, 5, 0.95, Method.T_LOG))
    assert point.why_no_fraction == reason
    if reason or num == 8:
        assert point.serial_fraction is None
    else:
        fraction = point.serial_fraction
        assert holds(fraction, fraction.value)
        assert {fraction.low, fraction.high} == {karp_flatt(low, num / 8), karp_flatt(high, num / 8)}


@given(times=st.lists(st.floats(0.1, 100), min_size=2, max_size=2), base=st.sampled_from([2, 8]))
def test_efficiency_is_the_speedup_per_worker_for_any_baseline(times, base):
    runs = Runs({2: (times[0],), 8: (times[1],)})
    for scaling, work in ((Scaling.STRONG, 1), (Scaling.WEAK, 4)):
        low, high = analyse_scaling(runs, scaling, base).points
        assert high.speedup.value / low.speedup.value == pytest.approx(work * times[0] / times[1])
        for point in (low, high):
            assert point.efficiency.value == pytest.approx(point.speedup.value * base / point.num_workers)
        (of_base,) = [p for p in (low, high) if p.num_workers == base]
        assert (of_base.speedup.value, of_base.serial_fraction) == (1, None)


@pytest.mark.parametrize(
    ("power", "scaling", "law", "fraction"),
    [(0.0, Scaling.STRONG, AMDAHL, 1), (0.0, Scaling.WEAK, GUSTAFSON, 0), (1.2, Scaling.STRONG, AMDAHL, 0)],
    ids=["no gain", "perfect weak scaling", "faster than perfect"],
)
def test_a_serial_fraction_stays_between_0_and_1(power, scaling, law, fraction):
    analysis = analyse_scaling(Runs({n: (100 / n**power,) for n in COUNTS}), scaling)
    assert fit_of(analysis, law).parameters[0].value == pytest.approx(fraction, abs=1e-6)
    work = COUNTS if scaling is Scaling.WEAK else (1,) * 5
    expected = [w * n**power for w, n in zip(work, COUNTS, strict=True)]
    assert [p.speedup.value for p in analysis.points] == pytest.approx(expected)


# ---- groups of a study

QUESTION = Question("s", {"num_workers": 1}, ("num_workers",))
WEAK = {"per_worker_batch_size": 32}
TIMES = st.dictionaries(st.integers(1, 64), st.floats(0.1, 100), min_size=2, max_size=6)


def trials(times, noise=(1.0, 1.01, 0.99), **more):
    """A trial for each worker count and repeat, with different noise for each worker count."""
    return [
        make_result({"num_workers": n}, r, t * noise[(r + i) % len(noise)], **more)
        for i, (n, t) in enumerate(times.items())
        for r in range(len(noise))
    ]


def by_amdahl(fraction):
    return {n: 60 / AMDAHL.speedup(n, fraction) for n in (1, 2, 4, 8)}


def groups(question, results, baseline=None):
    return worker_groups(question, current_results(question, results).points, baseline)


def only(*args):
    (group,) = groups(*args)
    return group


def speedups(group):
    return {n: estimate.value for n, estimate in group.speedups.items()}


def test_the_scaled_speedup_is_a_ratio_of_rates():
    # Steps of 32 samples a worker, 0.100 s for one worker and 0.125 s for four: a rate of 320/s, and of 4 · 256/s.
    steps = ((1, 0.100), (4, 0.125))
    results = [make_result({"num_workers": n}, 0, 180_000 / (32 * n) * step_s, config=WEAK) for n, step_s in steps]
    group = only(QUESTION, results)
    assert dict(group.runs.values) == {1: (pytest.approx(320),), 4: (pytest.approx(1024),)}
    assert speedups(group) == {1: 1, 4: pytest.approx(4 * 256 / 320)}
    assert group.points[1].efficiency.value == pytest.approx(256 / 320)


@given(times=TIMES)
@example({1: 11.0, 2: 1.0, 3: 3.0, 4: 5.0})  # least squares of relative errors alone would make a time 0
def test_speedups_are_those_of_the_report_in_weak_and_strong_scaling(times):
    question = Question("s", {"num_workers": max(times)}, ("num_workers",))
    analysis, weak = (analyse(question, trials(times, config=config)) for config in ({}, WEAK))
    (group,), (weak_group,) = analysis.worker_groups, weak.worker_groups
    assert (group.scaling, weak_group.scaling) == (Scaling.STRONG, Scaling.WEAK)
    assert group.runs == weak_group.runs and group.speedups == weak_group.speedups
    assert group.baseline == max(times)
    reported = {p.num_workers: (p.speedup, p.efficiency) for p in analysis.points}
    scaled = group.analysis.points
    assert {p.num_workers: (p.speedup, p.efficiency) for p in scaled} == reported
    assert [p.num_workers for p in scaled] == sorted(times)


def test_points_that_differ_only_in_workers_are_a_group():
    question = Question("s", {"num_workers": 1}, ("batch_size", "num_workers", "precision"))
    swept = [(b, p) for b in (64, 256) for p in ("bf16", "fp32")]
    results = [
        make_result({"batch_size": b, "precision": p, "num_workers": n}, 0, time_s)
        for i, (b, p) in enumerate(swept)
        for n, time_s in by_amdahl(0.1 * i).items()
    ]
    of_study = groups(question, results[::-1])
    assert [tuple(g.point.values()) for g in of_study] == swept
    assert [g.label for g in of_study][:2] == ["batch_size=64 precision=bf16", "batch_size=64 precision=fp32"]
    assert [g.points[-1].serial_fraction.value for g in of_study] == pytest.approx([0, 0.1, 0.2, 0.3], abs=1e-9)


def test_a_worker_count_without_a_finished_trial_is_excluded():
    listed = tuple({"num_workers": n} for n in (*COUNTS, 32))
    results = [
        *(r for r in trials(by_amdahl(0.1)) if r.spec.placement.num_workers > 1),
        make_result({"num_workers": 1}, 0, state=TrialState.FAILED),
        make_result({"num_workers": 16}, 1, state=TrialState.STOPPED),
    ]
    group = only(Question("s", {"num_workers": 1}, ("num_workers",), points=listed), results)
    assert tuple(group.speedups) == (2, 4, 8) and (group.baseline, speedups(group)[2]) == (2, 1)
    assert group.excluded == {1: "failed", 16: "stopped", 32: "not run yet"}


def test_another_baseline_can_be_chosen_if_it_has_finished():
    results = trials(by_amdahl(0.1))
    group = only(QUESTION, results, 4)
    assert group.baseline == 4
    assert speedups(group)[8] == pytest.approx(AMDAHL.speedup(8, 0.1) / AMDAHL.speedup(4, 0.1), rel=0.05)
    with pytest.raises(RayparError, match="no finished trial with 3 workers to compare with"):
        groups(QUESTION, results, 3)


@pytest.mark.parametrize("config", [{}, WEAK])
def test_train_loops_are_compared_by_whole_trainings(config):
    results = [make_result({"num_workers": n}, 0, None, wall_s=t, config=config) for n, t in ((1, 10.0), (2, 8.0))]
    group = only(QUESTION, results)
    assert (group.unit, dict(group.runs.values)) == (TRAININGS_PER_S, {1: (0.1,), 2: (0.125,)})
    assert speedups(group) == {1: 1, 2: pytest.approx(1.25)}
    assert only(QUESTION, trials({1: 4, 2: 3})).unit == SAMPLES_PER_S


def test_a_study_of_one_worker_count_or_of_fixed_workers_has_no_group():
    assert groups(QUESTION, trials({2: 4.0})) == groups(QUESTION, []) == ()
    fixed = [make_result({"batch_size": b}, 0, 4.0) for b in (32, 64)]
    assert groups(Question("s", {}, ("batch_size",)), fixed) == ()
