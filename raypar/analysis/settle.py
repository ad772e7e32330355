"""Studies that run until they are settled: points that are still open after a block, and the cost of further blocks.

A point is settled once its speedup is shown to be above 1, below 1, or within the study's margin of 1. The study is
settled once, in addition, no point may be as good as the recommended one and faster by more than the margin
(`raypar.analysis.recommend`). All intervals are those of the study's `Family`, which is valid after each block.

A further block has the open points and those that they are compared with. A point whose last trial failed or diverged
gets no further trial.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

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
    study = _Study(recommendation)
    study.judge_beginnings()
    study.judge_speedups()
    study.judge_recommendation()
    counted = [c for c in recommendation.candidates if study.is_listed(c)]
    needed = [c for c in counted if point_key(c.point) in study.needed]
    last = max((result.spec.repeat for c in counted for result in c.results), default=0)
    lagging = [c for c in needed if all(result.spec.repeat != last for result in c.results)]
    block, repeat = (lagging, last) if lagging else (needed, last + 1)
    points, stuck = tuple(study.open.values()), tuple(study.stuck.values())
    stopped = None
    if points and repeat >= question.max_repeats:
        stopped = Stopped.MAXIMUM
    elif not points:
        stopped = Stopped.STUCK if stuck else Stopped.SETTLED
    num_blocks = min(max((p.num_more or 1 for p in points), default=0), question.max_repeats - repeat)
    keys = [point_key(c.point) for c in needed]
    num_more = {key: (study.open[key].num_more or 1) if key in study.open else num_blocks for key in keys}
    return Open(
        points=points,
        stuck=stuck,
        needed=tuple(c.point for c in block),
        repeat=repeat,
        num_trials=sum(len(c.results) for c in recommendation.candidates),
        block_s=_expected_s(counted, {point_key(c.point): 1 for c in block}),
        cost_s=_expected_s(counted, {key: min(num, num_blocks) for key, num in num_more.items()}),
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
    Stopped.MAXIMUM: "not settled (most repeats run)",
    Stopped.BUDGET: "not settled (budget spent)",
    Stopped.STUCK: "not settled (trials fail)",
    None: "not settled yet",
}


def stop_status(stopped: Stopped | None, *, is_disturbed: bool = False) -> str:
    """Return the same in a few words, for a headline."""
    return "not settled (disturbed)" if is_disturbed else STATUSES[stopped]


class _Study:
    """Judged points of a study. Each open point has the first reason that was found."""

    def __init__(self, recommendation: Recommendation) -> None:
        question = recommendation.question
        self._question, self._recommendation = question, recommendation
        self._listed = {point_key(point) for point in question.points}
        self._by_key = {point_key(c.point): c for c in recommendation.candidates}
        self.open: dict[PointKey, OpenPoint] = {}
        self.stuck: dict[PointKey, OpenPoint] = {}
        self.needed: set[PointKey] = set()

    def is_listed(self, candidate: Candidate) -> bool:
        """Return whether the study lists the point; the store may have others."""
        return point_key(candidate.point) in self._listed

    def judge_beginnings(self) -> None:
        """Note points with fewer than the minimum number of repeats."""
        least = self._question.num_repeats or 0
        for c in filter(self.is_listed, self._recommendation.candidates):
            if (num := len(c.results)) < least:
                self._note(c, f"{num} of {units.counted(least, 'repeat')}", least, [c])

    def judge_speedups(self) -> None:
        """Note points whose speedup is neither on one side of 1 nor within the margin."""
        for c in self._recommendation.candidates:
            base = self._by_key.get(point_key(self._question.baseline_of(c.point)))
            if base is None or c.is_baseline or not self._question.baseline:
                continue
            if c.speedup is None:
                failed = base if not base.times else c
                self._note(c, f"no time of {point_label(failed.point)}", None, [c, base])
            elif not self._is_settled(c.speedup):
                level = self._recommendation.family.time_level(c.speedup.num_samples)
                num = repeats_needed(base.times, c.times, level, self._question.margin, least=0)
                self._note(c, units.ratio_interval(c.speedup), num, [c, base])

    def _is_settled(self, speedup: Estimate) -> bool:
        if (share := self._question.allowed_share) is not None:
            return gate_of(Comparison(speedup, limit=1 / (1 + share)), is_lost=False) is not Gate.INCONCLUSIVE
        return against_baseline(self._question, speedup).is_settled

    def judge_recommendation(self) -> None:
        """Note points that may be as good as the recommended one and faster by more than the margin.

        Two revisions are compared only point by point.
        """
        if REVISION in self._question.baseline:
            return
        chosen, best = self._recommendation.chosen, self._recommendation.best
        for rival in self._recommendation.open_rivals:
            c = rival.candidate
            assert chosen is not None
            if c.metric_gap is not None and best is not None:
                self._note(c, c.exclusion, rival.num_repeats, [c, chosen, best])
            else:
                lead = units.ratio_interval(self._recommendation.family.ratio(chosen.times, c.times))
                self._note(c, f"{lead} against {point_label(chosen.point)}", rival.num_repeats, [c, chosen])

    def _note(self, c: Candidate, reason: str, num_repeats: int | None, compared: Iterable[Candidate]) -> None:
        """Note that a point is open.

        Args:
            num_repeats: approximate number of trials that settle it.
            compared: points to repeat together.
        """
        key, together = point_key(c.point), list(compared)
        if not all(map(self.is_listed, together)):
            return
        if any(each.results and not each.results[-1].is_measured for each in together):
            self.stuck.setdefault(key, OpenPoint(c.point, reason))
            return
        self.needed |= {point_key(each.point) for each in together}
        num_more = None if num_repeats is None else max(1, num_repeats - len(c.results))
        self.open.setdefault(key, OpenPoint(c.point, reason, num_more))


def _expected_s(candidates: Sequence[Candidate], num_trials: Mapping[PointKey, int]) -> float | None:
    """Return the expected seconds of these numbers of trials, by the median of each point's; None: unknown."""
    walls = {point_key(c.point): [r.wall_s for r in c.results if r.is_complete and r.wall_s] for c in candidates}
    of_all = [wall_s for of_point in walls.values() for wall_s in of_point]
    if not of_all:
        return None
    return sum(num * statistics.median(walls[key] or of_all) for key, num in num_trials.items())


def _named(points: Sequence[OpenPoint]) -> str:
    return units.listed(map(str, points), MAX_NAMED)
