"""benchmarks/store_rows.py writes the same rows and files as MLflow."""

import importlib
import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

from recording import DATA, make_result, new_store, recorder
from results import stored_conditions

from raypar.study.trial import Failure, FailureKind, TrialState
from raypar.track.store import Store

TABLES = ("experiments", "experiment_tags", "runs", "tags", "params", "metrics", "latest_metrics", "datasets", "inputs")
WRITTEN_AT = ("creation_time", "last_update_time")
STUDIES = ("mnist", "digits")
RANDOM_IDS = """SELECT value FROM tags WHERE key = 'raypar.uid' AND value NOT LIKE 'e-%'
    UNION SELECT dataset_uuid FROM datasets UNION SELECT input_uuid FROM inputs"""


def results(study):
    """Return two finished trials and a failed one."""
    shared = {"study": study, "conditions": stored_conditions({"node": ["long " * 4000]}), "data": DATA}
    failure = Failure(FailureKind.ERROR, "boom", 0, "trace")
    failed = make_result(128, **shared, state=TrialState.FAILED, failure=failure)
    return [make_result(32, **shared), make_result(64, **shared), failed]


def record(project, study, writer):
    execution = {
        "params": {"seed": "0"},
        "tags": {"raypar.question": "{}"},
        "description": "?",
        "study_source": "s = 1",
    }
    times = map(float, range(1_800_000_000, 1_900_000_000))
    uri, uid = f"sqlite:///{project}/mlflow.db", f"e-{study}"
    rec = recorder(project, uri, uid, study, execution=execution, now=lambda: next(times), writer=writer)
    for result in results(study):
        rec.record(result)
        rec.record_trial_metrics({result.spec.identity: {"speedup": 1.5}})
    rec.record_trial_metrics({results(study)[0].spec.identity: {"speedup": 1.75}})
    rec.record_metrics([("scaling/speedup", 1.0, 1), ("scaling/speedup", 1.9, 2)])
    rec.add_artifact("report.html", "<p>done</p>")
    assert rec.close("finished") == 0


def rows(project):
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


def test_rows_and_files_match_those_of_mlflow(tmp_path, monkeypatch):
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
