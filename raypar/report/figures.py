"""The figures of a study. Each is a function in `FIGURES`, and has a title and a text alternative; Vega-Lite draws it.

A figure that the study has no data for is omitted, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.candidates import front_of, pareto_front
from raypar.analysis.laws import Fit
from raypar.analysis.question import TRAIN_TIME
from raypar.analysis.scaling import WorkerGroup
from raypar.analysis.stats import Estimate
from raypar.errors import RayparError
from raypar.report import vega
from raypar.report.figures_trials import breakdown, drift, learning, times, trial_parts
from raypar.report.vega import MAX_SERIES, Figure, OmittedFigure, Row, Spec, bounds, layer, layers, nominal, quantity
from raypar.study.space import Value
from raypar.study.trial import TrialResult, gain, point_label

MakeFigure: TypeAlias = Callable[[StudyAnalysis, Sequence[TrialResult]], Figure | OmittedFigure]


def figures_of(analysis: StudyAnalysis, results: Sequence[TrialResult]) -> tuple[Figure | OmittedFigure, ...]:
    """Return every figure, or why it is omitted, in the order of a report; `results`: the trials in any order."""
    return tuple(figure(analysis, results) for figure in FIGURES)


def write_figures(
    figures: Sequence[Figure | OmittedFigure], folder: Path, kinds: Sequence[str] = vega.KINDS
) -> list[Path]:
    """Draw each figure into files of its own, ``speedup.svg``, ``speedup.png`` …, and return their paths.

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
BESIDE = 1.015  # from group to group
NO_INTERVALS = 2  # resamples: the curves of the laws are drawn without
IDEAL = "ideal"
NO_GROUPS = "no two points with finished trials differ only in num_workers"


def speedup(analysis: StudyAnalysis, _: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """Speedups over the number of workers with their intervals, the ideal line, and the laws fitted to them."""
    title = "Speedup over workers"
    groups = _named(analysis.worker_groups[:MAX_SERIES])
    if not groups:
        return OmittedFigure(title, NO_GROUPS)
    rows = list(_group_rows(groups, lambda group: group.speedups, units.ratio_interval))
    counts = [row["workers"] for row in rows]
    laws = list(_law_rows(groups, max(counts)))
    kinds = list(dict.fromkeys(row["kind"] for row in laws))
    x, y = vega.workers_axis(counts), quantity("value", "speedup", log2=True, axis={"format": "~g"})
    styles = {"domain": [IDEAL, *kinds], "range": ([2, 4], [1, 0], [8, 4])[: 1 + len(kinds)]}
    dashes, colour = nominal("kind", scale=styles, legend=vega.stroke_legend()), vega.series(list(groups))
    ideal = [
        {"series": str(base), "kind": IDEAL, "workers": n, "value": n / base}
        for base in sorted({group.baseline for group in groups.values()})
        for n in (min(counts), max(counts))
    ]
    one_each = {"field": "series", "type": "nominal"}
    mark = {"type": "line", "strokeWidth": 1.5, "color": vega.GREY}
    ideal_line = {"data": {"values": ideal}, **layer(mark, x=x, y=y, strokeDash=dashes, detail=one_each)}
    if laws:
        lines = {"data": {"values": laws}, **vega.line_layer(x, y, strokeDash=dashes, color=colour)}
    else:
        lines = vega.line_layer({**x, "field": "beside"}, y, color=colour)
    drawn_laws = f"the fitted laws ({', '.join(kinds)})" if kinds else "no law: too few worker counts to fit one"
    text = f"Speedup against the number of workers, both on logarithmic scales, with the ideal line and {drawn_laws}."
    spec, words = _over_workers(analysis, list(groups), rows, x, y, "speedup", (ideal_line, lines), log=True)
    return Figure("speedup", title, text + words, spec)


def efficiency(analysis: StudyAnalysis, _: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """Parallel efficiencies over the number of workers with their intervals; 100 % is ideal."""
    title = "Parallel efficiency over workers"
    groups = _named(analysis.worker_groups[:MAX_SERIES])
    if not groups:
        return OmittedFigure(title, NO_GROUPS)

    def efficiencies(group: WorkerGroup) -> Mapping[int, Estimate]:
        return {n: s.scaled(group.baseline / n) for n, s in group.speedups.items()}

    rows = list(_group_rows(groups, efficiencies, units.percent_interval))
    x = vega.workers_axis([row["workers"] for row in rows])
    y = quantity("value", "efficiency", zero=True, axis={"format": ".0%"})
    below = (vega.reference_layer(y), vega.line_layer({**x, "field": "beside"}, y, color=vega.series(list(groups))))
    text = "Parallel efficiency against the number of workers; the dotted line at 100 % is ideal."
    spec, words = _over_workers(analysis, list(groups), rows, x, y, "efficiency", below)
    return Figure("efficiency", title, text + words, spec)


def _over_workers(
    analysis: StudyAnalysis,
    names: Sequence[str],
    rows: Sequence[Row],
    x: Spec,
    y: Spec,
    shown_as: str,
    below: Sequence[Spec],
    *,
    log: bool = False,
) -> tuple[Spec, str]:
    """The figure of values with their intervals above some layers, and the values in words."""
    # Side by side, so that intervals at the same number of workers don't hide each other.
    places = {name: i - (len(names) - 1) / 2 for i, name in enumerate(names)}
    drawn = [{**row, "beside": row["workers"] * BESIDE ** places[row["series"]]} for row in rows]
    drawn, cut = vega.within(drawn, log=log)
    beside, upright = {**x, "field": "beside"}, {"y": {**y, "field": "value_low"}, "y2": {"field": "value_high"}}
    spec = layers(
        drawn,
        *below,
        layer({"type": "rule", "strokeWidth": 2}, x=beside, **upright, color=vega.series(names), opacity=vega.PICKED),
        vega.point_layer(names, beside, y, series="point", workers="workers", shown=shown_as, repeats="repeats"),
    )
    num = len(analysis.worker_groups)
    some = f" The first {MAX_SERIES} of {num} groups of points are drawn." if num > MAX_SERIES else ""
    words = vega.listed([f"{row['label']}: {row['shown']}" for row in rows])
    return spec, f"{some} Measured: {words}.{cut}"


def _group_rows(
    groups: Mapping[str, WorkerGroup],
    values_of: Callable[[WorkerGroup], Mapping[int, Estimate]],
    show: Callable[[float, float | None, float | None], str],
) -> Iterator[Row]:
    for name, group in groups.items():
        for num_workers, e in values_of(group).items():
            yield {
                "series": name,
                "workers": num_workers,
                **bounds(e),
                "shown": "1 by definition" if num_workers == group.baseline else show(e.value, e.low, e.high),
                "repeats": e.num_samples,
                "label": (f"{name}, " if group.label else "") + units.counted(num_workers, "worker"),
            }


def _named(groups: Sequence[WorkerGroup]) -> dict[str, WorkerGroup]:
    """The groups by their labels; ``measured``: one that shares all it sweeps with no other."""
    named: dict[str, WorkerGroup] = {}
    for group in groups:
        name = group.label or "measured"
        while name in named:  # values that differ after their first four digits
            name += "′"
        named[name] = group
    return named


def _law_rows(named: Mapping[str, WorkerGroup], farthest: int) -> Iterator[Row]:
    """The fitted laws as curves, from the fewest workers of a group to the most of all."""
    for name, group in named.items():
        fits = [law for law in group.analyse(num_resamples=NO_INTERVALS).laws if isinstance(law, Fit)]
        for fit in fits:
            parameters = [parameter.value for parameter in fit.parameters]
            workers = np.geomspace(min(group.speedups), farthest, NUM_CURVE_POINTS)
            values = fit.law.speedup(workers, *parameters) / fit.law.speedup(group.baseline, *parameters)
            for n, value in zip(workers, values, strict=True):
                if value > 0:
                    yield {"series": name, "kind": fit.law.name, "workers": float(n), "value": float(value)}


MAX_DRAWN_POINTS = 200
ON_FRONT, OFF_FRONT = "on the Pareto front", "beaten by another"


def pareto(analysis: StudyAnalysis, _: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """Each point's time and metric, with the Pareto front of `raypar recommend`."""
    metric = analysis.question.metric
    title = f"Time against {metric}, with the Pareto front"
    front = {id(analysis.points[i]) for i in front_of(analysis.points, analysis.question.mode)}
    rows: list[Row] = [
        {
            "point": point_label(point.point),
            **bounds(point.time_s, "time"),
            **_shares(metric, bounds(point.metric)),
            "time_shown": units.seconds_interval(point.time_s.value, point.time_s.low, point.time_s.high),
            "shown": units.score_interval(metric, point.metric.value, point.metric.low, point.metric.high),
            "series": ON_FRONT if id(point) in front else OFF_FRONT,
        }
        for point in analysis.points
        if point.time_s is not None and point.metric is not None
    ]
    if not rows:
        return OmittedFigure(title, f"no point has both a time and a {metric}")
    rows, cut = vega.within(rows, "time")
    rows, also_cut = vega.within(rows)
    best, others = ([row for row in rows if row["series"] == kind] for kind in (ON_FRONT, OFF_FRONT))
    shown = [row for kind in (best, others) for row in vega.thinned(kind, MAX_DRAWN_POINTS)]
    edge = pareto_front([(row["time"], -gain(analysis.question.mode, row["value"])) for row in best])
    x = quantity("time", _time_title(analysis))
    y = quantity("value", metric, axis=vega.metric_axis(metric))
    names = [ON_FRONT, OFF_FRONT]
    front_line = {"type": "line", "interpolate": "step-after", "strokeDash": [4, 3], "color": "#0072B2"}
    rule, colour = {"type": "rule", "strokeWidth": 1}, vega.series(names)
    spec = layers(
        shown,
        {
            "data": {"values": sorted((best[i] for i in edge), key=lambda row: float(row["time"]))},
            **layer(front_line, x=x, y=y),
        },
        layer(rule, x={**x, "field": "time_low"}, x2={"field": "time_high"}, y=y, color=colour),
        layer(rule, x=x, y={**y, "field": "value_low"}, y2={"field": "value_high"}, color=colour),
        vega.point_layer(names, x, y, point="point", time_shown="time", shown="metric"),
    )
    words = vega.listed([f"{row['point']}: {row['time_shown']}, {row['shown']}" for row in best])
    some = f" Of either kind, {MAX_DRAWN_POINTS} are drawn at the most." if len(rows) > len(shown) else ""
    how = "significantly" if any(len(p.times) > 1 for p in analysis.points) else "by its medians"
    text = (
        f"The medians of each point's time and {metric}, with their intervals. On the Pareto front are the "
        f"points that no other beats {how}, cost and energy included where they are known; the line joins the best of "
        f"the two medians. {len(best)} of {len(rows)} points are on it: {words}.{some}{cut or also_cut}"
    )
    return Figure("pareto", title, text, spec)


MAX_CELLS = 400
MAX_WRITTEN_COLUMNS = 8  # of a heat map: more texts don't fit beside each other on a phone
MAX_AXIS_LETTERS = 40
INKS = ("#ffffff", "#000000")  # on dark cells, on light ones
MIN_FILLED = 0.5  # of a heat map's cells; a search's points leave nearly all of them empty


def heat_map(analysis: StudyAnalysis, _: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """The median time over two swept hyperparameters, for a study that sweeps two."""
    cells = [
        (p.point, t.value, units.seconds(t.value), units.seconds_interval(t.value, t.low, t.high))
        for p in analysis.points
        if (t := p.time_s) is not None
    ]
    return _heat_map(analysis, cells, "heat_map", "Time", _time_title(analysis), "fast")


def metric_heat_map(analysis: StudyAnalysis, _: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """The median metric over two swept hyperparameters, for a study that sweeps two."""
    name = analysis.question.metric
    cells = [
        (p.point, m.value, units.score(name, m.value), units.score_interval(name, m.value, m.low, m.high))
        for p in analysis.points
        if (m := p.metric) is not None
    ]
    return _heat_map(analysis, cells, "metric_heat_map", name[:1].upper() + name[1:], name, "low")


def _heat_map(
    analysis: StudyAnalysis,
    cells: Sequence[tuple[Mapping[str, Value], float, str, str]],
    key: str,
    what: str,
    legend: str,
    dark_is: str,
) -> Figure | OmittedFigure:
    """The figure of points with their values, as written on a cell and as shown in words."""
    keys = analysis.question.space_keys
    reason = f"it shows two swept hyperparameters, and there are {len(keys)}"
    if len(keys) == 2:
        across, down = ([units.value_of(point.get(k)) for point, *_ in cells] for k in keys)
        columns, lines = len(set(across)), len(set(down))
        reason = _no_grid(columns, lines, len(cells))
    if reason:
        return OmittedFigure(f"{what} as a heat map", reason)
    values = [value for _, value, *_ in cells]
    middle = (min(values) + max(values)) / 2
    # Cividis goes from dark to light: what is written on a cell has to stand out from it.
    rows = [
        {"across": x, "down": y, "value": value, "short": short, "shown": shown, "ink": INKS[value > middle]}
        for (_, value, short, shown), x, y in zip(cells, across, down, strict=True)
    ]
    is_broad = sum(map(len, set(across))) > MAX_AXIS_LETTERS
    axis = {"labelAngle": -45, "labelLimit": 120} if is_broad else {"labelAngle": 0}
    x, y = nominal("across", keys[0], sort=None, axis=axis), nominal("down", keys[1], sort=_ordered(cells, keys[1]))
    gradient = {"orient": "top", "gradientLength": 200, **vega.metric_axis(legend)}
    colour = {**quantity("value", legend), "scale": {"scheme": "cividis"}, "legend": gradient}
    drawn = [layer("rect", x=x, y=y, color=colour, tooltip=vega.tooltip(across=keys[0], down=keys[1], shown=what))]
    if columns <= MAX_WRITTEN_COLUMNS:
        mark, ink = {"type": "text", "fontSize": 12 if columns <= 5 else 10}, {"field": "ink", "type": "nominal"}
        text = {"field": "short", "type": "nominal"}
        drawn.append(layer(mark, x=x, y=y, text=text, color={**ink, "scale": None}))
    spec = layers(rows, *drawn, height=max(120, 40 * lines))
    spec["resolve"] = {"scale": {"color": "independent"}}
    written = vega.listed([f"{keys[0]}={row['across']} {keys[1]}={row['down']}: {row['shown']}" for row in rows], 24)
    title = f"{what} over both hyperparameters"
    return Figure(key, title, f"The median of each point, dark is {dark_is}. {written}.", spec)


def _no_grid(columns: int, lines: int, num_cells: int) -> str:
    """Return why points fill no grid; empty where they do."""
    if min(columns, lines) < 2:
        return "it takes two values or more of both hyperparameters with finished trials"
    fills = MIN_FILLED * columns * lines <= num_cells <= columns * lines <= MAX_CELLS
    return "" if fills else f"the points don't fill a grid of at most {MAX_CELLS} cells"


def _shares(metric: str, row: Row) -> Row:
    """Return the fields, those of an accuracy within 0 and 1: an interval's arithmetic does not know these bounds."""
    return {k: min(max(v, 0.0), 1.0) for k, v in row.items()} if units.is_share(metric) else row


def _ordered(cells: Sequence[tuple[Mapping[str, Value], float, str, str]], key: str) -> list[str]:
    """Return the values of a hyperparameter as text, each once, numbers from the smallest, words as they come."""
    values = [point.get(key) for point, *_ in cells]
    numbers = sorted(v for v in values if isinstance(v, (int, float)))
    return list(dict.fromkeys(map(units.value_of, numbers if len(numbers) == len(values) else values)))


def _time_title(analysis: StudyAnalysis) -> str:
    return "training time, s" if analysis.time_metric == TRAIN_TIME else "time of the whole trial, s"


MAX_GROUPS = 3
_PARTS = {"throughput": "samples/s", "progress": "progress per sample", "goodput": "speed towards the target"}


def goodput(analysis: StudyAnalysis, _: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """Samples per second, progress per sample and their product over the batch size, against one of them."""
    title = "Batch size: throughput and progress"
    target, groups = analysis.target, analysis.batches
    if target is None or not groups:
        return OmittedFigure(title, "no two points differ only in their batch size and have reached a common target")
    drawn = {point_label(group.rest) if group.rest else "all": group for group in groups[:MAX_GROUPS]}
    rows: list[Row] = []
    words = []
    for label, group in drawn.items():
        for batch in group.batches:
            for key, name in _PARTS.items():
                e: Estimate = getattr(batch, key)
                shown = units.ratio_interval(e.value, e.low, e.high)
                rows.append({"series": name, "group": label, "batch": batch.batch_size, **bounds(e), "shown": shown})
        last = next(batch for batch in reversed(group.batches) if batch.batch_size != group.base)
        at = f" at {label}" if group.rest else ""
        words.append(
            f"{group.key}={last.batch_size}{at}: {units.ratio(last.throughput.value)} the samples/s, "
            f"{units.ratio(last.progress.value)} the progress per sample, {units.ratio(last.goodput.value)} the speed"
        )
    first, names = groups[0], list(_PARTS.values())
    sizes = sorted({row["batch"] for row in rows})
    x = quantity("batch", first.key, log2=True, axis={"values": sizes, "format": "d", "grid": False})
    y = quantity("value", f"over {first.base}", log2=True, axis={"format": "~g"})
    styles = {"domain": list(drawn), "range": list(([1, 0], [6, 4], [2, 3])[: len(drawn)])}
    dash = nominal("group", scale=styles, legend=vega.stroke_legend() if len(drawn) > 1 else None)
    spec = layers(
        rows,
        vega.line_layer(x, y, color=vega.series(names), strokeDash=dash),
        vega.point_layer(names, x, y, size=70, series="what", group="at", batch=first.key, shown="over the base"),
    )
    more = f" The first {MAX_GROUPS} of {len(groups)} groups." if len(groups) > MAX_GROUPS else ""
    text = (
        f"Until {target.metric} {units.score(target.metric, target.value)}, which every trial reached, over the batch "
        f"size, against {first.base}: samples per second, progress per sample, and their product, the speed towards "
        f"the target.{more} {vega.listed(words)}."
    )
    return Figure("goodput", title, text, spec)


# In the order of a report. A new figure is a function and its entry here.
FIGURES: Sequence[MakeFigure] = (
    speedup,
    efficiency,
    times,
    trial_parts,
    breakdown,
    pareto,
    learning,
    goodput,
    heat_map,
    metric_heat_map,
    drift,
)
