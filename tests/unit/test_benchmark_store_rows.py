"""benchmarks/store_rows.py writes the rows and files that MLflow would have written."""

from __future__ import annotations

import importlib
import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from recording import new_store

from raypar.study.trial import Failure, FailureKind, TrialResult, TrialSpec, TrialState
from raypar.track.recorder import Execution, Recorder
from raypar.track.store import Store
from raypar.track.uploader import RunWriter

TABLES = ("experiments", "experiment_tags", "runs", "tags", "params", "metrics", "latest_metrics", "datasets", "inputs")
WRITTEN_AT = ("creation_time", "last_update_time")
STUDIES = ("mnist", "digits")
RANDOM_IDS = """SELECT value FROM tags WHERE key = 'raypar.uid' AND value NOT LIKE 'e-%'
    UNION SELECT dataset_uuid FROM datasets UNION SELECT input_uuid FROM inputs"""


def results(study: str) -> list[TrialResult]:
    """Return two finished trials and a failed one."""
    splits = {"train": {"digest": "1f", "num_samples": 9}, "val": {"num_samples": 3}}
    return [
        TrialResult(
            spec=TrialSpec(study, "mlp", {"batch_size": size}, {"num_workers": 2, "batch_size": size}, 0, 0),
            state=TrialState.FAILED if failure else TrialState.FINISHED,
            started_at=1.7e9 + size,
            wall_s=2.0,
            train_time_s=1.0,
            reports=tuple({"epoch": e, "accuracy": e / 10, "val_loss": 1 / e} for e in (1, 2, 3)),
            step_times_s=((0.25,) * 4, (0.2,) * 4),
            environment={"node": "n", "note": "long " * 4000},
            data={"name": "digits", "source": "embedded", "splits": splits},
            failure=failure,
        )
        for size, failure in ((32, None), (64, None), (128, Failure(FailureKind.ERROR, "boom", 0, "trace")))
    ]


def record(project: Path, study: str, writer: RunWriter | None) -> None:
    tags = {"raypar.question": "{}"}
    execution = Execution(f"e-{study}", study, 1.7e9, {"seed": "0"}, tags, description="?", study_source="study = 1\n")
    times = map(float, range(1_800_000_000, 1_900_000_000))
    uri = f"sqlite:///{project}/mlflow.db"
    recorder = Recorder(execution, tracking_uri=uri, project_dir=project, now=lambda: next(times), writer=writer)
    recorder.start()
    for result in results(study):
        recorder.record(result)
        recorder.record_trial_metrics({result.spec.identity: {"speedup": 1.5}})
    recorder.record_trial_metrics({results(study)[0].spec.identity: {"speedup": 1.75}})
    recorder.record_metrics([("scaling/speedup", 1.0, 1), ("scaling/speedup", 1.9, 2)])
    recorder.add_artifact("report.html", "<p>done</p>")
    assert recorder.close("finished") == 0


def rows(project: Path) -> dict[str, Counter[str]]:
    """Return the rows of every table, without random ids and the time of writing."""
    with closing(sqlite3.connect(project / "mlflow.db")) as database:
        names = {run: f"<{name}>" for run, name in database.execute("SELECT run_uuid, name FROM runs")}
        names |= {str(project): "<project>", **{uid: "<uid>" for (uid,) in database.execute(RANDOM_IDS)}}
        tables = {}
        for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            cursor = database.execute(f'SELECT * FROM "{table}"')
            columns = [column[0] for column in cursor.description]
            tables[table] = Counter()
            for row in cursor:
                text = json.dumps({c: v for c, v in zip(columns, row, strict=True) if c not in WRITTEN_AT})
                for name, plain in names.items():
                    text = text.replace(name, plain)
                tables[table][text] += 1
        return tables


def test_rows_and_files_are_those_that_mlflow_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    projects = by_mlflow, by_rows = tmp_path / "a", tmp_path / "b"
    for project in projects:
        project.mkdir()
        new_store(project)
    writer = importlib.import_module("store_rows").RowWriter(f"sqlite:///{by_rows}/mlflow.db", by_rows)
    for study in STUDIES:
        record(by_mlflow, study, None)
        record(by_rows, study, writer)
    writer.flush()
    expected = rows(by_mlflow)
    assert all(expected[table] for table in TABLES)
    assert rows(by_rows) == expected
    stores = [Store(f"sqlite:///{project}/mlflow.db", project) for project in projects]
    for study in STUDIES:
        assert stores[1].results(study) == stores[0].results(study) != ()
        for result in results(study):
            assert stores[1].step_times(study, result.spec.identity) == result.step_times_s
    files = [Counter(path.name for path in project.rglob("*") if path.is_file()) for project in projects]
    assert files[0] == files[1] and files[0]["trial.json"] == 6
