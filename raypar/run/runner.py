"""Runner protocol, and the events of a run."""

from __future__ import annotations

import re
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
    """One epoch of a running trial (or one report of a train loop or a command)."""

    spec: TrialSpec
    report: Mapping[str, float]


@dataclass(frozen=True)
class TrialRetried:
    spec: TrialSpec
    reason: str


@dataclass(frozen=True)
class TrialEnded:
    """End of a trial, whose artifacts are in the driver's folder."""

    result: TrialResult


@dataclass(frozen=True)
class ClusterChanged:
    """Number of nodes, and of trials that can run at a time, after nodes have joined or left."""

    num_nodes: int
    num_slots: int


@dataclass(frozen=True)
class TrialsAdded:
    """Trials added while the study runs, and why. `later_s`: expected seconds of the trials after them."""

    specs: Sequence[TrialSpec]
    reason: str
    later_s: float | None = None


@dataclass(frozen=True)
class OutOfTime:
    """The machines are needed back before any further trial could end."""

    left_s: float


@dataclass(frozen=True)
class Notice:
    """Message to the user while the study runs."""

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
    | OutOfTime
    | Notice
)
Listener: TypeAlias = Callable[[Event], None]
More: TypeAlias = Callable[[], Sequence[TrialSpec]]


VARIES = re.compile(r"\brank \d+|\bpid(\(s\))? [\d, ]+|\b0x[0-9a-f]+")  # ignored where messages are compared
NUM_ALIKE = 2  # attempts with the same error, after which a third would fail too
SKIPPED = "not run: the first {} attempts at its point failed with the same error: {}"
NOT_RUN = "not run: its point does not fit: {}"
STOPPED = "{} stopped: its first {} attempts failed with the same error: {}"


class Runner(Protocol):
    def run(self, study: Study, specs: Sequence[TrialSpec], listener: Listener, more: More | None = None) -> None:
        """Run the specs in order (a search draws its own). Every trial ends in exactly one `TrialEnded`.

        Args:
            more: called after all trials have ended; returns further specs, or none at the end of the study.

        Raises:
            KeyboardInterrupt: on Ctrl-C (`raypar.signals.Interrupted`), after every ended trial was reported and
                everything was stopped.
            ClusterError: the runner can't continue.
        """
        ...


def ends_training(spec: TrialSpec, report: Mapping[str, float], metric: str) -> bool:
    """Return whether a report of rank 0 ends the trial because its loss is not finite.

    Args:
        metric: the study's metric, which stands for the loss in a report without one.
    """
    return bool(spec.config.get("stop_on_nan", True) and bad_losses(report, metric))


def is_retried(failure: Failure, attempt: int, max_retries: int) -> bool:
    """Return whether a trial whose attempt of this number (from 1) failed is started again.

    Args:
        attempt: among those that count for this kind of failure: preempted attempts have their own limit.
    """
    traits = failure.kind.traits
    return traits.is_retried and attempt <= (max_retries if traits.own_retries is None else traits.own_retries)


class StoppedPoints:
    """Points of a run that are given up.

    A point is given up if its first attempts all fail with the same error before a report, or if one of its trials does
    not fit. Once an attempt succeeds, reports or fails with another error, its point is never given up. Attempts that
    were ended from outside (a lost node, a timeout) don't count.
    """

    def __init__(self) -> None:
        self._errors: dict[str, list[str | None]] = {}  # of a point's attempts; None: ended in another way
        self._refusals: dict[str, Failure] = {}

    def note(self, spec: TrialSpec, failure: Failure | None, *, has_reported: bool) -> str | None:
        """Note the end of a trial's attempt; return a notice if that stops the trial's point."""
        label = spec.point_name
        errors = self._errors.setdefault(label, [])
        if failure is not None and failure.kind is FailureKind.DOES_NOT_FIT:
            self._refusals.setdefault(label, Failure(failure.kind, NOT_RUN.format(failure.summary)))
        elif failure is None or has_reported:
            errors.append(None)
        elif failure.kind.traits.is_deterministic:
            errors.append(VARIES.sub("", failure.message))
            if len(errors) >= NUM_ALIKE and set(errors) == {errors[0]} and label not in self._refusals:
                self._refusals[label] = Failure(FailureKind.SKIPPED, SKIPPED.format(NUM_ALIKE, failure.summary))
                return STOPPED.format(label, NUM_ALIKE, failure.summary)
        return None

    def refusal(self, spec: TrialSpec) -> Failure | None:
        """Return why a trial is not started (again); None if its point is not stopped."""
        return self._refusals.get(spec.point_name)
