"""Commands as trials: torchrun scripts, failures, stops, and nothing left behind."""

import sys

import psutil
import pytest
from harness import RunEvents, settings_at

from raypar import Study, Workload, grid
from raypar.run.local import LocalRunner
from raypar.study.trial import FailureKind, TrialState

TRAIN = """
import argparse, os, torch, torch.distributed as dist
import raypar
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--note")
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
inputs = torch.randn(64, 8)[dist.get_rank() :: dist.get_world_size()]
for epoch in range(2):
    for _ in range(5):
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        raypar.step()
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        mean = loss.item() / dist.get_world_size()
        print(f"epoch {epoch} loss: {mean:.6f} {args.note} on {len(os.sched_getaffinity(0))} cores")
dist.destroy_process_group()
"""
LOSS = r"loss: ([0-9.]+)"
REPORT_FOREVER = """
import json, subprocess, sys, time
stray = subprocess.Popen(["sleep", "600"], start_new_session=True)
print("stray", stray.pid)
print(json.dumps({"loss": float("nan")}))
time.sleep(600)
"""


def run(tmp_path, study, **settings):
    events = RunEvents()
    with LocalRunner(settings_at(tmp_path, sys_path=(str(tmp_path),), preload=(), **settings)) as runner:
        runner.run(study, study.trials(), events.events.append)
    return events.results


def log_of(tmp_path, result):
    return (tmp_path / "logs" / result.spec.identity / "attempt1-rank0.log").read_text()


@pytest.mark.core
def test_a_torchrun_script_trains_the_same_on_one_worker_and_on_two_and_its_steps_are_timed(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    text = "torchrun --standalone --nproc-per-node={num_workers} train.py --lr {lr} --note {note}"
    workload = Workload.from_command(text, metrics={"loss": LOSS})
    config = {"lr": 0.1, "note": "it's; $HOME"}
    study = Study(workload=workload, name="s", space={"num_workers": grid(1, 2)}, config=config, num_repeats=1)
    results = run(tmp_path, study)
    assert [result.state for result in results] == [TrialState.FINISHED] * 2
    losses = {tuple(report["loss"] for report in result.reports) for result in results}
    assert len(losses) == 1  # equal, to the digits that are printed
    for result in results:
        # 10 steps, less the first one; of the first process alone.
        assert [len(times) for times in result.step_times_s] == [9]
        assert 0 < result.train_time_s < result.wall_s
        assert f"it's; $HOME on {result.spec.config['num_workers']} cores" in log_of(tmp_path, result)


def test_a_loss_that_is_not_finite_stops_the_command_and_all_that_it_started(tmp_path):
    (tmp_path / "train.py").write_text(REPORT_FOREVER)
    study = Study(workload=Workload.from_command([sys.executable, "train.py"]), name="s", num_repeats=1)
    (result,) = run(tmp_path, study)
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
def test_a_command_that_fails_is_a_failed_trial_with_its_last_words(tmp_path, code, kind, message):
    (tmp_path / "train.py").write_text(code)
    study = Study(workload=Workload.from_command([sys.executable, "train.py"]), name="s", num_repeats=1, max_retries=0)
    (result,) = run(tmp_path, study)
    assert result.failure.kind is kind and message in result.failure.summary


def test_a_command_that_hangs_is_ended(tmp_path):
    (tmp_path / "train.py").write_text("import time, os\nprint(os.getpid())\ntime.sleep(600)")
    study = Study(workload=Workload.from_command([sys.executable, "train.py"]), name="s", num_repeats=1, max_retries=0)
    (result,) = run(tmp_path, study, trial_timeout_s=5)
    assert result.failure.kind is FailureKind.HUNG
    assert not psutil.pid_exists(int(log_of(tmp_path, result).split()[-1]))
