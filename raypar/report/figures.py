"""The figures of a study: `figures_of`. Each comes with its title and a text alternative; drawn by Vega-Lite.

A figure that the study has no data for is left out, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.laws import Fit
from raypar.analysis.scaling import WorkerGroup
from raypar.analysis.stats import Estimate
from raypar.errors import RayparError
from raypar.report.figures_points import goodput_curves, heat_map, metric_heat_map, pareto
from raypar.report.figures_trials import breakdown_bars, drift, learning_curves, times, trial_parts
from raypar.report.vega import (
    GREY,
    KINDS,
    MAX_SERIES,
    PICK,
    PICKED,
    Figure,
    OmittedFigure,
    Row,
    bounds,
    layers,
    listed,
    quantity,
    series,
    tooltip,
    within,
    workers_axis,
)
from raypar.study.trial import TrialResult

NUM_CURVE_POINTS = 40
BESIDE = 1.015  # from group to group
NO_INTERVALS = 2  # resamples: the curves of the laws are drawn without
IDEAL = "ideal"
DASHES = ([2, 4], [1, 0], [8, 4])
NO_GROUPS = "no two points with finished trials differ only in num_workers"


def figures_of(analysis: StudyAnalysis, results: Sequence[TrialResult]) -> tuple[Figure | OmittedFigure, ...]:
    """Every figure, or why it is left out, in the order of a report.

    Args:
        analysis: what the results say.
        results: the study's trials, in any order.
    """
    return (
        speedup_curves(analysis),
        efficiency_curves(analysis),
        times(analysis),
        trial_parts(analysis, results),
        breakdown_bars(analysis),
        pareto(analysis),
        learning_curves(analysis, results),
        goodput_curves(analysis),
        heat_map(analysis),
        metric_heat_map(analysis),
        drift(analysis, results),
    )


def write_figures(figures: Sequence[Figure | OmittedFigure], folder: Path, kinds: Sequence[str] = KINDS) -> list[Path]:
    """Draw each figure into files of its own, ``speedup.svg``, ``speedup.png`` …

    Raises:
        RayparError: the folder can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RayparError(f"{folder}: can't be written: {error.strerror}", hint="choose another folder") from None
    written = []
    for figure in figures:
        if isinstance(figure, Figure):
            for kind in kinds:
                figure.save(path := folder / f"{figure.key}.{kind}")
                written.append(path)
    return written


def speedup_curves(analysis: StudyAnalysis) -> Figure | OmittedFigure:
    """Speedups over the number of workers with their intervals, the ideal line, and the laws fitted to them."""
    title = "Speedup over workers"
    groups = analysis.worker_groups[:MAX_SERIES]
    if not groups:
        return OmittedFigure(title, NO_GROUPS)
    named = _named(groups)
    rows = [
        row
        for name, group in named.items()
        for row in _group_rows(group, name, group.speedups, lambda e: units.ratio_interval(e.value, e.low, e.high))
    ]
    laws = list(_law_rows(named, max(row["workers"] for row in rows)))
    kinds = list(dict.fromkeys(row["kind"] for row in laws))
    x = workers_axis([row["workers"] for row in rows])
    y = quantity("value", "speedup", log2=True, axis={"format": "~g"})
    dashes: Row = {
        "field": "kind",
        "type": "nominal",
        "title": None,
        "scale": {"domain": [IDEAL, *kinds], "range": DASHES[: 1 + len(kinds)]},
        "legend": {"orient": "bottom", "columns": 1, "symbolType": "stroke", "symbolSize": 500, "labelLimit": 260},
    }
    detail: Row = {"field": "series", "type": "nominal"}
    fitted: Row = {
        "data": {"values": laws},
        "mark": {"type": "line", "strokeWidth": 1.5},
        "encoding": {"x": x, "y": y, "strokeDash": dashes, "color": series(list(named)), "opacity": PICKED},
    }
    joined: Row = {
        "mark": {"type": "line", "strokeWidth": 1.5},
        "encoding": {"x": {**x, "field": "beside"}, "y": y, "color": series(list(named)), "opacity": PICKED},
    }
    shown, cut = within(_side_by_side(rows, list(named)), log=True)
    spec = layers(
        shown,
        {
            "data": {"values": list(_ideal_rows(groups))},
            "mark": {"type": "line", "strokeWidth": 1.5, "color": GREY},
            "encoding": {"x": x, "y": y, "strokeDash": dashes, "detail": detail},
        },
        fitted if laws else joined,
        *_points(list(named), x, y, "speedup"),
    )
    drawn_laws = f"the fitted laws ({', '.join(kinds)})" if kinds else "no law: too few worker counts to fit one"
    told = listed([f"{row['label']}: {row['shown']}" for row in rows])
    text = f"Speedup against the number of workers, both on logarithmic scales, with the ideal line and {drawn_laws}."
    return Figure("speedup", title, f"{text}{_first_of(analysis)} Measured: {told}.{cut}", spec)


def efficiency_curves(analysis: StudyAnalysis) -> Figure | OmittedFigure:
    """Parallel efficiencies over the number of workers with their intervals; 100 % is ideal."""
    title = "Parallel efficiency over workers"
    groups = analysis.worker_groups[:MAX_SERIES]
    if not groups:
        return OmittedFigure(title, NO_GROUPS)
    named = _named(groups)
    rows: list[Row] = []
    for name, group in named.items():
        scaled = {n: s.scaled(group.baseline / n) for n, s in group.speedups.items()}
        rows += _group_rows(group, name, scaled, lambda e: units.percent_interval(e.value, e.low, e.high))
    x = workers_axis([row["workers"] for row in rows])
    y = quantity("value", "efficiency", zero=True, axis={"format": ".0%"})
    shown, cut = within(_side_by_side(rows, list(named)))
    spec = layers(
        shown,
        {
            "data": {"values": [{"value": 1}]},
            "mark": {"type": "rule", "strokeDash": DASHES[0], "color": GREY, "strokeWidth": 1.5},
            "encoding": {"y": y},
        },
        {
            "mark": {"type": "line", "strokeWidth": 1.5},
            "encoding": {"x": {**x, "field": "beside"}, "y": y, "color": series(list(named)), "opacity": PICKED},
        },
        *_points(list(named), x, y, "efficiency"),
    )
    told = listed([f"{row['label']}: {row['shown']}" for row in rows])
    text = "Parallel efficiency against the number of workers; the dotted line at 100 % is ideal."
    return Figure("efficiency", title, f"{text}{_first_of(analysis)} Measured: {told}.{cut}", spec)


def _points(names: Sequence[str], x: Row, y: Row, what: str) -> Iterator[Row]:
    """The layers of measured values: a bar for the interval, a mark for the value."""
    x = {**x, "field": "beside"}
    colour, shape = series(names), series(names, "shape")
    yield {
        "mark": {"type": "rule", "strokeWidth": 2},
        "encoding": {
            "x": x,
            "y": {**y, "field": "value_low"},
            "y2": {"field": "value_high"},
            "color": colour,
            "opacity": PICKED,
        },
    }
    yield {
        "params": list(PICK),
        "mark": {"type": "point", "filled": True, "size": 80},
        "encoding": {
            "x": x,
            "y": y,
            "color": colour,
            "shape": shape,
            "opacity": PICKED,
            "tooltip": tooltip(series="point", workers="workers", shown=what, repeats="repeats"),
        },
    }


def _group_rows(
    group: WorkerGroup,
    name: str,
    values: Mapping[int, Estimate],
    show: Callable[[Estimate], str],
) -> Iterator[Row]:
    for num_workers, estimate in values.items():
        yield {
            "series": name,
            "workers": num_workers,
            **bounds(estimate),
            "shown": "1 by definition" if num_workers == group.baseline else show(estimate),
            "repeats": estimate.num_samples,
            "label": (f"{name}, " if group.label else "") + units.counted(num_workers, "worker"),
        }


def _side_by_side(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """The rows with ``beside``, where they are drawn: intervals at the same number of workers don't hide each other."""
    places = {name: i - (len(names) - 1) / 2 for i, name in enumerate(names)}
    return [{**row, "beside": row["workers"] * BESIDE ** places[row["series"]]} for row in rows]


def _named(groups: Sequence[WorkerGroup]) -> dict[str, WorkerGroup]:
    """The groups by what they are called; one that shares all it sweeps with no other is called ``measured``."""
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
            found = [parameter.value for parameter in fit.parameters]
            base = fit.law.speedup(group.baseline, *found)
            for n in np.geomspace(min(group.speedups), farthest, NUM_CURVE_POINTS):
                speedup = float(fit.law.speedup(n, *found) / base)
                if speedup > 0:
                    yield {"series": name, "kind": fit.law.name, "workers": float(n), "value": speedup}


def _ideal_rows(groups: Sequence[WorkerGroup]) -> Iterator[Row]:
    """The ideal lines, one for each baseline that there is."""
    farthest = max(max(group.speedups) for group in groups)
    nearest = min(min(group.speedups) for group in groups)
    for base in sorted({group.baseline for group in groups}):
        for n in (nearest, farthest):
            yield {"series": str(base), "kind": IDEAL, "workers": n, "value": n / base}


def _first_of(analysis: StudyAnalysis) -> str:
    """What is not drawn of the groups; empty where all are."""
    num = len(analysis.worker_groups)
    return f" The first {MAX_SERIES} of {num} groups of points are drawn." if num > MAX_SERIES else ""
