"""Conversion of a trial's result to the fields of an MLflow run and back. Pure: no store, no mlflow."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from raypar.markdown import harmless
from raypar.study.options import GENERAL, OPTIONS, has_effect
from raypar.study.quantity import View, of_view
from raypar.study.trial import (
    SINCE_LAUNCH,
    DataRecord,
    SplitRecord,
    TensorRecord,
    TrialResult,
    TrialSpec,
    TrialState,
    result_from_json,
)
from raypar.track.names import (
    MAX_NAME_LENGTH,
    MAX_PARAM_LENGTH,
    NOTE,
    clip,
    join_tag,
    key_names,
    short_label,
    split_tag,
    tag_text,
)
from raypar.track.view import ViewContent
from raypar.train.logged_run import LoggedRun

NO_DIGEST = "none"
SCRIPT_SECTION = "script/"  # of keys that raypar uses for something else
_MAX_DIGEST_LENGTH = 36  # MLflow's limit

# Names of logged models: of the best trial, of any trial, and of any report of a trial.
BEST_MODEL, KEPT_MODEL, CHECKPOINT_MODEL = "best_model", "kept_model", "checkpoint"
RESULT_TAG = "raypar.result"
RESULT_FILE = "trial.json"
SOURCE_FILE = "study.py"
TRACEBACK_FILE = "traceback.txt"

# In MLflow, FINISHED selects usable results; the tag ``raypar.state`` has the exact state.
RUN_STATUS = {TrialState.FINISHED: "FINISHED", TrialState.STOPPED: "KILLED"}
NO_RESULT_STATUS = "FAILED"
PARAMS = ("num_workers", "batch_size", "epochs", "lr", "optimizer", "strategy", "device", "precision")
# Names for the reports of raypar's training loop, as in other tools; the part before the slash is a section in MLflow.
# Metrics of a workload keep their names.
SECTIONS = {
    "train_loss": "train/loss",
    "lr": "train/learning_rate",
    "grad_norm": "train/grad_norm",
    "noise_scale": "train/noise_scale",
    "val_loss": "eval/loss",
}
UNPLOTTED = frozenset(
    ("epoch", "train_time_s", "throughput_samples_per_s", "eval_time_s", "eval_samples_per_s", "eval_steps_per_s")
)


class Input(NamedTuple):
    """Split of a data set: "train", "val" or "test". The last three fields are JSON in MLflow's format."""

    context: str
    name: str
    digest: str
    source: str
    schema: str
    profile: str


class Point(NamedTuple):
    """Value of a metric."""

    key: str
    value: float
    time_ms: int
    step: int


class ChildRun(NamedTuple):
    """Trial as MLflow shows it, with the texts of its artifacts and the data sets of training and validation."""

    name: str
    start_ms: int
    end_ms: int
    status: str
    params: Mapping[str, str]
    points: Sequence[Point]
    tags: Mapping[str, str]
    files: Mapping[str, str]
    inputs: Sequence[Input] = ()


class PointRun(NamedTuple):
    """Point as MLflow shows it, between the execution and its trials.

    Attributes:
        identity: `TrialSpec.point_identity`; a study has one run for each.
        metrics: swept numbers, and estimates under keys that trials don't use.
        withdrawn: metrics that no longer hold, though an earlier record may have them.
    """

    identity: str
    name: str
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    withdrawn: Sequence[str] = ()


def child_run(result: TrialResult, *, result_json: str, recorded_at: float) -> ChildRun:
    """Return a result as MLflow's fields: the same for the same arguments, so that it can be sent twice."""
    start_ms, end_ms = _span_ms(result, recorded_at)
    files = {RESULT_FILE: result_json}
    if result.failure and result.failure.traceback:
        files[TRACEBACK_FILE] = result.failure.traceback
    return ChildRun(
        name=clip(f"{short_label(result.spec.point)} #{result.spec.repeat + 1}", MAX_NAME_LENGTH),
        start_ms=start_ms,
        end_ms=end_ms,
        status=RUN_STATUS.get(result.state, NO_RESULT_STATUS),
        params=run_params(result.spec),
        points=[*_scalars(result, end_ms), *_series(result, start_ms, end_ms)],
        tags={**_tags(result), **(result_tags(result) or {})},
        files=files,
        inputs=inputs_of(result.data, ("train", "val")),
    )


def _span_ms(result: TrialResult, recorded_at: float) -> tuple[int, int]:
    start_s = result.started_at or recorded_at
    end_s = start_s + result.wall_s if result.wall_s else recorded_at
    return round(start_s * 1000), round(max(start_s, end_s) * 1000)


def points_of_report(result: TrialResult, index: int) -> tuple[int, list[Point]]:
    """Return the step of a report, and its metrics as `child_run` has them."""
    step = _steps(result)[index]
    points = _series(result, *_span_ms(result, result.started_at))
    return step, [point for point in points if point.step == step]


def inputs_of(data: DataRecord, contexts: Sequence[str]) -> tuple[Input, ...]:
    """Return the splits of a `TrialResult.data` with these contexts."""
    splits = data.get("splits", {})
    return tuple(_input(data, context, splits[context]) for context in contexts if context in splits)


def _input(data: DataRecord, context: str, split: SplitRecord) -> Input:
    def tensor(name: str, of: TensorRecord) -> str:
        spec = {"dtype": of["dtype"], "shape": [-1, *of["shape"]]}
        return json.dumps([{"name": name, "type": "tensor", "tensor-spec": spec}])

    schema = ""
    if "inputs" in split and "targets" in split:
        features, targets = tensor("inputs", split["inputs"]), tensor("targets", split["targets"])
        schema = json.dumps({"mlflow_tensorspec": {"features": features, "targets": targets}})
    digest = split.get("digest")
    # MLflow identifies a data set by name and digest. Without a digest, the name has to distinguish the splits.
    name = data["name"] if digest else f"{data['name']}, {context}"
    return Input(
        context,
        clip(name, MAX_NAME_LENGTH),
        clip(digest or NO_DIGEST, _MAX_DIGEST_LENGTH),
        json.dumps({"tags": {"mlflow.source.type": "LOCAL", "mlflow.source.name": data["source"]}}),
        schema,
        json.dumps({"num_rows": split["num_samples"]}),
    )


def result_tags(result: TrialResult) -> dict[str, str] | None:
    """Return the result without step times as tags, so that one query reads a study; None if too long."""
    return split_tag(RESULT_TAG, without_step_times(result).to_json())


def result_from_tags(tags: Mapping[str, str]) -> TrialResult | None:
    """Return the result of `result_tags`; None if they are missing or damaged."""
    return parse_result(join_tag(tags, RESULT_TAG))


def parse_result(stored: object) -> TrialResult | None:
    """Return a result from its JSON, decoded or not; None if damaged."""
    try:
        return result_from_json(stored if isinstance(stored, str) else json.dumps(stored))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def series_keys(result: TrialResult) -> dict[str, str]:
    """Map keys of the reports to metrics in MLflow, without the axis.

    Times and a constant learning rate of raypar's training loop are left out.
    """
    sections, left_out = {}, {"epoch", SINCE_LAUNCH}
    if _is_of_own_loop(result):
        is_constant = len({report.get("lr") for report in result.reports}) < 2
        sections, left_out = SECTIONS, {"step", SINCE_LAUNCH, *UNPLOTTED, *(["lr"] if is_constant else [])}
    names = [key for key in dict.fromkeys(k for report in result.reports for k in report) if key not in left_out]
    # A metric can't hold both a value of the trial and values of its reports.
    taken = {
        *(q.key for q in of_view(View.MLFLOW)),
        "num_workers",
        "batch_size",
        *result.spec.point,
        *sections.values(),
    }
    texts = {name: sections.get(name, f"epoch/{name}" if name in taken else name) for name in names}
    keys = key_names(texts.values())
    return {name: keys[text] for name, text in texts.items()}


def view_content(result: TrialResult, score: str, mode: str, *, compares: bool, has_points: bool) -> ViewContent:
    """Return the content of a study's saved views, based on one of its trials.

    Args:
        score, mode: report key that trials are judged by, and "max" or "min".
        compares, has_points: as in `ViewContent`.
    """
    point, keys = result.spec.point, series_keys(result)
    names = key_names(point)
    swept = {names[k]: _number(value) is not None for k, value in point.items()}
    time_metric = "wall_s" if result.is_measured and result.train_time_s is None else "train_time_s"
    return ViewContent(swept, keys.get(score, ""), tuple(keys.values()), compares, has_points, time_metric, mode)


def without_step_times(result: TrialResult) -> TrialResult:
    return replace(result, step_times_s=())


def run_params(spec: TrialSpec) -> dict[str, str]:
    """Return the `param_values` as MLflow stores them."""
    return {key: param_text(value) for key, value in param_values(spec).items()}


def param_values(spec: TrialSpec) -> dict[str, Any]:
    """Return swept and workload-specific hyperparameters, `PARAMS`, and other options that have an effect.

    Options at their defaults, and options without effect in this config, are left out.
    """
    values = {key: value for key, value in {**spec.config, **spec.point}.items() if _is_param(spec, key)}
    keys = key_names(values)
    return {keys[k]: value for k, value in values.items()}


def param_text(value: object) -> str:
    return clip(",".join(map(str, value)) if isinstance(value, tuple) else str(value), MAX_PARAM_LENGTH)


def _is_param(spec: TrialSpec, key: str) -> bool:
    if key in spec.point or key in PARAMS:
        return True
    if key not in OPTIONS:
        return spec.config[key] is not None
    return spec.config[key] != OPTIONS[key].default and has_effect(key, spec.config)


def _scalars(result: TrialResult, time_ms: int) -> list[Point]:
    figures = {q.key: _number(q.of(result)) for q in of_view(View.MLFLOW)}
    values = {**swept_numbers(result.spec), **{key: value for key, value in figures.items() if value is not None}}
    return [Point(key, value, time_ms, 0) for key, value in values.items()]


def swept_numbers(spec: TrialSpec) -> dict[str, float]:
    """Return swept numbers and the workers as metrics, since params are strings and sort as 1, 16, 2."""
    swept = {**{k: spec.config.get(k) for k in ("num_workers", "batch_size")}, **spec.point}
    keys = key_names(swept)
    return {keys[k]: number for k, value in swept.items() if (number := _number(value)) is not None}


def _series(result: TrialResult, start_ms: int, end_ms: int) -> list[Point]:
    """Return every numeric key of the reports. Reports have no time of day, so they are spread over the trial."""
    reports, keys, steps = result.reports, series_keys(result), _steps(result)
    points = []
    for i, report in enumerate(reports):
        time_ms = start_ms + (end_ms - start_ms) * (i + 1) // len(reports)
        for name, key in keys.items():
            if (value := _number(report.get(name))) is not None:
                points.append(Point(key, value, time_ms, steps[i]))
    return points


def _steps(result: TrialResult) -> Sequence[int]:
    """Return the step of each report."""
    by_step = _axis(result.reports, "step") if _is_of_own_loop(result) else None
    return by_step or _axis(result.reports, "epoch") or range(len(result.reports))


def _is_of_own_loop(result: TrialResult) -> bool:
    """Return True if raypar's training loop wrote the reports, so that the meaning of their keys is known."""
    # A failed trial has no time, but only configs of that loop contain all options.
    return result.train_time_s is not None or GENERAL.keys() <= result.spec.config.keys()


def _axis(reports: Sequence[Mapping[str, float]], key: str) -> list[int] | None:
    """Return the key's values if they are distinct whole numbers, else None."""
    values = [_number(report.get(key)) for report in reports]
    integers = [int(v) for v in values if v is not None and abs(v) < 2**53 and v.is_integer()]
    return integers if len(set(integers)) == len(reports) else None


def _tags(result: TrialResult) -> dict[str, str]:
    tags: dict[str, object] = {
        "raypar.kind": "trial",
        "raypar.identity": result.spec.identity,
        "raypar.repeat": result.spec.repeat + 1,  # from 1, as in names and tables; the result counts from 0
        "raypar.state": result.state.value,
    }
    if result.state.traits.is_unusable:
        tags[NOTE] = harmless(f"{result.state}: {result.reason}" if result.reason else result.state.value)
    if (failure := result.failure) and not result.is_complete:
        tags |= {"raypar.failure": failure.message, NOTE: harmless(failure.message)}
        tags["raypar.failure_kind"] = failure.kind.value
    return {key: tag_text(value) for key, value in tags.items()}


def _number(value: object) -> float | None:
    """Return a number as MLflow stores it, infinity as the largest float; None for other values."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return math.copysign(sys.float_info.max, number) if math.isinf(number) else number


def with_logged(child: ChildRun, logged: LoggedRun, result: TrialResult) -> ChildRun:
    """Return a trial's run with what its script logged.

    Values that the script also reported to raypar appear once, with the steps and times that the script logged.
    """
    reported = series_keys(result) if result.conditions.is_foreign else {}
    logged_keys = {point.key for point in logged.points}
    same = {key for name, key in reported.items() if name == key and name in logged_keys}
    if logged_keys >= reported.keys() - {"step"}:  # the reports come from there: MLflow has the step of each value
        same.add("step")
    points = [point for point in child.points if point.key not in same]
    taken = {*(point.key for point in points), *(quantity.key for quantity in of_view(View.MLFLOW))}
    keys = _keys(dict.fromkeys(point.key for point in logged.points), taken)
    params = {key: text for key, text in logged.params.items() if child.params.get(key) != text}
    names, tags = _keys(params, child.params), key_names(logged.tags)
    return child._replace(
        params={**{names[key]: text for key, text in params.items()}, **child.params},
        points=[*points, *(Point(keys[p.key], p.value, p.time_ms, p.step) for p in logged.points)],
        tags={**{tags[key]: text for key, text in logged.tags.items()}, **child.tags},
        inputs=[*child.inputs, *(Input(*each) for each in logged.inputs)],
    )


def _keys(values: Iterable[str], taken: Container[str]) -> dict[str, str]:
    """Return the key of each of the script's names."""
    names = {name: f"{SCRIPT_SECTION}{name}" if name in taken else name for name in values}
    keys = key_names(names.values())
    return {name: keys[text] for name, text in names.items()}
