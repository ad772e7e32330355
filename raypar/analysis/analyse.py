"""Analysis of a study's results: `analyse`. It needs no Ray, torch or store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from raypar.analysis.checks import run_checks
from raypar.analysis.effects import Effects, Importances, effects_of, importances_of
from raypar.analysis.evidence import Evidence, evidence_of
from raypar.analysis.finding import Finding
from raypar.analysis.goodput import BatchGroup, batch_groups, common_target
from raypar.analysis.gradient_noise import noise_scale_lines
from raypar.analysis.load import doubt_of_times
from raypar.analysis.lr_rules import rule_lines
from raypar.analysis.machines import MachineKind, machine_kinds
from raypar.analysis.pairwise import Family, trial_speedup
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import PointSamples, Question, current_results, question_of, with_baselines
from raypar.analysis.recommend import Constraints, recommend_of
from raypar.analysis.scaling import WorkerGroup, worker_groups
from raypar.analysis.search import rank
from raypar.analysis.settle import Stopped, open_points, stop_sentence, stop_status
from raypar.analysis.time_to_target import Target
from raypar.analysis.verdict import Verdict, statements, verdict_of
from raypar.study.profile import Profile, profile_of_repeats
from raypar.study.space import Value
from raypar.study.study import Study
from raypar.study.trial import TrialResult, TrialState

__all__ = ["PointAnalysis", "Question", "StudyAnalysis", "analyse", "pair_speedups", "question_of"]


@dataclass(frozen=True)
class StudyAnalysis:
    """Analysis of a study's results.

    Attributes:
        points: sorted by their values, or by their metric in a search, the best first.
        warnings: caveats, the gravest first.
        statements: sentences on what else the numbers show.
        answers: those of them that an option of the study asks for; brief reports show these, too.
        worker_groups: points that differ only in ``num_workers``. If times can't be trusted, there are no groups,
            effects or batches.
        profiles: profiled points with their profile.
        effects: effect of each hyperparameter; None if fewer than two are swept.
        target: the best value of the metric that every trial reached, if batch sizes differ.
        batches: effect of the batch size on throughput and on progress towards that target.
        scope: executions that the analysis is restricted to, in words; empty if it isn't restricted.
    """

    evidence: Evidence
    points: tuple[PointAnalysis, ...]
    warnings: tuple[Finding, ...]
    verdict: Verdict
    statements: tuple[str, ...]
    answers: tuple[str, ...] = ()
    worker_groups: tuple[WorkerGroup, ...] = ()
    profiles: tuple[tuple[Mapping[str, Value], Profile], ...] = ()
    effects: Effects | None = None
    target: Target | None = None
    batches: tuple[BatchGroup, ...] = ()
    scope: str = ""

    @property
    def question(self) -> Question:
        return self.evidence.question

    @property
    def time_metric(self) -> str:
        return self.evidence.time_metric

    @property
    def family(self) -> Family:
        return self.evidence.family

    @property
    def energy_source(self) -> str:
        return self.evidence.energy_source

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
        """Seconds of all trials together; None if no trial has a time."""
        times = [r.wall_s for point in self.points for r in point.results if r.wall_s is not None]
        return sum(times) if times else None

    @cached_property
    def machines(self) -> tuple[MachineKind, ...]:
        """Machines of the trials, by kind."""
        return machine_kinds(result for point in self.points for result in point.results)

    @cached_property
    def importances(self) -> Importances | None:
        """Importance of each hyperparameter of a search; None for other studies, or if too few trials finished."""
        return importances_of(self.question, self.points) if self.question.is_search else None


def analyse(asked: Study | Question, results: Sequence[TrialResult], stopped: Stopped | None = None) -> StudyAnalysis:
    """Analyse the results of a study.

    Args:
        asked: the study, or its stored question.
        results: in any order; of two results of one trial, the later complete one counts. Trials with settings other
            than the question's are excluded, with a warning.
        stopped: why a study that runs until it is settled has stopped, if the results don't show it.
    """
    evidence = evidence_of(question_of(asked) if isinstance(asked, Study) else asked, results)
    question, points, family, doubt = evidence.question, evidence.points, evidence.family, evidence.doubt
    target = common_target(question, points)
    has_choice = len(points) > 1 and any(p.time_s for p in points)
    is_until_settled = question.max_repeats is not None
    recommendation = recommend_of(evidence, Constraints()) if has_choice or is_until_settled else None
    ending, status = tuple[str, ...](), ""
    if is_until_settled and recommendation is not None:
        of = open_points(recommendation)
        why, is_disturbed = stopped or of.stopped, bool(doubt)
        ending = (stop_sentence(of, why, is_disturbed=is_disturbed),)
        status = stop_status(why, is_disturbed=is_disturbed)
    answers = (*noise_scale_lines(points), *rule_lines(question, points, family))
    sorted_points = tuple(sorted(points, key=lambda p: rank(question, p))) if question.is_search else points
    verdict = verdict_of(question, sorted_points, family, recommendation if has_choice else None, doubt)
    return StudyAnalysis(
        evidence=evidence,
        points=sorted_points,
        warnings=run_checks(evidence),
        verdict=replace(verdict, status=status),
        statements=(*ending, *statements(question, sorted_points, family, doubt), *answers),
        answers=answers,
        worker_groups=worker_groups(question, points, family=family) if not doubt else (),
        profiles=tuple(_profiles(points)),
        effects=effects_of(question, points, family) if not doubt else None,
        target=target,
        batches=batch_groups(points, target, family, question.baseline) if target and not doubt else (),
    )


def _profiles(gathered: Sequence[PointSamples]) -> Iterator[tuple[Mapping[str, Value], Profile]]:
    for samples in gathered:
        profiles = [result.profile for result in samples.results if result.profile is not None]
        if profiles:
            yield samples.point, profile_of_repeats(profiles)


def pair_speedups(question: Question, results: Sequence[TrialResult]) -> dict[str, float]:
    """Return each finished trial's speedup over the baseline trial of its block, if it has one, by identity."""
    return speedups_in_blocks(question, current_results(question, results).points)


def speedups_in_blocks(question: Question, points: Sequence[PointSamples]) -> dict[str, float]:
    """Return the same for trials that are grouped by point."""
    speedups: dict[str, float] = {}
    for point, base in with_baselines(question, points):
        for repeat, sample in point.samples.items():
            partner = base.samples.get(repeat) if base else None
            if partner is not None and (speedup := trial_speedup(partner, sample)) is not None:
                speedups[sample.identity] = speedup
    return speedups


def trusted_speedups(question: Question, results: Sequence[TrialResult]) -> dict[str, float]:
    """Return the speedups of `pair_speedups`, without pairs of which a trial was strongly disturbed by other load."""
    return pair_speedups(question, [result for result in results if not doubt_of_times([result])])
