"""What a user can fix is reported in one message with exit code 2, before anything is started or kept."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import Cli

GOOD = """
from raypar import Study, grid
from raypar.workloads import digits

study = Study(workload=digits, space={"lr": grid(0.1, 0.2)}, num_repeats=1)
"""


@dataclass(frozen=True)
class Slip:
    """A command that can't work.

    Attributes:
        words: what the message has to contain.
        files: what stands in the folder, besides a fine ``good.py``.
    """

    name: str
    arguments: tuple[str, ...]
    words: tuple[str, ...]
    files: tuple[tuple[str, str], ...] = ()


# One of each kind as a process of its own; the others are in tests/unit/bad_input.py.
SLIPS = (
    Slip("missing file", ("study", "god.py"), ("god.py", "no such file", "did you mean good.py?")),
    Slip(
        "failing import",
        ("study", "bad.py"),
        ("bad.py", "line 1", "nowhere_to_be"),
        (("bad.py", "import nowhere_to_be\n"),),
    ),
    Slip("--set of an unknown key", ("study", "good.py", "--set", "epoch=1"), ("epoch", "did you mean 'epochs'?")),
    Slip(
        "more cores than there are",
        ("study", "good.py", "--set", "cpus_per_worker=100000"),
        ("good.py", "needs 100000 CPUs in one gang, the cluster has "),
    ),
    Slip("no server", ("study", "good.py", "--tracking-uri", "http://127.0.0.1:9"), ("http://127.0.0.1:9",)),
    Slip("no cluster", ("study", "good.py", "--address", "127.0.0.1:9"), ("--address 127.0.0.1:9", "no Ray cluster")),
)


@pytest.mark.parametrize("slip", SLIPS, ids=lambda slip: slip.name.replace(" ", "-"))
def test_a_slip_is_told_in_one_message_and_nothing_is_started(slip: Slip, tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    cli.write("good.py", GOOD)
    for name, text in slip.files:
        cli.write(name, text)
    done = cli.run(*slip.arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("error: ") and "\nerror: " not in done.stderr
    assert "→" in done.stderr  # a hint
    for part in slip.words:
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("mlflow.db*")) and not list(tmp_path.glob("mlruns*"))
    assert [path for path in tmp_path.glob(".raypar/logs/*") if path.is_dir()] == []
    assert [path for path in tmp_path.glob(".raypar/spool/*") if path.suffix == ".jsonl"] == []
    cli.wait_for_its_processes()


@pytest.mark.parametrize("arguments", [("plan", "good.py"), ("study", "good.py", "--dry-run")], ids=["plan", "dry-run"])
def test_a_plan_starts_nothing_and_keeps_nothing(arguments: tuple[str, ...], tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    cli.write("good.py", GOOD)
    done = cli.run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 points × 1 repeat = 2 trials" in done.stdout and "1 worker × 1 core" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} <= {"good.py", "__pycache__"}


@pytest.mark.parametrize("command", [(), ("study",), ("report",), ("resume",), ("doctor",)], ids=lambda c: " ".join(c))
def test_help_imports_nothing_heavy(command: tuple[str, ...]) -> None:
    code = """
import sys
from raypar.cli.app import main
sys.argv[0] = "raypar"
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("heavy:", *sorted({"torch", "ray", "mlflow", "numpy", "scipy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code, *command, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage: raypar" in done.stdout
    assert done.stdout.splitlines()[-1].split() == ["heavy:"]
