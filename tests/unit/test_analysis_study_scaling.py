"""What a study says about scaling: which points belong together, their rates, and the laws fitted to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from law_runs import fit_of, holds
from results import make_result

from raypar.analysis.analyse import analyse
from raypar.analysis.laws import AMDAHL, GUSTAFSON, USL, Law, Scaling
from raypar.analysis.question import Question
from raypar.analysis.scaling import SAMPLES_PER_S, TRAININGS_PER_S, WorkerGroup, groups_in
from raypar.errors import RayparError
from raypar.study.trial import TrialResult, TrialState

COUNTS = (1, 2, 4, 8)
QUESTION = Question("s", {"num_workers": 1}, ("num_workers",))
WEAK = {"per_worker_batch_size": 32}
OTHERS = {"batch_size": 64, "precision": "fp32"}
NOISE = (1.0, 1.01, 0.99)
TIMES = st.dictionaries(st.integers(1, 64), st.floats(0.1, 100), min_size=2, max_size=6)


def trials(
    times: Mapping[int, float],
    noise: Iterable[float] = NOISE,
    others: Mapping[str, Any] | None = None,
    **more: Any,
) -> list[TrialResult]:
    """A trial for each worker count and repeat, as long as the count's time and the repeat's noise say."""
    # What disturbs a worker count differs from that of the next.
    factors = list(noise)
    return [
        make_result({**(others or {}), "num_workers": n}, r, t * factors[(r + i) % len(factors)], **more)
        for i, (n, t) in enumerate(times.items())
        for r in range(len(factors))
    ]


def by_law(law: Law, *parameters: float, counts: Iterable[int] = COUNTS) -> dict[int, float]:
    """Times of one and the same work: what an epoch is in strong and in weak scaling."""
    return {n: 60 / float(law.speedup(n, *parameters)) for n in counts}


def only(groups: tuple[WorkerGroup, ...]) -> WorkerGroup:
    (group,) = groups
    return group


def speedups(group: WorkerGroup) -> dict[int, float]:
    return {n: estimate.value for n, estimate in group.speedups.items()}


@given(fraction=st.floats(0, 1))
def test_trials_made_by_amdahls_law_give_back_its_serial_fraction(fraction: float) -> None:
    group = only(groups_in(QUESTION, trials(by_law(AMDAHL, fraction), noise=(1.0,))))
    assert group.scaling is Scaling.STRONG
    assert fit_of(group.analyse(), AMDAHL).parameters[0].value == pytest.approx(fraction, rel=1e-3, abs=1e-4)
    assert [f.value for f in group.karp_flatt.values()] == pytest.approx([fraction] * 3, abs=1e-9)


@given(fraction=st.floats(0, 1))
def test_trials_made_by_gustafsons_law_with_the_workers_batch_fixed_give_back_its_serial_fraction(
    fraction: float,
) -> None:
    # T(N) of N times the work is (f + (1 - f)) · T, of the same work 1 / (N - f (N - 1)) of it.
    group = only(groups_in(QUESTION, trials(by_law(GUSTAFSON, fraction), noise=(1.0,), config=WEAK)))
    assert group.scaling is Scaling.WEAK
    assert fit_of(group.analyse(), GUSTAFSON).parameters[0].value == pytest.approx(fraction, abs=1e-2)


def test_gustafsons_scaled_speedup_is_the_worker_count_times_what_is_left_of_a_workers_rate() -> None:
    # Steps of 32 samples a worker, 0.100 s for one worker and 0.125 s for four: a rate of 320/s, and of 4 · 256/s.
    results = [
        make_result({"num_workers": n}, 0, 180_000 / (32 * n) * step_s, config=WEAK)
        for n, step_s in ((1, 0.100), (4, 0.125))
    ]
    group = only(groups_in(QUESTION, results))
    assert dict(group.runs.values) == {1: (pytest.approx(320),), 4: (pytest.approx(1024),)}
    assert speedups(group) == {1: 1, 4: pytest.approx(4 * 256 / 320)}
    assert group.analyse().points[1].efficiency.value == pytest.approx(256 / 320)


@given(times=TIMES)
def test_weak_and_strong_scaling_have_the_same_speedups_of_the_same_rates(times: dict[int, float]) -> None:
    strong, weak = (only(groups_in(QUESTION, trials(times, config=config))) for config in ({}, WEAK))
    assert (strong.scaling, weak.scaling) == (Scaling.STRONG, Scaling.WEAK)
    assert strong.runs == weak.runs and strong.speedups == weak.speedups


@given(times=TIMES)
def test_speedups_are_those_of_the_studys_report_and_efficiencies_those_per_worker(times: dict[int, float]) -> None:
    question = Question("s", {"num_workers": max(times)}, ("num_workers",))
    analysis = analyse(question, trials(times))
    group = only(analysis.worker_groups)
    assert group.baseline == max(times)
    assert list(group.speedups) == sorted(times)
    for point in analysis.points:
        assert group.speedups[point.num_workers] == point.speedup
        scaled = [p for p in group.analyse(num_resamples=2).points if p.num_workers == point.num_workers]
        assert scaled[0].efficiency == point.efficiency


@given(fraction=st.floats(0.01, 0.5), spread=st.floats(0.001, 0.1))
def test_every_interval_holds_its_own_estimate(fraction: float, spread: float) -> None:
    group = only(groups_in(QUESTION, trials(by_law(AMDAHL, fraction), (1.0, 1 + spread, 1 - spread))))
    analysis = group.analyse(num_resamples=30)
    for estimate in (
        *group.karp_flatt.values(),
        *fit_of(analysis, AMDAHL).parameters,
        *fit_of(analysis, USL).parameters,
    ):
        assert holds(estimate, estimate.value)


def test_points_that_share_all_but_their_workers_are_a_group_whatever_else_is_swept() -> None:
    question = Question("s", {"num_workers": 1}, ("batch_size", "num_workers", "precision"))
    settings_of = [(b, p) for b in (64, 256) for p in ("bf16", "fp32")]
    results = [
        result
        for i, (b, p) in enumerate(settings_of)
        for result in trials(by_law(AMDAHL, 0.1 * i), (1.0,), {"batch_size": b, "precision": p})
    ]
    groups = groups_in(question, results[::-1])
    assert [tuple(g.point.values()) for g in groups] == settings_of
    assert [g.label for g in groups][:2] == ["batch_size=64 precision=bf16", "batch_size=64 precision=fp32"]
    for i, group in enumerate(groups):
        assert group.karp_flatt[8].value == pytest.approx(0.1 * i, abs=1e-9)


def test_a_worker_count_whose_trials_failed_is_left_out_and_named() -> None:
    listed = tuple({"num_workers": n} for n in (*COUNTS, 16, 32))
    results = [
        *trials(by_law(AMDAHL, 0.1)),
        make_result({"num_workers": 16}, 0, state=TrialState.FAILED),
        make_result({"num_workers": 16}, 1, state=TrialState.STOPPED),
    ]
    group = only(groups_in(Question("s", {"num_workers": 1}, ("num_workers",), points=listed), results))
    assert tuple(group.speedups) == COUNTS
    assert group.excluded == {16: "failed", 32: "not run yet"}


def test_a_failed_baseline_gives_way_to_the_fewest_workers_that_finished() -> None:
    results = [r for r in trials(by_law(AMDAHL, 0.1)) if r.spec.placement.num_workers > 1]
    results.append(make_result({"num_workers": 1}, 0, state=TrialState.FAILED))
    group = only(groups_in(QUESTION, results))
    assert (group.baseline, group.excluded) == (2, {1: "failed"})
    assert speedups(group)[2] == 1


def test_another_baseline_can_be_asked_for_and_has_to_have_finished() -> None:
    results = trials(by_law(AMDAHL, 0.1), others=OTHERS)
    group = only(groups_in(QUESTION, results, 4))
    assert group.baseline == 4
    assert speedups(group)[8] == pytest.approx(AMDAHL.speedup(8, 0.1) / AMDAHL.speedup(4, 0.1), rel=0.05)
    with pytest.raises(RayparError, match="no finished trial with 3 workers at batch_size=64 precision=fp32") as told:
        groups_in(QUESTION, results, 3)
    assert told.value.hint == "worker counts that have some: 1, 2, 4, 8"


def test_different_numbers_of_samples_are_compared_by_their_rates() -> None:
    results = [make_result({"num_workers": n}, 0, 10.0, num_samples=n * 1000) for n in (1, 2)]
    assert speedups(only(groups_in(QUESTION, results))) == {1: 1, 2: pytest.approx(2)}


@pytest.mark.parametrize("config", [{}, WEAK])
def test_train_loops_whose_samples_are_not_counted_are_compared_by_whole_trainings(config: dict[str, Any]) -> None:
    results = [make_result({"num_workers": n}, 0, None, wall_s=t, config=config) for n, t in ((1, 10.0), (2, 8.0))]
    group = only(groups_in(QUESTION, results))
    assert (group.unit, dict(group.runs.values)) == (TRAININGS_PER_S, {1: (0.1,), 2: (0.125,)})
    assert speedups(group) == {1: 1, 2: pytest.approx(1.25)}
    assert only(groups_in(QUESTION, trials({1: 4, 2: 3}))).unit == SAMPLES_PER_S


def test_a_study_of_one_worker_count_or_of_fixed_workers_has_no_group() -> None:
    assert groups_in(QUESTION, trials({2: 4.0})) == ()
    fixed = [make_result({"batch_size": b}, 0, 4.0) for b in (32, 64)]
    assert groups_in(Question("s", {}, ("batch_size",)), fixed) == ()
    assert groups_in(QUESTION, []) == ()
