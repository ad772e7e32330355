"""Studies that run until they are settled: points that are still open after a block, and the cost of further blocks.

A point is settled once its speedup is shown to be above 1, below 1, or within the study's margin of 1. The study is
settled once, in addition, no point may be as good as the recommended one and faster by more than the margin
(`raypar.analysis.recommend`). All intervals are those of the study's `Family`, which is valid after each block.

A further block has the open points and those that they are compared with. A point whose last trial failed or diverged
gets no further trial.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from raypar import units
from raypar.analysis.comparison import Comparison, Gate, gate_of
from raypar.analysis.pairwise import against_baseline, repeats_needed
from raypar.analysis.question import PointKey, Question, point_key
from raypar.analysis.recommend import Candidate, Constraints, Recommendation, recommend
from raypar.analysis.stats import Estimate
from raypar.study.space import Value
from raypar.study.trial import REVISION, TrialResult, point_label

MAX_NAMED = 3  # open points in a line


class Stopped(StrEnum):
    """Reason why a study gets no further block."""

    SETTLED = "settled"
    MAXIMUM = "maximum"  # of repeats
    BUDGET = "budget"  # of time
    STUCK = "stuck"  # trials of the open points fail


@dataclass(frozen=True)
class OpenPoint:
    """A point that is not settled.

    Attributes:
        reason: ``1.04× [0.98, 1.10]``.
        num_more: approximate number of further trials that settle it; None: unknown.
    """

    point: Mapping[str, Value]
    reason: str
    num_more: int | None = None

    def __str__(self) -> str:
        return f"{point_label(self.point)} {self.reason}"


@dataclass(frozen=True)
class Open:
    """State of a study that runs until it is settled.

    Attributes:
        points: open points that further blocks may settle.
        stuck: open points that no further block will settle.
        needed: points of the next block, in the study's order: the open ones, and those that they are compared with.
        repeat: index of the next block.
        num_trials: number of trials with a result.
        block_s: expected time of the next block's trials; None: unknown.
        cost_s: expected time of all blocks until everything is settled, or the maximum is reached; None: unknown.
        stopped: reason why there is no further block; None: there is one.
    """

    points: tuple[OpenPoint, ...]
    stuck: tuple[OpenPoint, ...]
    needed: tuple[Mapping[str, Value], ...]
    repeat: int
    num_trials: int
    block_s: float | None
    cost_s: float | None
    stopped: Stopped | None

    @property
    def later_s(self) -> float | None:
        """Expected time of the blocks after the next one; None: unknown."""
        return None if self.cost_s is None or self.block_s is None else max(0.0, self.cost_s - self.block_s)

    @property
    def text(self) -> str:
        """``2 points open: num_workers=2 1.04× [0.98, 1.10], ...; about 12 s more``."""
        cost = "" if self.cost_s is None else f"; about {units.seconds(self.cost_s)} more"
        return f"{units.counted(len(self.points), 'point')} open: {_named(self.points)}{cost}"


def what_is_open(question: Question, results: Sequence[TrialResult]) -> Open:
    """Return the open points of a study that runs until it is settled."""
    return open_points(recommend(question, results, Constraints()))


def open_points(recommendation: Recommendation) -> Open:
    """Return the open points, given the study's recommendation without constraints."""
    question = recommendation.question
    assert question.max_repeats is not None
    listed = {point_key(point) for point in question.points}
    counted = [c for c in recommendation.candidates if point_key(c.point) in listed]
    opened: dict[PointKey, OpenPoint] = {}  # with the first reason of each
    stuck: dict[PointKey, OpenPoint] = {}
    keys: set[PointKey] = set()  # of open points and those that they are compared with
    for c, reason, num_repeats, *compared in _reasons(recommendation, counted):
        key, together = point_key(c.point), {point_key(each.point) for each in (c, *compared)}
        if not together <= listed:  # the store may have other points
            continue
        if any(each.results and not each.results[-1].is_measured for each in (c, *compared)):
            stuck.setdefault(key, OpenPoint(c.point, reason))
            continue
        keys |= together
        num_more = None if num_repeats is None else max(1, num_repeats - len(c.results))
        opened.setdefault(key, OpenPoint(c.point, reason, num_more))
    needed = [c for c in counted if point_key(c.point) in keys]
    last = max((result.spec.repeat for c in counted for result in c.results), default=0)
    lagging = [c for c in needed if all(result.spec.repeat != last for result in c.results)]
    block, repeat = (lagging, last) if lagging else (needed, last + 1)
    points = tuple(opened.values())
    stopped = None
    if points and repeat >= question.max_repeats:
        stopped = Stopped.MAXIMUM
    elif not points:
        stopped = Stopped.STUCK if stuck else Stopped.SETTLED
    num_blocks = min(max((p.num_more or 1 for p in points), default=0), question.max_repeats - repeat)
    num_trials = {
        key: min((opened[key].num_more or 1) if key in opened else num_blocks, num_blocks)
        for key in (point_key(c.point) for c in needed)
    }
    return Open(
        points=points,
        stuck=tuple(stuck.values()),
        needed=tuple(c.point for c in block),
        repeat=repeat,
        num_trials=sum(len(c.results) for c in recommendation.candidates),
        block_s=_expected_s(counted, {point_key(c.point): 1 for c in block}),
        cost_s=_expected_s(counted, num_trials),
        stopped=stopped,
    )


def stop_sentence(of: Open, stopped: Stopped | None, *, is_disturbed: bool = False) -> str:
    """Return the reason why a study stopped, and what it has left open, as a sentence.

    Args:
        stopped: None: it was interrupted.
        is_disturbed: most of its trials were disturbed, so that seemingly settled points are not.
    """
    trials = units.counted(of.num_trials, "trial")
    left = f"; still open: {_named((*of.points, *of.stuck))}" if of.points or of.stuck else ""
    match stopped:
        case Stopped.SETTLED if is_disturbed:
            return f"Stopped after {trials}: on a busy machine, more trials settle nothing."
        case Stopped.SETTLED:
            return f"Settled after {trials}."
        case Stopped.MAXIMUM:
            return f"Stopped at the maximum of {units.counted(of.repeat, 'repeat')}, after {trials}{left}."
        case Stopped.BUDGET:
            return f"Stopped after {trials}, as the budget allows no further block{left}."
        case Stopped.STUCK:
            return f"Stopped after {trials}, as more of them would not help{left}."
    return f"Not settled yet, after {trials}{left}."


STATUSES = {
    Stopped.SETTLED: "settled",
    Stopped.MAXIMUM: "not settled (maximum of repeats)",
    Stopped.BUDGET: "not settled (budget spent)",
    Stopped.STUCK: "not settled (trials fail)",
    None: "not settled yet",
}


def stop_status(stopped: Stopped | None, *, is_disturbed: bool = False) -> str:
    """Return the same in a few words, for a headline."""
    return "not settled (disturbed)" if is_disturbed else STATUSES[stopped]


# An open point, the reason, the approximate number of trials that settle it, and the points that it is compared with.
_Reason: TypeAlias = tuple[Candidate, str, int | None, *tuple[Candidate, ...]]


def _reasons(recommendation: Recommendation, candidates: Sequence[Candidate]) -> Iterator[_Reason]:
    """Yield the reasons why points are open: repeats, speedups, and the choice of the recommended point."""
    question, family = recommendation.question, recommendation.family
    least = question.num_repeats or 0
    for c in candidates:
        if (num := len(c.results)) < least:
            yield c, f"{num} of {units.counted(least, 'repeat')}", least
    by_key = {point_key(c.point): c for c in recommendation.candidates}
    for c in recommendation.candidates:
        base = by_key.get(point_key(question.baseline_of(c.point)))
        if base is None or c.is_baseline or not question.baseline:
            continue
        if c.speedup is None:
            yield c, f"no time of {point_label((c if base.times else base).point)}", None, base
        elif not _is_settled(question, c.speedup):
            level = family.time_level(c.speedup.num_samples)
            num_repeats = repeats_needed(base.times, c.times, level, question.margin, least=0)
            yield c, units.ratio_interval(c.speedup), num_repeats, base
    chosen, best = recommendation.chosen, recommendation.best
    if REVISION in question.baseline or chosen is None:  # two revisions are compared only point by point
        return
    for rival in recommendation.open_rivals:
        c = rival.candidate
        if c.metric_gap is not None and best is not None:
            yield c, c.exclusion, rival.num_repeats, chosen, best
        else:
            lead = units.ratio_interval(family.ratio(chosen.times, c.times))
            yield c, f"{lead} against {point_label(chosen.point)}", rival.num_repeats, chosen


def _is_settled(question: Question, speedup: Estimate) -> bool:
    """Return whether a speedup is on one side of 1 or of the allowed slowdown, or within the margin."""
    if (share := question.allowed_share) is not None:
        return gate_of(Comparison(speedup, limit=1 / (1 + share)), is_lost=False) is not Gate.INCONCLUSIVE
    return against_baseline(question, speedup).is_settled


def _expected_s(candidates: Sequence[Candidate], num_trials: Mapping[PointKey, int]) -> float | None:
    """Return the expected seconds of these numbers of trials, by the median of each point's; None: unknown."""
    walls = {point_key(c.point): [r.wall_s for r in c.results if r.is_complete and r.wall_s] for c in candidates}
    of_all = [wall_s for of_point in walls.values() for wall_s in of_point]
    if not of_all:
        return None
    return sum(num * statistics.median(walls[key] or of_all) for key, num in num_trials.items())


def _named(points: Sequence[OpenPoint]) -> str:
    return units.listed(map(str, points), MAX_NAMED)
