"""What code logs to MLflow itself is in the trial's run: of a train loop, of a workload's functions, of a script."""

import sqlite3
from contextlib import closing

import pytest
from harness import run, settings_at
from loops import logging_loop_workload, logging_workload
from recording import history, runs

from raypar import Study
from raypar.run.local import LocalRunner
from raypar.track.server import start_server
from raypar.track.store import default_tracking_uri
from raypar.train.affinity import host_cores
from raypar.train.job import ARTIFACT_FOLDER, LOGGED_FOLDER
from raypar.train.logged_run import LoggedRun

SCRIPT = """
import argparse, mlflow
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
lr = parser.parse_args().lr
mlflow.set_experiment("mine")
with mlflow.start_run(run_name="my run"):
    mlflow.log_metrics({"val_acc": lr, "time": 1.0}, step=3)
    mlflow.log_text("hello", "notes/hello.txt")
"""


def logged(tmp_path, monkeypatch, workload, **config):
    """Return the result of a trial on two ranks, and what it logged."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    study = Study(workload=workload, name="s", config={"num_workers": 2, **config}, num_repeats=1, max_retries=0)
    settings = settings_at(tmp_path, metric=study.judged_by.name)
    with LocalRunner(settings, host_cores()) as runner:
        (result,) = run(runner, study, study.trials()).results
    assert not result.failure, result.failure
    return result, LoggedRun.read(settings.log_dir / result.spec.identity / ARTIFACT_FOLDER / LOGGED_FOLDER)


def test_a_train_loops_metric_may_be_one_that_it_logs(tmp_path, monkeypatch):
    result, run_of_trial = logged(tmp_path, monkeypatch, logging_loop_workload)
    assert [(point.step, point.value) for point in run_of_trial.points] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert [report["val_acc"] for report in result.reports if "val_acc" in report] == [0.0, 0.5, 1.0]
    assert result.conditions.of_ranks("logged_elsewhere") == [("experiment 'mine'",)]


def test_what_a_workloads_functions_log_is_kept_once(tmp_path, monkeypatch):
    result, run_of_trial = logged(tmp_path, monkeypatch, logging_workload, batch_size=64, epochs=1)
    assert [(point.key, point.value) for point in run_of_trial.points] == [("num_features", 16.0)]
    assert "num_features" not in result.final


@pytest.mark.mlflow
def test_a_script_logs_to_the_runs_of_its_trials_on_a_server(cli, tmp_path, tmp_path_factory):
    served = tmp_path_factory.mktemp("server")
    cli.write("train.py", SCRIPT)
    with start_server(default_tracking_uri(served), served, port=22000) as server:
        cli.done(
            "study", "train.py", "--no-ray", "--grid", "lr=0.25,0.5", "--repeats", "1", "--tracking-uri", server.url
        )
        for trial in runs(server.url, "train_study"):
            assert history(server.url, trial, "val_acc") == [(3, float(trial.data.params["lr"]))]
    with closing(sqlite3.connect(served / "mlflow.db")) as database:
        (num_runs,) = database.execute("SELECT count(*) FROM runs").fetchone()
        (num_own,) = database.execute("SELECT count(*) FROM tags WHERE key = 'raypar.kind'").fetchone()
    assert num_runs == num_own
    assert len([*(served / "mlartifacts").rglob("hello.txt")]) == 2
    assert not [*tmp_path.glob("ml*")]
