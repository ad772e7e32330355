"""Two studies side by side, in a terminal: a row for each point of both, verdicts, and other differences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from rich.console import Console

from raypar import units
from raypar.analysis.compare import Comparison, Difference, Gate, MatchedPoint
from raypar.analysis.stats import Estimate
from raypar.report.points import timed_part
from raypar.report.text import Column, print_line, print_paragraph, print_table, value_column
from raypar.study.space import Value
from raypar.study.trial import point_label

MAX_NAMED = 4  # points, or values, that a sentence names one by one
WIDE = 100  # columns from which a table has room for the metrics themselves
ROUNDING = 1e-12  # an interval of values that are all the same is no wider


def print_comparison(console: Console, comparison: Comparison, places: tuple[str, str] = ("", "")) -> None:
    """Print what two studies say about each other; `places`: where each is stored, if that is not the same."""
    for letter, name, place, role in zip("AB", comparison.names, places, (", the reference", ""), strict=True):
        at = f" ({place})" if place else ""
        # A name may hold a line's end.
        print_line(console, " ".join(f"{letter}: {name}{at}{role}".split()), "bold")
    console.print()
    if comparison.matched:
        print_table(console, list(_columns(comparison, is_wide=console.width >= WIDE)))
        console.print()
        print_paragraph(console, _legend(comparison))
        console.print()
    verdicts = [*_about_times(comparison), *_about_metric(comparison)]
    for line in verdicts if comparison.matched else ["No point is in both studies: there is nothing to compare."]:
        print_paragraph(console, line)
    others = (*_excluded_lines(comparison), *_difference_lines(comparison))
    if others:
        console.print()
    for line in others:
        print_paragraph(console, line)


def print_gate(console: Console, comparison: Comparison, allowed_share: float) -> None:
    """Print where B is slower than A by more than this share, and where that is open."""
    by_gate = comparison.gate(allowed_share)
    share = f"{100 * allowed_share:g} %"
    slower, unknown = by_gate[Gate.SLOWER], by_gate[Gate.UNKNOWN]
    total = units.counted(len(comparison.matched), "point")
    if slower:
        text = f"Slower than allowed: B takes over {share} longer at {len(slower)} of {total}: {_named(slower)}."
    elif not unknown:
        text = f"Within what is allowed: B takes at most {share} longer at all of {total}."
    else:
        text = f"Not shown to be slower: no interval of {total} lies wholly above {share} longer."
    console.print()
    print_paragraph(console, text)
    if unknown:
        unclear = f"The data can't tell whether B takes over {share} longer at {len(unknown)} of {total}"
        print_paragraph(console, f"{unclear}: {_named(unknown)}. More repeats narrow the intervals.")


def _excluded_lines(comparison: Comparison) -> Iterator[str]:
    """Yield the points and trials that are not compared, and why."""
    for name, sentence in zip("AB", comparison.excluded, strict=True):
        if sentence:
            yield f"{name}: {sentence}"
    for name, points in zip("AB", comparison.only, strict=True):
        if points:
            yield f"Only {name} has {units.counted(len(points), 'point')}: {_listed(map(point_label, points))}."
    if comparison.unlike:
        # Often one option differs everywhere: it is named once.
        reasons = dict.fromkeys(_changes(config) for _, config in comparison.unlike)
        count = units.counted(len(comparison.unlike), "point")
        yield f"Not compared, for they do different work (A's, B's): {count}, {_listed(reasons)}."


def _difference_lines(comparison: Comparison) -> Iterator[str]:
    """Yield other differences of the studies, which may be behind a difference of their times."""
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


def _legend(comparison: Comparison) -> str:
    """Return the meaning of the columns and the scope of the intervals."""
    text = f"time: {timed_part(comparison.time_metric)}, median; B/A: how many times as long B takes for the same work"
    text += "; n: finished trials of A, of B."
    if any(p.ratio and p.ratio.low is not None for p in comparison.matched):
        text += " Intervals: 95 %, the two as independent samples: they hold the scatter within each study, not what"
        text += " a machine, a load or a day adds to all trials of one."
    return text


def _columns(comparison: Comparison, *, is_wide: bool) -> Iterator[Column]:
    points, metric = comparison.matched, comparison.metric
    for key in comparison.keys:
        column = value_column(key, [p.point.get(key, units.MISSING) for p in points])
        yield replace(column, head=key.replace("_", "_\n"), is_prose=True)
    if not comparison.keys:
        yield Column("point", ["the only point"] * len(points))
    for i, name in enumerate("AB"):
        shown = [p.outcomes[i] or units.seconds_interval(p.times_s[i], bounds=False) for p in points]
        yield Column(f"{name}\ntime", shown, True)
    yield Column("B/A\ntime", [units.ratio_interval(p.ratio) for p in points], True)
    for i, name in enumerate("AB"):
        scores = [p.metrics[i] for p in points]
        if is_wide and any(scores):
            yield Column(f"{name}\n{metric}", [units.score(metric, m.value if m else None) for m in scores], True)
    if any(p.metric_change for p in points):
        unit = ", points" if units.is_share(metric) else ""
        yield Column(f"B-A\n{metric}{unit}", [_change(metric, p.metric_change) for p in points], True)
    yield Column("n", ["/".join(map(str, p.num_finished)) for p in points], True)


def _about_times(comparison: Comparison) -> Iterator[str]:
    total = units.counted(len(comparison.matched), "point")
    for difference, word, pick in ((Difference.SLOWER, "slower", max), (Difference.FASTER, "faster", min)):
        if points := [p for p in comparison.matched if p.difference is difference]:
            most = pick(points, key=lambda p: p.ratio.value if p.ratio else 0.0)
            shown = f"{point_label(most.point)}, {units.ratio_interval(most.ratio)} the time of A"
            yield f"B is {word} at {len(points)} of {total}; most at {shown}."
    undecided = (
        (Difference.TIED, "Tied, for the interval of B/A holds 1"),
        (Difference.NO_INTERVAL, "No interval, for one study has one trial there"),
        (Difference.NO_TIME, "No time, for one study has no finished trial there"),
    )
    for difference, text in undecided:
        if points := [p for p in comparison.matched if p.difference is difference]:
            yield f"{text}: {len(points)} of {total}."


def _about_metric(comparison: Comparison) -> Iterator[str]:
    changes = [(p, p.metric_change) for p in comparison.matched if p.metric_change is not None]
    if not changes:
        yield f"No point has {comparison.metric} in both studies."
        return
    of, total = f"{comparison.metric}: ", units.counted(len(changes), "point")
    differing = [(p, c) for p, c in changes if c.excludes(0.0)]
    if differing:
        most, change = max(differing, key=lambda entry: abs(entry[1].value))
        unit = " percentage points" if units.is_share(comparison.metric) else ""
        shown = f"{point_label(most.point)}, {_change(comparison.metric, change)}{unit}"
        yield f"{of}B differs from A at {len(differing)} of {total}; most at {shown}."
    elif all(c.low is not None and c.high is not None and c.high - c.low < ROUNDING for _, c in changes):
        yield f"{of}the same at all of {total}."
    elif all(c.low is None for _, c in changes):
        yield f"{of}by one trial each, so that no difference can be told."
    else:
        yield f"{of}no difference can be told at any of {total}."


def _change(metric: str, change: Estimate | None) -> str:
    """``-0.50 [-0.90, -0.10]``: of an accuracy in percentage points."""
    if change is None:
        return units.MISSING

    def show(value: float) -> str:
        return f"{100 * value:+.2f}" if units.is_share(metric) else f"{value:+.4g}"

    brackets = "" if change.low is None or change.high is None else f" [{show(change.low)}, {show(change.high)}]"
    return show(change.value) + brackets


def _named(points: Sequence[MatchedPoint]) -> str:
    """The points with their ratios, the largest first."""
    ordered = sorted(points, key=lambda p: -(p.ratio.value if p.ratio else 0.0))
    return _listed(
        f"{point_label(p.point)} ({units.ratio_interval(p.ratio) if p.ratio else 'no time'})" for p in ordered
    )


def _listed(texts: Iterable[str]) -> str:
    return units.listed(texts, MAX_NAMED)


def _changes(config: Mapping[str, tuple[Value, Value]]) -> str:
    return " ".join(f"{key}=({units.value_of(a)}, {units.value_of(b)})" for key, (a, b) in config.items())


def _values(values: Sequence[str]) -> str:
    return _listed(values) if values else "unknown"
