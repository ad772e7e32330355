"""A study as whoever browses it in MLflow finds it: names, data sets, and the model."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from commands import Cli, runs_of
from mlflow import MlflowClient

from raypar.workloads import digits

pytestmark = [pytest.mark.mlflow, pytest.mark.slow]

STUDY = '''
"""Does a second worker pay off for a tiny network?"""
from raypar import Study, grid
from raypar.workloads import digits

study = Study(
    workload=digits,
    space={"batch_size": grid(128, 256), "num_workers": grid(1, 2)},
    baseline={"num_workers": 1},
    num_repeats=1,
    config={"epochs": 3, "hidden_size": 32},
)
'''
FLAGS = ("--no-ray", "--log-model", "--system-metrics")
DOCUMENT = Path(__file__).parents[2] / "docs" / "mlflow.md"


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """A folder in which a study was run."""
    cli = Cli(tmp_path_factory.mktemp("study"))
    cli.write("tiny.py", STUDY)
    done = cli.run("study", "tiny.py", *FLAGS)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no model was logged" not in done.stdout
    return cli


@pytest.fixture(autouse=True)
def store(studied: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """What MLflow's own functions look at."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{studied.folder / 'mlflow.db'}")


def client(cli: Cli) -> MlflowClient:
    return MlflowClient(f"sqlite:///{cli.folder / 'mlflow.db'}")


def models(cli: Cli) -> list[Any]:
    found = client(cli).get_experiment_by_name("tiny")
    assert found is not None
    return list(client(cli).search_logged_models([found.experiment_id]))


def documented(title: str) -> dict[str, str]:
    """Key, as it stands in the document's section, to the last cell of its row."""
    section = DOCUMENT.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    assert rows, title
    return {key: row[-1].strip() for row in rows for key in re.findall(r"`([^`]+)`", row[0])}


@pytest.mark.parametrize(("kind", "title"), [("trial", "Metrics of a trial"), ("execution", "Metrics of an execution")])
def test_every_metric_is_documented_and_every_documented_one_is_there(studied: Cli, kind: str, title: str) -> None:
    known = documented(title)
    found = {key for run in runs_of(studied.folder, "tiny", kind) for key in run.data.metrics}
    assert {key for key in found if not any(fnmatchcase(key, pattern) for pattern in known)} == set()
    always = [key for key, where in known.items() if where in ("", "with a baseline", "--system-metrics")]
    assert [pattern for pattern in always if not any(fnmatchcase(key, pattern) for key in found)] == []


def test_every_tag_is_documented(studied: Cli) -> None:
    known = documented("Tags")
    for kind in ("trial", "execution"):
        found = {key for run in runs_of(studied.folder, "tiny", kind) for key in run.data.tags}
        own = {key for key in found if not key.startswith("mlflow.")}
        assert {key for key in own if not any(fnmatchcase(key, pattern) for pattern in known)} == set()


def test_each_trial_names_what_it_was_trained_and_judged_on(studied: Cli) -> None:
    trials = [client(studied).get_run(run.info.run_id) for run in runs_of(studied.folder, "tiny", "trial")]
    named = [{i.tags[0].value: (i.dataset.name, i.dataset.digest) for i in run.inputs.dataset_inputs} for run in trials]
    assert len(named) == 4 and all(splits == named[0] for splits in named)
    assert named[0].keys() == {"train", "val"}
    assert {name for name, _ in named[0].values()} == {"scikit-learn's 8x8 digits"}
    assert all(re.fullmatch(r"[0-9a-f]{16}", digest) for _, digest in named[0].values())


def test_the_best_trial_s_model_comes_back_with_its_predictions_and_is_logged_once(studied: Cli) -> None:
    (model,) = models(studied)
    trial = client(studied).get_run(model.source_run_id)
    scores = {run.info.run_id: run.data.metrics["accuracy"] for run in runs_of(studied.folder, "tiny", "trial")}
    history = client(studied).get_metric_history(trial.info.run_id, "accuracy")
    best = max(point.value for point in history)
    assert scores[trial.info.run_id] == max(scores.values())
    assert model.params["batch_size"] == trial.data.params["batch_size"]

    assert digits.data is not None
    val = digits.data({}).val
    assert val is not None
    loaded = mlflow.pytorch.load_model(f"models:/{model.model_id}")
    with torch.no_grad():
        assert (loaded(val.inputs).argmax(1) == val.targets).double().mean().item() == pytest.approx(best, abs=1e-9)
    with_signature = mlflow.pyfunc.load_model(f"runs:/{trial.info.run_id}/best_model")
    predicted = with_signature.predict(val.inputs.numpy())
    torch.testing.assert_close(torch.from_numpy(predicted), loaded(val.inputs))

    again = studied.run("study", "tiny.py", *FLAGS)
    assert (again.returncode, again.stderr) == (0, "")
    assert [m.model_id for m in models(studied)] == [model.model_id]
