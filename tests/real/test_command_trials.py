"""Commands as trials: output, failures, stops, several machines and cleanup."""

import json
import os
import socket
import sys
import threading
import time

import psutil
import pytest
from harness import RunEvents, settings_at
from loops import TORCHRUN_SCRIPT

from raypar import Study, Workload
from raypar.run.local import LocalRunner
from raypar.study.trial import FailureKind, TrialState
from raypar.train.command import CommandFailed, run_command
from raypar.train.job import RankContext, TrialJob

PYTHON_SCRIPT = [sys.executable, "train.py"]
REPORT_FOREVER = """
import json, subprocess, sys, time
stray = subprocess.Popen(["sleep", "600"], start_new_session=True)
print("stray", stray.pid)
print(json.dumps({"loss": float("nan")}))
time.sleep(600)
"""
EVENTS = """
import sys
from torch.utils.tensorboard import SummaryWriter
with SummaryWriter(sys.argv[1]) as events:
    for step in (10, 20, 40):
        events.add_scalar("train/loss", 1 / step, step, walltime=1000.0 + step)
    events.add_scalar("accuracy", 0.75, 40, walltime=1041.0)
"""


def study_of(command=PYTHON_SCRIPT, config=None, **parts):
    return Study(
        workload=Workload.from_command(command, **parts), name="s", config=config or {}, num_repeats=1, max_retries=0
    )


def run(tmp_path, study, **settings):
    events = RunEvents()
    settings = {"sys_path": (str(tmp_path),), "preload": ("torch",), "is_command": True, **settings}
    with LocalRunner(settings_at(tmp_path, **settings)) as runner:
        runner.run(study, study.trials(), events.events.append)
    return events.results


def log_of(tmp_path, result):
    return (tmp_path / "logs" / result.spec.identity / "attempt1-rank0.log").read_text()


def test_a_non_finite_loss_stops_the_command_and_its_child_processes(tmp_path):
    (tmp_path / "train.py").write_text(REPORT_FOREVER)
    (result,) = run(tmp_path, study_of())
    assert result.state is TrialState.DIVERGED
    words = log_of(tmp_path, result).split()
    assert not psutil.pid_exists(int(words[words.index("stray") + 1]))


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("raise ValueError('no such luck')", FailureKind.ERROR, "ended with exit code 1: ValueError: no such luck"),
        ("raise RuntimeError('CUDA out of memory.')", FailureKind.OUT_OF_MEMORY, "CUDA out of memory."),
        ("import os; os.kill(os.getpid(), 9)", FailureKind.ERROR, "was killed by SIGKILL: it printed nothing"),
    ],
)
def test_a_failed_command_is_a_failed_trial_with_its_last_output(tmp_path, code, kind, message):
    (tmp_path / "train.py").write_text(code)
    (result,) = run(tmp_path, study_of())
    assert result.failure.kind is kind and message in result.failure.summary


def test_a_failed_rank_of_torchrun_is_reported_with_its_error(tmp_path):
    (tmp_path / "train.py").write_text("import os\nif os.environ['RANK'] == '1': raise ValueError('no such luck')")
    command = "torchrun --standalone --nproc-per-node=2 train.py"
    (result,) = run(tmp_path, study_of(command))
    assert "ended with exit code 1: [local rank 1] ValueError: no such luck" in result.failure.summary


def test_a_command_runs_in_its_folder_and_progress_bars_are_read_line_by_line(tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "train.py").write_text(
        "import os\nprint(os.getcwd())\nfor i in 3, 2: print(f'\\rloss {i}', end='')"
    )
    metrics = {"loss": r"loss (\d)"}
    (result,) = run(tmp_path, study_of(folder="parts", metrics=metrics))
    assert [report["loss"] for report in result.reports] == [3, 2]
    assert f"{tmp_path}/parts\n" in log_of(tmp_path, result)
    script = [sys.executable, str(tmp_path / "parts" / "train.py")]
    (result,) = run(tmp_path / "own", study_of(script, folder="{output_dir}", metrics=metrics))
    assert f"{result.spec.identity}/artifacts\n" in log_of(tmp_path / "own", result)
    (result,) = run(tmp_path / "none", study_of(folder="nowhere"), sys_path=(str(tmp_path),))
    assert result.failure.kind is FailureKind.INVALID and "nowhere: there is no such folder" in result.failure.summary


@pytest.mark.parametrize(("num_bytes", "is_known"), [(1, False), (1_200_000_000, True)])
def test_the_memory_of_a_command_is_that_of_its_program_or_unknown(tmp_path, num_bytes, is_known):
    (tmp_path / "train.py").write_text(f"data = b'x' * {num_bytes}")
    (result,) = run(tmp_path, study_of(fresh_process=True))
    assert result.failure is None
    if is_known:
        assert result.conditions.largest("peak_rss_bytes") == pytest.approx(num_bytes, rel=0.05)
    else:  # Linux shows the memory of the process that started it
        assert result.conditions.largest("peak_rss_bytes") is None


def test_a_command_that_hangs_is_ended(tmp_path):
    (tmp_path / "train.py").write_text("import time, os\nprint(os.getpid())\ntime.sleep(600)")
    (result,) = run(tmp_path, study_of(), trial_timeout_s=5)
    assert result.failure.kind is FailureKind.HUNG
    assert not psutil.pid_exists(int(log_of(tmp_path, result).split()[-1]))


def test_event_files_are_read_by_step_and_those_of_earlier_runs_are_ignored(tmp_path):
    (tmp_path / "train.py").write_text(EVENTS)
    study = study_of([*PYTHON_SCRIPT, "runs"], tensorboard="runs", metric="train/loss")
    for _ in range(2):
        (result,) = run(tmp_path, study)
        assert result.failure is None
        assert [report["step"] for report in result.reports] == [10, 20, 40]
        assert result.final["train/loss"] == pytest.approx(1 / 40) and result.final["accuracy"] == 0.75
        assert result.step_times_s == (pytest.approx((1.0, 21 / 20)),)  # the last step's last value was 21 s later
        assert result.train_time_s == pytest.approx(31.0)


def test_event_files_give_no_times_if_an_evaluation_counts_its_own_steps(tmp_path):
    evaluated = """    for step in (0, 1):
        events.add_scalar("val/loss", 0.5, step, walltime=2000.0 + step)
"""
    (tmp_path / "train.py").write_text(EVENTS + evaluated)
    (result,) = run(tmp_path, study_of([*PYTHON_SCRIPT, "runs"], tensorboard="runs", metric="train/loss"))
    assert result.failure is None and [r["step"] for r in result.reports if "val/loss" in r] == [0, 1]
    assert result.train_time_s is None and not any(result.step_times_s)


def test_a_command_without_event_files_fails_with_the_folder_in_the_message(tmp_path):
    (tmp_path / "train.py").write_text("")
    (result,) = run(tmp_path, study_of(tensorboard="runs"))
    assert result.failure.kind is FailureKind.INVALID  # ends the study with this message
    assert f"{tmp_path}/runs: the command has written no event files there" in result.failure.summary


def test_a_command_has_the_environment_of_a_shell(tmp_path, monkeypatch):
    monkeypatch.setenv("MALLOC_TOP_PAD_", "4096")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    (tmp_path / "train.py").write_text("import json, os\nprint('environment', json.dumps(dict(os.environ)))")
    (result,) = run(tmp_path, study_of(config={"num_threads": 3}))
    (line,) = [line for line in log_of(tmp_path, result).splitlines() if line.startswith("environment ")]
    environment = json.loads(line.removeprefix("environment "))
    assert {key: value for key, value in environment.items() if key.startswith("MALLOC_")} == {
        "MALLOC_TOP_PAD_": "4096"
    }
    assert "OPENBLAS_NUM_THREADS" not in environment and environment["OMP_NUM_THREADS"] == "3"
    assert environment["PATH"].endswith(os.environ["PATH"])


def test_a_machine_without_the_studys_folder_runs_a_copy_of_its_script(tmp_path):
    sources = {"train.py": b"import parts.loss\nprint({})", "parts/loss.py": b"print('loss 0.5')"}
    study = study_of(metrics={"loss": r"loss (\S+)"})
    (result,) = run(tmp_path, study, sys_path=(str(tmp_path / "elsewhere"),), sources=sources)
    assert (result.failure, result.final["loss"]) == (None, 0.5)
    (result,) = run(tmp_path / "again", study, sys_path=(str(tmp_path / "elsewhere"),))
    assert result.failure.kind is FailureKind.INVALID
    assert "has no such folder to run the command in" in result.failure.summary


# ---- several machines: each is a thread that runs its first rank


class Reports:
    """A channel that stops the trial after a number of reports."""

    def __init__(self, limit=1000):
        self.taken, self._limit = [], limit

    def report(self, metrics):
        self.taken.append(metrics)
        return len(self.taken) < self._limit


def on_two_machines(tmp_path, code, command, channel):
    """Run the command of a trial with one worker on each of two machines; return each outcome or error."""
    (tmp_path / "train.py").write_text(code)
    study = study_of(command, metrics={"loss": r"loss: (\S+)"}, options={"lr": 0.1, "note": "two"})
    spec = study.trial({"num_workers": 2}, 0)
    job = TrialJob(spec, 1, b"", settings_at(tmp_path, sys_path=(str(tmp_path),)))
    ends = {}
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run_first_rank(machine):
            context = RankContext(machine, 2, 0, 1, machine, listener.getsockname(), time.monotonic())
            try:
                listen_fd = None if machine else listener.fileno()
                ends[machine] = run_command(study.workload.command, job, context, channel, listen_fd)
            except Exception as error:
                ends[machine] = error

        machines = [threading.Thread(target=run_first_rank, args=[machine]) for machine in (0, 1)]
        for machine in machines:
            machine.start()
        for machine in machines:
            machine.join()
    return ends[0], ends[1]


ON_TWO = (
    "torchrun --nnodes={num_nodes} --node-rank={node_rank} --nproc-per-node={workers_per_node} "
    "--master-addr={master_addr} --master-port={master_port} train.py --lr {lr} --note {note}"
)


def test_torchrun_on_two_machines_reports_from_the_first_only(tmp_path):
    channel = Reports()
    first, second = on_two_machines(tmp_path, TORCHRUN_SCRIPT, ON_TWO, channel)
    assert not first.stopped and not second.stopped
    assert len(channel.taken) == 2 and len(first.step_times_s) == 9 and second.step_times_s == ()


def test_a_stopped_trial_ends_its_command_on_every_machine(tmp_path):
    code = "import time\nprint('loss: 1', flush=True)\ntime.sleep(600)"
    first, second = on_two_machines(tmp_path, code, PYTHON_SCRIPT, Reports(limit=1))
    assert first.stopped and second.stopped


def test_a_command_that_fails_on_the_first_machine_ends_on_the_others(tmp_path):
    code = "import sys, time\nsys.exit(3) if sys.argv[1] == '0' else time.sleep(600)"
    first, second = on_two_machines(tmp_path, code, [*PYTHON_SCRIPT, "{node_rank}"], Reports())
    assert isinstance(first, CommandFailed) and "exit code 3" in str(first)
    assert second.stopped
