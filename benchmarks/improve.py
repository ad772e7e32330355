"""`raypar improve` on five scripts with a planted bottleneck: does it name it, and how good is its remedy?

The script runs in alternation as it is, with the settings that raypar recommends, and with the best known remedies in
its own code. All of them use two cores. Their times exclude start-up and the first steps.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from common import FOLDER, MARK, RAYPAR, Figure, begin, failure, interleaved, parser_for, print_bar, print_row, scratch

from raypar import observe
from raypar.study.script_settings import settings_of
from raypar.train.affinity import allowed_cores, pin

SCRIPT = FOLDER / "observed" / "slow.py"
NUM_CORES = 2
MAX_GAP, MAX_S = 0.15, 600.0


@dataclass(frozen=True)
class Case:
    """Planted bottleneck.

    Attributes:
        remedy: settings that name it; a recommendation must have one of them.
        fixes: options of the script for the best known remedies.
    """

    remedy: frozenset[str]
    num_workers: int = 1
    fixes: tuple[str, ...] = ("--fixed",)


CASES = {
    "loader": Case(frozenset({"loader_workers"}), fixes=("--fixed --processes 1", "--fixed --processes 2")),
    "threads": Case(frozenset({"threads"})),
    "optimizer": Case(frozenset({"fused_optimizer"})),
    "bucket size": Case(frozenset({"bucket_cap_mb"}), num_workers=2),
    "evaluation": Case(frozenset({"evaluation_batches"})),
}


def command_of(bottleneck: str, num_workers: int | str) -> list[str]:
    """Return the words that start the script. A text as number of workers is a hyperparameter in braces."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_workers}"] * (num_workers != 1)
    return [sys.executable, *torchrun, str(SCRIPT), "--bottleneck", bottleneck]


def seconds(bottleneck: str, num_workers: int, options: str = "", settings: Mapping[str, Any] | None = None) -> float:
    """Run the script, and return the time of its training, of the slowest rank."""
    with scratch() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": str(NUM_CORES // num_workers)}
        if settings:
            environment |= observe.environment(folder, environment, settings)
        done = subprocess.run(
            [*command_of(bottleneck, num_workers), *options.split()],
            env=environment,
            preexec_fn=lambda: pin(allowed_cores()[:NUM_CORES]),
            capture_output=True,
            text=True,
            check=False,
        )
    printed = [json.loads(line.removeprefix(MARK)) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or len(printed) != num_workers:
        raise failure(f"slow.py {bottleneck} {options}", done.returncode, done.stdout + done.stderr)
    return max(float(each["seconds"]) for each in printed)


def improved(bottleneck: str, num_workers: int) -> tuple[Mapping[str, Any], float]:
    """Return the settings that raypar recommends, none if it recommends none, and the seconds that it took."""
    command = shlex.join(command_of(bottleneck, "{num_workers}" if num_workers > 1 else 1))
    cores = ["--grid", f"cpus_per_worker={NUM_CORES // num_workers}"]
    began_s = time.monotonic()
    with scratch() as folder:
        words = [*RAYPAR, "improve", command, "--grid", f"num_workers={num_workers}", *cores, "--no-ray", "--json"]
        done = subprocess.run(words, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    took_s = time.monotonic() - began_s
    if done.returncode or not done.stdout:
        raise failure(f"raypar improve, {bottleneck}", done.returncode, done.stderr)
    changes = json.loads(done.stdout)["changes"]  # the fastest first
    return settings_of(next((each["settings"] for each in changes if each["is_recommended"]), "none")), took_s


def main() -> None:
    parser = parser_for(__doc__, rounds=5)
    parser.add_argument("--only", choices=CASES, nargs="+", default=list(CASES), metavar="BOTTLENECK")
    args = begin(parser)
    if len(allowed_cores()) < NUM_CORES:
        raise SystemExit(f"improve.py needs {NUM_CORES} cores, got {len(allowed_cores())}")
    num_named, gaps, durations_s = 0, [], []
    for bottleneck in args.only[: 1 if args.quick else None]:
        case = CASES[bottleneck]
        settings, took_s = improved(bottleneck, case.num_workers)
        run = partial(seconds, bottleneck, case.num_workers)
        variants = {"unchanged": run, "improved": partial(run, settings=settings)}
        times_s = interleaved(variants | {fix: partial(run, fix) for fix in case.fixes}, args.rounds)
        best = min(case.fixes, key=lambda fix: statistics.median(times_s[fix]))
        gap = Figure.ratio(times_s["improved"], times_s[best])
        planted = Figure.ratio(times_s["unchanged"], times_s[best])
        named = "named" if case.remedy & settings.keys() else "NOT NAMED"
        print_row(f"{bottleneck}: recommended in {took_s:.0f} s", f"{dict(settings) or 'nothing'}: {named}")
        print_row(f"{bottleneck}: time / that of the best known remedy", gap.show("{:.2f}×".format))
        print_row(f"{bottleneck}: the same without a remedy", planted.show("{:.2f}×".format))
        num_named += bool(case.remedy & settings.keys())
        gaps.append(gap)
        durations_s.append(took_s)
    print_bar("bottlenecks that are named", num_named, "{:.0f}".format, at_least=len(gaps))
    largest = max(gaps, key=lambda gap: gap.value)
    print_bar("largest time / that of the best known remedy", largest, "{:.2f}×".format, at_most=1 + MAX_GAP)
    print_bar("longest duration", max(durations_s), "{:.0f} s".format, at_most=MAX_S)


if __name__ == "__main__":
    main()
