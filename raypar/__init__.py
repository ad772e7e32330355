"""raypar: declare a training study, run it on warm Ray Train gangs, and learn what parallelism bought."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from raypar.errors import RayparError, StudyError
from raypar.study.space import choice, grid, loguniform, randint, uniform
from raypar.study.study import Study
from raypar.study.workload import Data, Option, Split, Statistic, Workload

if TYPE_CHECKING:
    from raypar.report.frame import StudyFrame

__version__ = "0.1.0"

__all__ = [
    "Data",
    "Option",
    "RayparError",
    "Split",
    "Statistic",
    "Study",
    "StudyError",
    "Workload",
    "choice",
    "grid",
    "load",
    "loguniform",
    "randint",
    "uniform",
]


def load(study: str, tracking_uri: str | None = None, folder: Path | str | None = None) -> StudyFrame:
    """Return the trials of a study as a pandas frame, one row each, in the order in which they were started.

    Units stand in the columns' names (``train_time_s``). What differs from study to study has a prefix: ``point.``
    (swept hyperparameters), ``config.`` (all of them), ``final.`` (the last report) and ``environment.``; ``speedup``
    is over the baseline's trial of the same block. ``.attrs`` has ``study``, ``metric``, ``mode``, ``baseline`` and
    ``swept``; ``.figures`` has the report's figures, which a notebook shows: ``.figures["speedup"].save("s.svg")``.

    Args:
        study: its name, as ``raypar list`` shows it.
        tracking_uri: the MLflow store; None: ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` in the folder.
        folder: in which studies are run; None: the current one.

    Raises:
        RayparError: there is no such study, or the store can't be read.
    """
    from raypar.execution.stored import read_study
    from raypar.report.frame import StudyFrame
    from raypar.track.store import default_tracking_uri

    project = Path.cwd() if folder is None else Path(folder)
    if not project.is_dir():
        raise RayparError(f"folder = {str(folder)!r}: there is no such folder", hint="name the folder of the studies")
    stored = read_study(study, tracking_uri or default_tracking_uri(project), project)
    return StudyFrame.of(stored.question, stored.results)
