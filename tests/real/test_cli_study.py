"""`raypar study` from the shell: what it prints, what it keeps, and what it does when asked again."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from commands import Cli, report_in, runs_of
from mlflow import MlflowClient

pytestmark = pytest.mark.ray

STUDY = '''
"""Does a second worker pay off for a tiny network?"""
from raypar import Study, grid
from raypar.workloads import digits

study = Study(
    workload=digits,
    space={"num_workers": grid(1, 2)},
    baseline={"num_workers": 1},
    num_repeats=2,
    config={"epochs": 2, "batch_size": 256, "hidden_size": 32},
)
'''
# How Ray, MLflow and what they start would show up.
FOREIGN = re.compile(
    r"\b(INFO|WARNING|ERROR|DEBUG)\b|\(\w*pid=|raylet|ray::|Ray Tune|alembic|mlflow\.\w|Traceback|/tmp/"
)

Done = tuple[Cli, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The study's first execution."""
    cli = Cli(tmp_path_factory.mktemp("study"))
    cli.write("tiny.py", STUDY)
    return cli, cli.run("study", "tiny.py")


@pytest.fixture(scope="module")
def again(first: Done) -> Done:
    """The same command once more."""
    return first[0], first[0].run("study", "tiny.py")


@pytest.fixture(scope="module")
def more(again: Done) -> Done:
    """With one repeat more than is done already, and without Ray."""
    return again[0], again[0].run("study", "tiny.py", "--repeats", "3", "--no-ray")


@pytest.mark.core
def test_a_study_ends_well_with_its_table_and_nothing_of_what_runs_beneath(first: Done) -> None:
    cli, done = first
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^tiny: 2 points, 4 trials$", done.stdout, re.MULTILINE)
    assert (
        re.search(r"^num_\s*time\s+speedup\s+eff\.\s+accuracy", done.stdout, re.MULTILINE) or "speedup" in done.stdout
    )
    assert len(re.findall(r"^\[\d/4\] num_workers=[12] #[12]  trained ", done.stdout, re.MULTILINE)) == 4
    assert [line for line in done.stdout.splitlines() if FOREIGN.search(line)] == []
    cli.wait_for_its_processes()


@pytest.mark.core
def test_whoever_knows_mlflow_finds_everything_in_it(first: Done) -> None:
    cli, _ = first
    client = MlflowClient(f"sqlite:///{cli.folder / 'mlflow.db'}")
    (parent,) = runs_of(cli.folder, "tiny", "execution")
    assert parent.info.status == "FINISHED"
    assert {"workload": "digits", "num_repeats": "2", "epochs": "2"}.items() <= parent.data.params.items()
    assert parent.data.tags["mlflow.note.content"] == "Does a second worker pay off for a tiny network?"
    assert {"version.raypar", "version.torch", "host", "cpu", "command"} <= set(parent.data.tags)
    assert [file.path for file in client.list_artifacts(parent.info.run_id)] == ["report.html", "study.py"]
    source = Path(client.download_artifacts(parent.info.run_id, "study.py", str(cli.folder)))
    assert source.read_text() == STUDY
    scaling = client.get_metric_history(parent.info.run_id, "scaling/speedup")
    assert {point.step: point.value for point in scaling}.keys() == {1, 2}

    children = runs_of(cli.folder, "tiny", "trial")
    assert len(children) == 4
    for run in children:
        assert run.info.status == "FINISHED"
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert {
            "epochs": "2",
            "batch_size": "256",
            "lr": "0.1",
            "optimizer": "momentum",
        }.items() <= run.data.params.items()
        assert run.data.metrics["num_workers"] == int(run.data.params["num_workers"])
        times = {"train_time_s", "wall_s", "startup_s", "throughput_samples_per_s", "step_time_median_s"}
        assert all(run.data.metrics[key] > 0 for key in times)
        assert run.data.metrics["speedup"] > 0
        epochs = client.get_metric_history(run.info.run_id, "train/epoch")
        assert [point.value for point in epochs] == [1, 2]
        for key in ("accuracy", "eval/loss", "train/loss", "train/learning_rate", "train/samples_per_second"):
            history = client.get_metric_history(run.info.run_id, key)
            assert [point.step for point in history] == [point.step for point in epochs]
        assert {"raypar.identity", "raypar.seed", "raypar.repeat", "raypar.env.cores"} <= set(run.data.tags)
        assert "trial.json" in [file.path for file in client.list_artifacts(run.info.run_id)]
    of_baseline = [run.data.metrics["speedup"] for run in children if run.data.params["num_workers"] == "1"]
    assert of_baseline == [1.0, 1.0]


def test_the_same_command_runs_nothing_and_tells_the_same(first: Done, again: Done) -> None:
    cli, done = again
    assert (done.returncode, done.stderr) == (0, "")
    assert report_in(done.stdout) == report_in(first[1].stdout)
    assert "gang" not in done.stdout and "trained" not in done.stdout
    assert len(runs_of(cli.folder, "tiny", "execution")) >= 1
    executions = [path for path in (cli.folder / ".raypar" / "logs").iterdir() if path.is_dir()]
    assert len(executions) <= 2  # this one has none


def test_report_tells_the_same_from_the_store(again: Done) -> None:
    cli, done = again
    report = cli.run("report", "tiny")
    assert (report.returncode, report.stderr) == (0, "")
    assert report_in(report.stdout) == report_in(done.stdout)


def test_one_more_repeat_runs_the_new_block_alone(more: Done) -> None:
    cli, done = more
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 of 6 trials" in done.stdout
    assert sorted(re.findall(r"num_workers=(\d) #(\d)  trained", done.stdout)) == [("1", "3"), ("2", "3")]
    children = runs_of(cli.folder, "tiny", "trial")
    assert sorted(run.data.tags["raypar.repeat"] for run in children) == ["0", "0", "1", "1", "2", "2"]
    assert re.search(r"^tiny: 2 points, 6 trials$", done.stdout, re.MULTILINE)


def test_list_and_show_know_the_study_and_its_trials(more: Done) -> None:
    cli, _ = more
    listed, shown = cli.run("list"), cli.run("show", "tiny")
    assert (listed.returncode, listed.stderr, shown.returncode, shown.stderr) == (0, "", 0, "")
    (line,) = [line for line in listed.stdout.splitlines() if line.startswith("tiny")]
    assert line.split()[:4] == ["tiny", "2", "6", "0"]
    assert len(re.findall(r"^[12]\s+[123]\s+finished\s", shown.stdout, re.MULTILINE)) == 6


def test_an_unknown_study_is_told_with_what_is_known(more: Done) -> None:
    cli, _ = more
    for command in ("report", "show", "resume"):
        done = cli.run(command, "tinny")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.splitlines()[0] == "error: no study `tinny` in the store"
        assert "tiny" in done.stderr.splitlines()[1]
