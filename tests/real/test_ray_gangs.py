"""Gangs on a real Ray: kept warm over blocks, replaced after a loss, used by searches."""

import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from harness import HERE, PRELOAD, RunEvents, command_line, run, settings_at, until
from loops import acting, lr_func

from raypar import Study, Workload, choice, grid, loguniform, randint, uniform
from raypar.files import PIECE_BYTES
from raypar.run import tune
from raypar.run.locks import Holder, leased_cores
from raypar.run.ranks import ForkServer
from raypar.run.runner import GangReady, GangStarting, Notice, TrialEnded, TrialRetried, TrialStarted
from raypar.run.tune import TuneRunner
from raypar.signals import is_running
from raypar.study.blocks import block
from raypar.study.trial import FailureKind, TrialState
from raypar.train.affinity import allowed_cores, host_cores
from raypar.train.job import ARTIFACT_FOLDER, MODEL_FOLDER
from raypar.train.saved_model import WEIGHTS_FILE

pytestmark = pytest.mark.ray

NUM_CORES = len(allowed_cores())


@pytest.fixture
def on_ray(fork_address, tmp_path):
    def run_(study, specs=(), more=None, **how):
        how = {"owns_cluster": True, "fork_addresses": {"": fork_address}, **how}
        return run(TuneRunner(settings_at(tmp_path), **how), study, specs, more)

    return run_


def gang_of(result):
    """Return the gang, and the trial's number in it."""
    return result.conditions.gang, result.conditions.nth_in_gang


def processes_of_ray(*names):
    """Return the processes of this process's Ray with one of the names."""
    below = psutil.Process().children(recursive=True)
    return [process for process in below if any(name in command_line(process) for name in names)]


def test_warm_gangs_run_all_blocks_with_one_core_per_rank(on_ray):
    space = {"num_workers": grid(1, 2), "lr": grid(0.1, 0.2)}
    study = Study(workload=acting, name="warm", space=space, num_repeats=2)
    specs = study.trials()
    events = on_ray(study, specs)
    assert [result.spec for result in events.results] == list(specs)
    starting = events.of(GangStarting)
    assert len(starting) == len(events.of(GangReady)) == 2
    assert {gang.placement for gang in starting} == {spec.placement for spec in specs}
    for num_workers in (1, 2):
        results = [r for r in events.results if r.spec.placement.num_workers == num_workers]
        (gang,) = {gang_of(result)[0] for result in results}
        assert [gang_of(result) for result in results] == [(gang, n) for n in (1, 2, 3, 4)]
        assert {result.spec.repeat for result in results} == {0, 1}
    for result in events.results:
        assert result.state is TrialState.FINISHED
        cores = [core for of_rank in result.conditions.of_ranks("cores") for core in of_rank]
        assert len(cores) == len(set(cores)) == result.spec.placement.num_workers


def test_gangs_stay_warm_over_blocks_added_during_the_study(on_ray):
    study = Study(workload=acting, name="decided", space={"num_workers": grid(1, 2)}, num_repeats=1)
    later = [block(study, repeat, study.points()[repeat % 2 :]) for repeat in range(1, 4)]
    num_ended = []
    given = [study.trials(), *later]

    def more():
        num_ended.append(sum(map(len, given[: len(num_ended) + 1])))
        return given[len(num_ended)] if len(num_ended) < len(given) else ()

    events = on_ray(study, given[0], more=more)
    assert [result.spec for result in events.results] == [spec for block in given for spec in block]
    assert num_ended == [2, 3, 5, 6]
    assert len(events.of(GangStarting)) == 2
    for num_workers, num_trials in ((1, 2), (2, 4)):
        gangs = [gang_of(r) for r in events.results if r.spec.placement.num_workers == num_workers]
        assert [nth for _, nth in gangs] == list(range(1, num_trials + 1)) and len({gang for gang, _ in gangs}) == 1


@pytest.mark.parametrize("victim", ["worker", "rank", "fork server"])
def test_a_process_killed_during_a_trial_is_replaced_and_the_trial_runs_again(on_ray, tmp_path, victim):
    study = Study(workload=acting, name="killed", max_retries=1)
    scratch = tmp_path / "waits"
    points = [{}, {"act": "wait", "scratch": str(scratch)}, {"lr": 0.2}]
    before, waits, after = (study.trial({"num_workers": 2, **p}, 0, order=i) for i, p in enumerate(points))
    others = processes_of_ray("TrainWorker")  # of earlier runs, still ending

    with contextlib.closing(ForkServer(PRELOAD, (str(HERE),))) as server, ThreadPoolExecutor() as pool:

        def kill():
            until(scratch.exists, "the trial to be under way")
            rank = int(scratch.read_text())
            workers = [worker for worker in processes_of_ray("TrainWorker") if worker not in others]
            assert len(workers) == 2
            os.kill({"worker": workers[-1].pid, "rank": rank, "fork server": server.pid}[victim], signal.SIGKILL)
            until(lambda: not is_running(rank), "the end of the rank")

        killed = pool.submit(kill)
        events = on_ray(study, (before, waits, after), fork_addresses={"": server.address})
        killed.result()
    (retried,) = events.of(TrialRetried)
    assert retried.spec == waits
    assert [e.attempt for e in events.of(TrialStarted) if e.spec == waits] == [1, 2]
    results = [events.result(spec) for spec in (before, waits, after)]
    assert [(r.state, r.attempts) for r in results] == [(TrialState.FINISHED, n) for n in (1, 2, 1)]
    gangs = [gang_of(result) for result in results]
    (first, _), (second, _), _ = gangs
    if victim == "rank":  # its gang outlives it
        assert gangs == [(first, 1), (first, 3), (first, 4)] and "SIGKILL" in retried.reason
    else:
        assert first != second and gangs == [(first, 1), (second, 1), (second, 2)]
        assert victim == "fork server" or "gang was lost" in retried.reason


def test_a_trial_on_a_cluster_waits_for_a_machine_used_by_another_study(tmp_path):
    study, machine, events = Study(workload=acting, name="shared"), host_cores(), RunEvents()
    with contextlib.ExitStack() as other:
        other.enter_context(leased_cores(Holder.here("other", ()), machine[:1], print))

        def listen(event):
            events.events.append(event)
            if isinstance(event, Notice):
                other.close()

        TuneRunner(settings_at(tmp_path), owns_cluster=False).run(study, (study.trial({}, 0),), listen)
    (waits,) = events.of(Notice)
    assert waits.text.startswith(f"a trial waits for cores: study `other` (process {os.getpid()}) on ")
    (result,) = events.results
    assert (result.state, result.attempts) == (TrialState.FINISHED, 1)


def test_a_search_with_early_stopping_uses_one_warm_gang(on_ray):
    pytest.importorskip("optuna")
    from ray.tune.schedulers import ASHAScheduler
    from ray.tune.search.optuna import OptunaSearch

    study = Study(
        workload=Workload.from_train_loop(lr_func),
        name="asha",
        space={"lr": choice(*(n / 100 for n in range(1, 100)))},
        num_trials=12,
        scheduler=ASHAScheduler(time_attr="of_epoch", grace_period=1, reduction_factor=2, max_t=100),
        searcher=OptunaSearch(seed=1),
    )
    events = on_ray(study)
    results = events.results
    assert len(results) == len({result.spec.identity for result in results}) == 12
    assert {result.failure for result in results} == {None}
    assert {result.state for result in results} == {TrialState.STOPPED, TrialState.FINISHED}
    assert all((len(result.reports) == 4) == (result.state is TrialState.FINISHED) for result in results)
    assert len(events.of(GangStarting)) == 1
    assert [gang_of(result)[1] for result in results] == list(range(1, 13))
    best = max(results, key=lambda result: float(result.spec.config["lr"]))
    assert [report["of_epoch"] for report in best.reports] == [1, 2, 3, 4]


def test_a_searcher_and_a_scheduler_with_metric_and_mode_run(on_ray):
    pytest.importorskip("optuna")
    from ray.tune.schedulers import ASHAScheduler
    from ray.tune.search import ConcurrencyLimiter
    from ray.tune.search.optuna import OptunaSearch

    judged_by = {"metric": "accuracy", "mode": "max"}
    study = Study(
        workload=Workload.from_train_loop(lr_func),
        name="named",
        space={"lr": choice(*(n / 100 for n in range(1, 100)))},
        num_trials=4,
        searcher=ConcurrencyLimiter(OptunaSearch(seed=1, **judged_by), max_concurrent=4),
        scheduler=ASHAScheduler(max_t=4, **judged_by),
    )
    results = on_ray(study).results
    assert len(results) == 4 and {result.failure for result in results} == {None}


def test_a_search_is_reproducible_by_seed_and_resumes(on_ray):
    space = {"lr": uniform(0.1, 1), "weight_decay": loguniform(1e-6, 1e-3), "num_samples": randint(64, 200)}
    too_wide = NUM_CORES + 1  # refused without starting a gang

    def search(num_trials, done=(), **fields):
        fields = {"space": space, "config": {"num_workers": too_wide}, **fields}
        study = Study(workload=acting, name="search", num_trials=num_trials, seed=4, max_concurrent_trials=2, **fields)
        return on_ray(study, done).results

    def points_of(results):  # concurrent trials start in any order
        return {tuple(result.spec.point.values()) for result in results}

    results = search(3)
    points = points_of(results)
    assert [[type(value) for value in point] for point in points] == [[float, float, int]] * 3
    same = points_of(search(2))
    assert len(same) == 2 and same < points
    more = points_of(search(4, tuple(result.spec for result in results[:2])))
    assert len(more) == 2 and not more & points

    results = search(8, space={"batch_size": choice(16, 32), "num_workers": choice(1, too_wide)}, config={})
    assert len({result.spec.identity for result in results}) == 8  # a point that is drawn again is a repeat
    for point in points_of(results):
        repeats = [result for result in results if tuple(result.spec.point.values()) == point]
        assert sorted(result.spec.repeat for result in repeats) == list(range(len(repeats)))
    assert {result.spec.placement.num_workers for result in results} == {1, too_wide}
    for result in results:
        if result.spec.placement.num_workers == 1:
            assert result.state is TrialState.FINISHED
        else:
            assert result.failure is not None and result.failure.kind is FailureKind.REFUSED
            assert f"needs {too_wide} CPUs in one gang, the cluster has {NUM_CORES}" in result.failure.message


NUM_BALLAST = 50_000_000  # floats of a model, 200 MB
MAX_GROWTH_BYTES = 100e6


def memory_of(process, peak=False):
    """Return a process's bytes of memory, current or peak, without Ray's object store."""
    fields = dict(line.split(":\t") for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    total, shared = (int(fields[key].split()[0]) * 2**10 for key in ("VmHWM" if peak else "VmRSS", "RssShmem"))
    return total - shared


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no peak of memory that can be reset")
def test_a_model_kept_on_another_machine_is_sent_to_the_driver_in_pieces(fork_address, tmp_path, monkeypatch):
    config = {"keep_model": True, "epochs": 1, "num_ballast": NUM_BALLAST}
    study, sizes, before, growth = Study(workload=acting, name="sent", config=config), [], {}, {}
    append, names = tune.append_piece, ("::Broker", "TrainWorker")
    others = processes_of_ray(*names)  # of earlier runs, still ending
    monkeypatch.setattr(tune, "append_piece", lambda at, piece: (sizes.append(len(piece.content)), append(at, piece)))

    def listen(event):
        if isinstance(event, TrialStarted):
            carriers = [process for process in processes_of_ray(*names) if process not in others]
            assert len(carriers) == 2
            for process in (psutil.Process(), *carriers):
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")
                before[process] = memory_of(process)
        elif isinstance(event, TrialEnded):
            assert event.result.failure is None
            growth.update({p.name(): memory_of(p, peak=True) - bytes_ for p, bytes_ in before.items()})

    # The driver creates its folder with the first piece, so the rank's node does not see it before.
    settings = settings_at(tmp_path, driver_dir=tmp_path / "driver")
    spec = study.trial({}, 0)
    TuneRunner(settings, owns_cluster=True, fork_addresses={"": fork_address}).run(study, (spec,), listen)
    weights = tmp_path / "driver" / spec.identity / ARTIFACT_FOLDER / MODEL_FOLDER / WEIGHTS_FILE
    assert torch.equal(torch.load(weights)["ballast"], torch.arange(NUM_BALLAST, dtype=torch.float32))
    assert sum(sizes) == weights.stat().st_size and max(sizes) <= PIECE_BYTES
    assert len(growth) == 3 and max(growth.values()) < MAX_GROWTH_BYTES, growth
    assert not (tmp_path / "logs" / spec.identity / ARTIFACT_FOLDER).exists()


def test_a_node_that_shares_the_drivers_folder_keeps_its_model_there(fork_address, tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "append_piece", None)
    (tmp_path / "driver").mkdir()
    study = Study(workload=acting, name="shared", config={"keep_model": True})
    settings = settings_at(tmp_path, driver_dir=tmp_path / "driver")
    events = run(
        TuneRunner(settings, owns_cluster=True, fork_addresses={"": fork_address}), study, [study.trial({}, 0)]
    )
    (result,) = events.results
    assert result.failure is None and not events.of(Notice)
    weights = tmp_path / "driver" / result.spec.identity / ARTIFACT_FOLDER / MODEL_FOLDER / WEIGHTS_FILE
    assert torch.load(weights).keys()
    assert not (tmp_path / "logs" / result.spec.identity / ARTIFACT_FOLDER).exists()
