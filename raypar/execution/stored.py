"""Stored studies: read from the store with all that reports need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.errors import RayparError, suggest

if TYPE_CHECKING:
    from raypar.analysis.analyse import StudyAnalysis
    from raypar.analysis.compare import Origin
    from raypar.analysis.question import CurrentResults, Question
    from raypar.study.trial import TrialResult
    from raypar.track.store import Store

# Tags of an execution that say where its results come from, see raypar.provenance.
_ORIGIN = ("host", "os", "cpu", "cores", "gpu", "command", "load")
_ORIGIN_SECTIONS = ("version.", "git.")


@dataclass(frozen=True)
class StoredStudy:
    """Study as its store has it.

    Attributes:
        results: of all its trials, at least one, without step times.
        origin: the provenance of its executions: each key with every value that occurred, in their order; empty: not in
            the store.
        description: what the study asks, in its author's words; may be empty.
    """

    name: str
    question: Question
    results: tuple[TrialResult, ...]
    origin: Origin
    description: str
    store: Store

    @cached_property
    def analysis(self) -> StudyAnalysis:
        """Analysis of the results, with the final test's outcome where there was one."""
        from raypar.analysis.analyse import analyse
        from raypar.execution.best_model import last_final_test, with_final_test

        return with_final_test(analyse(self.question, self.results), last_final_test(self.store, self.name))

    @cached_property
    def current_results(self) -> CurrentResults:
        """Trials of the current question, and the others."""
        from raypar.analysis.question import current_results

        return current_results(self.question, self.results)

    @property
    def tags(self) -> dict[str, str]:
        """Origin with "or" between values that differ from execution to execution."""
        return {key: " or ".join(values) for key, values in self.origin.items()}

    @property
    def source(self) -> str:
        """Text of its file as of the latest execution; empty where that is not in the store."""
        return self.store.study_source(self.name) or ""


def read_study(name: str, tracking_uri: str, folder: Path, *, price_per_node_hour: float | None = None) -> StoredStudy:
    """Read a study from the store, and from the folder what has not reached the store yet.

    Args:
        price_per_node_hour: instead of the study's own.

    Raises:
        RayparError: there is none of that name, or it has no result.
        StoreError: the store can't be read.
    """
    from raypar.analysis.question import first_sentence, question_from_dict
    from raypar.track.store import Store

    store = Store(tracking_uri, folder)
    results = store.results(name)
    if not results:
        raise unknown_study(name, store)
    try:
        question = question_from_dict(store.question(name))
    except TypeError:
        hint = "run it again: finished trials are kept"
        raise RayparError(f"the store has no record of what study `{name}` asks", hint=hint) from None
    if price_per_node_hour is not None:
        question = replace(question, price_per_node_hour=price_per_node_hour)
    origins = list(store.origins(name))
    if not question.text:  # of a study that an older raypar ran
        question = replace(question, text=first_sentence(origins[0][1]))
    values: dict[str, dict[str, None]] = {}
    for tags, _ in origins:
        for key in sorted(tags):
            if key in _ORIGIN or key.startswith(_ORIGIN_SECTIONS):
                values.setdefault(key, {})[tags[key]] = None
    origin = {key: tuple(reversed(in_order)) for key, in_order in values.items()}
    return StoredStudy(name, question, results, origin, origins[0][1], store)


def unknown_study(name: str, store: Any) -> RayparError:
    """Return the error of a study that has no result in the store."""
    names = [s.name for s in store.studies()]
    if name in names:
        return RayparError(f"study `{name}` has no result yet", hint=f"`raypar resume {name}` runs what is missing")
    hint = suggest(name, names) if names else "the store is empty: `raypar study FILE` makes a study"
    return RayparError(f"no study `{name}` in the store", hint=hint)
