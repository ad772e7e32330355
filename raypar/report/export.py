"""A study's trials as a file for other programs: `write`. The columns are those of `raypar.report.trial_rows`.

===========  ===================================================================================================
file         what becomes of what it can't hold
===========  ===================================================================================================
``.csv``     Nothing, NaN and empty text are all an empty cell.
``.json``    NaN and infinity are the texts "NaN", "Infinity" and "-Infinity". Reports and step times are in it too.
``.parquet`` Nothing is lost; nothing and NaN are one.
===========  ===================================================================================================
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from raypar.analysis.question import Question
from raypar.errors import RayparError
from raypar.report.plain import as_utf8
from raypar.report.trial_rows import frame_of, rows_of
from raypar.study.trial import TrialResult

StepTimes: TypeAlias = Callable[[str], Sequence[Sequence[float]]]

TABLES = (".csv", ".json", ".parquet")
MARKDOWN = ".md"


def check_path(path: Path, *, force: bool) -> None:
    """Raises RayparError for an ending that is not known, and where a file would be lost that nobody gave up."""
    if path.suffix.lower() not in (*TABLES, MARKDOWN):
        hint = "end the name in .csv, .json, .parquet (all trials) or .md (a summary)"
        raise RayparError(f"{path}: the ending says no format that is known", hint=hint)
    if path.is_dir():
        raise RayparError(f"{path}: is a folder", hint="name a file")
    if path.exists() and not force:
        raise RayparError(f"{path}: is there already", hint="choose another name, or replace it with --force")


def write(
    path: Path,
    question: Question,
    results: Sequence[TrialResult],
    step_times_of: StepTimes,
) -> None:
    """Write the trials; the file's ending, one of `TABLES`, says how. A file that is there is replaced.

    Args:
        step_times_of: an identity's ``[rank][step]`` times in seconds; asked for JSON only, for each trial.

    Raises:
        RayparError: the file can't be written.
    """
    with replacing(path) as there:
        match path.suffix.lower():
            case ".csv":
                frame_of(question, results).to_csv(there, index=False, lineterminator="\n")
            case ".parquet":
                frame_of(question, results).to_parquet(there, index=False)
            case ".json":
                there.write_text(_json(question, results, step_times_of), encoding="utf-8")
            case other:
                raise ValueError(f"no table has the ending {other!r}")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside `path` that takes its place at the end, and leaves it alone where that is not reached.

    Raises:
        RayparError: the file can't be written.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
        os.close(handle)
        try:
            yield Path(name)
            umask = os.umask(0)
            os.umask(umask)
            Path(name).chmod(0o666 & ~umask)  # as any new file; a temporary one is its owner's alone
            Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        hint = "name a file in a folder that is there and that you may write to"
        raise RayparError(f"{path}: can't be written: {error.strerror or error}", hint=hint) from None


def write_text(path: Path, text: str) -> None:
    """Write a text in the place of what is there. Raises RayparError where the file can't be written."""
    with replacing(path) as there:
        there.write_text(text, encoding="utf-8")


def _json(question: Question, results: Sequence[TrialResult], step_times_of: StepTimes) -> str:
    by_identity = {result.spec.identity: result for result in results}
    trials = []
    for row in rows_of(question, results):
        result = by_identity[row["identity"]]
        reports = [dict(report) for report in result.reports]
        trials.append({**row, "reports": reports, "step_times_s": step_times_of(row["identity"])})
    document = {
        "study": question.study_name,
        "metric": question.metric,
        "mode": question.mode,
        "baseline": question.baseline,
        "swept": question.space_keys,
        "trials": trials,
    }
    return as_utf8(json.dumps(_finite(document), indent=1, allow_nan=False, ensure_ascii=False)) + "\n"


def _finite(value: Any) -> Any:
    """The value as JSON can have it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value
