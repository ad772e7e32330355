"""A stored study as a `StudyFrame`."""

from __future__ import annotations

from pathlib import Path

from raypar.execution.best_model import last_final_test
from raypar.execution.stored import read_study
from raypar.reporting.frame import StudyFrame
from raypar.track.store import default_tracking_uri


def frame_of_study(study: str, project: Path, tracking_uri: str | None = None, *, all: bool = False) -> StudyFrame:
    """Return the trials of a study, see `raypar.load`. Raises RayparError.

    Args:
        project: the folder in which studies are run.
    """
    stored = read_study(study, tracking_uri or default_tracking_uri(project), project)
    final = last_final_test(stored.store, study)
    return StudyFrame.of(
        stored.question, stored.results, all=all, final_test=final.sentence(stored.question.unit) if final else ""
    )
