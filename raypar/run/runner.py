"""Runner protocol, its settings, and the events of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

from raypar.study.study import Study
from raypar.study.trial import Failure, FailureKind, Placement, TrialResult, TrialSpec


@dataclass(frozen=True)
class GangStarting:
    placement: Placement


@dataclass(frozen=True)
class GangReady:
    placement: Placement
    seconds: float


@dataclass(frozen=True)
class TrialStarted:
    spec: TrialSpec
    attempt: int


@dataclass(frozen=True)
class TrialReported:
    """One epoch of a running trial (or one ``ray.train.report`` of a train loop)."""

    spec: TrialSpec
    report: Mapping[str, float]


@dataclass(frozen=True)
class TrialRetried:
    spec: TrialSpec
    reason: str


@dataclass(frozen=True)
class TrialEnded:
    """A trial is over; `artifacts` is what it keeps, packed, where that had to be shipped."""

    result: TrialResult
    artifacts: bytes = b""


@dataclass(frozen=True)
class ClusterChanged:
    """Nodes have joined (or left): so many there are now, and so many trials can run at a time."""

    num_nodes: int
    num_slots: int


@dataclass(frozen=True)
class Notice:
    """Something that a person should know while the study runs (waiting for nodes, say)."""

    text: str


Event: TypeAlias = (
    GangStarting | GangReady | TrialStarted | TrialReported | TrialRetried | TrialEnded | ClusterChanged | Notice
)
Listener: TypeAlias = Callable[[Event], None]


ARTIFACT_FOLDER = "artifacts"
ISOLATIONS = ("warm", "fresh")
# A user's error would only come again, and so would what takes more memory than there is.
RETRIED = (FailureKind.CRASH, FailureKind.PEER_LOST, FailureKind.HUNG, FailureKind.GANG_LOST)


@dataclass(frozen=True)
class RunSettings:
    """Where and how a study is run; nothing here determines a result.

    Attributes:
        log_dir: where the ranks' output goes, a folder per trial; an absolute path, the same on every node.
        isolation: "warm": ranks are forks in gangs that serve trial after trial; "fresh": every trial gets a gang
            and interpreters of its own.
        environment: variables that every rank gets.
        sys_path: folders from which the study's own modules are imported.
        preload: modules imported ahead of the trials, once per node.
        trial_timeout_s: a trial that takes longer counts as hung; None: wait for ever.
        ships_artifacts: what trials keep travels with the results: the ranks' machines are not the driver's.
        num_profiled_steps: after the training of every trial of the first repeat, so many are looked into; 0: none.
        only_profiles: trials don't train, they are only looked into.
        default_device: what ``device="auto"`` means for the points that a search draws.
        exclusive: nobody else uses the Ray cluster: gangs that are idle hold no CPUs there.
        stop_grace_s: how long a rank may take to reach its next report after a stop, before it is killed.
    """

    log_dir: Path
    isolation: str = "warm"
    environment: Mapping[str, str] = field(default_factory=dict)
    sys_path: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    trial_timeout_s: float | None = None
    stop_grace_s: float = 10.0
    default_device: str = "cpu"
    ships_artifacts: bool = False
    num_profiled_steps: int = 0
    only_profiles: bool = False
    exclusive: bool = False

    def log_path(self, spec: TrialSpec, attempt: int, rank: int) -> Path:
        """Where a rank's output goes."""
        return self.log_dir / spec.identity / f"attempt{attempt}-rank{rank}.log"

    def artifact_dir(self, spec: TrialSpec) -> Path:
        """Where rank 0 leaves what is kept beside the numbers; see `raypar.train.job.RankJob`."""
        return self.log_dir / spec.identity / ARTIFACT_FOLDER

    def profiled_steps(self, spec: TrialSpec) -> int:
        """How many steps of this trial are looked into."""
        return self.num_profiled_steps if spec.repeat == 0 else 0


class Runner(Protocol):
    def run(self, study: Study, specs: Sequence[TrialSpec], listener: Listener) -> None:
        """Run the specs in their order (a search draws its own); every trial ends in exactly one `TrialEnded`.

        Raises:
            KeyboardInterrupt: on Ctrl-C (`raypar.signals.Interrupted`), every trial that ended having been
                told, with nothing left running.
            ClusterError: the runner itself can't go on.
        """
        ...


def is_retried(failure: Failure, attempt: int, max_retries: int) -> bool:
    """Whether a trial that failed at its `attempt`-th start (from 1) is started again."""
    return failure.kind in RETRIED and attempt <= max_retries
