"""A client that has nothing to train with reads, and submits; what trains says what is missing."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from html_studies import question, results
from nothing_starts import NOWHERE
from recording import recorded

from raypar.study.loader import name_of

# In the process that this runs in there is none of what `raypar[train]` brings.
WITHOUT = """
import importlib, json, pkgutil, sys
from pathlib import Path
for name in ("torch", "torchvision", "sklearn"):
    sys.modules[name] = None
"""
IMPORTS = """
for folder in ("study", "track", "analysis", "report", "cli", "workloads"):
    package = importlib.import_module(f"raypar.{folder}")
    for module in pkgutil.iter_modules(package.__path__, f"raypar.{folder}."):
        importlib.import_module(module.name)
"""
COMMANDS = """
from nothing_starts import raypar
for command in json.loads(sys.argv[1]):
    done = raypar(command, Path.cwd())
    print(json.dumps([command, done.code, done.out, done.err]))
"""
OWN = """
import torch

from raypar import Study, Workload

own = Workload(name="own", model=lambda config: torch.nn.Linear(1, 1), data=lambda config: None)
study = Study(workload=own, name="mine", space={})
"""
SHIPPED = """
from raypar import Study, grid
from raypar.workloads import mnist_mlp

study = Study(workload=mnist_mlp, space={"num_workers": grid(1, 2)})
"""
READING = (
    ("list",),
    ("show", "scaling"),
    ("report", "scaling"),
    ("fit", "scaling"),
    ("predict", "scaling", "--workers", "8", "--set", "lr=0.1", "--parameters", "1M"),
    ("export", "scaling", "trials.csv"),
    ("workloads", "digits"),
)
FIX = "→ pip install 'raypar[train]'"


def python(folder, *arguments):
    """Return what a fresh interpreter prints in the folder."""
    environment = {key: value for key, value in os.environ.items() if key not in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS")}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command, quiet = [sys.executable, "-c", *arguments], {"stdin": subprocess.DEVNULL, "capture_output": True}
    done = subprocess.run(command, cwd=folder, env=environment, text=True, check=False, **quiet)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(folder, *commands):
    return [tuple(json.loads(line)) for line in python(folder, WITHOUT + COMMANDS, json.dumps(commands)).splitlines()]


def test_what_is_in_a_store_is_read(project):
    recorded(project, question(), results(1))
    for command, code, _, err in run(project, *READING):
        assert code == 0, f"{command}: {err}"
    assert (project / "trials.csv").exists()


def test_all_that_reads_shows_and_submits_can_be_imported(tmp_path):
    """Also what the commands above don't come to: pages, figures, recommendations."""
    python(tmp_path, WITHOUT + IMPORTS)


def test_what_trains_says_what_is_missing_before_anything_starts(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "shipped.py").write_text(SHIPPED)
    commands = (("study", "own.py"), ("plan", "own.py"), ("study", "shipped.py"), ("study", "shipped.py", "--no-ray"))
    for command, code, out, err in run(tmp_path, *commands, ("work", "digits")):
        assert (code, out) == (2, ""), (command, err)
        assert err.startswith("error: ") and err.count("error") == 1 and FIX in err, (command, err)
    assert {path.name for path in tmp_path.iterdir()} == {"own.py", "shipped.py"}


def test_a_prediction_that_would_need_it_says_what_to_give_instead(project):
    (project / "own.py").write_text(OWN)
    for name, workload, file in (("scaling", "digits", "gone.py"), ("mine", "own", "own.py")):
        of_workload = [replace(result, spec=replace(result.spec, workload=workload)) for result in results(1)]
        recorded(project, question(name), of_workload, resume={"file": str(project / file)})
    asked = ("--workers", "8", "--set", "lr=0.1")
    instead = {
        ("scaling",): "--parameters 25.6M",
        ("mine",): "--parameters 25.6M",
        ("scaling", "--parameters", "1M", "--network", "measured"): "--network 100Gbit",
    }
    done = run(project, *(("predict", *words, *asked) for words in instead))
    for (command, code, out, err), fix in zip(done, instead.values(), strict=True):
        assert (code, out) == (2, ""), (command, err)
        assert err.startswith("error: ") and "torch is not in this environment" in err, (command, err)
        assert fix in err and FIX in err, (command, err)
    assert f"{project / 'own.py'}, line 2" in done[1][3]


def test_a_study_that_can_not_be_loaded_for_it_is_submitted_unchecked_and_others_are_checked(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "wrong.py").write_text(SHIPPED.replace("grid(1, 2)", "grid(0)"))
    to = ("--address", NOWHERE)
    own, wrong = run(tmp_path, ("study", "own.py", *to), ("study", "wrong.py", *to))
    assert own[1] == 2 and "own.py, line 2: torch is not in this environment" in own[3]
    assert "is not checked here, but on the head" in own[3] and "no Ray dashboard" in own[3]
    assert wrong[1] == 2 and "1 mistake in the study" in wrong[3] and "dashboard" not in wrong[3]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (OWN, "mine"),
        (OWN.replace('"mine"', "make_name()"), "a_file"),
        (SHIPPED, "a_file"),
        (SHIPPED + OWN, "mine"),
        (OWN + OWN.replace("mine", "yours"), "a_file"),
    ],
)
def test_a_study_that_can_not_be_loaded_is_called_what_its_text_says(text, name, tmp_path):
    path = tmp_path / "a_file.py"
    path.write_text(text)
    assert name_of(path) == name
