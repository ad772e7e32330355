"""A study as seen in MLflow: names, data sets, the model, and pages in a real browser."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

import mlflow
import pytest
import torch
from browser import browser
from harness import Cli, client_of, digits_study, runs_of

from raypar.workloads import digits

pytestmark = pytest.mark.mlflow

STUDY = digits_study(
    '{"batch_size": grid(128, 256), "num_workers": grid(1, 2)}',
    "Does a second worker pay off for a tiny network?",
    baseline={"num_workers": 1},
    config={"epochs": 3, "hidden_size": 32},
)
FLAGS = ("--no-ray", "--log-model", "--system-metrics")
DOCUMENT = Path(__file__).parents[2] / "docs" / "mlflow.md"


@pytest.fixture(scope="module")
def studied(tmp_path_factory):
    """Run a study in a folder."""
    cli = Cli(tmp_path_factory.mktemp("study"))
    cli.write("tiny.py", STUDY)
    assert "no model was logged" not in cli.done("study", "tiny.py", *FLAGS)
    return cli


@pytest.fixture(autouse=True)
def store(studied, monkeypatch):
    """Let MLflow's own functions see the store."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{studied.folder / 'mlflow.db'}")


def models(cli):
    experiment = client_of(cli.folder).get_experiment_by_name("tiny")
    return list(client_of(cli.folder).search_logged_models([experiment.experiment_id]))


def documented(title):
    """Return the keys of the document's section, each with the last cell of its row."""
    section = DOCUMENT.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    assert rows, title
    return {key: row[-1].strip() for row in rows for key in re.findall(r"`([^`]+)`", row[0])}


KINDS = {"trial": "Metrics of a trial", "point": "Metrics of a point", "execution": "Metrics of an execution"}


@pytest.mark.parametrize(("kind", "title"), KINDS.items())
def test_metrics_and_tags_match_their_documentation(studied, kind, title):
    def unmatched(keys, patterns):
        return {key for key in keys if not any(fnmatchcase(key, pattern) for pattern in patterns)}

    runs = runs_of(studied.folder, "tiny", kind)
    metrics, rows = {key for run in runs for key in run.data.metrics}, documented(title)
    assert unmatched(metrics, set(rows)) == set()
    always = [pattern for pattern, when in rows.items() if when in ("", "with a baseline", "--system-metrics")]
    assert [pattern for pattern in always if not any(fnmatchcase(key, pattern) for key in metrics)] == []
    tags = {key for run in runs for key in run.data.tags if not key.startswith("mlflow.")}
    assert unmatched(tags, set(documented("Tags"))) == set()


def test_each_trial_names_its_data_sets(studied):
    client = client_of(studied.folder)
    trials = [client.get_run(run.info.run_id) for run in runs_of(studied.folder, "tiny", "trial")]
    named = [{i.tags[0].value: (i.dataset.name, i.dataset.digest) for i in run.inputs.dataset_inputs} for run in trials]
    assert len(named) == 4 and all(splits == named[0] for splits in named)
    assert named[0].keys() == {"train", "val"}
    assert {name for name, _ in named[0].values()} == {"scikit-learn's 8x8 digits"}
    assert all(re.fullmatch(r"[0-9a-f]{16}", digest) for _, digest in named[0].values())


def test_the_best_trials_model_is_logged_once_and_reproduces_its_predictions(studied):
    (model,) = models(studied)
    client = client_of(studied.folder)
    trial = client.get_run(model.source_run_id)
    scores = {run.info.run_id: run.data.metrics["accuracy"] for run in runs_of(studied.folder, "tiny", "trial")}
    best = max(point.value for point in client.get_metric_history(trial.info.run_id, "accuracy"))
    assert scores[trial.info.run_id] == max(scores.values())
    assert model.params["batch_size"] == trial.data.params["batch_size"]

    val = digits.data({}).val
    loaded = mlflow.pytorch.load_model(f"models:/{model.model_id}")
    with torch.no_grad():
        assert (loaded(val.inputs).argmax(1) == val.targets).double().mean().item() == pytest.approx(best, abs=1e-9)
    with_signature = mlflow.pyfunc.load_model(f"runs:/{trial.info.run_id}/best_model")
    torch.testing.assert_close(torch.from_numpy(with_signature.predict(val.inputs.numpy())), loaded(val.inputs))

    studied.done("study", "tiny.py", *FLAGS)
    assert [m.model_id for m in models(studied)] == [model.model_id]


def rows(page, num_columns):
    """Return the first cells of the table's rows, from left to right, without the name and the time."""
    cells = """[...document.querySelectorAll('.ag-center-cols-container [role=row]')].map(row =>
        [...row.querySelectorAll('[role=gridcell]')]
            .sort((a, b) => a.getBoundingClientRect().x - b.getBoundingClientRect().x)
            .map(cell => cell.innerText.trim()))"""
    return [row[:num_columns] for row in page.run(cells)]


PLOTS = "document.querySelectorAll('.js-plotly-plot').length"
DOTS = """[...document.querySelectorAll('.js-plotly-plot')]
    .filter(plot => (plot.layout.yaxis?.title?.text || '') === KEY)
    .map(plot => plot.data.reduce((sum, trace) => sum + (trace.x || []).length, 0))"""


def test_the_link_shows_the_answer_and_the_points_to_one_browser(studied):
    experiment = client_of(studied.folder).get_experiment_by_name("tiny")
    note = experiment.tags["mlflow.note.content"]
    answer = note.partition("\n")[0]
    assert answer.startswith("Does a second worker pay off for a tiny network? ") and note.count("\n| ") == 2 + 4
    with browser() as chromium, studied.start("ui", "--port", "22700") as process:
        try:
            studied.wait(process, lambda: "works once" in studied.output())
            links = [line.rpartition(" ")[2] for line in studied.output().splitlines()]
            token = r"token=[\w-]{43}"
            assert studied.output().startswith("tiny: ")
            assert re.search(rf"/\?{token}#/experiments/{experiment.experiment_id}/runs\?", links[0])
            assert re.fullmatch(rf"http://127.0.0.1:22700/\?{token}&workflowType=machine_learning", links[1])
            page = chromium("about:blank")
            page.resize(1900, 1000)
            page.go(links[0])
            page.until("document.querySelectorAll('.ag-center-cols-container [role=row]').length === 4")
            assert answer in page.text()
            assert [row[:2] for row in rows(page, 2)] == [["128", "1"], ["128", "2"], ["256", "1"], ["256", "2"]]
            heads = ("batch_size", "num_workers", "Description", "median_train_time_s", "median_speedup")
            page.until(f"{list(heads)}.every(head => document.body.innerText.includes(head))")
            outcomes = [row[2] for row in rows(page, 3)]
            assert all("baseline" in outcomes[i] for i in (0, 2)) and "unconfirmed" in outcomes[1]

            page.resize(1900, 4000)  # charts out of sight are not drawn
            page.go(page.run("location.href") + "&compareRunsMode=CHART")
            page.until(f"{PLOTS} >= 8")
            for key in ("median_speedup", "median_train_time_s", "median_accuracy"):
                page.until(f"{DOTS}.some(dots => dots === 4)".replace("KEY", repr(key)))
            sections = ("Speedup", "Training time", "accuracy: what it costs")
            assert [words for words in sections if words not in page.text()] == []
            runs = f"http://127.0.0.1:22700/#/experiments/{experiment.experiment_id}/runs"
            page.go("about:blank")
            page.go(f"{runs}?workflowType=machine_learning&viewStateShareKey=raypar-trials&compareRunsMode=CHART")
            page.until("document.body.innerText.includes('bs=128 w=1 #1')")
            page.until("document.body.innerText.includes('While training')")
            (parent,) = runs_of(studied.folder, "tiny", "execution")
            page.go("about:blank")
            page.go(f"{runs}/{parent.info.run_id}/model-metrics")
            page.until(f"{PLOTS} === 2")  # a chart for each batch size

            assert "token" not in page.run("location.href") and page.run("document.cookie") == ""
            page.go(links[1])  # again, in the same browser
            page.until("document.body.innerText.includes('Recent Experiments')")
            other = chromium(links[0])
            other.until("document.body && document.body.innerText.includes('works once')")
        finally:
            process.terminate()
    studied.wait_for_its_processes()
