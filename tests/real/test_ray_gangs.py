"""Gangs on a real Ray: kept warm over blocks, replaced where they die, stopped by schedulers, evicted by others."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import NUM_CORES
from loops import acting, lr_func
from telling import HERE, PRELOAD, Meanwhile, RunEvents, losses, run, settings_at, until

from raypar import Study, Workload, choice, grid, loguniform, randint, uniform
from raypar.run.ranks import ForkServer, is_running
from raypar.run.runner import GangReady, GangStarting, TrialReported, TrialRetried, TrialStarted
from raypar.run.tune import TuneRunner
from raypar.study.trial import FailureKind, TrialResult, TrialSpec, TrialState

pytestmark = pytest.mark.ray

RunIn = Callable[..., RunEvents]


@pytest.fixture
def on_ray(fork_address: str, tmp_path: Path) -> RunIn:
    def run_(study: Study, specs: tuple[TrialSpec, ...] = (), max_parked_gangs: int = 4) -> RunEvents:
        runner = TuneRunner(
            settings_at(tmp_path), owns_cluster=True, fork_address=fork_address, max_parked_gangs=max_parked_gangs
        )
        return run(runner, study, specs)

    return run_


def gang_of(result: TrialResult) -> tuple[str, int]:
    """Which gang, and the how many-th trial in it."""
    return result.environment["gang"], result.environment["nth_in_gang"]


def train_workers() -> list[psutil.Process]:
    """The workers of this process's Ray's gangs."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "TrainWorker" in process.cmdline()[0]:
                found.append(process)
        except (psutil.Error, IndexError):
            continue
    return found


def test_gangs_serve_trial_after_trial_over_blocks_each_rank_on_a_core_of_its_own(on_ray: RunIn) -> None:
    space = {"num_workers": grid(1, 2), "lr": grid(0.1, 0.2)}
    study = Study(workload=acting, name="warm", space=space, num_repeats=2)
    specs = study.trials()
    told = on_ray(study, specs)
    assert [result.spec for result in told.results] == list(specs)
    assert {result.state for result in told.results} == {TrialState.FINISHED}
    starting, ready = told.of(GangStarting), told.of(GangReady)
    assert len(starting) == len(ready) == 2
    assert {gang.placement for gang in starting} == {spec.placement for spec in specs}
    for num_workers in (1, 2):
        own = [r for r in told.results if r.spec.placement.num_workers == num_workers]
        (gang,) = {gang_of(result)[0] for result in own}
        assert [gang_of(result) for result in own] == [(gang, n) for n in (1, 2, 3, 4)]
        assert {result.spec.repeat for result in own} == {0, 1}
    for result in told.results:
        cores = [core for of_rank in result.environment["cores"] for core in of_rank]
        assert len(cores) == len(set(cores)) == result.spec.placement.num_workers


@pytest.mark.parametrize("victim", ["worker", "rank"])
def test_what_is_killed_in_mid_trial_is_replaced_and_the_trial_is_done_again(
    on_ray: RunIn, tmp_path: Path, victim: str
) -> None:
    study = Study(workload=acting, name=f"killed-{victim}", max_retries=1)
    scratch = tmp_path / "waits"
    points: list[dict[str, Any]] = [{}, {"act": "wait", "scratch": str(scratch)}, {"lr": 0.2}]
    before, waits, after = (study.trial({"num_workers": 2, **p}, 0, order=i) for i, p in enumerate(points))
    killed: list[int] = []

    def kill() -> None:
        until(scratch.exists, "the trial to be under way")
        rank = int(scratch.read_text())
        workers = train_workers()
        assert len(workers) == 2
        killed.append(workers[-1].pid if victim == "worker" else rank)
        os.kill(killed[0], signal.SIGKILL)
        until(lambda: not is_running(rank), "the end of the rank")

    with Meanwhile(kill):
        told = on_ray(study, (before, waits, after))
    (retried,) = told.of(TrialRetried)
    assert retried.spec == waits
    result = told.result(waits)
    assert (result.state, result.attempts) == (TrialState.FINISHED, 2)
    assert [e.attempt for e in told.of(TrialStarted) if e.spec == waits] == [1, 2]
    assert {told.result(spec).state for spec in (before, after)} == {TrialState.FINISHED}
    gangs = [gang_of(told.result(spec)) for spec in (before, waits, after)]
    if victim == "worker":
        (first, _), (second, _), _ = gangs
        assert first != second and gangs == [(first, 1), (second, 1), (second, 2)]
        assert "gang was lost" in retried.reason
    else:  # its gang outlives it
        (first, _), *_ = gangs
        assert gangs == [(first, 1), (first, 3), (first, 4)]
        assert "SIGKILL" in retried.reason


@pytest.mark.core
def test_a_retry_goes_on_from_the_last_checkpoint_and_comes_to_the_same(on_ray: RunIn, tmp_path: Path) -> None:
    config = {"epochs": 4, "dropout": 0.3, "optimizer": "adam", "lr": 0.01, "num_workers": 2}
    study = Study(workload=acting, name="falls", max_retries=1, config={**config, "checkpoint_every_epochs": 1})
    points = ({}, {"act": "fall", "scratch": str(tmp_path / "fell")})
    whole, falls = (study.trial(point, 0, order=i) for i, point in enumerate(points))
    told = on_ray(study, (whole, falls))
    one, other = told.result(whole), told.result(falls)
    assert (one.attempts, other.attempts, other.state) == (1, 2, TrialState.FINISHED)
    assert other.environment["resumed_at_epoch"] == [2, 2] and "resumed_at_epoch" not in one.environment
    assert losses(other) == losses(one) and len(other.reports) == 4
    # Each step that led to the result is timed once, those of the first attempt included.
    assert [len(steps) for steps in other.step_times_s] == [len(steps) for steps in one.step_times_s] == [16, 16]
    first = [e.report for e in told.about(falls) if isinstance(e, TrialReported)][:2]
    assert list(other.reports[:2]) == first
    assert not list(tmp_path.rglob("*.pt"))


def test_a_fork_server_that_dies_is_replaced_and_its_trial_done_again(fork_address: str, tmp_path: Path) -> None:
    study = Study(workload=acting, name="no-server", max_retries=1)
    scratch = tmp_path / "waits"
    points: list[dict[str, Any]] = [{"act": "wait", "scratch": str(scratch)}, {"lr": 0.2}]
    waits, after = (study.trial({"num_workers": 2, **p}, 0, order=i) for i, p in enumerate(points))

    with contextlib.closing(ForkServer(PRELOAD, (str(HERE),))) as server:

        def kill() -> None:
            until(scratch.exists, "the trial to be under way")
            os.kill(server.pid, signal.SIGKILL)

        with Meanwhile(kill):
            runner = TuneRunner(settings_at(tmp_path), owns_cluster=True, fork_address=server.address)
            told = run(runner, study, (waits, after))
    assert len(told.of(TrialRetried)) == 1
    assert [(result.state, result.attempts) for result in told.results] == [
        (TrialState.FINISHED, 2),
        (TrialState.FINISHED, 1),
    ]
    (first, _), (second, _) = map(gang_of, told.results)
    assert first == second != "1"


def test_a_scheduler_stops_trials_early_and_their_gang_goes_on(on_ray: RunIn) -> None:
    from ray.tune.schedulers import ASHAScheduler

    study = Study(
        workload=Workload.from_train_loop(lr_func),
        name="asha",
        space={"lr": choice(*(n / 100 for n in range(1, 100)))},
        num_trials=12,
        scheduler=ASHAScheduler(time_attr="of_epoch", grace_period=1, reduction_factor=2, max_t=100),
        seed=1,
    )
    told = on_ray(study)
    results = told.results
    assert len(results) == len({result.spec.identity for result in results}) == 12
    assert {result.failure for result in results} == {None}
    num_reports = Counter((result.state, len(result.reports)) for result in results)
    assert {state for state, _ in num_reports} == {TrialState.STOPPED, TrialState.FINISHED}
    assert all(count < 4 for state, count in num_reports if state is TrialState.STOPPED)
    assert all(count == 4 for state, count in num_reports if state is TrialState.FINISHED)
    assert len(told.of(GangStarting)) == 1
    assert [gang_of(result)[1] for result in results] == list(range(1, 13))
    best = max(results, key=lambda result: float(result.spec.config["lr"]))  # type: ignore[arg-type]
    assert best.state is TrialState.FINISHED
    assert [report["of_epoch"] for report in best.reports] == [1, 2, 3, 4]


def test_a_search_draws_the_same_for_the_same_seed_and_goes_on_where_it_was(on_ray: RunIn) -> None:
    space = {"lr": uniform(0.1, 1), "weight_decay": loguniform(1e-6, 1e-3), "num_samples": randint(64, 200)}
    drawn_twice = {"batch_size": choice(16, 32), "num_workers": choice(1, NUM_CORES + 1)}

    def search(space: dict[str, Any], num_trials: int, seed: int = 4) -> Study:
        return Study(
            workload=acting, name="search", space=space, num_trials=num_trials, seed=seed, max_concurrent_trials=2
        )

    def points_of(told: RunEvents) -> set[tuple[Any, ...]]:  # two at a time start in any order
        return {tuple(result.spec.point.values()) for result in told.results}

    told = on_ray(search(space, 3))
    points = points_of(told)
    assert {result.state for result in told.results} == {TrialState.FINISHED}
    assert [[type(value) for value in point] for point in points] == [[float, float, int]] * 3
    same = points_of(on_ray(search(space, 2)))
    assert len(same) == 2 and same < points
    more = points_of(on_ray(search(space, 4), tuple(result.spec for result in told.results[:2])))
    assert len(more) == 2 and not more & points

    told = on_ray(search(drawn_twice, 8))
    results = told.results
    assert len({result.spec.identity for result in results}) == 8  # what is drawn again is a repeat
    by_point: dict[tuple[Any, ...], list[TrialResult]] = {}
    for result in results:
        by_point.setdefault(tuple(result.spec.point.values()), []).append(result)
    assert len(by_point) <= 4
    for (_, num_workers), same in by_point.items():
        assert sorted(result.spec.repeat for result in same) == list(range(len(same)))
        for result in same:
            if num_workers == 1:
                assert result.state is TrialState.FINISHED
            else:
                assert result.failure is not None and result.failure.kind is FailureKind.REFUSED
                assert f"needs {NUM_CORES + 1} CPUs in one gang, the cluster has {NUM_CORES}" in result.failure.message
    assert {num_workers for _, num_workers in by_point} == {1, NUM_CORES + 1}


def test_optuna_searches_in_one_warm_gang(on_ray: RunIn) -> None:
    pytest.importorskip("optuna")
    from ray.tune.search.optuna import OptunaSearch

    study = Study(
        workload=acting, name="optuna", space={"lr": loguniform(1e-3, 1)}, num_trials=4, searcher=OptunaSearch(seed=1)
    )
    told = on_ray(study)
    assert [result.state for result in told.results] == [TrialState.FINISHED] * 4
    assert len({result.spec.identity for result in told.results}) == 4
    assert len(told.of(GangStarting)) == 1


def test_a_parked_gang_makes_way_where_no_more_may_be_parked(on_ray: RunIn) -> None:
    study = Study(workload=acting, name="parking", max_retries=0)
    shapes = [{"num_workers": 1}, {"num_workers": 2}, {"num_workers": 1, "num_threads": 2}]
    specs = tuple(study.trial({**shape, "lr": 0.1}, i, order=i) for i, shape in enumerate(shapes))
    told = on_ray(study, specs, max_parked_gangs=1)
    assert {result.state for result in told.results} == {TrialState.FINISHED}
    assert [gang.placement.num_workers for gang in told.of(GangStarting)] == [1, 2, 1]
    assert [gang_of(result)[1] for result in told.results] == [1, 1, 1]
