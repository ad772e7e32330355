"""Studies written by `raypar init` for each kind of script run unedited."""

import shutil
from pathlib import Path

import pytest
from harness import Cli

SCRIPTS = Path(__file__).parents[1] / "golden" / "scripts"


def run_unedited(folder, name, *flags):
    """Write the study of a script by `raypar init`, run it, and return its output."""
    cli = Cli(folder)
    if name:
        shutil.copy(SCRIPTS / f"{name}.py", folder)
    drafted = cli.done("init", *([f"{name}.py"] if name else []))
    command = drafted.split("next: raypar ")[1].split("    (")[0].split()
    output = cli.done(*command, *flags)
    cli.wait_for_its_processes()
    return output


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("torchrun_script", "val_loss"),
        pytest.param("plain_script", "test_accuracy_percent", marks=pytest.mark.core),
        ("", "accuracy"),
    ],
)
def test_a_drafted_study_of_a_script_runs_unedited(name, metric, tmp_path):
    repeats = ("--set", "epochs=2") if not name else ()
    output = run_unedited(tmp_path, name, "--no-ray", "--repeats", "1", *repeats)
    assert metric in output and "failed" not in output
    num_points = 2 if name else 4
    assert f"[{num_points}/{num_points}]" in output


@pytest.mark.ray
def test_a_drafted_study_of_a_train_loop_runs_unedited(tmp_path):
    output = run_unedited(tmp_path, "ray_script", "--repeats", "1")
    assert "[2/2]" in output and "loss" in output and "failed" not in output
