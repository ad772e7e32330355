"""A study as whoever browses it in MLflow finds it: names, data sets, the model, and pages in a real browser."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from browser import browser
from commands import Cli, runs_of
from mlflow import MlflowClient
from telling import until

from raypar.workloads import digits

pytestmark = pytest.mark.mlflow

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


@pytest.fixture
def links(studied: Cli) -> Iterator[list[str]]:
    """The addresses that `raypar ui` prints: MLflow's, and the charts'."""
    printed = studied.folder / "stdout"
    process = studied.start("ui", "--port", "22700")
    try:
        until(lambda: "charts of tiny: " in printed.read_text(), lambda: printed.read_text() or "nothing printed", 120)
        yield [line.rpartition(" ")[2] for line in printed.read_text().splitlines()]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        studied.wait_for_its_processes()


SHOWN = """Object.fromEntries([...document.querySelectorAll('.js-plotly-plot')].map(plot => [
    plot.layout.xaxis && plot.layout.xaxis.title && plot.layout.yaxis.title && plot.layout.yaxis.title.text
        ? plot.layout.yaxis.title.text + ' by ' + plot.layout.xaxis.title.text
        : plot.data.map(trace => trace.metricKey || trace.name).join(', '),
    plot.data.reduce((sum, trace) => sum + (trace.x || []).length, 0)]))"""


def test_the_charts_are_there_without_a_click(studied: Cli, links: list[str], tmp_path: Path) -> None:
    assert links[0] == "http://127.0.0.1:22700/?workflowType=machine_learning"
    experiment = client(studied).get_experiment_by_name("tiny")
    assert experiment is not None and f"/#/experiments/{experiment.experiment_id}/runs?" in links[1]
    with browser() as chromium:
        page = chromium.open()
        page.resize(1600, 4000)  # charts out of sight are not drawn
        page.go(links[1])
        page.until("document.querySelectorAll('.js-plotly-plot').length >= 9")
        page.screenshot(tmp_path / "charts.png")
        text = page.text()
        for title in ("Charts · Does a second worker pay off", "Sweeps: batch_size 128, 256; num_workers 1, 2"):
            assert title in text
        for section in ("Speedup", "Training time", "accuracy: what it costs", "While training"):
            assert section in text
        # The dots of every scatter: one for each trial.
        page.until(f"{SHOWN}['speedup by num_workers'] === 4")
        drawn = page.run(SHOWN)
        scatters = {name: num for name, num in drawn.items() if " by " in name and "Step" not in name}
        assert (
            scatters.items()
            >= {
                "train_time_s by num_workers": 4,
                "train_time_s by batch_size": 4,
                "accuracy by train_time_s": 4,
            }.items()
        )
