"""Mutation check: how many hand-made changes of raypar's behaviour make a test fail.

Each mutation of mutations.toml replaces one snippet of raypar/ in a copy of the checkout, and its tests run until one
fails. Printed are its state, the seconds, what it breaks, and the test that failed:

  caught   a test fails, and passes without the mutation
  missed   every test passes
  timeout  the tests took longer than --timeout
  unclear  the test fails without the mutation, too, or pytest could not run
  open     the snippet does not occur exactly once in raypar/: update mutations.toml

All of them take about ten minutes on two idle cores; `--tests unit` takes several minutes for each mutation that the
listed files miss. Exit code 0 if every mutation is caught, else 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = "benchmarks/mutations.toml"
TESTS_FAILED, NOT_COLLECTED = 1, 2  # exit codes of pytest


@dataclass(frozen=True)
class Mutation:
    """One change of behaviour.

    Attributes:
        breaks: the wrong behaviour after the mutation.
        old: the snippet to replace, which occurs once in raypar/.
        new: its replacement.
        tests: files under tests/ that are likely to catch it, without ``.py``.
    """

    id: str
    breaks: str
    old: str
    new: str
    tests: tuple[str, ...]

    def path(self, root: Path) -> Path | None:
        """Return the module that holds the snippet; None unless there is exactly one occurrence."""
        counts = {path: path.read_text().count(self.old) for path in sorted((root / "raypar").rglob("*.py"))}
        matches = {path: count for path, count in counts.items() if count}
        return next(iter(matches)) if list(matches.values()) == [1] else None

    @contextmanager
    def applied(self, path: Path) -> Iterator[None]:
        """Change a module while the context is active."""
        before = path.read_text()
        path.write_text(before.replace(self.old, self.new))
        try:
            yield
        finally:
            path.write_text(before)


@dataclass(frozen=True)
class Verdict:
    """State of one mutation (see above), with the test that failed, or the reason."""

    state: str
    detail: str = ""
    time_s: float = 0.0


def read_table(path: Path) -> list[Mutation]:
    table = tomllib.loads(path.read_text())
    return [Mutation(key, **{**entry, "tests": tuple(entry["tests"])}) for key, entry in table.items()]


def copy_checkout(source: Path, target: Path) -> None:
    """Copy the files of a git checkout that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=source, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (source / name).is_file():  # else deleted, and not committed yet
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)


def run_pytest(root: Path, tests: Sequence[str], timeout_s: float, *flags: str) -> tuple[int | None, list[str]]:
    """Run tests of a checkout.

    Returns:
        pytest's exit code, None after a timeout, and the tests that failed or could not be collected.
    """
    shutil.rmtree(root / ".hypothesis", ignore_errors=True)  # the examples that failed under another mutation
    paths = (str(root), os.environ.get("PYTHONPATH", ""))
    # Otherwise, bytecode of the mutated module could be used for the original one of equal size and time.
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    process = subprocess.Popen(
        [*command, *flags, *tests],
        cwd=root,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None, []
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", output, re.MULTILINE)
    return process.returncode, failed


def rounds_of(mutation: Mutation, root: Path, tests: str) -> list[list[str]]:
    """Return the tests to run, and those to run after them if they miss the mutation."""
    if tests not in ("listed", "unit"):
        return [tests.split(",")]
    files = [f"tests/{name}.py" for name in mutation.tests]
    files = [name for name in files if (root / name).exists() and (tests == "listed" or name.startswith("tests/unit"))]
    return [files, ["tests/unit"]] if files and tests == "unit" else [files or ["tests/unit"]]


def judge(mutation: Mutation, root: Path, tests: str, timeout_s: float) -> Verdict:
    """Apply a mutation to the copy and run its tests."""
    path = mutation.path(root)
    if path is None:
        return Verdict("open", f"{mutation.old.strip()!r} does not occur exactly once in raypar/")
    begun_s = time.perf_counter()
    verdict = Verdict("missed")
    with mutation.applied(path):
        for files in rounds_of(mutation, root, tests):
            exit_code, failed = run_pytest(root, files, timeout_s, "-x")
            if exit_code in (TESTS_FAILED, NOT_COLLECTED) and failed:
                verdict = Verdict("caught", failed[0])
            elif exit_code != 0:
                what = f"took more than {timeout_s:g} s" if exit_code is None else f"ended with exit code {exit_code}"
                verdict = Verdict("timeout" if exit_code is None else "unclear", f"pytest {' '.join(files)} {what}")
            if verdict.state != "missed":
                break
    return replace(verdict, time_s=time.perf_counter() - begun_s)


def confirm(verdicts: dict[str, Verdict], root: Path, timeout_s: float) -> None:
    """Run the tests that caught a mutation without it; a mutation whose test still fails becomes unclear."""
    tests = {key: verdict.detail for key, verdict in verdicts.items() if verdict.state == "caught"}
    if not tests:
        return
    exit_code, failed = run_pytest(root, sorted(set(tests.values())), timeout_s)
    for key, test in tests.items():
        if exit_code != 0 and (test in failed or not failed):
            reason = (
                "fails without the mutation, too" if failed else f"not confirmed: pytest's exit code is {exit_code}"
            )
            verdicts[key] = replace(verdicts[key], state="unclear")
            print(f"{key:<4} unclear  {test} {reason}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", metavar="ID,ID", help="only these mutations")
    parser.add_argument(
        "--tests",
        default="listed",
        metavar="listed|unit|FILE,FILE",
        help="the files listed with each mutation, all of tests/unit (listed ones first), or these [default: listed]",
    )
    parser.add_argument("--checkout", type=Path, default=ROOT, help="root of a checkout of raypar [default: this one]")
    parser.add_argument("--table", type=Path, help=f"mutations of that checkout's code [default: its {TABLE}]")
    parser.add_argument(
        "--timeout", type=float, default=600, metavar="SECONDS", help="of one pytest run [default: 600]"
    )
    args = parser.parse_args()
    mutations = read_table(args.table or args.checkout / TABLE)
    ids = args.ids.split(",") if args.ids else [m.id for m in mutations]
    if unknown := set(ids) - {m.id for m in mutations}:
        parser.error(f"--ids {','.join(sorted(unknown))}: not in the table")
    verdicts: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory(prefix="raypar-mutations-") as folder:
        root = Path(folder)
        copy_checkout(args.checkout.resolve(), root)
        for mutation in mutations:
            if mutation.id in ids:
                verdict = verdicts[mutation.id] = judge(mutation, root, args.tests, args.timeout)
                print(f"{mutation.id:<4} {verdict.state:<7} {verdict.time_s:5.0f} s  {mutation.breaks}", flush=True)
                if verdict.detail:
                    print(f"{'':21}{verdict.detail}", flush=True)
        confirm(verdicts, root, args.timeout)
    counts = Counter(verdict.state for verdict in verdicts.values())
    print(f"\ncaught: {counts.pop('caught', 0)} of {len(verdicts)}")
    for state in counts:
        print(f"{state}: {', '.join(key for key, verdict in verdicts.items() if verdict.state == state)}")
    sys.exit(bool(counts))


if __name__ == "__main__":
    main()
