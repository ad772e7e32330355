"""The figures of a study's trials: learning curves, and drift over the study."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.question import TRAIN_TIME, point_key
from raypar.report.figures_vega import (
    MAX_SERIES,
    PICK,
    PICKED,
    Figure,
    LeftOut,
    Row,
    is_number,
    layers,
    listed,
    metric_axis,
    point_axis,
    quantity,
    series,
    thinned,
    tooltip,
)
from raypar.study.trial import TrialResult, TrialState, gain, latest, point_label

MAX_LEGEND_LETTERS = 34
MAX_CURVES = 5  # of a point's trials; more hide each other
MAX_REPORTS = 1200  # of all curves
MAX_DRAWN_TRIALS = 500


def learning_curves(analysis: StudyAnalysis, results: Sequence[TrialResult]) -> Figure | LeftOut:
    """The metric over the time trained so far, a curve for each trial, coloured by its point."""
    title = f"Learning curves: {analysis.metric} over time"
    is_timed = any(TRAIN_TIME in report for r in results for report in r.reports)
    curves = {r.spec.identity: (r, rows) for r in latest(results) if len(rows := _curve(analysis, r, is_timed)) > 1}
    if not curves:
        return LeftOut(title, f"no trial reported {analysis.metric} more than once")
    if not is_timed:
        title = f"Learning curves: {analysis.metric} from report to report"
    labels = list(dict.fromkeys(point_label(p.point) for p in analysis.points))
    found = {point_label(r.spec.point) for r, _ in curves.values()}
    known = [label for label in labels if label in found]
    best = set(_best_first(analysis, known)[:MAX_SERIES])
    names = [label for label in known if label in best]
    called, title_of_names = _called(analysis, names)
    num_drawn: Counter[str] = Counter()
    drawn = []
    for r, own in curves.values():
        label = point_label(r.spec.point)
        if label in names and num_drawn[label] < MAX_CURVES:
            drawn.append((r, own))
            num_drawn[label] += 1
    rows = [row for _, own in drawn for row in thinned(own, MAX_REPORTS // len(drawn))]
    rows = [{**row, "series": called[row["series"]]} for row in rows]
    colour, shape = (series(list(called.values()), channel, title_of_names) for channel in ("color", "shape"))
    x = quantity("time", "trained for, s" if is_timed else "report", zero=True)
    y = quantity("value", analysis.metric, axis=metric_axis(analysis.metric))
    spec = layers(
        rows,
        {
            "mark": {"type": "line", "strokeWidth": 1.5, "opacity": 0.8},
            "encoding": {"x": x, "y": y, "detail": {"field": "trial"}, "color": colour, "opacity": PICKED},
        },
        {
            "params": list(PICK),
            "mark": {"type": "point", "filled": True, "size": 36},
            "encoding": {
                "x": x,
                "y": y,
                "color": colour,
                "shape": shape,
                "opacity": PICKED,
                "tooltip": tooltip(trial="trial", time_shown="trained for" if is_timed else "report", shown="metric"),
            },
        },
    )
    ends: dict[str, list[float]] = {}
    for r, own in drawn:
        ends.setdefault(point_label(r.spec.point), []).append(own[-1]["value"])
    told = [f"{name}: {units.score(analysis.metric, statistics.median(ends[name]))}" for name in names if name in ends]
    some = f" The {len(names)} best points of {len(found)}." if len(found) > len(names) else ""
    some += f" {len(drawn)} of {len(curves)} trials." if len(drawn) < len(curves) else ""
    over = "the time trained so far, without evaluations" if is_timed else "its reports, whose times are not known"
    text = f"The {analysis.metric} over {over}, a curve for each trial.{some}"
    return Figure("learning", title, f"{text} At the end, in the median: {listed(told)}.", spec)


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
        for at, label, time_s, ratio in seen
    ]
    x, y = quantity("minutes", "started, minutes into the study"), quantity("value", "time over the point's median")
    spec = layers(
        thinned(rows, MAX_DRAWN_TRIALS),
        {
            "data": {"values": [{"value": 1}]},
            "mark": {"type": "rule", "strokeDash": [2, 4], "color": "#8a8f98"},
            "encoding": {"y": y},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 50, "color": "#0072B2", "opacity": 1},
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


def _called(analysis: StudyAnalysis, labels: Sequence[str]) -> tuple[dict[str, str], str | None]:
    """What the points are called in the legend, and its title: their values and the keys, where labels are long."""
    points = {point_label(p.point): p.point for p in analysis.points}
    if max(map(len, labels)) <= MAX_LEGEND_LETTERS:
        return {label: label for label in labels}, None
    axis, names = point_axis([points[label] for label in labels])
    return dict(zip(labels, names, strict=True)), axis["title"]


def _best_first(analysis: StudyAnalysis, labels: Sequence[str]) -> list[str]:
    """The points by their median metric; what has none comes last."""
    gains = {point_label(p.point): gain(analysis.mode, p.metric.value) for p in analysis.points if p.metric is not None}
    return sorted(labels, key=lambda label: gains.get(label, -math.inf), reverse=True)


def _curve(analysis: StudyAnalysis, result: TrialResult, is_timed: bool) -> list[Row]:
    """The metric at each report, over the training time so far, or else over the reports; empty where that lacks."""
    so_far, rows = 0.0, []
    if result.state is TrialState.FAILED:
        return []
    for report in result.reports:
        time_s, value = report.get(TRAIN_TIME) if is_timed else 1.0, report.get(analysis.metric)
        if time_s is None or not is_number(time_s):
            return []
        so_far += time_s
        if value is not None and is_number(value):
            rows.append(
                {
                    "series": point_label(result.spec.point),
                    "trial": result.spec.label,
                    "time": so_far,
                    "value": value,
                    "time_shown": units.seconds(so_far) if is_timed else str(int(so_far)),
                    "shown": units.score(analysis.metric, value),
                }
            )
    return rows
