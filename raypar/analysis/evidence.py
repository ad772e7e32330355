"""Evidence of a study: its trials grouped by point and estimated once, for all parts of a report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from raypar.analysis.load import doubt_of_times
from raypar.analysis.pairwise import Family, family_of
from raypar.analysis.points import PointAnalysis, analyse_points
from raypar.analysis.question import PointKey, Question, current_results, excluded_sentence, point_key
from raypar.study.quantity import energy_source
from raypar.study.trial import REVISION, TrialResult

LogTime: TypeAlias = tuple[TrialResult, float]  # a finished trial, and the logarithm of its time


@dataclass(frozen=True)
class Evidence:
    """Evidence of a study's trials on its points; verdict, recommendation and every check read it.

    Attributes:
        question: the study's question, with the unit of its metric.
        time_metric: kind of the times: ``train_time_s`` (only the timed steps) or ``wall_s`` (everything).
        points: sorted by their values.
        family: family of their comparisons.
        num_excluded: number of trials with other settings, which belong to no point.
        settings: settings in which these differ, each with the question's value.
        results: results of the points' trials.
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
        """Sentence on the trials with other settings; empty if there are none."""
        return excluded_sentence(self.num_excluded, self.settings)

    @cached_property
    def finished(self) -> list[TrialResult]:
        """Every finished trial, point by point."""
        return [r for p in self.points for r in p.measured]

    @property
    def energy_source(self) -> str:
        """Parts whose energy the trials measured; empty if none did, or if their energies can't be compared."""
        return energy_source(self.finished)

    @cached_property
    def timed(self) -> list[TrialResult]:
        """Trials whose times are compared: the finished ones, and those that ended at the target of a search."""
        if self.question.target is None:
            return self.finished
        return [r for p in self.points for r in p.results if r.state.traits.is_usable]

    @cached_property
    def log_times(self) -> list[list[LogTime]]:
        """Finished trials of each point that have a time."""
        trial = {r.spec.identity: r for r in self.finished}
        return [[(trial[s.identity], math.log(s.time_s)) for s in p.samples.values() if s.time_s] for p in self.points]

    @cached_property
    def doubt(self) -> str:
        """Reason why the study's times show nothing: most trials were strongly disturbed. Empty if they were not.

        It is empty for a search for the best metric. It is also empty for two revisions: their trials
        alternate in random order, so load affects both alike and only widens the intervals.
        """
        return "" if self._is_immune else doubt_of_times(self.timed)

    @property
    def _is_immune(self) -> bool:
        for_metric = self.question.is_search and self.question.target is None
        return for_metric or REVISION in self.question.baseline

    @cached_property
    def doubtful(self) -> frozenset[PointKey]:
        """Points whose times can't be compared: most trials of the study, the point or its baseline were disturbed."""
        if self._is_immune or self.question.is_search:  # no trial of a search is a baseline
            return frozenset()
        doubted = {point_key(p.point) for p in self.points if self.doubt or doubt_of_times(p.measured)}
        compared = [(point_key(p.point), point_key(self.question.baseline_of(p.point))) for p in self.points]
        return frozenset(pair[0] for pair in compared if not doubted.isdisjoint(pair))


def evidence_of(question: Question, results: Sequence[TrialResult]) -> Evidence:
    """Group the trials that answer a question by point, and estimate each point.

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
