"""``raypar store export``: files and refusals; tests/golden has their contents."""

import json

import pandas as pd
import pytest
from command import raypar, refused
from recording import recorded
from results import make_result

from raypar.analysis.question import Question

ORIGIN = {"version.torch": "2.15.0", "host": "n1", "cpu": "Xeon", "cores": "2", "git.commit": "abc"}
ORIGIN |= {"command": "secret"}
STEPS = ((0.5, 0.25), (0.5, 0.75))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The address of a store with two executions of one study."""
    folder = tmp_path_factory.mktemp("project")
    question = Question("mnist", {"num_workers": 1}, ("num_workers",))
    results = [
        make_result({"num_workers": n}, r, 4.0 / n + r / 100, step_times_s=STEPS, started_at=1.7e9 + 10 * r + n)
        for n in (1, 2)
        for r in range(3)
    ]
    recorded(folder, question, results[:3], {**ORIGIN, "version.torch": "2.14.0"}, uid="first")
    recorded(folder, question, results[3:], ORIGIN, description="Does it scale?", uid="second", started_at=1.7e9 + 100)
    return f"sqlite:///{folder}/mlflow.db"


def exported(store, path, *flags):
    code, out, err = raypar("store", "export", "mnist", str(path), "--tracking-uri", store, *flags, width=200)
    wrote = "a summary" if path.suffix == ".md" else "the 6 trials"
    assert (code, out, err) == (0, f"wrote {wrote} of mnist to {path}\n", "")
    return path


def test_every_format_has_the_same_trials(store, tmp_path):
    frames = pd.read_csv(exported(store, tmp_path / "t.csv")), pd.read_parquet(exported(store, tmp_path / "t.parquet"))
    for key in ("identity", "point.num_workers", "train_time_s", "speedup", "final.accuracy"):
        assert frames[0][key].tolist() == frames[1][key].tolist()
    assert sorted(frames[0]["point.num_workers"]) == [1, 1, 1, 2, 2, 2]
    stored = json.loads(exported(store, tmp_path / "t.json").read_text(encoding="utf-8"))
    assert [trial["step_times_s"] for trial in stored["trials"]] == [[list(rank) for rank in STEPS]] * 6


def test_a_summary_has_all_versions_and_no_command_line(store, tmp_path):
    text = exported(store, tmp_path / "t.md").read_text(encoding="utf-8")
    assert text.startswith("# mnist\n\nDoes it scale? 2 workers are faster than 1: ")
    assert "\n\nSwept: num_workers." in text
    assert text.endswith("Provenance: torch 2.14.0 or 2.15.0; on n1 (Xeon; 2 cores); commit abc.\n")
    assert "secret" not in text


def test_an_existing_file_is_only_replaced_with_force(store, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("mine")
    refused("already exists → ", "store", "export", "mnist", str(path), "--tracking-uri", store)
    assert path.read_text() == "mine"
    assert exported(store, path, "--force").read_text().startswith("study,workload,identity,")


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("mnost", "t.csv", "no study `mnost` in the store → did you mean 'mnist'?"),
        ("mnist", "t.xlsx", "t.xlsx: unknown file format"),
        ("mnist", "no/t.csv", "no/t.csv: can't be written"),
    ],
)
def test_invalid_exports_are_refused(store, tmp_path, name, file, message):
    refused(message, "store", "export", name, str(tmp_path / file), "--tracking-uri", store)
    assert list(tmp_path.iterdir()) == []
