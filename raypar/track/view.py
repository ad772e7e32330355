"""Links to a study in MLflow, and saved views of its points, its trials and its speedups in tables and charts.

The format of a saved view is internal to MLflow and undocumented. Views are experiment tags that other versions of
MLflow ignore; nothing else depends on them.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from raypar.track.names import MAX_EXPERIMENT_TAG_LENGTH, short_hash

VIEW_KEY, TRIALS_KEY, SPEEDUP_KEY = "raypar-v2", "raypar-trials", "raypar-speedup"
VIEW_TAG = "mlflow.sharedViewState."
MEDIAN = "median_"  # prefix of a trial's metric for the estimate of a point

_NAME, _CREATED, _DURATION = "attributes.`Run Name`", "runDateAndNestInfo", "duration"  # MLflow's columns
_DESCRIPTION = "attributes.`Description`"
_LOSSES = ("train/loss", "eval/loss", "train_loss", "val_loss")  # the last two: from train loops of users
_MAX_CURVES = 6
_MAX_SWEPT = 4  # swept hyperparameters with charts


@dataclass(frozen=True)
class ViewContent:
    """Content of a study's saved views: names of its metrics and params in MLflow.

    Attributes:
        swept: the swept hyperparameters; True for numbers, which are metrics too.
        score: metric that trials are judged by; empty if no trial reports it.
        series: metrics that trials report step by step.
        compares: trials have a speedup over a baseline.
        has_points: trials are nested under the runs of their points.
        time_metric: the time that trials are compared by.
        mode: "max" or "min": direction of the score.
        curves: metrics of an execution by number of workers.
    """

    swept: Mapping[str, bool]
    score: str = ""
    series: Sequence[str] = ()
    compares: bool = False
    has_points: bool = False
    time_metric: str = "train_time_s"
    mode: str = "max"
    curves: Sequence[str] = ()

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> ViewContent:
        """Return the content of a journal's record, which may be that of another version of raypar."""
        return cls(**{field.name: record[field.name] for field in fields(cls) if field.name in record})


def experiment_url(server_url: str, experiment_id: str) -> str:
    """Return a link to a study's points, or to its trials if they are the points."""
    return f"{server_url.rstrip('/')}/{_view_path(experiment_id, VIEW_KEY)}"


def links(experiment_id: str) -> str:
    """Return links to a study's views, in Markdown for MLflow's pages."""
    points, trials = (_view_path(experiment_id, key) for key in (VIEW_KEY, TRIALS_KEY))
    return f"[Table]({points}) · [Charts]({points}&compareRunsMode=CHART) · [All trials]({trials})"


def _view_path(experiment_id: str, key: str) -> str:
    # Without ``workflowType``, MLflow opens an empty page.
    return f"#/experiments/{experiment_id}/runs?workflowType=machine_learning&viewStateShareKey={key}"


def saved_views(content: ViewContent, *, at_ms: int) -> dict[str, str]:
    """Return the tags of the views, the same for the same arguments. Views too long for a tag are left out."""
    trials = _saved("trials", _table(content, ""), at_ms)
    views = {VIEW_KEY: _saved("points", _table(content, MEDIAN), at_ms) if content.has_points else trials}
    views[TRIALS_KEY] = trials
    if content.curves:
        views[SPEEDUP_KEY] = _saved("speedup", _speedup(content.curves), at_ms)
    return {VIEW_TAG + key: text for key, text in views.items() if len(text) <= MAX_EXPERIMENT_TAG_LENGTH}


def _saved(name: str, state: Mapping[str, Any], at_ms: int) -> str:
    packed = base64.b64encode(zlib.compress(json.dumps({**_STATE, **state}, separators=(",", ":")).encode(), 9))
    of_view = {"name": name, "createdAt": at_ms, "updatedAt": at_ms, "state": f"deflate;{packed.decode()}"}
    return json.dumps(of_view)


def _table(content: ViewContent, prefix: str) -> dict[str, Any]:
    """Return the state of a view of the trials, or with a prefix of the points."""
    time_s, score = prefix + content.time_metric, prefix + content.score if content.score else ""
    outcomes = [time_s, *(prefix + key for key in ("speedup", "efficiency") if content.compares)]
    outcomes += [score] if score else []
    outcomes += ["num_trials"] if prefix else ["throughput_samples_per_s"]
    order = f"metrics.`{score}`" if score else "tags.`mlflow.runName`"
    if content.has_points:
        order = "tags.`raypar.order`" if prefix else "tags.`mlflow.runName`"
    swept = [f"params.`{key}`" for key in content.swept]
    columns = [*swept, *([_DESCRIPTION] if prefix else []), *(f"metrics.`{key}`" for key in outcomes)]
    return {
        **_columns(columns),
        "searchFilter": f"tags.`raypar.kind` = '{'point' if prefix else 'trial'}'",
        "orderByKey": order,
        "orderByAsc": not order.startswith("metrics.") or content.mode == "min",
        **_charts(_sections(content, prefix)),
    }


def _speedup(curves: Sequence[str]) -> dict[str, Any]:
    """Return the state of a view of the executions with one wide chart."""
    filtered = {"searchFilter": "tags.`raypar.kind` = 'execution'", "orderByKey": "tags.`mlflow.runName`"}
    chart = _line("speedup over the number of workers", curves)
    return {**_columns([]), **filtered, "orderByAsc": False, **_charts([("Speedup", [chart])], num_columns=1)}


def _charts(sections: Iterable[tuple[str, list[dict[str, Any]]]], num_columns: int = 2) -> dict[str, Any]:
    """Return the part of a state with the charts of each section that is not empty."""
    shown, charts = [], []
    for title, drawn in sections:
        if drawn:
            layout = {"isReordered": True, "columns": num_columns, "cardHeight": 320 if num_columns > 1 else 440}
            shown.append({**_FLAGS, "uuid": short_hash(title), "name": title, "display": True, **layout})
            charts += [{**chart, "metricSectionId": short_hash(title)} for chart in drawn]
    return {"compareRunCharts": charts, "compareRunSections": shown}


def _columns(columns: Sequence[str]) -> dict[str, Any]:
    """Return the table's columns in order, with widths in pixels that fit their titles."""
    titles = {column: column.partition("`")[2].rstrip("`") for column in columns}
    widths = {_NAME: 140, _CREATED: 140}
    widths |= {column: 20 + max(70, round(7.5 * len(title))) for column, title in titles.items()}
    widths |= {_DESCRIPTION: 190, _DURATION: 80}
    return {"selectedColumns": list(columns), "columnOrder": list(widths), "columnWidths": widths}


def _sections(content: ViewContent, prefix: str) -> Iterable[tuple[str, list[dict[str, Any]]]]:
    """Return title and charts of each section, the most informative first."""
    time_s, score = prefix + content.time_metric, prefix + content.score
    swept = list(content.swept.items())[:_MAX_SWEPT]

    def against(key: str) -> list[dict[str, Any]]:
        """Return a chart of a metric over each swept hyperparameter."""
        return [_scatter((name, "METRIC" if is_number else "PARAM"), (key, "METRIC")) for name, is_number in swept]

    if content.compares:
        yield "Speedup", against(prefix + "speedup")
    yield "Training time", against(time_s)
    if content.score:
        charts = [_scatter((time_s, "METRIC"), (score, "METRIC")), *against(score)]
        if len(content.swept) > 1:
            charts.append(_parallel(list(content.swept), [time_s, score]))
        yield f"{content.score}: what it costs, what it depends on", charts
    if not prefix:
        losses = [key for key in content.series if key in _LOSSES]
        others = [key for key in (content.score, *content.series) if key and key not in losses]
        yield "While training", [_line(key, [key]) for key in list(dict.fromkeys([*losses, *others]))[:_MAX_CURVES]]


_STATE: Mapping[str, Any] = (
    # Sorted by anything but their start, runs are shown flat, so that each is in the charts.
    {"startTime": "ALL", "lifecycleFilter": "Active", "datasetsFilter": [], "modelVersionFilter": "All Runs"}
    | {"runsHiddenMode": "SHOWALL", "runsExpanded": {}}
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
