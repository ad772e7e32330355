"""A study's trials as a table: `rows_of`, and as a pandas frame: `frame_of`.

There is one row per trial and one column per quantity; the unit is in the name (`train_time_s`). What differs from
study to study has a prefix: ``point.`` (swept), ``config.`` (every hyperparameter), ``final.`` (the last report) and
``environment.`` (where it ran; several ranks' values are joined by spaces).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from raypar import units
from raypar.analysis.analyse import pair_speedups
from raypar.analysis.question import Question, last_asked
from raypar.report.plain import as_utf8
from raypar.study.trial import TrialResult

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

Row: TypeAlias = Mapping[str, Any]

QUANTITIES = (
    "wall_s",
    "startup_s",
    "data_time_s",
    "warmup_s",
    "train_time_s",
    "eval_time_s",
    "throughput_samples_per_s",
    "energy_j",
)
ENVIRONMENT = (
    "node",
    "device_name",
    "cpu_model",
    "cores",
    "num_threads",
    "cpu_wait_share",
    "foreign_cpu_share",
    "other_load_cores",
    "num_node_cores",
    "cpu_mhz_mean",
    "throttles",
    "energy_of",
    "gang",
)
_LARGEST_INT = 2**63 - 1


def rows_of(question: Question, results: Sequence[TrialResult]) -> list[Row]:
    """One row per result, in the order in which they were started; all rows have the same keys in the same order.

    Values are text, numbers, True and False, or None for what a trial has not; tuples become text as tables show it.
    ``speedup`` is over the baseline's trial of the same block. ``set_aside``: the trial has other settings than those
    that the study asked for last.
    """
    speedups = pair_speedups(question, results)
    aside = {result.spec.identity for result in last_asked(question, results).aside}
    rows = [
        _row(result, speedups.get(result.spec.identity), is_aside=result.spec.identity in aside)
        for result in sorted(results, key=lambda r: (r.started_at, r.spec.order))
    ]
    groups = _in_order(rows)
    return [{key: row.get(key) for key in groups} for row in rows]


def frame_of(question: Question, results: Sequence[TrialResult]) -> DataFrame:
    """The rows as a pandas frame: whole numbers as Int64, truth values as boolean, numbers as float64, text as string.

    ``.attrs`` has ``study``, ``metric``, ``mode``, ``baseline`` and ``swept``.
    """
    import pandas as pd  # type: ignore[import-untyped,unused-ignore]

    rows = rows_of(question, results)
    columns = {key: [row[key] for row in rows] for key in (rows[0] if rows else ())}
    frame = pd.DataFrame({key: _series(pd, values) for key, values in columns.items()})
    frame.attrs.update(
        study=question.study_name,
        metric=question.metric,
        mode=question.mode,
        baseline={key: list(v) if isinstance(v, tuple) else v for key, v in question.baseline.items()},
        swept=list(question.space_keys),
    )
    return frame


def _row(result: TrialResult, speedup: float | None, *, is_aside: bool) -> dict[str, Any]:
    spec, failure = result.spec, result.failure
    row: dict[str, Any] = {
        "study": spec.study,
        "workload": spec.workload,
        "identity": spec.identity,
        "state": result.state.value,
        "set_aside": is_aside,
        "repeat": spec.repeat,
        "order": spec.order,
        "seed": spec.seed,
        "attempts": result.attempts,
        "started_at_s": result.started_at,
        **{f"point.{key}": value for key, value in spec.point.items()},
        **{key: getattr(result, key) for key in QUANTITIES},
        "speedup": speedup,
        **{f"final.{key}": value for key, value in result.final.items()},
        **{f"config.{key}": value for key, value in spec.config.items()},
        **{f"environment.{key}": _of_ranks(result.environment.get(key)) for key in ENVIRONMENT},
        "failure_kind": failure.kind.value if failure else None,
        "failure": failure.message if failure else None,
    }
    return {as_utf8(key): _cell(value) for key, value in row.items()}


def _in_order(rows: Iterable[Row]) -> list[str]:
    """Every key once: those of later rows stand with their own kind, not at the end."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    places = {kind: i for i, kind in reversed(list(enumerate(key.partition(".")[0] for key in keys)))}
    return sorted(keys, key=lambda key: places[key.partition(".")[0]])


def _of_ranks(value: Any) -> Any:
    """One value where all ranks have the same, else theirs by rank."""
    if not isinstance(value, (list, tuple)):
        return value
    shown = [",".join(map(str, each)) if isinstance(each, (list, tuple)) else each for each in value]
    return shown[0] if shown and all(each == shown[0] for each in shown) else " ".join(map(str, shown))


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return value if abs(value) <= _LARGEST_INT else str(value)
    return as_utf8(value if isinstance(value, str) else units.value_of(value))


def _series(pd: Any, values: Sequence[Any]) -> Any:
    """One type for a whole column: where values have several, they are text."""
    known = [v for v in values if v is not None]
    if known and all(isinstance(v, bool) for v in known):
        return pd.Series(values, dtype="boolean")
    if any(isinstance(v, (str, bool)) for v in known) or not known:
        return pd.Series([v if v is None or isinstance(v, str) else units.value_of(v) for v in values], dtype="string")
    if all(isinstance(v, int) for v in known):
        return pd.Series(values, dtype="Int64")
    return pd.Series([math.nan if v is None else float(v) for v in values], dtype="float64")
