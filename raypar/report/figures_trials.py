"""Figures of a study's trials: times, breakdowns, learning curves, drift."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.breakdown import PARTS
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import TRAIN_TIME, point_key
from raypar.analysis.stats import Estimate
from raypar.report import vega
from raypar.report.profile import NAMES, WORTH_A_WORD
from raypar.report.vega import Figure, OmittedFigure, Row, Spec, is_number, layer, layers, listed, nominal, quantity
from raypar.study.trial import TrialResult, TrialState, gain, latest, point_label

MAX_BARS = 40
OFF_AXIS = {"offset": 24}  # of a legend: the axis has its title there
# Eight parts of a step: Okabe and Ito's colours, with two greys for what is neither work nor communication.
PART_COLOURS = ("#E69F00", "#56B4E9", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#8a8f98", "#c3c7cd")
TRIAL_COLOURS: Mapping[str, str] = {
    "start-up": "#CC79A7",
    "loading data": "#E69F00",
    "warm-up": "#56B4E9",
    "training": "#0072B2",
    "evaluation": "#009E73",
    "rest": "#c3c7cd",
}


def times(analysis: StudyAnalysis, _: Sequence[TrialResult]) -> Figure | OmittedFigure:
    """The median time of each point with its interval."""
    what = "training time" if analysis.time_metric == TRAIN_TIME else "time of the whole trial"
    title = f"Each point's {what}"
    timed = [(p, p.time_s) for p in analysis.points if p.time_s is not None]
    if not timed:
        return OmittedFigure(title, "no trial finished with a time")
    drawn, more = _fastest(timed)
    y, names = vega.point_axis([p.point for p, _ in drawn])
    rows = [
        {
            "point": name,
            **vega.bounds(time_s),
            "shown": units.seconds_interval(time_s.value, time_s.low, time_s.high),
            "repeats": time_s.num_samples,
            "kind": "baseline" if point.is_baseline else "point",
        }
        for (point, time_s), name in zip(drawn, names, strict=True)
    ]
    shown, cut = vega.within(rows)
    kinds = ["baseline", "point"]
    legend = {"orient": "top", **OFF_AXIS} if any(row["kind"] == "baseline" for row in rows) else None
    colour = nominal("kind", scale={"domain": kinds, "range": ["#D55E00", "#0072B2"]}, legend=legend)
    spec = layers(
        shown,
        layer(
            {"type": "rule", "strokeWidth": 2},
            y=y,
            x={"field": "value_low", "type": "quantitative"},
            x2={"field": "value_high"},
        ),
        layer(
            {"type": "point", "filled": True, "size": 80, "opacity": 1},
            y=y,
            x=quantity("value", f"{what}, s", zero=True),
            color=colour,
            shape={**colour, "scale": {"domain": kinds, "range": ["square", "circle"]}},
            tooltip=vega.tooltip(point="point", shown=what, repeats="repeats"),
        ),
        height=max(80, 24 * len(rows)),
    )
    words = listed([f"{point_label(p.point)}: {row['shown']}" for (p, _), row in zip(drawn, rows, strict=True)])
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
    text = f"Bars of the mean step's parts, stacked, with the profiler. {listed(words)}."
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
    return Figure("trial_parts", title, f"{text} {listed(words)}.", _stacked(rows, y, TRIAL_COLOURS, "trial, s"))


def _parts_of(result: TrialResult) -> dict[str, float]:
    """The parts of a finished trial, in seconds; empty where they are not known."""
    if result.state is not TrialState.FINISHED or not result.wall_s or result.train_time_s is None:
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
    if not is_timed:
        title = f"Learning curves: {metric} from report to report"
    with_curve = {point_label(r.spec.point) for r, _ in curves.values()}
    labels = [label for p in analysis.points if (label := point_label(p.point)) in with_curve]
    best = set(_best_first(analysis, labels)[: vega.MAX_SERIES])
    labels = [label for label in dict.fromkeys(labels) if label in best]
    names, legend_title = _legend_names(analysis, labels)
    num_drawn: Counter[str] = Counter()
    drawn = []
    for r, curve in curves.values():
        label = point_label(r.spec.point)
        if label in names and num_drawn[label] < MAX_CURVES:
            drawn.append((label, curve))
            num_drawn[label] += 1
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
    return Figure("learning", title, f"{text} At the end, in the median: {listed(words)}.", spec)


def drift(analysis: StudyAnalysis, results: Sequence[TrialResult]) -> Figure | OmittedFigure:
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
        return OmittedFigure(title, "fewer than three finished trials are of a point with repeats")
    seen.sort()
    first = seen[0][0]
    rows: list[Row] = [
        {
            "minutes": (at - first) / 60,
            "trial": label,
            "value": over,
            "shown": f"{units.seconds(s)}, {units.ratio(over)}",
        }
        for at, label, s, over in seen
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


def _legend_names(analysis: StudyAnalysis, labels: Sequence[str]) -> tuple[dict[str, str], str | None]:
    """Return the points' names in the legend, and its title: values and keys where labels are long."""
    points = {point_label(p.point): p.point for p in analysis.points}
    if max(map(len, labels)) <= MAX_LEGEND_LETTERS:
        return {label: label for label in labels}, None
    axis, names = vega.point_axis([points[label] for label in labels])
    return dict(zip(labels, names, strict=True)), axis["title"]


def _best_first(analysis: StudyAnalysis, labels: Sequence[str]) -> list[str]:
    """The points by their median metric; what has none comes last."""
    mode = analysis.question.mode
    gains = {point_label(p.point): gain(mode, p.metric.value) for p in analysis.points if p.metric is not None}
    return sorted(labels, key=lambda label: gains.get(label, -math.inf), reverse=True)


def _curve(analysis: StudyAnalysis, result: TrialResult, is_timed: bool) -> list[Row]:
    """The metric at each report, over the training time so far, or else over the reports; empty where that lacks."""
    so_far, rows = 0.0, []
    if result.state is TrialState.FAILED:
        return []
    for report in result.reports:
        time_s, value = report.get(TRAIN_TIME) if is_timed else 1.0, report.get(analysis.question.metric)
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
                    "shown": units.score(analysis.question.metric, value),
                }
            )
    return rows
