"""A client that has nothing to train with reads, and submits; what trains says what is missing."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from html_studies import question, results
from nothing_starts import NOWHERE
from recording import recorded

from raypar.study.loader import name_of

# In the process that this runs in there is none of what `raypar[train]` brings.
WITHOUT = """
import importlib, json, pkgutil, sys
from pathlib import Path
for name in ("torch", "torchvision"):
    sys.modules[name] = None
"""
IMPORTS = """
for folder in ("study", "track", "analysis", "reporting", "init", "cli", "workloads"):
    package = importlib.import_module(f"raypar.{folder}")
    for module in pkgutil.iter_modules(package.__path__, f"raypar.{folder}."):
        importlib.import_module(module.name)
"""
COMMANDS = """
from nothing_starts import raypar
for command in json.loads(sys.argv[1]):
    done = raypar(command, Path.cwd())
    print(json.dumps([done.code, done.out, done.err]))
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
ASKED = "--workers 8 --set lr=0.1"
READING = "list", "store show scaling", "report scaling", "model fit scaling"
READING += (f"model predict scaling --parameters 1M {ASKED}",)
FIX = "→ pip install 'raypar[train]'"


def python(folder, *arguments):
    """Return what a fresh interpreter prints in the folder."""
    environment = {key: value for key, value in os.environ.items() if key not in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS")}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, input="", check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(folder, *commands, code=WITHOUT + COMMANDS):
    """Return code, output and errors of each command."""
    texts = json.dumps([command.split() for command in commands])
    return [json.loads(line) for line in python(folder, code, texts).splitlines()]


def assert_refused(result, *words):
    code, out, err = result
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("error") == 1, result
    assert [word for word in (*words, FIX) if word not in err] == []


def test_what_is_in_a_store_is_read_and_all_that_reads_shows_and_submits_can_be_imported(project):
    recorded(project, question(), results(1))
    commands = *READING, "store export scaling trials.csv --tensorboard runs", "model list digits"
    done = run(project, *commands, code=WITHOUT + COMMANDS + IMPORTS)
    assert [(code, err) for code, _, err in done if code] == [] and (project / "trials.csv").exists()


def test_what_trains_says_what_is_missing_before_anything_starts(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "shipped.py").write_text(SHIPPED)
    commands = "study own.py", "plan own.py", "study shipped.py", "study shipped.py --no-ray", "model work digits"
    for result in run(tmp_path, *commands):
        assert_refused(result)
    assert {path.name for path in tmp_path.iterdir()} == {"own.py", "shipped.py"}


def test_a_prediction_that_would_need_it_says_what_to_give_instead(project):
    (project / "own.py").write_text(OWN)
    for name, workload, file in (("scaling", "digits", "gone.py"), ("mine", "own", "own.py")):
        of_workload = [replace(result, spec=replace(result.spec, workload=workload)) for result in results(1)]
        recorded(project, question(name), of_workload, resume={"file": str(project / file)})
    networks = "scaling", "mine", "scaling --parameters 1M --network measured"
    scaling, mine, measured = run(project, *(f"model predict {words} {ASKED}" for words in networks))
    missing = "torch is not in this environment"
    assert_refused(scaling, missing, "--parameters 25.6M")
    assert_refused(mine, missing, "--parameters 25.6M", f"{project / 'own.py'}, line 2")
    assert_refused(measured, missing, "--network 100Gbit")


def test_a_study_that_can_not_be_loaded_for_it_is_submitted_unchecked_and_others_are_checked(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "wrong.py").write_text(SHIPPED.replace("grid(1, 2)", "grid(0)"))
    own, wrong = run(tmp_path, f"study own.py --address {NOWHERE}", f"study wrong.py --address {NOWHERE}")
    assert own[0] == 2 and "own.py, line 2: torch is not in this environment" in own[2]
    assert "the head of the cluster will check the study" in own[2] and "no Ray dashboard" in own[2]
    assert wrong[0] == 2 and "1 mistake in the study" in wrong[2] and "dashboard" not in wrong[2]


def test_a_study_that_can_not_be_loaded_is_called_what_its_text_says(tmp_path):
    two, computed = OWN + OWN.replace("mine", "yours"), OWN.replace('"mine"', "make_name()")
    for text, name in ((SHIPPED + OWN, "mine"), (computed, "a_file"), (SHIPPED, "a_file"), (two, "a_file")):
        (tmp_path / "a_file.py").write_text(text)
        assert name_of(tmp_path / "a_file.py") == name
