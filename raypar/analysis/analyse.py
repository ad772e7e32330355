"""Analysis of a study's results: `analyse`.

Pure and fast: no Ray, no torch, no store. `question_of` takes from a `Study` what is needed; a report that is rebuilt
from the store makes its `Question` from what was stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from raypar.analysis.checks import Evidence, Finding, doubt_of, run_checks
from raypar.analysis.effects import Effects, Importances, effects_of, importances_of
from raypar.analysis.goodput import BatchGroup, batch_groups, common_target
from raypar.analysis.pairwise import Family, family_of, trial_speedup
from raypar.analysis.points import PointAnalysis, analyse_points, energy_source
from raypar.analysis.question import PointSamples, Question, current_results, question_of, with_baselines
from raypar.analysis.recommend import Constraints, recommend
from raypar.analysis.scaling import WorkerGroup, worker_groups
from raypar.analysis.settle import Stopped, stop_sentence, stop_status, what_is_open
from raypar.analysis.time_to_target import Target
from raypar.analysis.verdict import Verdict, statements, verdict_of
from raypar.study.profile import Profile
from raypar.study.space import Value
from raypar.study.study import Study
from raypar.study.trial import TrialResult, TrialState, gain

__all__ = ["PointAnalysis", "Question", "StudyAnalysis", "analyse", "pair_speedups", "question_of"]


@dataclass(frozen=True)
class StudyAnalysis:
    """Analysis of a study's results.

    Attributes:
        question: what the study asks.
        time_metric: what the times are: ``train_time_s`` (the timed steps alone) or ``wall_s`` (everything).
        points: one each, in the order of their values; those of a search by their metric, the best first.
        warnings: what to mind when reading the numbers, the gravest first.
        verdict: the question, the answer and the recommended point.
        statements: what else the numbers show, in sentences.
        family: the confidence of its comparisons.
        worker_groups: points that differ only in ``num_workers``, for what they say about scaling; none where times
            can't be trusted, nor then effects and batches.
        profiles: points with where their steps' time goes, of those that were looked into.
        effects: what each hyperparameter does; None where fewer than two are swept.
        target: the best value of the metric that every trial reached, where batch sizes differ; None: there is none.
        batches: what the batch size does to throughput and to progress towards that target.
        energy_source: what the points' energies are of; empty: they have none.
        scope: on the executions that it is restricted to; empty: to none.
    """

    question: Question
    time_metric: str
    points: tuple[PointAnalysis, ...]
    warnings: tuple[Finding, ...]
    verdict: Verdict
    statements: tuple[str, ...]
    family: Family = field(default_factory=Family)
    worker_groups: tuple[WorkerGroup, ...] = ()
    profiles: tuple[tuple[Mapping[str, Value], Profile], ...] = ()
    effects: Effects | None = None
    target: Target | None = None
    batches: tuple[BatchGroup, ...] = ()
    energy_source: str = ""
    scope: str = ""

    @property
    def num_trials(self) -> int:
        return sum(len(point.results) for point in self.points)

    @property
    def num_by_state(self) -> dict[TrialState, int]:
        """Number of trials that ended in each state."""
        states = [result.state for point in self.points for result in point.results]
        return {state: states.count(state) for state in TrialState}

    @property
    def wall_s(self) -> float | None:
        """Seconds of all trials together; None where no trial has a time."""
        times = [r.wall_s for point in self.points for r in point.results if r.wall_s is not None]
        return sum(times) if times else None

    @cached_property
    def importances(self) -> Importances | None:
        """Importance of each hyperparameter of a search; None for other studies, and where too few trials finished."""
        return importances_of(self.question, self.points) if self.question.is_search else None


def analyse(asked: Study | Question, results: Sequence[TrialResult], stopped: Stopped | None = None) -> StudyAnalysis:
    """Analyse the results of a study.

    Args:
        asked: the study, or what was kept of it where the study file is gone.
        results: of its trials, in any order; of two results of one trial the later complete one counts. A search's
            points are those that have results; points that a study lists and nobody ran are shown as such. Trials of
            other settings than the question's are excluded, with a warning.
        stopped: why a study that runs until it is settled has stopped, where the results don't show it.
    """
    question = (question_of(asked) if isinstance(asked, Study) else asked).with_unit(results)
    current = current_results(question, results)
    gathered = current.points
    family = family_of(question, gathered)
    points = analyse_points(question, gathered, family)
    target = common_target(question, gathered)
    evidence = Evidence(question, current.time_metric, points, family, current.sentence)
    doubt = doubt_of(question, evidence.finished)
    has_choice = len(points) > 1 and any(p.time_s for p in points)
    recommendation = recommend(question, results, Constraints()) if has_choice else None
    ending, status = tuple[str, ...](), ""
    if question.max_repeats is not None:
        of = what_is_open(question, results)
        why, is_disturbed = stopped or of.stopped, bool(doubt)
        ending = (stop_sentence(of, why, is_disturbed=is_disturbed),)
        status = stop_status(why, is_disturbed=is_disturbed)
    if question.is_search:
        points = tuple(sorted(points, key=lambda p: _rank(question, p)))
    return StudyAnalysis(
        question=question,
        time_metric=current.time_metric,
        points=points,
        family=family,
        warnings=run_checks(evidence),
        verdict=replace(verdict_of(question, points, family, recommendation, doubt), status=status),
        statements=(*ending, *statements(question, points, family, doubt)),
        worker_groups=worker_groups(question, gathered, family=family) if not doubt else (),
        profiles=tuple(_profiles(gathered)),
        effects=effects_of(question, gathered, family) if not doubt else None,
        target=target,
        batches=batch_groups(gathered, target, family, question.baseline) if target and not doubt else (),
        energy_source=energy_source(gathered),
    )


def _rank(question: Question, p: PointAnalysis) -> float:
    """Return what a search's points are sorted by: the best metric first, points without a usable one last."""
    return -gain(question.mode, p.metric.value) if p.metric and not p.unusable else math.inf


def _profiles(gathered: Sequence[PointSamples]) -> Iterator[tuple[Mapping[str, Value], Profile]]:
    for samples in gathered:
        profiles = [result.profile for result in samples.results if result.profile is not None]
        if profiles:
            yield samples.point, profiles[-1]


def pair_speedups(question: Question, results: Sequence[TrialResult]) -> dict[str, float]:
    """Return each finished trial's speedup over the baseline trial of its own block, by the trial's identity.

    Trials whose block has no finished baseline are not in it, nor are trials of other settings than the question's; it
    is empty where the study names no baseline.
    """
    speedups: dict[str, float] = {}
    for point, base in with_baselines(question, current_results(question, results).points):
        for repeat, sample in point.samples.items():
            partner = base.samples.get(repeat) if base else None
            if partner is not None and (speedup := trial_speedup(partner, sample)) is not None:
                speedups[sample.identity] = speedup
    return speedups
