"""Speedups, efficiencies and serial fractions of runs by worker count."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from law_runs import COUNTS, fit_of, runs_of

from raypar.analysis.laws import AMDAHL, GUSTAFSON, USL, Scaling
from raypar.analysis.scaling import Runs, analyse_scaling, karp_flatt, karp_flatt_of
from raypar.analysis.stats import Estimate, Method, reference
from raypar.errors import RayparError


@given(speedup=st.floats(0.1, 1000), num_workers=st.integers(2, 1000))
def test_karp_flatt_is_the_serial_fraction_with_which_amdahl_has_that_speedup(speedup: float, num_workers: int) -> None:
    assert AMDAHL.speedup(num_workers, karp_flatt(speedup, num_workers)) == pytest.approx(speedup)


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


def test_faster_than_perfect_is_a_fraction_of_0_and_a_karp_flatt_below() -> None:
    analysis = analyse_scaling(Runs({n: (100 / n**1.2,) for n in COUNTS}))
    assert fit_of(analysis, AMDAHL).parameters[0].value == 0
    assert all(p.karp_flatt is not None and p.karp_flatt.value < 0 for p in analysis.points[1:])


def test_a_baseline_without_runs_is_refused_with_those_that_have_some() -> None:
    with pytest.raises(RayparError, match="no run with 3 workers") as told:
        analyse_scaling(Runs({1: (1.0,), 2: (0.6,)}), baseline=3)
    assert told.value.hint == "worker counts that have runs: 1, 2"
    with pytest.raises(RayparError, match="no runs to look at"):
        analyse_scaling(Runs({}))


@given(bounds=st.lists(st.floats(0.1, 1000), min_size=3, max_size=3).map(sorted), num_workers=st.floats(0.01, 1000))
def test_a_serial_fraction_has_the_interval_that_the_speedups_own_gives(
    bounds: list[float], num_workers: float
) -> None:
    assume(abs(num_workers - 1) > 1e-3)
    low, value, high = bounds
    fraction = karp_flatt_of(Estimate(value, low, high, 5, 0.95, Method.T_LOG), num_workers)
    assert fraction.low is not None and fraction.high is not None
    assert fraction.low <= fraction.value <= fraction.high
    assert {fraction.low, fraction.high} == {karp_flatt(low, num_workers), karp_flatt(high, num_workers)}
    alone = karp_flatt_of(Estimate(value, None, None, 1, None, Method.SINGLE), num_workers)
    assert (alone.value, alone.low, alone.high) == (fraction.value, None, None)


def test_speedups_that_are_known_better_are_taken_as_they_are() -> None:
    known = {1: reference(2), 2: Estimate(1.7, 1.6, 1.8, 2, 0.95, Method.T_LOG)}
    base, two = analyse_scaling(Runs({1: (10.0, 11.0), 2: (6.0, 5.0)}), speedups=known).points
    assert (base.speedup, two.speedup) == (known[1], known[2])
    assert (two.efficiency.value, two.karp_flatt) == (0.85, karp_flatt_of(known[2], 2))
