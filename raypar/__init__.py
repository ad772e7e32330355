"""raypar: declare a training study, run it on warm Ray Train gangs, and learn what parallelism bought."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.hooks import report, step

if TYPE_CHECKING:
    from raypar.errors import RayparError, StudyError
    from raypar.reporting.frame import StudyFrame
    from raypar.study.metric import Metric
    from raypar.study.space import choice, grid, loguniform, randint, uniform
    from raypar.study.study import Study
    from raypar.study.workload import Data, Option, Split, Statistic, Workload

# Imported on first use: a training script that only reports needs no package but raypar.
_MODULES = {
    **dict.fromkeys(("RayparError", "StudyError"), "raypar.errors"),
    **dict.fromkeys(("choice", "grid", "loguniform", "randint", "uniform"), "raypar.study.space"),
    **dict.fromkeys(("Data", "Option", "Split", "Statistic", "Workload"), "raypar.study.workload"),
    "Metric": "raypar.study.metric",
    "Study": "raypar.study.study",
}

__version__ = "0.1.0"

__all__ = [
    "Data",
    "Metric",
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
    "report",
    "step",
    "uniform",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'raypar' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def load(
    study: str, tracking_uri: str | None = None, folder: Path | str | None = None, *, all: bool = False
) -> StudyFrame:
    """Return the trials of a study as a pandas frame with one row per trial, in starting order.

    Column names carry the unit (``train_time_s``). Swept hyperparameters and the last report have their own names; if
    another column has the name, they keep the prefix of an export (``point.seed``). Swept hyperparameters come first.
    Columns that are empty or the same in every trial are dropped. ``repeat`` counts from 1; ``speedup`` is over the
    baseline's trial of the same block. ``.attrs`` has ``study``, ``metric``, ``mode``, ``baseline``, ``swept`` and the
    values of dropped columns (``constants``).

    ``.points`` has a row for each point, ``.verdict`` the answer and ``.figures`` the figures of the report:
    ``.figures["speedup"].save("s.svg")``. ``.report()`` shows the report. Frames derived from this one have none of
    these.

    Args:
        study: its name, as in ``raypar list``.
        tracking_uri: the MLflow store; None: ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` in the folder.
        folder: the folder in which studies are run; None: the current one.
        all: keep every column of ``raypar store export``, under the same names as without. Hyperparameters that are not
            swept have the prefix ``config.``, and conditions of the trial ``environment.``.

    Returns:
        The trials, as a `StudyFrame`.

    Raises:
        RayparError: the study does not exist, or the store can't be read.
    """
    from raypar.errors import RayparError
    from raypar.execution.frame import frame_of_study

    project = Path.cwd() if folder is None else Path(folder)
    if not project.is_dir():
        raise RayparError(f"folder = {str(folder)!r}: no such folder", hint="name the folder of the studies")
    return frame_of_study(study, project, tracking_uri, all=all)
