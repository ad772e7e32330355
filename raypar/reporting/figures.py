"""The figures of a study. Each is a function with the decorator `figure`; Vega-Lite draws it.

Values are drawn as medians with their intervals, above a dot for each trial. Captions consist of sentences from the
study's verdict and statements. A figure that the study has no data for is omitted, with the reason.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.comparison import Comparison, Outcome
from raypar.analysis.laws import USL, Fit
from raypar.analysis.pairwise import trial_speedup
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import TRAIN_TIME, PointSamples, point_key
from raypar.analysis.recommend import Candidate, Decision, pareto_front
from raypar.analysis.scaling import ScalingPoint, WorkerGroup
from raypar.analysis.stats import Estimate
from raypar.analysis.verdict import best_lines, fastest_lines
from raypar.errors import RayparError
from raypar.plugins import registered
from raypar.reporting import vega
from raypar.reporting.profile import NAMES
from raypar.reporting.recommend import recommended_lines
from raypar.reporting.sentences import comparison_columns, reservation
from raypar.reporting.vega import Figure, OmittedFigure, Row, Spec, bounds, layer, layers, nominal, quantity
from raypar.study.profile import PARTS
from raypar.study.space import Value
from raypar.study.trial import TrialResult, TrialState, gain, is_timed_whole, latest, point_label

GROUP = "raypar.figures"  # group of entry points, each a `FigureMaker`
MANY_POINTS = 12
MakeFigure: TypeAlias = Callable[[StudyAnalysis, Sequence[TrialResult]], Figure | OmittedFigure]


@dataclass(frozen=True)
class FigureMaker:
    """Figure of a report, before it is drawn.

    Attributes:
        make: function that draws it from the analysis and the trials.
        place: position in a report; the built-in figures have 10 to 130.
        in_search: position among the figures that come first in a search; infinite: not among them.
        in_grid: the same, for a study with many points.
    """

    make: MakeFigure
    place: float
    in_search: float = math.inf
    in_grid: float = math.inf

    def __call__(self, analysis: StudyAnalysis, results: Sequence[TrialResult]) -> Figure | OmittedFigure:
        return self.make(analysis, results)


def figure(place: float, **first: float) -> Callable[[MakeFigure], FigureMaker]:
    """Turn a function into a figure for reports; see `FigureMaker`."""
    return lambda make: FigureMaker(make, place, **first)


def figures_of(analysis: StudyAnalysis, results: Sequence[TrialResult]) -> tuple[Figure | OmittedFigure, ...]:
    """Return every figure, or why it is omitted, starting with the most important for this study.

    Args:
        results: the trials, in any order.
    """
    is_search, is_grid = analysis.question.is_search, len(analysis.points) > MANY_POINTS

    def place(each: FigureMaker) -> tuple[float, float]:
        return each.in_search if is_search else each.in_grid if is_grid else math.inf, each.place

    return tuple(each(analysis, results) for each in sorted((*FIGURES, *INSTALLED.values()), key=place))


def write_figures(
    figures: Sequence[Figure | OmittedFigure], folder: Path, kinds: Sequence[str] = vega.KINDS
) -> list[Path]:
    """Draw each figure into separate files, ``speedup.svg``, ``speedup.png`` …, and return their paths.

    Raises:
        RayparError: the folder can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RayparError(f"{folder}: can't be written: {error.strerror}", hint="choose another folder") from None
    drawn = [figure for figure in figures if isinstance(figure, Figure)]
    paths = {folder / f"{figure.key}.{kind}": figure for figure in drawn for kind in kinds}
    for path, figure in paths.items():
        figure.save(path)
    return list(paths)


NUM_CURVE_POINTS = 40
MIN_COUNTS = 3  # worker counts for a curve
BESIDE = 1.015  # factor between neighbouring groups
RATIO_AXIS = {"format": "~g", "tickCount": 5}
IDEAL = "ideal"
NO_CURVE = f"no points that differ only in num_workers have finished trials at {MIN_COUNTS} worker counts or more"
MAX_BARS = 20
OUTCOME_STYLES = {Outcome.FASTER: ("#0072B2", "triangle-right"), Outcome.SLOWER: ("#D55E00", "triangle-left")}


@figure(10, in_grid=1)
def speedup(analysis: StudyAnalysis, _: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """Speedups over the baseline: as curves for three or more worker counts, otherwise one row per point."""
    groups, comparisons = _curves(analysis), analysis.verdict.comparisons
    if groups and (not comparisons or analysis.question.compared_keys() == ("num_workers",)):
        return _speedup_over_workers(analysis, groups)
    if comparisons:
        return _comparisons(analysis)
    return OmittedFigure("Speedup", "no point has a finished baseline to compare with")


def _comparisons(analysis: StudyAnalysis) -> Figure:
    """Speedup of each point over its baseline with its interval, and of each trial over the baseline in its block."""
    shown = [(c, c.point.speedup) for c in analysis.verdict.comparisons if c.point.speedup][:MAX_BARS]
    cells = zip(*(column.cells for column in comparison_columns(analysis.verdict)[:-2]), strict=True)
    names = [", ".join(filter(None, row)) for row in cells] or [shown[0][0].who]  # a single comparison has no columns
    rows = [
        {"point": name, **bounds(ratio), "shown": units.ratio_interval(ratio), "outcome": str(c.outcome)}
        for (c, ratio), name in zip(shown, names, strict=False)
    ]
    trials = [
        row for (c, _), name in zip(shown, names, strict=False) for row in _speedups(analysis, c.point, point=name)
    ]
    rows, scale = vega.within(rows, trials=trials, log=True)
    x = quantity("value", "speedup", log2=True, axis=RATIO_AXIS, scale=scale)
    y = nominal("point", sort=None)
    colour, shape = vega.styled(
        "outcome", {str(c.outcome): OUTCOME_STYLES.get(c.outcome, vega.PLAIN) for c, _ in shown}
    )
    spec = layers(
        rows,
        vega.reference_layer(x=x),
        *vega.interval_layers(rows, "x", x, y, color=colour),
        vega.trial_layer(trials, x, y, "speedup", beside="yOffset"),
        vega.median_layer(x, y, color=colour, shape=shape, tooltip=vega.tooltip(point="point", shown="speedup")),
        height=max(80, 30 * len(rows)),
    )
    title = f"Speedup over {point_label(analysis.question.baseline)}"
    return Figure("speedup", title, _speedup_caption(analysis), spec)


def _speedup_caption(analysis: StudyAnalysis) -> str:
    if analysis.verdict.doubt or analysis.question.is_search:
        return _doubt(analysis) or "One trial each, unconfirmed."
    return analysis.verdict.answer


def _doubt(analysis: StudyAnalysis) -> str:
    """Return the caption of a figure if its times can't be trusted; empty if they can."""
    return "Inconclusive: other processes used the cores." if analysis.verdict.doubt else ""


def _speedups(analysis: StudyAnalysis, of: PointSamples, base: PointSamples | None = None, **more: str) -> list[Row]:
    """Return a row for each trial with its speedup over `base`, or the point's baseline if None, in its block."""
    if base is None:
        key = point_key(analysis.question.baseline_of(of.point))
        base = next((p for p in analysis.points if point_key(p.point) == key), None)
    pairs = [(base.samples[r], s) for r, s in of.samples.items() if r in base.samples] if base else []
    ratios = [(pair[1].identity, trial_speedup(*pair)) for pair in pairs]
    labels = {r.spec.identity: r.spec.label for r in of.results}
    return [
        {**more, "trial": labels[identity], "value": ratio, "shown": units.ratio(ratio)}
        for identity, ratio in ratios
        if ratio is not None
    ]


def _speedup_over_workers(analysis: StudyAnalysis, groups: Mapping[str, WorkerGroup]) -> Figure:
    """Speedups over the number of workers with their intervals, the ideal line, and the laws fitted to them."""
    rows = list(_group_rows(groups, attrgetter("speedup"), units.ratio_interval))
    counts = [row["workers"] for row in rows]
    laws = list(_law_rows(groups, max(counts)))
    kinds = list(dict.fromkeys(row["kind"] for row in laws))
    trials = list(_group_trials(analysis, groups))
    rows, scale = vega.within(rows, trials=trials, log=True)
    x, y = vega.workers_axis(counts), quantity("value", "speedup", log2=True, axis=RATIO_AXIS, scale=scale)
    styles = {"domain": [IDEAL, *kinds], "range": ([2, 4], [1, 0], [8, 4])[: 1 + len(kinds)]}
    dashes, colour = nominal("kind", scale=styles, legend=vega.stroke_legend()), vega.series(list(groups))
    ideal = [
        {"series": str(base), "kind": IDEAL, "workers": n, "value": n / base}
        for base in sorted({group.baseline for group in groups.values()})
        for n in (min(counts), max(counts))
    ]
    one_each = {"field": "series", "type": "nominal"}
    mark = {"type": "line", "strokeWidth": 1.5, "color": vega.GREY, "clip": True}
    ideal_line = {"data": {"values": ideal}, **layer(mark, x=x, y=y, strokeDash=dashes, detail=one_each)}
    if laws:
        lines = {"data": {"values": laws}, **vega.line_layer(x, y, strokeDash=dashes, color=colour)}
    else:
        lines = vega.line_layer({**x, "field": "beside"}, y, color=colour)
    spec = _over_workers(rows, trials, x, y, "speedup", (ideal_line, lines))
    caption = _at_most_workers(groups, attrgetter("speedup"), units.ratio_interval)
    caption = _speedup_caption(analysis) if analysis.verdict.comparisons else caption
    return Figure("speedup", "Speedup over workers", caption, spec)


@figure(100)
def efficiency(analysis: StudyAnalysis, _: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """Parallel efficiencies over the number of workers with their intervals; 100 % is ideal."""
    title = "Parallel efficiency over workers"
    groups = _curves(analysis)
    if not groups:
        return OmittedFigure(title, NO_CURVE)
    rows = list(_group_rows(groups, attrgetter("efficiency"), units.percent_interval))
    shares = [
        (row, row["value"] * groups[row["series"]].baseline / row["workers"]) for row in _group_trials(analysis, groups)
    ]
    trials = [{**row, "value": share, "shown": units.percent(share)} for row, share in shares]
    rows, scale = vega.within(rows, trials=trials)
    x = vega.workers_axis([row["workers"] for row in rows])
    y = quantity("value", "efficiency", zero=True, axis={"format": ".0%"}, scale=scale)
    line = vega.line_layer({**x, "field": "beside"}, y, color=vega.series(list(groups)))
    spec = _over_workers(rows, trials, x, y, "efficiency", (vega.reference_layer(y=y), line))
    caption = _at_most_workers(groups, attrgetter("efficiency"), units.percent_interval)
    return Figure("efficiency", title, f"Efficiency: {caption}", spec)


def _curves(analysis: StudyAnalysis) -> dict[str, WorkerGroup]:
    """Return the groups to draw by their labels; a group without a label is ``measured``."""
    return _named([g for g in analysis.worker_groups if len(g.speedups) >= MIN_COUNTS][: vega.MAX_SERIES])


def _at_most_workers(
    groups: Mapping[str, WorkerGroup],
    value_of: Callable[[ScalingPoint], Estimate],
    show: Callable[[units.Interval], str],
) -> str:
    """Return the lowest and highest values of the groups, each at its largest worker count."""
    lasts = [(value_of(last), last.num_workers, group.label) for group in groups.values() for last in group.points[-1:]]
    ends = (pick(lasts, key=lambda last: last[0].value) for pick in (min, max))
    shown = (f"{show(e)} with {units.counted(n, 'worker')}{f' at {at}' * bool(at)}" for e, n, at in ends)
    return " to ".join(dict.fromkeys(shown)) + "."


def _over_workers(
    rows: Sequence[Row], trials: Sequence[Row], x: Spec, y: Spec, shown_as: str, below: Sequence[Spec]
) -> Spec:
    """Return the spec of values with their intervals and trials, on top of other layers."""
    names = list(dict.fromkeys(row["series"] for row in rows))
    # Side by side, so that intervals at the same number of workers don't hide each other.
    places = {name: i - (len(names) - 1) / 2 for i, name in enumerate(names)}
    drawn, dots = (
        [{**row, "beside": row["workers"] * BESIDE ** places[row["series"]]} for row in each] for each in (rows, trials)
    )
    beside, colour = {**x, "field": "beside"}, vega.series(names)
    return layers(
        drawn,
        *below,
        vega.trial_layer(dots, beside, y, shown_as, beside="xOffset", color=colour),
        *vega.interval_layers(drawn, "y", beside, y, color=colour, opacity=vega.PICKED),
        vega.point_layer(names, beside, y, series="point", workers="workers", shown=shown_as, repeats="repeats"),
    )


def _group_rows(
    groups: Mapping[str, WorkerGroup],
    value_of: Callable[[ScalingPoint], Estimate],
    show: Callable[[units.Interval], str],
) -> Iterator[Row]:
    for name, group in groups.items():
        for point in group.points:
            e, num_workers = value_of(point), point.num_workers
            yield {
                "series": name,
                "workers": num_workers,
                **bounds(e),
                "shown": "1 by definition" if num_workers == group.baseline else show(e),
                "repeats": e.num_samples,
            }


def _group_trials(analysis: StudyAnalysis, groups: Mapping[str, WorkerGroup]) -> Iterator[Row]:
    """Yield the speedup of each trial over the group's baseline in the same block."""
    points = {(point_key(p.rest), p.num_workers): p for p in analysis.points if "num_workers" in p.point}
    for name, group in groups.items():
        base = points[point_key(group.point), group.baseline]
        for workers in group.speedups:
            if workers != group.baseline:
                rows = _speedups(analysis, points[point_key(group.point), workers], base, series=name)
                yield from ({**row, "workers": workers} for row in rows)


def _named(groups: Sequence[WorkerGroup]) -> dict[str, WorkerGroup]:
    named: dict[str, WorkerGroup] = {}
    for group in groups:
        name = group.label or "measured"
        while name in named:  # values may differ only after their first four digits
            name += "′"
        named[name] = group
    return named


def _law_rows(named: Mapping[str, WorkerGroup], farthest: int) -> Iterator[Row]:
    """Yield the fitted laws as curves, from the fewest workers of a group to the most workers of all groups."""
    for name, group in named.items():
        # Gunther's law without a significant coherence is Amdahl's.
        fits = [law for law in group.analysis.laws if isinstance(law, Fit) and (law.law is not USL or law.is_bent)]
        for fit in fits:
            parameters = [parameter.value for parameter in fit.parameters]
            workers = np.geomspace(min(group.speedups), farthest, NUM_CURVE_POINTS)
            values = fit.law.speedup(workers / group.baseline, *parameters)
            for n, value in zip(workers, values, strict=True):
                if value > 0:
                    yield {"series": name, "kind": fit.law.name, "workers": float(n), "value": float(value)}


MAX_DRAWN_POINTS = 200
MIN_MEMORIES = 2
MAX_SHOWN = 3  # items that a caption lists
RECOMMENDED, LEADING = "recommended", "leading"
ON_FRONT, BEATEN, EXCLUDED, OTHER = "on the Pareto front", "beaten by another", "excluded", "other points"
KIND_STYLES = {
    **dict.fromkeys((RECOMMENDED, LEADING), ("#009E73", "diamond")),
    **dict.fromkeys((ON_FRONT, OTHER), ("#0072B2", "circle")),
    BEATEN: ("#E69F00", "square"),
    EXCLUDED: (vega.GREY, "triangle-up"),
}


@figure(30, in_search=3)
def pareto(analysis: StudyAnalysis, _: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """Time and metric of each point, marking the recommended one, the Pareto front and excluded points."""
    metric, advice = analysis.question.metric, analysis.verdict.recommendation
    judged_by = analysis.question.judged_by
    title = f"Time against {metric}"
    taken, word = _taken(analysis)
    rows: list[Row] = []
    trials: list[Row] = []
    for c in advice.candidates if advice else ():
        if c.time_s is None or c.metric is None or c.unusable:
            continue
        kind = word if c is taken else EXCLUDED if c.exclusion else ON_FRONT if c.is_on_front else BEATEN
        of_metric = {key: judged_by.within(value) for key, value in bounds(c.metric).items()}
        shown = {"time_shown": units.seconds_interval(c.time_s), "shown": judged_by.show_interval(c.metric)}
        rows.append({"point": point_label(c.point), **bounds(c.time_s, "time"), **of_metric, **shown, "series": kind})
        metrics = c.by_repeat("metric")
        trials += [
            {"trial": r.spec.label, "time": c.times[r.spec.repeat], "value": metrics[r.spec.repeat], "series": kind}
            | {"shown": judged_by.show(metrics[r.spec.repeat])}
            for r in c.measured
            if r.spec.repeat in c.times and r.spec.repeat in metrics and len(c.times) > 1
        ]
    if not rows:
        return OmittedFigure(title, f"no two points have a time and {metric}")
    rows, x_scale = vega.within(rows, "time", trials)
    rows, y_scale = vega.within(rows, "value", trials)
    names = [kind for kind in (word, ON_FRONT, BEATEN, EXCLUDED) if any(row["series"] == kind for row in rows)]
    front = [row for row in rows if row["series"] in (word, ON_FRONT)]
    edge = pareto_front([(row["time"], -gain(analysis.question.mode, row["value"])) for row in front])
    on_edge = sorted((front[i] for i in edge), key=lambda row: float(row["time"]))
    rows = [row for kind in names for row in vega.thinned([r for r in rows if r["series"] == kind], MAX_DRAWN_POINTS)]
    x = quantity("time", _time_title(analysis), scale=x_scale)
    y = quantity("value", metric, axis=vega.metric_axis(analysis.question.judged_by), scale=y_scale)
    front_line = {"type": "line", "interpolate": "step-after", "strokeDash": [4, 3], "color": vega.GREY}
    colour, shape = vega.styled("series", {name: KIND_STYLES[name] for name in names})
    tips = vega.tooltip(point="point", time_shown="time", shown="metric")
    spec = layers(
        rows,
        {"data": {"values": on_edge}, **layer(front_line, x=x, y=y)},
        vega.trial_layer(vega.thinned(trials, MAX_DRAWN_TRIALS), x, y, metric, color=colour),
        *vega.interval_layers(rows, "x", x, y, color=colour),
        *vega.interval_layers(rows, "y", x, y, color=colour),
        vega.median_layer(x, y, color=colour, shape=shape, tooltip=tips),
    )
    return Figure("pareto", title, _pareto_caption(analysis, rows), spec)


@figure(80)
def memory(analysis: StudyAnalysis, _: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """Step time of each point over the memory that a worker needs."""
    title = "Step time against peak memory"
    rows: list[Row] = [
        {
            "point": point_label(p.point),
            "memory": p.memory_bytes.value,
            "value": p.step_time_median_s,
            "memory_shown": units.size(p.memory_bytes.value),
            "shown": units.seconds(p.step_time_median_s),
            "series": str(p.point.get("strategy", "")),
        }
        for p in analysis.points
        if p.memory_bytes and p.step_time_median_s and not p.unusable
    ]
    too_large = [point_label(p.point) for p in analysis.points if p.outcome is TrialState.DOES_NOT_FIT]
    if len({row["memory"] for row in rows}) < MIN_MEMORIES:
        return OmittedFigure(title, "no two points have step times and differ in memory")
    x = quantity("memory", "peak memory of a worker (bytes)", axis={"format": ".2~s"})
    y = quantity("value", "step time (s)")
    names = sorted({row["series"] for row in rows})
    encoding: dict[str, Any] = {"tooltip": vega.tooltip(point="point", memory_shown="memory", shown="step time")}
    encoding["color"] = nominal("series", "strategy") if len(names) > 1 else {"value": vega.COLOURS[0]}
    spec = layers(vega.thinned(rows, MAX_DRAWN_POINTS), vega.median_layer(x, y, **encoding))
    least, most = (pick(rows, key=lambda row: float(row["memory"])) for pick in (min, max))
    caption = f"From {least['memory_shown']} ({least['point']}) to {most['memory_shown']} ({most['point']}) of memory"
    if too_large:
        does_not_fit = TrialState.DOES_NOT_FIT.said_of(len(too_large))
        caption += f". {units.listed(too_large, MAX_SHOWN)} {does_not_fit}"
    return Figure("memory", title, f"{caption}.", spec)


def _taken(analysis: StudyAnalysis) -> tuple[Candidate | None, str]:
    """Return the point that the verdict names, and whether it is called recommended or leading."""
    advice = analysis.verdict.recommendation
    if advice is None or analysis.question.is_search:
        return (advice.best if advice else None), LEADING
    is_open = advice.decision is Decision.UNCLEAR or analysis.verdict.doubt
    return advice.chosen, LEADING if is_open else RECOMMENDED


def _pareto_caption(analysis: StudyAnalysis, rows: Sequence[Row]) -> str:
    advice, metric = analysis.verdict.recommendation, analysis.question.metric
    assert advice is not None
    first = next(recommended_lines(analysis.verdict), "").removesuffix(".")
    if analysis.question.is_search:
        least, most = (units.seconds(pick(row["time"] for row in rows)) for pick in (min, max))
        first = f"Trainings took from {least} to {most}"
    if excluded := [c for c in advice.candidates if c.exclusion]:
        num_worse, for_metric = sum(c.is_excluded_for_metric for c in excluded), f" for their {metric}"
        share = f"{len(excluded)} of {len(advice.candidates)} points"
        first += f". Excluded{for_metric * (num_worse == len(excluded))}: {share}"
        first += f" ({num_worse}{for_metric})" * (0 < num_worse < len(excluded))
    return f"{first}."


MIN_TRIALS, MIN_TOP = 6, 3  # needed to show an effect
TOP_SHARE = 0.1  # share of the trials whose values the caption names
LOG_RANGE = 20  # ratio of the values from which the axis is logarithmic


@figure(50, in_search=1)
def main_effect(analysis: StudyAnalysis, _: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """The metric of a search's trials over the hyperparameter that matters most."""
    metric = analysis.question.metric
    name = f"{metric[:1].upper()}{metric[1:]} over"
    scored = [(p, p.metric.value) for p in analysis.points if p.metric is not None and not p.unusable]
    if not analysis.question.is_search or len(scored) < MIN_TRIALS:
        title = f"{name} the hyperparameter that matters most"
        return OmittedFigure(title, f"needs a search with at least {MIN_TRIALS} trials")
    shares = analysis.importances.shares if analysis.importances else {}
    values = {key: [p.point.get(key) for p, _ in scored] for key in (*shares, *analysis.question.space_keys)}
    key = next(iter(shares), max(values, key=lambda each: len(set(map(units.value_of, values[each])))))
    numbers = [value for value in values[key] if units.is_number(value)]
    is_number = len(numbers) == len(scored)
    is_log = is_number and min(numbers) > 0 and max(numbers) > LOG_RANGE * min(numbers)
    rows: list[Row] = [
        {"x": value if is_number else units.value_of(value), "value": score, "point": point_label(p.point)}
        | {"shown": analysis.question.judged_by.show(score)}
        for (p, score), value in zip(scored, values[key], strict=True)
    ]
    x = nominal("x", key, sort=None, axis={"labelAngle": 0})
    if is_number:
        x = quantity("x", key, scale={"type": "log"} if is_log else {})
    y = quantity("value", metric, axis=vega.metric_axis(analysis.question.judged_by))
    spec = layers(
        vega.thinned(rows, MAX_DRAWN_TRIALS),
        vega.median_layer(x, y, color={"value": vega.COLOURS[0]}, tooltip=vega.tooltip(point="point", shown=metric)),
    )
    top = rows[: max(MIN_TOP, round(TOP_SHARE * len(rows)))]  # the best points of a search come first
    seen = [row["x"] for row in top]
    where = f"{key}={units.listed(dict.fromkeys(map(str, seen)), MAX_SHOWN, word='or')}"
    if is_number:
        where = f"{key} from {units.value_of(min(seen))} to {units.value_of(max(seen))}"
    caption = f"The best {len(top)} of {len(rows)} trials have {where}."
    return Figure("main_effect", f"{name} {key}", caption, spec)


MAX_CELLS = 400
MAX_WRITTEN_COLUMNS = 8  # of a heat map; more texts don't fit side by side on a phone
MAX_AXIS_LETTERS = 40
INKS = ("#ffffff", "#000000")  # on dark cells, on light ones
MIN_FILLED = 0.5  # share of a heat map's cells; a search leaves nearly all of them empty


@figure(110, in_grid=2)
def heat_map(analysis: StudyAnalysis, _: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """The median time over two swept hyperparameters, for a study that sweeps two."""
    shows = (units.seconds, units.seconds_interval)
    return _heat_map(analysis, attrgetter("time_s"), shows, "heat_map", "Time", _time_title(analysis))


@figure(120, in_grid=3)
def metric_heat_map(analysis: StudyAnalysis, _: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """The median metric over two swept hyperparameters, for a study that sweeps two."""
    metric = analysis.question.judged_by
    title, shows = metric.name[:1].upper() + metric.name[1:], (metric.show, metric.show_interval)
    axis = vega.metric_axis(metric)
    return _heat_map(analysis, attrgetter("metric"), shows, "metric_heat_map", title, metric.name, axis)


def _heat_map(
    analysis: StudyAnalysis,
    of: Callable[[PointAnalysis], Estimate | None],
    shows: tuple[Callable[[float], str], Callable[[units.Interval], str]],
    key: str,
    what: str,
    legend: str,
    axis_of_values: vega.Spec | None = None,
) -> Figure | OmittedFigure:
    """Return the figure of points with a value; `shows`: formats of a value on a cell and in words."""
    keys, cells = analysis.question.space_keys, [(p.point, e) for p in analysis.points if (e := of(p)) is not None]
    blanks = [(p.point, p.outcome) for p in analysis.points if p.outcome is not None]
    points = [point for point, _ in (*cells, *blanks)]
    reason = f"needs two swept hyperparameters, and there are {len(keys)}"
    if len(keys) == 2:
        across, down = ([units.value_of(point.get(k)) for point in points] for k in keys)
        columns, lines = len(set(across)), len(set(down))
        fills = MIN_FILLED * columns * lines <= len(cells) <= columns * lines <= MAX_CELLS
        reason = "" if fills else f"the points don't fill a grid of at most {MAX_CELLS} cells"
        if min(columns, lines) < 2:
            reason = "needs at least two values of both hyperparameters with finished trials"
    if reason:
        return OmittedFigure(f"{what} as a heat map", reason)
    values = [e.value for _, e in cells]
    middle = (min(values) + max(values)) / 2
    one, interval = shows
    # Cividis goes from dark to light, so text on a cell needs a contrasting colour.
    rows: list[Row] = [
        {"across": x, "down": y, "value": e.value, "short": one(e.value), "shown": interval(e)}
        | {"ink": INKS[e.value > middle]}
        for (_, e), x, y in zip(cells, across, down, strict=False)
    ]
    rest = zip(blanks, across[len(cells) :], down[len(cells) :], strict=True)
    empty = [{"across": x, "down": y, "short": outcome, "shown": outcome} for (_, outcome), x, y in rest]
    is_broad = sum(map(len, set(across))) > MAX_AXIS_LETTERS
    axis = {"labelAngle": -45, "labelLimit": 120} if is_broad else {"labelAngle": 0}
    x = nominal("across", keys[0], sort=None, axis=axis)
    y = nominal("down", keys[1], sort=_ordered([point.get(keys[1]) for point in points]))
    gradient = {"orient": "top", "gradientLength": 200, **(axis_of_values or {})}
    colour = {**quantity("value", legend), "scale": {"scheme": "cividis"}, "legend": gradient}
    drawn = [layer("rect", x=x, y=y, color=colour, tooltip=vega.tooltip(across=keys[0], down=keys[1], shown=what))]
    if columns <= MAX_WRITTEN_COLUMNS:
        mark, ink = {"type": "text", "fontSize": 12 if columns <= 5 else 10}, {"field": "ink", "type": "nominal"}
        text = {"field": "short", "type": "nominal"}
        drawn.append(layer(mark, x=x, y=y, text=text, color={**ink, "scale": None}))
        if empty:
            drawn.append({"data": {"values": empty}, **layer({**mark, "color": vega.GREY}, x=x, y=y, text=text)})
    spec = layers(rows, *drawn, height=max(120, 40 * lines))
    spec["resolve"] = {"scale": {"color": "independent"}}
    title = f"{what} over both hyperparameters"
    lowest, highest = (pick(cells, key=lambda cell: cell[1].value) for pick in (min, max))
    ends = [f"{one(e.value)} at {point_label(point)}" for point, e in (lowest, highest)]
    caption = f"The medians range from {' to '.join(ends)}."
    if one(lowest[1].value) == one(highest[1].value):
        caption = f"The median is {one(lowest[1].value)} at every point."
    return Figure(key, title, caption, spec)


def _ordered(values: Sequence[object]) -> list[str]:
    """Return the distinct values of a hyperparameter as text: numbers ascending, others in order of appearance."""
    numbers = sorted(v for v in values if isinstance(v, (int, float)))
    return list(dict.fromkeys(map(units.value_of, numbers if len(numbers) == len(values) else values)))


def _time_title(analysis: StudyAnalysis) -> str:
    return "training time, s" if analysis.time_metric == TRAIN_TIME else "time of the whole trial, s"


MAX_GROUPS = 3
BATCH_PARTS = {"throughput": "samples/s", "progress": "progress per sample", "goodput": "speed towards the target"}


@figure(90)
def goodput(analysis: StudyAnalysis, _: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """Samples per second, progress per sample and their product over the batch size, relative to one batch size."""
    title = "Batch size: throughput and progress"
    target, groups = analysis.target, analysis.batches
    if target is None or not groups:
        return OmittedFigure(title, "no two points differ only in their batch size and have reached a common target")
    drawn = {point_label(group.rest) if group.rest else "all": group for group in groups[:MAX_GROUPS]}
    rows: list[Row] = []
    for label, group in drawn.items():
        for batch in group.batches:
            for key, name in BATCH_PARTS.items():
                e: Estimate = getattr(batch, key)
                shown = {**bounds(e), "shown": units.ratio_interval(e)}
                rows.append({"series": name, "group": label, "batch": batch.batch_size, **shown})
    first, names = groups[0], list(BATCH_PARTS.values())
    sizes = sorted({row["batch"] for row in rows})
    x = quantity("batch", first.key, log2=True, axis={"values": sizes, "format": "d", "grid": False})
    rows, scale = vega.within(rows, log=True)
    y = quantity("value", f"over {first.base}", log2=True, axis=RATIO_AXIS, scale=scale)
    styles = {"domain": list(drawn), "range": list(([1, 0], [6, 4], [2, 3])[: len(drawn)])}
    dash = nominal("group", scale=styles, legend=vega.stroke_legend() if len(drawn) > 1 else None)
    spec = layers(
        rows,
        vega.line_layer(x, y, color=vega.series(names), strokeDash=dash),
        *vega.interval_layers(rows, "y", x, y, color=vega.series(names), opacity=vega.PICKED),
        vega.point_layer(names, x, y, size=70, series="what", group="at", batch=first.key, shown="over the base"),
    )
    last = next(batch for batch in reversed(first.batches) if batch.batch_size != first.base)
    at = f" at {point_label(first.rest)}" if first.rest else ""
    caption = (
        f"{first.key}={last.batch_size}{at}: {units.ratio(last.throughput.value)} the samples/s × "
        f"{units.ratio(last.progress.value)} the progress per sample = {units.ratio_interval(last.goodput)} the speed "
        f"to {target.metric} {target.show(target.value)}"
    )
    return Figure("goodput", title, f"{caption}{reservation(Comparison(last.goodput))}.", spec)


OFF_AXIS = {"offset": 24}  # for a legend, to clear the title of the axis
# Okabe and Ito's colours for the parts of a step; two greys are for parts other than work and communication.
PART_COLOURS = ("#E69F00", "#F0E442", "#56B4E9", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#8a8f98", "#c3c7cd")
TRIAL_COLOURS = {
    "start-up": "#CC79A7",
    "loading data": "#E69F00",
    "warm-up": "#56B4E9",
    "training": "#0072B2",
    "evaluation": "#009E73",
    "reports": "#F0E442",
    "saving": "#D55E00",
    "profiling": "#8a8f98",
    "rest": "#c3c7cd",
}


@figure(20)
def times(analysis: StudyAnalysis, _: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """The median time of each point with its interval, and the time of each trial."""
    what = "training time" if analysis.time_metric == TRAIN_TIME else "time of the whole trial"
    title = f"{what.capitalize()} of each point"
    timed = [(p, p.time_s) for p in analysis.points if p.time_s is not None]
    if not timed:
        return OmittedFigure(title, "no trial finished with a time")
    drawn = _first_points(analysis, timed)
    blanks = [(p.point, p.outcome) for p in analysis.points if p.outcome is not None][: MAX_BARS - len(drawn)]
    y, names = vega.point_axis([*(p.point for p, _ in drawn), *(point for point, _ in blanks)])
    taken, word = _taken(analysis)
    rows: list[Row] = []
    trials: list[Row] = []
    for (p, time_s), name in zip(drawn, names, strict=False):
        kind = word if taken and point_key(p.point) == point_key(taken.point) else OTHER
        shown = {"shown": units.seconds_interval(time_s), "repeats": time_s.num_samples}
        rows.append({"point": name, **bounds(time_s), **shown, "kind": kind})
        labels = {r.spec.repeat: r.spec.label for r in p.measured}
        trials += [
            {"point": name, "trial": labels[repeat], "value": value, "shown": units.seconds(value)}
            for repeat, value in p.times.items()
            if len(p.times) > 1  # a single one is the median
        ]
    empty = [{"point": name, "shown": outcome} for (_, outcome), name in zip(blanks, names[len(drawn) :], strict=True)]
    text_layer = {"data": {"values": empty}} | layer(
        {"type": "text", "align": "left", "dx": 4, "color": vega.GREY},
        y=y,
        x={"datum": 0, "type": "quantitative"},
        text={"field": "shown", "type": "nominal"},
    )
    rows, scale = vega.within(rows, trials=trials)
    x, kinds = quantity("value", f"{what}, s", zero=True, scale=scale), [word, OTHER]
    kinds = [kind for kind in kinds if any(row["kind"] == kind for row in rows)]
    colour, shape = vega.styled("kind", {kind: KIND_STYLES[kind] for kind in kinds}, **OFF_AXIS)
    tips = vega.tooltip(point="point", shown=what, repeats="repeats")
    spec = layers(
        rows,
        *vega.interval_layers(rows, "x", x, y, color=colour),
        vega.trial_layer(trials, x, y, what, beside="yOffset"),
        vega.median_layer(x, y, color=colour, shape=shape, tooltip=tips),
        *([text_layer] if empty else []),
        height=max(80, 24 * len(names)),
    )
    caption = _doubt(analysis) or " ".join(fastest_lines(analysis.points, analysis.family))
    if analysis.question.is_search:
        caption = f"In the order of {analysis.question.metric}, the best first."
    caption = caption or f"Median of {point_label(drawn[0][0].point)}: {rows[0]['shown']}."
    more = f" {len(drawn)} of {len(timed)} points are drawn." if len(drawn) < len(timed) else ""
    return Figure("times", title, caption + more, spec)


@figure(60)
def breakdown(analysis: StudyAnalysis, _: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """Parts of a mean step, stacked, for each profiled point."""
    title = "Where a step's time goes"
    if not analysis.profiles:
        reason = "no point was profiled: `raypar study FILE --profile` profiles each point after the training"
        return OmittedFigure(title, reason)
    shown = analysis.profiles[:MAX_BARS]
    means = [(point, {NAMES[part]: profile.mean.parts[part] for part in PARTS}) for point, profile in shown]
    largest = max(NAMES.values(), key=lambda part: max(mean[part] / sum(mean.values()) for _, mean in means))
    colours = dict(zip((NAMES[part] for part in PARTS), PART_COLOURS, strict=True))
    return _parts_figure("breakdown", title, means, ("step", "ms", 1e3), largest, colours)


@figure(70)
def trial_parts(analysis: StudyAnalysis, results: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """Parts of a whole trial, stacked, for each point: the mean of its finished trials."""
    title = "Where a trial's time goes"
    by_point: dict[object, list[Mapping[str, float]]] = {}
    # In results of earlier versions, the time for profiling is unknown.
    for result in sorted(latest(results), key=_hides_profiling):
        key = point_key(result.spec.point)
        if (parts := _parts_of(result)) and not (_hides_profiling(result) and key in by_point):
            by_point.setdefault(key, []).append(parts)
    timed = [(p, p.time_s) for p in analysis.points if p.time_s is not None and point_key(p.point) in by_point]
    if not timed:
        return OmittedFigure(title, "raypar could not instrument any finished trial")
    means = []
    for point, _ in _first_points(analysis, timed):
        trials = by_point[point_key(point.point)]
        means.append((point.point, {part: statistics.fmean(each[part] for each in trials) for part in TRIAL_COLOURS}))
    return _parts_figure("trial_parts", title, means, ("trial", "s", 1.0), "training", TRIAL_COLOURS)


def _parts_figure(
    key: str,
    title: str,
    means: Sequence[tuple[Mapping[str, Value], Mapping[str, float]]],
    of: tuple[str, str, float],
    part: str,
    colours: Mapping[str, str],
) -> Figure:
    """Return the stacked parts of each point.

    Args:
        means: points, with their parts in seconds.
        of: name of the whole, unit of the axis, and number of these units in a second.
        part: part whose share is in the caption.
    """
    (whole, unit, factor), rows = of, list[Row]()
    y, names = vega.point_axis([point for point, _ in means])
    shares = {}
    for (point, mean), name in zip(means, names, strict=True):
        total_s = sum(mean.values())
        shares[point_label(point)] = mean[part] / total_s
        for i, (each, seconds) in enumerate(mean.items()):
            shown = f"{units.seconds(seconds)}, {units.percent(seconds / total_s)}"
            rows.append({"point": name, "part": each, "order": i, "value": factor * seconds, "shown": shown})
    ends = [pick(shares, key=lambda at: shares[at]) for pick in (max, min)]
    most, least = (units.percent(shares[at]) for at in ends)
    caption = f"{part[:1].upper()}{part[1:]} takes {most} of a {whole}"
    caption += f" at {ends[0]}, {least} at {ends[1]}." if most != least else "."
    seen = [each for each in colours if any(row["value"] > 0 for row in rows if row["part"] == each)]
    scale = {"domain": seen, "range": [colours[each] for each in seen]}
    bars = layer(
        {"type": "bar", "stroke": "white", "strokeWidth": 0.5},
        y=y,
        x={**quantity("value", f"{whole}, {unit}", zero=True), "stack": "zero"},
        color=nominal("part", scale=scale, legend={"orient": "top", "columns": vega.legend_columns(seen), **OFF_AXIS}),
        order={"field": "order", "type": "quantitative"},
        opacity=vega.PICKED,
        tooltip=vega.tooltip(point="point", part="part", shown="time"),
    )
    drawn, height = [row for row in rows if row["part"] in seen], max(80, 30 * len(means))
    return Figure(key, title, caption, layers(drawn, {"params": vega.pick("part"), **bars}, height=height))


def _parts_of(result: TrialResult) -> dict[str, float]:
    """Return the parts of a finished trial in seconds; empty if they are unknown."""
    if not result.is_measured or result.conditions.stalls_s or not result.wall_s or not is_timed_whole(result):
        return {}
    data, measured = result.data_time_s or 0.0, result.conditions
    parts = {
        "start-up": max(0.0, (result.startup_s or 0.0) - data),
        "loading data": data,
        "warm-up": result.warmup_s or 0.0,
        "training": result.train_time_s or 0.0,
        "evaluation": result.eval_time_s or 0.0,
        "reports": measured.largest("report_s") or 0.0,
        "saving": measured.largest("saving_s") or 0.0,
        "profiling": measured.largest("profile_s") or 0.0,
    }
    return {**parts, "rest": max(0.0, result.wall_s - sum(parts.values()))}


def _hides_profiling(result: TrialResult) -> bool:
    """Return whether the rest of a trial's time includes that of its profile."""
    is_separate = result.profile is not None and result.profile.overhead is not None
    return is_separate and result.conditions.largest("profile_s") is None


def _first_points(
    analysis: StudyAnalysis, timed: Sequence[tuple[PointAnalysis, Estimate]]
) -> Sequence[tuple[PointAnalysis, Estimate]]:
    """Return all points in order; if there are too many, the fastest or, in a search, the first, which are the best."""
    if len(timed) <= MAX_BARS or analysis.question.is_search:
        return timed[:MAX_BARS]
    return sorted(timed, key=lambda e: e[1].value)[:MAX_BARS]


MAX_REPORTS = 1200  # in all curves together
MAX_DRAWN_TRIALS = 500
BAND = {"condition": {"param": "picked", "value": 0.2}, "value": 0.03}  # opacity


@figure(40, in_search=2)
def learning(analysis: StudyAnalysis, results: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """The metric over the training time so far: for each point the median of its trials, and a band that spans them."""
    metric = analysis.question.metric
    title = f"Learning curves: {metric} over time"
    is_timed = any(TRAIN_TIME in report for r in results for report in r.reports)
    curves: dict[str, list[list[Row]]] = {}
    for r in latest(results):
        if len(curve := _curve(analysis, r, is_timed)) > 1:
            curves.setdefault(point_label(r.spec.point), []).append(curve)
    if not curves:
        return OmittedFigure(title, f"no trial reported {metric} more than once")
    title = title if is_timed else f"Learning curves: {metric} from report to report"
    labels = list(dict.fromkeys(label for p in analysis.points if (label := point_label(p.point)) in curves))
    mode = analysis.question.mode
    gains = {point_label(p.point): gain(mode, p.metric.value) for p in analysis.points if p.metric is not None}
    best = sorted(labels, key=lambda label: gains.get(label, -math.inf), reverse=True)[: vega.MAX_SERIES]
    labels = [label for label in labels if label in best]
    names, legend_title = dict(zip(labels, labels, strict=True)), None
    if max(map(len, labels)) > vega.MAX_SHORT_NAME:  # values as labels, and the keys as the legend's title
        points = {point_label(p.point): p.point for p in analysis.points}
        axis, short = vega.point_axis([points[label] for label in labels])
        names, legend_title = dict(zip(labels, short, strict=True)), axis["title"]
    lines = [
        [{**row, "series": names[label]} for row in _middle(analysis, curves[label], is_timed)] for label in labels
    ]
    rows = [row for line in lines for row in vega.thinned(line, MAX_REPORTS // len(lines))]
    ends = [line[-1] for line in lines]
    series, of_time = list(names.values()), "trained for" if is_timed else "report"
    x = quantity("time", "trained for, s" if is_timed else "report", zero=True)
    y = quantity("value", metric, axis=vega.metric_axis(analysis.question.judged_by))
    colour = vega.series(series, title=legend_title)
    marks = vega.point_layer(
        series, x, y, title=legend_title, series="point", time_shown=of_time, shown=metric, trials="trials"
    )
    span = {"y": {**y, "field": "value_low"}, "y2": {"field": "value_high"}}
    has_band = any(row["value_low"] < row["value_high"] for row in rows)
    spec = layers(
        rows,
        *([layer("area", x=x, **span, color=colour, opacity=BAND)] if has_band else []),
        layer({"type": "line", "strokeWidth": 1.5}, x=x, y=y, color=colour, opacity=vega.PICKED),
        {"data": {"values": ends}, **marks},
    )
    finals = [row["shown"] for row in sorted(ends, key=lambda row: float(row["value"]))]
    what = "trials" if all(len(trials) == 1 for trials in curves.values()) else "medians"
    some = f"{len(labels)} of {len(curves)} {what}"
    who = f"The {what}" if len(labels) == len(curves) else f"The best {some}"
    ends_at = f"{who} end at {' to '.join(dict.fromkeys((finals[0], finals[-1])))}."
    best_metric = () if analysis.question.is_search else best_lines(analysis.question, analysis.points, analysis.family)
    about = ["A line is the median of a point's trials, and its band spans them."] if has_band else []
    return Figure("learning", title, " ".join([*(best_metric or [ends_at]), *about]), spec)


@figure(130)
def drift(analysis: StudyAnalysis, results: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """Time of each trial relative to its point's median, by start time, to reveal changes of the machine."""
    title = "Drift over the study"
    repeated = [(p, p.time_s) for p in analysis.points if len(p.samples) > 1]
    medians = {point_key(p.point): time_s.value for p, time_s in repeated if time_s is not None}
    seen = []
    for r in latest(results):
        time_s = r.train_time_s if analysis.time_metric == TRAIN_TIME else r.wall_s
        median_s = medians.get(point_key(r.spec.point))
        if r.is_measured and r.started_at > 0 and median_s and time_s and units.is_number(time_s):
            seen.append((r.started_at, r.spec.label, time_s, time_s / median_s))
    if len(seen) < 3:
        return OmittedFigure(title, "fewer than three finished trials belong to points with repeats")
    seen.sort()
    rows: list[Row] = [
        {"minutes": (at - seen[0][0]) / 60, "trial": label, "value": of_median}
        | {"shown": f"{units.seconds(time_s)}, {units.ratio(of_median)}"}
        for at, label, time_s, of_median in seen
    ]
    x, y = quantity("minutes", "started, minutes into the study"), quantity("value", "time over the point's median")
    dot = {"type": "point", "filled": True, "size": 50, "color": "#0072B2", "opacity": 1}
    dots = layer(dot, x=x, y=y, tooltip=vega.tooltip(trial="trial", shown="time"))
    spec = layers(vega.thinned(rows, MAX_DRAWN_TRIALS), vega.reference_layer(y=y), dots)
    half = len(seen) // 2
    early, late = (statistics.median(r for *_, r in part) for part in (seen[:half], seen[-half:]))
    caption = (
        f"Median of the trials' times over their points' medians: {units.ratio(early)} in the first half, "
        f"{units.ratio(late)} in the second."
    )
    return Figure("drift", title, caption, spec)


def _middle(analysis: StudyAnalysis, curves: Sequence[Sequence[Row]], is_timed: bool) -> Iterator[Row]:
    """Yield the median time and metric of a point's trials at each report that most of them have, and the extremes."""
    for nth in sorted({row["nth"] for curve in curves for row in curve}):
        of_trials = [row for curve in curves for row in curve if row["nth"] == nth]
        if 2 * len(of_trials) > len(curves):
            time_s, value = (statistics.median(row[key] for row in of_trials) for key in ("time", "value"))
            low, high = (pick(row["value"] for row in of_trials) for pick in (min, max))
            yield {
                **Row(time=time_s, value=value, value_low=low, value_high=high, trials=len(of_trials)),
                "time_shown": units.seconds(time_s) if is_timed else str(int(time_s)),
                "shown": analysis.question.judged_by.show(value),
            }


def _curve(analysis: StudyAnalysis, result: TrialResult, is_timed: bool) -> list[Row]:
    """Return the metric at each report over the training time so far, or over the reports; empty if data is missing."""
    so_far, rows = 0.0, []
    if not result.is_complete:
        return []
    for nth, report in enumerate(result.reports):
        time_s, value = report.get(TRAIN_TIME) if is_timed else 1.0, report.get(analysis.question.metric)
        if time_s is None or not units.is_number(time_s):
            return []
        so_far += time_s
        if value is not None and units.is_number(value):
            rows.append({"nth": nth, "time": so_far, "value": value})
    return rows


INSTALLED = registered(GROUP, FigureMaker, {})
FIGURES = tuple(each for each in list(globals().values()) if isinstance(each, FigureMaker))
