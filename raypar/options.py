"""Where and how a study is run; what is run stands in its file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """The flags of a command that runs a study.

    Attributes:
        address: of a Ray cluster that is there (``auto``, ``host:port``); None: a private one.
        with_ray: False: ranks are forked on this machine, without Ray.
        rerun_all: run trials too whose results the store has.
        exclusive: nobody else uses the cluster at ``address``.
        not_before: Unix time; results of trials that were started before it don't count, as when ``--fresh`` goes on.
        command: the command line, for the record.
        settings: ``--set`` as given, for a later ``resume``.
        num_profiled_steps: after the training of every trial of the first repeat, so many are looked into; 0: none.
        log_model: the model of the best trial becomes a model in MLflow.
        system_metrics: how busy the driver's machine is during each trial is recorded.
        only_profiles: trials don't train, they are only looked into.
    """

    project_dir: Path
    tracking_uri: str
    address: str | None = None
    with_ray: bool = True
    isolation: str = "warm"
    rerun_all: bool = False
    trial_timeout_s: float | None = None
    command: Sequence[str] = ()
    settings: Sequence[str] = ()
    num_profiled_steps: int = 0
    only_profiles: bool = False
    log_model: bool = False
    system_metrics: bool = False
    exclusive: bool = False
    not_before: float = 0.0
