"""Faults lose no finished trial, failures are classified, and missing trials run later."""

import contextlib
import itertools
import re
from pathlib import Path

import pytest
from faultlab import Faulty, find, kill, kill_rank, next_held
from harness import TIMEOUT_S, finished, ray_head, results_of, run, runs_of, settings_at
from loops import acting, uneven

from raypar import Study
from raypar.run import ranks, standstill
from raypar.run.local import LocalRunner
from raypar.study.trial import FailureKind


def act(name):
    return lambda study, driver, lr, rank: study.go(lr, name)


def rank_killed(study, driver, lr, rank):
    kill_rank(rank)
    study.go(lr)


def killed(victim):
    def inject(study, driver, lr, rank):
        kill(driver, victim)
        study.go(lr)

    return inject


# Faults of successive trials, with the kind of the failure and the number of attempts.
IN_A_TRIAL = [
    (rank_killed, None, 2),
    (act("raise"), FailureKind.ERROR, 1),
    (act("ask for too much"), FailureKind.OUT_OF_MEMORY, 1),
    (killed("fork server"), None, 2),
]
IN_RAY = [*IN_A_TRIAL[:2], (killed("Tune trainable"), None, 1)]
# Each costs a gang start.
WITH_THE_GANG = [
    (killed("gang worker"), None, 2),
    (killed("fork server"), None, 2),
    (killed("broker"), None, 1),  # a new broker counts from 1
]


def go_through(study, process, faults):
    """Inject the faults; return the expected outcomes in the store by learning rate."""
    expected = {}
    for inject, kind, attempts in faults:
        lr, rank = next_held(study, process)
        inject(study, process.pid, lr, rank)
        expected[lr] = (kind, attempts)
    return expected


def outcomes(results):
    return {lr: (result.failure and result.failure.kind, result.attempts) for lr, result in results.items()}


def test_failures_are_classified_and_affect_no_other_trial(cli, tmp_path):
    study = Faulty(tmp_path, len(IN_A_TRIAL) + 1)
    with study.running(cli.start("study", "faulty.py", "--no-ray")) as process:
        expected = go_through(study, process, IN_A_TRIAL)
        last, _ = next_held(study, process)
        study.go(last)
        assert process.wait(TIMEOUT_S) == 1
    assert (cli.folder / "stderr").read_text() == ""
    assert outcomes(results_of(tmp_path)) == {**expected, last: (None, 1)}
    output = cli.output()
    assert "ValueError: no such luck" in output and "MemoryError" in output
    assert any("no such luck" in Path(log).read_text() for log in re.findall(r"log: (\S+)", output))
    failures = {run.data.tags.get("raypar.failure", "") for run in runs_of(tmp_path, "faulty", "trial")}
    assert any("no such luck" in failure for failure in failures)
    cli.wait_for_its_processes()


def test_a_rank_killed_for_lack_of_memory_is_not_retried(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "num_memory_kills", itertools.count().__next__)
    study = Study(workload=acting, name="greedy", max_retries=1)
    with LocalRunner(settings_at(tmp_path)) as runner:
        (result,) = run(runner, study, [study.trial({"act": "kill"}, 0)]).results
    assert result.failure is not None and (result.failure.kind, result.attempts) == (FailureKind.OUT_OF_MEMORY, 1)
    assert "was killed by the kernel: the machine or its control group is out of memory" in result.failure.message


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("longer", r"rank 0 in barrier \(.*\) and rank 1 in backward \(.*\) wait for each other"),
        ("shorter", r"rank 0 in backward \(.*\) and rank 1 in barrier \(.*\) wait for each other"),
        ("evaluates", ""),
    ],
)
def test_ranks_with_uneven_numbers_of_batches_are_reported_and_slow_ones_are_not(tmp_path, monkeypatch, case, text):
    monkeypatch.setattr(standstill, "STANDS_S", 0.5)
    monkeypatch.setattr(standstill, "DIFFER_S", 1.0)
    study = Study(workload=uneven, space={}, config={"num_workers": 2}, max_retries=1)
    with LocalRunner(settings_at(tmp_path)) as runner:
        (result,) = run(runner, study, [study.trial({"case": case}, 0)]).results
    if text:
        assert (result.failure.kind, result.attempts) == (FailureKind.ERROR, 1)
        assert re.match(f"uneven numbers of batches per rank: {text}; ", result.failure.message)
    else:
        assert result.failure is None


@pytest.mark.ray
@pytest.mark.faults
@pytest.mark.timeout(900)
def test_a_study_on_ray_survives_kills_and_resumes_after_the_loss_of_the_head(cli, tmp_path):
    study = Faulty(tmp_path, len(IN_RAY) + 2)
    with study.running(cli.start("study", "faulty.py")) as process:
        expected = go_through(study, process, IN_RAY)
        running, _ = next_held(study, process)
        kill(process.pid, "Ray's head")
        assert process.wait(TIMEOUT_S) == 1
    output, errors = (cli.folder / "stdout").read_text(), (cli.folder / "stderr").read_text()
    assert re.match(r"error: Ray was lost: its head, gcs_server, ended \(process \d+\)\n  → ", errors), errors
    assert f"Partial: broke off when {len(IN_RAY)} of {len(IN_RAY) + 2} trials were done." in output
    assert "broke off; run `raypar store resume faulty` to continue" in output and "Traceback" not in output + errors
    assert outcomes(results_of(tmp_path)) == expected
    cli.wait_for_its_processes()

    study.hold_no_more()
    before = len(study.starts())
    cli.done("store", "resume", "faulty")
    missing = {lr for lr, (kind, _) in expected.items() if kind is not None} | {running}
    assert len(finished(tmp_path)) == len(IN_RAY) + 2
    begun = study.starts()[before:]
    assert len(begun) == len(set(begun)) and missing < set(begun) and len(begun) == len(missing) + 1


@pytest.mark.ray
@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("as_soon_as_there_is", ["gcs_server", "raylet/raylet"])
def test_a_head_killed_during_the_start_ends_the_study_with_one_message(cli, tmp_path, as_soon_as_there_is):
    study = Faulty(tmp_path, 1)

    def is_there():
        with contextlib.suppress(LookupError):
            return find(process.pid, as_soon_as_there_is)

    with study.running(cli.start("study", "faulty.py")) as process:
        cli.wait(process, is_there)
        kill(process.pid, "Ray's head")
        assert process.wait(TIMEOUT_S) == 1
    errors = (cli.folder / "stderr").read_text()
    assert re.match(r"error: Ray was lost: its head, gcs_server, ended \(process \d+\)\n  → ", errors), errors
    assert errors.count("error: ") == 1 and "Traceback" not in cli.output()
    cli.wait_for_its_processes()


@pytest.mark.ray
@pytest.mark.faults
@pytest.mark.timeout(900)
def test_losing_a_clusters_head_ends_the_study_and_the_next_one_runs_the_missing_trials(cli, tmp_path):
    study = Faulty(tmp_path, 2)
    with (
        ray_head(tmp_path, "--include-dashboard=false") as (address, head),
        study.running(cli.start("study", "faulty.py", "--address", address, "--exclusive")) as process,
    ):
        first, _ = next_held(study, process)
        study.go(first)
        next_held(study, process)
        kill(head.pid, "Ray's head")
        assert process.wait(TIMEOUT_S) == 1
    errors = (cli.folder / "stderr").read_text()
    assert re.match(r"error: Ray was lost: its head at \S+ can no longer be reached\n  → ", errors), errors
    assert "broke off; `raypar store resume" in cli.output()
    assert outcomes(results_of(tmp_path)) == {first: (None, 1)}
    study.hold_no_more()
    cli.done("study", "faulty.py", "--no-ray")
    assert len(finished(tmp_path)) == 2 and study.starts().count(first) == 1


@pytest.mark.ray
@pytest.mark.faults
@pytest.mark.timeout(900)
def test_a_lost_gang_or_broker_is_replaced_and_its_trial_runs_again(cli, tmp_path):
    study = Faulty(tmp_path, len(WITH_THE_GANG) + 1)
    with study.running(cli.start("study", "faulty.py")) as process:
        expected = go_through(study, process, WITH_THE_GANG)
        last, _ = next_held(study, process)
        study.go(last)
        assert process.wait(TIMEOUT_S) == 0
    assert (cli.folder / "stderr").read_text() == ""
    assert outcomes(results_of(tmp_path)) == {**expected, last: (None, 1)}
    assert cli.output().count("its gang was lost") == 1
    assert "the broker of the trials was lost; running trials start again" in cli.output()
    cli.wait_for_its_processes()
