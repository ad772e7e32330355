"""Addition of what a trial's script logged to MLflow itself to the trial's run. Pure: no store, no mlflow."""

from __future__ import annotations

from collections.abc import Container, Iterable

from raypar.study.quantity import View, of_view
from raypar.study.trial import TrialResult
from raypar.track.names import key_names
from raypar.track.runs import ChildRun, Input, Point, series_keys
from raypar.train.logged_run import LoggedRun

SECTION = "script/"  # of keys that raypar uses for something else


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
    names = {name: f"{SECTION}{name}" if name in taken else name for name in values}
    keys = key_names(names.values())
    return {name: keys[text] for name, text in names.items()}
