"""Helpers of the benchmarks: arguments, interleaved rounds, child processes, raypar's trials, printed lines."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from raypar import Study, Workload, grid
from raypar.study.trial import TrialResult, TrialSpec
from raypar.train.affinity import allowed_cores, pin, topology
from raypar.workloads.datasets import DATA_DIR_VARIABLE, ensure_image_set

FOLDER = Path(__file__).resolve().parent
BASELINES = FOLDER / "baselines"
STUDIES = FOLDER.parent / "studies"
# For faultlab and netlab, which tests share with benchmarks, and for the workloads beside the studies.
sys.path += [str(FOLDER.parent / "tests"), str(STUDIES)]
# start_times.py also runs older checkouts, in which `main` is in raypar/cli/__init__.py.
_MAIN = "try: from raypar.cli.app import main\nexcept ImportError: from raypar.cli import main\nmain()"
RAYPAR = (sys.executable, "-P", "-c", _MAIN)
BUSY_LOAD = 0.5  # load average above which other work disturbs a measurement
MARK = "@@ "  # first characters of a line with a child's result
LOG_TAIL_CHARS = 3000
TITLE_WIDTH = 64


# ---- arguments


def parser_for(
    doc: str | None, *, rounds: int = 0, quick_rounds: int = 1, needs_mnist: bool = False, has_data: bool = False
) -> argparse.ArgumentParser:
    """Return a parser with the arguments that benchmarks share; the script's docstring is its help.

    Args:
        rounds: default of ``--rounds``; 0: the script has no rounds.
        quick_rounds: the rounds of ``--quick``.
        needs_mnist: the script can't run without MNIST.
        has_data: the script reads data sets, and skips those that are missing.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="show that it works; the figures mean little")
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds, help="[default: %(default)s]")
    if needs_mnist or has_data:
        parser.add_argument(
            "--data-dir", type=Path, help=f"the folder of the data sets [default: {DATA_DIR_VARIABLE}, else the cache]"
        )
    parser.set_defaults(needs_mnist=needs_mnist, quick_rounds=quick_rounds)
    return parser


def training_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a script that trains a workload once, for comparison with another."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("workload")
    parser.add_argument("--batch-size", type=int, required=True, help="over all ranks")
    parser.add_argument("--num-samples", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    return parser


def begin(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the arguments, check the data, and print title, machine and load."""
    args = parser.parse_args()
    if "data_dir" in args:
        if args.data_dir:
            os.environ[DATA_DIR_VARIABLE] = str(args.data_dir.absolute())
        if args.needs_mnist:
            ensure_image_set("MNIST")
    if args.quick and "rounds" in args:
        args.rounds = args.quick_rounds
    print(str(parser.description).strip().splitlines()[0])
    load = os.getloadavg()[0]
    print(f"{len(allowed_cores())} cores, {platform.machine()}, Python {platform.python_version()}, load {load:.2f}")
    warn_of_load(load, BUSY_LOAD)
    if args.quick:
        print("NOTE: --quick measures too little for meaningful figures")
    print(flush=True)
    return args


def warn_of_load(load: float, limit: float) -> None:
    """Print a note if the load average shows that other processes disturb the measurement."""
    if load > limit:
        print(f"NOTE: load average {load:.2f}, the machine is busy: trust the figures less than on an idle one")


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yield a folder that is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="raypar-benchmark-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


# ---- measuring


def interleaved(variants: Mapping[str, Callable[[], float]], num_rounds: int, seed: int = 0) -> dict[str, list[float]]:
    """Measure every variant once a round, in random order, so that drift affects all variants alike."""
    shuffled = random.Random(seed)
    values: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(num_rounds):
        for name in shuffled.sample(list(variants), len(variants)):
            begun_s = time.perf_counter()
            values[name].append(variants[name]())
            progress(f"round {i + 1}/{num_rounds}: {name}: {time.perf_counter() - begun_s:.1f} s")
    return values


@dataclass(frozen=True)
class Figure:
    """Median, extremes and number of the measured values."""

    value: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        """Summarize values."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    @classmethod
    def ratio(cls, above: Sequence[float], below: Sequence[float]) -> Figure:
        """Summarize the ratios of values that were measured side by side, round by round."""
        return cls.of([a / b for a, b in zip(above, below, strict=True)])

    def show(self, fmt: Callable[[float], str]) -> str:
        """Format as ``median [min … max], n = count``; a single value stands alone."""
        return fmt(self.value) + (f"  [{fmt(self.low)} … {fmt(self.high)}], n = {self.count}" if self.count > 1 else "")


# ---- printed lines


def print_row(title: str, text: str) -> None:
    """Print a figure that has no bar."""
    print(f"{title:<{TITLE_WIDTH}} {text}", flush=True)


def print_bar(
    title: str,
    figure: Figure | float,
    fmt: Callable[[float], str],
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    error: float | None = None,
) -> bool:
    """Print a figure, its bar if it has one, and whether the figure reaches the bar; return the latter.

    Args:
        error: standard error of a simulated figure, which may miss a bar by two of them; None: a measured figure.
    """
    if not isinstance(figure, Figure):
        figure = Figure.of([figure])
    shown = figure.show(fmt) + ("" if error is None else f" ± {fmt(error)}")
    bars = [f"{sign} {fmt(bar)}" for sign, bar in (("≥", at_least), ("≤", at_most)) if bar is not None]
    slack = 2 * (error or 0.0)
    is_reached = (at_least is None or figure.value >= at_least - slack) and (
        at_most is None or figure.value <= at_most + slack
    )
    verdict = f"   bar {', '.join(bars)}: {'reached' if is_reached else 'NOT REACHED'}" if bars else ""
    print_row(title, shown + verdict)
    return is_reached


def progress(text: str) -> None:
    """Print a line to standard error, apart from the results."""
    print(f"  … {text}", file=sys.stderr, flush=True)


def times(value: float) -> str:
    """Format a ratio, such as ``0.983×`` or ``64.2×``; bars differ in the third digit."""
    return f"{value:.3f}×" if value < 10 else f"{value:.1f}×"


def relative(value: float) -> str:
    """Format a relative difference, such as ``3.1e-07``."""
    return f"{value:.1e}"


# ---- processes


def run_raypar(folder: Path, *arguments: str | Path, **environment: str) -> float:
    """Run `raypar` in a folder, as a user does, and return the seconds from start to end of the process.

    Raises:
        SystemExit: it failed; with the end of its output.
    """
    begun_s = time.perf_counter()
    _output(folder, arguments, environment)
    return time.perf_counter() - begun_s


def raypar_document(folder: Path, *arguments: str | Path) -> dict[str, Any]:
    """Run `raypar`, as a user does, and return the document that ``--json``, one of the arguments, makes it print.

    Raises:
        SystemExit: it failed; with the end of its output.
    """
    return dict(json.loads(_output(folder, arguments)))


def _output(folder: Path, arguments: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        [*RAYPAR, *arguments],
        cwd=folder,
        env={**user_environment(), **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise failure(f"raypar {' '.join(map(str, arguments))}", done.returncode, done.stdout + done.stderr)
    return done.stdout


def user_environment() -> dict[str, str]:
    """Return the environment without settings that would redirect a study to another store or cluster."""
    return {key: value for key, value in os.environ.items() if key not in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS")}


def failure(name: str, exit_code: int, output: str) -> SystemExit:
    """Return the error of a process that failed, with the end of its output."""
    return SystemExit(f"{name} ended with exit code {exit_code}:\n{output[-LOG_TAIL_CHARS:]}")


def run_child(command: Sequence[str | Path], core: int | None = None) -> dict[str, Any]:
    """Run a Python script in a process and return its last `send_result`.

    Args:
        command: the script and its arguments.
        core: the core to pin it to, with one thread.
    """
    environment = _child_environment()
    if core is not None:
        environment.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        env=environment,
        preexec_fn=(lambda: pin([core])) if core is not None else None,
        check=False,
    )
    results = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not results:
        raise failure(Path(command[0]).name, done.returncode, done.stdout + done.stderr)
    return dict(json.loads(results[-1].removeprefix(MARK)))


def send_result(values: Mapping[str, Any]) -> None:
    """Send a result from a child process to its parent."""
    print(MARK + json.dumps(values), flush=True)


def _child_environment(checkout: Path | None = None) -> dict[str, str]:
    folders = [checkout / FOLDER.name, checkout] if checkout else [FOLDER]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])}


class SteppedChild:
    """A script that runs some trials at a time, on request, so that several scripts can be measured in turns.

    The script calls `send_result` after each trial, and `wait_for_go` before all but the first.

    Args:
        checkout: of raypar, that the script imports; None: this one.
    """

    def __init__(self, command: Sequence[str | Path], log_path: Path, checkout: Path | None = None) -> None:
        self._name, self._log_path = Path(command[0]).name, log_path
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=_child_environment(checkout),
            )

    def next_result(self) -> dict[str, Any]:
        """Wait for the result of the trial that runs."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return dict(json.loads(line.removeprefix(MARK)))
        raise failure(self._name, self._process.wait(), self._log_path.read_text(errors="replace"))

    def step(self, num_trials: int = 1) -> list[dict[str, Any]]:
        """Run the next trials and return their results."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return [self.next_result() for _ in range(num_trials)]

    def close(self) -> None:
        """Request no more trials and wait for the script's end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def wait_for_go() -> bool:
    """Wait, in a `SteppedChild`, for the request of another trial; return False when there is none."""
    return bool(sys.stdin.readline())


# ---- raypar's trials


def workload_named(name: str) -> Workload:
    """Return one of raypar's workloads, or one of those beside its studies."""
    from raypar import workloads

    module = workloads if name in workloads.__all__ else importlib.import_module(f"workloads.{name}")
    workload: Workload = getattr(module, name)
    return workload


def local_trial(workload_name: str, config: Mapping[str, Any], log_dir: Path, repeat: int = 0) -> TrialResult:
    """Run one trial of one of these workloads without Ray, with a process for each rank."""
    from raypar.run.local import LocalRunner
    from raypar.run.runner import Event, TrialEnded
    from raypar.train.job import RunSettings

    study = Study(workload=workload_named(workload_name), config=dict(config), name="benchmark")
    spec: TrialSpec = study.trial({}, repeat)
    results: list[TrialResult] = []

    def listen(event: Event) -> None:
        if isinstance(event, TrialEnded):
            results.append(checked(event.result))

    with LocalRunner(RunSettings(log_dir=log_dir, sys_path=(str(STUDIES),))) as runner:
        runner.run(study, [spec], listen)
    (result,) = results
    assert len(result.step_times_s) == spec.placement.num_workers
    return result


def checked(result: TrialResult) -> TrialResult:
    """Return the result of a trial that did not fail.

    Raises:
        SystemExit: the trial failed.
    """
    if result.failure is not None:
        raise SystemExit(f"a trial failed: {result.failure.message}\n{result.failure.traceback}")
    return result


def preload_of(study: Study) -> tuple[str, ...]:
    """Return the modules that `raypar study` would preload for the study's workload."""
    from raypar.study.workload import TrainLoopWorkload

    runs = ("raypar.train.train_loop", "ray.tune") if isinstance(study.workload, TrainLoopWorkload) else ()
    return (*study.workload.preload, *runs)


def run_on_ray(
    study: Study,
    specs: Sequence[TrialSpec],
    listener: Callable[[TrialResult, float], None],
    preload: tuple[str, ...] = (),
    more: Callable[[], Sequence[TrialSpec]] | None = None,
) -> None:
    """Run trials in gangs on a private Ray, all started as `raypar study` starts it, without a store.

    Args:
        preload: modules that the study's files import.
        listener: receives each trial's result, and the seconds since the one before it (of the first trial: since the
            start of Ray; of the first from `more`: since that returned).
        more: called when all trials have ended; returns further ones, or none.
    """
    import cloudpickle

    from raypar.run import tune
    from raypar.run.cluster import this_machine
    from raypar.run.private_ray import private_ray
    from raypar.run.ranks import ForkServer
    from raypar.run.runner import Event, TrialEnded
    from raypar.study.workload import CommandWorkload
    from raypar.train.job import RunSettings

    begun_s = time.perf_counter()

    def listen(event: Event) -> None:
        nonlocal begun_s
        if isinstance(event, TrialEnded):
            time_s = time.perf_counter() - begun_s
            begun_s = time.perf_counter()
            listener(checked(event.result), time_s)

    def ask() -> Sequence[TrialSpec]:
        nonlocal begun_s
        added = more() if more else ()
        begun_s = time.perf_counter()
        return added

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks can't import it
    with scratch() as folder:
        modules = (*preload_of(study), *preload)
        settings = RunSettings(log_dir=folder, preload=modules, is_command=isinstance(study.workload, CommandWorkload))
        with contextlib.closing(ForkServer.of(settings.revision())) as server:
            widest = max(spec.placement.num_cpus for spec in specs)
            taken, start = allowed_cores()[:widest], partial(private_ray, this_machine())
            how: dict[str, Any] = {"owns_cluster": True, "fork_addresses": {"": server.address}}
            is_older = "taken" in inspect.signature(private_ray).parameters  # a checkout of `--other`
            with start(taken) if is_older else start() as own_ray:
                if not is_older:
                    how |= {"own_ray": own_ray, "cores": topology(taken)}
                    how |= {"ahead": tune.Ahead(len(allowed_cores()), lambda: None)}
                tune.TuneRunner(settings, **how).run(study, specs, listen, ask if more else None)


def empty_study() -> Study:
    """Return a study whose trials train nothing, on 1 or 2 workers."""
    # Torch is preloaded in any case; Ray Train is what the loop itself imports.
    return Study(
        workload=Workload.from_train_loop(empty_loop, preload=("ray.train.torch",)),
        space={"num_workers": grid(1, 2)},
        name="benchmark",
    )


def empty_loop(_: dict[str, Any]) -> None:
    """Report after one all-reduce, if there are several workers."""
    import ray.train
    import torch
    import torch.distributed as dist

    ones = torch.ones(1)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(ones)
    ray.train.report({"sum": float(ones)})
