"""The figures of a study's points: their times, where their steps' time goes, the Pareto front, and a heat map."""

from __future__ import annotations

from collections.abc import Sequence

from raypar import units
from raypar.analysis.breakdown import PARTS
from raypar.analysis.pareto import pareto_front
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import TRAIN_TIME
from raypar.analysis.speedup import StudyAnalysis
from raypar.analysis.stats import Estimate
from raypar.report.breakdown import NAMES, WORTH_A_WORD
from raypar.report.figures_vega import (
    PICK,
    PICKED,
    Figure,
    LeftOut,
    Row,
    bounds,
    layers,
    listed,
    metric_axis,
    quantity,
    series,
    thinned,
    tooltip,
)
from raypar.study.trial import point_label

MAX_BARS = 40
MAX_DRAWN_POINTS = 200
MAX_CELLS = 400
MIN_FILLED = 0.25  # of a heat map's cells; a search's points leave nearly all of them empty
ON_FRONT, OFF_FRONT = "on the Pareto front", "beaten by another"
# Eight parts of a step: Okabe and Ito's colours, with two greys for what is neither work nor communication.
PART_COLOURS = ("#E69F00", "#56B4E9", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#8a8f98", "#c3c7cd")


def times(analysis: StudyAnalysis) -> Figure | LeftOut:
    """The median time of each point with its interval."""
    what = "training time" if analysis.time_metric == TRAIN_TIME else "time of the whole trial"
    title = f"Each point's {what}"
    timed = [(p, p.time_s) for p in analysis.points if p.time_s is not None]
    if not timed:
        return LeftOut(title, "no trial finished with a time")
    rows = [
        {
            "point": point_label(point.point),
            **bounds(time_s),
            "shown": units.seconds_interval(time_s.value, time_s.low, time_s.high),
            "repeats": time_s.num_samples,
            "kind": "baseline" if point.is_baseline else "point",
        }
        for point, time_s in timed[:MAX_BARS]
    ]
    y = {"field": "point", "type": "nominal", "title": None, "sort": None}
    colour = {
        "field": "kind",
        "type": "nominal",
        "title": None,
        "scale": {"domain": ["baseline", "point"], "range": ["#D55E00", "#0072B2"]},
        "legend": {"orient": "top"} if any(row["kind"] == "baseline" for row in rows) else None,
    }
    shape = {**colour, "scale": {"domain": ["baseline", "point"], "range": ["square", "circle"]}}
    spec = layers(
        rows,
        {
            "mark": {"type": "rule", "strokeWidth": 2},
            "encoding": {"y": y, "x": {"field": "value_low", "type": "quantitative"}, "x2": {"field": "value_high"}},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 80, "opacity": 1},
            "encoding": {
                "y": y,
                "x": quantity("value", f"{what}, s", zero=True),
                "color": colour,
                "shape": shape,
                "tooltip": tooltip(point="point", shown=what, repeats="repeats"),
            },
        },
        height=max(80, 24 * len(rows)),
    )
    more = f" The first {MAX_BARS} of {len(timed)} points." if len(timed) > MAX_BARS else ""
    told = [f"{row['point']}: {row['shown']}" for row in rows]
    return Figure("times", title, f"The median of each point's {what}, with its interval.{more} {listed(told)}.", spec)


def breakdown_bars(analysis: StudyAnalysis) -> Figure | LeftOut:
    """Where a step's time goes, stacked, for each point that was looked into."""
    title = "Where a step's time goes"
    if not analysis.profiles:
        return LeftOut(title, "no point was looked into: `raypar study FILE --profile` does, after the training")
    shown = analysis.profiles[:MAX_BARS]
    rows: list[Row] = []
    told = []
    for point, profile in shown:
        mean, label = profile.mean, point_label(point)
        for i, part in enumerate(PARTS):
            rows.append(
                {
                    "point": label,
                    "part": NAMES[part],
                    "order": i,
                    "value": 1e3 * mean.parts[part],
                    "shown": f"{1e3 * mean.parts[part]:.3g} ms, {units.percent(mean.parts[part] / mean.step_s)}",
                }
            )
        large = sorted((p for p in PARTS if mean.parts[p] >= WORTH_A_WORD * mean.step_s), key=lambda p: -mean.parts[p])
        parts = ", ".join(f"{NAMES[p]} {units.percent(mean.parts[p] / mean.step_s)}" for p in large)
        told.append(f"{label}: a step of {units.seconds(mean.step_s)}, of it {parts}")
    seen = [NAMES[p] for p in PARTS if any(row["value"] > 0 for row in rows if row["part"] == NAMES[p])]
    colours = dict(zip((NAMES[p] for p in PARTS), PART_COLOURS, strict=True))
    spec = layers(
        [row for row in rows if row["part"] in seen],
        {
            "params": [{"name": "picked", "select": {"type": "point", "fields": ["part"]}, "bind": "legend"}],
            "mark": {"type": "bar", "stroke": "white", "strokeWidth": 0.5},
            "encoding": {
                "y": {"field": "point", "type": "nominal", "title": None, "sort": None},
                "x": {**quantity("value", "step (mean of the ranks), ms", zero=True), "stack": "zero"},
                "color": {
                    "field": "part",
                    "type": "nominal",
                    "title": None,
                    "scale": {"domain": seen, "range": [colours[name] for name in seen]},
                    "legend": {"orient": "top", "columns": 1},
                },
                "order": {"field": "order", "type": "quantitative"},
                "opacity": PICKED,
                "tooltip": tooltip(point="point", part="part", shown="time"),
            },
        },
        height=max(80, 34 * len(shown)),
    )
    return Figure(
        "breakdown", title, f"Bars of the mean step's parts, stacked, with the profiler. {listed(told)}.", spec
    )


def pareto(analysis: StudyAnalysis) -> Figure | LeftOut:
    """Each point's time and metric, with the Pareto front: the points that no other beats in both medians."""
    title = f"Time against {analysis.metric}, with the Pareto front"
    known = [(p, p.time_s, p.metric) for p in analysis.points]
    both = [(p, time_s, metric) for p, time_s, metric in known if time_s is not None and metric is not None]
    if not both:
        return LeftOut(title, f"no point has both a time and a {analysis.metric}")
    sign = 1 if analysis.mode == "max" else -1
    front = _front([(time_s.value, -sign * metric.value) for _, time_s, metric in both])
    rows = [
        {
            "point": point_label(point.point),
            **bounds(time_s, "time"),
            **_shares(analysis.metric, bounds(metric)),
            "time_shown": units.seconds_interval(time_s.value, time_s.low, time_s.high),
            "shown": units.score_interval(analysis.metric, metric.value, metric.low, metric.high),
            "series": ON_FRONT if i in front else OFF_FRONT,
        }
        for i, (point, time_s, metric) in enumerate(both)
    ]
    best = [row for row in rows if row["series"] == ON_FRONT]
    others = thinned([row for row in rows if row["series"] == OFF_FRONT], MAX_DRAWN_POINTS)
    x = quantity("time", _time_title(analysis))
    y = quantity("value", analysis.metric, axis=metric_axis(analysis.metric))
    names = [ON_FRONT, OFF_FRONT]
    colour = series(names)
    spec = layers(
        [*best, *others],
        {
            "data": {"values": sorted(best, key=lambda row: float(row["time"]))},
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
    some = f" Of the others, {MAX_DRAWN_POINTS} are drawn at the most." if len(rows) > len(best) + len(others) else ""
    text = (
        f"The medians of each point's time and {analysis.metric}, with their intervals. On the Pareto front are the "
        "points that no other beats in both medians; intervals that overlap may hide ties."
    )
    return Figure("pareto", title, f"{text} {len(front)} of {len(rows)} points are on it: {listed(told)}.{some}", spec)


def heat_map(analysis: StudyAnalysis) -> Figure | LeftOut:
    """The median time over two swept hyperparameters, for a study that sweeps two."""
    title = "Time over both hyperparameters"
    keys = analysis.space_keys
    if len(keys) != 2:
        return LeftOut("Heat map", f"it shows two swept hyperparameters, and there are {len(keys)}")
    timed = [(p, p.time_s) for p in analysis.points if p.time_s is not None]
    across, down = ([units.value_of(p.point.get(key)) for p, _ in timed] for key in keys)
    num_cells = len(set(across)) * len(set(down))
    if min(len(set(across)), len(set(down))) < 2:
        return LeftOut("Heat map", "it takes two values or more of both hyperparameters with finished trials")
    if not MIN_FILLED * num_cells <= len(timed) <= num_cells <= MAX_CELLS:
        return LeftOut("Heat map", f"the points don't fill a grid of at most {MAX_CELLS} cells")
    low, high = (pick(time_s.value for _, time_s in timed) for pick in (min, max))
    rows = [
        {
            "across": x,
            "down": y,
            "value": time_s.value,
            "short": units.seconds(time_s.value),
            "shown": units.seconds_interval(time_s.value, time_s.low, time_s.high),
            # Cividis goes from dark to light: what is written on a cell has to stand out from it.
            "ink": "#000000" if time_s.value > (low + high) / 2 else "#ffffff",
        }
        for (_, time_s), x, y in zip(timed, across, down, strict=True)
    ]
    x = {"field": "across", "type": "nominal", "title": keys[0], "sort": None, "axis": {"labelAngle": 0}}
    y = {"field": "down", "type": "nominal", "title": keys[1], "sort": list(dict.fromkeys(_ordered(timed, keys[1])))}
    spec = layers(
        rows,
        {
            "mark": "rect",
            "encoding": {
                "x": x,
                "y": y,
                "color": {
                    "field": "value",
                    "type": "quantitative",
                    "title": _time_title(analysis),
                    "scale": {"scheme": "cividis"},
                },
                "tooltip": tooltip(across="first", down="second", shown="time"),
            },
        },
        {
            "mark": {"type": "text", "fontSize": 12},
            "encoding": {
                "x": x,
                "y": y,
                "text": {"field": "short", "type": "nominal"},
                "color": {"field": "ink", "type": "nominal", "scale": None},
            },
        },
        height=max(120, 40 * len(set(down))),
    )
    spec["resolve"] = {"scale": {"color": "independent"}}
    told = [f"{keys[0]}={row['across']} {keys[1]}={row['down']}: {row['shown']}" for row in rows]
    return Figure("heat_map", title, f"The median time of each point, dark is fast. {listed(told, 24)}.", spec)


def _shares(metric: str, row: Row) -> Row:
    """The fields, for an accuracy between 0 and 1: an interval's arithmetic knows nothing of the bounds of a share."""
    return {k: min(max(v, 0.0), 1.0) for k, v in row.items()} if units.is_share(metric) else row


def _front(medians: Sequence[tuple[float, float]]) -> set[int]:
    """The indices on the front of (time, what is to be small), both in the median.

    Swept by time first, which leaves few: to compare all pairs of a search's thousands takes minutes.
    """
    left: list[int] = []
    for i in sorted(range(len(medians)), key=lambda i: medians[i]):
        if not left or medians[i][1] < medians[left[-1]][1] or medians[i] == medians[left[-1]]:
            left.append(i)
    return {left[i] for i in pareto_front([medians[i] for i in left])}


def _ordered(timed: Sequence[tuple[PointAnalysis, Estimate]], key: str) -> list[str]:
    """The values of a hyperparameter in words, numbers from the smallest, words as they come."""
    values = [p.point.get(key) for p, _ in timed]
    if all(isinstance(v, (int, float)) for v in values):
        return [units.value_of(v) for v in sorted(v for v in values if isinstance(v, (int, float)))]
    return list(map(units.value_of, values))


def _time_title(analysis: StudyAnalysis) -> str:
    return "training time, s" if analysis.time_metric == TRAIN_TIME else "time of the whole trial, s"
