"""The command that writes a study into a file, and what it reads from the store for it: `read_study`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raypar.cli.common import say, stdout, told, unknown_study, uri_of
from raypar.cli.options import Debug, StudyName, TrackingUri
from raypar.errors import RayparError

if TYPE_CHECKING:
    from raypar.analysis.compare import Origin
    from raypar.analysis.question import Question
    from raypar.study.trial import TrialResult
    from raypar.track.store import Store

# Tags of an execution that say where its results come from, see raypar.provenance.
_ORIGIN = ("host", "os", "cpu", "cores", "gpu")
_ORIGIN_SECTIONS = ("version.", "git.")


def export(
    name: StudyName,
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="All trials as .csv, .json or .parquet; a summary as .md.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
    tracking_uri: TrackingUri = None,
    debug: Debug = False,
) -> None:
    """Write a study's trials into a file for other programs, or a summary for a paper or a pull request.

    A table has a row per trial; units stand in the columns' names. In a .csv, text that a spreadsheet would take for a
    formula gets an apostrophe in front. A .json also has the reports and the time of every step.
    """
    with told(debug):
        from raypar.report.export import MARKDOWN, check_path, markdown_of, write, write_markdown

        check_path(path, force=force)
        study = read_study(name, uri_of(tracking_uri), Path.cwd())
        if path.suffix.lower() == MARKDOWN:
            from raypar.analysis.chosen import with_final_test
            from raypar.analysis.speedup import analyse
            from raypar.final_test import last_final_test

            analysis = with_final_test(analyse(study.question, study.results), last_final_test(study.store, name))
            write_markdown(path, markdown_of(analysis, study.origin, study.description))
            say(stdout(), f"wrote a summary of {name} to {path}")
            return
        write(path, study.question, study.results, lambda identity: study.store.step_times(name, identity))
        say(stdout(), f"wrote the {len(study.results)} trials of {name} to {path}")


@dataclass(frozen=True)
class StoredStudy:
    """A study as its store has it.

    Attributes:
        results: of its trials, at least one, without step times.
        origin: the provenance of its executions: each key with every value that occurred; empty: not in the store.
        description: what the study asks, in its author's words; may be empty.
    """

    question: Question
    results: tuple[TrialResult, ...]
    origin: Origin
    description: str
    store: Store


def read_study(name: str, tracking_uri: str, folder: Path) -> StoredStudy:
    """The study from the store, and from the folder what has not reached the store yet.

    Raises:
        RayparError: there is none of that name, or it has no result.
        StoreError: the store can't be read.
    """
    from raypar.analysis.question import question_from_dict
    from raypar.track.reader import RunReader
    from raypar.track.store import Store

    store = Store(tracking_uri, folder)
    results = store.results(name)
    if not results:
        raise unknown_study(name, store)
    try:
        question = question_from_dict(store.question(name))
    except (KeyError, TypeError):
        hint = "run it again: finished trials are kept"
        raise RayparError(f"the store does not say what study `{name}` asks", hint=hint) from None
    tags, description = store.origin(name)
    # The latest execution, then the others from the last to the first.
    executions = [tags, *(run.tags for run in RunReader(tracking_uri, folder).runs(name, kind="execution"))]
    origin: dict[str, dict[str, None]] = {}
    for own in executions:
        for key in sorted(own):
            if key in _ORIGIN or key.startswith(_ORIGIN_SECTIONS):
                origin.setdefault(key, {})[own[key]] = None
    values = {key: tuple(reversed(found)) for key, found in origin.items()}
    return StoredStudy(question, results, values, description, store)
