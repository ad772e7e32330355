"""Sources of a study's trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from raypar.analysis.settle import what_is_open
from raypar.study.blocks import block, num_first_blocks

if TYPE_CHECKING:
    from raypar.execution.plan import ExecutionPlan
    from raypar.study.options import Auto
    from raypar.study.study import Study
    from raypar.study.trial import TrialResult, TrialSpec


@dataclass(frozen=True)
class NextTrials:
    """Trials to run next.

    Attributes:
        specs: trials; empty: the study is complete.
        reason: sentence for the user; empty: none.
        expected_s: expected time of these trials in seconds; None: unknown.
        later_s: expected time in seconds of further trials until the study is complete; None: unknown.
    """

    specs: tuple[TrialSpec, ...] = ()
    reason: str = ""
    expected_s: float | None = None
    later_s: float | None = None


class TrialSource(Protocol):
    """Source of a study's trials. `adds_trials`: False: `next` never returns any."""

    adds_trials: ClassVar[bool]

    def first(self, study: Study, stored: Sequence[TrialResult], auto: Auto) -> tuple[TrialSpec, ...]:
        """Return the trials known at the start.

        Args:
            stored: results of the study to reuse.
        """
        ...

    def next(self, plan: ExecutionPlan, results: Sequence[TrialResult]) -> NextTrials:
        """Return the trials to run once every trial of the plan has ended.

        Args:
            results: all results so far, including those of earlier executions.
        """
        ...


@dataclass(frozen=True)
class FixedList:
    """Source of a study that lists its trials.

    Attributes:
        first_repeat: number of its first block. Points that join a study later are compared within new blocks.
    """

    first_repeat: int = field(default=0, kw_only=True)
    adds_trials: ClassVar[bool] = False

    def first(self, study: Study, stored: Sequence[TrialResult], auto: Auto) -> tuple[TrialSpec, ...]:
        return study.trials(auto=auto, first_repeat=self.first_repeat)

    def next(self, plan: ExecutionPlan, results: Sequence[TrialResult]) -> NextTrials:
        return NextTrials()


class DrawnByTune(FixedList):
    """Source of a search: Ray Tune draws the trials while they run."""

    def first(self, study: Study, stored: Sequence[TrialResult], auto: Auto) -> tuple[TrialSpec, ...]:
        return ()


class UntilSettled(FixedList):
    """Source of a study that repeats undecided points, block by block."""

    adds_trials: ClassVar[bool] = True

    def first(self, study: Study, stored: Sequence[TrialResult], auto: Auto) -> tuple[TrialSpec, ...]:
        """Return the first blocks, and the trials of later blocks that have a result, including failures."""
        identities = {result.spec.identity for result in stored}
        num_done = self.first_repeat + num_first_blocks(study)
        later = sorted({result.spec.repeat for result in stored} & {*range(num_done, study.max_repeats)})
        blocks = [block(study, repeat, study.points(), auto=auto) for repeat in later]
        first = super().first(study, stored, auto)
        return first + tuple(s for specs in blocks for s in specs if s.identity in identities)

    def next(self, plan: ExecutionPlan, results: Sequence[TrialResult]) -> NextTrials:
        """Return the next block; no trials if further blocks can't settle anything."""
        of = what_is_open(plan.question, results)
        specs = () if of.stopped else block(plan.study, of.repeat, of.needed, auto=plan.auto)
        return NextTrials(specs, of.text, of.block_s, of.later_s)


def source_of(study: Study, first_repeat: int = 0) -> TrialSource:
    """Return the source of a study's trials; `first_repeat`: see `FixedList`."""
    if study.is_search:
        return DrawnByTune()
    return (UntilSettled if study.until else FixedList)(first_repeat=first_repeat)
