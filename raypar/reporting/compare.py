"""Two studies side by side, in a terminal: a row for each point of both, verdicts, and other differences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rich.console import Console

from raypar import units
from raypar.analysis.compare import MatchedPoint, StudyComparison
from raypar.analysis.comparison import Gate, Outcome
from raypar.analysis.stats import Estimate
from raypar.reporting.documents import Document
from raypar.reporting.points import timed_part
from raypar.reporting.sentences import distrust
from raypar.reporting.text import Column, print_line, print_paragraph, print_table, value_column
from raypar.study.metric import NUMBER, PERCENT, SHARE, Metric
from raypar.study.space import Value
from raypar.study.trial import point_label

MAX_NAMED = 4  # points or values that a sentence lists
METRIC_UNITS = {SHARE: "a share of 1", PERCENT: "in per cent", NUMBER: "a plain number"}
WIDE = 100  # console width from which a table shows both metrics
LIMITATION = (
    "Two separate runs can also differ by the day (load, temperature, other users of the machine): this offset shifts "
    "every ratio above, and no interval covers it."
)
ROUNDING = 1e-12  # largest width of the interval of equal values


@dataclass(frozen=True)
class GateView:
    """Result of ``--fail-if-slower``.

    Attributes:
        allowed_share: how much slower B may be.
        points: results at the points, in their order.
    """

    allowed_share: float
    result: Gate
    exit_code: int
    points: Sequence[Gate | None]


@dataclass(frozen=True)
class CompareView(Document):
    """Comparison of study B with study A, the reference. In each pair, A's value comes first.

    Attributes:
        stores: MLflow store of each.
        exit_code: None without ``--fail-if-slower``.
    """

    kind = "compare"
    shown = (
        "studies=comparison.names stores doubts=comparison.doubts is_origin_known=comparison.is_known "
        "is_uncommitted=comparison.uncommitted only=comparison.only excluded=comparison.excluded answer limitation "
        "notes metric=comparison.metric metric_unit=comparison.judged_by.unit time_metric=comparison.time_metric gate "
        "points=comparison.matched missing=comparison.missing unlike=comparison.unlike origins=comparison.origins"
    )
    comparison: StudyComparison
    stores: tuple[str, str] = ("", "")
    exit_code: int | None = None

    @cached_property
    def doubts(self) -> list[str]:
        """A sentence for each study whose times can't be trusted, with the reason."""
        doubts = zip("AB", self.comparison.doubts, strict=True)
        return [distrust(doubt, f"Times of {side}") for side, doubt in doubts if doubt]

    @cached_property
    def claims(self) -> list[str]:
        """Claims in sentences. With ``--fail-if-slower``, those on times are in `gate_lines`."""
        comparison = self.comparison
        if not comparison.matched:
            return ["No point is in both studies: there is nothing to compare."]
        times = _about_differences(comparison) if comparison.allowed_share is None else ()
        return [*times, *_about_lost_times(comparison), *_about_metric(comparison)]

    @cached_property
    def gate_lines(self) -> list[str]:
        """Result of ``--fail-if-slower``: where B is slower than allowed, where that is inconclusive, the exit code."""
        return [] if self.exit_code is None else list(_gate_lines(self.comparison, self.exit_code))

    @property
    def answer(self) -> str:
        """All claims in sentences."""
        return " ".join([*self.doubts, *self.claims, *self.gate_lines])

    @property
    def limitation(self) -> str:
        """Differences that no interval covers."""
        return LIMITATION

    @cached_property
    def notes(self) -> list[str]:
        """Sentences on what is not compared, and on other differences."""
        return [*_excluded_lines(self.comparison), *_difference_lines(self.comparison)]

    @property
    def gate(self) -> GateView | None:
        """Result of ``--fail-if-slower``; None without it."""
        if self.exit_code is None or self.comparison.gate is None:
            return None
        gates = [point.gate for point in self.comparison.matched]
        return GateView(self.comparison.allowed_share or 0.0, self.comparison.gate, self.exit_code, gates)


def print_comparison(console: Console, view: CompareView) -> None:
    """Print a table of the points of two studies, the claims on them, other differences, and the gate's result."""
    comparison, places = view.comparison, view.stores if len(set(view.stores)) > 1 else ("", "")
    for letter, name, place, role in zip("AB", comparison.names, places, (", the reference", ""), strict=True):
        at = f" ({place})" if place else ""
        # A name may contain a line break.
        print_line(console, " ".join(f"{letter}: {name}{at}{role}".split()), "bold")
    table = list(compare_columns(comparison, is_wide=console.width >= WIDE)) if comparison.matched else []
    if table:
        console.print()
        print_table(console, table)
    legend = [legend_of(comparison), view.limitation] if table else []
    for lines in filter(None, (legend, view.doubts, view.claims, view.notes, view.gate_lines)):
        console.print()
        for line in lines:
            print_paragraph(console, line)


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
    """Return why the result at a point is inconclusive: ``1.05× [1.02, 1.08]``."""
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
        yield f"Not compared, because they do different work (A's, B's): {count}, {_listed(reasons)}."


def _difference_lines(comparison: StudyComparison) -> Iterator[str]:
    """Yield other differences between the studies, which may explain a difference in their times."""
    means = dict.fromkeys(_changes(p.execution_changes) for p in comparison.matched if p.execution_changes)
    if means:
        yield f"They were run differently (A, B): {_listed(means)}."
    if comparison.origins:
        differences = [f"{key} {_values(a)} → {_values(b)}" for key, (a, b) in comparison.origins.items()]
        yield f"Their origins differ (A → B): {'; '.join(differences)}."
    elif all(comparison.is_known):
        yield "Their known origins do not differ (versions, machine, commit)."
    for name, is_known in zip("AB", comparison.is_known, strict=True):
        if not is_known:
            yield f"The store of {name} lacks its origin (versions, machine, commit)."
    for name, uncommitted in zip("AB", comparison.uncommitted, strict=True):
        if uncommitted:
            yield f"{name} ran code with uncommitted changes."


def legend_of(comparison: StudyComparison) -> str:
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


def compare_columns(comparison: StudyComparison, *, is_wide: bool) -> Iterator[Column]:
    """Yield the columns of a table with a row for each point of both studies. `is_wide`: with both metrics."""
    points, metric = comparison.matched, comparison.judged_by
    for key in comparison.keys:
        column = value_column(key, [p.point.get(key, units.MISSING) for p in points])
        yield replace(column, head=key.replace("_", "_\n"), is_prose=True)
    if not comparison.keys:
        yield Column("point", ["the only point"] * len(points))
    for i, name in enumerate("AB"):
        shown = [p.outcomes[i] or units.seconds_interval(p.times_s[i], bounds=False) for p in points]
        yield Column(f"{name}\ntime", shown, True, [_sort_key(p.times_s[i]) for p in points])
    yield Column("B/A\ntime", list(map(_ratio, points)), True, [_sort_key(p.time.estimate) for p in points])
    for i, name in enumerate("AB"):
        scores = [p.metrics[i] for p in points]
        if is_wide and any(scores):
            shown = [metric.show(m.value if m else None) for m in scores]
            yield Column(f"{name}\n{metric.name}", shown, True, list(map(_sort_key, scores)))
    if any(p.metric.estimate for p in points):
        unit = ", points" if metric.per_cent else ""
        changes = [p.metric.estimate for p in points]
        shown = [change_text(metric, change) for change in changes]
        yield Column(f"B-A\n{metric.name}{unit}", shown, True, list(map(_sort_key, changes)))
    yield Column("n", ["/".join(map(str, p.num_finished)) for p in points], True)


def _sort_key(estimate: Estimate | None) -> float | None:
    return estimate.value if estimate else None


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
        shown = f"{point_label(most.point)}, {change_text(comparison.judged_by, change)}{unit}"
        yield f"{of}B differs from A at {len(differing)} of {total}; most at {shown}."
    elif all(c.low is not None and c.high is not None and c.high - c.low < ROUNDING for _, c in changes):
        yield f"{of}equal in A and B ({total})."
    elif all(p.metric.outcome is Outcome.UNCONFIRMED for p, _ in changes):
        yield f"{of}inconclusive, too few trials for an interval."
    else:
        yield f"{of}no significant difference ({total})."


def _not_compared(comparison: StudyComparison) -> str:
    unit_a, unit_b = (METRIC_UNITS.get(unit, "") for unit in comparison.metric_units)
    if unit_a and unit_b and unit_a != unit_b:
        return f"{comparison.metric} is not compared: it is {unit_a} in A, and {unit_b} in B."
    return f"No point has {comparison.metric} in both studies."


def change_text(metric: Metric, change: Estimate | None) -> str:
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
