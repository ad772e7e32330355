"""Evidence of a study: its trials sorted by point and estimated, once for all that a report makes of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from raypar.analysis.load import doubt_of_times
from raypar.analysis.pairwise import Family, family_of
from raypar.analysis.points import PointAnalysis, analyse_points
from raypar.analysis.question import Question, current_results, excluded_sentence
from raypar.study.trial import REVISION, TrialResult

LogTime: TypeAlias = tuple[TrialResult, float]  # a finished trial, and the logarithm of its time


@dataclass(frozen=True)
class Evidence:
    """All that a study's trials show of its points; verdict, recommendation and every check read it.

    Attributes:
        question: what the study asks, with the unit of its metric.
        time_metric: what the times are: ``train_time_s`` (the timed steps alone) or ``wall_s`` (everything).
        points: one each, in the order of their values.
        family: the confidence of their comparisons.
        num_excluded: trials of other settings, which are in no point.
        settings: in which these differ, each with the question's.
        results: of the trials that are in the points, in the order given.
    """

    question: Question
    time_metric: str
    points: tuple[PointAnalysis, ...]
    family: Family = field(default_factory=Family)
    num_excluded: int = 0
    settings: tuple[str, ...] = ()
    results: tuple[TrialResult, ...] = ()

    @property
    def excluded(self) -> str:
        """Sentence on the trials of other settings; empty where there are none."""
        return excluded_sentence(self.num_excluded, self.settings)

    @cached_property
    def finished(self) -> list[TrialResult]:
        """Every finished trial, point by point."""
        return [r for p in self.points for r in p.measured]

    @cached_property
    def log_times(self) -> list[list[LogTime]]:
        """The finished trials of each point that have a time."""
        trial = {r.spec.identity: r for r in self.finished}
        return [[(trial[s.identity], math.log(s.time_s)) for s in p.samples.values() if s.time_s] for p in self.points]

    @cached_property
    def doubt(self) -> str:
        """Why times of the study show nothing: most of its trials were disturbed much. Empty where they were not.

        A search asks for the best metric: it has none. Of two revisions load meets both alike, as their trials
        alternate in random order: it widens the intervals, and that is all.
        """
        is_immune = self.question.is_search or REVISION in self.question.baseline
        return "" if is_immune else doubt_of_times(self.finished)


def evidence_of(question: Question, results: Sequence[TrialResult]) -> Evidence:
    """Sort the trials that answer a question by point, and estimate each point.

    Args:
        question: of the last execution.
        results: of all executions, in any order.
    """
    question = question.with_unit(results)
    current = current_results(question, results)
    family = family_of(question, current.points)
    points = analyse_points(question, current.points, family)
    num_excluded = len(current.excluded)
    return Evidence(question, current.time_metric, points, family, num_excluded, current.settings, current.results)
