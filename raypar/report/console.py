"""A study's analysis in a terminal: a table of points, what they say, and what to mind.

The table is laid out here, not by rich: it has to fit 80 columns without cutting a number, to read the same without
colour and in a pipe, and to do without box characters. Where it is too wide it says less, step by step (`_LAYOUTS`);
where even that won't fit, each point becomes a few lines of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeAlias

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import TRAIN_TIME
from raypar.analysis.stats import Estimate, Method
from raypar.report.profile import breakdown_section
from raypar.report.sentences import IndentedLine, effect_lines, goodput_lines, scaling_lines
from raypar.report.text import ascii_fallback, wrap
from raypar.study.trial import point_label

GAP = "  "
Encode: TypeAlias = Callable[[str], str]


@dataclass(frozen=True)
class _Column:
    """One column: the head's lines, and a cell for each point."""

    head: tuple[str, ...]
    cells: tuple[str, ...]
    is_number: bool = True

    @cached_property  # each row asks for it
    def width(self) -> int:
        return max(map(cell_len, (*self.head, *self.cells)))


@dataclass(frozen=True)
class _Layout:
    """How much a table says."""

    wrap_heads: bool = True
    bounds: bool = False  # intervals of time and metric as [low, high]
    plus_minus: bool = True  # else of time as ±%
    throughput: bool = True
    energy: bool = True
    efficiency: bool = True
    speedup_bounds: bool = True


# From all that is known to the least that is still an answer; the first that fits is taken.
_LAYOUTS = (
    _Layout(wrap_heads=False, bounds=True),
    _Layout(bounds=True),
    _Layout(wrap_heads=False),
    _Layout(),
    _Layout(throughput=False),
    _Layout(throughput=False, plus_minus=False),
    _Layout(throughput=False, plus_minus=False, energy=False),
    _Layout(throughput=False, plus_minus=False, energy=False, efficiency=False),
    _Layout(throughput=False, plus_minus=False, energy=False, efficiency=False, speedup_bounds=False),
)


class StudyReport:
    """The report as a rich renderable: fits itself to the console's width and encoding."""

    def __init__(self, analysis: StudyAnalysis) -> None:
        self.analysis = analysis
        # Here: fitting takes a second, and a console may ask for the lines more than once.
        self.scaling = scaling_lines(analysis.study_name, analysis.worker_groups)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from _lines(
            self.analysis, self.scaling, options.max_width, partial(ascii_fallback, encoding=options.encoding)
        )


def render(analysis: StudyAnalysis) -> StudyReport:
    """The report as something that ``Console.print`` takes."""
    return StudyReport(analysis)


def print_report(analysis: StudyAnalysis, console: Console) -> None:
    """Print the report."""
    console.print(render(analysis))


def _lines(analysis: StudyAnalysis, scaling: Sequence[IndentedLine], width: int, encode: Encode) -> Iterator[Text]:
    title = f"{analysis.study_name or 'study'}: {units.counted(len(analysis.points), 'point')}, "
    yield Text(encode(title + units.counted(analysis.num_trials, "trial")), style="bold")
    yield Text("")
    if analysis.points:
        yield from _table(analysis, width, encode)
        yield Text("")
        yield from _paragraph(encode(_legend(analysis)), width, style="dim")
        yield Text("")
    for verdict in analysis.verdicts:
        yield from _paragraph(encode(verdict), width)
    for section in (scaling, effect_lines(analysis), goodput_lines(analysis)):
        if section:
            yield Text("")
        for indent, line in section:
            yield from _paragraph(encode(line), width, indent=indent)
    yield from breakdown_section(analysis.profiles, width, encode)
    if analysis.warnings:
        yield Text("")
    for finding in analysis.warnings:
        yield from _paragraph(encode(f"Warning: {finding.detail}"), width)
        yield from _paragraph(encode(f"→ {finding.advice}"), width, indent=2)


def _paragraph(text: str, width: int, *, indent: int = 0, style: str = "") -> Iterator[Text]:
    """The text, wrapped; lines after the first are indented by two more."""
    for i, line in enumerate(wrap(text, max(20, width - indent - 2))):
        # Folded, where a path is longer than the line: rich would cut it.
        yield Text(" " * (indent + (2 if i else 0)) + line, style=style, overflow="fold")


def _table(analysis: StudyAnalysis, width: int, encode: Encode) -> Iterator[Text]:
    for layout in _LAYOUTS:
        columns = _columns(analysis, layout, encode)
        if sum(c.width for c in columns) + len(GAP) * (len(columns) - 1) <= width:
            yield from _rows(columns, len(analysis.points), encode("─"))
            return
    yield from _records(analysis, encode)


def _rows(columns: Sequence[_Column], num_points: int, dash: str) -> Iterator[Text]:
    height = max(len(c.head) for c in columns)
    heads = [("",) * (height - len(c.head)) + c.head for c in columns]  # heads stand on the line below
    for i in range(height):
        yield Text(_row([(c, head[i]) for c, head in zip(columns, heads, strict=True)]), style="bold")
    yield Text(GAP.join(dash * c.width for c in columns), style="dim")
    for i in range(num_points):
        yield Text(_row([(c, c.cells[i]) for c in columns]))


def _row(cells: Sequence[tuple[_Column, str]]) -> str:
    padded = []
    for column, cell in cells:
        space = " " * (column.width - cell_len(cell))
        padded.append(space + cell if column.is_number else cell + space)
    return GAP.join(padded).rstrip()


def _records(analysis: StudyAnalysis, encode: Encode) -> Iterator[Text]:
    """A few lines for each point: for consoles too narrow for any table."""
    columns = _columns(analysis, _Layout(wrap_heads=False, bounds=True), encode)
    for i, point in enumerate(analysis.points):
        if i:
            yield Text("")
        yield Text(encode(point_label(point.point)), style="bold", overflow="fold")
        for column in columns[max(1, len(analysis.space_keys)) :]:
            yield Text(f"  {column.head[0]}: {column.cells[i]}", overflow="fold")


def _columns(analysis: StudyAnalysis, layout: _Layout, encode: Encode) -> list[_Column]:
    points = analysis.points
    columns = [_key_column(key, points, layout) for key in analysis.space_keys]
    if not columns:
        columns.append(_Column(("point",), ("the only point",) * len(points), is_number=False))

    def add(head: str, show: Callable[[PointAnalysis], str], *, is_number: bool = False) -> None:
        columns.append(_Column(tuple(head.split("\n")), tuple(show(p) for p in points), is_number=is_number))

    add("time", lambda p: _time(p.time_s, layout))
    if analysis.baseline:
        add("speedup", lambda p: _speedup(p, layout))
    if layout.efficiency and any(p.efficiency for p in points):
        add("eff.", _efficiency, is_number=True)
    if any(p.metric for p in points):
        add(analysis.metric, lambda p: _metric(analysis.metric, p.metric, layout))
    if any(p.cost for p in points):
        add("cost", lambda p: units.number(p.cost.value if p.cost else None, 3), is_number=True)
    if layout.energy and any(p.energy_j for p in points):
        add("energy", lambda p: units.energy(p.energy_j.value if p.energy_j else None), is_number=True)
    if layout.throughput and any(p.throughput for p in points):
        head = "samples\n/s" if layout.wrap_heads else "samples/s"
        add(head, lambda p: units.compact(p.throughput.value if p.throughput else None), is_number=True)
    add("n", lambda p: _counts(p, analysis.num_repeats), is_number=True)
    # Encoded before it is measured: a stand-in may be wider.
    return [_Column(tuple(map(encode, c.head)), tuple(map(encode, c.cells)), c.is_number) for c in columns]


def _key_column(key: str, points: Sequence[PointAnalysis], layout: _Layout) -> _Column:
    values = [p.point.get(key) for p in points]
    head = tuple(key.split("_")) if layout.wrap_heads else (key,)
    if len(head) > 2:
        # On two lines, whose longer one is as short as can be.
        splits = [("_".join(head[:i]), "_".join(head[i:])) for i in range(1, len(head))]
        head = min(splits, key=lambda pair: max(map(len, pair)))
    head = (*(part + "_" for part in head[:-1]), head[-1])
    is_number = all(isinstance(v, (int, float)) for v in values)
    return _Column(head, tuple(map(units.value_of, values)), is_number=is_number)


def _time(time_s: Estimate | None, layout: _Layout) -> str:
    if time_s is None:
        return units.MISSING
    if layout.bounds:
        return units.seconds_interval(time_s.value, time_s.low, time_s.high)
    shown = units.seconds_interval(time_s.value)
    if layout.plus_minus:
        shown += " " + units.plus_minus(time_s.value, time_s.low, time_s.high)
    return shown.rstrip()


def _speedup(point: PointAnalysis, layout: _Layout) -> str:
    if point.is_baseline and point.speedup:
        return "baseline"
    if point.speedup is None:
        return units.MISSING
    if layout.speedup_bounds:
        return units.ratio_interval(point.speedup.value, point.speedup.low, point.speedup.high)
    return units.ratio(point.speedup.value)


def _efficiency(point: PointAnalysis) -> str:
    """Nothing for a baseline, whose efficiency is 100 % by definition."""
    return units.percent(point.efficiency.value) if point.efficiency and not point.is_baseline else units.MISSING


def _metric(name: str, metric: Estimate | None, layout: _Layout) -> str:
    if metric is None:
        return units.MISSING
    if layout.bounds:
        return units.score_interval(name, metric.value, metric.low, metric.high)
    return units.score(name, metric.value)


def _counts(point: PointAnalysis, num_repeats: int | None) -> str:
    """``3``, or ``2/3`` where trials failed, were stopped or are still to come."""
    wanted = max(num_repeats or 0, point.num_trials)
    return str(point.num_finished) if point.num_finished == wanted else f"{point.num_finished}/{wanted}"


def _legend(analysis: StudyAnalysis) -> str:
    """What the columns mean, and what the intervals rest on."""
    timed = "the training steps alone" if analysis.time_metric == TRAIN_TIME else "the whole trial"
    text = f"time: {timed}, median"
    estimates = [e for p in analysis.points for e in (p.time_s, p.speedup) if e]
    if any(e.low is not None and e.method is not Method.REFERENCE for e in estimates):
        levels = {e.level for p in analysis.points if (e := p.time_s) and e.level}
        methods = list(dict.fromkeys(e.method for e in estimates if e.method not in _UNSAID))
        level = units.percent(min(levels), 1).replace(".0 %", " %") if levels else "95 %"
        at_least = "at least " if len(levels) > 1 else ""
        text += f"; intervals: {at_least}{level}, {' or '.join(methods)}"
    if any(p.num_finished != max(analysis.num_repeats or 0, p.num_trials) for p in analysis.points):
        stopped = sum(p.num_stopped for p in analysis.points)
        text += "; n: finished of all" + (f" ({stopped} stopped early, not in the times)" if stopped else "")
    if any(p.cost for p in analysis.points):
        text += (
            f"; cost: nodes × hours of that time × {analysis.question.price_per_node_hour:g}, the price of a node-hour"
        )
    if analysis.energy_source:
        text += f"; energy: of {analysis.energy_source} in that time"
    return text + "."


_UNSAID = (Method.REFERENCE, Method.SINGLE)
