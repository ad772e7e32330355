"""Sources of further trials: what a study runs next, by the results so far.

A study of a fixed list has none, nor has a search, whose searcher in Ray Tune draws its points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from raypar.analysis.settle import what_is_open

if TYPE_CHECKING:
    from raypar.execution.plan import ExecutionPlan
    from raypar.study.trial import TrialResult, TrialSpec


@dataclass(frozen=True)
class NextTrials:
    """Trials to run next.

    Attributes:
        specs: none: the study is over.
        reason: sentence for the user.
        expected_s: time that they will take, in seconds; None: unknown.
        later_s: likewise, of those that may follow until the study is over.
    """

    specs: tuple[TrialSpec, ...]
    reason: str
    expected_s: float | None = None
    later_s: float | None = None


class TrialSource(Protocol):
    def next(self, plan: ExecutionPlan, results: Sequence[TrialResult]) -> NextTrials:
        """Return what to run once every trial of the plan has ended.

        Args:
            results: all so far, with those of earlier executions.
        """
        ...


class UntilSettled:
    """Source of a study that repeats what is open, block by block."""

    def next(self, plan: ExecutionPlan, results: Sequence[TrialResult]) -> NextTrials:
        """Return the next block; no trials where nothing is open that further blocks may settle."""
        of = what_is_open(plan.question, results)
        specs = () if of.stopped else plan.study.block(of.repeat, of.needed, auto=plan.auto)
        return NextTrials(specs, of.text, of.block_s, of.later_s)
