"""The options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

StudyFile = Annotated[Path, typer.Argument(metavar="FILE", help="The study file, e.g. studies/quickstart.py.")]
StudyName = Annotated[str, typer.Argument(metavar="STUDY", help="The study's name, as `raypar list` shows it.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Fix a hyperparameter, or sweep it: --set num_workers=1,2."),
]
Repeats = Annotated[int | None, typer.Option(help="Run every point this often.")]
Seed = Annotated[int | None, typer.Option(help="Derive everything random from this.")]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="A Ray cluster that is there: auto or host:port; for study also http://host:port, the dashboard of one to "
        "submit to. (default: a local Ray)",
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Where data sets are. (default: RAYPAR_DATA_DIR, else the user's cache)"),
]
TrackingUri = Annotated[
    str | None,
    typer.Option(metavar="URI", help="The MLflow store. (default: MLFLOW_TRACKING_URI, else ./mlflow.db)"),
]
Isolation = Annotated[str, typer.Option(help="warm: gangs serve trial after trial; fresh: a gang for every trial.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Run trials again that the store has results of.")]
NoRay = Annotated[bool, typer.Option("--no-ray", help="Run on this machine without Ray (no searches).")]
Timeout = Annotated[
    float | None,
    typer.Option("--trial-timeout", metavar="SECONDS", help="A trial that takes longer counts as hung."),
]
Price = Annotated[
    float | None, typer.Option(metavar="X", help="What a node costs an hour. (default: what the study says)")
]
LogModel = Annotated[
    bool,
    typer.Option("--log-model", help="Log the best trial's model in MLflow; trials keep theirs for it (keep_model)."),
]
Exclusive = Annotated[
    bool, typer.Option("--exclusive", help="Nobody else uses the cluster: idle gangs stay, and hold no CPUs in Ray.")
]
SystemMetrics = Annotated[
    bool, typer.Option("--system-metrics", help="Record how busy this machine is during each trial.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
