"""Which point of a study to take: the fastest that does what is asked for, how sure that is, and what would settle it.

Asked for is a target (the time until the metric reaches it counts, and every trial has to reach it), or else a metric
that can't be told from the best one (the time of the whole training counts). Limits on time, cost, efficiency and
metric leave points out, by their medians.

Of the points that are left, the one with the smallest median time leads. Those whose times can't be told from it are
its rivals. Of the leader and the rivals within `MARGIN` of it, the one with the fewest workers is chosen: what can't be
told apart should not cost more. If no rival can be much faster than the chosen one, it is a tie and no more trials are
needed; else the study can't tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from raypar import units
from raypar.analysis.candidates import Candidate, Constraints, candidates_of, has_values, is_time_apart, median_s
from raypar.analysis.goodput import BatchGroup, batch_groups
from raypar.analysis.pairwise import MARGIN, Confidence, confidence_of, joint_share, repeats_needed, time_ratio
from raypar.analysis.points import energy_source, why_energy_unknown
from raypar.analysis.question import Question, collect, current_results, time_metric_of
from raypar.analysis.stats import MIN_RANKED, Estimate
from raypar.analysis.time_to_target import Start, reported_metrics
from raypar.errors import RayparError, suggest
from raypar.study.space import Value
from raypar.study.trial import TrialResult, gain

MAX_REPEATS = 100  # more than that nobody waits for
MAX_DOUBTED = 4


class Decision(StrEnum):
    CLEAR = "clear"  # faster than every other by more than chance
    TIED = "tied"  # none of those that it can't be told from can be faster by more than MARGIN
    UNCLEAR = "unclear"  # the study can't tell
    NONE = "none"  # no point does what is asked for


@dataclass(frozen=True)
class Settling:
    """The trials that would tell.

    Attributes:
        points: to be repeated.
        num_repeats: about how many trials each of them needs in all; None: too many to be worth it.
        spread_is_known: False: one trial each says nothing of the spread, and the count is only a beginning.
    """

    points: tuple[Mapping[str, Value], ...]
    num_repeats: int | None
    spread_is_known: bool


@dataclass(frozen=True)
class Recommendation:
    """What a study recommends.

    Attributes:
        time_metric: what the times are where no target is asked for.
        candidates: all points, in the order of their values.
        chosen: None for `Decision.NONE`.
        runner_up: the one to take otherwise: the fastest of the others; None where there is none.
        lead: time of the runner-up over that of the chosen one; None without one.
        confidence: that the chosen one is faster than every other, or, if it was chosen for its workers, slower than
            none by more than `MARGIN`; None where one of them ran only once.
        rivals: points that can't be told from the leader, without the chosen one.
        settling: None where there is nothing to settle.
        batches: what the batch size does, where a target is asked for.
        excluded: a sentence on trials of other settings; empty where there are none.
        energy_source: what the candidates' energies are of; empty: they have none.
    """

    question: Question
    constraints: Constraints
    time_metric: str
    candidates: tuple[Candidate, ...]
    decision: Decision
    chosen: Candidate | None = None
    runner_up: Candidate | None = None
    lead: Estimate | None = None
    confidence: Confidence | None = None
    rivals: tuple[Candidate, ...] = ()
    settling: Settling | None = None
    batches: tuple[BatchGroup, ...] = ()
    excluded: str = ""
    energy_source: str = ""

    @property
    def leader(self) -> Candidate | None:
        """The one with the smallest median time of those that may be chosen."""
        return min(_eligible(self.candidates), key=median_s, default=None)


def recommend(question: Question, results: Sequence[TrialResult], constraints: Constraints) -> Recommendation:
    """The point to take.

    Raises:
        RayparError: the target's metric is in no report, no point has the values asked for, or a limit is on what no
            point has.
    """
    parted = current_results(question, results)
    results = parted.results
    _check_target(results, constraints)
    time_metric = time_metric_of(results)
    gathered = collect(question, results, time_metric)
    candidates = candidates_of(question, gathered, constraints)
    _check_limits(candidates, constraints)
    _check_energy(candidates, constraints, results)
    batches: tuple[BatchGroup, ...] = ()
    if constraints.target is not None:
        batches = batch_groups(
            [g for g in gathered if has_values(g, constraints.only)], constraints.target, question.baseline
        )
    return _chosen(
        Recommendation(
            question,
            constraints,
            time_metric,
            candidates,
            Decision.NONE,
            batches=batches,
            excluded=parted.sentence(),
            energy_source=energy_source(gathered),
        )
    )


def _chosen(before: Recommendation) -> Recommendation:
    ranked = sorted(_eligible(before.candidates), key=median_s)
    if not ranked:
        return before
    leader, others = ranked[0], ranked[1:]
    rivals = [c for c in others if not is_time_apart(c, leader)]
    near = [c for c in rivals if _is_near(c, leader)]
    chosen = min((leader, *near), key=lambda c: (c.num_workers or 0, median_s(c)))
    tied = [c for c in (leader, *rivals) if c is not chosen] if rivals else []
    open_rivals = [c for c in tied if _may_be_much_faster(c, chosen)]
    open_rivals += _doubted(before, chosen)
    found = replace(
        before,
        decision=Decision.UNCLEAR if open_rivals else Decision.TIED if tied else Decision.CLEAR,
        chosen=chosen,
        rivals=tuple(tied),
        settling=_settling(chosen, open_rivals) if open_rivals else None,
    )
    runner_up = next((c for c in ranked if c is not chosen), None)
    if runner_up is None:
        return found
    return replace(
        found,
        runner_up=runner_up,
        lead=time_ratio(runner_up.times, chosen.times),
        confidence=_joint_confidence(chosen, [c for c in ranked if c is not chosen], is_leader=chosen is leader),
    )


def _joint_confidence(chosen: Candidate, others: Sequence[Candidate], *, is_leader: bool) -> Confidence | None:
    """Against all others at once: against the one where it is least sure, less for each of the others."""
    at_least = 1.0 if is_leader else 1 / (1 + MARGIN)
    each = [confidence_of(c.times, chosen.times, at_least) for c in others]
    known = [confidence for confidence in each if confidence is not None]
    if not known or len(known) < len(each):
        return None
    least = min(known, key=lambda confidence: confidence.share)
    return replace(least, share=joint_share([confidence.share for confidence in known]))


def _doubted(found: Recommendation, chosen: Candidate) -> list[Candidate]:
    """Faster points whose metric was worse in one trial, which says little: the best few of them."""
    if len(chosen.times) > 1:
        return []
    close = [(c, c.metric.value) for c in found.candidates if c.is_close_call and c.metric is not None]
    faster = [(c, value) for c, value in close if median_s(c) < median_s(chosen)]
    faster.sort(key=lambda entry: gain(found.question.mode, entry[1]), reverse=True)
    return [c for c, _ in faster[:MAX_DOUBTED]]


def _is_near(rival: Candidate, leader: Candidate) -> bool:
    """Without intervals nothing is known to be tied, and the fastest is the best guess."""
    loss = time_ratio(rival.times, leader.times)
    return loss.low is not None and loss.value <= 1 + MARGIN


def _may_be_much_faster(rival: Candidate, chosen: Candidate) -> bool:
    loss = time_ratio(chosen.times, rival.times)
    return loss.high is None or loss.high > 1 + MARGIN


def _settling(chosen: Candidate, rivals: Sequence[Candidate]) -> Settling:
    points = (chosen.point, *(c.point for c in rivals))
    counts = [repeats_needed(c.times, chosen.times) for c in rivals]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return Settling(points, MIN_RANKED, spread_is_known=False)
    most = max(known)
    return Settling(points, most if most <= MAX_REPEATS else None, spread_is_known=True)


def _eligible(candidates: Sequence[Candidate]) -> list[Candidate]:
    return [c for c in candidates if not c.exclusion]


def _check_limits(candidates: Sequence[Candidate], constraints: Constraints) -> None:
    """Refuses a limit on what no point has."""
    timed = [c for c in candidates if c.time_s is not None]
    if constraints.min_efficiency is not None and timed and all(c.efficiency is None for c in timed):
        hint = 'compare with something: baseline={"num_workers": 1} in the study\'s file, or leave it out'
        raise RayparError(f"--min-efficiency {constraints.min_efficiency:g}: no point has an efficiency", hint=hint)
    if constraints.max_cost is not None and timed and all(c.cost is None for c in timed):
        hint = "leave it out, or run the study again: results of now say where they ran"
        raise RayparError(f"--max-cost {constraints.max_cost:g}: no result says on how many nodes it ran", hint=hint)


def _check_energy(candidates: Sequence[Candidate], constraints: Constraints, results: Sequence[TrialResult]) -> None:
    """Refuses a limit on energy where none is known."""
    if constraints.max_energy_j is None:
        return
    asked = f"--max-energy {units.energy(constraints.max_energy_j)}"
    if constraints.target is not None and constraints.start is not Start.FIRST_STEP:
        raise RayparError(f"{asked}: energy is known from the first timed step on", hint="leave --start out")
    if any(c.time_s for c in candidates) and not any(c.energy_j for c in candidates):
        hint = "leave it out, or run the study where it can be read"
        raise RayparError(f"{asked}: {why_energy_unknown(results)}", hint=hint)


def _check_target(results: Sequence[TrialResult], constraints: Constraints) -> None:
    if constraints.target is None:
        return
    known = reported_metrics(results)
    if constraints.target.metric not in known:
        hint = suggest(constraints.target.metric, known) if known else "the trials report nothing: leave --target out"
        raise RayparError(
            f"--target {constraints.target.metric}=…: no trial reports `{constraints.target.metric}`", hint=hint
        )
