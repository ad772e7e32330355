"""``raypar export``: trials and summaries of a stored study as files, or what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from recording import recorded
from results import make_result
from typer.testing import CliRunner

from raypar.analysis.question import Question
from raypar.cli.app import app

ORIGIN = {
    "version.torch": "2.15.0",
    "host": "n1",
    "cpu": "Xeon",
    "cores": "2",
    "git.commit": "abc",
    "command": "secret",
}
STEPS = ((0.5, 0.25), (0.5, 0.75))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a store with two executions of one study."""
    folder = tmp_path_factory.mktemp("project")
    uri = f"sqlite:///{folder}/mlflow.db"
    question = Question("mnist", {"num_workers": 1}, ("num_workers",))
    results = [
        make_result({"num_workers": n}, r, 4.0 / n + r / 100, step_times_s=STEPS, started_at=1.7e9 + 10 * r + n)
        for n in (1, 2)
        for r in range(3)
    ]
    recorded(folder, question, results[:3], {**ORIGIN, "version.torch": "2.14.0"}, uid="first")
    recorded(folder, question, results[3:], ORIGIN, description="Does it scale?", uid="second", started_at=1.7e9 + 100)
    return uri


def export(*args: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["export", *args], env={"COLUMNS": "200"})
    return done.exit_code, done.stdout, done.stderr


def test_every_table_has_the_same_trials(store: str, tmp_path: Path) -> None:
    frames = []
    for name, read in (("t.csv", pd.read_csv), ("t.parquet", pd.read_parquet)):
        code, out, err = export("mnist", str(tmp_path / name), "--tracking-uri", store)
        assert (code, err) == (0, "") and out == f"wrote the 6 trials of mnist to {tmp_path / name}\n"
        frames.append(read(tmp_path / name))
    for key in ("identity", "point.num_workers", "train_time_s", "speedup", "final.accuracy"):
        assert frames[0][key].tolist() == frames[1][key].tolist()
    assert sorted(frames[0]["point.num_workers"]) == [1, 1, 1, 2, 2, 2]


def test_json_brings_the_step_times_from_the_store(store: str, tmp_path: Path) -> None:
    assert export("mnist", str(tmp_path / "t.json"), "--tracking-uri", store)[0] == 0
    read = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    assert [trial["step_times_s"] for trial in read["trials"]] == [[list(rank) for rank in STEPS]] * 6


def test_a_summary_tells_what_the_report_tells_and_no_command_line(store: str, tmp_path: Path) -> None:
    code, out, _ = export("mnist", str(tmp_path / "t.md"), "--tracking-uri", store)
    text = (tmp_path / "t.md").read_text(encoding="utf-8")
    assert code == 0 and out == f"wrote a summary of mnist to {tmp_path / 't.md'}\n"
    assert text.startswith("# mnist\n\nDoes it scale?\n\nSwept: num_workers.")
    assert text.endswith("Provenance: torch 2.14.0 or 2.15.0; on n1 (Xeon; 2 cores); commit abc.\n")
    report = " ".join(CliRunner().invoke(app, ["report", "mnist", "--tracking-uri", store]).stdout.split())
    verdict = next(line.removeprefix("- ") for line in text.splitlines() if line.startswith("- 2 workers train"))
    assert verdict in report and "secret" not in text


def test_a_file_that_is_there_is_kept_unless_force_is_given(store: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("mine")
    code, out, err = export("mnist", str(path), "--tracking-uri", store)
    assert (code, out) == (2, "") and "is there already" in err and "--force" in err
    assert path.read_text() == "mine"
    assert export("mnist", str(path), "--tracking-uri", store, "--force")[0] == 0
    assert path.read_text().startswith("study,workload,identity,")


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("mnost", "t.csv", "no study `mnost` in the store\n  → did you mean 'mnist'?"),
        ("mnist", "t.xlsx", "t.xlsx: the ending says no format that is known"),
        ("mnist", "no/t.csv", "no/t.csv: can't be written"),
    ],
)
def test_what_can_not_be_exported_is_one_message_and_exit_code_2(
    store: str, tmp_path: Path, name: str, file: str, message: str
) -> None:
    code, out, err = export(name, str(tmp_path / file), "--tracking-uri", store)
    assert (code, out) == (2, "")
    assert message in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
