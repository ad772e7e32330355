"""Verdict on two revisions of the code, in words, for a terminal, a pull request or a document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from raypar import units
from raypar.analysis.ab import RevisionComparison, RevisionPoint
from raypar.analysis.comparison import Gate, Outcome
from raypar.analysis.pairwise import MAX_REPEATS
from raypar.analysis.stats import Estimate
from raypar.markdown import harmless
from raypar.reporting.compare import GateView, change_text
from raypar.reporting.documents import Document
from raypar.reporting.export import answer_markdown
from raypar.reporting.text import Column, as_utf8, print_line, print_paragraph, value_column
from raypar.reporting.view import StudyView
from raypar.study.trial import point_label

if TYPE_CHECKING:
    from rich.console import Console

MARKER = "<!-- raypar ab -->"  # identifies the comment on a pull request for later updates
MAX_NAMED = 4
# Outcomes in the summary of several points.
CHANGES = {
    Outcome.SLOWER: "slower",
    Outcome.FASTER: "faster",
    Outcome.EQUIVALENT: "equivalent",
    Outcome.INCONCLUSIVE: "inconclusive",
    Outcome.UNCONFIRMED: "inconclusive",
    Outcome.MISSING: "untimed",
}


@dataclass(frozen=True)
class AbView(Document):
    """Comparison of two revisions of the code.

    Attributes:
        study: name in the store, for ``raypar report``.
        allowed_share: how much slower B may be, with ``--fail-if-slower``; None: without.
        num_failed: trials that failed.
    """

    kind = "ab"
    shown = (
        "study a b answer margin=comparison.margin metric=comparison.question.metric "
        "time_metric=comparison.time_metric num_failed exit_code gate points=comparison.points"
    )
    comparison: RevisionComparison
    study: str
    allowed_share: float | None
    exit_code: int
    num_failed: int = 0

    @property
    def a(self) -> str:
        """Label of the reference."""
        return self.comparison.labels[0]

    @property
    def b(self) -> str:
        """Label of the revision that is compared with it."""
        return self.comparison.labels[1]

    @cached_property
    def lines(self) -> list[str]:
        """Verdict at each point and on the metric; the first line is a summary."""
        return [*verdict_lines(self.comparison), *metric_lines(self.comparison)]

    @property
    def answer(self) -> str:
        """Verdict in sentences."""
        return " ".join(self.lines)

    @cached_property
    def gate(self) -> GateView | None:
        """Result of ``--fail-if-slower``; None without it."""
        if (share := self.allowed_share) is None:
            return None
        gates = [point.gate(share) for point in self.comparison.points]
        return GateView(share, self.comparison.gate(share), self.exit_code, gates)

    @property
    def gate_lines(self) -> list[str]:
        """Result of ``--fail-if-slower`` in a sentence; empty without it."""
        if self.gate is None:
            return []
        counts = [f"{gate.value} at {num}" for gate in Gate if (num := self.gate.points.count(gate))]
        detail = f" ({', '.join(counts)})" if len(self.gate.points) > 1 else ""
        allowed = _limit(self.gate.allowed_share)
        return [f"--fail-if-slower {allowed}: {self.gate.result.value}{detail}, exit code {self.exit_code}."]


def print_verdict(console: Console, view: AbView) -> None:
    """Print the verdict at each point and on the metric, and whether B is slower than allowed."""
    first, *more = view.lines
    print_line(console, first, "bold")
    for line in (*more, *view.gate_lines):
        print_paragraph(console, line)
    console.print()


def verdict_lines(comparison: RevisionComparison) -> list[str]:
    """Return a summary, and a line for each point if there are several."""
    points = comparison.points
    if len(points) == 1:
        lines = [f"{_verdict(comparison, points[0])}."]
    else:
        lines = [_summary(comparison)]
        lines += [f"{point_label(point.point)}: {_verdict(comparison, point)}." for point in points]
    if any(point.num_disturbed for point in points):
        lines.append(_load_line(points))
    return lines


def _load_line(points: Sequence[RevisionPoint]) -> str:
    """Return how many pairs were disturbed by other load, and whether they count."""
    num_disturbed = sum(point.num_disturbed for point in points)
    num_blocks = sum(max(point.num_blocks, point.num_disturbed) for point in points)
    num_pairs = sum(point.num_pairs for point in points)
    met = f"Other load disturbed {num_disturbed} of {units.counted(num_blocks, 'pair')}"
    if num_pairs == num_blocks:
        return f"{met}: this widens the intervals."
    return f"{met}; the comparison uses {units.counted(num_pairs, 'pair')} of undisturbed trials."


def _summary(comparison: RevisionComparison) -> str:
    total = units.counted(len(comparison.points), "point")
    changes = [CHANGES[point.time.outcome] for point in comparison.points]
    counts = [f"{change} at {num}" for change in dict.fromkeys(CHANGES.values()) if (num := changes.count(change))]
    return f"{comparison.labels[1]} against {comparison.labels[0]}, {total}: {', '.join(counts)}."


def _verdict(comparison: RevisionComparison, point: RevisionPoint) -> str:
    """Return ``HEAD@1a2b3c4 is 4.1 % slower than main@5d6e7f8 (95 % CI 2.9-5.2 %, 12 pairs)``, or another outcome."""
    a, b = comparison.labels
    ratio = point.time.estimate
    match outcome := point.time.outcome:
        case Outcome.SLOWER | Outcome.FASTER if ratio is not None:
            low, high = sorted(100 * abs(bound - 1) for bound in (ratio.low or 1.0, ratio.high or 1.0))
            interval = f"95 % CI {low:.1f}-{high:.1f} %, {units.counted(ratio.num_samples, 'pair')}"
            by = abs(ratio.value - 1)
            return f"{b} is {units.percent(by, 1 if by < 0.1 else 0)} {outcome} than {a} ({interval})"
        case Outcome.EQUIVALENT if ratio is not None:
            return f"no difference above {_limit(comparison.margin)} between {a} and {b} ({_interval(ratio)})"
        case Outcome.INCONCLUSIVE | Outcome.UNCONFIRMED if ratio is not None:
            more = "more" if ratio.value >= 1 else "less"
            change = f"{b} takes {100 * abs(ratio.value - 1):.1f} % {more} time than {a} ({_interval(ratio)})"
            return f"inconclusive{_more(point.num_more)}; {change}"
    states = [f"{label} {state}" for label, state in zip(comparison.labels, point.outcomes, strict=True) if state]
    return f"no times to compare: {', '.join(states) or 'no trial has ended'}"


def _more(num_blocks: int | None) -> str:
    """Return how many more blocks an inconclusive point needs, or what to do if that is too many."""
    if num_blocks is None:
        return ""
    if num_blocks > MAX_REPEATS:
        return f", and more than {MAX_REPEATS} more blocks would be needed: make trials longer, or raise --margin"
    return f": about {units.counted(num_blocks, 'more block')}"


def _interval(ratio: Estimate) -> str:
    """Return ``95 % CI +2.9 to +5.2 %, 12 pairs``, the interval of the change in time."""
    if ratio.low is None or ratio.high is None:
        return "1 pair, no interval"
    pairs = units.counted(ratio.num_samples, "pair")
    if units.is_noise(ratio):
        return f"too noisy for an interval, {pairs}"
    low, high = (100 * (bound - 1) for bound in (ratio.low, ratio.high))
    return f"95 % CI {low:+.1f} to {high:+.1f} %, {pairs}"


def _limit(share: float) -> str:
    return f"{100 * share:.4g} %"


def metric_lines(comparison: RevisionComparison) -> Iterator[str]:
    """Yield sentences on whether both revisions reach the same metric."""
    name, total = comparison.question.metric, len(comparison.points)
    outcomes = [point.metric.outcome for point in comparison.points]
    if outcomes.count(Outcome.EQUAL) == total:
        losses = "losses and " if all(point.has_equal_losses for point in comparison.points) else ""
        yield f"Equal in all pairs, to the last digit: {losses}{name}."
        return
    different = [point for point in comparison.points if point.metric.differs]
    for point in different[:MAX_NAMED]:
        change = point.metric.estimate
        assert change is not None
        where = f" at {point_label(point.point)}" if total > 1 else ""
        bounds = "" if change.low is None or change.high is None else f" ({change.low:+.4g} to {change.high:+.4g})"
        yield f"{name}: {comparison.labels[1]} trains differently{where}: {change.value:+.4g}{bounds}."
    if num := outcomes.count(Outcome.INCONCLUSIVE) + outcomes.count(Outcome.UNCONFIRMED):
        at = f" at {num} of {units.counted(total, 'point')}" if total > 1 else ""
        yield f"{name}: not equal in all pairs, no significant difference{at}."
    if num := outcomes.count(Outcome.MISSING):
        yield f"{name}: not reported by both at {num} of {units.counted(total, 'point')}."


def ab_columns(comparison: RevisionComparison) -> Iterator[Column]:
    """Yield the columns of a table with a row for each point."""
    points, metric = comparison.points, comparison.question.judged_by
    keys = list(dict.fromkeys(key for point in points for key in point.point))
    yield from (value_column(key, [point.point.get(key) for point in points]) for key in keys)
    if not keys:
        yield Column("point", ["the only point"] * len(points))
    ratios = [point.time.estimate for point in points]
    yield Column("B/A time", list(map(units.ratio_interval, ratios)), True, [e.value if e else None for e in ratios])
    yield Column("B is", [CHANGES[point.time.outcome] for point in points])
    changes = [point.metric.estimate for point in points]
    if any(changes):
        unit = ", points" if metric.per_cent else ""
        shown = [
            str(point.metric.outcome) if point.metric.outcome is Outcome.EQUAL else change_text(metric, change)
            for point, change in zip(points, changes, strict=True)
        ]
        yield Column(f"B-A {metric.name}{unit}", shown, True, [e.value if e else None for e in changes])
    yield Column("pairs", [str(point.num_pairs) for point in points], True)


def ab_markdown(view: AbView, report: StudyView, command: str) -> str:
    """Return the verdict, in the first line, and the table for a pull request."""
    first, *more = map(harmless, view.lines)
    parts = [
        f"### {_icon(view)} {first}",
        "\n".join(f"- {line}" for line in (*more, *view.gate_lines)),
        "<details><summary>All points</summary>",
        answer_markdown(report),
        harmless(report.legend),
        f"`{harmless(command)}`",
        "</details>",
        MARKER,
    ]
    return as_utf8("\n\n".join(filter(None, parts))) + "\n"


def _icon(view: AbView) -> str:
    if view.gate is not None:
        return {Gate.PASSED: "✅", Gate.FAILED: "❌", Gate.INCONCLUSIVE: "❔"}[view.gate.result]
    points = view.comparison.points
    if any(point.time.outcome in (Outcome.SLOWER, Outcome.MISSING) for point in points):
        return "❌"
    return "✅" if all(point.time.is_settled for point in points) else "❔"
