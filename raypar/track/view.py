"""Links to a study in MLflow, and a saved view with its columns and charts.

The format of a saved view is internal to MLflow and undocumented. It is written as an experiment tag that other
versions of MLflow ignore; nothing else depends on it.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raypar.track.names import MAX_EXPERIMENT_TAG_LENGTH, short_hash

VIEW_VERSION = 2
VIEW_KEY = f"raypar-v{VIEW_VERSION}"
VIEW_TAG = f"mlflow.sharedViewState.{VIEW_KEY}"

IDEAL = "scaling/ideal"
_SPEEDUP, _EFFICIENCY = "scaling/speedup", "scaling/efficiency"
_LOSSES = ("train/loss", "eval/loss", "train_loss", "val_loss")  # the last two by train loops that raypar didn't write
# Curves that are nearly constant over the steps; drawn after all others.
_DULL = ("train/epoch", "/runtime_s", "/samples_per_second", "/steps_per_second")
_MAX_CURVES = 6
_MAX_SWEPT = 4  # charts of one kind, one for each swept hyperparameter


@dataclass(frozen=True)
class ViewContent:
    """Content of a study's saved view, under its keys in MLflow.

    Attributes:
        swept: the swept hyperparameters; True for numbers, which are metrics as well.
        score: metric that trials are judged by; empty if no trial reports it.
        series: metrics that trials report step by step.
        compares: trials have a speedup against a baseline.
        curves: metrics of the execution over the number of workers.
    """

    swept: Mapping[str, bool]
    score: str = ""
    series: Sequence[str] = ()
    compares: bool = False
    curves: Sequence[str] = ()


def experiment_url(server_url: str, experiment_id: str, *, charts: bool = False) -> str:
    """Return a link to a study's runs, or to its charts."""
    return f"{server_url.rstrip('/')}/{experiment_path(experiment_id, charts=charts)}"


def experiment_path(experiment_id: str, *, charts: bool = False) -> str:
    """Return the part of `experiment_url` after the server. Without ``workflowType`` MLflow opens an empty page."""
    path = f"#/experiments/{experiment_id}/runs?workflowType=machine_learning"
    return f"{path}&viewStateShareKey={VIEW_KEY}&compareRunsMode=CHART" if charts else path


def saved_view(content: ViewContent, *, at_ms: int) -> str | None:
    """Return the tag's value, the same for the same arguments; None if it is too long for a tag."""
    scores = [content.score] if content.score else []
    scores += [key for key in content.series if key in _LOSSES and key not in scores]
    speedups = ["speedup", "efficiency"] if content.compares else []
    outcomes = ["train_time_s", "throughput_samples_per_s", *speedups, *scores]
    sections, charts = [], []
    for name, drawn in _sections(content, outcomes):
        if drawn:
            sections.append({**_FLAGS, "uuid": short_hash(name), "name": name, "display": True, **_LAYOUT})
            charts += [{**chart, "metricSectionId": short_hash(name)} for chart in drawn]
    state = {
        **_STATE,
        "selectedColumns": [f"params.`{k}`" for k in content.swept] + [f"metrics.`{k}`" for k in outcomes],
        "compareRunCharts": charts,
        "compareRunSections": sections,
    }
    packed = base64.b64encode(zlib.compress(json.dumps(state, separators=(",", ":")).encode(), 9)).decode()
    text = json.dumps({"name": "raypar charts", "createdAt": at_ms, "updatedAt": at_ms, "state": f"deflate;{packed}"})
    return text if len(text) <= MAX_EXPERIMENT_TAG_LENGTH else None


def _sections(content: ViewContent, outcomes: Sequence[str]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return title and charts of each section, the most informative first."""
    swept = list(content.swept.items())[:_MAX_SWEPT]

    def against(key: str) -> list[dict[str, Any]]:
        """Return a chart of a metric over each swept hyperparameter."""
        return [_scatter((name, "METRIC" if is_number else "PARAM"), (key, "METRIC")) for name, is_number in swept]

    scaling = []
    for name in (_SPEEDUP, _EFFICIENCY):
        if curves := [key for key in content.curves if key.startswith(name) and not key.endswith((" low", " high"))]:
            ideal = [IDEAL] if name == _SPEEDUP and IDEAL in content.curves else []
            scaling.append(_line(f"{name.partition('/')[2]} over the number of workers", [*curves, *ideal]))
    if content.compares:
        scaling += against("speedup")
    score = []
    if content.score:
        score = [_scatter(("train_time_s", "METRIC"), (content.score, "METRIC")), *against(content.score)]
        if len(content.swept) > 1:
            score.append(_parallel(list(content.swept), outcomes))
    losses = [key for key in content.series if key in _LOSSES]
    others = [key for key in (content.score, *content.series) if key and key not in losses]
    series = list(dict.fromkeys([*losses, *sorted(others, key=lambda key: key.endswith(_DULL))]))
    return [
        ("Speedup", scaling),
        ("Training time", against("train_time_s")),
        (f"{content.score}: what it costs, what it depends on", score),
        ("While training", [_line(key, [key]) for key in series[:_MAX_CURVES]]),
    ]


_STATE = (
    # Sorted by anything but time, runs are flat, and charts draw trials too. Executions, which have the curves over
    # the number of workers, come first: MLflow fetches a hundred runs.
    {"orderByKey": "tags.`raypar.kind`", "orderByAsc": True, "searchFilter": "", "startTime": "ALL"}
    | {"lifecycleFilter": "Active", "datasetsFilter": [], "modelVersionFilter": "All Runs"}
    | {"columnOrder": [], "columnWidths": {}, "runsHiddenMode": "SHOWALL", "runsExpanded": {}}
    | {"viewMaximized": False, "runListHidden": False, "isAccordionReordered": True}
    | {"useGroupedValuesInCharts": True, "hideEmptyCharts": True, "groupBy": None, "groupsExpanded": {}}
    | {"globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""}}
)
_LINE = (
    {"xAxisKey": "step", "selectedXAxisMetricKey": "", "xAxisScaleType": "linear", "useGlobalXaxisKey": True}
    | {"yAxisKey": "metric", "yAxisExpressions": [], "scaleType": "linear", "range": {}, "ignoreOutliers": False}
    | {"lineSmoothness": 0, "useGlobalLineSmoothing": True}
)
_FLAGS = {"deleted": False, "isGenerated": False}
_LAYOUT = {"isReordered": True, "columns": 2, "cardHeight": 320}


def _chart(kind: str, name: str, num_runs: int) -> dict[str, Any]:
    uuid = short_hash(f"{kind}/{name}")
    return {**_FLAGS, "uuid": uuid, "type": kind, "runsCountToCompare": num_runs, "displayName": name}


def _line(name: str, keys: Sequence[str]) -> dict[str, Any]:
    return {**_chart("LINE", name, 20), **_LINE, "metricKey": keys[0], "selectedMetricKeys": list(keys)}


def _scatter(x: tuple[str, str], y: tuple[str, str]) -> dict[str, Any]:
    axes = {name: {"key": key, "type": kind} for name, (key, kind) in (("xaxis", x), ("yaxis", y))}
    return {**_chart("SCATTER", f"{y[0]} by {x[0]}", 100), **axes}


def _parallel(swept: Sequence[str], outcomes: Sequence[str]) -> dict[str, Any]:
    selected = {"selectedParams": list(swept), "selectedMetrics": list(outcomes), "showAllRuns": False}
    return {**_chart("PARALLEL", "parallel coordinates", 100), **selected}
