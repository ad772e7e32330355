"""Check raypar's CUDA paths on one GPU; needs neither Ray nor MLflow nor a network.

    PYTHONPATH=. python3 benchmarks/gpu_check.py

prints one JSON line per check ({"check": ..., "ok": ..., figures, "seconds": ...}) and exits with 1 if a check failed.
The last line has the seconds of all of them: 8 minutes at most. `--only` runs some of them.

`--dry-run` runs the same code on the CPU, with stand-ins for what only a GPU has: the clock for CUDA events, the
resident memory of the ranks for the device's memory, a made-up package for its energy, gloo for NCCL. It shows that the
script works, and nothing about a GPU.

`--studies` runs, instead of the checks, the studies of published comparisons of a GPU with a CPU. They need MNIST and
Fashion-MNIST, in the folder that RAYPAR_DATA_DIR names, or in the cache.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from common import FOLDER, MARK, STUDIES, checked, failure, scratch
from gpu_devices import Device, Gpu, StandIn
from gpu_studies import COMPARISONS, compare
from gpu_trials import NETWORKS, all_reducing, hoarding, metered
from torch import nn

from raypar import observe
from raypar.gpus import driver_versions
from raypar.measure.steps import StepTimer
from raypar.observe.ranks import read_ranks
from raypar.parallel.strategy import check_compatible
from raypar.provenance import cpu_model
from raypar.run.forkserver import NVML_CHECK
from raypar.run.local import LocalRunner
from raypar.run.ranks import BASE_PRELOAD, LATE_PRELOAD
from raypar.run.runner import Event, TrialEnded, TrialReported
from raypar.study.observation import ObservedRank
from raypar.study.profile import BACKWARD, FORWARD, OPTIMIZER
from raypar.study.strategy import STRATEGIES
from raypar.study.study import Study
from raypar.study.trial import FailureKind, TrialResult, TrialState, gang_step_times_s
from raypar.study.workload import Workload
from raypar.train.job import NO_PROFILING, Profiling, RunSettings
from raypar.train.worker import SHARED_GPU
from raypar.workloads.digits import digits
from raypar.workloads.wide_mlp import wide_mlp

Figures = dict[str, Any]

TWO_RANKS_A_GPU = {SHARED_GPU: "1"}  # older versions of NCCL ignore it and refuse the second rank
PRELOAD = ("gpu_trials", *digits.preload)
FORK_TIMEOUT_S = 60
TRIAL_TIMEOUT_S = 120.0
MEMORY_TOLERANCE_MB = 8.0
MEMORY_SETTLE_S = 2.0  # a driver may free a context shortly after its process has ended
NUM_STEPS = 100
MAX_OBSERVED_GAP = 0.05  # of a script's own step time, and of its parts as shares of a step
PROFILING = Profiling(num_steps=20, instead_of_training=True)
STEPS_PER_EPOCH = 32
NUM_REGIONS = 4
WARMUPS_S = {"10_steps": 0.0, "1_s": 1.0}  # beside 10 steps
POWER_INTERVAL_S = 0.05
LOADERS = (
    {"loader": "resident"},
    {"loader": "dataloader", "pin_memory": True, "num_loader_workers": 0},
    {"loader": "dataloader", "pin_memory": True, "num_loader_workers": 2},
)
# After an epoch of 24 steps, the accuracy is about 0.9. Guessing among 10 classes gives 0.1 and a loss of log(10).
MIN_ACCURACY = 0.3
MAX_LOSS = math.log(10)
DEPTH = 4  # of the perceptron whose memory is computed
MAX_MEMORY_DEVIATION = 0.10
# Limits as shares of the memory by hand, and what becomes of a trial with each.
MEMORY_SHARES = {0.7: TrialState.DOES_NOT_FIT, 1.5: TrialState.FINISHED}
LOSS_TOLERANCE = 1e-3  # relative; the same batches in the same order, in fp32
LOCAL_SGD_TOLERANCE = 0.05
# Against fp32, relative. fp16 may skip its first steps, until the scale of its loss fits; skipping all makes 0.2.
PRECISION_TOLERANCES = {"fp32": LOSS_TOLERANCE, "fp64": LOSS_TOLERANCE, "tf32": 0.01, "bf16": 0.05, "fp16": 0.1}


class Bench:
    """Device under check, and the runners of trials on it.

    Attributes:
        spawned: runner whose ranks are fresh interpreters.
        deadline_s: by ``time.monotonic``, when no further precision is begun.

    Args:
        profiling: of the warm runner's first repeats.
    """

    def __init__(self, device: Device, log_dir: Path, profiling: Profiling) -> None:
        self.device = device
        self._settings = RunSettings(
            log_dir=log_dir,
            environment=TWO_RANKS_A_GPU,
            sys_path=(str(FOLDER), str(STUDIES)),  # of gpu_trials, and of the modules that studies share
            preload=PRELOAD,
            trial_timeout_s=TRIAL_TIMEOUT_S,
            profiling=profiling,
        )
        self.spawned = LocalRunner(replace(self._settings, isolation="fresh", profiling=NO_PROFILING))
        self.deadline_s = time.monotonic() + device.max_total_s
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @cached_property
    def warm(self) -> LocalRunner:
        """Runner whose ranks are forks of a warm server, which starts with the first use."""
        return self._stack.enter_context(LocalRunner(self._settings))


# ---- checks: each returns whether it passed, and its figures


def fork_hygiene(bench: Bench) -> tuple[bool, Figures]:
    """After the imports of the fork server, a fork of this process can use the device.

    The figures include what becomes of such a fork if a preloaded module calls ``torch.cuda.is_available()``, with and
    without `NVML_CHECK`; neither is required to work. This process must not have used CUDA yet.
    """
    for name in (*BASE_PRELOAD, LATE_PRELOAD, *PRELOAD):
        importlib.import_module(name)

    def use() -> Figures:
        is_bad_fork = torch.cuda._is_in_bad_fork()
        ones = torch.ones(64, 64, device=bench.device.name)
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
    """Call the function in a fork of this process; return its value, or ``{"error": ...}``."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(FORK_TIMEOUT_S)  # a broken fork may hang rather than raise
        try:
            answer = function()
        except Exception as error:
            answer = {"error": _described(error)}
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


def step_timer(bench: Bench) -> tuple[bool, Figures]:
    """`StepTimer` agrees with the device's stamps on small training loops, in total and per step."""
    ok, figures, device = True, {}, bench.device
    for kind, width in zip(("host_bound", "device_bound"), device.widths, strict=True):
        ratios = _timed_loop(device, width)
        figures |= {f"{kind}_{key}": value for key, value in ratios.items()}
        ok = ok and all(abs(value - 1) <= device.max_deviation for key, value in ratios.items() if "ratio" in key)
    return ok, figures


def _timed_loop(device: Device, width: int) -> Figures:
    step, timer = training_step(device, width)
    for _ in range(5):  # kernels are chosen, and memory is allocated
        step()
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


def training_step(device: Device, width: int) -> tuple[Callable[[], None], StepTimer]:
    """Return a function that trains a small model for a step, and a timer of its device."""
    where = torch.device(device.name, 0 if device.name == "cuda" else None)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).to(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(width, width, device=where)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step, StepTimer(where)


def memory_after_trials(bench: Bench) -> tuple[bool, Figures]:
    """Every trial, in a fork of the warm server, frees the device's memory at its end."""
    device = bench.device
    during_mb: list[float] = []
    left_mb: list[float] = []

    def listen(event: Event) -> None:
        if isinstance(event, TrialReported):
            during_mb.append(device.memory_mb() - base_mb)
        elif isinstance(event, TrialEnded):
            left_mb.append(settled_mb(device, base_mb) - base_mb)

    base_mb = device.memory_mb()  # before the server starts, so that `left_mb` includes its memory
    # The first trial is not warm: its fork is the server's first.
    results = run_trials(bench.warm, {"device": device.name}, 1 + device.num_trials, listener=listen)
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


def settled_mb(device: Device, base_mb: float) -> float:
    """Return the memory in use once it is back at the base, or after `MEMORY_SETTLE_S`."""
    deadline_s = time.monotonic() + MEMORY_SETTLE_S
    while (memory_mb := device.memory_mb()) - base_mb > MEMORY_TOLERANCE_MB and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return memory_mb


def warm_against_spawned(bench: Bench) -> tuple[bool, Figures]:
    """A trial in a fork of the warm server takes less time than one in a spawned process."""
    config, num_trials = {"device": bench.device.name}, bench.device.num_spawned
    # The first may wait for the server's imports.
    warm_s = [result.wall_s or math.nan for result in run_trials(bench.warm, config, 1 + num_trials)[1:]]
    spawned_s = [result.wall_s or math.nan for result in run_trials(bench.spawned, config, num_trials)]
    ratio = statistics.median(spawned_s) / statistics.median(warm_s)
    return ratio > bench.device.min_spawned_ratio, {"warm_s": warm_s, "spawned_s": spawned_s, "ratio": ratio}


def loaders(bench: Bench) -> tuple[bool, Figures]:
    """Each loader trains an epoch of digits, with equal losses."""
    ok, figures, losses = True, {}, []
    for config in LOADERS:
        (result,) = run_trials(bench.warm, {"device": bench.device.name, **config})
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


def warm_up(bench: Bench) -> tuple[bool, Figures]:
    """Steps right after a second of warm-up, or a trial's own warm-up, are as fast as later ones.

    ``10_steps_ratio`` is the ratio after only 10 steps: the first quarter's median step over the last quarter's.
    """
    device, figures = bench.device, {}
    for name, seconds in WARMUPS_S.items():
        step, timer = training_step(device, device.widths[1])
        time.sleep(device.idle_s)
        _steps(timer, step, 10)
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            _steps(timer, step, 10)
        figures[f"{name}_ratio"] = slow_start(_steps(timer, step, NUM_STEPS))
    time.sleep(device.idle_s)
    (result,) = run_trials(bench.warm, {**steady_config(device), "epochs": 4}, workload=metered)
    figures |= {"trial_ratio": slow_start(gang_step_times_s(result)), "trial_warmup_s": result.warmup_s}
    ok = all(figures[f"{name}_ratio"] <= 1 + device.max_slow_start for name in ("1_s", "trial"))
    return ok, figures


def _steps(timer: StepTimer, step: Callable[[], None], num_steps: int) -> list[float]:
    timer.start()
    for _ in range(num_steps):
        step()
        timer.lap()
    timer.stop()
    return timer.step_times_s()


def slow_start(steps_s: Sequence[float]) -> float:
    """Return the median of the first quarter of the steps over the median of the last quarter."""
    quarter = len(steps_s) // 4
    return statistics.median(steps_s[:quarter]) / statistics.median(steps_s[-quarter:])


def steady_config(device: Device) -> Figures:
    """Return the options of a perceptron, to train `metered` by, that keeps the device busy."""
    width = device.widths[1]
    size = {"width": width, "batch_size": width // 2, "num_points": STEPS_PER_EPOCH * width // 2}
    return {"device": device.name, **size, "package_w": device.package_w}


def energy(bench: Bench) -> tuple[bool, Figures]:
    """The energy of some seconds of steady work is the device's power times the time.

    The power is averaged from the first evaluation on, when it is steady.
    """
    device, reported_s = bench.device, []
    config = steady_config(device)
    (first,) = run_trials(bench.warm, config, workload=metered)
    regions = {"eval_every_steps": STEPS_PER_EPOCH * math.ceil(device.region_s / (first.train_time_s or math.nan))}
    regions["epochs"] = NUM_REGIONS * regions["eval_every_steps"] // STEPS_PER_EPOCH

    def listen(event: Event) -> None:
        if isinstance(event, TrialReported):
            reported_s.append(time.monotonic())

    with sampled(device.power_w) as samples:
        (result,) = run_trials(bench.warm, {**config, **regions}, workload=metered, listener=listen)
    start_s = reported_s[0] + device.power_average_s
    power_w = statistics.fmean(watts for at_s, watts in samples if start_s <= at_s <= reported_s[-1])
    expected_j, reason = power_w * (result.train_time_s or math.nan), result.conditions.to_stored().get("no_energy", "")
    ratio = math.nan if result.energy_j is None else result.energy_j / expected_j
    return abs(ratio - 1) <= device.max_energy_deviation, {
        "energy_j": result.energy_j,
        "expected_j": expected_j,
        "ratio": ratio,
        "power_w": power_w,
        "train_time_s": result.train_time_s,
        "energy_of": result.conditions.to_stored().get("energy_of"),
        **({"no_energy": reason} if reason else {}),
    }


@contextlib.contextmanager
def sampled(read: Callable[[], float]) -> Iterator[list[tuple[float, float]]]:
    """Yield a list that a thread fills with (time, reading) during the block."""
    samples: list[tuple[float, float]] = []
    is_over = threading.Event()

    def sample() -> None:
        while not is_over.wait(POWER_INTERVAL_S):
            samples.append((time.monotonic(), read()))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        is_over.set()
        thread.join()


def nccl(bench: Bench) -> tuple[bool, Figures]:
    """One rank can reduce, and two ranks on the device train with every strategy and the losses of one rank.

    If the collectives refuse two ranks on a device, the strategies are skipped, with the reason.
    """
    config = {"device": bench.device.name, "hidden_size": 256}
    (alone,) = run_trials(bench.warm, config, workload=all_reducing)
    loss = alone.final["train_loss"]
    figures: Figures = {"one_rank_loss": loss}
    (pair,) = trial_results(bench.warm, {**config, "num_workers": 2}, workload=all_reducing)
    if pair.failure is not None:
        return True, {**figures, "two_ranks": f"skipped: {one_line(pair.failure.message)}"}
    ok = True
    for strategy in STRATEGIES:
        split = {"tensor_size": 2} if strategy == "hybrid" else {}  # of two ranks: no pipeline beside it
        of_strategy = {**config, **split, "num_workers": 2, "strategy": strategy}
        if refusal := check_compatible(digits, study_of(digits, of_strategy).trial({}, 0).config):
            figures[strategy] = f"skipped: {refusal[0]}"
            continue
        (result,) = trial_results(bench.warm, of_strategy)
        if result.failure is not None:
            ok, figures[strategy] = False, f"failed: {one_line(result.failure.message)}"
            continue
        figures[f"{strategy}_loss"] = result.final["train_loss"]
        deviation = figures[f"{strategy}_deviation"] = abs(result.final["train_loss"] / loss - 1)
        # Ranks of local SGD diverge between averages.
        ok = ok and deviation <= (LOCAL_SGD_TOLERANCE if strategy == "local_sgd" else LOSS_TOLERANCE)
    return ok, figures


def peak_memory(bench: Bench) -> tuple[bool, Figures]:
    """A perceptron's peak matches its backward pass, computed by hand, and with a lower limit it does not fit.

    By hand: weights and Adam's two moments, the batch and every ReLU's output, and two gradients of activations. A GPU
    also holds the data and its libraries' workspace, for which `MAX_MEMORY_DEVIATION` leaves room.
    """
    width, num_features = bench.device.widths[1], 256
    batch_size = 4 * width
    sizes = {"width": width, "depth": DEPTH, "num_features": num_features, "num_points": 2 * batch_size}
    config = {"device": bench.device.name, **sizes, "batch_size": batch_size}
    (result,) = run_trials(bench.warm, config, workload=wide_mlp)
    weights_bytes = 4 * (num_features * width + (DEPTH - 1) * width**2 + 10 * width)
    expected_bytes = 3 * weights_bytes + 4 * batch_size * (num_features + (DEPTH + 2) * width)
    deviation = (result.conditions.largest("peak_memory_bytes") or math.nan) / expected_bytes - 1
    states = {}
    for share in MEMORY_SHARES:
        limited = {**config, "max_memory": f"{share * expected_bytes:.0f}B"}
        (of_limit,) = trial_results(bench.warm, limited, workload=wide_mlp)
        states[share] = of_limit.state
    return abs(deviation) <= MAX_MEMORY_DEVIATION and list(states.values()) == list(MEMORY_SHARES.values()), {
        "expected_bytes": expected_bytes,
        **{key: value for key, value in result.conditions.to_stored().items() if key.startswith("peak_")},
        "deviation": deviation,
        "with_limits": {f"{share:g}": state for share, state in states.items()},
    }


def out_of_memory(bench: Bench) -> tuple[bool, Figures]:
    """A trial out of memory is classified as such, the next one in the same server is healthy, and both free memory."""
    device = bench.device
    config, base_mb = {"device": device.name}, device.memory_mb()
    (failed,) = trial_results(bench.warm, {**config, "is_limited": device.limits_memory}, workload=hoarding)
    left_mb = [settled_mb(device, base_mb) - base_mb]
    (healthy,) = run_trials(bench.warm, config)
    left_mb.append(settled_mb(device, base_mb) - base_mb)
    kind = failed.failure.kind if failed.failure else None
    expected = FailureKind.OUT_OF_MEMORY if device.name == "cpu" else FailureKind.DOES_NOT_FIT
    ok = kind is expected and healthy.final["accuracy"] > MIN_ACCURACY
    return ok and max(left_mb) <= MEMORY_TOLERANCE_MB, {
        "failure": kind,
        "message": one_line(failed.reason),
        "left_mb": left_mb,
        "healthy_accuracy": healthy.final["accuracy"],
        "healthy_trial_s": healthy.wall_s,
    }


def profile(bench: Bench) -> tuple[bool, Figures]:
    """A profile has work of the device in each part of a step, and a model FLOP utilisation below 1."""
    device = bench.device
    config = {"device": device.name, "hidden_size": device.widths[1], "batch_size": 512}
    (result,) = run_trials(bench.warm, config, is_profiled=True)
    of_trial = result.profile
    if of_trial is None:
        return False, {"error": "no step was recorded"}
    parts, utilisation = of_trial.mean.parts, of_trial.utilisation
    ok = all(parts[part] > 0 for part in (FORWARD, BACKWARD, OPTIMIZER))
    return ok and utilisation is not None and 0 < utilisation < device.max_utilisation, {
        **{f"{part}_s": seconds for part, seconds in parts.items()},
        "step_s": of_trial.step_s,
        "overhead": of_trial.overhead,
        "utilisation": utilisation,
        "peak_flops": of_trial.peak_flops,
    }


def observed_script(bench: Bench) -> tuple[bool, Figures]:
    """Observe a script on the device, eager and compiled: its times, what waits for the GPU, and no further graphs.

    The script times its parts with events of its own.
    """
    kind = bench.device.name
    own, rank = _observed_run(kind)
    step_s = rank.breakdown.step_s
    shares = {name: seconds / step_s for name, seconds in rank.breakdown.parts.items() if seconds}
    expected = {name: seconds / own["step_s"] for name, seconds in own["parts"].items()}
    figures: Figures = {
        "step_ms": own["step_s"] * 1e3,
        "observed_ms": step_s * 1e3,
        "reads_per_step": rank.num_item_calls,
        "blocking_copies_per_step": rank.num_blocking_copies,
        "parts": shares,
        "parts_by_hand": expected,
        "num_losses": len(rank.losses),
        "problems": list(rank.problems),
    }
    ok = _is_observed(own, rank)
    counted = round(rank.num_item_calls), round(rank.num_blocking_copies)
    if kind != "cuda":  # the parts of a small step depend on what else the host does
        return ok and counted == (0, 0), figures
    ok = ok and counted == (1, 2)
    ok = ok and all(abs(shares.get(name, 0.0) - share) < MAX_OBSERVED_GAP for name, share in expected.items())
    own, rank = _observed_run(kind, "--compile")
    figures |= {
        "compiled_step_ms": own["step_s"] * 1e3,
        "compiled_observed_ms": rank.breakdown.step_s * 1e3,
        "num_graphs": own["num_graphs"],
        "compiled_problems": list(rank.problems),
    }
    return ok and _is_observed(own, rank) and own["num_graphs"] == 1, figures


def _observed_run(*words: str) -> tuple[dict[str, Any], ObservedRank]:
    """Run the script, and return what it prints and what is observed of it."""
    with scratch() as folder:
        changes = observe.environment(folder, os.environ, {})
        command = [sys.executable, str(FOLDER / "observed" / "device.py"), *words]
        done = subprocess.run(
            command, env={**os.environ, **changes}, capture_output=True, text=True, timeout=TRIAL_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise failure("device.py", done.returncode, done.stdout + done.stderr)
        ranks, why_not = read_ranks(folder)
    if len(ranks) != 1:
        raise SystemExit(f"device.py: {len(ranks)} ranks were observed: {why_not}")
    return dict(json.loads(done.stdout.partition(MARK)[2])), ranks[0].rank


def _is_observed(own: Mapping[str, Any], rank: ObservedRank) -> bool:
    """Return whether the time of a step is that which the script measures, and its losses are known."""
    is_same = abs(rank.breakdown.step_s / own["step_s"] - 1) < MAX_OBSERVED_GAP
    return is_same and not rank.problems and len(rank.losses) > 100


def precisions(bench: Bench) -> tuple[bool, Figures]:
    """Each network has about the loss of its fp32 in each precision, compiled or not.

    The figures of a training are its loss, the relative deviation of the loss, the median step, and the speedup by
    compilation.
    """
    figures, not_run, failures = {}, [], {}
    losses: dict[str, float] = {}
    for each in bench.device.combinations:
        if time.monotonic() > bench.deadline_s:
            not_run.append(each.name)
            continue
        workload, options = NETWORKS[each.network]
        config = {**options, "device": bench.device.name, "precision": each.precision, "compile": each.compiles}
        (result,) = trial_results(bench.warm, config, workload=workload)
        if result.failure is not None:
            failures[each.name] = one_line(result.failure.message)
            continue
        losses[each.name] = result.final["train_loss"]
        reference, eager = each._replace(precision="fp32", compiles=False).name, each._replace(compiles=False).name
        deviation = abs(losses[each.name] / losses.get(reference, math.nan) - 1)
        step_s = statistics.median(gang_step_times_s(result))
        figures[each.name] = {"loss": losses[each.name], "deviation": deviation, "step_s": step_s}
        if each.compiles and eager in figures:
            figures[each.name]["speedup"] = figures[eager]["step_s"] / step_s
        if not deviation <= PRECISION_TOLERANCES[each.precision]:
            failures[each.name] = f"its loss deviates from the loss of {reference} by {deviation:.2g}"
    return not failures and bool(figures), {**figures, "failures": failures, "not_run": not_run}


# ---- trials


def run_trials(runner: LocalRunner, config: Mapping[str, Any], num_trials: int = 1, **rest: Any) -> list[TrialResult]:
    """Run trials as `trial_results` does; a failed one ends the check."""
    return [checked(result) for result in trial_results(runner, config, num_trials, **rest)]


def trial_results(
    runner: LocalRunner,
    config: Mapping[str, Any],
    num_trials: int = 1,
    *,
    workload: Workload = digits,
    listener: Callable[[Event], None] = lambda _: None,
    is_profiled: bool = False,
) -> list[TrialResult]:
    """Run trials of an epoch (unless the config has another number) in sequence, each with another seed.

    Args:
        is_profiled: run a single one, for its profile.
    """
    study = study_of(workload, config)
    results: list[TrialResult] = []

    def listen(event: Event) -> None:
        listener(event)
        if isinstance(event, TrialEnded):
            results.append(event.result)

    # Runners profile a point's first repeat, which is number 0.
    repeats = range(1) if is_profiled else range(1, 1 + num_trials)
    runner.run(study, [study.trial({}, repeat) for repeat in repeats], listen)
    return results


def study_of(workload: Workload, config: Mapping[str, Any]) -> Study:
    """Return a study of one point; no trial is run a second time."""
    return Study(workload=workload, config={"epochs": 1, **config}, name="gpu_check", max_retries=0)


# ---- one line per check


def environment(bench: Bench) -> tuple[bool, Figures]:
    """A fork sees the device; this process does not touch CUDA before the forks have been checked."""

    def look() -> Figures:
        name = torch.cuda.get_device_name(0) if bench.device.name == "cuda" else cpu_model()
        return {"device": bench.device.name, "device_name": name}

    figures = in_fork(look)
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "driver": driver_versions()[0]}
    versions |= {"python": platform.python_version(), "cores": os.cpu_count()}
    return "error" not in figures, {**figures, **versions}


# Checks in which this process does not touch CUDA come first: out of memory means that a trial does not fit only if the
# trial has the GPU alone.
CHECKS: Mapping[str, Callable[[Bench], tuple[bool, Figures]]] = {
    check.__name__: check
    for check in (
        *(fork_hygiene, memory_after_trials, warm_against_spawned, loaders, energy, nccl, peak_memory, out_of_memory),
        *(profile, observed_script, step_timer, warm_up, precisions),
    )
}


def run_check(name: str, check: Callable[[], tuple[bool, Figures]]) -> bool:
    """Run a check and print its line; an error only fails this check."""
    begin_s = time.perf_counter()
    try:
        ok, figures = check()
    except (Exception, SystemExit) as error:
        ok, figures = False, {"error": _described(error)}
    print_line({"check": name, "ok": ok, **figures, "seconds": time.perf_counter() - begin_s})
    return ok


def print_line(line: Figures) -> None:
    print(json.dumps(_rounded(line)), flush=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None  # JSON has no NaN
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _described(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}")


def one_line(text: str) -> str:
    return " ".join(text.split())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with stand-ins for what only a GPU has")
    parser.add_argument("--studies", action="store_true", help="published comparisons of a GPU with a CPU, no checks")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), metavar="CHECK", help="some checks")
    args = parser.parse_args()
    begin_s = time.perf_counter()
    device: Device = StandIn() if args.dry_run else Gpu()
    torch.set_num_threads(1)  # more don't help small layers, and a dry run shares its cores
    profiling = NO_PROFILING if args.studies else PROFILING
    with scratch() as folder, Bench(device, folder, profiling) as bench:
        if not run_check("environment", partial(environment, bench)):
            return 1
        if args.studies:
            checks = {
                each.name: partial(compare, each, bench.warm, device.name, is_dry_run=args.dry_run)
                for each in COMPARISONS
            }
        else:
            checks = {name: partial(check, bench) for name, check in CHECKS.items() if name in args.only}
        failed = [name for name, check in checks.items() if not run_check(name, check)]
    print_line({"check": "total", "ok": not failed, "failed": failed, "seconds": time.perf_counter() - begin_s})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
