"""Figures of a study's points: time against metric, heat maps, batch sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.candidates import front_of, pareto_front
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import TRAIN_TIME
from raypar.analysis.stats import Estimate
from raypar.report.vega import (
    PICK,
    PICKED,
    Figure,
    OmittedFigure,
    Row,
    bounds,
    layers,
    listed,
    metric_axis,
    quantity,
    series,
    thinned,
    tooltip,
    within,
)
from raypar.study.trial import gain, point_label

MAX_DRAWN_POINTS = 200
MAX_CELLS = 400
MAX_WRITTEN_COLUMNS = 8  # of a heat map: more texts don't fit beside each other on a phone
MAX_AXIS_LETTERS = 40
MIN_FILLED = 0.5  # of a heat map's cells; a search's points leave nearly all of them empty
ON_FRONT, OFF_FRONT = "on the Pareto front", "beaten by another"


def pareto(analysis: StudyAnalysis) -> Figure | OmittedFigure:
    """Each point's time and metric, with the Pareto front as `raypar recommend` has it."""
    title = f"Time against {analysis.metric}, with the Pareto front"
    known = [(p, p.time_s, p.metric) for p in analysis.points]
    both = [(p, time_s, metric) for p, time_s, metric in known if time_s is not None and metric is not None]
    if not both:
        return OmittedFigure(title, f"no point has both a time and a {analysis.metric}")
    front = {id(analysis.points[i]) for i in front_of(analysis.points, analysis.mode)}
    rows = [
        {
            "point": point_label(point.point),
            **bounds(time_s, "time"),
            **_shares(analysis.metric, bounds(metric)),
            "time_shown": units.seconds_interval(time_s.value, time_s.low, time_s.high),
            "shown": units.score_interval(analysis.metric, metric.value, metric.low, metric.high),
            "series": ON_FRONT if id(point) in front else OFF_FRONT,
        }
        for point, time_s, metric in both
    ]
    rows, cut = within(rows, "time")
    rows, also_cut = within(rows)
    best = [row for row in rows if row["series"] == ON_FRONT]
    others = [row for row in rows if row["series"] == OFF_FRONT]
    shown = [row for kind in (best, others) for row in thinned(kind, MAX_DRAWN_POINTS)]
    edge = pareto_front([(row["time"], -gain(analysis.mode, row["value"])) for row in best])
    x = quantity("time", _time_title(analysis))
    y = quantity("value", analysis.metric, axis=metric_axis(analysis.metric))
    names = [ON_FRONT, OFF_FRONT]
    colour = series(names)
    spec = layers(
        shown,
        {
            "data": {"values": sorted((best[i] for i in edge), key=lambda row: float(row["time"]))},
            "mark": {"type": "line", "interpolate": "step-after", "strokeDash": [4, 3], "color": "#0072B2"},
            "encoding": {"x": x, "y": y},
        },
        {
            "mark": {"type": "rule", "strokeWidth": 1},
            "encoding": {"x": {**x, "field": "time_low"}, "x2": {"field": "time_high"}, "y": y, "color": colour},
        },
        {
            "mark": {"type": "rule", "strokeWidth": 1},
            "encoding": {"x": x, "y": {**y, "field": "value_low"}, "y2": {"field": "value_high"}, "color": colour},
        },
        {
            "params": list(PICK),
            "mark": {"type": "point", "filled": True, "size": 80},
            "encoding": {
                "x": x,
                "y": y,
                "color": colour,
                "shape": series(names, "shape"),
                "opacity": PICKED,
                "tooltip": tooltip(point="point", time_shown="time", shown="metric"),
            },
        },
    )
    told = [f"{row['point']}: {row['time_shown']}, {row['shown']}" for row in best]
    some = f" Of either kind, {MAX_DRAWN_POINTS} are drawn at the most." if len(rows) > len(shown) else ""
    how = "significantly" if any(len(p.times) > 1 for p in analysis.points) else "by its medians"
    text = (
        f"The medians of each point's time and {analysis.metric}, with their intervals. On the Pareto front are the "
        f"points that no other beats {how}, cost and energy included where they are known; the line joins the best of "
        "the two medians."
    )
    return Figure(
        "pareto",
        title,
        f"{text} {len(best)} of {len(rows)} points are on it: {listed(told)}.{some}{cut or also_cut}",
        spec,
    )


def heat_map(analysis: StudyAnalysis) -> Figure | OmittedFigure:
    """The median time over two swept hyperparameters, for a study that sweeps two."""
    values = [(p, p.time_s) for p in analysis.points if p.time_s is not None]
    shown = {id(e): (units.seconds(e.value), units.seconds_interval(e.value, e.low, e.high)) for _, e in values}
    return _heat_map(analysis, values, shown, "heat_map", "Time", _time_title(analysis), "fast")


def metric_heat_map(analysis: StudyAnalysis) -> Figure | OmittedFigure:
    """The median metric over two swept hyperparameters, for a study that sweeps two."""
    values = [(p, p.metric) for p in analysis.points if p.metric is not None]
    name = analysis.metric
    shown = {id(e): (units.score(name, e.value), units.score_interval(name, e.value, e.low, e.high)) for _, e in values}
    return _heat_map(analysis, values, shown, "metric_heat_map", name[:1].upper() + name[1:], name, "low")


def _heat_map(
    analysis: StudyAnalysis,
    values: Sequence[tuple[PointAnalysis, Estimate]],
    shown: Mapping[int, tuple[str, str]],
    key: str,
    what: str,
    legend: str,
    dark_is: str,
) -> Figure | OmittedFigure:
    title, keys = f"{what} over both hyperparameters", analysis.space_keys
    if len(keys) != 2:
        return OmittedFigure(f"{what} as a heat map", f"it shows two swept hyperparameters, and there are {len(keys)}")
    across, down = ([units.value_of(p.point.get(k)) for p, _ in values] for k in keys)
    columns, lines = len(set(across)), len(set(down))
    if min(columns, lines) < 2:
        reason = "it takes two values or more of both hyperparameters with finished trials"
        return OmittedFigure(f"{what} as a heat map", reason)
    if not MIN_FILLED * columns * lines <= len(values) <= columns * lines <= MAX_CELLS:
        return OmittedFigure(f"{what} as a heat map", f"the points don't fill a grid of at most {MAX_CELLS} cells")
    low, high = (pick(e.value for _, e in values) for pick in (min, max))
    rows = [
        {
            "across": x,
            "down": y,
            "value": e.value,
            "short": shown[id(e)][0],
            "shown": shown[id(e)][1],
            # Cividis goes from dark to light: what is written on a cell has to stand out from it.
            "ink": "#000000" if e.value > (low + high) / 2 else "#ffffff",
        }
        for (_, e), x, y in zip(values, across, down, strict=True)
    ]
    is_broad = sum(map(len, set(across))) > MAX_AXIS_LETTERS
    x: Row = {"field": "across", "type": "nominal", "title": keys[0], "sort": None}
    x["axis"] = {"labelAngle": -45, "labelLimit": 120} if is_broad else {"labelAngle": 0}
    y = {"field": "down", "type": "nominal", "title": keys[1], "sort": list(dict.fromkeys(_ordered(values, keys[1])))}
    colour = {
        "field": "value",
        "type": "quantitative",
        "title": legend,
        "scale": {"scheme": "cividis"},
        "legend": {"orient": "top", "gradientLength": 200, **metric_axis(legend)},
    }
    written: Row = {
        "mark": {"type": "text", "fontSize": 12 if columns <= 5 else 10},
        "encoding": {
            "x": x,
            "y": y,
            "text": {"field": "short", "type": "nominal"},
            "color": {"field": "ink", "type": "nominal", "scale": None},
        },
    }
    spec = layers(
        rows,
        {
            "mark": "rect",
            "encoding": {"x": x, "y": y, "color": colour, "tooltip": tooltip(across=keys[0], down=keys[1], shown=what)},
        },
        *([written] if columns <= MAX_WRITTEN_COLUMNS else []),
        height=max(120, 40 * lines),
    )
    spec["resolve"] = {"scale": {"color": "independent"}}
    told = [f"{keys[0]}={row['across']} {keys[1]}={row['down']}: {row['shown']}" for row in rows]
    return Figure(key, title, f"The median of each point, dark is {dark_is}. {listed(told, 24)}.", spec)


def _shares(metric: str, row: Row) -> Row:
    """The fields, for an accuracy between 0 and 1: an interval's arithmetic knows nothing of the bounds of a share."""
    return {k: min(max(v, 0.0), 1.0) for k, v in row.items()} if units.is_share(metric) else row


def _ordered(timed: Sequence[tuple[PointAnalysis, Estimate]], key: str) -> list[str]:
    """The values of a hyperparameter in words, numbers from the smallest, words as they come."""
    values = [p.point.get(key) for p, _ in timed]
    if all(isinstance(v, (int, float)) for v in values):
        return [units.value_of(v) for v in sorted(v for v in values if isinstance(v, (int, float)))]
    return list(map(units.value_of, values))


def _time_title(analysis: StudyAnalysis) -> str:
    return "training time, s" if analysis.time_metric == TRAIN_TIME else "time of the whole trial, s"


MAX_GROUPS = 3
DASHES = ([1, 0], [6, 4], [2, 3])
NAMES = {"throughput": "samples/s", "progress": "progress per sample", "goodput": "speed towards the target"}


def goodput_curves(analysis: StudyAnalysis) -> Figure | OmittedFigure:
    """Over the batch size, against one of them: samples per second, progress per sample, and their product."""
    title = "Batch size: throughput and progress"
    target, groups = analysis.target, analysis.batches
    if target is None or not groups:
        return OmittedFigure(title, "no two points differ only in their batch size and have reached a common target")
    drawn = groups[:MAX_GROUPS]
    rows: list[Row] = []
    told = []
    labels = [point_label(group.rest) if group.rest else "all" for group in drawn]
    for group, label in zip(drawn, labels, strict=True):
        for batch in group.batches:
            for key, name in NAMES.items():
                estimate = getattr(batch, key)
                shown = units.ratio_interval(estimate.value, estimate.low, estimate.high)
                rows.append(
                    {"series": name, "group": label, "batch": batch.batch_size, **bounds(estimate), "shown": shown}
                )
        last = next(batch for batch in reversed(group.batches) if batch.batch_size != group.base)
        at = f" at {label}" if group.rest else ""
        told.append(
            f"{group.key}={last.batch_size}{at}: {units.ratio(last.throughput.value)} the samples/s, "
            f"{units.ratio(last.progress.value)} the progress per sample, {units.ratio(last.goodput.value)} the speed"
        )
    names = list(NAMES.values())
    sizes = sorted({row["batch"] for row in rows})
    x = quantity("batch", drawn[0].key, log2=True, axis={"values": sizes, "format": "d", "grid": False})
    y = quantity("value", f"over {drawn[0].base}", log2=True, axis={"format": "~g"})
    dash: Row = {
        "field": "group",
        "type": "nominal",
        "title": None,
        "scale": {"domain": labels, "range": list(DASHES[: len(labels)])},
        "legend": {"orient": "bottom", "columns": 1, "symbolType": "stroke", "symbolSize": 500, "labelLimit": 260}
        if len(labels) > 1
        else None,
    }
    spec = layers(
        rows,
        {
            "mark": {"type": "line", "strokeWidth": 1.5},
            "encoding": {"x": x, "y": y, "color": series(names), "strokeDash": dash, "opacity": PICKED},
        },
        {
            "params": list(PICK),
            "mark": {"type": "point", "filled": True, "size": 70},
            "encoding": {
                "x": x,
                "y": y,
                "color": series(names),
                "shape": series(names, "shape"),
                "opacity": PICKED,
                "tooltip": tooltip(series="what", group="at", batch=drawn[0].key, shown="over the base"),
            },
        },
    )
    value = units.score(target.metric, target.value)
    more = f" The first {MAX_GROUPS} of {len(groups)} groups." if len(groups) > MAX_GROUPS else ""
    text = (
        f"Until {target.metric} {value}, which every trial reached, over the batch size, against {drawn[0].base}: "
        f"samples per second, progress per sample, and their product, the speed towards the target.{more}"
    )
    return Figure("goodput", title, f"{text} {listed(told)}.", spec)
