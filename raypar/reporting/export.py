"""Export of a study's trials as CSV, JSON, Parquet or Markdown.

There is one row per trial and one column per quantity. Names include the unit (`train_time_s`). Columns that differ
between studies have a prefix: ``point.`` (swept), ``config.`` (every hyperparameter), ``final.`` (the last report) and
``environment.`` (where it ran; values of several ranks are joined by spaces). ``repeat`` and ``order`` count from 1, as
in tables and labels.

===========  ===================================================================================================
file         values that it can't represent
===========  ===================================================================================================
``.csv``     None, NaN and empty text become an empty cell. An apostrophe precedes text that a spreadsheet would read as
             a formula: ``=``, ``+``, ``-`` or ``@`` at its beginning.
``.json``    NaN and infinity become "NaN", "Infinity" and "-Infinity". It also has reports and step times.
``.parquet`` All values are kept; None and NaN are the same.
===========  ===================================================================================================
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from raypar import units
from raypar.analysis.analyse import pair_speedups
from raypar.analysis.question import Question, after_first_sentence, current_results
from raypar.errors import RayparError
from raypar.markdown import harmless
from raypar.reporting.points import point_columns, summary_layout
from raypar.reporting.text import as_utf8, check_file, replacing
from raypar.reporting.view import StudyView
from raypar.study.quantity import View, of_view
from raypar.study.trial import TrialResult, point_label

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]


TrialRow: TypeAlias = Mapping[str, Any]

ENVIRONMENT = (
    *("node", "device_name", "cpu_model", "cores", "num_threads", "cpu_wait_share", "foreign_cpu_share"),
    *("other_load_cores", "num_node_cores", "cpu_mhz_mean", "throttles", "gpu_mhz_mean"),
    *("gpu_slowdowns", "gpu_celsius", "gpu_other_processes", "energy_of", "gang"),
)
_TIMES = ("train_time_s", "wall_s", "speedup")
FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")
_LARGEST_INT = 2**63 - 1


def rows_of(question: Question, results: Sequence[TrialResult]) -> list[TrialRow]:
    """Return one row per result, in starting order; all rows have the same keys in the same order.

    Values are text, numbers, True and False, or None if a trial lacks them. Tuples become text, as in tables.
    ``speedup`` is over the baseline's trial in the same block. ``set_aside`` means that the trial's settings are not
    the latest settings of the study.
    """
    speedups = pair_speedups(question, results)
    excluded = {result.spec.identity for result in current_results(question, results).excluded}
    rows = [
        _row(result, speedups.get(result.spec.identity), is_excluded=result.spec.identity in excluded)
        for result in sorted(results, key=lambda r: (r.started_at, r.spec.order))
    ]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    # Keys that first appear in later rows go to the others with their prefix, not to the end.
    places = {kind: i for i, kind in reversed(list(enumerate(key.partition(".")[0] for key in keys)))}
    keys.sort(key=lambda key: places[key.partition(".")[0]])
    return [{key: row.get(key) for key in keys} for row in rows]


def frame_of(question: Question, results: Sequence[TrialResult]) -> DataFrame:
    """Return the rows as a pandas frame with the types Int64, boolean, float64 and string.

    ``.attrs`` has ``study``, ``metric``, ``mode``, ``baseline`` and ``swept``.
    """
    import pandas as pd  # type: ignore[import-untyped,unused-ignore]

    rows = rows_of(question, results)
    columns = {key: [row[key] for row in rows] for key in (rows[0] if rows else ())}
    frame = pd.DataFrame({key: _series(pd, values) for key, values in columns.items()})
    frame.attrs.update(_asked(question))
    return frame


def short_names(frame: DataFrame) -> DataFrame:
    """Return the columns of `frame_of` with swept hyperparameters and the last report without prefix.

    A prefix is kept if another column has the name.
    """
    taken = set(frame)
    names: dict[str, str] = {}
    for column in (c for prefix in ("point.", "final.") for c in frame if c.startswith(prefix)):
        if (short := column.partition(".")[2]) not in taken:
            names[column] = short
            taken.add(short)
    renamed = frame.rename(columns=names)
    renamed.attrs = dict(frame.attrs)
    return renamed


def tidy(frame: DataFrame) -> DataFrame:
    """Return the columns of `frame_of` that differ between its trials; constant ones are in ``.attrs["constants"]``.

    Swept hyperparameters come first, then how the trial ended, its times, and its last report. Names are those of
    `short_names`. Empty columns are dropped.
    """
    swept = [c for c in frame if c.startswith("point.")]
    first = [*swept, "repeat", "state", *_TIMES, f"final.{frame.attrs['metric']}"]
    copies = {f"config.{column.removeprefix('point.')}" for column in swept}
    empty = {column for column in frame if frame[column].isna().all()}
    shared = {c: frame[c].tolist()[0] for c in frame if c not in empty and frame[c].nunique(dropna=False) == 1}
    names = dict(zip(frame, short_names(frame), strict=True))
    kept = [c for c in dict.fromkeys([*first, *frame]) if c in frame and c not in empty | copies]
    kept = [c for c in kept if c in first or c not in shared]
    tidied = frame[kept].rename(columns=names)
    constants = {names[c]: value for c, value in shared.items() if c not in first}
    tidied.attrs = {**frame.attrs, "constants": constants}
    return tidied


def _row(result: TrialResult, speedup: float | None, *, is_excluded: bool) -> dict[str, Any]:
    spec, failure, conditions = result.spec, result.failure, result.conditions.to_stored()
    row: dict[str, Any] = {
        **{key: getattr(spec, key) for key in ("study", "workload", "identity")},
        "state": result.state.value,
        "set_aside": is_excluded,
        "repeat": spec.repeat + 1,
        "order": spec.order + 1,
        "seed": spec.seed,
        "attempts": result.attempts,
        "started_at_s": result.started_at,
        **{f"point.{key}": value for key, value in spec.point.items()},
        **{q.key: q.of(result) for q in of_view(View.RECORD)},
        "speedup": speedup,
        **{f"final.{key}": value for key, value in result.final.items()},
        **{f"config.{key}": value for key, value in spec.config.items()},
        **{f"environment.{key}": _of_ranks(conditions.get(key)) for key in ENVIRONMENT},
        "failure_kind": failure.kind.value if failure else None,
        "failure": failure.message if failure else None,
    }
    return {as_utf8(key): _cell(value) for key, value in row.items()}


def _of_ranks(value: Any) -> Any:
    """Return the value that all ranks share, else the values by rank."""
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
    """Return a column of one type; values of several types become text."""
    present = [v for v in values if v is not None]
    if present and all(isinstance(v, bool) for v in present):
        return pd.Series(values, dtype="boolean")
    if any(isinstance(v, (str, bool)) for v in present) or not present:
        return pd.Series([v if v is None or isinstance(v, str) else units.value_of(v) for v in values], dtype="string")
    if all(isinstance(v, int) for v in present):
        return pd.Series(values, dtype="Int64")
    return pd.Series([math.nan if v is None else float(v) for v in values], dtype="float64")


def answer_markdown(view: StudyView, max_points: int | None = None) -> str:
    """Return a study's question and answer, its points in a table, and the recommended one.

    Args:
        max_points: rows of the table; None: all.
    """
    points = view.analysis.points
    parts = [view.headline]
    if points:
        columns = point_columns(view.analysis, summary_layout(), max_points)
        rule = ["---:" if column.is_number else "---" for column in columns]
        rows = [[column.head for column in columns], rule, *zip(*(column.cells for column in columns), strict=True)]
        parts.append("\n".join(f"| {' | '.join(map(_markdown_cell, cells))} |" for cells in rows))
    if num_left := len(points[max_points:]) if max_points is not None else 0:
        parts.append(f"... and {units.counted(num_left, 'more point')}.")
    parts += [*view.recommended, view.analysis.verdict.final_test]
    return as_utf8(harmless("\n\n".join(filter(None, parts))))


def _markdown_cell(text: str) -> str:
    """Return a text that neither ends its cell nor its row."""
    return " ".join(text.split()).replace("|", "&#124;")


def markdown_of(view: StudyView, origin: Mapping[str, Sequence[str]], description: str = "") -> str:
    """Return a study's answer and findings for a paper or a pull request, without HTML of its texts.

    Args:
        origin: provenance of its executions, each key with every value that occurred; empty: unknown.
        description: the study's question in its author's words.
    """
    analysis = view.analysis
    swept = ", ".join(analysis.question.space_keys) or "nothing"
    asked = f"Swept: {swept}. "
    if analysis.question.baseline:
        asked += f"Compared with: {point_label(analysis.question.baseline)}. "
    asked += f"{units.counted(len(analysis.points), 'point')}, {units.counted(analysis.num_trials, 'trial')}."
    warnings = [f"- **Warning:** {w.detail.removesuffix('.')}. {w.advice}" for w in analysis.warnings]
    parts = [
        f"# {analysis.question.study_name}",
        answer_markdown(view),
        view.importance,
        view.legend,
        "\n".join(f"- {statement}" for statement in analysis.statements),
        "\n".join(warnings),
        after_first_sentence(description) if analysis.question.text else description,
        asked,
        f"Provenance: {provenance_line(origin)}",
    ]
    return as_utf8(harmless("\n\n".join(part for part in parts if part))) + "\n"


def provenance_line(origin: Mapping[str, Sequence[str]]) -> str:
    """Return a sentence with versions, machine and commit; values that differ between executions are joined by "or"."""
    if not origin:
        return "not in the store."
    texts = {key: " or ".join(values) for key, values in origin.items()}
    versions = [f"{key.removeprefix('version.')} {texts[key]}" for key in texts if key.startswith("version.")]
    machine = [texts[key] for key in ("cpu", "os") if key in texts]
    machine += [f"{texts['cores']} cores"] if "cores" in texts else []
    machine += [f"GPU {texts['gpu']}"] if texts.get("gpu", "none") != "none" else []
    node = f"on {texts['host']} ({'; '.join(machine)})" if "host" in texts else "; ".join(machine)
    parts = [", ".join(versions), node]
    if "git.commit" in texts:
        changed = " with uncommitted changes" if "yes" in origin.get("git.dirty", ()) else ""
        parts.append(f"commit {texts['git.commit']}{changed}")
    return "; ".join(part for part in parts if part) + "."


StepTimes: TypeAlias = Callable[[str], Sequence[Sequence[float]]]
TABLES, MARKDOWN = (".csv", ".json", ".parquet"), ".md"


def check_path(path: Path, *, force: bool) -> None:
    """Raise RayparError if a file can't be written: wrong suffix, bad folder, or existing file without `force`."""
    if path.suffix.lower() not in (*TABLES, MARKDOWN):
        hint = "end the name in .csv, .json, .parquet (all trials) or .md (a summary)"
        raise RayparError(f"{path}: unknown file format", hint=hint)
    check_file(path, force=force)


def write(path: Path, question: Question, results: Sequence[TrialResult], step_times_of: StepTimes) -> None:
    """Write the trials in the format of the file's suffix, one of `TABLES`. An existing file is replaced.

    Args:
        step_times_of: returns the ``[rank][step]`` times of an identity in seconds; called only for JSON.

    Raises:
        RayparError: the file can't be written.
    """
    with replacing(path) as there:
        ending = path.suffix.lower()
        if ending == ".json":
            there.write_text(_json(question, results, step_times_of), encoding="utf-8")
        elif ending == ".parquet":
            frame_of(question, results).to_parquet(there, index=False)
        else:
            frame_of(question, results).map(_no_formula).to_csv(there, index=False, lineterminator="\n")


def _no_formula(value: Any) -> Any:
    """Return a cell that no spreadsheet runs: https://owasp.org/www-community/attacks/CSV_Injection."""
    is_formula = isinstance(value, str) and value.startswith(FORMULA_SIGNS) and not _is_number(value)
    return f"'{value}" if is_formula else value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _asked(question: Question) -> dict[str, Any]:
    """Return the study's question as it appears in files and frames."""
    baseline = {key: list(v) if isinstance(v, tuple) else v for key, v in question.baseline.items()}
    asked = {"study": question.study_name, "metric": question.metric, "mode": question.mode, "baseline": baseline}
    return asked | {"swept": list(question.space_keys)}


def _json(question: Question, results: Sequence[TrialResult], step_times_of: StepTimes) -> str:
    reports = {result.spec.identity: list(map(dict, result.reports)) for result in results}
    trials = [
        {**row, "reports": reports[row["identity"]], "step_times_s": step_times_of(row["identity"])}
        for row in rows_of(question, results)
    ]
    document = {**_asked(question), "trials": trials}
    return as_utf8(json.dumps(_finite(document), indent=1, allow_nan=False, ensure_ascii=False)) + "\n"


def _finite(value: Any) -> Any:
    """Return the value in a form that JSON can represent."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value
