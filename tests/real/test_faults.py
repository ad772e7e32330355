"""Faults cost no finished trial: what is killed, lost or full; what failed is told apart, and the rest is run later."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from commands import RAYPAR, TIMEOUT_S, Cli
from telling import HERE, until

from raypar.study.trial import FailureKind, TrialResult, TrialState
from raypar.track.server import free_port
from raypar.track.store import Store, default_tracking_uri
from raypar.train.affinity import allowed_cores

sys.path.insert(0, str(HERE.parent))

from faultlab import Faulty, kill, kill_rank, memory_group, next_held

pytestmark = pytest.mark.skipif(len(allowed_cores()) < 2, reason="two workers need two cores")


def results(cli: Cli) -> dict[str, TrialResult]:
    """By learning rate, each once."""
    found = Store(default_tracking_uri(cli.folder), cli.folder).results("faulty")
    by_lr = {str(result.spec.config["lr"]): result for result in found}
    assert len(by_lr) == len(found)
    return by_lr


Inject = Callable[[Faulty, int, str, int], None]


def told(act: str) -> Inject:
    return lambda study, driver, lr, rank: study.go(lr, act)


def rank_killed(study: Faulty, driver: int, lr: str, rank: int) -> None:
    kill_rank(rank)
    study.go(lr)


def killed(victim: str) -> Inject:
    def inject(study: Faulty, driver: int, lr: str, rank: int) -> None:
        kill(driver, victim)
        study.go(lr)

    return inject


# What happens to the trials, one after the other; the kind of their failure, and how often they are started.
IN_A_TRIAL: list[tuple[Inject, FailureKind | None, int]] = [
    (rank_killed, None, 2),
    (told("raise"), FailureKind.ERROR, 1),
    (told("ask for too much"), FailureKind.OUT_OF_MEMORY, 1),
]
IN_RAY: list[tuple[Inject, FailureKind | None, int]] = [
    (rank_killed, None, 2),
    (told("raise"), FailureKind.ERROR, 1),
    (killed("Tune trainable"), None, 1),
]
# Each costs a start of a gang.
WITH_THE_GANG: list[tuple[Inject, FailureKind | None, int]] = [
    (killed("gang controller"), None, 2),
    (killed("gang worker"), None, 2),
    (killed("broker"), None, 1),  # the next one counts anew
]


def go_through(
    study: Faulty, process: subprocess.Popen[str], faults: list[tuple[Inject, FailureKind | None, int]]
) -> dict[str, tuple[FailureKind | None, int]]:
    """What is to be in the store then, by learning rate."""
    expected = {}
    for inject, kind, attempts in faults:
        lr, rank = next_held(study, process)
        inject(study, process.pid, lr, rank)
        expected[lr] = (kind, attempts)
    return expected


def came(found: dict[str, TrialResult]) -> dict[str, tuple[FailureKind | None, int]]:
    return {lr: (result.failure and result.failure.kind, result.attempts) for lr, result in found.items()}


def test_what_fails_in_a_trial_is_told_apart_and_costs_no_other(tmp_path: Path) -> None:
    cli, study = Cli(tmp_path), Faulty(tmp_path, len(IN_A_TRIAL) + 1)
    with study.running(cli.start("study", "faulty.py", "--no-ray")) as process:
        expected = go_through(study, process, IN_A_TRIAL)
        last, _ = next_held(study, process)
        study.go(last)
        assert process.wait(TIMEOUT_S) == 1
    assert (cli.folder / "stderr").read_text() == ""
    found = results(cli)
    assert came(found) == {**expected, last: (None, 1)}
    output = (cli.folder / "stdout").read_text()
    assert "ValueError: no such luck" in output and "MemoryError" in output
    cli.wait_for_its_processes()


@pytest.mark.ray
@pytest.mark.faults
@pytest.mark.timeout(900)
def test_what_is_killed_under_a_study_in_ray_loses_no_trial_and_resume_runs_what_the_lost_head_left(
    tmp_path: Path,
) -> None:
    cli, study = Cli(tmp_path), Faulty(tmp_path, len(IN_RAY) + 2)
    with study.running(cli.start("study", "faulty.py")) as process:
        expected = go_through(study, process, IN_RAY)
        running, _ = next_held(study, process)
        kill(process.pid, "Ray's head")
        assert process.wait(TIMEOUT_S) == 1
    output, errors = (cli.folder / "stdout").read_text(), (cli.folder / "stderr").read_text()
    assert re.match(r"error: Ray was lost: its head, gcs_server ended \(process \d+\)\n  → ", errors), errors
    assert f"Partial: broke off when {len(IN_RAY)} of {len(IN_RAY) + 2} trials were done." in output
    assert "broke off; `raypar resume faulty` runs the rest" in output and "Traceback" not in output + errors
    assert came(results(cli)) == expected
    cli.wait_for_its_processes()

    study.hold_no_more()
    before = len(study.starts())
    done = cli.run("resume", "faulty")
    assert (done.returncode, done.stderr) == (0, "")
    missing = {lr for lr, (kind, _) in expected.items() if kind is not None} | {running}
    found = results(cli)
    assert len(found) == len(IN_RAY) + 2 and {result.state for result in found.values()} == {TrialState.FINISHED}
    begun = study.starts()[before:]
    assert len(begun) == len(set(begun)) and missing < set(begun) and len(begun) == len(missing) + 1


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[tuple[str, int]]:
    """A cluster of one node: its address, and the process that the others descend from."""
    port = free_port(24_500)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(RAYPAR.with_name("ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1"),
                *(f"--port={port}", "--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats"),
                "--object-store-memory=100000000",
            ],
            env={**os.environ, "RAY_AUTH_MODE": "disabled"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            until(lambda: b"Ray runtime started" in (folder / "log").read_bytes(), (folder / "log").read_text, 120)
            yield f"127.0.0.1:{port}", process.pid
        finally:
            for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                with contextlib.suppress(psutil.Error):
                    each.kill()
            process.wait()


@pytest.mark.ray
@pytest.mark.faults
@pytest.mark.timeout(900)
def test_a_cluster_that_loses_its_head_ends_the_study_with_a_message_and_the_next_one_runs_the_rest(
    tmp_path: Path,
) -> None:
    cli, study = Cli(tmp_path), Faulty(tmp_path, 2)
    with (
        cluster(tmp_path) as (address, ray),
        study.running(cli.start("study", "faulty.py", "--address", address, "--exclusive")) as process,
    ):
        first, _ = next_held(study, process)
        study.go(first)
        next_held(study, process)
        kill(ray, "Ray's head")
        assert process.wait(TIMEOUT_S) == 1
    errors = (cli.folder / "stderr").read_text()
    assert re.match(r"error: Ray was lost: its head at \S+ can.t be reached any more\n  → ", errors), errors
    assert "broke off; `raypar resume" in errors + (cli.folder / "stdout").read_text()
    assert came(results(cli)) == {first: (None, 1)}
    study.hold_no_more()
    done = cli.run("study", "faulty.py", "--no-ray")
    assert (done.returncode, len(results(cli))) == (0, 2)
    assert study.starts().count(first) == 1


@pytest.mark.ray
@pytest.mark.faults
@pytest.mark.timeout(900)
def test_a_gang_or_a_broker_that_is_lost_is_replaced_and_its_trial_run_again(tmp_path: Path) -> None:
    cli, study = Cli(tmp_path), Faulty(tmp_path, len(WITH_THE_GANG) + 1)
    with study.running(cli.start("study", "faulty.py")) as process:
        expected = go_through(study, process, WITH_THE_GANG)
        last, _ = next_held(study, process)
        study.go(last)
        assert process.wait(TIMEOUT_S) == 0
    assert (cli.folder / "stderr").read_text() == ""
    assert came(results(cli)) == {**expected, last: (None, 1)}
    output = (cli.folder / "stdout").read_text()
    assert output.count("its gang was lost") == 2
    assert "the broker of the trials was lost; what ran is run again" in output
    cli.wait_for_its_processes()


def test_a_rank_that_the_kernel_kills_for_its_memory_is_told_so(tmp_path: Path) -> None:
    cli, study = Cli(tmp_path), Faulty(tmp_path, 2)
    with contextlib.ExitStack() as stack:
        try:
            join = stack.enter_context(memory_group())
        except OSError as error:
            pytest.skip(f"no memory group can be made here: {error}")
        process = stack.enter_context(study.running(cli.start("study", "faulty.py", "--no-ray")))
        lr, rank = next_held(study, process)
        join(rank)
        study.go(lr, "take too much")
        other, _ = next_held(study, process)
        study.go(other)
        assert process.wait(TIMEOUT_S) == 1
    failure = results(cli)[lr].failure
    assert failure is not None and failure.kind is FailureKind.OUT_OF_MEMORY, failure
    assert "was killed by the kernel: the machine, or its group, is out of memory" in failure.message
    assert results(cli)[other].state is TrialState.FINISHED
    assert study.starts() == [lr, other]  # not tried again
