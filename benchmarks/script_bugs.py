"""Common mistakes planted in scripts of four shapes: which of them a study names, and false alarms on clean scripts.

``raypar study COMMAND --no-ray`` runs each script once per point. The shapes are a plain loop, a loop under torchrun,
Lightning, and the Hugging Face Trainer. Shapes whose packages are missing are skipped. ``--packages FOLDER`` has those
that this environment lacks: ``pip install --no-deps --target FOLDER lightning pytorch-lightning lightning-utilities
torchmetrics fsspec transformers accelerate``.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from common import FOLDER, RAYPAR, begin, failure, parser_for, print_bar, print_row, scratch

from raypar.analysis import observed_checks

SCRIPT = FOLDER / "observed" / "classifier.py"
PACKAGES = {"plain": (), "torchrun": (), "lightning": ("lightning",), "hf": ("transformers", "accelerate")}
# Mistake: the shapes in which it is planted.
OF_RANKS = {
    "same_samples_on_ranks": ("torchrun", "lightning"),
    "same_order_in_epochs": ("torchrun",),
    "different_parameters": ("torchrun",),
    "batch_norm_of_ranks": ("torchrun", "lightning", "hf"),
    "different_batches": ("torchrun", "lightning", "hf"),
    "needless_search": ("torchrun", "lightning", "hf"),
}
OF_EACH_PROCESS = {
    "more_threads_than_cores": tuple(PACKAGES),
    "more_loaders_than_cores": tuple(PACKAGES),
    "slow_start_of_epochs": tuple(PACKAGES),
    "long_evaluation": tuple(PACKAGES),
    "long_checkpoints": tuple(PACKAGES),
    "other_number_of_processes": ("torchrun",),
}
KINDS = OF_RANKS | OF_EACH_PROCESS
# Of the script's code. Others are about the measurement, such as too few repeats.
ABOUT_CODE = {check.name for check in observed_checks.CHECKS} | {"unproven_work"}


def findings(shape: str, bug: str = "") -> set[str]:
    """Run a study of the script, and return the names of the findings about its code."""
    is_parallel = shape == "torchrun" or bug in OF_RANKS
    is_fixed = bug == "other_number_of_processes"
    processes = 2 if is_fixed else "{num_workers}"
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] * is_parallel
    command = [sys.executable, *torchrun, str(SCRIPT), "--shape", shape, *(["--bug", bug] if bug else [])]
    swept = "num_workers" if is_parallel and not is_fixed else "cpus_per_worker"
    words = ["study", shlex.join(command), "--grid", f"{swept}=1,2", "--no-ray", "--repeats", "1"]
    with scratch() as folder:
        output = ""
        for each in (words, ["report", "classifier", "--json"]):
            done = subprocess.run(
                [*RAYPAR, *each], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
            )
            if done.returncode:  # a script that fails has no findings
                raise failure(f"{shape} {bug or 'clean'}: raypar {each[0]}", done.returncode, done.stdout + done.stderr)
            output = done.stdout
    return {each["check"] for each in json.loads(output)["caveats"]} & ABOUT_CODE


def available_shapes(packages: Path | None) -> list[str]:
    """Return the shapes whose packages are installed, and print which are skipped."""
    path = [*([str(packages)] if packages else []), *sys.path]
    shapes = []
    for shape, needed in PACKAGES.items():
        if missing := [name for name in needed if PathFinder.find_spec(name, path) is None]:
            print_row(f"{shape}: skipped", f"{' and '.join(missing)} not installed; give --packages FOLDER, see --help")
        else:
            shapes.append(shape)
    return shapes


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--packages", type=Path, metavar="FOLDER", help="folder of packages that this Python lacks")
    parser.add_argument("--only", choices=KINDS, nargs="+", default=list(KINDS), metavar="MISTAKE")
    args = parser.parse_args()
    if args.packages and not args.packages.is_dir():
        parser.error(f"no such folder: {args.packages}")
    args = begin(parser)
    if args.packages:
        inherited = filter(None, [os.environ.get("PYTHONPATH")])
        os.environ["PYTHONPATH"] = os.pathsep.join([str(args.packages.resolve()), *inherited])
    shapes = available_shapes(args.packages)
    num_found = num_false_alarms = 0
    for shape in shapes[: 1 if args.quick else None]:
        found = findings(shape)
        print_row(f"clean, {shape}", ", ".join(sorted(found)) or "nothing")
        num_false_alarms += len(found)
    for bug in args.only[: 1 if args.quick else None]:
        results = {shape: findings(shape, bug) for shape in KINDS[bug] if shape in shapes}
        missed = [shape for shape, found in results.items() if bug not in found]
        others = sorted(set().union(*results.values()) - {bug})
        texts = [f"found in {', '.join(shape for shape in results if shape not in missed) or 'none'}"]
        texts += [f"MISSED in {', '.join(missed)}"] if missed else []
        texts += [f"also named: {', '.join(others)}"] if others else []
        print_row(bug, "; ".join(texts))
        num_found += not missed
    print_bar("kinds of mistakes found in every shape", num_found, "{:.0f}".format, at_least=len(args.only) - 1)
    print_bar("findings on clean scripts", num_false_alarms, "{:.0f}".format, at_most=0)


if __name__ == "__main__":
    main()
