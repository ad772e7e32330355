"""The tables of an HTML report: the points and the trials, as markup.

The page's script sorts by a cell's ``data-sort``, or else by its text: numbers stand in the trials' table without their
units, which are in the heads. End tags that HTML does without are left out: a report of thousands of trials is still to
be sent around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from markupsafe import Markup, escape

from raypar import units
from raypar.analysis.analyse import StudyAnalysis, pair_speedups
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import TRAIN_TIME
from raypar.analysis.stats import Estimate, Method
from raypar.report.figures_vega import is_number
from raypar.report.plain import harmless
from raypar.study.trial import TrialResult, TrialState, point_label

MAX_TABLE_BYTES = 650_000
MAX_POINTS = 500
MAX_FAILURE_LENGTH, MAX_FAILURE_BYTES = 300, 100_000  # of one message, of all
MIN_FAILURE_LENGTH = 40


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        cells: their texts, one for each row.
        sort: what rows are sorted by; empty: the texts.
        is_wide: may be broken over several lines.
    """

    head: str
    cells: Sequence[str]
    is_number: bool = False
    sort: Sequence[float | None] = ()
    is_wide: bool = False


@dataclass(frozen=True)
class Table:
    """A table as markup, and what is to be said below it.

    Attributes:
        style: rules for its columns.
        is_long: more rows than fit on a screen.
    """

    markup: Markup
    style: Markup
    notes: tuple[str, ...] = ()
    is_long: bool = False


def points_table(analysis: StudyAnalysis) -> Table | None:
    """A row for each point, in the order of their values; None where there is no point."""
    points = analysis.points[:MAX_POINTS]
    if not points:
        return None
    columns = [_values(key, [p.point.get(key) for p in points]) for key in analysis.space_keys]
    columns = columns or [Column("point", [point_label(p.point) for p in points])]

    def add(head: str, of: Callable[[PointAnalysis], Estimate | None], show: Callable[..., str]) -> None:
        found = [of(p) for p in points]
        if any(found):
            columns.append(
                Column(
                    head,
                    [show(e.value, e.low, e.high) if e else units.MISSING for e in found],
                    True,
                    [e.value if e else None for e in found],
                )
            )

    add("time", lambda p: p.time_s, units.seconds_interval)
    if analysis.baseline:
        ratios = [p.speedup for p in points]
        shown = [units.ratio_interval(s.value, s.low, s.high) if s else units.MISSING for s in ratios]
        bases = [p.is_baseline and p.speedup is not None for p in points]
        texts = ["baseline" if is_base else text for text, is_base in zip(shown, bases, strict=True)]
        columns.append(Column("speedup", texts, True, [s.value if s else None for s in ratios]))
        add("efficiency", lambda p: None if p.is_baseline else p.efficiency, units.percent_interval)
    add(analysis.metric, lambda p: p.metric, lambda *e: units.score_interval(analysis.metric, *e))
    add("samples/s", lambda p: p.throughput, _rate)
    if analysis.energy_source:
        add("energy", lambda p: p.energy_j, units.energy_interval)
    wanted = [max(analysis.num_repeats or 0, p.num_trials) for p in points]
    counts = [(p.num_finished, n) for p, n in zip(points, wanted, strict=True)]
    texts = [str(n) if finished == n else f"{finished} of {n}" for finished, n in counts]
    columns.append(Column("n", texts, True, [p.num_finished for p in points]))
    markup, style, num_rows = _markup("all-points", columns)
    more = len(analysis.points) - num_rows
    notes = (_legend(analysis), *([f"{units.counted(more, 'more point')} left out."] if more else []))
    return Table(markup, style, notes, num_rows > 15)


def trials_table(analysis: StudyAnalysis, trials: Sequence[TrialResult], *, max_bytes: int | None = None) -> Table:
    """A row for each trial, in the order given. What is the same for all is told below it, not in each row."""
    keys = list(dict.fromkeys([*analysis.space_keys, *(k for r in trials for k in r.spec.point)]))
    columns = [Column("#", [str(i) for i in range(1, len(trials) + 1)], True)]
    columns += [_values(key, [r.spec.point.get(key) for r in trials]) for key in keys]
    columns += [
        Column("repeat", [str(r.spec.repeat + 1) for r in trials], True),
        Column("seed", [str(r.spec.seed) for r in trials], True),
        Column("state", [r.state.value for r in trials]),
        Column("attempts", [str(r.attempts) for r in trials], True),
        _numbers("trained, s", [r.train_time_s for r in trials]),
        _numbers("in all, s", [r.wall_s for r in trials]),
        _numbers("samples/s", [r.throughput_samples_per_s for r in trials]),
    ]
    speedups = pair_speedups(analysis.question, trials)
    columns.append(_numbers("speedup", [speedups.get(r.spec.identity) for r in trials]))
    factor, head = (100, f"{analysis.metric}, %") if units.is_share(analysis.metric) else (1, analysis.metric)
    finals = [r.final.get(analysis.metric) for r in trials]
    columns.append(_numbers(head, [factor * value if is_number(value) else None for value in finals]))
    started, moments = _started(trials)
    columns += [
        Column(started, moments),
        Column("node", [", ".join(by_rank(r, "node")) or units.MISSING for r in trials]),
        Column("failure", _failures(trials), is_wide=True),
    ]
    droppable = {"state", "attempts", "node", "trained, s", "samples/s", "speedup", "failure"}
    same = {c.head: c.cells[0] for c in columns if c.head in droppable and len(set(c.cells)) == 1}
    markup, style, num_rows = _markup("all-trials", [c for c in columns if c.head not in same], max_bytes)
    told = [f"{head} {text}" for head, text in same.items() if text not in ("", units.MISSING)]
    notes = [f"The same for all: {', '.join(told)}."] if told else []
    if more := len(trials) - num_rows:
        notes.append(f"{units.counted(more, 'later trial')} left out: `raypar show` and `raypar export` have all.")
    return Table(markup, style, tuple(notes), num_rows > 15)


def by_rank(result: TrialResult, key: str) -> list[str]:
    """The distinct values of the ranks in a trial's environment, as text."""
    value = result.environment.get(key)
    listed = value if isinstance(value, (list, tuple)) else [value]
    return list(dict.fromkeys(str(each) for each in listed if each not in (None, "")))


def _rate(value: float, low: float | None, high: float | None) -> str:
    """Without the unit, which stands in the head."""
    return units.rate_interval(value, low, high, "").replace("  ", " ").strip()


def _values(key: str, values: Sequence[object]) -> Column:
    return Column(key, [units.value_of(v) for v in values], all(map(is_number, values)))


def _numbers(head: str, values: Sequence[float | None]) -> Column:
    return Column(head, [units.number(v) if is_number(v) else units.MISSING for v in values], True)


def _started(trials: Sequence[TrialResult]) -> tuple[str, list[str]]:
    """The column's head and its cells; the day stands in the head where it is the same for all."""
    moments = [datetime.fromtimestamp(r.started_at) if r.started_at > 0 else None for r in trials]
    days = {f"{at:%Y-%m-%d}" for at in moments if at}
    head, form = (f"started {days.pop()}", "%H:%M:%S") if len(days) == 1 else ("started", "%Y-%m-%d %H:%M:%S")
    return head, [at.strftime(form) if at else units.MISSING for at in moments]


def _failures(trials: Sequence[TrialResult]) -> list[str]:
    messages = [r.failure.message if r.failure and r.state is TrialState.FAILED else "" for r in trials]
    num = max(1, sum(map(bool, messages)))
    longest = max(MIN_FAILURE_LENGTH, min(MAX_FAILURE_LENGTH, MAX_FAILURE_BYTES // num))
    return [text if len(text) <= longest else text[: longest - 1] + "…" for text in messages]


def _markup(name: str, columns: Sequence[Column], max_bytes: int | None = None) -> tuple[Markup, Markup, int]:
    """The table, rules for its columns, and how many of its rows it has: as many as fit into `MAX_TABLE_BYTES`, and
    into `max_bytes`."""
    rules = [_rule(name, [i for i, c in enumerate(columns, 1) if c.is_number], "text-align:right")]
    rules.append(_rule(name, [i for i, c in enumerate(columns, 1) if c.is_wide], "white-space:normal;min-width:12rem"))
    heads = "".join(f'<th scope="col">{escape(harmless(c.head))}</th>' for c in columns)
    rows: list[str] = []
    left = min(MAX_TABLE_BYTES, MAX_TABLE_BYTES if max_bytes is None else max_bytes)
    for i in range(len(columns[0].cells)):
        row = "<tr>" + "".join(map(_cell, _row(columns, i)))
        left -= len(row.encode("utf-8", "replace")) + 1
        if left < 0:
            break
        rows.append(row)
    body = "\n".join(rows)
    text = f'<table id="{name}" data-sortable><thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody></table>'
    return Markup(text), Markup("".join(rules)), len(rows)  # every text of a study is escaped above


def _row(columns: Sequence[Column], i: int) -> Iterable[tuple[str, float | None]]:
    for column in columns:
        yield column.cells[i], column.sort[i] if column.sort else None


def _cell(content: tuple[str, float | None]) -> str:
    text, sort = content
    shown = escape(harmless(text))
    return f"<td>{shown}" if not is_number(sort) else f'<td data-sort="{sort:.6g}">{shown}'


def _rule(name: str, columns: Sequence[int], style: str) -> str:
    picked = ",".join(f":nth-child({i})" for i in columns)
    return f"#{name} :is(td,th):is({picked}){{{style}}}" if columns else ""


def _legend(analysis: StudyAnalysis) -> str:
    timed = "of the training steps alone" if analysis.time_metric == TRAIN_TIME else "of the whole trial"
    methods = [e.method for p in analysis.points for e in (p.time_s, p.speedup) if e and e.low is not None]
    told = "; ".join(dict.fromkeys(str(method) for method in methods if method is not Method.REFERENCE))
    energy = f" Energy: of {analysis.energy_source} in that time." if analysis.energy_source else ""
    return (
        f"Medians; times are {timed}; n: finished trials. "
        + (f"In brackets 95 % intervals: {told}." if told else "No intervals.")
        + energy
    )


def same_for_all(trials: Sequence[TrialResult]) -> Mapping[str, str]:
    """The hyperparameters that all trials share, as text."""
    found = {}
    for key in dict.fromkeys(k for r in trials for k in r.spec.config):
        given = {units.value_of(r.spec.config.get(key)) for r in trials}
        if len(given) == 1:
            found[key] = given.pop()
    return found
