"""Standing of a search: how sure its answer is, what to try next, and whether repeats confirm its leader.

A search runs each point once, and the best of many single trials owes a part of its lead to chance (the winner's curse:
E. C. Capen, R. V. Clapp and W. M. Campbell, Journal of Petroleum Technology 23, 1971). So a search only names a leader.
Repeats with other seeds confirm or refute it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from raypar import units
from raypar.analysis.effects import Importances
from raypar.analysis.pairwise import Family, equivalent_metrics
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import Question, point_key
from raypar.study.trial import TrialState, gain, point_label

MIN_TRIALS = 10  # for sentences on ranges and importances
MIN_TOP, TOP_SHARE = 3, 0.1  # number of the best trials whose values are compared with the range
OUTER = 0.15  # share of a range that is its end
LOG_RANGE = 20  # ratio of the values from which a range is logarithmic
NEGLIGIBLE = 0.05  # share of the importance
NUM_REPEATED = 3  # points that a follow-up repeats

Scored = Sequence[tuple[PointAnalysis, float]]


def scored_points(question: Question, points: Sequence[PointAnalysis]) -> list[tuple[PointAnalysis, float]]:
    """Return the points of a search that have a metric with its value, the best first."""
    scored = [(p, p.metric.value) for p in points if p.metric is not None and not p.unusable]
    return sorted(scored, key=lambda entry: rank(question, entry[0]))


def rank(question: Question, p: PointAnalysis) -> tuple[float, float]:
    """Return the sort key of a search's points, the best first, and points without a usable metric last.

    With a target, points that reached it come first, by their time.
    """
    worse = -gain(question.mode, p.metric.value) if p.metric and not p.unusable else math.inf
    time_s = p.time_s.value if question.target is not None and p.time_s and worse < math.inf else math.inf
    return time_s, worse


def leading(question: Question, points: Sequence[PointAnalysis], doubt: str = "") -> str:
    """Return the answer of a search. One trial per point confirms nothing.

    Args:
        doubt: reason why times can't be trusted, which matters to a search with a target; empty if they can.
    """
    scored = scored_points(question, points)
    if not scored:
        return f"No trial reported {question.metric}."
    if question.target is not None:
        return _first_at_target(question, scored, doubt)
    best, value = scored[0]
    shown = f"{question.metric} {question.judged_by.show(value)}"
    num_stopped = sum(p.outcome is TrialState.STOPPED for p, _ in scored)
    stopped = f", {num_stopped} stopped early" if num_stopped else ""
    count = f"best of {len(scored)}{stopped}, one trial each, unconfirmed"
    return f"Leading: {shown} with {point_label(best.point)} ({count})."


def _first_at_target(question: Question, scored: Scored, doubt: str) -> str:
    """Return the point that reached the target in the least training time."""
    (best, value), goal = scored[0], f"{question.metric} {question.judged_by.show(question.target)}"
    num_reached = sum(p.time_s is not None for p, _ in scored)
    if best.time_s is None:
        shown = f"{question.judged_by.show(value)} with {point_label(best.point)}"
        return f"None of {len(scored)} trials reached {goal}; the closest: {shown}."
    count = f"first of {num_reached} that reached it, {len(scored)} trials, unconfirmed"
    note = f" But times can't be trusted: {doubt}." if doubt else ""
    leader = f"after {units.seconds(best.time_s.value)} of training with {point_label(best.point)}"
    return f"Leading: {goal} {leader} ({count}).{note}"


def search_lines(question: Question, points: Sequence[PointAnalysis], importances: Importances | None) -> Iterator[str]:
    """Yield sentences on how sure the answer of a search is, and on what to try next."""
    scored = scored_points(question, points)
    if len(scored) < 2:
        return
    (best, value), *others = scored
    if question.target is not None:
        yield from _target_lines(question, scored)
        return
    margin = question.judged_by.margin(value)
    num_close = sum(abs(other - value) <= margin for _, other in others)
    within = f"within {question.judged_by.show_difference(margin)} of it"
    close = f"{units.counted(num_close, 'other')} {'is' if num_close == 1 else 'are'} {within}"
    if not num_close:
        close = f"No other is {within}"
    starts = sorted(min(r.started_at for r in p.results) for p, _ in scored)
    num_since = sum(start > min(r.started_at for r in best.results) for start in starts)
    since = f"Trial {len(scored) - num_since} of {len(scored)} found it"
    yield f"{close}. {since}." if num_since else f"{close}. {since}: more trials may find a better one."
    if len(scored) >= MIN_TRIALS:
        yield from _range_lines(question, scored)
        yield from _importance_lines(question, importances)
    num_repeated = min(NUM_REPEATED, len(scored))
    yield f"To confirm the best {num_repeated}: `raypar study FILE --repeat-best {num_repeated}`."


def _target_lines(question: Question, scored: Scored) -> Iterator[str]:
    times = [p.time_s.value for p, _ in scored if p.time_s is not None]
    if len(times) > 1:
        yield f"The next took {units.ratio(times[1] / times[0])} as long."
    if len(scored) >= MIN_TRIALS and len(times) >= MIN_TOP:
        yield from _range_lines(question, scored)
    if times:
        num_repeated, goal = min(NUM_REPEATED, len(scored)), f"{question.metric}={question.target:g}"
        yield (
            f"To confirm the best {num_repeated}: `raypar study FILE --repeat-best {num_repeated}`, then "
            f"`raypar recommend {question.study_name}-best --target {goal}`."
        )


def _range_lines(question: Question, scored: Scored) -> Iterator[str]:
    """Yield the hyperparameters whose best values lie at an end of the range that was tried."""
    top = max(MIN_TOP, round(TOP_SHARE * len(scored)))
    for key in question.space_keys:
        values = [value for p, _ in scored if units.is_number(value := p.point.get(key))]
        if len(values) < len(scored) or not (places := _places(values)):
            continue
        for end, is_at_end in (("lower", max(places[:top]) <= OUTER), ("upper", min(places[:top]) >= 1 - OUTER)):
            if is_at_end:
                low, high = (units.value_of(_rounded(pick(values[:top]))) for pick in (min, max))
                yield f"The best {top} have {key} from {low} to {high}, the {end} end of what was tried: widen it."


def _places(values: Sequence[float]) -> list[float]:
    """Return the places of values in their range from 0 to 1; empty if they are equal."""
    low, high = min(values), max(values)
    if low > 0 and high > LOG_RANGE * low:
        values, low, high = [*map(math.log, values)], math.log(low), math.log(high)
    return [(value - low) / (high - low) for value in values] if high > low else []


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.2g}")


def _importance_lines(question: Question, importances: Importances | None) -> Iterator[str]:
    shares = importances.shares if importances else {}
    if minor := [key for key, share in shares.items() if share < NEGLIGIBLE]:
        names = units.listed(minor, len(minor), word="and")
        verb = "changes" if len(minor) == 1 else "change"
        yield f"{names} hardly {verb} {question.metric} here: fix {'it' if len(minor) == 1 else 'them'}."


def confirmation(question: Question, points: Sequence[PointAnalysis], family: Family) -> str:
    """Return whether repeats confirm the leader of a search that `question.leader` names."""
    name, metric = point_label(question.leader), question.metric
    leader = next((p for p in points if point_key(p.point) == point_key(question.leader)), None)
    others = [p for p in points if p is not leader and p.metric is not None and not p.unusable]
    if leader is None or leader.metric is None or leader.unusable:
        state = leader.outcome if leader is not None and leader.outcome else f"without {metric}"
        return f"Refuted: {name}, the leader of the search, is {state} in the repeats."
    shown = f"{name} with {metric} {question.judged_by.show_interval(leader.metric)}"
    if leader.metric.low is None or not others:
        return f"Not confirmed yet: {shown} has too few repeats."
    of_others = {id(p): family.compare_metrics(leader, p) for p in others}
    differing = [p for p in others if of_others[id(p)].differs]
    better = [p for p in differing if _is_better(question, p, leader)]
    close = equivalent_metrics(question, [leader, *others], family, leader)
    if better := [p for p in better if p not in close]:
        first = max(better, key=lambda p: gain(question.mode, p.metric.value if p.metric else math.nan))
        by = of_others[id(first)].estimate
        lead = f" by {question.judged_by.show_change(by)}" if by else ""
        return f"Refuted: {point_label(first.point)} beats the leader of the search{lead}; {shown}."
    tied = [p for p in others if p in close]
    unclear = [p for p in others if p not in close and p not in differing]
    if unclear:
        names = units.listed([point_label(p.point) for p in unclear], NUM_REPEATED, word="and")
        return f"Inconclusive: {shown}; {names} may be as good or better. More --repeats decide."
    if tied:
        margin = question.judged_by.show_difference(question.judged_by.margin(leader.metric.value))
        names = units.listed([point_label(p.point) for p in tied], NUM_REPEATED, word="and")
        return f"Confirmed: {shown}; {names} {'is' if len(tied) == 1 else 'are'} equivalent within {margin}."
    return f"Confirmed: {shown} is better than {'the other' if len(others) == 1 else f'all {len(others)} others'}."


def _is_better(question: Question, p: PointAnalysis, other: PointAnalysis) -> bool:
    if p.metric is None or other.metric is None:
        return False
    return gain(question.mode, p.metric.value) > gain(question.mode, other.metric.value)
