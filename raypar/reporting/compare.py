"""Two studies side by side, in a terminal: a row for each point of both, verdicts, and other differences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from raypar import units
from raypar.analysis.compare import Changes, MatchedPoint, StudyComparison
from raypar.analysis.comparison import Gate, Outcome
from raypar.analysis.stats import Estimate
from raypar.reporting.documents import DIFFERENCES
from raypar.reporting.points import timed_part
from raypar.reporting.sentences import distrust
from raypar.reporting.text import Column, print_line, print_paragraph, print_table, value_column
from raypar.study.metric import NUMBER, PERCENT, SHARE, Metric
from raypar.study.space import Value
from raypar.study.trial import point_label

if TYPE_CHECKING:
    from raypar.reporting.documents import (
        CompareDocument,
        GateEntry,
        MatchedEntry,
        PointSideEntry,
        SideEntry,
        ValuePair,
    )

MAX_NAMED = 4  # points or values that a sentence lists
METRIC_UNITS = {SHARE: "a share of 1", PERCENT: "in per cent", NUMBER: "a plain number"}
WIDE = 100  # console width from which a table shows both metrics
LIMITATION = (
    "Two separate runs can also differ by the day (load, temperature, other users of the machine): such an offset is "
    "part of every ratio above, and of no interval."
)
ROUNDING = 1e-12  # an interval no wider than this is of equal values


def print_comparison(console: Console, comparison: StudyComparison, places: tuple[str, str] = ("", "")) -> None:
    """Print a table of the points of two studies, the claims on them, and other differences.

    Args:
        places: where each is stored, if they differ.
    """
    for letter, name, place, role in zip("AB", comparison.names, places, (", the reference", ""), strict=True):
        at = f" ({place})" if place else ""
        # A name may contain a line break.
        print_line(console, " ".join(f"{letter}: {name}{at}{role}".split()), "bold")
    console.print()
    if comparison.matched:
        print_table(console, list(_columns(comparison, is_wide=console.width >= WIDE)))
        console.print()
        print_paragraph(console, _legend(comparison))
        print_paragraph(console, LIMITATION)
        console.print()
    doubts = _doubts(comparison)
    for line in doubts:
        print_paragraph(console, line)
    if doubts:
        console.print()
    for line in _claims(comparison):
        print_paragraph(console, line)
    others = (*_excluded_lines(comparison), *_difference_lines(comparison))
    if others:
        console.print()
    for line in others:
        print_paragraph(console, line)


def print_gate(console: Console, comparison: StudyComparison, exit_code: int) -> None:
    """Print whether B is slower than allowed, at which points that is inconclusive, and the resulting exit code."""
    console.print()
    for line in _gate_lines(comparison, exit_code):
        print_paragraph(console, line)


def compare_document(
    comparison: StudyComparison, stores: tuple[str, str], exit_code: int | None = None
) -> CompareDocument:
    """Return the content of `print_comparison` and `print_gate` as a document.

    Args:
        stores: store of each study.
        exit_code: None without ``--fail-if-slower``.
    """
    answer = [*_doubts(comparison), *_claims(comparison)]
    gate: GateEntry | None = None
    if exit_code is not None and comparison.gate is not None:
        answer += _gate_lines(comparison, exit_code)
        share = comparison.allowed_share or 0.0
        gate = {"allowed_share": share, "result": comparison.gate, "exit_code": exit_code}
    a, b = (_side(comparison, stores, i) for i in (0, 1))
    return {
        "schema": 1,
        "kind": "compare",
        "a": a,
        "b": b,
        "answer": " ".join(answer),
        "limitation": LIMITATION,
        "notes": [*_excluded_lines(comparison), *_difference_lines(comparison)],
        "metric": comparison.metric,
        "metric_unit": comparison.judged_by.unit or None,
        "time_metric": comparison.time_metric,
        "gate": gate,
        "points": [_matched(p, is_judged=gate is not None) for p in comparison.matched],
        "missing": comparison.missing,
        "unlike": [{"point": point, "changes": _pairs(changes)} for point, changes in comparison.unlike],
        "origins": {key: {"a": of_a, "b": of_b} for key, (of_a, of_b) in comparison.origins.items()},
    }


def _side(comparison: StudyComparison, stores: tuple[str, str], i: int) -> SideEntry:
    return {
        "study": comparison.names[i],
        "store": stores[i],
        "doubt": comparison.doubts[i] or None,
        "is_origin_known": comparison.is_known[i],
        "is_uncommitted": comparison.uncommitted[i],
        "only": comparison.only[i],
        "excluded": comparison.excluded[i] or None,
    }


def _matched(point: MatchedPoint, *, is_judged: bool) -> MatchedEntry:
    def side(i: int) -> PointSideEntry:
        return {
            "num_finished": point.num_finished[i],
            "num_diverged": point.num_diverged[i],
            "outcome": point.outcomes[i],
            "time_s": point.times_s[i],
            "metric": point.metrics[i],
        }

    return {
        "point": point.point,
        "difference": DIFFERENCES[point.time.outcome],
        "gate": point.gate if is_judged else None,
        "ratio": point.time.estimate,
        "metric_change": point.metric.estimate,
        "a": side(0),
        "b": side(1),
        "execution_changes": _pairs(point.execution_changes),
    }


def _pairs(changes: Changes) -> dict[str, ValuePair]:
    return {key: {"a": a, "b": b} for key, (a, b) in changes.items()}


def _gate_lines(comparison: StudyComparison, exit_code: int) -> Iterator[str]:
    share = f"{100 * (comparison.allowed_share or 0):g} %"
    points = {gate: [p for p in comparison.matched if p.gate is gate] for gate in Gate}
    failed = points[Gate.FAILED]
    slower, lost = ([p for p in failed if (p.time.estimate is None) is is_lost] for is_lost in (False, True))
    unclear = [(p.point, _doubt(p)) for p in points[Gate.INCONCLUSIVE]]
    other_work = [point for point, _ in comparison.unlike]
    unclear += [(point, "other work in B" if point in other_work else "not in B") for point in comparison.missing]
    total = units.counted(sum(map(len, points.values())) + len(comparison.missing), "point")
    lines = [
        (f"B is more than {share} slower", [(p.point, _ratio(p)) for p in _slowest(slower)]),
        ("B has no finished trial", [(p.point, str(p.outcomes[1])) for p in lost]),
        ("Inconclusive", unclear),
    ]
    for text, named in lines:
        if named:
            shown = _listed(f"{point_label(point)} ({why})" for point, why in named)
            yield f"{text} at {len(named)} of {total}: {shown}."
    if points[Gate.PASSED]:
        yield f"B is at most {share} slower at {len(points[Gate.PASSED])} of {total}."
    is_open = any(p.time.outcome is not Outcome.DISTURBED for p in points[Gate.INCONCLUSIVE])
    hint = {Gate.INCONCLUSIVE: "; more repeats narrow the intervals" if is_open else ""}
    result = comparison.gate
    assert result is not None
    yield f"--fail-if-slower: {result.value}, exit code {exit_code}{hint.get(result, '')}."


def _doubt(point: MatchedPoint) -> str:
    """Return why it is inconclusive whether B is slower at a point: ``1.05× [1.02, 1.08]``."""
    texts = [_ratio(point) if point.time.estimate else "no time in B"]
    if point.time.outcome is Outcome.UNCONFIRMED:
        texts.append("one trial in A or in B")
    if point.time.outcome is Outcome.DISTURBED:
        texts.append("disturbed")
    if point.diverges_in_b_alone:
        texts.append("some trials diverged in B")
    return ", ".join(texts)


def _excluded_lines(comparison: StudyComparison) -> Iterator[str]:
    """Yield the points and trials that are not compared, and why."""
    for name, sentence in zip("AB", comparison.excluded, strict=True):
        if sentence:
            yield f"{name}: {sentence}"
    for name, points in zip("AB", comparison.only, strict=True):
        if points:
            yield f"Only {name} has {units.counted(len(points), 'point')}: {_listed(map(point_label, points))}."
    if comparison.unlike:
        # Often the same option differs at all points; it is listed once.
        reasons = dict.fromkeys(_changes(config) for _, config in comparison.unlike)
        count = units.counted(len(comparison.unlike), "point")
        yield f"Not compared, for they do different work (A's, B's): {count}, {_listed(reasons)}."


def _difference_lines(comparison: StudyComparison) -> Iterator[str]:
    """Yield other differences between the studies, which may explain a difference in their times."""
    means = dict.fromkeys(_changes(p.execution_changes) for p in comparison.matched if p.execution_changes)
    if means:
        yield f"They were run differently (A, B): {_listed(means)}."
    if comparison.origins:
        differences = [f"{key} {_values(a)} → {_values(b)}" for key, (a, b) in comparison.origins.items()]
        yield f"What differs where they come from (A → B): {'; '.join(differences)}."
    elif all(comparison.is_known):
        yield "Nothing that is known of where they come from differs (versions, machine, commit)."
    for name, is_known in zip("AB", comparison.is_known, strict=True):
        if not is_known:
            yield f"Where {name} comes from (versions, machine, commit) is not in its store."
    for name, uncommitted in zip("AB", comparison.uncommitted, strict=True):
        if uncommitted:
            yield f"{name} ran code with changes that no commit has."


def _legend(comparison: StudyComparison) -> str:
    """Return the meaning of the columns and the confidence of the intervals."""
    text = f"time: {timed_part(comparison.time_metric)}, median; B/A: how many times as long B takes for the same work"
    text += "; n: finished trials of A, of B."
    points = comparison.matched
    estimates = {"B/A": [p.time.estimate for p in points], "B-A": [p.metric.estimate for p in points]}
    levels = {head: {e.level for e in every if e and e.level} for head, every in estimates.items()}
    shown = [f"{head} {units.level(max(each))}" for head, each in levels.items() if each]
    if shown:
        text += f" Intervals: {', '.join(shown)} each, so that all claims hold together with 95 % (Holm's method)."
    return text


def _columns(comparison: StudyComparison, *, is_wide: bool) -> Iterator[Column]:
    points, metric = comparison.matched, comparison.judged_by
    for key in comparison.keys:
        column = value_column(key, [p.point.get(key, units.MISSING) for p in points])
        yield replace(column, head=key.replace("_", "_\n"), is_prose=True)
    if not comparison.keys:
        yield Column("point", ["the only point"] * len(points))
    for i, name in enumerate("AB"):
        shown = [p.outcomes[i] or units.seconds_interval(p.times_s[i], bounds=False) for p in points]
        yield Column(f"{name}\ntime", shown, True)
    yield Column("B/A\ntime", list(map(_ratio, points)), True)
    for i, name in enumerate("AB"):
        scores = [p.metrics[i] for p in points]
        if is_wide and any(scores):
            yield Column(f"{name}\n{metric.name}", [metric.show(m.value if m else None) for m in scores], True)
    if any(p.metric.estimate for p in points):
        unit = ", points" if metric.per_cent else ""
        yield Column(f"B-A\n{metric.name}{unit}", [_change(metric, p.metric.estimate) for p in points], True)
    yield Column("n", ["/".join(map(str, p.num_finished)) for p in points], True)


def _doubts(comparison: StudyComparison) -> list[str]:
    """Return the reason for each study whose times can't be trusted."""
    return [distrust(doubt, f"Times of {side}") for side, doubt in zip("AB", comparison.doubts, strict=True) if doubt]


def _claims(comparison: StudyComparison) -> list[str]:
    """Return the claims in sentences. With ``--fail-if-slower``, those on times are in `_gate_lines`."""
    if not comparison.matched:
        return ["No point is in both studies: there is nothing to compare."]
    times = _about_differences(comparison) if comparison.allowed_share is None else ()
    return [*times, *_about_lost_times(comparison), *_about_metric(comparison)]


def _about_differences(comparison: StudyComparison) -> Iterator[str]:
    total = units.counted(len(comparison.matched), "point")
    for outcome, most_first in ((Outcome.SLOWER, True), (Outcome.FASTER, False)):
        if points := _points(comparison, outcome):
            shown = [f"{point_label(p.point)} ({_ratio(p)})" for p in _slowest(points, most_first)]
            yield f"B is {outcome} at {len(points)} of {total}: {_listed(shown)}."
    undecided = (
        (Outcome.INCONCLUSIVE, "the interval of B/A includes 1"),
        (Outcome.DISTURBED, "most trials of A or of B were disturbed"),
        (Outcome.UNCONFIRMED, "one trial in A or in B, no interval"),
    )
    for outcome, text in undecided:
        if points := _points(comparison, outcome):
            yield f"Inconclusive at {len(points)} of {total}: {text}."


def _about_lost_times(comparison: StudyComparison) -> Iterator[str]:
    """Yield the points without a time, and those where trials diverged only in B."""
    total = units.counted(len(comparison.matched), "point")
    if points := _points(comparison, Outcome.MISSING):
        shown = []
        for p in points:
            states = [f"{state} in {name}" for name, state in zip("AB", p.outcomes, strict=True) if state]
            shown.append(f"{point_label(p.point)} ({', '.join(states) or 'not timed'})")
        yield f"No time at {len(points)} of {total}: {_listed(shown)}."
    if points := [p for p in comparison.matched if p.time.estimate and p.diverges_in_b_alone]:
        counts = [f"{point_label(p.point)} ({units.counted(p.num_diverged[1], 'trial')})" for p in points]
        yield f"Trials diverged in B and none in A at {len(points)} of {total}: {_listed(counts)}."


def _about_metric(comparison: StudyComparison) -> Iterator[str]:
    changes = [(p, p.metric.estimate) for p in comparison.matched if p.metric.estimate is not None]
    if not changes:
        yield _not_compared(comparison)
        return
    of, total = f"{comparison.metric}: ", units.counted(len(changes), "point")
    differing = [(p, c) for p, c in changes if p.metric.differs]
    if differing:
        most, change = max(differing, key=lambda entry: abs(entry[1].value))
        unit = " percentage points" if comparison.judged_by.per_cent else ""
        shown = f"{point_label(most.point)}, {_change(comparison.judged_by, change)}{unit}"
        yield f"{of}B differs from A at {len(differing)} of {total}; most at {shown}."
    elif all(c.low is not None and c.high is not None and c.high - c.low < ROUNDING for _, c in changes):
        yield f"{of}the same at all of {total}."
    elif all(p.metric.outcome is Outcome.UNCONFIRMED for p, _ in changes):
        yield f"{of}inconclusive, too few trials for an interval."
    else:
        yield f"{of}no significant difference at any of {total}."


def _not_compared(comparison: StudyComparison) -> str:
    unit_a, unit_b = (METRIC_UNITS.get(unit, "") for unit in comparison.metric_units)
    if unit_a and unit_b and unit_a != unit_b:
        return f"{comparison.metric} is not compared: it is {unit_a} in A, and {unit_b} in B."
    return f"No point has {comparison.metric} in both studies."


def _change(metric: Metric, change: Estimate | None) -> str:
    """Return ``-0.50 [-0.90, -0.10]``; an accuracy changes by percentage points."""
    if change is None:
        return units.MISSING

    def show(value: float) -> str:
        return f"{metric.per_cent * value:+.2f}" if metric.per_cent else f"{value:+.4g}"

    brackets = "" if change.low is None or change.high is None else f" [{show(change.low)}, {show(change.high)}]"
    return show(change.value) + brackets


def _ratio(point: MatchedPoint) -> str:
    return units.ratio_interval(point.time.estimate)


def _points(comparison: StudyComparison, outcome: Outcome) -> list[MatchedPoint]:
    return [p for p in comparison.matched if p.time.outcome is outcome]


def _slowest(points: Iterable[MatchedPoint], most_first: bool = True) -> list[MatchedPoint]:
    """Sort points by their ratio."""
    return sorted(points, key=lambda p: p.time.estimate.value if p.time.estimate else 0.0, reverse=most_first)


def _listed(texts: Iterable[str]) -> str:
    return units.listed(texts, MAX_NAMED)


def _changes(config: Mapping[str, tuple[Value, Value]]) -> str:
    return " ".join(f"{key}=({units.value_of(a)}, {units.value_of(b)})" for key, (a, b) in config.items())


def _values(values: Sequence[str]) -> str:
    return _listed(values) if values else "unknown"
