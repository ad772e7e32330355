"""Runner protocol, and the events of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from raypar.study.study import Study
from raypar.study.trial import Failure, FailureKind, Placement, TrialResult, TrialSpec, bad_losses


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
class TrialsAdded:
    """Trials that were decided on while the study runs, and why."""

    specs: Sequence[TrialSpec]
    reason: str


@dataclass(frozen=True)
class Notice:
    """Something that a person should know while the study runs (waiting for nodes, say)."""

    text: str


Event: TypeAlias = (
    GangStarting
    | GangReady
    | TrialStarted
    | TrialReported
    | TrialRetried
    | TrialEnded
    | TrialsAdded
    | ClusterChanged
    | Notice
)
Listener: TypeAlias = Callable[[Event], None]
More: TypeAlias = Callable[[], Sequence[TrialSpec]]


ISOLATIONS = ("warm", "fresh")
# A user's error would only come again, and so would what takes more memory than there is.
RETRIED = (FailureKind.CRASH, FailureKind.PEER_LOST, FailureKind.HUNG, FailureKind.GANG_LOST)


class Runner(Protocol):
    def run(self, study: Study, specs: Sequence[TrialSpec], listener: Listener, more: More | None = None) -> None:
        """Run the specs in their order (a search draws its own); every trial ends in exactly one `TrialEnded`.

        Args:
            more: returns further specs, once all have ended and their ends were reported; none: the study is over.

        Raises:
            KeyboardInterrupt: on Ctrl-C (`raypar.signals.Interrupted`), every trial that ended having been
                reported, with nothing left running.
            ClusterError: the runner itself can't go on.
        """
        ...


def ends_training(spec: TrialSpec, report: Mapping[str, float], metric: str) -> bool:
    """Return whether a trial is over with a report of rank 0, because its loss is not finite.

    Args:
        metric: the study's.
    """
    return bool(spec.config.get("stop_on_nan", True) and bad_losses(report, metric))


def is_retried(failure: Failure, attempt: int, max_retries: int) -> bool:
    """Return whether a trial that failed at its `attempt`-th start (from 1) is started again."""
    return failure.kind in RETRIED and attempt <= max_retries
