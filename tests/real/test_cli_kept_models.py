"""Models that trials keep: in MLflow with their runs, and shown a test set once, if they are the chosen ones."""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path

import pytest
import torch
from commands import Cli, report_in, runs_of
from loops import acting
from mlflow import MlflowClient
from telling import run, settings_at

from raypar import Study
from raypar.run.runner import TrialEnded
from raypar.run.tune import TuneRunner
from raypar.train.job import MODEL_FOLDER
from raypar.train.saved_model import WEIGHTS_FILE

pytestmark = pytest.mark.ray

STUDY = '''
"""Which learning rate does a linear model of the digits want?"""
from raypar import Data, Split, Study, Workload, grid
from raypar.workloads import digits


def model(config):
    from torch import nn

    return nn.Linear(64, 10)


def data(config):
    whole = digits.data(config)
    train, val = whole.train, whole.val
    parts = [Split(train.inputs[a:b], train.targets[a:b]) for a, b in ((0, 1000), (1000, 1536))]
    return Data(train=parts[0], val=parts[1], test=val, transform=whole.transform)


study = Study(
    workload=Workload(name="linear", model=model, data=data, num_train_samples=1000, has_test=True),
    space={"lr": grid(0.0001, 0.5)},
    num_repeats=2,
    config={"epochs": 3, "batch_size": 50, "keep_model": True},
)
'''


def test_only_the_models_that_validation_chooses_see_the_test_set(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    cli.write("linear.py", STUDY)
    done = cli.run("study", "linear.py")
    assert (done.returncode, done.stderr) == (0, "")
    told = re.search(
        r"Test set, seen once, by the 2 models .*?\(lr=0.5\): accuracy (\d+)", " ".join(done.stdout.split())
    )
    assert told is not None and int(told[1]) > 80
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    runs = runs_of(tmp_path, "linear", "trial")
    assert len(runs) == 4
    for trial in runs:
        assert [f.path for f in client.list_artifacts(trial.info.run_id, "model")] == [f"model/{WEIGHTS_FILE}"]
        assert ("test/accuracy" in trial.data.metrics) == (trial.data.params["lr"] == "0.5")
    for command in (("report", "linear"), ("study", "linear.py")):
        again = cli.run(*command)
        assert (again.returncode, again.stderr) == (0, "")
        assert report_in(again.stdout) == report_in(done.stdout)
    cli.wait_for_its_processes()


def test_a_model_that_was_kept_on_another_machine_travels_with_its_result(fork_address: str, tmp_path: Path) -> None:
    study = Study(workload=acting, name="ships", config={"keep_model": True})
    settings = settings_at(tmp_path, ships_artifacts=True)
    told = run(TuneRunner(settings, owns_cluster=True, fork_address=fork_address), study, [study.trial({}, 0)])
    (ended,) = told.of(TrialEnded)
    assert ended.result.failure is None
    with tarfile.open(fileobj=io.BytesIO(ended.artifacts)) as tar:
        packed = tar.extractfile(f"./{MODEL_FOLDER}/{WEIGHTS_FILE}")
        assert packed is not None
        shipped = torch.load(io.BytesIO(packed.read()))
    left = torch.load(settings.artifact_dir(ended.result.spec) / MODEL_FOLDER / WEIGHTS_FILE)
    assert shipped.keys() == left.keys() and all(torch.equal(shipped[key], left[key]) for key in left)
