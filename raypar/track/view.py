"""The page MLflow opens on: links, and a saved view with the columns and charts of a study.

The format of a saved view is MLflow's own affair and documented nowhere. It is written as an experiment tag that an
MLflow that doesn't know it ignores; nothing else depends on it.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any

from raypar.track.names import MAX_EXPERIMENT_TAG_LENGTH, short_hash

VIEW_VERSION = 1
VIEW_KEY = f"raypar-v{VIEW_VERSION}"
VIEW_TAG = f"mlflow.sharedViewState.{VIEW_KEY}"

_SCORES = ("accuracy", "macro_f1", "eval/loss", "val_loss")  # the last by train loops that raypar didn't write
_OUTCOMES = ("train_time_s", "throughput_samples_per_s", *_SCORES, "speedup", "efficiency")
# Curves that say little over the steps; drawn after all others.
_DULL = ("train/epoch", "/runtime_s", "/samples_per_second", "/steps_per_second")
_MAX_CURVES = 6


def experiment_url(server_url: str, experiment_id: str, *, saved_view: bool = False) -> str:
    """A link to a study's trials. Without the parameter MLflow opens a page for traces, which is empty."""
    url = f"{server_url.rstrip('/')}/#/experiments/{experiment_id}/runs?workflowType=machine_learning"
    return f"{url}&viewStateShareKey={VIEW_KEY}" if saved_view else url


def saved_view(swept: Sequence[str], series: Sequence[str], *, at_ms: int) -> str | None:
    """The tag's value; the same for the same arguments. None if it is too long for a tag."""
    outcomes = [k for k in _OUTCOMES if k in series or k not in _SCORES]
    columns = [f"params.`{k}`" for k in swept] + [f"metrics.`{k}`" for k in outcomes]
    sections = {name: short_hash(name) for name in ("Scaling", "Search", "Training")}
    charts = [
        _line("speedup", sections["Scaling"], ["scaling/speedup", "scaling/ideal"]),
        _scatter("speedup by workers", sections["Scaling"], ("num_workers", "METRIC"), ("speedup", "METRIC")),
        _parallel(sections["Search"], swept, outcomes),
    ]
    if "accuracy" in series:
        charts.append(
            _scatter("accuracy against runtime", sections["Search"], ("train_time_s", "METRIC"), ("accuracy", "METRIC"))
        )
    curves = sorted(series, key=lambda key: key.endswith(_DULL))
    charts += [_line(key, sections["Training"], [key]) for key in curves[:_MAX_CURVES]]
    state = {
        "searchFilter": "tags.`raypar.kind` = 'trial'",
        "orderByKey": f"params.`{swept[0]}`" if swept else "attributes.start_time",
        "orderByAsc": True,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": columns,
        "columnOrder": [],
        "columnWidths": {},
        "runsHiddenMode": "SHOWALL",
        "runsExpanded": {},
        "viewMaximized": False,
        "runListHidden": False,
        "isAccordionReordered": True,
        "useGroupedValuesInCharts": True,
        "hideEmptyCharts": True,
        "groupBy": None,
        "groupsExpanded": {},
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
        "compareRunCharts": charts,
        "compareRunSections": [
            {"uuid": v, "name": k, "display": True, "isReordered": True, "deleted": False, "isGenerated": False}
            for k, v in sections.items()
        ],
    }
    packed = base64.b64encode(zlib.compress(json.dumps(state, separators=(",", ":")).encode(), 9)).decode()
    text = json.dumps({"name": "raypar trials", "createdAt": at_ms, "updatedAt": at_ms, "state": f"deflate;{packed}"})
    return text if len(text) <= MAX_EXPERIMENT_TAG_LENGTH else None


def _chart(kind: str, name: str, section: str, num_runs: int) -> dict[str, Any]:
    return {
        "deleted": False,
        "isGenerated": False,
        "uuid": short_hash(f"{kind}/{name}"),
        "type": kind,
        "runsCountToCompare": num_runs,
        "metricSectionId": section,
        "displayName": name,
    }


def _line(name: str, section: str, keys: Sequence[str]) -> dict[str, Any]:
    return {
        **_chart("LINE", name, section, 20),
        "metricKey": keys[0],
        "selectedMetricKeys": list(keys),
        "lineSmoothness": 0,
        "xAxisScaleType": "linear",
        "scaleType": "linear",
        "range": {},
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "ignoreOutliers": False,
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
    }


def _scatter(name: str, section: str, x: tuple[str, str], y: tuple[str, str]) -> dict[str, Any]:
    return {
        **_chart("SCATTER", name, section, 100),
        "xaxis": {"key": x[0], "type": x[1]},
        "yaxis": {"key": y[0], "type": y[1]},
    }


def _parallel(section: str, swept: Sequence[str], outcomes: Sequence[str]) -> dict[str, Any]:
    return {
        **_chart("PARALLEL", "parallel coordinates", section, 100),
        "selectedParams": list(swept),
        "selectedMetrics": list(outcomes),
        "showAllRuns": False,
    }
