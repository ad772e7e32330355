"""What figures are made of: Vega-Lite parts that they share, and their drawing as SVG or PNG.

Fields have names of our own, and what a study calls things stands only in values and titles: a name with a dot, a
bracket or an expression in it is text and nothing else. Colours are those of Okabe and Ito, "Color Universal Design"
(2008), without black and yellow, which vanish on one of the two backgrounds; every colour comes with a shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeGuard

from raypar import units
from raypar.analysis.stats import Estimate
from raypar.errors import RayparError
from raypar.report.text import strip_control
from raypar.study.space import Value
from raypar.study.trial import point_label

Row: TypeAlias = dict[str, Any]
Spec: TypeAlias = dict[str, Any]

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
MAX_SERIES = len(COLOURS)
MAX_SHORT_NAME = 18  # characters: two of them beside each other fit on a phone
WIDTH_PX, HEIGHT_PX = 640, 300
TICK_PX = 70
EDGE = 1.08  # from the outermost numbers of workers to the figure's sides, as a factor
MAX_BOUND_FACTOR = 4
KINDS = ("svg", "png")
INK, PAPER = "#1b1f24", "#ffffff"
GREY = "#8a8f98"


@dataclass(frozen=True)
class Figure:
    """A figure of a study.

    Attributes:
        key: a word for files and links.
        title: what it shows.
        alternative: what is to be seen on it, in words.
        spec: as Vega-Lite has it, without what says how large and in which colours it is drawn.
    """

    key: str
    title: str
    alternative: str
    spec: Mapping[str, Any]

    def save(self, path: Path | str) -> None:
        """Draw it into a file that ends in .svg or .png. Raises RayparError where that can't be."""
        path = Path(path)
        kind = path.suffix.lower().removeprefix(".")
        if kind not in KINDS:
            raise RayparError(f"{path}: the ending says no format that is known", hint="end the name in .svg or .png")
        try:
            path.write_bytes(drawn(self, "png" if kind == "png" else "svg"))
        except OSError as error:
            raise RayparError(f"{path}: can't be written: {error.strerror}", hint="choose another folder") from None

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """What a notebook shows."""
        return {"image/svg+xml": drawn(self, "svg").decode(), "text/plain": f"{self.title}. {self.alternative}"}


@dataclass(frozen=True)
class OmittedFigure:
    """A figure that the study has no data for, and why."""

    title: str
    reason: str


def for_page(figure: Figure) -> Spec:
    """The spec for a page that it is drawn in: as wide as its place, in the page's own colour of text."""
    return {**_without_control(figure.spec), "width": "container", "config": _config("currentColor")}


def static_svg(figure: Figure) -> str:
    """The figure for a page that can't draw it itself, in the page's own colour of text."""
    import vl_convert

    spec = {**_without_control(figure.spec), "width": WIDTH_PX, "config": _config("currentColor")}
    return vl_convert.vegalite_to_svg(spec)


def drawn(figure: Figure, kind: Literal["svg", "png"]) -> bytes:
    """The figure as a file of its own, on white."""
    import vl_convert

    spec = {**_without_control(figure.spec), "width": WIDTH_PX, "background": PAPER, "config": _config(INK)}
    spec["title"] = {"text": strip_control(figure.title), "anchor": "start"}
    if kind == "png":
        return vl_convert.vegalite_to_png(spec, scale=2)
    return vl_convert.vegalite_to_svg(spec).encode()


def _without_control(value: Any) -> Any:
    """A spec whose names hold no control characters: SVG can't have them, and vl-convert ends the process over them."""
    if isinstance(value, str):
        return strip_control(value)
    if isinstance(value, Mapping):
        return {_without_control(key): _without_control(each) for key, each in value.items()}
    return [_without_control(each) for each in value] if isinstance(value, (list, tuple)) else value


def layers(rows: Sequence[Row], *marks: Spec, height: int = HEIGHT_PX) -> Spec:
    """A figure of layers over the same rows; what runs across has as many ticks as there is room for."""
    for mark in marks:
        x = mark["encoding"].get("x", {})
        if x.get("type") == "quantitative" and "values" not in x.get("axis", {}):
            x["axis"] = {**x.get("axis", {}), "tickCount": {"expr": f"max(2, floor(width / {TICK_PX}))"}}
    return {"data": {"values": [*map(_drawable, rows)]}, "height": height, "layer": list(marks)}


def quantity(name: str, title: str, *, log2: bool = False, zero: bool = False, **more: Any) -> Spec:
    """The channel of a number."""
    scale: Spec = {"type": "log", "base": 2} if log2 else {"zero": zero}
    return {"field": name, "type": "quantitative", "title": title, "scale": {**scale, **more.pop("scale", {})}, **more}


def workers_axis(counts: Sequence[int]) -> Spec:
    """The channel of the number of workers, with a tick at each that was run."""
    ends = [min(counts) / EDGE, max(counts) * EDGE]
    axis = {"values": sorted(set(counts)), "format": "d", "grid": False}
    return quantity("workers", "workers", log2=True, axis=axis, scale={"domain": ends, "nice": False})


def point_axis(points: Sequence[Mapping[str, Value]]) -> tuple[Spec, list[str]]:
    """The channel that points run down, and what they are called on it: their values, with the keys as its title."""
    keys = list(dict.fromkeys(key for point in points for key in point))
    names = [", ".join(units.value_of(point.get(key)) for key in keys) or point_label(point) for point in points]
    if len(set(names)) < len(names):
        names = [point_label(point) for point in points]
    axis = {"titleAngle": 0, "titleAlign": "left", "titleAnchor": "start", "titleBaseline": "bottom", "titleY": -4}
    title = ", ".join(keys) or None
    return {"field": "point", "type": "nominal", "title": title, "sort": None, "axis": axis}, names


def series(names: Sequence[str], channel: Literal["color", "shape"] = "color", title: str | None = None) -> Spec:
    """The channel that tells series apart, in the order given: at most `MAX_SERIES` of them."""
    columns = 1 if max(map(len, names), default=0) > MAX_SHORT_NAME else 2
    return {
        "field": "series",
        "type": "nominal",
        "title": title,
        "scale": {"domain": list(names), "range": list((COLOURS if channel == "color" else SHAPES)[: len(names)])},
        "legend": {"orient": "top", "labelLimit": 260, "columns": columns} if len(names) > 1 else None,
    }


def metric_axis(metric: str) -> Spec:
    """The axis of the study's metric: accuracies in percent."""
    return {"format": ".3~%"} if units.is_share(metric) else {}


def tooltip(**titles: str) -> list[Spec]:
    """What is shown of a row where the pointer is over it: field to title."""
    return [{"field": name, "type": "nominal", "title": title} for name, title in titles.items()]


# In one layer of a figure: a click on a series in the legend leaves the others pale.
PICK: Sequence[Spec] = ({"name": "picked", "select": {"type": "point", "fields": ["series"]}, "bind": "legend"},)
PICKED: Mapping[str, Any] = {"condition": {"param": "picked", "value": 1}, "value": 0.12}


def bounds(estimate: Estimate, name: str = "value") -> Row:
    """The fields ``value``, ``low`` and ``high``; the bounds are the value where there is no interval."""
    low, high = estimate.low, estimate.high
    known = low is not None and high is not None and math.isfinite(low) and math.isfinite(high)
    return {
        name: estimate.value,
        f"{name}_low": low if known else estimate.value,
        f"{name}_high": high if known else estimate.value,
    }


def within(rows: Sequence[Row], name: str = "value", *, log: bool = False) -> tuple[list[Row], str]:
    """The rows with bounds that don't dwarf the values, and a sentence that says so; empty where none was cut.

    Two trials may have an interval of a factor of a million: drawn whole, nothing else could be seen.
    """
    values = [row[name] for row in rows]
    if log:
        limits = min(values) / MAX_BOUND_FACTOR, max(values) * MAX_BOUND_FACTOR
    else:
        margin = max(max(values) - min(values), abs(max(values)))
        limits = min(values) - margin, max(values) + margin
    low, high = f"{name}_low", f"{name}_high"
    kept = [{**row, low: max(row[low], limits[0]), high: min(row[high], limits[1])} for row in rows]
    is_cut = any(row[low] < limits[0] or row[high] > limits[1] for row in rows)
    return kept, " Intervals far wider than the values are drawn in part." if is_cut else ""


def thinned(rows: Sequence[Row], most: int) -> list[Row]:
    """At most so many of the rows, evenly taken, the last one among them."""
    step = -(-len(rows) // max(1, most))
    return list(rows[::-1][::step][::-1]) if step > 1 else list(rows)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value can be drawn."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def listed(sentences: Sequence[str], most: int = 12) -> str:
    """The first of some parts of a sentence, and how many more there are."""
    return units.listed(sentences, most, separator="; ")


def _drawable(row: Row) -> Row:
    """The row as JSON has it, which knows no infinity."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def _config(ink: str) -> Spec:
    words = {"labelColor": ink, "titleColor": ink, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": 500}
    lines = {"domainColor": ink, "domainOpacity": 0.5, "tickColor": ink, "tickOpacity": 0.5}
    return {
        "background": "transparent",
        "aria": False,  # mark by mark; a figure has its text alternative
        "font": "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif",
        "axis": {**words, **lines, "gridColor": ink, "gridOpacity": 0.15, "labelLimit": 220},
        "legend": {**words, "symbolStrokeWidth": 2, "symbolSize": 90},
        "title": {"color": ink, "fontSize": 15},
        "view": {"stroke": None},
        "text": {"color": ink},
        "rule": {"color": ink},
    }
