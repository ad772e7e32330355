"""``raypar store import``: runs of others become a study, whose numbers are those of the runs."""

import json

import numpy as np
import pytest
from command import raypar, refused
from recording import client, new_store

START_MS = 1_700_000_000_000
TIMES = {1: (100.0, 104.0, 98.0), 2: (52.0, 53.0, 51.0), 4: (29.0, 28.0, 28.5)}


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    """The address of a store with an experiment that raypar did not make: nine runs, a failed and an empty one."""
    address = f"sqlite:///{new_store(tmp_path_factory.mktemp('theirs'))}"
    store = client(address)
    experiment = store.create_experiment("their runs")
    for n, times in TIMES.items():
        for i, time_s in enumerate(times):
            run = store.create_run(experiment, start_time=START_MS).info.run_id
            for key, value in {"n_gpus": n, "lr": 0.1, "seed": i, "output_dir": f"out/{n}/{i}"}.items():
                store.log_param(run, key, value)
            for step, accuracy in enumerate((0.5, 0.9 + i / 100)):
                store.log_metric(run, "val_accuracy", accuracy, step=step)
            store.log_metric(run, "epoch_time_s", time_s)
            store.log_metric(run, "images_per_s", 1000 / time_s)
            store.log_metric(run, "loss", time_s / 3)
            store.set_terminated(run, end_time=START_MS + round(3000 * time_s))
    store.set_terminated(store.create_run(experiment).info.run_id, "FAILED")
    store.set_terminated(store.create_run(experiment).info.run_id)
    return address


@pytest.fixture
def imported(uri, tmp_path, monkeypatch):
    """Import into the store of an empty folder; return what was printed."""
    new_store(tmp_path)
    monkeypatch.chdir(tmp_path)

    def run(*flags, source="their runs"):
        of = ["--from", uri] if source == "their runs" else []
        code, out, err = raypar("store", "import", source, *of, *flags, width=200)
        assert (code, err) == (0, "")
        return out

    return run


def answer(*command):
    code, out, err = raypar(*command, "--json", width=200)
    assert (code, err) == (0, ""), err
    return json.loads(out)


def medians():
    """Return the medians, whose ratios are the speedups of runs that are not paired: nothing says that they are."""
    return {n: float(np.median(times)) for n, times in TIMES.items()}


def test_runs_of_an_experiment_become_a_study(imported):
    out = imported(
        "--workers", "n_gpus", "--time", "epoch_time_s", "--metric", "val_accuracy", "--ignore", "output_dir"
    )
    assert "workers from `n_gpus`, time in s from `epoch_time_s`" in out
    assert "imported 9 runs of 3 points as study `their runs_imported`; 2 runs excluded" in out
    report = answer("report", "their runs_imported")
    middle = medians()
    by_count = {point["point"]["num_workers"]: point for point in report["points"]}
    for n in (2, 4):
        assert by_count[n]["speedup"]["value"] == pytest.approx(middle[1] / middle[n], rel=1e-6)
        assert by_count[n]["speedup"]["low"] < by_count[n]["speedup"]["value"] < by_count[n]["speedup"]["high"]
    assert by_count[1]["metric"]["value"] == pytest.approx(0.91)


def test_what_is_unknown_about_imported_runs_is_marked(imported):
    imported("--ignore", "output_dir", "--as", "theirs")
    text = raypar("report", "theirs", "--verbose", width=1000)[1]
    assert "9 of 9 trials were imported, not run by raypar, with times of `epoch_time_s`" in text
    assert "isolation from other programs and the order of runs are unknown" in text
    assert "Equal work of the points is not proven: the runs were imported." in text
    assert "paired" not in text


def test_other_commands_read_an_imported_study(imported):
    imported("--ignore", "output_dir", "--as", "theirs")
    (group,) = answer("model", "fit", "theirs")["groups"]
    middle = medians()
    assert [point["speedup"]["value"] for point in group["points"]] == pytest.approx(
        [1, middle[1] / middle[2], middle[1] / middle[4]]
    )
    assert raypar("recommend", "theirs")[0] == 0
    (candidate,) = answer("model", "predict", "theirs", "--workers", "16")["candidates"]
    assert candidate["name"] == "theirs"
    refused("was imported: raypar has no code to run", "store", "resume", "theirs")


def test_metrics_of_runs_that_share_no_block_are_compared(imported, tmp_path):
    rows = [f"{n},{time_s},{0.91 + i / 10_000}" for n, times in TIMES.items() for i, time_s in enumerate(times)]
    (tmp_path / "runs.csv").write_text("\n".join(["gpus,time_s,accuracy", *rows]), "utf-8")
    refused("or judge runs by it: --metric accuracy", "store", "import", "runs.csv")
    imported("--metric", "accuracy", source="runs.csv")
    assert "Recommended: num_workers=4" in raypar("report", "runs_imported", width=200)[1]


def test_a_parameter_that_varies_is_named(uri, tmp_path, monkeypatch):
    new_store(tmp_path)
    monkeypatch.chdir(tmp_path)
    message = "--by output_dir, or leave it out with --ignore output_dir"
    refused(message, "store", "import", "their runs", "--from", uri)


def test_the_duration_of_a_run_can_be_its_time(imported):
    imported("--ignore", "output_dir", "--time", "run_duration_s", "--as", "theirs")
    times = {p["point"]["num_workers"]: p["time_s"]["value"] for p in answer("report", "theirs")["points"]}
    assert times == pytest.approx({n: 3 * value for n, value in medians().items()}, rel=0.01)


def test_an_existing_study_or_experiment_is_kept(uri, imported, tmp_path):
    imported("--ignore", "output_dir", "--as", "theirs")
    again = ("store", "import", "their runs", "--from", uri, "--ignore", "output_dir")
    refused("`theirs` already exists", *again, "--as", "theirs")
    client(f"sqlite:///{tmp_path}/mlflow.db").create_experiment("mine")
    refused("`mine` already exists", *again, "--as", "mine")


def test_a_table_of_throughputs_with_several_models(imported, tmp_path):
    lines = ["model;GPUs;img/s;acc", "a;1;100,5;0,7", "a;2;190,5;0,8", "b;1;50;0,5", "b;4;150;0,5"]
    (tmp_path / "t.csv").write_text("\n".join(lines), encoding="utf-8")
    imported("--by", "model", "--metric", "acc", source="t.csv")
    points = {(p["point"]["model"], p["point"]["num_workers"]): p for p in answer("report", "t_imported")["points"]}
    assert points["a", 2]["speedup"]["value"] == pytest.approx(190.5 / 100.5)
    assert points["b", 4]["speedup"]["value"] == pytest.approx(3)
    assert points["a", 2]["metric"]["value"] == pytest.approx(0.8)


def test_times_of_weak_scaling_are_compared_by_the_work_of_a_worker(imported, tmp_path):
    (tmp_path / "w.csv").write_text("nodes,time\n1,50\n2,51\n4,52\n", encoding="utf-8")
    imported("--scaling", "weak", source="w.csv")
    (group,) = answer("model", "fit", "w_imported")["groups"]
    assert group["scaling"] == "weak"
    assert [p["speedup"]["value"] for p in group["points"]] == pytest.approx([1, 100 / 51, 200 / 52])
