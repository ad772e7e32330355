"""Comparison of two revisions of the code, whose trials ran in pairs: `raypar ab`.

The study has the hyperparameter `REVISION` with two values. The trials of both in one block are a pair with the same
seed, one right after the other. All intervals are those of the study's `Family`, which is valid after each block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from raypar.analysis.comparison import METRIC_CHANGE, TIME_RATIO, Comparison, Gate, gate_of, gate_of_all
from raypar.analysis.evidence import Evidence
from raypar.analysis.load import disturbing_load
from raypar.analysis.pairwise import Family, metric_differences, repeats_needed
from raypar.analysis.question import PointKey, PointSamples, Question, point_key
from raypar.study.space import Value
from raypar.study.trial import REVISION, TrialResult, TrialState, is_loss


@dataclass(frozen=True)
class RevisionPoint:
    """A point of the study under both revisions; pairs are (A's, B's).

    Attributes:
        point: without the revision.
        time: B's time divided by A's for the same work.
        num_pairs: number of compared pairs of times.
        num_blocks: number of blocks in which both finished.
        num_disturbed: number of blocks in which other load disturbed one of the two.
        num_more: approximate number of further blocks that settle an inconclusive point; None: unknown.
        outcomes: states of the trials if none finished; None for others.
        metric: B's metric minus A's.
        has_equal_losses: whether all reported losses are equal in all pairs; None: none are reported.
    """

    point: Mapping[str, Value]
    time: Comparison
    num_pairs: int
    num_blocks: int
    num_disturbed: int
    num_more: int | None
    outcomes: tuple[TrialState | None, TrialState | None]
    metric: Comparison
    has_equal_losses: bool | None

    def gate(self, allowed_share: float) -> Gate:
        """Return whether B is shown to be slower by at most the allowed share."""
        lost = self.outcomes[1] is not None and self.outcomes[0] is None
        return gate_of(replace(self.time, limit=1 + allowed_share), is_lost=lost)


@dataclass(frozen=True)
class RevisionComparison:
    """Two revisions at every point of a study.

    Attributes:
        labels: labels of A, the reference, and B.
        margin: difference that does not matter, as a share.
    """

    question: Question
    labels: tuple[str, str]
    points: tuple[RevisionPoint, ...]
    margin: float
    time_metric: str

    def gate(self, allowed_share: float) -> Gate:
        return gate_of_all({point.gate(allowed_share) for point in self.points})


def compare_revisions(evidence: Evidence) -> RevisionComparison:
    """Compare the two revisions of a study; the baseline is A."""
    question = evidence.question
    a = str(question.baseline[REVISION])
    b = next(str(p[REVISION]) for p in question.points if p[REVISION] != a)
    sides: dict[PointKey, dict[str, PointSamples]] = {}
    for samples in evidence.points:
        sides.setdefault(point_key(_rest(samples.point)), {})[str(samples.point[REVISION])] = samples
    pairs = [(pair[a], pair[b]) for pair in sides.values() if a in pair and b in pair]
    points = tuple(_compare(question, evidence.family, *pair) for pair in pairs)
    return RevisionComparison(question, (a, b), points, question.margin, evidence.time_metric)


def _rest(point: Mapping[str, Value]) -> dict[str, Value]:
    return {key: value for key, value in point.items() if key != REVISION}


def _compare(question: Question, family: Family, a: PointSamples, b: PointSamples) -> RevisionPoint:
    speedup, num_more = family.speedup(a, b), None
    time = Comparison(speedup and speedup.inverse(), TIME_RATIO, margin=question.margin)
    if speedup is not None and not time.is_settled:
        level = family.time_level(speedup.num_samples)
        needed = repeats_needed(a.times, b.times, level, question.margin, least=0)
        num_more = None if needed is None else max(1, needed - speedup.num_samples)
    differences = metric_differences(a, b)
    return RevisionPoint(
        _rest(a.point),
        time,
        len(a.times.keys() & b.times.keys()),
        len(a.samples.keys() & b.samples.keys()),
        len({r.spec.repeat for r in (*a.measured, *b.measured) if disturbing_load(r) is not None}),
        num_more,
        (a.outcome, b.outcome),
        Comparison(family.metric_shift(differences), METRIC_CHANGE, is_equal=not any(differences)),
        _have_equal_losses(a, b),
    )


def _have_equal_losses(a: PointSamples, b: PointSamples) -> bool | None:
    losses = [{r.spec.repeat: _losses(r) for r in side.measured} for side in (a, b)]
    pairs = [(losses[0][repeat], losses[1][repeat]) for repeat in losses[0].keys() & losses[1].keys()]
    return all(of_a == of_b for of_a, of_b in pairs) if any(of_a or of_b for of_a, of_b in pairs) else None


def _losses(result: TrialResult) -> list[tuple[int, str, float]]:
    return [(i, key, value) for i, report in enumerate(result.reports) for key, value in report.items() if is_loss(key)]
