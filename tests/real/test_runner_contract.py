"""Contract of every runner: each trial ends once and completely, and does not affect the next one."""

import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from harness import RunEvents, losses, run, settings_at, until
from loops import NUM_TRAIN, TORCHRUN_SCRIPT, acting, diverging_func, train_func

from raypar import Study, Workload, grid
from raypar.run.local import LocalRunner
from raypar.run.runner import Notice, TrialEnded, TrialReported, TrialRetried, TrialStarted
from raypar.run.tune import TuneRunner
from raypar.signals import is_running
from raypar.study.trial import FailureKind, TrialSpec, TrialState
from raypar.train.affinity import CAN_PIN, allowed_cores

MAX_RETRIES = 1
EPOCHS = 2
CHECKPOINTED = {"epochs": 4, "dropout": 0.3, "optimizer": "adam", "lr": 0.01, "num_workers": 2}
CHECKPOINTED["checkpoint_every_epochs"] = 1
# In this order: a trial that fails or leaves something behind must not affect the next one.
TRIALS = {
    "clean": {"dropout": 0.5},
    "raises": {"act": "raise", "num_workers": 2},
    "after it raised": {"num_workers": 2},
    "dies": {"act": "kill", "num_workers": 2},
    "after it died": {"num_workers": 2, "num_samples": 200},
    "heals": {"act": "heal", "num_workers": 2},
    "diverges": {"num_workers": 2, "lr": 1e30},
    "soils": {"act": "soil"},
    "after it soiled": {"dropout": 0.5},
    "strays": {"act": "stray", "loader": "dataloader", "num_loader_workers": 2},
    "strays and dies": {"act": "stray and kill"},
    "uninterrupted": CHECKPOINTED,
    "resumes after a fall": {**CHECKPOINTED, "act": "fall"},
}


RAY = pytest.param("ray", marks=pytest.mark.ray)
# For tests that take too long on Ray for `make test`.
outside_core = pytest.mark.parametrize("run_in", ["local", RAY], indirect=True, scope="module")


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.core])])
def run_in(request):
    """Run a study in a folder with the runner under test."""
    address = request.getfixturevalue("fork_address") if request.param == "ray" else ""

    def run_(study, specs, folder, more=None, **settings):
        made = settings_at(folder, **settings)
        if request.param == "ray":
            return run(
                TuneRunner(made, owns_cluster=True, fork_addresses={"": address} if address else {}), study, specs, more
            )
        with LocalRunner(made) as runner:
            return run(runner, study, specs, more)

    return run_


@dataclass
class Run:
    """One run of all `TRIALS`, by their names."""

    specs: dict[str, TrialSpec]
    events: RunEvents
    folder: Path

    def __getitem__(self, name):
        return self.events.result(self.specs[name])

    def log(self, name, attempt=1):
        """Return the JSON lines of rank 0; the first is the state of its process before training."""
        path = self.folder / "logs" / self.specs[name].identity / f"attempt{attempt}-rank0.log"
        return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def study_run(run_in, tmp_path_factory):
    folder = tmp_path_factory.mktemp("contract")
    study = Study(workload=acting, name="contract", max_retries=MAX_RETRIES, config={"epochs": EPOCHS})
    specs = {}
    for i, (name, point) in enumerate(TRIALS.items()):
        scratch = str(folder / f"scratch{i}")  # also distinguishes trials of the same point
        specs[name] = study.trial({**point, "scratch": scratch}, 0, order=i)
    return Run(specs, run_in(study, list(specs.values()), folder), folder)


def test_every_trial_starts_reports_and_ends_once_in_order(study_run):
    assert [result.spec for result in study_run.events.results] == list(study_run.specs.values())
    for name, spec in study_run.specs.items():
        kinds = [type(event) for event in study_run.events.about(spec)]
        if study_run[name].state is TrialState.FINISHED and study_run[name].attempts == 1:
            assert kinds == [TrialStarted, *[TrialReported] * len(study_run[name].reports), TrialEnded], name
        assert kinds[0] is TrialStarted and kinds[-1] is TrialEnded, name


@pytest.mark.parametrize("name", ["clean", "after it raised"])
def test_a_finished_trial_is_complete(study_run, name):
    result, spec = study_run[name], study_run.specs[name]
    num_workers = spec.placement.num_workers
    assert (result.state, result.attempts, result.failure) == (TrialState.FINISHED, 1, None)
    assert [report["epoch"] for report in result.reports] == [1, 2]
    assert all({"train_loss", "val_loss", "accuracy", "train_time_s", "eval_time_s"} <= set(r) for r in result.reports)
    assert [e.report for e in study_run.events.of(TrialReported) if e.spec == spec] == list(result.reports)
    steps_per_epoch = NUM_TRAIN // 64
    assert [len(steps) for steps in result.step_times_s] == [EPOCHS * steps_per_epoch] * num_workers
    times = (result.startup_s, result.warmup_s, result.train_time_s, result.eval_time_s)
    assert all(time_s is not None and time_s > 0 for time_s in times)
    assert result.wall_s is not None and result.wall_s > max(time_s or 0 for time_s in times)
    assert result.started_at > 0
    environment = result.conditions.to_stored()
    assert len(environment["node"]) == len(set(environment["pid"])) == num_workers
    assert environment["num_threads"] == [1] * num_workers
    # Too short to measure other load, but the machine was observed.
    assert environment["num_node_cores"] == [psutil.cpu_count()] * num_workers
    assert (result.energy_j is None) is ("energy_of" not in environment)
    assert result.energy_j is not None or environment["no_energy"]
    cores = [core for of_rank in environment["cores"] for core in of_rank]
    if CAN_PIN:
        assert len(cores) == len(set(cores)) == num_workers and set(cores) <= set(allowed_cores())


def test_a_trial_that_raises_fails_with_traceback_and_log_and_is_not_retried(study_run):
    result = study_run["raises"]
    failure = result.failure
    assert (result.state, result.attempts) == (TrialState.FAILED, 1)
    assert failure is not None and (failure.kind, failure.rank) == (FailureKind.ERROR, 1)
    assert failure.message == "ValueError: no such luck"
    assert "Traceback" in failure.traceback and "loops.py" in failure.traceback
    assert "no such luck" in Path(failure.log_path).read_text()
    assert study_run.specs["raises"] not in [event.spec for event in study_run.events.of(TrialRetried)]


def test_a_trial_that_diverges_stops_at_its_first_report_and_is_not_retried(study_run):
    result = study_run["diverges"]
    assert (result.state, result.attempts, result.failure) == (TrialState.DIVERGED, 1, None)
    assert [report["epoch"] for report in result.reports] == [1] and math.isnan(result.final["train_loss"])
    assert {len(steps) for steps in result.step_times_s} == {NUM_TRAIN // 64}


def test_a_point_that_keeps_raising_the_same_error_is_stopped_alone(run_in, tmp_path):
    space = {"act": grid("train", "raise"), "num_samples": grid(64)}
    study = Study(workload=acting, name="raising", space=space, num_repeats=4, max_retries=MAX_RETRIES)
    specs = study.trials()
    events = run_in(study, specs, tmp_path)
    results = sorted(events.results, key=lambda result: result.spec.order)  # skipped trials end at once
    assert [result.spec for result in results] == list(specs)
    good, bad = ([r for r in results if r.spec.point["act"] == act] for act in ("train", "raise"))
    assert [result.state for result in good] == [TrialState.FINISHED] * 4
    kinds = [FailureKind.ERROR] * 2 + [FailureKind.SKIPPED] * 2
    assert [result.failure and result.failure.kind for result in bad] == kinds
    assert [e.spec for e in events.of(TrialStarted)] == [r.spec for r in results if r not in bad[2:]]
    (notice,) = events.of(Notice)
    assert (
        notice.text
        == "act=raise num_samples=64 stopped: its first 2 attempts failed with the same error: ValueError: no such luck"
    )


def test_a_point_that_does_not_fit_runs_once_and_counting_memory_changes_no_loss(run_in, tmp_path):
    config = {"epochs": EPOCHS, "num_workers": 2}
    study = Study(workload=acting, name="memory", config=config, max_retries=MAX_RETRIES, num_repeats=2)
    # The third has no warm-up in which memory is counted.
    points = {"max_memory": "1MB"}, {"max_memory": "1MB", "num_ballast": 1_000_000}, {"num_warmup_steps": 0}
    specs = [study.trial(point, repeat, order=i) for repeat in (0, 1) for i, point in enumerate(points)]
    events = run_in(study, specs, tmp_path)
    fitting, too_large, uncounted = ([r for r in events.results if r.spec.point == point] for point in points)
    assert [r.state for r in fitting + uncounted] == [TrialState.FINISHED] * 4
    assert all(0 < peak < 1e6 for r in fitting for peak in r.conditions.of_ranks("peak_memory_bytes"))
    assert not any("peak_memory_bytes" in r.conditions.to_stored() for r in uncounted)
    assert [losses(r) for r in fitting] == [losses(r) for r in uncounted]
    assert [r.state for r in too_large] == [TrialState.DOES_NOT_FIT] * 2 and too_large[0].attempts == 1
    first, second = (r.failure for r in too_large)
    assert first is not None and re.fullmatch(
        r"needs [48]\S* MB of memory on a worker, more than max_memory=1\S* MB", first.summary
    )
    assert second is not None and second.summary == f"not run: its point does not fit: {first.summary}"
    assert too_large[1].spec not in [event.spec for event in events.of(TrialStarted)]


def test_a_trial_whose_rank_dies_fails_after_the_last_retry(study_run):
    result, spec = study_run["dies"], study_run.specs["dies"]
    failure = result.failure
    assert (result.state, result.attempts) == (TrialState.FAILED, 1 + MAX_RETRIES)
    assert failure is not None and (failure.kind, failure.rank) == (FailureKind.KILLED, 1)
    assert "SIGKILL" in failure.message and Path(failure.log_path).is_file()
    events = study_run.events.about(spec)
    assert [e.attempt for e in events if isinstance(e, TrialStarted)] == [1, 2]
    (retried,) = [e for e in events if isinstance(e, TrialRetried)]
    assert "SIGKILL" in retried.reason


def test_a_second_attempt_finishes_a_trial_and_later_trials_are_unaffected(study_run):
    result = study_run["heals"]
    assert (result.state, result.attempts, result.failure) == (TrialState.FINISHED, 2, None)
    assert [report["epoch"] for report in result.reports] == [1, 2]  # none from the first attempt
    assert study_run.log("heals", attempt=1)[0]["pid"] != study_run.log("heals", attempt=2)[0]["pid"]
    for name in ("after it raised", "after it died", "after it soiled"):
        assert (study_run[name].state, study_run[name].attempts) == (TrialState.FINISHED, 1)


def test_a_retry_resumes_from_the_last_checkpoint_with_equal_losses(study_run):
    one, other = study_run["uninterrupted"], study_run["resumes after a fall"]
    assert (one.attempts, other.attempts, other.state) == (1, 2, TrialState.FINISHED)
    assert (
        other.conditions.of_ranks("resumed_at_epoch") == [2, 2] and "resumed_at_epoch" not in one.conditions.to_stored()
    )
    assert losses(other) == losses(one) and len(other.reports) == 4
    # Each step that led to the result is timed once, including those of the first attempt.
    assert [len(steps) for steps in other.step_times_s] == [len(steps) for steps in one.step_times_s] == [16, 16]
    events = study_run.events.about(study_run.specs["resumes after a fall"])
    assert list(other.reports[:2]) == [e.report for e in events if isinstance(e, TrialReported)][:2]
    assert not list(study_run.folder.rglob("*.pt"))


def test_a_trial_after_one_that_left_dirt_is_bit_identical(study_run):
    assert study_run["soils"].state is TrialState.FINISHED
    assert losses(study_run["after it soiled"]) == losses(study_run["clean"])
    before, after = (study_run.log(name)[0] for name in ("clean", "after it soiled"))
    assert before.pop("pid") != after.pop("pid")
    assert before == after
    assert (after["dtype"], after["grad"], after["threads"], after["dirt"]) == ("torch.float32", True, 1, "")


def test_processes_started_by_a_trial_end_with_it(study_run):
    states = {name: study_run[name].state for name in ("strays", "strays and dies")}
    assert states == {"strays": TrialState.FINISHED, "strays and dies": TrialState.FAILED}
    ranks = [pid for result in study_run.events.results for pid in result.conditions.to_stored().get("pid", ())]
    check_strays_end(study_run, states, ranks)


def check_strays_end(run, names, ranks=()):
    strays = [line["stray"] for name in names for line in run.log(name) if "stray" in line]
    assert len(strays) == len(names) * (3 if sys.platform == "linux" else 1)
    until(lambda: not any(map(is_running, [*strays, *ranks])), "the end of a trial's processes")


def test_more_trials_are_requested_until_there_are_none(run_in, tmp_path):
    study = Study(workload=acting, name="blocks", config={"num_samples": 64})
    first, *blocks = ([study.trial({}, 10 * block + n) for n in range(2)] for block in range(3))
    num_asked = []

    def more():
        num_asked.append(len(blocks))
        return blocks.pop(0) if blocks else ()

    every = [*first, *(spec for block in blocks for spec in block)]
    events = run_in(study, first, tmp_path, more)
    assert num_asked == [2, 1, 0]
    assert [result.spec for result in events.results] == every
    assert {result.state for result in events.results} == {TrialState.FINISHED}


@outside_core
def test_a_fresh_interpreter_gives_bit_identical_losses_and_leaves_no_process(run_in, study_run, tmp_path):
    study = Study(workload=acting, name="contract", config={"epochs": EPOCHS})
    specs = [study_run.specs[name] for name in ("clean", "after it raised", "strays")]
    events = run_in(study, specs, tmp_path, isolation="fresh")
    assert losses(events.result(specs[0])) == losses(study_run["after it soiled"])
    assert losses(events.result(specs[1])) == losses(study_run["after it raised"])
    check_strays_end(Run(study_run.specs, events, tmp_path), ["strays"])


@outside_core
@pytest.mark.skipif(
    not CAN_PIN or not {0, 1} <= set(allowed_cores()), reason="needs cores 0 and 1, and to bind processes to them"
)
def test_workers_run_only_on_the_listed_cores(run_in, tmp_path):
    study = Study(workload=acting, name="pinned", max_retries=0)
    points = [
        {"cpu_affinity": (1,)},
        {"cpu_affinity": "0-1", "num_workers": 2},
        {"cpu_affinity": (1, 0), "num_workers": 2},
        {"cpu_affinity": "spread", "num_workers": 2},
        {"cpu_affinity": (1, 4000)},
    ]
    specs = [study.trial(point, 0, order=i) for i, point in enumerate(points)]
    events = run_in(study, specs, tmp_path)
    cores = [events.result(spec).conditions.of_ranks("cores") for spec in specs]
    assert cores[:3] == [[(1,)], [(0,), (1,)], [(1,), (0,)]]
    assert len(set(cores[3])) == 2
    failure = events.result(specs[4]).failure
    assert failure is not None and failure.kind is FailureKind.REFUSED
    assert failure.message.startswith("there is no core 4000: the machine's are 0-")


@outside_core
def test_a_hanging_trial_is_ended_and_the_next_one_finishes(run_in, tmp_path):
    study = Study(workload=acting, name="hanging", max_retries=0)
    points = [{"act": "hang", "num_workers": 2}, {"num_workers": 2}]
    hangs, next_one = (study.trial(point, 0, order=i) for i, point in enumerate(points))
    events = run_in(study, [hangs, next_one], tmp_path, trial_timeout_s=10.0)
    result = events.result(hangs)
    assert (result.state, result.attempts) == (TrialState.FAILED, 1)
    assert result.failure is not None and result.failure.kind is FailureKind.HUNG
    assert result.failure.message == "took longer than 10 s"
    assert Path(result.failure.log_path).is_file()
    assert events.result(next_one).state is TrialState.FINISHED


def test_an_unchanged_train_loop_runs_with_one_and_two_workers(run_in, tmp_path):
    config = {"lr": 0.1, "num_epochs": 3, "batch": 32}
    study = Study(workload=Workload.from_train_loop(train_func), name="loop", config=config, max_retries=0)
    one, two = (study.trial({"num_workers": n}, 0, order=n) for n in (1, 2))
    events = run_in(study, [one, two], tmp_path)
    for spec, num_seen in ((one, NUM_TRAIN), (two, NUM_TRAIN // 2)):
        result = events.result(spec)
        assert (result.state, result.failure) == (TrialState.FINISHED, None)
        assert [report["epoch"] for report in result.reports] == [1, 2, 3]
        assert {report["num_seen"] for report in result.reports} == {num_seen}
        assert {report["world_size"] for report in result.reports} == {spec.placement.num_workers}
        assert {report["rank"] for report in result.reports} == {0}  # rank 0 reports for all
        assert result.final["loss"] < result.reports[0]["loss"]
        assert "note" not in result.final
        ranks = result.observation.ranks
        assert [rank.num_steps for rank in ranks] == [3 * math.ceil(num_seen / 32)] * spec.placement.num_workers
        assert 0 < result.train_time_s < result.wall_s and len(result.step_times_s) == len(ranks)
        assert 0 < result.reports[0]["since_launch_s"] < result.final["since_launch_s"] < result.wall_s
        assert result.startup_s is not None


def test_a_torchrun_script_has_equal_losses_on_one_and_two_workers_and_timed_steps(run_in, tmp_path):
    (tmp_path / "train.py").write_text(TORCHRUN_SCRIPT)
    text = "torchrun --standalone --nproc-per-node={num_workers} train.py --lr {lr} --note {note}"
    workload = Workload.from_command(text, metrics={"loss": r"loss: ([0-9.]+)"})
    study = Study(workload=workload, name="torchrun", config={"lr": 0.1, "note": "it's; $HOME"}, num_repeats=1)
    specs = [study.trial({"num_workers": n}, 0, order=n) for n in (1, 2)]
    results = run_in(study, specs, tmp_path, sys_path=(str(tmp_path),)).results
    assert [(result.state, result.failure) for result in results] == [(TrialState.FINISHED, None)] * 2
    losses = {tuple(report["loss"] for report in result.reports) for result in results}
    assert len(losses) == 1 and len(results[0].reports) == 2  # equal to the printed digits
    for result in results:
        # 10 steps minus the first, of the first process only.
        assert [len(times) for times in result.step_times_s] == [9]
        assert 0 < result.train_time_s < result.wall_s
        log = (tmp_path / "logs" / result.spec.identity / "attempt1-rank0.log").read_text()
        assert f"it's; $HOME on {result.spec.config['num_workers']} cores" in log


@outside_core
def test_a_diverging_train_loop_stops_at_the_same_report_on_all_ranks(run_in, tmp_path):
    study = Study(workload=Workload.from_train_loop(diverging_func), name="diverging")
    spec = study.trial({"num_workers": 2}, 0)
    (result,) = run_in(study, [spec], tmp_path).results
    assert (result.state, result.failure, len(result.reports)) == (TrialState.DIVERGED, None, 2)
