"""What a runner tells while it runs; whoever shows or stores progress listens to these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from raypar.study.trial import Placement, TrialResult, TrialSpec


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
