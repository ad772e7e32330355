"""The figure of a study's batch sizes: throughput, progress per sample, and their product."""

from __future__ import annotations

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.report.figures_vega import (
    PICK,
    PICKED,
    Figure,
    LeftOut,
    Row,
    bounds,
    layers,
    listed,
    quantity,
    series,
    tooltip,
)
from raypar.study.trial import point_label

MAX_GROUPS = 3
DASHES = ([1, 0], [6, 4], [2, 3])
NAMES = {"throughput": "samples/s", "progress": "progress per sample", "goodput": "speed towards the target"}


def goodput_curves(analysis: StudyAnalysis) -> Figure | LeftOut:
    """Over the batch size, against one of them: samples per second, progress per sample, and their product."""
    title = "Batch size: throughput and progress"
    target, groups = analysis.target, analysis.batches
    if target is None or not groups:
        return LeftOut(title, "no two points differ only in their batch size and have reached a common target")
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
