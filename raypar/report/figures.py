"""The figures of a study. Each is a function in `FIGURES`, and has a title and a text alternative; Vega-Lite draws it.

A figure that the study has no data for is omitted, with the reason.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TypeAlias

import numpy as np

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.breakdown import PARTS
from raypar.analysis.laws import USL, Fit
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import TRAIN_TIME, point_key
from raypar.analysis.recommend import front_of, pareto_front
from raypar.analysis.scaling import ScalingPoint, WorkerGroup
from raypar.analysis.stats import Estimate
from raypar.errors import RayparError
from raypar.report import vega
from raypar.report.profile import NAMES, WORTH_A_WORD
from raypar.report.vega import Figure, OmittedFigure, Row, Spec, bounds, layer, layers, nominal, quantity
from raypar.study.space import Value
from raypar.study.trial import TrialResult, gain, latest, point_label

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
IDEAL = "ideal"
NO_GROUPS = "no two points with finished trials differ only in num_workers"


def speedup(analysis: StudyAnalysis, _: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """Speedups over the number of workers with their intervals, the ideal line, and the laws fitted to them."""
    title = "Speedup over workers"
    groups = _named(analysis.worker_groups[: vega.MAX_SERIES])
    if not groups:
        return OmittedFigure(title, NO_GROUPS)
    rows = list(_group_rows(groups, attrgetter("speedup"), units.ratio_interval))
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
    groups = _named(analysis.worker_groups[: vega.MAX_SERIES])
    if not groups:
        return OmittedFigure(title, NO_GROUPS)
    rows = list(_group_rows(groups, attrgetter("efficiency"), units.percent_interval))
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
    some = f" The first {vega.MAX_SERIES} of {num} groups of points are drawn." if num > vega.MAX_SERIES else ""
    words = vega.listed([f"{row['label']}: {row['shown']}" for row in rows])
    return spec, f"{some} Measured: {words}.{cut}"


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
ON_FRONT, OFF_FRONT = "on the Pareto front", "beaten by another"


def pareto(analysis: StudyAnalysis, _: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """Each point's time and metric, with the Pareto front of `raypar recommend`."""
    metric = analysis.question.metric
    title, is_share = f"Time against {metric}, with the Pareto front", units.is_share(metric)
    front = {id(analysis.points[i]) for i in front_of(analysis.points, analysis.question.mode, analysis.family)}
    rows: list[Row] = [
        {
            "point": point_label(point.point),
            **bounds(point.time_s, "time"),
            # Within 0 and 1, which the arithmetic of an accuracy's interval does not know.
            **{k: min(max(v, 0.0), 1.0) if is_share else v for k, v in bounds(point.metric).items()},
            "time_shown": units.seconds_interval(point.time_s),
            "shown": units.score_interval(metric, point.metric),
            "series": ON_FRONT if id(point) in front else OFF_FRONT,
        }
        for point in analysis.points
        if point.time_s is not None and point.metric is not None and not point.unusable
    ]
    if not rows:
        return OmittedFigure(title, f"no point has both a time and a {metric}")
    rows, cut = vega.within(rows, "time")
    rows, also_cut = vega.within(rows)
    best, others = ([row for row in rows if row["series"] == kind] for kind in (ON_FRONT, OFF_FRONT))
    shown = [row for kind in (best, others) for row in vega.thinned(kind, MAX_DRAWN_POINTS)]
    edge = pareto_front([(row["time"], -gain(analysis.question.mode, row["value"])) for row in best])
    on_edge = sorted((best[i] for i in edge), key=lambda row: float(row["time"]))
    x = quantity("time", _time_title(analysis))
    y = quantity("value", metric, axis=vega.metric_axis(metric))
    names = [ON_FRONT, OFF_FRONT]
    front_line = {"type": "line", "interpolate": "step-after", "strokeDash": [4, 3], "color": "#0072B2"}
    rule, colour = {"type": "rule", "strokeWidth": 1}, vega.series(names)
    spec = layers(
        shown,
        {"data": {"values": on_edge}, **layer(front_line, x=x, y=y)},
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
    cells = [(p.point, p.time_s) for p in analysis.points if p.time_s is not None]
    shows = (units.seconds, units.seconds_interval)
    return _heat_map(analysis, cells, shows, "heat_map", "Time", _time_title(analysis), "fast")


def metric_heat_map(analysis: StudyAnalysis, _: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """The median metric over two swept hyperparameters, for a study that sweeps two."""
    name = analysis.question.metric
    cells = [(p.point, p.metric) for p in analysis.points if p.metric is not None]
    shows = (partial(units.score, name), partial(units.score_interval, name))
    return _heat_map(analysis, cells, shows, "metric_heat_map", name[:1].upper() + name[1:], name, "low")


def _heat_map(
    analysis: StudyAnalysis,
    cells: Sequence[tuple[Mapping[str, Value], Estimate]],
    shows: tuple[Callable[[float], str], Callable[[units.Interval], str]],
    key: str,
    what: str,
    legend: str,
    dark_is: str,
) -> Figure | OmittedFigure:
    """The figure of points with their values; `shows`: one as written on a cell, and as shown in words."""
    keys = analysis.question.space_keys
    blanks = [(p.point, p.outcome) for p in analysis.points if p.outcome is not None]
    points = [point for point, _ in (*cells, *blanks)]
    reason = f"it shows two swept hyperparameters, and there are {len(keys)}"
    if len(keys) == 2:
        across, down = ([units.value_of(point.get(k)) for point in points] for k in keys)
        columns, lines = len(set(across)), len(set(down))
        fills = MIN_FILLED * columns * lines <= len(cells) <= columns * lines <= MAX_CELLS
        reason = "" if fills else f"the points don't fill a grid of at most {MAX_CELLS} cells"
        if min(columns, lines) < 2:
            reason = "it takes two values or more of both hyperparameters with finished trials"
    if reason:
        return OmittedFigure(f"{what} as a heat map", reason)
    values = [e.value for _, e in cells]
    middle = (min(values) + max(values)) / 2
    one, interval = shows
    # Cividis goes from dark to light: what is written on a cell has to stand out from it.
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
    gradient = {"orient": "top", "gradientLength": 200, **vega.metric_axis(legend)}
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
    shown = [f"{keys[0]}={row['across']} {keys[1]}={row['down']}: {row['shown']}" for row in (*rows, *empty)]
    written = vega.listed(shown, 24)
    title = f"{what} over both hyperparameters"
    return Figure(key, title, f"The median of each point, dark is {dark_is}. {written}.", spec)


def _ordered(values: Sequence[object]) -> list[str]:
    """Return the values of a hyperparameter as text, each once, numbers from the smallest, words as they come."""
    numbers = sorted(v for v in values if isinstance(v, (int, float)))
    return list(dict.fromkeys(map(units.value_of, numbers if len(numbers) == len(values) else values)))


def _time_title(analysis: StudyAnalysis) -> str:
    return "training time, s" if analysis.time_metric == TRAIN_TIME else "time of the whole trial, s"


MAX_GROUPS = 3
BATCH_PARTS = {"throughput": "samples/s", "progress": "progress per sample", "goodput": "speed towards the target"}


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
            for key, name in BATCH_PARTS.items():
                e: Estimate = getattr(batch, key)
                shown = {**bounds(e), "shown": units.ratio_interval(e)}
                rows.append({"series": name, "group": label, "batch": batch.batch_size, **shown})
        last = next(batch for batch in reversed(group.batches) if batch.batch_size != group.base)
        at = f" at {label}" if group.rest else ""
        rate, progress, speed = (units.ratio(e.value) for e in (last.throughput, last.progress, last.goodput))
        of_last = f"{rate} the samples/s, {progress} the progress per sample, {speed} the speed"
        words.append(f"{group.key}={last.batch_size}{at}: {of_last}")
    first, names = groups[0], list(BATCH_PARTS.values())
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


MAX_BARS = 40
OFF_AXIS = {"offset": 24}  # of a legend: the axis has its title there
# Eight parts of a step: Okabe and Ito's colours, with two greys for what is neither work nor communication.
PART_COLOURS = ("#E69F00", "#56B4E9", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#8a8f98", "#c3c7cd")
TRIAL_PARTS = ("start-up", "loading data", "warm-up", "training", "evaluation", "rest")
TRIAL_COLOURS = dict(zip(TRIAL_PARTS, ("#CC79A7", "#E69F00", "#56B4E9", "#0072B2", "#009E73", "#c3c7cd"), strict=True))


def times(analysis: StudyAnalysis, _: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """The median time of each point with its interval."""
    what = "training time" if analysis.time_metric == TRAIN_TIME else "time of the whole trial"
    title = f"Each point's {what}"
    timed = [(p, p.time_s) for p in analysis.points if p.time_s is not None]
    if not timed:
        return OmittedFigure(title, "no trial finished with a time")
    drawn, more = _fastest(timed)
    blanks = [(p.point, p.outcome) for p in analysis.points if p.outcome is not None][: MAX_BARS - len(drawn)]
    y, names = vega.point_axis([*(p.point for p, _ in drawn), *(point for point, _ in blanks)])
    rows = [
        {
            "point": name,
            **bounds(time_s),
            "shown": units.seconds_interval(time_s),
            "repeats": time_s.num_samples,
            "kind": "baseline" if point.is_baseline else "point",
        }
        for (point, time_s), name in zip(drawn, names, strict=False)
    ]
    empty = [{"point": name, "shown": outcome} for (_, outcome), name in zip(blanks, names[len(drawn) :], strict=True)]
    text_layer = {"data": {"values": empty}} | layer(
        {"type": "text", "align": "left", "color": vega.GREY},
        y=y,
        x={"datum": 0, "type": "quantitative"},
        text={"field": "shown", "type": "nominal"},
    )
    shown, cut = vega.within(rows)
    kinds = ["baseline", "point"]
    legend = {"orient": "top", **OFF_AXIS} if any(row["kind"] == "baseline" for row in rows) else None
    low = {"field": "value_low", "type": "quantitative"}
    colour = nominal("kind", scale={"domain": kinds, "range": ["#D55E00", "#0072B2"]}, legend=legend)
    spec = layers(
        shown,
        layer({"type": "rule", "strokeWidth": 2}, y=y, x=low, x2={"field": "value_high"}),
        layer(
            {"type": "point", "filled": True, "size": 80, "opacity": 1},
            y=y,
            x=quantity("value", f"{what}, s", zero=True),
            color=colour,
            shape={**colour, "scale": {"domain": kinds, "range": ["square", "circle"]}},
            tooltip=vega.tooltip(point="point", shown=what, repeats="repeats"),
        ),
        *([text_layer] if empty else []),
        height=max(80, 24 * len(names)),
    )
    shown_points = [f"{point_label(p.point)}: {row['shown']}" for (p, _), row in zip(drawn, rows, strict=True)]
    words = vega.listed([*shown_points, *(f"{point_label(point)}: {outcome}" for point, outcome in blanks)])
    text = f"The median of each point's {what}, with its interval.{more} {words}.{cut}"
    return Figure("times", title, text, spec)


def breakdown(analysis: StudyAnalysis, _: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """Parts of a mean step, stacked, for each profiled point."""
    title = "Where a step's time goes"
    if not analysis.profiles:
        return OmittedFigure(title, "no point was looked into: `raypar study FILE --profile` does, after the training")
    shown = analysis.profiles[:MAX_BARS]
    rows: list[Row] = []
    words = []
    y, names = vega.point_axis([point for point, _ in shown])
    for (point, profile), name in zip(shown, names, strict=True):
        mean = profile.mean
        shares = {part: units.percent(mean.parts[part] / mean.step_s) for part in PARTS}
        for i, (part, share) in enumerate(shares.items()):
            ms, label = 1e3 * mean.parts[part], NAMES[part]
            rows.append({"point": name, "part": label, "order": i, "value": ms, "shown": f"{ms:.3g} ms, {share}"})
        large = sorted((p for p in PARTS if mean.parts[p] >= WORTH_A_WORD * mean.step_s), key=lambda p: -mean.parts[p])
        parts = ", ".join(f"{NAMES[part]} {shares[part]}" for part in large)
        words.append(f"{point_label(point)}: a step of {units.seconds(mean.step_s)}, of it {parts}")
    colours = dict(zip((NAMES[p] for p in PARTS), PART_COLOURS, strict=True))
    text = f"Bars of the mean step's parts, stacked, with the profiler. {vega.listed(words)}."
    return Figure("breakdown", title, text, _stacked(rows, y, colours, "step, ms"))


def trial_parts(analysis: StudyAnalysis, results: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """Parts of a whole trial, stacked, for each point: the mean of its finished trials."""
    title = "Where a trial's time goes"
    by_point: dict[object, list[Mapping[str, float]]] = {}
    for result in latest(results):
        if parts := _parts_of(result):
            by_point.setdefault(point_key(result.spec.point), []).append(parts)
    timed = [(p, p.time_s) for p in analysis.points if p.time_s is not None and point_key(p.point) in by_point]
    if not timed:
        return OmittedFigure(title, "raypar could not look into any finished trial")
    rows: list[Row] = []
    words = []
    drawn, more = _fastest(timed)
    y, names = vega.point_axis([p.point for p, _ in drawn])
    for (point, _), name in zip(drawn, names, strict=True):
        trials = by_point[point_key(point.point)]
        means = {part: statistics.fmean(parts[part] for parts in trials) for part in TRIAL_COLOURS}
        total_s = sum(means.values())
        for i, (part, seconds) in enumerate(means.items()):
            shown = f"{units.seconds(seconds)}, {units.percent(seconds / total_s)}"
            rows.append({"point": name, "part": part, "order": i, "value": seconds, "shown": shown})
        share = units.percent(means["training"] / total_s)
        words.append(f"{point_label(point.point)}: {units.seconds(total_s)}, of it training {share}")
    text = f"Bars of the mean trial's parts, stacked, from the start of its processes to their end.{more}"
    return Figure("trial_parts", title, f"{text} {vega.listed(words)}.", _stacked(rows, y, TRIAL_COLOURS, "trial, s"))


def _parts_of(result: TrialResult) -> dict[str, float]:
    """The parts of a finished trial, in seconds; empty where they are not known."""
    if not result.is_measured or result.stalls_s or not result.wall_s or result.train_time_s is None:
        return {}
    data = result.data_time_s or 0.0
    parts = {
        "start-up": max(0.0, (result.startup_s or 0.0) - data),
        "loading data": data,
        "warm-up": result.warmup_s or 0.0,
        "training": result.train_time_s,
        "evaluation": result.eval_time_s or 0.0,
    }
    return {**parts, "rest": max(0.0, result.wall_s - sum(parts.values()))}


def _fastest(timed: Sequence[tuple[PointAnalysis, Estimate]]) -> tuple[list[tuple[PointAnalysis, Estimate]], str]:
    """Return all, in their order, or of too many the fastest, and a sentence on the others."""
    if len(timed) <= MAX_BARS:
        return list(timed), ""
    return sorted(timed, key=lambda e: e[1].value)[:MAX_BARS], f" The {MAX_BARS} fastest of {len(timed)} points."


def _stacked(rows: Sequence[Row], y: Spec, colours: Mapping[str, str], title: str) -> Spec:
    """Bars of parts, one for each point; parts that are zero everywhere are omitted."""
    seen = [part for part in colours if any(row["value"] > 0 for row in rows if row["part"] == part)]
    num_bars = len({row["point"] for row in rows})
    scale = {"domain": seen, "range": [colours[name] for name in seen]}
    columns = 1 if any(len(name) > vega.MAX_SHORT_NAME for name in seen) else 2
    bars = layer(
        {"type": "bar", "stroke": "white", "strokeWidth": 0.5},
        y=y,
        x={**quantity("value", title, zero=True), "stack": "zero"},
        color=nominal("part", scale=scale, legend={"orient": "top", "columns": columns, **OFF_AXIS}),
        order={"field": "order", "type": "quantitative"},
        opacity=vega.PICKED,
        tooltip=vega.tooltip(point="point", part="part", shown="time"),
    )
    bars = {"params": vega.pick("part"), **bars}
    return layers([row for row in rows if row["part"] in seen], bars, height=max(80, 34 * num_bars))


MAX_LEGEND_LETTERS = 34
MAX_CURVES = 5  # of a point's trials; more hide each other
MAX_REPORTS = 1200  # of all curves
MAX_DRAWN_TRIALS = 500


def learning(analysis: StudyAnalysis, results: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """The metric over the time trained so far, a curve for each trial, coloured by its point."""
    metric = analysis.question.metric
    title = f"Learning curves: {metric} over time"
    is_timed = any(TRAIN_TIME in report for r in results for report in r.reports)
    curves = {r.spec.identity: (r, rows) for r in latest(results) if len(rows := _curve(analysis, r, is_timed)) > 1}
    if not curves:
        return OmittedFigure(title, f"no trial reported {metric} more than once")
    title = title if is_timed else f"Learning curves: {metric} from report to report"
    with_curve = {point_label(r.spec.point) for r, _ in curves.values()}
    labels = [label for p in analysis.points if (label := point_label(p.point)) in with_curve]
    mode = analysis.question.mode
    gains = {point_label(p.point): gain(mode, p.metric.value) for p in analysis.points if p.metric is not None}
    best = sorted(labels, key=lambda label: gains.get(label, -math.inf), reverse=True)[: vega.MAX_SERIES]
    labels = [label for label in dict.fromkeys(labels) if label in best]
    names, legend_title = dict(zip(labels, labels, strict=True)), None
    if max(map(len, labels)) > MAX_LEGEND_LETTERS:  # values instead, and the keys as the legend's title
        points = {point_label(p.point): p.point for p in analysis.points}
        axis, short = vega.point_axis([points[label] for label in labels])
        names, legend_title = dict(zip(labels, short, strict=True)), axis["title"]
    drawn: list[tuple[str, list[Row]]] = []
    for r, curve in curves.values():
        label = point_label(r.spec.point)
        if label in names and sum(label == other for other, _ in drawn) < MAX_CURVES:
            drawn.append((label, curve))
    rows = [row for _, curve in drawn for row in vega.thinned(curve, MAX_REPORTS // len(drawn))]
    rows = [{**row, "series": names[row["series"]]} for row in rows]
    series, of_time = list(names.values()), "trained for" if is_timed else "report"
    x = quantity("time", "trained for, s" if is_timed else "report", zero=True)
    y = quantity("value", metric, axis=vega.metric_axis(metric))
    line, colour = {"type": "line", "strokeWidth": 1.5, "opacity": 0.8}, vega.series(series, title=legend_title)
    tips = {"trial": "trial", "time_shown": of_time, "shown": "metric"}
    spec = layers(
        rows,
        layer(line, x=x, y=y, detail={"field": "trial"}, color=colour, opacity=vega.PICKED),
        vega.point_layer(series, x, y, size=36, title=legend_title, **tips),
    )
    ends = {label: [curve[-1]["value"] for other, curve in drawn if other == label] for label in labels}
    words = [f"{label}: {units.score(metric, statistics.median(values))}" for label, values in ends.items()]
    some = f" The {len(names)} best points of {len(with_curve)}." if len(with_curve) > len(names) else ""
    some += f" {len(drawn)} of {len(curves)} trials." if len(drawn) < len(curves) else ""
    over = "the time trained so far, without evaluations" if is_timed else "its reports, whose times are not known"
    text = f"The {metric} over {over}, a curve for each trial.{some}"
    return Figure("learning", title, f"{text} At the end, in the median: {vega.listed(words)}.", spec)


def drift(analysis: StudyAnalysis, results: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """Each trial's time over its point's median, by when it was started: a machine that changes shows."""
    title = "Drift over the study"
    repeated = [(p, p.time_s) for p in analysis.points if len(p.samples) > 1]
    medians = {point_key(p.point): time_s.value for p, time_s in repeated if time_s is not None}
    seen = []
    for r in latest(results):
        time_s = r.train_time_s if analysis.time_metric == TRAIN_TIME else r.wall_s
        median_s = medians.get(point_key(r.spec.point))
        if r.is_measured and r.started_at > 0 and median_s and time_s and vega.is_number(time_s):
            seen.append((r.started_at, r.spec.label, time_s, time_s / median_s))
    if len(seen) < 3:
        return OmittedFigure(title, "fewer than three finished trials are of a point with repeats")
    seen.sort()
    rows: list[Row] = [
        {"minutes": (at - seen[0][0]) / 60, "trial": label, "value": of_median}
        | {"shown": f"{units.seconds(time_s)}, {units.ratio(of_median)}"}
        for at, label, time_s, of_median in seen
    ]
    x, y = quantity("minutes", "started, minutes into the study"), quantity("value", "time over the point's median")
    dot = {"type": "point", "filled": True, "size": 50, "color": "#0072B2", "opacity": 1}
    dots = layer(dot, x=x, y=y, tooltip=vega.tooltip(trial="trial", shown="time"))
    spec = layers(vega.thinned(rows, MAX_DRAWN_TRIALS), vega.reference_layer(y), dots)
    half = len(seen) // 2
    early, late = (statistics.median(r for *_, r in part) for part in (seen[:half], seen[-half:]))
    worst = max(seen, key=lambda entry: abs(entry[3] - 1))
    text = (
        f"Each trial's time over the median of its point, by when it was started; without drift they lie around 1. "
        f"Medians: {units.ratio(early)} in the first half, {units.ratio(late)} in the second. "
        f"Farthest off: {worst[1]} with {units.ratio(worst[3])}."
    )
    return Figure("drift", title, text, spec)


def _curve(analysis: StudyAnalysis, result: TrialResult, is_timed: bool) -> list[Row]:
    """The metric at each report, over the training time so far, or else over the reports; empty where that lacks."""
    so_far, rows = 0.0, []
    trial = {"series": point_label(result.spec.point), "trial": result.spec.label}
    if not result.is_complete:
        return []
    for report in result.reports:
        time_s, value = report.get(TRAIN_TIME) if is_timed else 1.0, report.get(analysis.question.metric)
        if time_s is None or not vega.is_number(time_s):
            return []
        so_far += time_s
        if value is not None and vega.is_number(value):
            at = units.seconds(so_far) if is_timed else str(int(so_far))
            shown = {"time_shown": at, "shown": units.score(analysis.question.metric, value)}
            rows.append({**trial, "time": so_far, "value": value, **shown})
    return rows


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
