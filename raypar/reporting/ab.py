"""Verdict on two revisions of the code, in words, for a terminal, a pull request or a document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from raypar import units
from raypar.analysis.ab import RevisionComparison, RevisionPoint
from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.comparison import Gate, Outcome
from raypar.analysis.pairwise import MAX_REPEATS
from raypar.analysis.stats import Estimate
from raypar.reporting.documents import CHANGES, METRIC_CHANGES
from raypar.reporting.export import answer_markdown
from raypar.reporting.points import legend
from raypar.reporting.text import as_utf8, print_line, print_paragraph
from raypar.study.trial import point_label

if TYPE_CHECKING:
    from rich.console import Console

    from raypar.reporting.documents import AbDocument, GateEntry

MARKER = "<!-- raypar ab -->"  # identifies the comment on a pull request for later updates
MAX_NAMED = 4


def print_verdict(
    console: Console, comparison: RevisionComparison, allowed_share: float | None, exit_code: int
) -> None:
    """Print the verdict at each point and on the metric, and whether B is slower than allowed."""
    first, *more = verdict_lines(comparison)
    print_line(console, first, "bold")
    for line in (*more, *metric_lines(comparison), *gate_lines(comparison, allowed_share, exit_code)):
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
    met = f"Other load met {num_disturbed} of {units.counted(num_blocks, 'pair')}"
    if num_pairs == num_blocks:
        return f"{met}: the intervals are the wider for it."
    return f"{met}; compared are {num_pairs} of trials that it did not meet."


def _summary(comparison: RevisionComparison) -> str:
    total = units.counted(len(comparison.points), "point")
    changes = [CHANGES[point.time.outcome] for point in comparison.points]
    counts = [f"{change} at {num}" for change in dict.fromkeys(CHANGES.values()) if (num := changes.count(change))]
    return f"{comparison.labels[1]} against {comparison.labels[0]}, {total}: {', '.join(counts)}."


def _verdict(comparison: RevisionComparison, point: RevisionPoint) -> str:
    """Return ``HEAD@1a2b3c4 is 4.1 % slower (95 % CI 2.9-5.2)``, or that this is inconclusive or refuted."""
    a, b = comparison.labels
    ratio = point.time.estimate
    match outcome := point.time.outcome:
        case Outcome.SLOWER | Outcome.FASTER if ratio is not None:
            low, high = sorted(100 * abs(bound - 1) for bound in (ratio.low or 1.0, ratio.high or 1.0))
            interval = f"95 % CI {low:.1f}-{high:.1f} %, {units.counted(ratio.num_samples, 'pair')}"
            return f"{b} is {_share(abs(ratio.value - 1))} {outcome} than {a} ({interval})"
        case Outcome.EQUIVALENT if ratio is not None:
            return f"no difference above {_share(comparison.margin)} between {a} and {b} ({_interval(ratio)})"
        case Outcome.INCONCLUSIVE | Outcome.UNCONFIRMED if ratio is not None:
            change = f"{b} takes {100 * (ratio.value - 1):+.1f} % against {a} ({_interval(ratio)})"
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
    """Return ``95 % CI +2.9 to +5.2 %``, the interval of the change in time."""
    if ratio.low is None or ratio.high is None:
        return "1 pair, no interval"
    low, high = (100 * (bound - 1) for bound in (ratio.low, ratio.high))
    return f"95 % CI {low:+.1f} to {high:+.1f} %, {units.counted(ratio.num_samples, 'pair')}"


def _share(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.1 and 100 * share % 1 else f"{100 * share:.0f} %"


def metric_lines(comparison: RevisionComparison) -> Iterator[str]:
    """Yield whether both reach the same metric."""
    name, total = comparison.question.metric, len(comparison.points)
    of = {
        change: [p for p in comparison.points if METRIC_CHANGES[p.metric.outcome] == change]
        for change in METRIC_CHANGES.values()
    }
    if len(of["equal"]) == total:
        losses = "losses and " if all(point.has_equal_losses for point in comparison.points) else ""
        yield f"Equal in all pairs, to the last digit: {losses}{name}."
        return
    for point in of["different"][:MAX_NAMED]:
        change = point.metric.estimate
        assert change is not None
        where = f" at {point_label(point.point)}" if total > 1 else ""
        bounds = "" if change.low is None or change.high is None else f" ({change.low:+.4g} to {change.high:+.4g})"
        yield f"{name}: {comparison.labels[1]} trains differently{where}: {change.value:+.4g}{bounds}."
    if num := len(of["inconclusive"]):
        at = f" at {num} of {units.counted(total, 'point')}" if total > 1 else ""
        yield f"{name}: not equal in all pairs, no significant difference{at}."
    if num := len(of["unknown"]):
        yield f"{name}: not reported by both at {num} of {units.counted(total, 'point')}."


def gate_lines(comparison: RevisionComparison, allowed_share: float | None, exit_code: int) -> Iterator[str]:
    """Yield the result of ``--fail-if-slower``, if it was given."""
    if allowed_share is None:
        return
    named = {gate: [p for p in comparison.points if p.gate(allowed_share) is gate] for gate in Gate}
    counts = [f"{gate.value} at {len(points)}" for gate, points in named.items() if points]
    detail = f" ({', '.join(counts)})" if len(comparison.points) > 1 else ""
    result = comparison.gate(allowed_share).value
    yield f"--fail-if-slower {_share(allowed_share)}: {result}{detail}, exit code {exit_code}."


def ab_markdown(
    comparison: RevisionComparison, analysis: StudyAnalysis, command: str, allowed_share: float | None, exit_code: int
) -> str:
    """Return the verdict and the table for a pull request."""
    first, *more = verdict_lines(comparison)
    lines = [*more, *metric_lines(comparison), *gate_lines(comparison, allowed_share, exit_code)]
    parts = [
        MARKER,
        f"### {_icon(comparison, allowed_share)} {first}",
        "\n".join(f"- {line}" for line in lines),
        "<details><summary>All points</summary>",
        answer_markdown(analysis),
        legend(analysis) if analysis.points else "",
        f"`{command}`",
        "</details>",
    ]
    return as_utf8("\n\n".join(filter(None, parts))) + "\n"


def _icon(comparison: RevisionComparison, allowed_share: float | None) -> str:
    if allowed_share is not None:
        return {Gate.PASSED: "✅", Gate.FAILED: "❌", Gate.INCONCLUSIVE: "❔"}[comparison.gate(allowed_share)]
    if any(point.time.outcome in (Outcome.SLOWER, Outcome.MISSING) for point in comparison.points):
        return "❌"
    return "✅" if all(point.time.is_settled for point in comparison.points) else "❔"


def ab_document(
    comparison: RevisionComparison, study: str, allowed_share: float | None, exit_code: int, num_failed: int
) -> AbDocument:
    """Return the content of `print_verdict` as a document."""
    gate: GateEntry | None = None
    if allowed_share is not None:
        result = comparison.gate(allowed_share)
        gate = {"allowed_share": allowed_share, "result": result, "exit_code": exit_code}
    a, b = comparison.labels
    return {
        "schema": 1,
        "kind": "ab",
        "study": study,
        "a": a,
        "b": b,
        "answer": " ".join([*verdict_lines(comparison), *metric_lines(comparison)]),
        "margin": comparison.margin,
        "metric": comparison.question.metric,
        "time_metric": comparison.time_metric,
        "num_failed": num_failed,
        "exit_code": exit_code,
        "gate": gate,
        "points": [
            {
                "point": p.point,
                "change": CHANGES[p.time.outcome],
                "ratio": p.time.estimate,
                "num_pairs": p.num_pairs,
                "num_disturbed_pairs": p.num_disturbed,
                "num_more_blocks": p.num_more,
                "metric_result": METRIC_CHANGES[p.metric.outcome],
                "metric_change": p.metric.estimate,
                "has_equal_losses": p.has_equal_losses,
            }
            for p in comparison.points
        ],
    }
