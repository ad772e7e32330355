"""Findings of `raypar ab` for a slower revision, and for one revision against itself, on quiet and busy machines.

The benchmark makes a repository of two commits: the second does 5 % more work in every step, calibrated beforehand on a
separate core. `raypar ab` then compares the first with itself and with the second. Beside half of the runs, or all, a
process takes a core for random periods from 0.5 to 4 s, with breaks as long. A miss has to be "inconclusive": "no
difference" would be false. Finally, it measures the time of a verdict on `mnist_mlp`, from the start of its first
trial, with both gangs warm. With 20 runs it takes one to two hours.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import (
    begin,
    parser_for,
    print_bar,
    print_row,
    progress,
    raypar_document,
    run_child,
    scratch,
    send_result,
)

from raypar.execution.stored import read_study
from raypar.track.store import default_tracking_uri
from raypar.workloads.datasets import ensure_image_set

NUM_RUNS = 20
SLOWDOWN = 0.05
BUDGET = "2m"
VERDICT_LIMIT_S = 60.0
FIRST_UNITS = 40  # of extra work, which are adjusted
NUM_ROUNDS, NUM_STEPS, NUM_ADJUSTMENTS, TOLERANCE = 40, 10, 8, 0.06  # of the calibration
STUDY = '''"""Does the second commit train more slowly?"""
from units import UNITS
from raypar import Study, Workload
from raypar.study.workload import Data, Split

NUM_SAMPLES, BATCH_SIZE = 16_384, 64


def model(config):
    from torch import nn

    layers = nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    return nn.Sequential(*layers)


def data(config):
    import torch

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, 256, generator=generator)
    split = Split(inputs, inputs[:, :10].argmax(1))
    return Data(train=split, val=Split(split.inputs[:512], split.targets[:512]))


def loss(outputs, targets, units=UNITS):
    import torch

    work = torch.ones(64, 64)
    for _ in range(units):
        work = work @ work * 0.01
    return torch.nn.functional.cross_entropy(outputs, targets)


workload = Workload(name="calibrated", model=model, data=data, loss=loss, metric="accuracy")
study = Study(workload=workload, config={"batch_size": BATCH_SIZE, "epochs": 1, "lr": 0.1, "num_workers": 1})
'''
MNIST = """from raypar import Study
from raypar.workloads import mnist_mlp

study = Study(workload=mnist_mlp, config={"epochs": 1})
"""
HOG = """
import os, random, sys, time
drawn, parent = random.Random(int(sys.argv[1])), os.getppid()
while os.getppid() == parent:
    until_s = time.monotonic() + drawn.uniform(0.5, 4)
    while time.monotonic() < until_s:
        pass
    time.sleep(drawn.uniform(0.5, 4))
"""


def calibrate(folder: Path) -> None:
    """Send the units of extra work that make a step of the study 5 % longer, and the measured slowdown."""
    sys.path.insert(0, str(folder))
    import speed  # type: ignore[import-not-found]
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = speed.model({})
    split = speed.data({}).train
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = split.inputs[: speed.BATCH_SIZE], split.targets[: speed.BATCH_SIZE]

    def seconds(units: int) -> float:
        begun_s = time.perf_counter()
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            speed.loss(model(inputs), targets, units).backward()
            optimizer.step()
        return time.perf_counter() - begun_s

    def medians(*units: int) -> list[float]:
        rounds = [[seconds(each) for each in units] for _ in range(NUM_ROUNDS)]
        return [statistics.median(column) for column in zip(*rounds, strict=True)]

    medians(0)
    units = FIRST_UNITS
    for _ in range(NUM_ADJUSTMENTS):  # the last one measures the result
        without_s, with_s = medians(0, units)
        slowdown = with_s / without_s - 1
        if abs(slowdown / SLOWDOWN - 1) < TOLERANCE:
            break
        units = max(1, round(units * SLOWDOWN / max(slowdown, SLOWDOWN / 10)))
    send_result({"units": units, "slowdown": slowdown, "step_s": without_s / NUM_STEPS})


def make_repository(folder: Path) -> None:
    """Make the repository, and print how much slower its second commit is."""
    folder.mkdir()
    _git(folder, "init", "--quiet")
    (folder / ".gitignore").write_text(".raypar/\nmlflow.db*\n__pycache__/\n")
    (folder / "speed.py").write_text(STUDY)
    (folder / "mnist.py").write_text(MNIST)
    (folder / "units.py").write_text("UNITS = 0\n")
    _commit(folder, "as it was")
    calibrated = run_child([Path(__file__), "--calibrate", folder], core=0)
    (folder / "units.py").write_text(f"UNITS = {calibrated['units']}\n")
    _commit(folder, "slower")
    measured = f"{calibrated['slowdown']:.1%} of a step of {1e3 * calibrated['step_s']:.2f} ms"
    print_row("injected slowdown, measured on a separate core", measured)


def _git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=benchmark", "-c", "user.email=benchmark@example.org")
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def _commit(folder: Path, message: str) -> None:
    _git(folder, "add", "--all")
    _git(folder, "commit", "--quiet", "--message", message)


@contextlib.contextmanager
def hog(seed: int, *, is_on: bool) -> Iterator[None]:
    """Take a core now and then, for the duration of the block."""
    if not is_on:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", HOG, str(seed)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def compare(folder: Path, a: str, b: str, file: str, *flags: str) -> dict[str, Any]:
    """Run `raypar ab` and return its document."""
    return raypar_document(folder, "ab", a, b, "--json", "--", "study", file, "--fresh", *flags)


def count(
    folder: Path, title: str, revisions: tuple[str, str], num_runs: int, num_hogged: int, flags: tuple[str, ...]
) -> Counter[str]:
    """Compare two revisions repeatedly, with the hog beside every other run until its share is done."""
    changes, ratios = Counter[str](), []
    for i in range(num_runs):
        has_hog = num_hogged == num_runs or (i % 2 == 1 and i // 2 < num_hogged)
        with hog(i, is_on=has_hog):
            begun_s = time.perf_counter()
            document = compare(folder, *revisions, "speed.py", *flags)
        (point,) = document["points"]
        changes[point["change"]] += 1
        ratios.append(point["ratio"]["value"])
        load = f"{point['num_disturbed_pairs']} disturbed" if point["num_disturbed_pairs"] else "quiet"
        pairs = f"{point['num_pairs']} pairs count, {load}"
        progress(f"{title}, run {i + 1}: {point['change']}, {pairs}, {time.perf_counter() - begun_s:.0f} s")
    shown = ", ".join(f"{number} {change}" for change, number in changes.most_common())
    print_row(f"{title}: verdicts", f"{shown}; ratio {statistics.median(ratios):.3f} (median)")
    return changes


def time_verdict(folder: Path, flags: tuple[str, ...]) -> None:
    """Print how long a verdict on `mnist_mlp` takes, from the start of its first trial to the end of its last."""
    document = compare(folder, "HEAD~1", "HEAD", "mnist.py", *flags)
    results = read_study(document["study"], default_tracking_uri(folder), folder).results
    begun_s = min(result.started_at for result in results)
    ended_s = max(result.started_at + (result.wall_s or 0.0) for result in results)
    (point,) = document["points"]
    title = f"a verdict on mnist_mlp, 1 epoch ({point['change']}, {point['num_pairs']} pairs)"
    print_bar(title, ended_s - begun_s, lambda s: f"{s:.0f} s", at_most=VERDICT_LIMIT_S)


def main() -> None:
    parser = parser_for(__doc__, has_data=True)
    parser.add_argument("--runs", type=int, default=NUM_RUNS, help="[default: %(default)s]")
    parser.add_argument("--budget", default=BUDGET, help="time budget of each run [default: %(default)s]")
    parser.add_argument("--ray", action="store_true", help="run the trials on Ray, not only those of mnist_mlp")
    parser.add_argument("--calibrate", type=Path, help=argparse.SUPPRESS)
    if "--calibrate" in sys.argv:
        calibrate(parser.parse_args().calibrate)
        return
    args = begin(parser)
    num_runs = 2 if args.quick else args.runs
    flags = ("--budget", "20s" if args.quick else args.budget, *(() if args.ray else ("--no-ray",)))
    same, slower = ("HEAD~1", "HEAD~1"), ("HEAD~1", "HEAD")
    with scratch() as scratch_folder:
        folder = scratch_folder / "repository"
        make_repository(folder)
        changes = count(folder, "one revision with itself", same, num_runs, num_runs // 2, flags)
        title = f"one revision with itself, {num_runs} runs, {num_runs // 2} beside the hog: slower or faster"
        print_bar(title, changes["slower"] + changes["faster"], str, at_most=num_runs * 2 / 20)
        for where, num_hogged, share in (("quiet", 0, 18 / 20), ("beside the hog", num_runs, 14 / 20)):
            changes = count(folder, f"5 % slower, {where}", slower, num_runs, num_hogged, flags)
            print_bar(f"5 % slower, {num_runs} runs, {where}: found", changes["slower"], str, at_least=share * num_runs)
            wrong = changes["equivalent"] + changes["faster"]
            print_bar(f"5 % slower, {num_runs} runs, {where}: no difference, or faster", wrong, str, at_most=0)
        if has_mnist():
            time_verdict(folder, ("--budget", "20s" if args.quick else "55s"))


def has_mnist() -> bool:
    """Return whether MNIST is there, or can be fetched."""
    try:
        ensure_image_set("MNIST")
    except Exception as error:
        print_row("a verdict on mnist_mlp", f"not measured: {error}")
        return False
    return True


if __name__ == "__main__":
    main()
