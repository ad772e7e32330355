"""Messages between a runner and a rank: a `TrialJob` in, reports and a `RankOutcome` out."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from raypar.study.conditions import RankConditions
from raypar.study.observation import ObservedRank
from raypar.study.options import ON_CPU, Auto
from raypar.study.trial import DataRecord, LoadSample, TrialSpec

if TYPE_CHECKING:
    from raypar.measure.spans import RecordedSteps
    from raypar.measure.telemetry import RankCounters

ARTIFACT_FOLDER, CHECKPOINT_FOLDER = "artifacts", "checkpoints"  # below a trial's folder of logs
# In a trial's artifacts; REPORTS_FOLDER has a folder for each report, counted from 0.
MODEL_FOLDER, REPORTS_FOLDER, PROFILE_FOLDER = "model", "reports", "profile"
LOGGED_FOLDER = ".mlflow"  # there as well, see `raypar.train.logged_run`
# Variable of a fork server: a JSON object with the earlier values of the variables that it has replaced.
REPLACED_VARIABLES = "RAYPAR_REPLACED_VARIABLES"


@dataclass(frozen=True)
class Profiling:
    """Profiling of some steps after the training, or instead of it."""

    num_steps: int = 0
    instead_of_training: bool = False


NO_PROFILING = Profiling()


@dataclass(frozen=True)
class Revision:
    """Code that the ranks of some trials run: a checkout of the user's repository and an interpreter.

    Attributes:
        label: value of the hyperparameter `raypar.study.trial.REVISION`; empty: the study compares no revisions.
        sys_path: folders that come first on ``sys.path``; the first is the study file's.
        preload: modules imported ahead of the trials, once per node.
        workload: the Workload, pickled by value if the study file defines it; empty: that of the run.
        folder: working folder of the ranks; None: that of the driver.
        repository: top folder of the user's working tree; on ``sys.path``, `checkout` replaces it. None: no checkout.
        checkout: top folder of the revision's files.
        raypar_path: folder with only the driver's raypar, which takes precedence over the checkout.
        python: interpreter; empty: the driver's.
        code: digests of its source files, see `raypar.provenance`.
        is_command: its trials run a command.
    """

    label: str = ""
    sys_path: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    workload: bytes = b""
    folder: Path | None = None
    repository: Path | None = None
    checkout: Path | None = None
    raypar_path: str = ""
    python: str = ""
    code: Mapping[str, str] = field(default_factory=dict)
    is_command: bool = False


@dataclass(frozen=True)
class CheckJob:
    """Check of data and model of some points, in a separate process, before anything is trained.

    Attributes:
        workload: pickled.
        points: label and complete config of each.
        seed: of the generators.
        sys_path: folders that come first on ``sys.path``.
        environment: variables that every rank gets.
    """

    workload: bytes
    points: tuple[tuple[str, Mapping[str, Any]], ...]
    seed: int
    sys_path: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run. None of them determines a result.

    Attributes:
        log_dir: folder of the ranks' output, with a folder per trial; an absolute path on this machine, see `here`.
        isolation: "warm": ranks are forks in gangs that serve trial after trial; "fresh": every trial gets a new gang
            and new interpreters.
        environment: variables of every rank, set before torch is imported.
        sys_path: folders from which the study's own modules are imported.
        preload: modules imported ahead of the trials, once per node.
        trial_timeout_s: a trial that takes longer counts as hung; None: no limit.
        stop_grace_s: time for a rank to reach its next report after a stop, before it is killed.
        auto: values of the options that the study leaves to the machines, for the points of a search.
        driver_dir: the driver's folder of logs; None: `log_dir`. Nodes that can write to it (shared storage, the
            driver's machine) keep their trials' artifacts there. Other nodes send them.
        profiling: profiling of every trial of the first repeat.
        exclusive: nobody else uses the Ray cluster, so idle gangs hold no CPUs there.
        sources: files of the study's folder by name, for machines without the folder that run its command.
        revisions: versions of the code that the study compares; empty: one version.
        sampling: context manager around a trial that samples the load of a machine; None: no samples.
        is_command: the trials run a command.
        ends_at: Unix time at which the run has to have ended; None: no limit.
        expected_s: seconds that earlier trials took, by point.
        metric: key of the reports that trials are judged by; empty: unknown.
    """

    log_dir: Path
    isolation: str = "warm"
    environment: Mapping[str, str] = field(default_factory=dict)
    sys_path: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    trial_timeout_s: float | None = None
    stop_grace_s: float = 10.0
    auto: Auto = ON_CPU
    driver_dir: Path | None = None
    profiling: Profiling = NO_PROFILING
    exclusive: bool = False
    sources: Mapping[str, bytes] = field(default_factory=dict)
    revisions: tuple[Revision, ...] = ()
    sampling: Callable[[], AbstractContextManager[Sequence[LoadSample]]] | None = None
    is_command: bool = False
    ends_at: float | None = None
    expected_s: Mapping[str, float] = field(default_factory=dict)
    metric: str = ""

    def here(self) -> RunSettings:
        """Return the settings with this node's folder of logs; other nodes than the driver's use a temporary folder."""
        if self.driver_dir is None:
            return self
        return replace(self, log_dir=Path(tempfile.gettempdir()) / self.log_dir.name)

    def revision(self, label: str = "") -> Revision:
        """Return the code that trials with this label run; for an unknown label, the study's only version.

        A study that compares no versions may use the hyperparameter's name for its own purposes.
        """
        of_label = {revision.label: revision for revision in self.revisions}
        return of_label.get(label) or Revision("", self.sys_path, self.preload, is_command=self.is_command)

    def log_path(self, spec: TrialSpec, attempt: int, rank: int = 0) -> Path:
        """Return the path of a rank's log."""
        return self.log_dir / spec.identity / f"attempt{attempt}-rank{rank}.log"

    def job(self, spec: TrialSpec, attempt: int, workload: bytes, uid: str = "") -> TrialJob:
        """Return the job of a trial's attempt, with the workload of its revision or else `workload`."""
        return TrialJob(spec, attempt, self.revision(spec.placement.revision).workload or workload, self, uid)


@dataclass(frozen=True)
class TrialJob:
    """One attempt at one trial, sent by the runner to each of its ranks.

    Attributes:
        attempt: number of the attempt, from 1.
        workload: the Workload, pickled by value if the study file defines it.
        uid: the runner's name for the trial.
        shares_driver_dir: its node can write to `RunSettings.driver_dir`.
    """

    spec: TrialSpec
    attempt: int
    workload: bytes
    settings: RunSettings
    uid: str = ""
    shares_driver_dir: bool = False

    @property
    def folder(self) -> Path:
        return self.settings.log_dir / self.spec.identity

    @property
    def revision(self) -> Revision:
        """Code that the trial runs."""
        return self.settings.revision(self.spec.placement.revision)

    @property
    def artifact_dir(self) -> Path:
        """Folder of rank 0's trained model and of a profile's traces."""
        shared = self.settings.driver_dir if self.shares_driver_dir else None
        return (shared or self.settings.log_dir) / self.spec.identity / ARTIFACT_FOLDER

    @property
    def sends_artifacts(self) -> bool:
        """True if the driver can't see `artifact_dir`."""
        return self.settings.driver_dir is not None and not self.shares_driver_dir

    def on_this_node(self) -> TrialJob:
        """Return the job with this node's folder of logs, and the driver's for artifacts if it can write there."""
        folder = self.settings.driver_dir  # its name is unique to an execution, so no other machine has it by chance
        is_shared = folder is not None and os.access(folder, os.W_OK | os.X_OK)
        return replace(self, settings=self.settings.here(), shares_driver_dir=is_shared)

    @property
    def profiling(self) -> Profiling:
        """Profiling of this trial: only one repeat of a point is profiled."""
        return self.settings.profiling if self.spec.repeat == 0 else NO_PROFILING

    def log_path(self, rank: int) -> Path:
        return self.settings.log_path(self.spec, self.attempt, rank)


@dataclass(frozen=True)
class RankContext:
    """One rank of a trial.

    Attributes:
        master_address: host and port at which rank 0 listens for the others.
        requested_at_s: ``time.monotonic()`` on this node when the rank was requested.
        cores: cores that the rank is pinned to; empty: not pinned.
        environment: variables of this rank, in addition to those of the run.
        node_ip: address of this node for other nodes; empty if there are none.
        node_cores: cores of all of the trial's ranks on this node; empty: not pinned.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_address: tuple[str, int] = ("", 0)
    requested_at_s: float = 0.0
    cores: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    node_ip: str = ""
    node_cores: tuple[int, ...] = ()

    @property
    def node_ranks(self) -> range:
        """The trial's ranks on this node, which are numbered consecutively."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)


@dataclass(frozen=True)
class RankOutcome:
    """One rank's measurements at its end; times in seconds on its own clock.

    Attributes:
        counters: counters over the timed regions; None if there were none.
        profile: its recorded steps; None if there are none.
        observed: ranks of a script that it ran, or the rank itself.
        observed_step_times_s: time of each step of these, ``[rank][step]``.
        data: rank 0's description of the data, see `raypar.train.data_identity.fingerprint`; empty on other ranks.
        is_idle: it only held its cores for the command of its node's first rank.
    """

    stopped: bool = False
    startup_s: float | None = None
    data_time_s: float | None = None
    warmup_s: float | None = None
    train_time_s: float | None = None
    eval_time_s: float | None = None
    wall_s: float = 0.0
    num_samples: int | None = None
    step_times_s: tuple[float, ...] = ()
    conditions: RankConditions = field(default_factory=RankConditions)
    counters: RankCounters | None = None
    profile: RecordedSteps | None = None
    observed: tuple[ObservedRank, ...] = ()
    observed_step_times_s: tuple[tuple[float, ...], ...] = ()
    data: DataRecord = field(default_factory=DataRecord)
    is_idle: bool = False


class StopTrial(BaseException):
    """Raised by a report to end the trial. A BaseException, so that ``except Exception`` in a loop doesn't catch it."""


class Channel(Protocol):
    """A rank's connection to its runner."""

    def report(self, metrics: Mapping[str, float]) -> bool:
        """Report metrics, at the same points on every rank; return False, on all ranks alike, to stop the trial."""
        ...
