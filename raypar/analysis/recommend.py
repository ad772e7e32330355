"""Recommendation of a point: the fastest that meets the constraints, how sure that is, and what would settle it.

Of the points that no limit excludes (`raypar.analysis.candidates`), the one with the smallest median time leads. Those
whose times don't differ significantly from its are its rivals. Of the leader and the rivals within `MARGIN` of it, the
one with the fewest workers is chosen: equals should not cost more. If no rival can be much faster than the chosen one,
it is a tie and no more trials are needed; else the study is inconclusive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from raypar import units
from raypar.analysis.candidates import Candidate, Constraints, candidates_of, has_values, is_time_apart
from raypar.analysis.goodput import BatchGroup, batch_groups
from raypar.analysis.pairwise import MARGIN, Confidence, confidence_of, joint_share, repeats_needed, time_ratio
from raypar.analysis.points import energy_source, why_energy_unknown
from raypar.analysis.question import Question, current_results
from raypar.analysis.stats import MIN_RANKED, Estimate
from raypar.analysis.time_to_target import Start, reported_metrics
from raypar.errors import RayparError, suggest
from raypar.study.space import Value
from raypar.study.trial import TrialResult, gain

MAX_REPEATS = 100  # more than that nobody waits for
MAX_DOUBTED = 4


class Decision(StrEnum):
    CLEAR = "clear"  # significantly faster than every other
    TIED = "tied"  # no rival can be faster by more than MARGIN
    UNCLEAR = "unclear"  # a rival may be
    NONE = "none"  # no point meets the constraints


@dataclass(frozen=True)
class Settling:
    """Trials that would settle which point is the fastest.

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
    """Recommendation of a study.

    Attributes:
        time_metric: what the times are where no target is asked for.
        candidates: all points, in the order of their values.
        chosen: None for `Decision.NONE`.
        runner_up: the one to take otherwise: the fastest of the others; None where there is none.
        lead: time of the runner-up over that of the chosen one; None without one.
        confidence: that the chosen one is faster than every other, or, if it was chosen for its workers, slower than
            none by more than `MARGIN`; None where one of them ran only once.
        rivals: the leader and those that don't differ significantly from it, without the chosen one.
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
    def eligible(self) -> list[Candidate]:
        """Candidates that may be chosen, the fastest first."""
        return sorted((c for c in self.candidates if not c.exclusion), key=lambda c: c.median_s)

    @property
    def leader(self) -> Candidate | None:
        """The eligible one with the smallest median time."""
        return next(iter(self.eligible), None)


def recommend(question: Question, results: Sequence[TrialResult], constraints: Constraints) -> Recommendation:
    """Recommend a point.

    Raises:
        RayparError: the target's metric is in no report, no point has the values asked for, or a limit is on what no
            point has.
    """
    current = current_results(question, results)
    target = constraints.target
    if target is not None and target.metric not in (metrics := reported_metrics(current.results)):
        hint = suggest(target.metric, metrics) if metrics else "the trials report nothing: leave --target out"
        raise RayparError(f"--target {target.metric}=…: no trial reports `{target.metric}`", hint=hint)
    candidates = candidates_of(question, current.points, constraints)
    _check_limits(candidates, constraints, current.results)
    batches: tuple[BatchGroup, ...] = ()
    if target is not None:
        compared = [p for p in current.points if has_values(p, constraints.only)]
        batches = batch_groups(compared, target, question.baseline)
    before = Recommendation(question, constraints, current.time_metric, candidates, Decision.NONE)
    source = energy_source(current.points)
    before = replace(before, batches=batches, excluded=current.sentence, energy_source=source)
    return _chosen(before) if before.eligible else before


def _chosen(before: Recommendation) -> Recommendation:
    leader, *others = ranked = before.eligible
    rivals = [c for c in others if not is_time_apart(c, leader)]
    # Without intervals no tie is shown, and the fastest is the best guess.
    losses = [(c, time_ratio(c.times, leader.times)) for c in rivals]
    near = [c for c, loss in losses if loss.low is not None and loss.value <= 1 + MARGIN]
    chosen = min((leader, *near), key=lambda c: (c.num_workers or 0, c.median_s))
    tied = [c for c in (leader, *rivals) if c is not chosen] if rivals else []
    bounds = [(c, time_ratio(chosen.times, c.times).high) for c in tied]
    much_faster = [c for c, most in bounds if most is None or most > 1 + MARGIN]  # as far as is known
    open_rivals = much_faster + _doubted(before, chosen)
    after = replace(
        before,
        decision=Decision.UNCLEAR if open_rivals else Decision.TIED if tied else Decision.CLEAR,
        chosen=chosen,
        rivals=tuple(tied),
        settling=_settling(chosen, open_rivals) if open_rivals else None,
    )
    rest = [c for c in ranked if c is not chosen]
    if not rest:
        return after
    return replace(
        after,
        runner_up=rest[0],
        lead=time_ratio(rest[0].times, chosen.times),
        confidence=_joint_confidence(chosen, rest, is_leader=chosen is leader),
    )


def _joint_confidence(chosen: Candidate, others: Sequence[Candidate], *, is_leader: bool) -> Confidence | None:
    """Return the confidence against all others at once: the least of each, corrected for their number."""
    at_least = 1.0 if is_leader else 1 / (1 + MARGIN)
    each = [c for other in others if (c := confidence_of(other.times, chosen.times, at_least)) is not None]
    if len(each) < len(others):
        return None
    least = min(each, key=lambda confidence: confidence.share)
    return replace(least, share=joint_share([confidence.share for confidence in each]))


def _doubted(before: Recommendation, chosen: Candidate) -> list[Candidate]:
    """Return faster points whose metric was worse in one trial, which proves little: the best few of them."""
    if len(chosen.times) > 1:
        return []
    close = [(c, c.metric.value) for c in before.candidates if c.is_close_call and c.metric is not None]
    faster = [(c, value) for c, value in close if c.median_s < chosen.median_s]
    faster.sort(key=lambda entry: gain(before.question.mode, entry[1]), reverse=True)
    return [c for c, _ in faster[:MAX_DOUBTED]]


def _settling(chosen: Candidate, rivals: Sequence[Candidate]) -> Settling:
    points = (chosen.point, *(c.point for c in rivals))
    counts = [repeats_needed(c.times, chosen.times) for c in rivals]
    if None in counts:
        return Settling(points, MIN_RANKED, spread_is_known=False)
    most = max(count for count in counts if count is not None)
    return Settling(points, most if most <= MAX_REPEATS else None, spread_is_known=True)


def _check_limits(candidates: Sequence[Candidate], constraints: Constraints, results: Sequence[TrialResult]) -> None:
    """Refuse a limit on what no point has."""
    timed = [c for c in candidates if c.time_s is not None]
    if constraints.min_efficiency is not None and timed and all(c.efficiency is None for c in timed):
        hint = 'compare with something: baseline={"num_workers": 1} in the study\'s file, or leave it out'
        raise RayparError(f"--min-efficiency {constraints.min_efficiency:g}: no point has an efficiency", hint=hint)
    if constraints.max_cost is not None and timed and all(c.cost is None for c in timed):
        hint = "leave it out, or run the study again: results of now say where they ran"
        raise RayparError(f"--max-cost {constraints.max_cost:g}: no result says on how many nodes it ran", hint=hint)
    if constraints.max_energy_j is None:
        return
    limit = f"--max-energy {units.energy(constraints.max_energy_j)}"
    if constraints.target is not None and constraints.start is not Start.FIRST_STEP:
        raise RayparError(f"{limit}: energy is known from the first timed step on", hint="leave --start out")
    if timed and not any(c.energy_j for c in candidates):
        hint = "leave it out, or run the study where it can be read"
        raise RayparError(f"{limit}: {why_energy_unknown(results)}", hint=hint)
