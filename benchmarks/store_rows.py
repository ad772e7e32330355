"""Writer of runs to an embedded MLflow database in one transaction, with the rows that MLflow writes one by one.

All layers above are raypar's: `Recorder` journals, `Uploader` turns records into runs, params, metrics, tags and files.
Fields that MLflow sets itself (user, source) are copied from one run of each study that MLflow creates.
tests/unit/test_benchmark_store_rows.py compares the database with one written through MLflow.
"""

from __future__ import annotations

import math
import sqlite3
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from raypar.track.client import sqlite_path
from raypar.track.names import clip
from raypar.track.run_writer import RunRef, RunWriter
from raypar.track.runs import Input, Point

MAX_RUN_NAME_LENGTH = 500


class RowWriter(RunWriter):
    """Writer that keeps runs in memory until `flush`."""

    def __init__(self, tracking_uri: str, project_dir: Path) -> None:
        super().__init__(tracking_uri, project_dir)
        database = sqlite_path(tracking_uri)
        assert database is not None, f"{tracking_uri} is not an embedded database"
        self._database = database
        self._models: dict[str, tuple[RunRef, dict[str, Any], dict[str, str]]] = {}
        self._clear()

    def _clear(self) -> None:
        self._runs: dict[str, dict[str, Any]] = {}
        self._tags: dict[tuple[str, str], str] = {}
        self._params: dict[tuple[str, str], str] = {}
        self._points: dict[str, dict[tuple[Any, ...], None]] = {}
        self._inputs: dict[tuple[str, str, str], Input] = {}

    def find(self, study: str, **tags: str) -> RunRef | None:
        self.flush()
        return super().find(study, **tags)

    def find_running(self, study: str, kind: str, **tags: str) -> list[RunRef]:
        self.flush()
        return super().find_running(study, kind, **tags)

    def point_runs(self, study: str) -> dict[str, RunRef]:
        self.flush()
        return super().point_runs(study)

    def create(self, study: str, name: str, start_ms: int, tags: Mapping[str, str]) -> RunRef:
        if study not in self._models:
            model = super().create(study, name, start_ms, tags)
            row, row_tags = self._read(model.run_id)
            self._models[study] = model, row, {key: row_tags[key] for key in row_tags.keys() - tags.keys()}
            self._runs[model.run_id] = row
            return model
        model, row, model_tags = self._models[study]
        run_id, name = uuid.uuid4().hex, clip(name, MAX_RUN_NAME_LENGTH)
        run = RunRef(run_id, model.artifact_uri.replace(model.run_id, run_id))
        self._runs[run_id] = {
            **row,
            "run_uuid": run_id,
            "name": name,
            "start_time": start_ms,
            "artifact_uri": run.artifact_uri,
        }
        for key, value in {**model_tags, **tags, "mlflow.runName": name}.items():
            self._tags[run_id, key] = value
        return run

    def log(
        self,
        run: RunRef,
        *,
        params: Mapping[str, str] | None = None,
        points: Sequence[Point] = (),
        tags: Mapping[str, str] | None = None,
    ) -> None:
        for key, value in (params or {}).items():
            self._params[run.run_id, key] = value
        for key, value in (tags or {}).items():
            self._tags[run.run_id, key] = value
        for p in points:
            assert math.isfinite(p.value)
            self._points.setdefault(run.run_id, {})[p.key, p.value, p.time_ms, p.step] = None

    def log_inputs(self, run: RunRef, inputs: Sequence[Input]) -> None:
        for i in inputs:  # a data set in two contexts keeps the first, as with MLflow
            self._inputs.setdefault((run.run_id, i.name, i.digest), i)

    def end(self, run: RunRef, status: str, end_ms: int) -> None:
        if run.run_id in self._runs:
            self._runs[run.run_id].update(status=status, end_time=end_ms)
        else:  # written meanwhile
            super().end(run, status, end_ms)

    def flush(self) -> None:
        """Write all pending rows, in one transaction."""
        latest = [(run, *point) for run, points in self._points.items() for point in _latest(points)]
        points = [(run, *point) for run, points in self._points.items() for point in points]
        with closing(sqlite3.connect(self._database)) as database, database:
            if runs := list(self._runs.values()):
                columns = list(runs[0])
                database.executemany(
                    f"INSERT OR REPLACE INTO runs ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})",
                    [tuple(row[column] for column in columns) for row in runs],
                )
            for table, pairs in (("tags", self._tags), ("params", self._params)):
                database.executemany(
                    f"INSERT OR REPLACE INTO {table} (run_uuid, key, value) VALUES (?, ?, ?)",
                    [(run, key, value) for (run, key), value in pairs.items()],
                )
            for table, rows in (("metrics", points), ("latest_metrics", latest)):
                database.executemany(
                    f"INSERT OR REPLACE INTO {table} (run_uuid, key, value, timestamp, step, is_nan)"
                    " VALUES (?, ?, ?, ?, ?, 0)",
                    rows,
                )
            for (run, name, digest), used in self._inputs.items():
                self._write_input(database, run, name, digest, used)
        self._clear()

    def _write_input(self, database: sqlite3.Connection, run: str, name: str, digest: str, used: Input) -> None:
        key = (self._runs[run]["experiment_id"], name, digest)
        database.execute(
            "INSERT OR IGNORE INTO datasets (dataset_uuid, experiment_id, name, digest, dataset_source_type,"
            " dataset_source, dataset_schema, dataset_profile) VALUES (?, ?, ?, ?, 'code', ?, ?, ?)",
            [uuid.uuid4().hex, *key, used.source, used.schema or None, used.profile],
        )
        (dataset,) = database.execute(
            "SELECT dataset_uuid FROM datasets WHERE experiment_id = ? AND name = ? AND digest = ?", key
        ).fetchone()
        input_id = uuid.uuid4().hex
        database.execute("INSERT INTO inputs VALUES (?, 'DATASET', ?, 'RUN', ?, 0)", [input_id, dataset, run])
        database.execute("INSERT INTO input_tags VALUES (?, 'mlflow.data.context', ?)", [input_id, used.context])

    def _read(self, run_id: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Return a run's row and its tags."""
        with closing(sqlite3.connect(self._database)) as database:
            cursor = database.execute("SELECT * FROM runs WHERE run_uuid = ?", [run_id])
            row = dict(zip([column[0] for column in cursor.description], cursor.fetchone(), strict=True))
            return row, dict(database.execute("SELECT key, value FROM tags WHERE run_uuid = ?", [run_id]).fetchall())


def _latest(points: Mapping[tuple[Any, ...], None]) -> Iterator[tuple[Any, ...]]:
    """Yield the point of each metric that MLflow shows: the last by step, then by time, then by value."""
    best: dict[str, tuple[Any, ...]] = {}
    for key, value, time_ms, step in points:
        latest = best.get(key)
        if latest is None or (step, time_ms, value) >= (latest[3], latest[2], latest[1]):
            best[key] = (key, value, time_ms, step)
    yield from best.values()
