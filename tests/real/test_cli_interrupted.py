"""A study that is interrupted or killed: nothing goes on running, what was finished is kept, the rest is run later."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import TIMEOUT_S, Cli, runs_of
from telling import until

from raypar.run.ranks import is_running
from raypar.train.affinity import allowed_cores

pytestmark = pytest.mark.skipif(len(allowed_cores()) < 2, reason="two workers need two cores")

# Its third trial waits for the file `wait` to go away; `starts` gets a line for each trial that was started.
STUDY = """
from dataclasses import replace
from pathlib import Path

from raypar import Study, grid
from raypar.workloads import digits

FOLDER = Path(__file__).parent


def model(config):
    import os, time
    from raypar.workloads.digits import build

    starts = FOLDER / "starts"
    if os.environ["RANK"] == "0":
        with starts.open("a") as file:
            file.write(f"{config['lr']}\\n")
        while (FOLDER / "wait").exists() and len(starts.read_text().splitlines()) >= 3:
            time.sleep(0.05)
    return build(config)


study = Study(
    workload=replace(digits, name="waiting", model=model),
    space={"lr": grid(0.1, 0.2, 0.3, 0.4)},
    num_repeats=1,
    config={"epochs": 1, "batch_size": 768, "hidden_size": 32, "num_workers": 2},
)
"""

Start = Callable[..., None]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    made = Cli(tmp_path)
    made.write("waiting.py", STUDY)
    made.write("wait", "")
    made.write("starts", "")
    return made


def starts(cli: Cli) -> list[str]:
    return (cli.folder / "starts").read_text().splitlines()


def interrupt_in_the_third_trial(cli: Cli, flags: tuple[str, ...], send: Callable[[int], None]) -> int:
    """The exit code."""
    with cli.start("study", "waiting.py", *flags) as process:
        try:
            until(lambda: len(starts(cli)) == 3 or process.poll() is not None, "the third trial", TIMEOUT_S)
            assert process.poll() is None, (cli.folder / "stderr").read_text()
            send(process.pid)
            return process.wait(TIMEOUT_S)
        finally:
            if process.poll() is None:
                process.kill()


def everything_is_there(cli: Cli) -> None:
    """Each point once in the store, and no trial was started that need not be."""
    finished = [run for run in runs_of(cli.folder, "waiting", "trial") if run.info.status == "FINISHED"]
    assert sorted(run.data.params["lr"] for run in finished) == ["0.1", "0.2", "0.3", "0.4"]
    begun = starts(cli)
    assert len(begun) == 5 and begun[2] in begun[3:]


def finished_trials(cli: Cli) -> list[str]:
    runs = runs_of(cli.folder, "waiting", "trial")
    return sorted(run.data.params["lr"] for run in runs if run.info.status == "FINISHED")


WAYS = pytest.mark.parametrize(
    "flags", [pytest.param((), marks=pytest.mark.ray, id="ray"), pytest.param(("--no-ray",), id="no-ray")]
)


@WAYS
def test_ctrl_c_ends_everything_keeps_what_is_finished_and_resume_runs_the_rest(
    cli: Cli, flags: tuple[str, ...]
) -> None:
    code = interrupt_in_the_third_trial(cli, flags, lambda pid: os.killpg(pid, signal.SIGINT))
    output = (cli.folder / "stdout").read_text()
    assert (code, (cli.folder / "stderr").read_text()) == (130, "")
    assert "Partial: interrupted when 2 of 4 trials were done." in output and "Traceback" not in output
    assert "interrupted; `raypar resume waiting` runs the rest" in output
    assert cli.processes() == {}  # when it ends, not some time after
    assert finished_trials(cli) == sorted(starts(cli)[:2])
    (execution,) = runs_of(cli.folder, "waiting", "execution")
    assert execution.info.status == "KILLED"
    (report,) = cli.folder.glob("**/report.html")
    assert "Partial: interrupted when 2 of 4 trials were done." in report.read_text()

    (cli.folder / "wait").unlink()
    (cli.folder / "elsewhere").mkdir()
    resumed = cli.run("resume", "waiting")
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert "2 of 4 trials" in resumed.stdout
    assert len(re.findall(r"^\[\d/4\] ", resumed.stdout, re.MULTILINE)) == 2
    everything_is_there(cli)


@WAYS
def test_a_killed_raypar_leaves_no_process_and_the_same_command_runs_the_rest(cli: Cli, flags: tuple[str, ...]) -> None:
    code = interrupt_in_the_third_trial(cli, flags, lambda pid: os.kill(pid, signal.SIGKILL))
    assert code == -signal.SIGKILL
    cli.wait_for_its_processes()
    listed = cli.run("show", "waiting")
    assert listed.returncode == 0 and len(re.findall(r"\bfinished\b", listed.stdout)) == 2

    (cli.folder / "wait").unlink()
    done = cli.run("study", "waiting.py", "--no-ray")
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 of 4 trials" in done.stdout
    everything_is_there(cli)


@pytest.mark.ray
@pytest.mark.parametrize("sign", ["the process gcs_server", "starting a gang"])
def test_ctrl_c_before_the_first_trial_ends_what_is_starting_and_the_same_command_runs_all(cli: Cli, sign: str) -> None:
    (cli.folder / "wait").unlink()

    def is_starting(process: subprocess.Popen[str]) -> bool:
        if sign.startswith("the process "):
            name = sign.removeprefix("the process ")
            return any(Path(line.split()[0]).name == name for line in cli.processes().values() if line)
        return sign in (cli.folder / "stdout").read_text()

    with cli.start("study", "waiting.py") as process:
        until(lambda: is_starting(process) or process.poll() is not None, sign, TIMEOUT_S)
        assert process.poll() is None, (cli.folder / "stderr").read_text()
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130, (cli.folder / "stderr").read_text()
    told = (cli.folder / "stdout").read_text() + (cli.folder / "stderr").read_text()
    assert "interrupted" in told and "Traceback" not in told and "rror" not in told, told
    assert cli.processes() == {}
    begun = starts(cli)  # none, unless the gang was ready while it was told
    done = cli.run("study", "waiting.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert finished_trials(cli) == ["0.1", "0.2", "0.3", "0.4"]
    assert len(starts(cli)) == 4 + len(begun)


# Makes the report only once the file `wait` is gone, and says in the file `reports` that it is about to.
SLOW_REPORT = """
import raypar.report.html
from raypar.report.html import html_report


def slow_report(*what):
    import time

    (FOLDER / "reports").touch()
    while (FOLDER / "wait").exists():
        time.sleep(0.05)
    return html_report(*what)


raypar.report.html.html_report = slow_report
"""


def test_a_second_ctrl_c_leaves_at_once_and_loses_nothing(cli: Cli) -> None:
    cli.write("waiting.py", STUDY + SLOW_REPORT)
    with cli.start("study", "waiting.py", "--no-ray") as process:
        until(lambda: len(starts(cli)) == 3 or process.poll() is not None, "the third trial", TIMEOUT_S)
        process.send_signal(signal.SIGINT)
        until(lambda: (cli.folder / "reports").exists() or process.poll() is not None, "the report", TIMEOUT_S)
        assert process.poll() is None, (cli.folder / "stderr").read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130 and cli.processes() == {}
    (cli.folder / "wait").unlink()
    done = cli.run("resume", "waiting")
    assert (done.returncode, done.stderr) == (0, "") and "2 of 4 trials" in done.stdout
    everything_is_there(cli)


def test_a_hang_up_while_the_report_is_made_lets_it_be_finished(cli: Cli) -> None:
    cli.write("waiting.py", STUDY.replace('(FOLDER / "wait").exists()', "False") + SLOW_REPORT)
    with cli.start("study", "waiting.py", "--no-ray") as process:
        until(lambda: (cli.folder / "reports").exists() or process.poll() is not None, "the report", TIMEOUT_S)
        os.killpg(process.pid, signal.SIGHUP)
        (cli.folder / "wait").unlink()
        assert process.wait(TIMEOUT_S) == 129, (cli.folder / "stderr").read_text()
    output = (cli.folder / "stdout").read_text()
    assert "4 points, 4 trials" in output and "Partial" not in output
    assert "interrupted when every trial was done" in output
    assert len(finished_trials(cli)) == 4 and cli.processes() == {}
    (execution,) = runs_of(cli.folder, "waiting", "execution")
    assert execution.info.status == "FINISHED"


def test_sigterm_while_a_study_is_planned_starts_nothing(cli: Cli) -> None:
    prepare = 'lambda config: ((FOLDER / "plans").touch(), __import__("time").sleep(600))'
    cli.write("waiting.py", STUDY.replace("model=model", f"model=model, prepare={prepare}"))
    with cli.start("study", "waiting.py", "--no-ray") as process:
        until(lambda: (cli.folder / "plans").exists() or process.poll() is not None, "the plan", TIMEOUT_S)
        process.terminate()
        assert process.wait(TIMEOUT_S) == 143
    assert (cli.folder / "stderr").read_text() == "interrupted\n"
    assert (cli.folder / "stdout").read_text() == "" and not (cli.folder / "mlflow.db").exists()
    assert cli.processes() == {} and starts(cli) == []


def test_a_fork_server_ends_with_its_owner_and_removes_its_socket() -> None:
    own = "from raypar.run.ranks import ForkServer; s = ForkServer(); print(s.pid, s.address, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", own], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid, address = owner.stdout.readline().split()
        assert is_running(int(pid)) and Path(address).exists()
        owner.kill()
    until(lambda: not is_running(int(pid)), "the end of the fork server")
    assert not Path(address).parent.exists()


def test_a_point_that_fails_is_told_with_its_log_and_the_others_are_finished(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    cli.write(
        "failing.py",
        STUDY.replace("    return build(config)", "    return build(config) if config['lr'] != 0.2 else 1 / 0"),
    )
    done = cli.run("study", "failing.py", "--no-ray", "--set", "num_workers=1")
    assert (done.returncode, done.stderr) == (1, "")
    assert "failed: lr=0.2 #1: ZeroDivisionError: division by zero" in done.stdout
    (log,) = set(re.findall(r"log: (\S+)", done.stdout))
    assert "ZeroDivisionError" in Path(log).read_text()
    trials = {run.data.params["lr"]: run for run in runs_of(tmp_path, "failing", "trial")}
    assert {lr: run.info.status for lr, run in trials.items()} == {
        "0.1": "FINISHED",
        "0.2": "FAILED",
        "0.3": "FINISHED",
        "0.4": "FINISHED",
    }
    assert "division by zero" in trials["0.2"].data.tags["raypar.failure"]
    cli.wait_for_its_processes()

    again = cli.run("study", "failing.py", "--no-ray", "--set", "num_workers=1")
    assert again.returncode == 1 and "3 of 4 trials" in again.stdout
    assert starts(cli).count("0.2") == 2 and len(starts(cli)) == 5
