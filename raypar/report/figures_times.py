"""The figures of a study's times: each point's, where a trial's time goes, and where a step's time goes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.breakdown import PARTS
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import TRAIN_TIME, point_key
from raypar.analysis.stats import Estimate
from raypar.report.breakdown import NAMES, WORTH_A_WORD
from raypar.report.figures_vega import (
    MAX_SHORT_NAME,
    PICKED,
    Figure,
    LeftOut,
    Row,
    Spec,
    bounds,
    layers,
    listed,
    point_axis,
    quantity,
    tooltip,
    within,
)
from raypar.study.trial import TrialResult, TrialState, latest, point_label

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


def times(analysis: StudyAnalysis) -> Figure | LeftOut:
    """The median time of each point with its interval."""
    what = "training time" if analysis.time_metric == TRAIN_TIME else "time of the whole trial"
    title = f"Each point's {what}"
    timed = [(p, p.time_s) for p in analysis.points if p.time_s is not None]
    if not timed:
        return LeftOut(title, "no trial finished with a time")
    drawn = _fastest(timed)
    y, names = point_axis([p.point for p, _ in drawn])
    rows = [
        {
            "point": name,
            **bounds(time_s),
            "shown": units.seconds_interval(time_s.value, time_s.low, time_s.high),
            "repeats": time_s.num_samples,
            "kind": "baseline" if point.is_baseline else "point",
        }
        for (point, time_s), name in zip(drawn, names, strict=True)
    ]
    shown, cut = within(rows)
    colour = {
        "field": "kind",
        "type": "nominal",
        "title": None,
        "scale": {"domain": ["baseline", "point"], "range": ["#D55E00", "#0072B2"]},
        "legend": {"orient": "top", **OFF_AXIS} if any(row["kind"] == "baseline" for row in rows) else None,
    }
    shape = {**colour, "scale": {"domain": ["baseline", "point"], "range": ["square", "circle"]}}
    spec = layers(
        shown,
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
    more = f" The {MAX_BARS} fastest of {len(timed)} points." if len(timed) > MAX_BARS else ""
    told = [f"{point_label(p.point)}: {row['shown']}" for (p, _), row in zip(drawn, rows, strict=True)]
    return Figure(
        "times", title, f"The median of each point's {what}, with its interval.{more} {listed(told)}.{cut}", spec
    )


def breakdown_bars(analysis: StudyAnalysis) -> Figure | LeftOut:
    """Where a step's time goes, stacked, for each point that was looked into."""
    title = "Where a step's time goes"
    if not analysis.profiles:
        return LeftOut(title, "no point was looked into: `raypar study FILE --profile` does, after the training")
    shown = analysis.profiles[:MAX_BARS]
    rows: list[Row] = []
    told = []
    y, names = point_axis([point for point, _ in shown])
    for (point, profile), name in zip(shown, names, strict=True):
        mean, label = profile.mean, point_label(point)
        for i, part in enumerate(PARTS):
            rows.append(
                {
                    "point": name,
                    "part": NAMES[part],
                    "order": i,
                    "value": 1e3 * mean.parts[part],
                    "shown": f"{1e3 * mean.parts[part]:.3g} ms, {units.percent(mean.parts[part] / mean.step_s)}",
                }
            )
        large = sorted((p for p in PARTS if mean.parts[p] >= WORTH_A_WORD * mean.step_s), key=lambda p: -mean.parts[p])
        parts = ", ".join(f"{NAMES[p]} {units.percent(mean.parts[p] / mean.step_s)}" for p in large)
        told.append(f"{label}: a step of {units.seconds(mean.step_s)}, of it {parts}")
    colours = dict(zip((NAMES[p] for p in PARTS), PART_COLOURS, strict=True))
    spec = _stacked(rows, y, colours, "step, ms")
    return Figure(
        "breakdown", title, f"Bars of the mean step's parts, stacked, with the profiler. {listed(told)}.", spec
    )


def trial_parts(analysis: StudyAnalysis, results: Sequence[TrialResult]) -> Figure | LeftOut:
    """Where a whole trial's time goes, stacked, for each point: the mean of its finished trials."""
    title = "Where a trial's time goes"
    by_point: dict[object, list[Mapping[str, float]]] = {}
    for result in latest(results):
        if parts := _parts_of(result):
            by_point.setdefault(point_key(result.spec.point), []).append(parts)
    timed = [(p, p.time_s) for p in analysis.points if p.time_s is not None and point_key(p.point) in by_point]
    if not timed:
        return LeftOut(title, "raypar could not look into any finished trial")
    rows: list[Row] = []
    told = []
    drawn = _fastest(timed)
    y, names = point_axis([p.point for p, _ in drawn])
    for (point, _), name in zip(drawn, names, strict=True):
        own = by_point[point_key(point.point)]
        means = {part: statistics.fmean(parts[part] for parts in own) for part in TRIAL_COLOURS}
        whole, label = sum(means.values()), point_label(point.point)
        for i, (part, seconds) in enumerate(means.items()):
            shown = f"{units.seconds(seconds)}, {units.percent(seconds / whole)}"
            rows.append({"point": name, "part": part, "order": i, "value": seconds, "shown": shown})
        told.append(f"{label}: {units.seconds(whole)}, of it training {units.percent(means['training'] / whole)}")
    spec = _stacked(rows, y, TRIAL_COLOURS, "trial, s")
    more = f" The {MAX_BARS} fastest of {len(timed)} points." if len(timed) > MAX_BARS else ""
    text = f"Bars of the mean trial's parts, stacked, from the start of its processes to their end.{more}"
    return Figure("trial_parts", title, f"{text} {listed(told)}.", spec)


def _parts_of(result: TrialResult) -> dict[str, float]:
    """The parts of a finished trial, in seconds; empty where they are not known."""
    if result.state is not TrialState.FINISHED or not result.wall_s or result.train_time_s is None:
        return {}
    data = result.data_time_s or 0.0
    known = {
        "start-up": max(0.0, (result.startup_s or 0.0) - data),
        "loading data": data,
        "warm-up": result.warmup_s or 0.0,
        "training": result.train_time_s,
        "evaluation": result.eval_time_s or 0.0,
    }
    return {**known, "rest": max(0.0, result.wall_s - sum(known.values()))}


def _fastest(timed: Sequence[tuple[PointAnalysis, Estimate]]) -> list[tuple[PointAnalysis, Estimate]]:
    """All, in their order, or of too many those that take the least time, the fastest first."""
    return list(timed) if len(timed) <= MAX_BARS else sorted(timed, key=lambda e: e[1].value)[:MAX_BARS]


def _stacked(rows: Sequence[Row], y: Spec, colours: Mapping[str, str], title: str) -> Spec:
    """Bars of parts, one for each point; parts that are nothing everywhere are left out."""
    seen = [part for part in colours if any(row["value"] > 0 for row in rows if row["part"] == part)]
    num_bars = len({row["point"] for row in rows})
    return layers(
        [row for row in rows if row["part"] in seen],
        {
            "params": [{"name": "picked", "select": {"type": "point", "fields": ["part"]}, "bind": "legend"}],
            "mark": {"type": "bar", "stroke": "white", "strokeWidth": 0.5},
            "encoding": {
                "y": y,
                "x": {**quantity("value", title, zero=True), "stack": "zero"},
                "color": {
                    "field": "part",
                    "type": "nominal",
                    "title": None,
                    "scale": {"domain": seen, "range": [colours[name] for name in seen]},
                    "legend": {
                        "orient": "top",
                        "columns": 1 if any(len(n) > MAX_SHORT_NAME for n in seen) else 2,
                        **OFF_AXIS,
                    },
                },
                "order": {"field": "order", "type": "quantitative"},
                "opacity": PICKED,
                "tooltip": tooltip(point="point", part="part", shown="time"),
            },
        },
        height=max(80, 34 * num_bars),
    )
