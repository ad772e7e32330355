"""Check raypar's CUDA paths on one GPU; needs neither Ray nor MLflow nor a network.

    PYTHONPATH=. python3 benchmarks/gpu_check.py

prints one JSON line a check ({"check": ..., "ok": ..., figures, "seconds": ...}) and exits with 1 if a check failed.
`--dry-run` runs the same code on the CPU, with stand-ins for what only a GPU has: the clock for CUDA events, the
resident memory of the ranks for the device's memory. It shows that the script works, and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import psutil
import torch
from common import checked, scratch
from torch import nn

from raypar.provenance import cpu_model
from raypar.run.local import LocalRunner
from raypar.run.ranks import BASE_PRELOAD
from raypar.run.runner import Event, TrialEnded, TrialReported
from raypar.study.study import Study
from raypar.study.trial import TrialResult
from raypar.train.job import RunSettings
from raypar.train.loop import StepTimer
from raypar.workloads.digits import digits

Figures = dict[str, Any]

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"  # torch.cuda.is_available() then asks NVML and leaves CUDA alone
FORK_TIMEOUT_S = 60
MEMORY_TOLERANCE_MB = 8.0
MEMORY_SETTLE_S = 2.0  # a driver may free a context shortly after its process has ended
NUM_STEPS = 100
LOADERS = (
    {"loader": "resident"},
    {"loader": "dataloader", "pin_memory": True, "num_loader_workers": 0},
    {"loader": "dataloader", "pin_memory": True, "num_loader_workers": 2},
)
# After an epoch of 24 steps, the accuracy is about 0.9; that of guessing among 10 classes is 0.1, its loss log(10).
MIN_ACCURACY = 0.3
MAX_LOSS = math.log(10)
LOSS_TOLERANCE = 1e-3  # relative; all loaders serve the same batches in the same order


# ---- devices


class Device(Protocol):
    """What is checked.

    Attributes:
        name: as a study's ``device`` has it.
        widths: of the step timer's models: one whose steps wait for the host, and one whose steps wait for the device.
        max_deviation: allowed between two measurements of the same steps, relative.
        num_trials: warm trials whose memory is looked at.
    """

    name: str
    widths: tuple[int, int]
    max_deviation: float
    num_trials: int

    def stamp(self) -> Any:
        """Mark the point that the device's work has reached."""
        ...

    def elapsed_s(self, first: Any, last: Any) -> float:
        """Return the seconds between two stamps, once the device has reached them."""
        ...

    def memory_mb(self) -> float:
        """Return the memory in use on the device, by all processes."""
        ...


class Gpu:
    name = "cuda"
    widths = (64, 4096)
    max_deviation = 0.05
    num_trials = 10

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_s(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def memory_mb(self) -> float:
        free, total = torch.cuda.mem_get_info(0)
        return (total - free) / 2**20


class StandIn:
    name = "cpu"
    widths = (64, 256)
    max_deviation = 0.5  # the stand-in shares its cores with whatever else runs
    num_trials = 2

    def stamp(self) -> float:
        return time.perf_counter()

    def elapsed_s(self, first: float, last: float) -> float:
        return last - first

    def memory_mb(self) -> float:
        """Return the resident memory of all ranks: the children of this process's children (its fork server)."""
        ranks = [rank for child in psutil.Process().children() for rank in child.children(recursive=True)]
        return sum(map(_resident_mb, ranks))


def _resident_mb(process: psutil.Process) -> float:
    try:
        return process.memory_info().rss / 2**20
    except psutil.NoSuchProcess:
        return 0.0


# ---- checks: each returns whether it passed, and its figures


def fork_hygiene(device: Device) -> tuple[bool, Figures]:
    """After the imports of the fork server, a fork of this process can use the device.

    The figures include what becomes of such a fork if a preloaded module calls ``torch.cuda.is_available()``, with and
    without `NVML_CHECK`; neither is required to work. This process must not have used CUDA yet.
    """
    for name in (*BASE_PRELOAD, *digits.preload):
        importlib.import_module(name)

    def use() -> Figures:
        is_bad_fork = torch.cuda._is_in_bad_fork()
        ones = torch.ones(64, 64, device=device.name)
        return {"bad_fork": is_bad_fork, "matmul": bool((ones @ ones == 64).all())}

    def use_after_is_available(nvml_check: str) -> Figures:
        os.environ[NVML_CHECK] = nvml_check
        is_available = torch.cuda.is_available()
        return {"is_available": is_available, **in_fork(use)}

    is_initialized, fork = torch.cuda.is_initialized(), in_fork(use)
    ok = not is_initialized and fork.get("bad_fork") is False and fork.get("matmul") is True
    return ok, {
        "parent_initialized": is_initialized,
        "fork": fork,
        # Each in a separate fork: is_available() marks a process for good.
        "after_is_available": in_fork(lambda: use_after_is_available("0")),
        "after_is_available_by_nvml": in_fork(lambda: use_after_is_available("1")),
    }


def in_fork(function: Callable[[], Figures]) -> Figures:
    """Return what the function returns in a fork of this process, or ``{"error": ...}``."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(FORK_TIMEOUT_S)  # a broken fork may hang rather than raise
        try:
            answer = function()
        except Exception as error:
            answer = {"error": _one_line(error)}
        try:
            os.write(writer, json.dumps(answer).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    _, status = os.waitpid(pid, 0)
    if not text:
        return {"error": f"ended without an answer, exit code {os.waitstatus_to_exitcode(status)}"}
    return dict(json.loads(text))


def step_timer(device: Device) -> tuple[bool, Figures]:
    """`StepTimer` agrees with the device's stamps on small training loops, in total and per step."""
    ok, figures = True, {}
    for kind, width in zip(("host_bound", "device_bound"), device.widths, strict=True):
        ratios = _timed_loop(device, width)
        figures |= {f"{kind}_{key}": value for key, value in ratios.items()}
        ok = ok and all(abs(value - 1) <= device.max_deviation for key, value in ratios.items() if "ratio" in key)
    return ok, figures


def _timed_loop(device: Device, width: int) -> Figures:
    where = torch.device(device.name, 0 if device.name == "cuda" else None)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).to(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(width, width, device=where)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    for _ in range(5):  # kernels are chosen, and memory is allocated
        step()
    timer = StepTimer(where)
    timer.start()
    stamps = [device.stamp()]
    for _ in range(NUM_STEPS):
        step()
        timer.lap()
        stamps.append(device.stamp())
    timer.stop()
    total_s = device.elapsed_s(stamps[0], stamps[-1])
    step_s = statistics.median(device.elapsed_s(a, b) for a, b in itertools.pairwise(stamps))
    steps_s = timer.step_times_s()
    assert len(steps_s) == NUM_STEPS
    return {
        "step_s": step_s,
        "total_ratio": timer.total_s / total_s,
        "sum_ratio": sum(steps_s) / total_s,
        "median_ratio": statistics.median(steps_s) / step_s,
    }


def memory_after_trials(device: Device, runner: LocalRunner) -> tuple[bool, Figures]:
    """Every trial, in a fork of the warm server, gives the device's memory back when it ends."""
    during_mb: list[float] = []
    left_mb: list[float] = []

    def listen(event: Event) -> None:
        if isinstance(event, TrialReported):
            during_mb.append(device.memory_mb() - base_mb)
        elif isinstance(event, TrialEnded):
            left_mb.append(_settled_mb(device, base_mb) - base_mb)

    base_mb = device.memory_mb()  # the server is still importing: what it might take on the device is in `left_mb`
    # The first trial waits for the server's imports: it is no warm one.
    results = run_trials(runner, {"device": device.name, "epochs": 1}, 1 + device.num_trials, listen)
    walls_s = [result.wall_s or math.nan for result in results]
    ok = max(left_mb) <= MEMORY_TOLERANCE_MB and min(during_mb) > MEMORY_TOLERANCE_MB
    return ok, {
        "base_mb": base_mb,
        "during_mb": max(during_mb),
        "left_mb": left_mb,
        "first_trial_s": walls_s[0],
        "trial_s": walls_s[1:],
        "median_trial_s": statistics.median(walls_s[1:]),
        "median_startup_s": statistics.median(result.startup_s or math.nan for result in results[1:]),
    }


def _settled_mb(device: Device, base_mb: float) -> float:
    deadline_s = time.monotonic() + MEMORY_SETTLE_S
    while (memory_mb := device.memory_mb()) - base_mb > MEMORY_TOLERANCE_MB and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return memory_mb


def loaders(device: Device, runner: LocalRunner) -> tuple[bool, Figures]:
    """Each loader trains an epoch of digits, and all come to the same losses."""
    ok, figures, losses = True, {}, []
    for config in LOADERS:
        (result,) = run_trials(runner, {"device": device.name, "epochs": 1, **config}, 1)
        name = "_".join(["resident"] if len(config) == 1 else ["dataloader", str(config["num_loader_workers"])])
        final = result.final
        losses.append(final["train_loss"])
        ok = ok and final["train_loss"] < MAX_LOSS and final["accuracy"] > MIN_ACCURACY
        figures |= {
            f"{name}_samples_per_s": result.throughput_samples_per_s,
            f"{name}_train_loss": final["train_loss"],
            f"{name}_accuracy": final["accuracy"],
        }
    difference = (max(losses) - min(losses)) / max(losses)
    return ok and difference <= LOSS_TOLERANCE, {**figures, "loss_difference": difference}


def run_trials(
    runner: LocalRunner,
    config: Mapping[str, Any],
    num_trials: int,
    listener: Callable[[Event], None] = lambda _: None,
) -> list[TrialResult]:
    """Run trials of digits in sequence, each with another seed; a failed trial ends the check."""
    study = Study(workload=digits, config=dict(config), name="gpu_check", num_repeats=num_trials)
    results: list[TrialResult] = []

    def listen(event: Event) -> None:
        listener(event)
        if isinstance(event, TrialEnded):
            results.append(checked(event.result))

    runner.run(study, study.trials(), listen)
    return results


def environment(device: Device) -> tuple[bool, Figures]:
    """The device is there, as seen by a fork: this process leaves CUDA alone until the forks have been checked."""

    def look() -> Figures:
        name = torch.cuda.get_device_name(0) if device.name == "cuda" else cpu_model()
        return {"device": device.name, "device_name": name}

    figures = in_fork(look)
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    return "error" not in figures, {**figures, **versions, "cores": os.cpu_count()}


# ---- one line a check


def run_check(name: str, check: Callable[[], tuple[bool, Figures]]) -> bool:
    """Run a check and print its line; an error fails the check, and the next one is run all the same."""
    begin_s = time.perf_counter()
    try:
        ok, figures = check()
    except (Exception, SystemExit) as error:
        ok, figures = False, {"error": _one_line(error)}
    line = {"check": name, "ok": ok, **figures, "seconds": time.perf_counter() - begin_s}
    print(json.dumps(_rounded(line)), flush=True)
    return ok


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with stand-ins for what only a GPU has")
    device: Device = StandIn() if parser.parse_args().dry_run else Gpu()
    torch.set_num_threads(1)  # small layers gain nothing by more, and a dry run shares its cores
    if not run_check("environment", lambda: environment(device)):
        return 1
    passed = [
        run_check("fork_hygiene", lambda: fork_hygiene(device)),
        run_check("step_timer", lambda: step_timer(device)),
    ]
    with scratch() as folder, LocalRunner(RunSettings(log_dir=folder, preload=digits.preload)) as runner:
        passed += [
            run_check("memory_after_trials", lambda: memory_after_trials(device, runner)),
            run_check("loaders", lambda: loaders(device, runner)),
        ]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
