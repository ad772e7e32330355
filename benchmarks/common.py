"""What the benchmarks share: arguments, interleaving, processes for measurements, and how a figure is shown."""

from __future__ import annotations

import argparse
import contextlib
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
from pathlib import Path
from typing import Any

from raypar import Study, Workload, grid, units
from raypar.study.trial import TrialResult, TrialSpec
from raypar.train.affinity import allowed_cores, pin
from raypar.workloads.datasets import DATA_DIR_VARIABLE, ensure_image_set

FOLDER = Path(__file__).resolve().parent
BASELINES = FOLDER / "baselines"
BUSY_CORES = 0.5  # a load average above it means that others are at work
MARK = "@@ "  # what a child has to tell stands on lines that begin so
LOG_TAIL_CHARS = 3000
TITLE_WIDTH = 64


# ---- arguments


def parser_for(doc: str | None, *, needs_mnist: bool = False, has_data: bool = False) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes; the script's docstring is its help.

    Args:
        needs_mnist: it can't do without MNIST.
        has_data: it looks for data sets, and does without those that are not there.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only enough to show that it works")
    if needs_mnist or has_data:
        parser.add_argument(
            "--data-dir", type=Path, help=f"the folder of the data sets [default: {DATA_DIR_VARIABLE}, else the cache]"
        )
    parser.set_defaults(needs_mnist=needs_mnist)
    return parser


def begin(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse, make sure of the data, and say what this is measured on."""
    args = parser.parse_args()
    if "data_dir" in args:
        if args.data_dir:
            os.environ[DATA_DIR_VARIABLE] = str(args.data_dir.absolute())
        if args.needs_mnist:
            ensure_image_set("MNIST")
    print(str(parser.description).strip().splitlines()[0])
    load = os.getloadavg()[0]
    print(f"{len(allowed_cores())} cores, {platform.machine()}, Python {platform.python_version()}, load {load:.2f}")
    if load > BUSY_CORES:
        print(f"NOTE: others are at work here (load {load:.2f}): the figures are worth less than on a quiet machine")
    if args.quick:
        print("NOTE: --quick: too little is measured for the figures to mean much")
    print(flush=True)
    return args


def progress(text: str) -> None:
    """A line for whoever waits; not part of the result."""
    print(f"  … {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="raypar-benchmark-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


# ---- measuring


def interleaved(variants: Mapping[str, Callable[[], float]], num_rounds: int, seed: int = 0) -> dict[str, list[float]]:
    """Measure every variant once a round, in an order that is random in each: a drift hits all alike."""
    shuffled = random.Random(seed)
    found: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(num_rounds):
        names = list(variants)
        shuffled.shuffle(names)
        for name in names:
            begun_s = time.perf_counter()
            found[name].append(variants[name]())
            progress(f"round {i + 1}/{num_rounds}: {name}: {time.perf_counter() - begun_s:.1f} s")
    return found


@dataclass(frozen=True)
class Figure:
    """A median and how far the single values reach."""

    value: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        return cls(statistics.median(values), min(values), max(values), len(values))

    @classmethod
    def ratio(cls, above: Sequence[float], below: Sequence[float]) -> Figure:
        """Of values measured side by side, round by round: the median of the rounds' ratios, and their extremes."""
        return cls.of([a / b for a, b in zip(above, below, strict=True)])

    def show(self, how: Callable[[float], str]) -> str:
        spread = f"  [{how(self.low)} … {how(self.high)}]" if self.count > 1 else ""
        return f"{how(self.value)}{spread}, n = {self.count}"


def tell(title: str, shown: str) -> None:
    """A figure without a bar."""
    print(f"{title:<{TITLE_WIDTH}} {shown}", flush=True)


def judge(
    title: str,
    figure: Figure,
    how: Callable[[float], str],
    *,
    at_most: float | None = None,
    at_least: float | None = None,
) -> None:
    """A figure, its bar, and whether it is reached."""
    if at_most is not None:
        bar, reached = f"≤ {how(at_most)}", figure.value <= at_most
    else:
        assert at_least is not None
        bar, reached = f"≥ {how(at_least)}", figure.value >= at_least
    tell(title, f"{figure.show(how)}   bar {bar}: {'reached' if reached else 'NOT REACHED'}")


def times(value: float) -> str:
    """A ratio: ``0.983×``, ``64.2×``; three digits, as bars are told apart by the third."""
    return f"{value:.3f}×" if value < 10 else f"{value:.1f}×"


def relative(value: float) -> str:
    """A relative difference: ``3.1e-07``."""
    return f"{value:.1e}"


def rate(value: float) -> str:
    return units.rate(value)


# ---- processes


def measured_in_child(command: Sequence[str | Path], core: int | None = None) -> dict[str, Any]:
    """Run a Python script in a process of its own, and return the last thing that it `answer`ed.

    Args:
        command: the script and its arguments.
        core: pin it there, with one thread.
    """
    environment = dict(os.environ)
    if core is not None:
        environment.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": os.pathsep.join([str(FOLDER), environment.get("PYTHONPATH", "")])},
        preexec_fn=(lambda: pin([core])) if core is not None else None,
        check=False,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not answers:
        said = (done.stdout + done.stderr)[-LOG_TAIL_CHARS:]
        raise SystemExit(f"{Path(command[0]).name} ended with exit code {done.returncode}:\n{said}")
    found: dict[str, Any] = json.loads(answers[-1][len(MARK) :])
    return found


def answer(found: Mapping[str, Any]) -> None:
    """In a child: tell the parent."""
    print(MARK + json.dumps(found), flush=True)


class SteppedChild:
    """A script that does one trial whenever it is told to: several of them can be measured in turns.

    The script calls `answer` after each trial and `wait_for_go` before the next; the first one it does unasked.
    """

    def __init__(self, command: Sequence[str | Path], log_path: Path) -> None:
        self._name, self._log_path = Path(command[0]).name, log_path
        self._log = log_path.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])},
        )

    def next_answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                found: dict[str, Any] = json.loads(line[len(MARK) :])
                return found
        code = self._process.wait()
        said = self._log_path.read_text(errors="replace")[-LOG_TAIL_CHARS:]
        raise SystemExit(f"{self._name} ended with exit code {code}:\n{said}")

    def step(self) -> dict[str, Any]:
        """Let it do its next trial; what it answers."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self.next_answer()

    def __enter__(self) -> SteppedChild:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # no more trials
        with contextlib.suppress(OSError):
            self._process.stdout.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def wait_for_go() -> bool:
    """In a child: whether there is another trial to do."""
    return bool(sys.stdin.readline())


# ---- raypar's own side


def local_trial(workload_name: str, config: Mapping[str, Any], log_dir: Path, repeat: int = 0) -> TrialResult:
    """One trial of one of raypar's workloads, in a process of its own for each rank, without Ray."""
    from raypar import workloads
    from raypar.run.local import LocalRunner
    from raypar.run.runner import Event, TrialEnded
    from raypar.train.job import RunSettings

    study = Study(workload=getattr(workloads, workload_name), config=dict(config), name="benchmark")
    spec: TrialSpec = study.trial({}, repeat)
    ended: list[TrialResult] = []

    def listen(event: Event) -> None:
        if isinstance(event, TrialEnded):
            ended.append(event.result)

    with LocalRunner(RunSettings(log_dir=log_dir)) as runner:
        runner.run(study, [spec], listen)
    result = checked(ended[0])
    assert len(result.step_times_s) == spec.placement.num_workers
    return result


def checked(result: TrialResult) -> TrialResult:
    """The result, where the trial did not fail."""
    if result.failure is not None:
        raise SystemExit(f"a trial failed: {result.failure.message}\n{result.failure.traceback}")
    return result


def run_on_ray(study: Study, specs: Sequence[TrialSpec], listener: Callable[[TrialResult], None]) -> None:
    """Run specs in gangs on a private Ray, all started as `raypar study` starts it; nothing is written to a store.

    Args:
        listener: gets every result at once. The next trial starts when it returns.
    """
    import cloudpickle

    from raypar.run.cluster import this_machine
    from raypar.run.private_ray import private_ray
    from raypar.run.ranks import ForkServer
    from raypar.run.runner import Event, TrialEnded
    from raypar.run.tune import TuneRunner
    from raypar.train.job import RunSettings

    def listen(event: Event) -> None:
        if isinstance(event, TrialEnded):
            listener(checked(event.result))

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks can't import it
    with scratch() as folder:
        settings = RunSettings(log_dir=folder, preload=study.workload.preload)
        with contextlib.closing(ForkServer(settings.preload)) as server:
            widest = max(spec.placement.num_cpus for spec in specs)
            with private_ray(this_machine(), allowed_cores()[:widest]):
                runner = TuneRunner(settings, owns_cluster=True, fork_address=server.address)
                runner.run(study, specs, listen)


def empty_study() -> Study:
    """A study of trials that train nothing."""
    # Torch is preloaded in any case; Ray Train is what the loop itself imports.
    return Study(
        workload=Workload.from_train_loop(empty_loop, preload=("ray.train.torch",)),
        space={"num_workers": grid(1, 2)},
        name="benchmark",
    )


def empty_loop(_: dict[str, Any]) -> None:
    """One all-reduce where there are others, and a report."""
    import ray.train
    import torch
    import torch.distributed as dist

    ones = torch.ones(1)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(ones)
    ray.train.report({"sum": float(ones)})
