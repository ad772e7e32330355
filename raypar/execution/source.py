"""Sources of further trials, chosen from the results so far.

A study with a fixed list of trials has no source. Neither does a search, whose points are drawn by Ray Tune.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from raypar.analysis.settle import what_is_open
from raypar.study.blocks import block

if TYPE_CHECKING:
    from raypar.execution.plan import ExecutionPlan
    from raypar.study.trial import TrialResult, TrialSpec


@dataclass(frozen=True)
class NextTrials:
    """Trials to run next.

    Attributes:
        specs: trials; empty: the study is complete.
        reason: sentence for the user.
        expected_s: expected time of these trials in seconds; None: unknown.
        later_s: expected time in seconds of further trials until the study is complete; None: unknown.
    """

    specs: tuple[TrialSpec, ...]
    reason: str
    expected_s: float | None = None
    later_s: float | None = None


class TrialSource(Protocol):
    def next(self, plan: ExecutionPlan, results: Sequence[TrialResult]) -> NextTrials:
        """Return the trials to run once every trial of the plan has ended.

        Args:
            results: all results so far, including those of earlier executions.
        """
        ...


class UntilSettled:
    """Source of a study that repeats undecided points, block by block."""

    def next(self, plan: ExecutionPlan, results: Sequence[TrialResult]) -> NextTrials:
        """Return the next block; no trials if further blocks can't settle anything."""
        of = what_is_open(plan.question, results)
        specs = () if of.stopped else block(plan.study, of.repeat, of.needed, auto=plan.auto)
        return NextTrials(specs, of.text, of.block_s, of.later_s)
