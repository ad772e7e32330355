"""benchmarks/gpu_check.py passes a dry run on the CPU, and each of its checks can fail."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from raypar.run.runner import TrialEnded, TrialReported
from raypar.study.trial import TrialResult, TrialState

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_check")


def test_dry_run_passes_every_check_without_ray_and_mlflow(tmp_path):
    for name in ("ray", "mlflow"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is not needed')")
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--dry-run"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{BENCHMARKS.parent}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    checks = ["environment", "fork_hygiene", "step_timer", "memory_after_trials", "loaders"]
    assert [line["check"] for line in lines] == checks, done.stderr
    assert all(line["ok"] is True and line["seconds"] >= 0 for line in lines), done.stdout
    assert done.returncode == 0


def test_error_fails_its_check_alone(gpu_check, capsys):
    assert not gpu_check.run_check("broken", lambda: 1 / 0)
    line = json.loads(capsys.readouterr().out)
    assert line["check"] == "broken" and line["ok"] is False and "ZeroDivisionError" in line["error"]
    assert "ValueError" in gpu_check.in_fork(lambda: int("one"))["error"]
    assert "exit code 3" in gpu_check.in_fork(lambda: os._exit(3))["error"]
    assert gpu_check.in_fork(lambda: {"bad_fork": False}) == {"bad_fork": False}


@pytest.mark.skipif(torch.version.cuda is None, reason="torch without CUDA has no bad forks")
def test_fork_after_cuda_was_queried_fails_the_check(gpu_check):
    def check():
        torch.cuda.is_available()
        return {"ok": gpu_check.fork_hygiene(gpu_check.StandIn())[0]}

    assert gpu_check.in_fork(check) == {"ok": False}


def test_step_times_in_another_unit_fail_the_check(gpu_check):
    in_milliseconds = gpu_check.StandIn()
    in_milliseconds.elapsed_s = lambda first, last: (last - first) * 1e3
    ok, figures = gpu_check.step_timer(in_milliseconds)
    assert not ok and figures["host_bound_median_ratio"] < 0.01


FREED, KEPT, UNUSED = [100, 500, 103, 500, 101, 500, 100], [100, 500, 100, 500, 160, 500, 160], [100] * 7


@pytest.mark.parametrize(("memory_mb", "passes"), [(FREED, True), (KEPT, False), (UNUSED, False)])
def test_memory_has_to_rise_and_come_back(gpu_check, monkeypatch, memory_mb, passes):
    def run(study, specs, listener):
        for spec in specs:
            listener(TrialReported(spec, {"epoch": 1}))
            listener(TrialEnded(TrialResult(spec, TrialState.FINISHED, wall_s=0.5, startup_s=0.1)))

    monkeypatch.setattr(gpu_check, "MEMORY_SETTLE_S", 0.0)
    readings = map(float, memory_mb)
    device = SimpleNamespace(name="cpu", num_trials=2, memory_mb=lambda: next(readings))
    ok, figures = gpu_check.memory_after_trials(device, SimpleNamespace(run=run))
    assert ok is passes and len(figures["left_mb"]) == 3 and figures["trial_s"] == [0.5, 0.5]
