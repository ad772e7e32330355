"""`raypar study` from the shell: its output, its store, repeated calls and refusals."""

import re

import pytest
from harness import TIMEOUT_S, Cli, client_of, digits_study, report_in, runs_of

from raypar.track.store import Store, default_tracking_uri
from raypar.train.affinity import CAN_PIN, allowed_cores
from raypar.train.saved_model import WEIGHTS_FILE

STUDY = digits_study(
    '{"num_workers": grid(1, 2)}',
    "Does a second worker pay off for a tiny network?",
    baseline={"num_workers": 1},
    num_repeats=2,
    config={"epochs": 2, "batch_size": 256, "hidden_size": 32},
)
# Output of Ray, MLflow and their processes.
FOREIGN = re.compile(
    r"\b(INFO|WARNING|ERROR|DEBUG)\b|\(\w*pid=|raylet|ray::|Ray Tune|alembic|mlflow\.\w|Traceback|/tmp/"
)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """First execution of the study, on Ray."""
    cli = Cli(tmp_path_factory.mktemp("study"))
    cli.write("tiny.py", STUDY)
    return cli, cli.done("study", "tiny.py")


@pytest.mark.core
@pytest.mark.ray
def test_a_study_prints_its_trials_and_table_and_nothing_from_ray_or_mlflow(first):
    cli, output = first
    assert re.search(r"^\S+ [\d:]+  starting Ray \(usually 10-20 s\)$", output, re.MULTILINE)
    assert re.search(r"^tiny: .*4 trials", output, re.MULTILINE) and "speedup" in output
    assert len(re.findall(r"^\S+ [\d:]+  \[\d/4\] num_workers=[12] #[12]  trained ", output, re.MULTILINE)) == 4
    assert [line for line in output.splitlines() if FOREIGN.search(line)] == []
    cli.wait_for_its_processes()


@pytest.mark.core
@pytest.mark.ray
def test_the_mlflow_runs_of_a_study_are_complete(first):
    cli, _ = first
    client = client_of(cli.folder)
    (parent,) = runs_of(cli.folder, "tiny", "execution")
    assert parent.info.status == "FINISHED"
    assert {"version.raypar", "version.torch", "host", "cpu", "command"} <= set(parent.data.tags)
    assert [file.path for file in client.list_artifacts(parent.info.run_id)] == ["report.html", "study.py"]
    steps = {point.step for point in client.get_metric_history(parent.info.run_id, "scaling/speedup")}
    assert {1} <= steps <= {1, 2}  # on a busy machine the interval with two workers may be too noisy, and is left out
    points = {run.info.run_name: run.data.metrics["num_trials"] for run in runs_of(cli.folder, "tiny", "point")}
    assert points == {"w=1": 2, "w=2": 2}
    children = runs_of(cli.folder, "tiny", "trial")
    assert [child.info.status for child in children] == ["FINISHED"] * 4
    for child in children:
        times = ("train_time_s", "wall_s", "throughput_samples_per_s", "speedup")
        assert all(child.data.metrics[key] > 0 for key in times)
        for key in ("accuracy", "eval/loss", "train/loss"):
            assert len(client.get_metric_history(child.info.run_id, key)) == 2


# Each trial counts the threads of raypar and Ray that may run on its core.
APART = '''"""Trials on one of several cores."""
import os
from raypar import Study, Workload, grid

def loop(config):
    import ray.train
    from raypar.measure.cpu import raypar_processes
    mine, processes = os.sched_getaffinity(0), raypar_processes()
    threads = [int(each) for process in processes for each in os.listdir(f"/proc/{process.pid}/task")]
    beside = sum(bool(mine & os.sched_getaffinity(each)) for each in threads)
    ray.train.report({"cores": len(mine), "processes": len(processes), "beside": beside})

study = Study(
    workload=Workload.from_train_loop(loop),
    name="apart",
    space={"num_workers": grid(1)},
    num_repeats=4,
    config={"device": "cpu", "cpus_per_worker": 1},
)
'''


@pytest.mark.core
@pytest.mark.ray
@pytest.mark.skipif(not CAN_PIN or len(allowed_cores()) < 2, reason="needs a core that trials leave")
def test_trials_have_their_core_alone_and_follow_each_other_without_waiting_for_the_store(cli):
    cli.write("apart.py", APART)
    cli.done("study", "apart.py")
    results = sorted(Store(default_tracking_uri(cli.folder), cli.folder).results("apart"), key=lambda r: r.started_at)
    assert [result.final["cores"] for result in results] == [1.0] * 4
    assert min(result.final["processes"] for result in results) > 5, "the driver, Ray's own processes and a gang"
    assert [result.final["beside"] for result in results] == [0.0] * 4
    ends_at = [result.started_at + result.wall_s for result in results]
    assert all(end_at <= after.started_at for end_at, after in zip(ends_at, results[1:], strict=False))
    assert len(runs_of(cli.folder, "apart", "trial")) == 4
    cli.wait_for_its_processes()


@pytest.mark.ray
def test_a_repeated_study_runs_only_new_trials_and_reads_the_rest_from_the_store(first):
    cli, output = first
    again = cli.done("study", "tiny.py")
    assert report_in(again) == report_in(cli.done("report", "tiny")) == report_in(output)
    assert "gang" not in again and "trained" not in again
    more = cli.done("study", "tiny.py", "--repeats", "3", "--no-ray")
    assert "4 of 6 trials" in more and re.search(r"^tiny: .*6 trials", more, re.MULTILINE)
    assert sorted(re.findall(r"num_workers=(\d) #(\d)  trained", more)) == [("1", "3"), ("2", "3")]
    (line,) = [line for line in cli.done("list").splitlines() if line.startswith("tiny")]
    assert line.split()[:4] == ["tiny", "2", "6", "0"]
    assert len(re.findall(r"^\s*[12]\s+[123]\s+finished\s", cli.done("store", "show", "tiny"), re.MULTILINE)) == 6


NUM_CORES = len(allowed_cores())
NARROW = digits_study('{"lr": grid(0.1)}', num_repeats=2, config={"epochs": 2, "batch_size": 256, "cpus_per_worker": 1})


def test_a_second_study_waits_for_the_first_and_names_it(tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    processes = {}
    for folder in folders:
        folder.mkdir()
        cli = Cli(folder)
        cli.write(f"{folder.name}.py", NARROW)
        processes[cli] = cli.start("study", f"{folder.name}.py", "--no-ray")
    outputs = {}
    for cli, process in processes.items():
        assert process.wait(TIMEOUT_S) == 0, cli.output()
        outputs[cli] = cli.output()
    (waited,) = [cli for cli, output in outputs.items() if "waiting" in output]
    (first,) = {*processes} - {waited}
    has = f"study `{first.folder.name}` (process {processes[first].pid}) has {NUM_CORES} of {NUM_CORES} cores"
    assert f"waiting for cores: {has}; " in outputs[waited]
    stores = [Store(default_tracking_uri(cli.folder), cli.folder).results(cli.folder.name) for cli in (first, waited)]
    ends, starts = [r.started_at + r.wall_s for r in stores[0]], [r.started_at for r in stores[1]]
    assert len(ends) == len(starts) == 2 and max(ends) <= min(starts)


KEPT = '''
"""Which learning rate suits a linear model of the digits?"""
from raypar import Data, Split, Study, Workload, grid
from raypar.workloads import digits


def model(config):
    from torch import nn

    return nn.Linear(64, 10)


def data(config):
    every = digits.data(config)
    train, val = every.train, every.val
    parts = [Split(train.inputs[a:b], train.targets[a:b]) for a, b in ((0, 1000), (1000, 1536))]
    return Data(train=parts[0], val=parts[1], test=val, transform=every.transform)


study = Study(
    workload=Workload(name="linear", model=model, data=data, num_train_samples=1000, has_test=True),
    space={"lr": grid(0.0001, 0.5)},
    num_repeats=2,
    config={"epochs": 3, "batch_size": 50, "keep_model": True},
)
'''


def test_only_models_chosen_by_validation_see_the_test_set(cli, tmp_path):
    cli.write("linear.py", KEPT)
    output = cli.done("study", "linear.py", "--no-ray")
    pattern = r"Test set, seen once, by the 2 models .*?\(lr=0.5\): accuracy (\d+)"
    accuracy = re.search(pattern, " ".join(output.split()))
    assert accuracy is not None and int(accuracy[1]) > 80
    trials = runs_of(tmp_path, "linear", "trial")
    assert len(trials) == 4
    for trial in trials:
        files = client_of(tmp_path).list_artifacts(trial.info.run_id, "model")
        assert [file.path for file in files] == [f"model/{WEIGHTS_FILE}"]
        assert ("test/accuracy" in trial.data.metrics) == (trial.data.params["lr"] == "0.5")
    assert report_in(cli.done("report", "linear")) == report_in(output)
    cli.wait_for_its_processes()


def test_doctor_checks_everything_and_starts_ray(cli):
    done = cli.run("doctor")
    assert done.returncode == ("FAIL" in done.stdout) and not done.stderr  # a busy machine fails
    checks = ("versions", "packages", "cores", "memory", "disk", "data", "store", "torch", "GPU")
    assert all(check in done.stdout for check in (*checks, "Ray: starts in"))
    cli.wait_for_its_processes()
    done = cli.run("doctor", "--address", "127.0.0.1:1")
    assert done.returncode == 1 and "→ check that the cluster is up" in done.stdout
    assert "FAIL  cluster: no Ray cluster at --address 127.0.0.1:1" in done.stdout


@pytest.mark.ray
def test_files_named_like_modules_beside_a_study_break_neither_ray_nor_trials(cli):
    for name in ("cmd", "json", "logging", "ray", "torch", "mlflow", "click"):
        cli.write(f"{name}.py", "raise RuntimeError('imported')\n")
    cli.write("random.py", digits_study('{"lr": grid(0.1)}', config={"epochs": 1}))
    assert "[1/1] lr=0.1 #1" in cli.done("study", "random.py")
