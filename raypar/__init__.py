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

# Imported when asked for: a training script that only reports needs no other package than raypar.
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
    """Return the trials of a study as a pandas frame, one row each, in the order in which they were started.

    Units stand in the columns' names (``train_time_s``). Swept hyperparameters come first, under their own names;
    columns that are empty or the same in every trial are dropped. ``repeat`` counts from 1; ``speedup`` is over the
    baseline's trial of the same block. ``.attrs`` has ``study``, ``metric``, ``mode``, ``baseline``, ``swept`` and, of
    the dropped columns, ``constants``.

    ``.points`` has a row for each point, ``.verdict`` the answer, ``.report()`` shows the report and ``.figures`` has
    its figures: ``.figures["speedup"].save("s.svg")``. What is selected or computed from the frame has none of these.

    Args:
        study: its name, as ``raypar list`` shows it.
        tracking_uri: the MLflow store; None: ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` in the folder.
        folder: in which studies are run; None: the current one.
        all: every column, as ``raypar store export`` has them; a prefix says what differs from study to study:
            ``point.`` (swept), ``config.`` (every hyperparameter), ``final.`` (the last report) and ``environment.``.

    Returns:
        The trials, as a `StudyFrame`.

    Raises:
        RayparError: there is no such study, or the store can't be read.
    """
    from raypar.errors import RayparError
    from raypar.execution.best_model import last_final_test
    from raypar.execution.stored import read_study
    from raypar.reporting.frame import StudyFrame
    from raypar.track.store import default_tracking_uri

    project = Path.cwd() if folder is None else Path(folder)
    if not project.is_dir():
        raise RayparError(f"folder = {str(folder)!r}: there is no such folder", hint="name the folder of the studies")
    stored = read_study(study, tracking_uri or default_tracking_uri(project), project)
    final = last_final_test(stored.store, study)
    return StudyFrame.of(
        stored.question, stored.results, all=all, final_test=final.sentence(stored.question.unit) if final else ""
    )
