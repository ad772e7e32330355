"""What a script logs to MLflow itself: all of it is kept once, wherever the script wants it, and nothing strays."""

import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from recording import client, history, make_result, new_store, recorder, runs
from results import make_spec, stored_conditions
from training import Reports

from raypar.study.command import Command
from raypar.study.trial import SINCE_LAUNCH, TrialState
from raypar.track.runs import child_run, with_logged
from raypar.train.command import CommandFailed, run_command
from raypar.train.job import LOGGED_FOLDER, RankContext, RunSettings, TrialJob
from raypar.train.logged_run import FILES, RECORD, LoggedInput, LoggedPoint, LoggedRun

ALONE = RankContext(0, 1, 0, 1, 0)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Folder of MLflow's empty database, which takes seconds to make."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(tmp_path, monkeypatch, cache):
    """A function that runs a script as a trial, and returns its outcome, its reports, and what it logged."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    here = tmp_path / "here"
    here.mkdir()

    def run(code, *, context=ALONE, metric="acc", fails=False):
        reports = Reports()
        settings = RunSettings(tmp_path / "logs", sys_path=(str(here),), metric=metric)
        job = TrialJob(make_spec({"num_workers": 1}, num_threads=1), 1, b"", settings)
        command = Command((sys.executable, "-c", code.replace("{", "{{").replace("}", "}}")))
        outcome = None
        if fails:
            with pytest.raises(CommandFailed):
                run_command(command, job, context, reports, None)
        else:
            outcome = run_command(command, job, context, reports, None)
        assert sorted(path.name for path in here.iterdir()) == []  # no mlruns, no mlflow.db
        assert not (job.folder / LOGGED_FOLDER).exists()
        kept = job.artifact_dir / LOGGED_FOLDER
        return outcome, reports, LoggedRun.read(kept) if kept.exists() else None

    return run


EVERYWHERE = """
import math, mlflow, os, tempfile
assert os.environ["MLFLOW_TRACKING_URI"].startswith("sqlite:") and os.environ["MLFLOW_EXPERIMENT_ID"] == "0"
run_id = os.environ["MLFLOW_RUN_ID"]
os.environ["MLFLOW_TRACKING_URI"] = "http://127.0.0.1:9"
mlflow.set_tracking_uri("http://me:secret@127.0.0.1:9")
mlflow.set_experiment("mine")
assert mlflow.get_experiment_by_name("mine") is not None
with mlflow.start_run(run_name="my run") as mine:
    assert mine.info.run_id == run_id
    mlflow.log_params({"lr": 0.1, "hidden": 7})
    mlflow.set_tags({"who": "me"})
    for step in range(3):
        mlflow.log_metrics({"acc": step / 10, "loss": math.nan}, step=step)
    mlflow.log_text("hello", "notes/hello.txt")
    with mlflow.start_run(run_name="fold 2", nested=True):
        mlflow.log_metric("acc", 0.7, step=5)
        mlflow.log_param("hidden", 8)
        mlflow.log_text("again", "notes/hello.txt")
client = mlflow.MlflowClient("http://127.0.0.1:9")
run = client.create_run(client.create_experiment("other", artifact_location="/nowhere"))
client.log_metric(run.info.run_id, "rest", 4.0, step=2)
with mlflow.start_run(run_id="0123456789abcdef0123456789abcdef"):
    mlflow.log_metric("resumed", 1.0)
"""


def test_all_that_a_script_logs_is_kept_once_wherever_it_wants_it(run):
    outcome, reports, logged = run(EVERYWHERE)
    assert logged.params == {"lr": "0.1", "hidden": "7", "fold 2/hidden": "8"}
    assert logged.tags == {"who": "me"}
    points = [(point.key, point.step, point.value) for point in logged.points if point.key != "loss"]
    assert points == [
        *[("acc", step, step / 10) for step in range(3)],
        *[("resumed", 0, 1.0), ("fold 2/acc", 5, 0.7), ("rest", 2, 4.0)],
    ]
    losses = [point for point in logged.points if point.key == "loss"]
    assert [point.step for point in losses] == [0, 1, 2] and all(math.isnan(point.value) for point in losses)
    assert outcome.conditions.logged_elsewhere == (
        *("address http://me:***@127.0.0.1:9", "experiment 'mine'", "address http://127.0.0.1:9", "experiment 'other'"),
        *("run 0123456789abcdef0123456789abcdef", "2 runs that it started"),
    )
    assert [(report["step"], report["acc"]) for report in reports] == [(0, 0.0), (1, 0.1), (2, 0.2)]
    assert reports[-1]["rest"] == 4.0 and "rest" not in reports[0]
    assert 0 < reports[0][SINCE_LAUNCH] <= reports[-1][SINCE_LAUNCH]


def test_files_and_data_sets_are_kept(run, tmp_path):
    code = """
import mlflow, numpy as np
mlflow.log_text("a", "notes/a.txt")
mlflow.log_input(mlflow.data.from_numpy(np.zeros((3, 2)), name="points"), context="train")
with mlflow.start_run(run_name="b/c", nested=True):
    mlflow.log_text("b", "notes/a.txt")
"""
    _, _, logged = run(code)
    (kept,) = tmp_path.glob(f"logs/*/artifacts/{LOGGED_FOLDER}/{FILES}")
    texts = {str(path.relative_to(kept)): path.read_text() for path in kept.rglob("*.txt")}
    assert texts == {"notes/a.txt": "a", "b_c/notes/a.txt": "b"}
    (data,) = logged.inputs
    assert (data.context, data.name) == ("train", "points") and json.loads(data.profile)["features_shape"] == [3, 2]


def test_models_are_kept_with_their_steps_and_parameters(run, tmp_path):
    code = """
import mlflow
with mlflow.start_run():
    mlflow.log_param("lr", 0.5)
    for step in (1, 2):
        about = {"python_model": lambda model_input: model_input, "pip_requirements": ["mlflow"]}
        mlflow.pyfunc.log_model(name="line", step=step, params={"of": str(step)}, **about)
"""
    _, _, logged = run(code)
    assert [(model.name, model.step, model.params["of"]) for model in logged.models] == [
        ("line", 1, "1"),
        ("line", 2, "2"),
    ]
    new_store(tmp_path)
    uri, logs = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / ".raypar" / "logs"
    shutil.copytree(next(tmp_path.glob("logs/*/artifacts")), logs)
    rec = recorder(tmp_path, uri)
    rec.record(SCRIPT, logs)
    assert rec.close("finished") == 0
    (trial,) = runs(uri)
    models = client(uri).search_logged_models([trial.info.experiment_id])
    assert sorted(model.params["of"] for model in models) == ["1", "2"]
    assert {(model.name, model.source_run_id) for model in models} == {("line", trial.info.run_id)}
    files = [Path(model.artifact_location.removeprefix("file://"), "MLmodel").read_text() for model in models]
    assert all(model.model_id in text for model, text in zip(models, files, strict=True))


def test_ranks_other_than_the_first_log_nothing(run):
    log = "import mlflow\nmlflow.log_metric('acc', 1.0)\n"
    of_ranks = f"import os, subprocess, sys\nfor rank in '10':\n    subprocess.run([sys.executable, '-c', {log!r}], "
    _, _, logged = run(of_ranks + "check=True, env={**os.environ, 'RANK': rank})")
    assert [point.value for point in logged.points] == [1.0]


def test_what_the_check_of_a_workload_logs_is_thrown_away(tmp_path, cache):
    code = """
from raypar.train.logged_run import nothing_logged
with nothing_logged():
    import mlflow
    mlflow.set_experiment("mine")
    mlflow.log_metric("acc", 1.0)
"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "RAYPAR_LOCK_DIR": str(cache)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(sys.platform == "win32", reason="no forks")
def test_the_next_trial_removes_the_temporary_files_of_a_killed_rank(run, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    kill = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)"
    rank = multiprocessing.get_context("fork").Process(target=run, args=(kill,))
    rank.start()
    rank.join()
    assert rank.exitcode == -signal.SIGKILL and [*temporary.iterdir()]
    run("print('next')")
    assert not [*temporary.iterdir()]


def test_a_repeated_attempt_replaces_what_the_last_one_logged(run):
    log = "import mlflow\nmlflow.log_metric('acc', {})\n"
    _, _, logged = run(log.format(1.0) + "exit(3)", fails=True)
    assert [point.value for point in logged.points] == [1.0]
    _, _, logged = run(log.format(2.0))
    assert [point.value for point in logged.points] == [2.0]
    assert run("print('logs nothing')")[2] is None


def test_a_rank_that_runs_a_command_leaves_its_own_mlflow_alone(run, monkeypatch):
    flushed = []  # which would create MLflow's default database in its folder
    own = SimpleNamespace(get_tracking_uri=lambda: "sqlite:///mlflow.db", flush_async_logging=lambda: flushed.append(1))
    monkeypatch.setitem(sys.modules, "mlflow", own)
    run("print('logs nothing')")
    assert not flushed


def test_a_metric_that_the_script_reports_itself_is_not_reported_twice(run):
    code = "import json, mlflow\nprint(json.dumps({'acc': 0.5}))\nmlflow.log_metric('acc', 0.25)"
    _, reports, logged = run(code)
    assert [report["acc"] for report in reports] == [0.5] and logged.points[0].value == 0.25


# ---- the trial's run

LOGGED = LoggedRun(
    params={"lr": "0.5", "size": "7", "batch_size": "64"},
    tags={"who": "me", "raypar.kind": "mine"},
    points=[LoggedPoint("acc", 0.5, 10, 1), LoggedPoint("acc", 0.75, 20, 2), LoggedPoint("train_time_s", 3.0, 30, 0)],
    inputs=[LoggedInput("train", "points", "12", "{}", "", "{}")],
)
SCRIPT = make_result(
    reports=({"step": 1, "acc": 0.5}, {"step": 2, "acc": 0.75, "loss": 1.0}),
    conditions=stored_conditions({"steps_from": ["reports"]}),
)


def test_a_trials_run_has_each_value_once_and_keeps_the_names_of_raypar():
    child = child_run(SCRIPT, result_json=SCRIPT.to_json(), recorded_at=2000.0)
    run = with_logged(child, LOGGED, SCRIPT)
    assert [point[1:] for point in run.points if point.key == "acc"] == [(0.5, 10, 1), (0.75, 20, 2)]
    assert [point.value for point in run.points if point.key == "loss"] == [1.0]  # reported, and not logged
    assert [p.value for p in run.points if p.key.endswith("train_time_s")] == [6.0, 3.0]
    assert [p.key for p in run.points if p.key.endswith("train_time_s")] == ["train_time_s", "script/train_time_s"]
    own = {key: run.params.get(key) for key in ("lr", "script/lr", "size", "batch_size", "script/batch_size")}
    assert own == {"lr": "0.1", "script/lr": "0.5", "size": "7", "batch_size": "64", "script/batch_size": None}
    assert run.tags["who"] == "me" and run.tags["raypar.kind"] == "trial"
    assert run.inputs[-1].name == "points"


def test_a_step_is_no_metric_if_all_reports_come_from_mlflow():
    result = replace(SCRIPT, train_time_s=None, reports=({"step": 1, "acc": 0.5},))
    child = child_run(result, result_json=result.to_json(), recorded_at=2000.0)
    assert "step" in {point.key for point in child.points}
    assert "step" not in {point.key for point in with_logged(child, LOGGED, result).points}


def test_what_a_script_logged_is_uploaded_once(tmp_path):
    new_store(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    folder = tmp_path / ".raypar" / "logs" / "artifacts"
    (folder / LOGGED_FOLDER / FILES / "notes").mkdir(parents=True)
    (folder / LOGGED_FOLDER / FILES / "notes" / "a.txt").write_text("a")
    record = {"params": {"lr": "0.5"}, "tags": {}, "points": [["acc", 0.5, 10, 1]], "inputs": [], "models": []}
    (folder / LOGGED_FOLDER / RECORD).write_text(json.dumps({**record, "overruled": []}))
    for _ in range(2):  # as after an upload that broke off
        rec = recorder(tmp_path, uri)
        rec.record(replace(SCRIPT, state=TrialState.FINISHED), folder)
        assert rec.close("finished") == 0
    for run in runs(uri):
        assert history(uri, run, "acc") == [(1, 0.5)] and run.data.params["lr"] == "0.1"
        names = [file.path for file in client(uri).list_artifacts(run.info.run_id)]
        assert sorted(names) == ["notes", "trial.json"]
    (folder / LOGGED_FOLDER / RECORD).write_text("damaged")
    rec = recorder(tmp_path, uri, "e3")
    rec.record(SCRIPT, folder)
    assert rec.close("finished") == 0


def test_importing_the_observer_needs_no_mlflow():
    code = "import raypar.train.logged_run, sys; assert 'mlflow' not in sys.modules and 'sqlalchemy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
