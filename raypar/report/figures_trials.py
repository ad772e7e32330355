"""The figures of a study that aren't about its number of workers: Pareto front, learning curves, heat map, drift."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from raypar import units
from raypar.analysis.pareto import pareto_front
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import TRAIN_TIME, latest, point_key
from raypar.analysis.speedup import StudyAnalysis
from raypar.analysis.stats import Estimate
from raypar.report.figures_vega import (
    MAX_SERIES,
    PICK,
    PICKED,
    Figure,
    LeftOut,
    Row,
    bounds,
    is_number,
    layers,
    listed,
    quantity,
    series,
    tooltip,
)
from raypar.study.trial import TrialResult, TrialState, point_label

MAX_CURVES = 60  # of trials; more hide each other
MAX_REPORTS = 200  # of one curve
MAX_DRAWN_TRIALS = 2000
ON_FRONT, OFF_FRONT = "on the Pareto front", "beaten by another"


def pareto(analysis: StudyAnalysis) -> Figure | LeftOut:
    """Each point's time and metric, with the Pareto front: the points that no other beats in both medians."""
    title = f"Time against {analysis.metric}, with the Pareto front"
    known = [(p, p.time_s, p.metric) for p in analysis.points]
    both = [(p, time_s, metric) for p, time_s, metric in known if time_s is not None and metric is not None]
    if not both:
        return LeftOut(title, f"no point has both a time and a {analysis.metric}")
    sign = 1 if analysis.mode == "max" else -1
    front = set(pareto_front([(time_s.value, -sign * metric.value) for _, time_s, metric in both]))
    rows = [
        {
            "point": point_label(point.point),
            **bounds(time_s, "time"),
            **bounds(metric),
            "time_shown": units.seconds_interval(time_s.value, time_s.low, time_s.high),
            "shown": units.score_interval(analysis.metric, metric.value, metric.low, metric.high),
            "series": ON_FRONT if i in front else OFF_FRONT,
        }
        for i, (point, time_s, metric) in enumerate(both)
    ]
    x, y = quantity("time", _time_title(analysis)), quantity("value", analysis.metric, axis=_axis_of(analysis.metric))
    names = [ON_FRONT, OFF_FRONT]
    colour = series(names)
    spec = layers(
        rows,
        {
            "data": {"values": sorted((r for r in rows if r["series"] == ON_FRONT), key=lambda r: r["time"])},
            "mark": {"type": "line", "interpolate": "step-after", "strokeDash": [4, 3], "color": "#0072B2"},
            "encoding": {"x": x, "y": y},
        },
        {
            "mark": {"type": "rule", "opacity": 0.6},
            "encoding": {"x": {**x, "field": "time_low"}, "x2": {"field": "time_high"}, "y": y, "color": colour},
        },
        {
            "mark": {"type": "rule", "opacity": 0.6},
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
    told = [f"{row['point']}: {row['time_shown']}, {row['shown']}" for row in rows if row["series"] == ON_FRONT]
    text = (
        f"The medians of each point's time and {analysis.metric}, with their intervals. On the Pareto front are the "
        "points that no other beats in both medians; intervals that overlap may hide ties."
    )
    return Figure("pareto", title, f"{text} {len(front)} of {len(rows)} points are on it: {listed(told)}.", spec)


def learning_curves(analysis: StudyAnalysis, results: Sequence[TrialResult]) -> Figure | LeftOut:
    """The metric over the time trained so far, a curve for each trial, coloured by its point."""
    title = f"Learning curves: {analysis.metric} over time"
    curves = {r.spec.identity: (r, rows) for r in latest(results) if len(rows := _curve(analysis, r)) > 1}
    if not curves:
        return LeftOut(title, f"no trial reported {analysis.metric} and its training time more than once")
    labels = list(dict.fromkeys(point_label(p.point) for p in analysis.points))
    found = {point_label(r.spec.point) for r, _ in curves.values()}
    names = [label for label in labels if label in found][:MAX_SERIES]
    drawn = [(r, rows) for r, rows in curves.values() if point_label(r.spec.point) in names][:MAX_CURVES]
    rows = [row for _, own in drawn for row in own]
    x = quantity("time", "trained for, s", zero=True)
    y = quantity("value", analysis.metric, axis=_axis_of(analysis.metric))
    spec = layers(
        rows,
        {
            "mark": {"type": "line", "strokeWidth": 1.5, "opacity": 0.8},
            "encoding": {"x": x, "y": y, "detail": {"field": "trial"}, "color": series(names), "opacity": PICKED},
        },
        {
            "params": list(PICK),
            "mark": {"type": "point", "filled": True, "size": 36},
            "encoding": {
                "x": x,
                "y": y,
                "color": series(names),
                "shape": series(names, "shape"),
                "opacity": PICKED,
                "tooltip": tooltip(trial="trial", time_shown="trained for", shown="metric"),
            },
        },
    )
    ends: dict[str, list[float]] = {}
    for r, own in drawn:
        ends.setdefault(point_label(r.spec.point), []).append(own[-1]["value"])
    told = [f"{name}: {units.score(analysis.metric, statistics.median(ends[name]))}" for name in names if name in ends]
    some = f" The first {len(names)} of {len(found)} points." if len(found) > len(names) else ""
    text = f"The {analysis.metric} over the time trained so far, without evaluations, a curve for each trial.{some}"
    return Figure("learning", title, f"{text} At the end, in the median: {listed(told)}.", spec)


def heat_map(analysis: StudyAnalysis) -> Figure | LeftOut:
    """The median time over two swept hyperparameters, for a study that sweeps two."""
    title = "Time over both hyperparameters"
    keys = analysis.space_keys
    if len(keys) != 2:
        return LeftOut("Heat map", f"it shows two swept hyperparameters, and there are {len(keys)}")
    timed = [(p, p.time_s) for p in analysis.points if p.time_s is not None]
    across, down = ([units.value_of(p.point.get(key)) for p, _ in timed] for key in keys)
    if min(len(set(across)), len(set(down))) < 2 or len(timed) > len(set(across)) * len(set(down)):
        return LeftOut("Heat map", "it takes two values or more of both hyperparameters with finished trials")
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
        for (point, time_s), x, y in zip(timed, across, down, strict=True)
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


def drift(analysis: StudyAnalysis, results: Sequence[TrialResult]) -> Figure | LeftOut:
    """Each trial's time over its point's median, by when it was started: a machine that changes shows."""
    title = "Drift over the study"
    medians = {point_key(p.point): p.time_s.value for p in analysis.points if p.time_s is not None}
    repeated = {point_key(p.point) for p in analysis.points if p.num_finished > 1}
    seen = []
    for result in latest(results):
        time_s = result.train_time_s if analysis.time_metric == TRAIN_TIME else result.wall_s
        key = point_key(result.spec.point)
        is_timed = result.state is TrialState.FINISHED and time_s and is_number(time_s) and result.started_at > 0
        if is_timed and time_s and key in repeated and key in medians:
            seen.append((result.started_at, result.spec.label, time_s, time_s / medians[key]))
    if len(seen) < 3:
        return LeftOut(title, "fewer than three finished trials are of a point with repeats")
    seen.sort()
    first = seen[0][0]
    rows = [
        {
            "minutes": (at - first) / 60,
            "trial": label,
            "value": ratio,
            "shown": f"{units.seconds(time_s)}, {units.ratio(ratio)}",
        }
        for at, label, time_s, ratio in seen[-MAX_DRAWN_TRIALS:]
    ]
    x, y = quantity("minutes", "started, minutes into the study"), quantity("value", "time over the point's median")
    spec = layers(
        rows,
        {
            "data": {"values": [{"value": 1}]},
            "mark": {"type": "rule", "strokeDash": [2, 4], "color": "#8a8f98"},
            "encoding": {"y": y},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 50, "color": "#0072B2", "opacity": 0.8},
            "encoding": {"x": x, "y": y, "tooltip": tooltip(trial="trial", shown="time")},
        },
    )
    half = len(seen) // 2
    early, late = (statistics.median(r for *_, r in part) for part in (seen[:half], seen[-half:]))
    worst = max(seen, key=lambda entry: abs(entry[3] - 1))
    text = (
        f"Each trial's time over the median of its point, by when it was started; without drift they lie around 1. "
        f"Medians: {units.ratio(early)} in the first half, {units.ratio(late)} in the second. "
        f"Farthest off: {worst[1]} with {units.ratio(worst[3])}."
    )
    return Figure("drift", title, text, spec)


def _curve(analysis: StudyAnalysis, result: TrialResult) -> list[Row]:
    """The metric at each report; empty where the trial told no training times, or failed."""
    trained_s, rows = 0.0, []
    if result.state is TrialState.FAILED:
        return []
    for report in result.reports:
        time_s, value = report.get(TRAIN_TIME), report.get(analysis.metric)
        if time_s is None or not is_number(time_s):
            return []
        trained_s += time_s
        if value is not None and is_number(value):
            rows.append(
                {
                    "series": point_label(result.spec.point),
                    "trial": result.spec.label,
                    "time": trained_s,
                    "value": value,
                    "time_shown": units.seconds(trained_s),
                    "shown": units.score(analysis.metric, value),
                }
            )
    step = -(-len(rows) // MAX_REPORTS)
    return [*rows[:-1:step], rows[-1]] if step > 1 else rows


def _ordered(timed: Sequence[tuple[PointAnalysis, Estimate]], key: str) -> list[str]:
    """The values of a hyperparameter in words, numbers from the smallest, words as they come."""
    values = [p.point.get(key) for p, _ in timed]
    if all(isinstance(v, (int, float)) for v in values):
        return [units.value_of(v) for v in sorted(v for v in values if isinstance(v, (int, float)))]
    return list(map(units.value_of, values))


def _time_title(analysis: StudyAnalysis) -> str:
    return "training time, s" if analysis.time_metric == TRAIN_TIME else "time of the whole trial, s"


def _axis_of(metric: str) -> Mapping[str, str]:
    return {"format": ".1%"} if units.is_share(metric) else {}
