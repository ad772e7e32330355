"""Shared parts of the figures' Vega-Lite specs, and drawing as SVG or PNG.

Fields have fixed names. A study's names appear only in values and titles, so that a name with a dot, a bracket or an
expression stays text. Colours are those of Okabe and Ito, "Color Universal Design" (2008), without black and yellow,
which are hard to see on one of the two backgrounds. Every colour has its own shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from raypar import units
from raypar.analysis.stats import Estimate
from raypar.errors import RayparError
from raypar.reporting.text import replacing, strip_control
from raypar.study.metric import PERCENT, SHARE, Metric
from raypar.study.space import Value
from raypar.study.trial import point_label

Row: TypeAlias = dict[str, Any]
Spec: TypeAlias = dict[str, Any]

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
MAX_SERIES = len(COLOURS)
MAX_SHORT_NAME = 22  # characters: two names fit side by side on a phone
WIDTH_PX, HEIGHT_PX = 560, 240
TICK_PX = 70
BESIDE_PX = 8  # between an interval and the dots of its trials
EDGE = 1.08  # factor from the outermost worker counts to the figure's sides
MAX_BOUND_FACTOR = 4
KINDS = ("svg", "png")
INK, PAPER = "#1b1f24", "#ffffff"
GREY = "#8a8f98"
PLAIN = (GREY, "circle")


@dataclass(frozen=True)
class Figure:
    """Figure of a study."""

    key: str  # name in files and links
    title: str
    caption: str  # its message in one or two sentences
    spec: Mapping[str, Any]  # for Vega-Lite, without size and text colours

    def save(self, path: Path | str) -> None:
        """Draw the figure into a .svg or .png file. Raises RayparError."""
        path = Path(path)
        kind = path.suffix.lower().removeprefix(".")
        if kind not in KINDS:
            raise RayparError(f"{path}: unknown format {kind!r}", hint="end the name in .svg or .png")
        with replacing(path) as there:
            there.write_bytes(drawn(self, "png" if kind == "png" else "svg"))

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """Return the figure and its text for a notebook."""
        return {"image/svg+xml": drawn(self, "svg").decode(), "text/plain": f"{self.title}. {self.caption}"}


@dataclass(frozen=True)
class OmittedFigure:
    """Figure that the study has no data for, with the reason."""

    title: str
    reason: str


def for_page(figure: Figure, width: int | str = "container") -> Spec:
    """Return the spec for drawing in a page, with the page's width and text colour."""
    return {**_without_control(figure.spec), "width": width, "config": _config("currentColor")}


def static_svg(figure: Figure) -> str:
    """Return an SVG for a page, in the page's text colour."""
    import vl_convert

    return vl_convert.vegalite_to_svg(for_page(figure, WIDTH_PX))


def drawn(figure: Figure, kind: Literal["svg", "png"]) -> bytes:
    """Return the content of a file with the figure on a white background."""
    import vl_convert

    spec = {**_without_control(figure.spec), "width": WIDTH_PX, "background": PAPER, "config": _config(INK)}
    spec["title"] = {"text": strip_control(figure.title), "anchor": "start"}
    if kind == "png":
        return vl_convert.vegalite_to_png(spec, scale=2)
    return vl_convert.vegalite_to_svg(spec).encode()


def _without_control(value: Any) -> Any:
    """Return the spec without control characters, which SVG forbids and which crash vl-convert."""
    if isinstance(value, str):
        return strip_control(value)
    if isinstance(value, Mapping):
        return {_without_control(key): _without_control(each) for key, each in value.items()}
    return [_without_control(each) for each in value] if isinstance(value, (list, tuple)) else value


def layer(mark: Spec | str, **encoding: Any) -> Spec:
    """Return a layer: a mark with its channels."""
    return {"mark": mark, "encoding": encoding}


def layers(rows: Sequence[Row], *marks: Spec, height: int = HEIGHT_PX) -> Spec:
    """Return layers over the same rows. A quantitative x axis gets as many ticks as fit."""
    for mark in marks:
        x = mark["encoding"].get("x", {})
        if x.get("type") == "quantitative" and "values" not in x.get("axis", {}):
            x["axis"] = {**x.get("axis", {}), "tickCount": {"expr": f"max(2, floor(width / {TICK_PX}))"}}
    # JSON has no infinity.
    values = [{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()} for row in rows]
    return {"data": {"values": values}, "height": height, "layer": list(marks)}


def quantity(name: str, title: str, *, log2: bool = False, zero: bool = False, **more: Any) -> Spec:
    """Return the channel of a number."""
    scale: Spec = {"type": "log", "base": 2} if log2 else {"zero": zero}
    return {"field": name, "type": "quantitative", "title": title, "scale": {**scale, **more.pop("scale", {})}, **more}


def nominal(name: str, title: str | None = None, **more: Any) -> Spec:
    """Return the channel of a name."""
    return {"field": name, "type": "nominal", "title": title, **more}


def workers_axis(counts: Sequence[int]) -> Spec:
    """Return the channel of the number of workers, with a tick at each count."""
    ends = [min(counts) / EDGE, max(counts) * EDGE]
    axis = {"values": sorted(set(counts)), "format": "d", "grid": False}
    return quantity("workers", "workers", log2=True, axis=axis, scale={"domain": ends, "nice": False})


def point_axis(points: Sequence[Mapping[str, Value]]) -> tuple[Spec, list[str]]:
    """Return the axis of points, with the keys as title, and the points' names, which are their values."""
    keys = list(dict.fromkeys(key for point in points for key in point))
    names = [", ".join(units.value_of(point.get(key)) for key in keys) or point_label(point) for point in points]
    if len(set(names)) < len(names):
        names = [point_label(point) for point in points]
    axis = {"titleAngle": 0, "titleAlign": "left", "titleAnchor": "start", "titleBaseline": "bottom", "titleY": -4}
    return nominal("point", ", ".join(keys) or None, sort=None, axis=axis), names


def series(names: Sequence[str], channel: Literal["color", "shape"] = "color", title: str | None = None) -> Spec:
    """Return the colours or shapes of at most `MAX_SERIES` series, in this order."""
    styles = COLOURS if channel == "color" else SHAPES
    scale = {"domain": list(names), "range": list(styles[: len(names)])}
    legend = {"orient": "top", "labelLimit": 260, "columns": legend_columns(names)} if len(names) > 1 else None
    return nominal("series", title, scale=scale, legend=legend)


def legend_columns(names: Sequence[str]) -> int:
    """Return how many names fit side by side in a legend."""
    return 1 if max(map(len, names), default=0) > MAX_SHORT_NAME else 2


def metric_axis(metric: Metric) -> Spec:
    """Return the axis of the study's metric: shares and percentages have a percent sign."""
    return {SHARE: {"format": ".3~%"}, PERCENT: {"labelExpr": "datum.label + '%'"}}.get(metric.unit, {})


def tooltip(**titles: str) -> list[Spec]:
    """Return the fields that a tooltip shows, with their titles."""
    return [nominal(name, title) for name, title in titles.items()]


def pick(field: str) -> list[Spec]:
    """Return the parameters that make a click in the legend of a layer highlight a series."""
    return [{"name": "picked", "select": {"type": "point", "fields": [field]}, "bind": "legend"}]


PICKED: Mapping[str, Any] = {"condition": {"param": "picked", "value": 1}, "value": 0.12}


def line_layer(x: Spec, y: Spec, **channels: Any) -> Spec:
    """Return a layer of curves."""
    return layer({"type": "line", "strokeWidth": 1.5, "clip": True}, x=x, y=y, **channels, opacity=PICKED)


def point_layer(
    names: Sequence[str], x: Spec, y: Spec, *, size: int = 80, title: str | None = None, **tips: str
) -> Spec:
    """Return a layer with a mark for each row in its series' colour and shape; `tips`: see `tooltip`."""
    drawn = layer(
        {"type": "point", "filled": True, "size": size},
        x=x,
        y=y,
        color=series(names, title=title),
        shape=series(names, "shape", title),
        opacity=PICKED,
        tooltip=tooltip(**tips),
    )
    return {"params": pick("series"), **drawn}


def trial_layer(rows: Sequence[Row], x: Spec, y: Spec, what: str, *, beside: str = "", **channels: Any) -> Spec:
    """Return a layer of small dots, one for each trial.

    Args:
        what: title of the value in the tooltip.
        beside: direction of the offset from the interval, ``xOffset`` or ``yOffset``; empty: no offset.
    """
    mark = {"type": "point", "filled": True, "size": 28, "opacity": 0.75, "color": GREY}
    if beside:
        mark[beside] = BESIDE_PX
    return {"data": {"values": rows}, **layer(mark, x=x, y=y, tooltip=tooltip(trial="trial", shown=what), **channels)}


def interval_layers(rows: Sequence[Row], along: Literal["x", "y"], x: Spec, y: Spec, **channels: Any) -> list[Spec]:
    """Return the intervals of `within` along x or y, with an arrow where an interval is cut."""
    scaled, other, across = (x, "y", y) if along == "x" else (y, "x", x)
    name, shapes = scaled["field"], ("left", "right") if along == "x" else ("down", "up")
    low, high = ({**scaled, "field": f"{name}_{side}"} for side in ("low", "high"))
    ends = {along: low, f"{along}2": {"field": high["field"]}, other: across}
    marks = [layer({"type": "rule", "strokeWidth": 2}, **ends, **channels)]
    for bound, shape in zip((low, high), shapes, strict=True):
        if cut := [row for row in rows if row.get(f"{bound['field']}_is_cut")]:
            arrow = {"type": "point", "filled": True, "shape": f"triangle-{shape}", "size": 70, "opacity": 1}
            marks.append({"data": {"values": cut}, **layer(arrow, **{along: bound, other: across}, **channels)})
    return marks


def styled(field: str, styles: Mapping[str, tuple[str, str]], **legend: int) -> tuple[Spec, Spec]:
    """Return the channels of colours and shapes by name, with a legend for two or more."""
    shown = {"orient": "top", "columns": 3, **legend} if len(styles) > 1 else None
    colour, shape = (
        nominal(field, scale={"domain": list(styles), "range": list(each)}, legend=shown)
        for each in zip(*styles.values(), strict=True)
    )
    return colour, shape


def median_layer(x: Spec, y: Spec, **channels: object) -> Spec:
    """Return a layer of large marks, one for each point."""
    return layer({"type": "point", "filled": True, "size": 90, "opacity": 1}, x=x, y=y, **channels)


def reference_layer(at: Sequence[float] = (1,), dash: Sequence[int] = (2, 4), **channel: Spec) -> Spec:
    """Return dotted lines at these values of the given x or y."""
    mark = {"type": "rule", "strokeDash": list(dash), "color": GREY, "strokeWidth": 1.5}
    return {"data": {"values": [{"value": value} for value in at]}, **layer(mark, **channel)}


def stroke_legend() -> Spec:
    """Return the legend of line dashes below the figure."""
    return {"orient": "bottom", "columns": 1, "symbolType": "stroke", "symbolSize": 500, "labelLimit": 260}


def bounds(estimate: Estimate, name: str = "value") -> Row:
    """Return the fields ``value``, ``value_low`` and ``value_high``; without an interval, bounds equal the value."""
    low, high = (
        estimate.value if bound is None or math.isnan(bound) else bound for bound in (estimate.low, estimate.high)
    )
    return {name: estimate.value, f"{name}_low": low, f"{name}_high": high}


def within(
    rows: Sequence[Row], name: str = "value", trials: Sequence[Row] = (), *, log: bool = False
) -> tuple[list[Row], Spec]:
    """Return the rows with bounds cut to the range of the values, and the scale if a bound was cut.

    The interval of two trials may span a factor of a million, which would hide everything else. Cut bounds lie at the
    ends of the scale and are marked by the fields ``value_low_is_cut`` and ``value_high_is_cut``.
    """
    values = [row[name] for row in (*rows, *trials)]
    least, most = min(values), max(values)
    margin = max(most - least, abs(most))
    limits = (least / MAX_BOUND_FACTOR, most * MAX_BOUND_FACTOR) if log else (least - margin, most + margin)
    if least >= 0:
        limits = max(0.0, limits[0]), limits[1]
    low, high = f"{name}_low", f"{name}_high"
    if all(limits[0] <= row[low] and row[high] <= limits[1] for row in rows):
        return list(rows), {}
    kept = []
    for row in rows:
        cut = {low: max(row[low], limits[0]), high: min(row[high], limits[1])}
        kept.append({**row, **cut, **{f"{bound}_is_cut": cut[bound] != row[bound] for bound in cut}})
    ends = min(least, *(row[low] for row in kept)), max(most, *(row[high] for row in kept))
    return kept, {"domain": ends if log or least < 0 else (0, ends[1]), "nice": False}


def thinned(rows: Sequence[Row], most: int) -> list[Row]:
    """Return at most this many rows, evenly spaced, including the last."""
    step = -(-len(rows) // max(1, most))
    return list(rows[::-1][::step][::-1]) if step > 1 else list(rows)


def _config(ink: str) -> Spec:
    words = {"labelColor": ink, "titleColor": ink, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": 500}
    lines = {"domainColor": ink, "domainOpacity": 0.5, "tickColor": ink, "tickOpacity": 0.5}
    return {
        "background": "transparent",
        "aria": False,  # would describe each mark; a figure has a caption instead
        "font": "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif",
        "axis": {**words, **lines, "gridColor": ink, "gridOpacity": 0.15, "labelLimit": 220},
        "legend": {**words, "labelFontSize": 11, "symbolStrokeWidth": 2, "symbolSize": 90, "symbolOpacity": 1},
        "title": {"color": ink, "fontSize": 15},
        "view": {"stroke": None},
        "text": {"color": ink},
        "rule": {"color": ink},
    }
