"""The large store that benchmarks read has the rows that MLflow would have written."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from recording import new_store

from raypar.study.trial import Failure, FailureKind, TrialResult, TrialSpec, TrialState
from raypar.track.recorder import Execution, Recorder
from raypar.track.store import Store
from raypar.track.uploader import RunWriter

TABLES = ("experiments", "experiment_tags", "runs", "tags", "params", "metrics", "latest_metrics", "datasets", "inputs")
WRITTEN_AT = ("creation_time", "last_update_time")


def row_writer() -> type[RunWriter]:
    path = Path(__file__).parents[2] / "benchmarks" / "store_rows.py"
    spec = importlib.util.spec_from_file_location("store_rows", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    writer: type[RunWriter] = module.RowWriter
    return writer


def results(study: str) -> list[TrialResult]:
    found = []
    for batch_size in (32, 64, 128):
        config = {"num_workers": 2, "batch_size": batch_size, "device": "cpu", "cpus_per_worker": 1}
        found.append(
            TrialResult(
                spec=TrialSpec(study, "mlp", {"batch_size": batch_size}, config, 0, 0),
                state=TrialState.FAILED if batch_size == 128 else TrialState.FINISHED,
                started_at=1.7e9 + batch_size,
                wall_s=2.0,
                train_time_s=1.0,
                reports=tuple({"epoch": e, "accuracy": e / 10, "val_loss": 1 / e} for e in (1, 2, 3)),
                step_times_s=((0.25,) * 4, (0.2,) * 4),
                environment={"node": "n", "note": "long " * 4000},
                data={
                    "name": "digits",
                    "source": "embedded",
                    "splits": {"train": {"digest": "1f", "num_samples": 9}, "val": {"num_samples": 3}},
                },
                failure=Failure(FailureKind.ERROR, "boom", 0, "trace") if batch_size == 128 else None,
            )
        )
    return found


def record(project: Path, study: str, writer: RunWriter | None) -> None:
    execution = Execution(
        f"e-{study}",
        study,
        started_at=1.7e9,
        params={"seed": "0"},
        tags={"raypar.question": "{}"},
        description="What for?",
        study_source="study = 1\n",
    )
    times = iter(range(1_800_000_000, 1_900_000_000))
    uri = f"sqlite:///{project}/mlflow.db"
    recorder = Recorder(execution, tracking_uri=uri, project_dir=project, now=lambda: float(next(times)), writer=writer)
    recorder.start()
    for result in results(study):
        recorder.record(result)
        recorder.record_trial_metrics({result.spec.identity: {"speedup": 1.5}})
    recorder.record_trial_metrics({results(study)[0].spec.identity: {"speedup": 1.75}})
    recorder.record_metrics([("scaling/speedup", 1.0, 1), ("scaling/speedup", 1.9, 2)])
    recorder.add_artifact("report.html", "<p>done</p>")
    assert recorder.close("finished") == 0


def rows(project: Path) -> dict[str, Counter[str]]:
    """Every row of every table, with what is random or the time of writing left out."""
    with closing(sqlite3.connect(project / "mlflow.db")) as database:
        name_of = {run: f"<{name}>" for run, name in database.execute("SELECT run_uuid, name FROM runs")}
        uids = database.execute(
            "SELECT value FROM tags WHERE key = 'raypar.uid' UNION SELECT dataset_uuid FROM datasets"
            " UNION SELECT input_uuid FROM inputs"
        ).fetchall()
        names = {**name_of, **{uid: "<uid>" for (uid,) in uids if not uid.startswith("e-")}, str(project): "<project>"}

        def plain(value: Any) -> Any:
            for name in names if isinstance(value, str) else ():
                value = value.replace(name, names[name])
            return value

        found = {}
        for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            cursor = database.execute(f'SELECT * FROM "{table}"')
            columns = [column[0] for column in cursor.description]
            found[table] = Counter(
                json.dumps({c: plain(v) for c, v in zip(columns, row, strict=True) if c not in WRITTEN_AT})
                for row in cursor
            )
        return found


@pytest.fixture
def projects(tmp_path_factory) -> tuple[Path, Path]:
    folders = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    for folder in folders:
        new_store(folder)
    return folders


def test_all_rows_and_files_are_those_that_mlflow_writes(projects):
    by_mlflow, by_rows = projects
    writer = row_writer()(f"sqlite:///{by_rows}/mlflow.db", by_rows)
    for study in ("mnist", "digits"):
        record(by_mlflow, study, None)
        record(by_rows, study, writer)
    writer.flush()
    expected, found = rows(by_mlflow), rows(by_rows)
    assert all(expected[table] for table in TABLES)
    for table in expected:
        assert found[table] == expected[table], table
    stores = [Store(f"sqlite:///{project}/mlflow.db", project) for project in projects]
    for study in ("mnist", "digits"):
        assert stores[1].results(study) == stores[0].results(study) != ()
        for result in results(study):
            assert stores[1].step_times(study, result.spec.identity) == result.step_times_s
    files = [Counter(p.name for p in project.rglob("*") if p.is_file()) for project in projects]
    assert files[0] == files[1]
    assert files[0]["trial.json"] == 6
