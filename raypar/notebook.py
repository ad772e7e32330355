"""Studies in a notebook: `load` gives the trials of one as a pandas frame."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from raypar.errors import RayparError
from raypar.stored_study import read_study
from raypar.track.store import default_tracking_uri

if TYPE_CHECKING:
    from raypar.report.frame import StudyFrame


def load(study: str, tracking_uri: str | None = None, folder: Path | str | None = None) -> StudyFrame:
    """See `raypar.load`."""
    from raypar.report.frame import StudyFrame

    project = Path.cwd() if folder is None else Path(folder)
    if not project.is_dir():
        raise RayparError(f"folder = {str(folder)!r}: there is no such folder", hint="name the folder of the studies")
    found = read_study(study, tracking_uri or default_tracking_uri(project), project)
    return StudyFrame.of(found.question, found.results)
