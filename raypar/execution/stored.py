"""Stored studies, read from the store with everything that reports need."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.errors import RayparError, suggest
from raypar.masking import masked
from raypar.units import counted, listed

if TYPE_CHECKING:
    from raypar.analysis.analyse import StudyAnalysis
    from raypar.analysis.compare import Origin
    from raypar.analysis.question import Question
    from raypar.study.trial import TrialResult
    from raypar.track.store import Store

# Tags with the provenance of an execution's results; see raypar.provenance.
_ORIGIN = ("host", "os", "cpu", "cores", "gpu", "command", "load")
SINCE_FORMS = "2026-11-23, 2026-11-23T14:00, last, a number from 1 to {number}"
MAX_STUDIES_SHOWN = 3  # from another folder
MAX_EXECUTION_DIGITS = 4  # a date without dashes has more
_ORIGIN_SECTIONS = ("version.", "git.")


@dataclass(frozen=True)
class StoredStudy:
    """Study as read from the store.

    Attributes:
        results: results of its trials, at least one, without step times.
        origin: provenance of its executions: every value of each key, in order.
        description: the study's question in its author's words; may be empty.
        scope: note on the executions that the results are from; empty: all.
    """

    name: str
    question: Question
    results: tuple[TrialResult, ...]
    origin: Origin
    description: str
    store: Store
    scope: str = ""

    @cached_property
    def analysis(self) -> StudyAnalysis:
        """Analysis of the results, with the outcome of the final test if there was one."""
        from raypar.analysis.analyse import analyse
        from raypar.execution.best_model import last_final_test, with_final_test

        analysis = replace(analyse(self.question, self.results), scope=self.scope)
        return with_final_test(analysis, last_final_test(self.store, self.name))

    @property
    def tags(self) -> dict[str, str]:
        """Origin, with "or" between values that differ between executions."""
        return {key: " or ".join(values) for key, values in self.origin.items()}

    @property
    def source(self) -> str:
        """Text of its file at the latest execution; empty if the store does not have it."""
        return self.store.study_source(self.name) or ""


def read_study(
    name: str, tracking_uri: str, folder: Path, *, price_per_node_hour: float | None = None, since: str | None = None
) -> StoredStudy:
    """Read a study from the store, with the records in a folder that are not in the store yet.

    Args:
        price_per_node_hour: replaces that of the study.
        since: as for `results_since`.

    Raises:
        RayparError: no study has that name, or it has no result.
        StoreError: the store can't be read.
    """
    from raypar.analysis.question import first_sentence, question_from_dict
    from raypar.track.store import Store

    store = Store(tracking_uri, folder)
    results, scope = results_since(since, name, results_of(name, store), store)
    try:
        question = replace(question_from_dict(store.question(name)), study_name=name)  # it may have been renamed
    except TypeError:
        hint = "run it again: finished trials are kept"
        raise RayparError(f"the store has no record of what study `{name}` asks", hint=hint) from None
    file = str(store.resume_info(name).get("file", ""))
    question = replace(question, code={**question.code, **code_on_disk(file, results, folder)})
    if price_per_node_hour is not None:
        question = replace(question, price_per_node_hour=price_per_node_hour)
    origins = list(store.origins(name))
    if not question.text:  # the study was run by an older version of raypar
        question = replace(question, text=first_sentence(origins[0][1]))
    values: dict[str, dict[str, None]] = {}
    for tags, _ in origins:
        for key in sorted(tags):
            if key in _ORIGIN or key.startswith(_ORIGIN_SECTIONS):
                values.setdefault(key, {})[tags[key]] = None
    origin = {key: tuple(reversed(in_order)) for key, in_order in values.items()}
    return StoredStudy(name, question, results, origin, origins[0][1], store, scope)


def results_of(study: str, store: Store) -> tuple[TrialResult, ...]:
    """Return the results of a study. Raises RayparError if it has none."""
    if not (results := store.results(study)):
        raise unknown_study(study, store)
    return results


def code_on_disk(file: str, results: Sequence[TrialResult], folder: Path) -> dict[str, dict[str, str]]:
    """Return `Question.code` of a study file now; empty if it is unreadable or outside the folder.

    Args:
        file: path from the store. Others may write to it, so the file is not run.
    """
    from raypar.execution.options import is_in_folder
    from raypar.provenance import source_files

    if not file or not is_in_folder(file, folder) or any(result.spec.placement.revision for result in results):
        return {}
    path = Path(file).resolve()
    names = sorted(
        {name for result in results for name in result.code if is_in_folder(str(path.parent / name), folder)}
    )
    with suppress(OSError, ValueError):
        return {"": dict(source_files(path, path.read_text(encoding="utf-8-sig"), names).digests)}
    return {}


def results_since(
    since: str | None, study: str, results: tuple[TrialResult, ...], store: Store
) -> tuple[tuple[TrialResult, ...], str]:
    """Return the results of the executions since a certain one, and a note on the others.

    Args:
        since: ISO 8601 date or time, ``last``, or the number (from 1) or a prefix of the id of an execution; None: all.

    Raises:
        RayparError: `since` is invalid, or there is no result since then.
    """
    if since is None:
        return results, ""
    executions = store.executions(study)
    begins = [execution.started_at for execution in executions]
    if since == "last":
        begin = begins[-1:]
    elif since.isdecimal() and len(since) <= MAX_EXECUTION_DIGITS:
        begin = begins[int(since) - 1 :][:1] if int(since) else []
    else:
        try:
            earliest = datetime.fromisoformat(since).timestamp()
        except (ValueError, OverflowError, OSError):
            ids = [(e.uid, e.run_id) for e in executions]
            begin = [
                at for at, each in zip(begins, ids, strict=True) if any(i.startswith(since) for i in each if since)
            ]
        else:
            begin = [at for at in begins if at >= earliest][:1]
            if not begin:
                last = f"the last one began {_moment(begins[-1])}" if begins else "the store has none"
                raise RayparError(f"--since {since}: no execution of `{study}` began since then", hint=last)
    if len(begin) != 1:
        what = "names several executions" if begin else f"is neither a date nor an execution of `{study}`"
        hint = f"write {SINCE_FORMS}, or the id of an execution in MLflow"
        raise RayparError(f"--since {since}: {what}", hint=hint.format(number=max(1, len(begins))))
    later = tuple(result for result in results if result.started_at >= begin[0])
    if not later:
        raise RayparError(f"--since {since}: no trial was run since {_moment(begin[0])}", hint="choose an earlier one")
    num_excluded = len(results) - len(later)
    excluded = f"{counted(num_excluded, 'earlier trial')} excluded" if num_excluded else "which is all of them"
    return later, f"since {_moment(begin[0])} ({excluded})"


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M")


def unknown_study(name: str, store: Store) -> RayparError:
    """Return the error for a study without results in the store."""
    names = [s.name for s in store.studies()]
    if name in names:
        hint = f"`raypar store resume {name}` runs what is missing"
        return RayparError(f"study `{name}` has no result yet", hint=hint)
    where = masked(store.tracking_uri)
    if names and name not in studies_above(store)[1]:
        return RayparError(f"no study `{name}` in the store", hint=suggest(name, names))
    hint = f"the store {where} {'has other studies' if names else 'is empty: `raypar study FILE` makes a study'}"
    return RayparError(f"no study `{name}` in the store", hint="; ".join(filter(None, [hint, hint_above(store, name)])))


def studies_above(store: Store) -> tuple[Path, tuple[str, ...]]:
    """Return the closest parent folder whose store has studies, and their names, for hints in a subfolder.

    There are no names if no such folder exists, or if the user has chosen a store.
    """
    from raypar.track.store import study_names

    here = store.project_dir.absolute()
    if store.tracking_uri == f"sqlite:///{here}/mlflow.db":
        for folder in here.parents:
            with suppress(OSError):  # folders of other users
                uri = f"sqlite:///{folder}/mlflow.db"
                if (folder / "mlflow.db").is_file() and (names := study_names(uri, folder)):
                    return folder, names
    return here, ()


def hint_above(store: Store, name: str = "") -> str:
    """Return a hint to the studies, or the one of this name, in a parent folder; empty if there are none."""
    folder, names = studies_above(store)
    if not names:
        return ""
    what = listed([f"`{each}`" for each in ([name] if name in names else names)], MAX_STUDIES_SHOWN)
    at = shlex.quote(str(folder))
    return f"the store of {folder} has {what}: `cd {at}`, or --tracking-uri sqlite:///{at}/mlflow.db"
