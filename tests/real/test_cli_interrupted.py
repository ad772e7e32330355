"""Interrupted and killed studies leave no process, keep finished trials, and can be resumed."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faultlab import Faulty, next_held
from harness import TIMEOUT_S, finished, runs_of, until

from raypar.cli.common import DRIVER_LOG
from raypar.signals import is_running

RATES = ["0.01", "0.02", "0.03", "0.04"]
WAYS = pytest.mark.parametrize(
    "flags", [pytest.param((), marks=pytest.mark.ray, id="ray"), pytest.param(("--no-ray",), id="no-ray")]
)


@pytest.fixture
def study(tmp_path):
    return Faulty(tmp_path, len(RATES))


def interrupt_third_trial(cli, study, flags, send):
    """Send a signal while the third trial is held; return the exit code."""
    with study.running(cli.start("study", "faulty.py", *flags)) as process:
        for _ in range(2):
            study.go(next_held(study, process)[0])
        next_held(study, process)
        send(process.pid)
        return process.wait(TIMEOUT_S)


def check_rest(cli, study, *command):
    """Run the missing trials; check that each point is stored once and that no other trial was started."""
    study.hold_no_more()
    output = cli.done(*command)
    assert "2 of 4 trials" in output and len(re.findall(r"^\S+ \S+  \[\d/4\] ", output, re.MULTILINE)) == 2
    assert finished(cli.folder) == RATES
    starts = study.starts()
    assert len(starts) == 5 and starts[2] in starts[3:]


@WAYS
def test_ctrl_c_ends_everything_and_resume_runs_the_missing_trials(cli, study, flags):
    code = interrupt_third_trial(cli, study, flags, lambda pid: os.killpg(pid, signal.SIGINT))
    output = (cli.folder / "stdout").read_text()
    assert (code, (cli.folder / "stderr").read_text()) == (130, "")
    assert "Partial: interrupted when 2 of 4 trials were done." in output and "Traceback" not in output
    assert "interrupted; run `raypar store resume faulty` to continue" in output
    assert cli.processes() == {}  # when it ends, not some time after
    assert finished(cli.folder) == sorted(study.starts()[:2])
    (execution,) = runs_of(cli.folder, "faulty", "execution")
    assert execution.info.status == "KILLED"
    (report,) = cli.folder.glob("**/report.html")
    assert "Partial: interrupted when 2 of 4 trials were done." in report.read_text()
    check_rest(cli, study, "store", "resume", "faulty")


@WAYS
def test_a_killed_study_leaves_no_process_and_the_same_command_runs_the_missing_trials(cli, study, flags):
    def refuse_another_and_kill(pid):
        second = cli.run("study", "faulty.py", "--no-ray")
        assert second.returncode == 2 and len(study.starts()) == 3
        assert f"study `faulty` is already running in process {pid} (`raypar study faulty.py" in second.stderr
        assert len(list(cli.folder.glob(f".raypar/logs/*/{DRIVER_LOG}"))) == 1
        os.kill(pid, signal.SIGKILL)

    assert interrupt_third_trial(cli, study, flags, refuse_another_and_kill) == -signal.SIGKILL
    cli.wait_for_its_processes()
    assert len(re.findall(r"\bfinished\b", cli.done("store", "show", "faulty"))) == 2
    check_rest(cli, study, "study", "faulty.py", "--no-ray")
    assert {run.info.status for run in runs_of(cli.folder, "faulty", "execution")} == {"KILLED", "FINISHED"}
    for kind in ("trial", "point"):
        assert {run.info.status for run in runs_of(cli.folder, "faulty", kind)} == {"FINISHED"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_study_that_runs_from_python_ends_with_its_program_and_continues_in_the_next(cli, study, number):
    text = (cli.folder / "faulty.py").read_text()
    cli.write("program.py", f"{text}\nif __name__ == '__main__':\n    replace(study, name='faulty').run(no_ray=True)\n")
    with study.running(cli.start("program.py", program=sys.executable)) as process:
        for _ in range(2):
            study.go(next_held(study, process)[0])
        next_held(study, process)
        os.killpg(process.pid, number)  # as a notebook's server does
        assert process.wait(TIMEOUT_S) == -number
    if number == signal.SIGINT:
        assert cli.processes() == {}
        assert "Partial: interrupted when 2 of 4 trials were done." in cli.output()
        assert "interrupted; run `study.run()` to continue" in cli.output()
    cli.wait_for_its_processes()
    assert finished(cli.folder) == sorted(study.starts()[:2])
    study.hold_no_more()
    assert cli.start("program.py", program=sys.executable).wait(TIMEOUT_S) == 0
    assert "2 of 4 trials are in the store already" in cli.output() and "faulty: 4 points, 4 trials" in cli.output()
    assert finished(cli.folder) == RATES and len(study.starts()) == 5


@pytest.mark.ray
@pytest.mark.parametrize("sign", ["gcs_server", "starting a gang"])
def test_ctrl_c_before_the_first_trial_ends_starting_processes(cli, study, sign):
    study.hold_no_more()
    with cli.start("study", "faulty.py") as process:
        cli.wait(
            process,
            lambda: sign in cli.output() + "".join(line.split()[0] for line in cli.processes().values() if line),
        )
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130, cli.output()
    assert "interrupted" in cli.output() and "Traceback" not in cli.output() and "rror" not in cli.output()
    assert cli.processes() == {}
    num_starts = len(study.starts())  # 0, unless the gang was ready by then
    cli.done("study", "faulty.py", "--no-ray")
    assert finished(cli.folder) == RATES and len(study.starts()) == 4 + num_starts


def test_sigterm_while_a_study_is_planned_starts_nothing(cli, study):
    prepare = 'lambda config: ((FOLDER / "plans").touch(), __import__("time").sleep(600))'
    text = (cli.folder / "faulty.py").read_text()
    cli.write("faulty.py", text.replace("model=model", f"model=model, prepare={prepare}"))
    with cli.start("study", "faulty.py", "--no-ray") as process:
        cli.wait(process, (cli.folder / "plans").exists)
        process.terminate()
        assert process.wait(TIMEOUT_S) == 143
    assert cli.output() == "interrupted\n" and not (cli.folder / "mlflow.db").exists()
    assert cli.processes() == {} and study.starts() == []


def test_a_fork_server_ends_with_its_owner_and_removes_its_socket():
    code = "from raypar.run.ranks import ForkServer; s = ForkServer(); print(s.pid, s.address, flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as owner:
        pid, address = owner.stdout.readline().split()
        assert is_running(int(pid)) and Path(address).exists()
        owner.kill()
    until(lambda: not is_running(int(pid)), "the end of the fork server")
    assert not Path(address).parent.exists()
