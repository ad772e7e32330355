"""Studies that are in a store, as if they had been run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from raypar.analysis.question import Question
from raypar.study.trial import TrialResult
from raypar.track.recorder import Execution, Recorder


def recorded(
    folder: Path,
    question: Question,
    results: Sequence[TrialResult],
    tags: Mapping[str, str] | None = None,
    *,
    resume: Mapping[str, Any] | None = None,
    description: str = "",
    uid: str = "",
    started_at: float = 1.7e9,
) -> None:
    """One execution of a study, in the store of the folder."""
    name = question.study_name
    told = {"raypar.question": json.dumps(asdict(question)), "raypar.resume": json.dumps(resume or {})}
    execution = Execution(uid or name, name, started_at, tags={**(tags or {}), **told}, description=description)
    recorder = Recorder(execution, tracking_uri=f"sqlite:///{folder}/mlflow.db", project_dir=folder)
    recorder.start()
    for result in results:
        recorder.record(replace(result, spec=replace(result.spec, study=name)))
    assert recorder.close("finished") == 0
