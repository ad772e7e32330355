"""Studies put into a store, as if they had been run."""

from __future__ import annotations

import contextlib
import functools
import json
import sqlite3
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from raypar.analysis.question import Question
from raypar.study.trial import TrialResult
from raypar.track.recorder import Execution, Recorder


@functools.cache
def _empty_database() -> bytes:
    """Return an empty database of the installed MLflow. Making its tables takes more than a second: once."""
    from raypar.track.client import connect

    with tempfile.TemporaryDirectory() as folder:
        connect(f"sqlite:///{folder}/mlflow.db")
        with contextlib.closing(sqlite3.connect(f"{folder}/mlflow.db")) as connection:
            return connection.serialize()


def new_store(folder: Path) -> Path:
    """Put an empty store into the folder, unless there is one."""
    path = folder / "mlflow.db"
    if not path.exists():
        path.write_bytes(_empty_database())
    return path


def recorded(
    folder: Path,
    question: Question,
    results: Sequence[TrialResult],
    tags: Mapping[str, str] | None = None,
    *,
    resume: Mapping[str, Any] | None = None,
    uid: str = "",
    started_at: float = 1.7e9,
    **execution: Any,
) -> None:
    """Record one execution of a study in the store of the folder; `execution`: other fields of `Execution`."""
    new_store(folder)
    name = question.study_name
    asked = {"raypar.question": json.dumps(asdict(question)), "raypar.resume": json.dumps(resume or {})}
    made = Execution(uid or name, name, started_at, tags={**(tags or {}), **asked}, **execution)
    recorder = Recorder(made, tracking_uri=f"sqlite:///{folder}/mlflow.db", project_dir=folder)
    recorder.start()
    for result in results:
        recorder.record(replace(result, spec=replace(result.spec, study=name)))
    assert recorder.close("finished") == 0
