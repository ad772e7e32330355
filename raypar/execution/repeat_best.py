"""Follow-up of a search: its leading points with repeats, as a study of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from raypar.analysis.analyse import analyse
from raypar.analysis.search import scored_points
from raypar.errors import RayparError
from raypar.execution.options import Options
from raypar.execution.source import source_of
from raypar.study.loader import LoadedStudy
from raypar.study.space import Grid
from raypar.study.study import ListedStudy, Study
from raypar.study.trial import TrialResult, point_label

SUFFIX = "-best"
OF_A_SEARCH = ("searcher", "scheduler", "num_trials")


def repeating_best(
    loaded: LoadedStudy, options: Options, num_points: int, results: Sequence[TrialResult]
) -> tuple[LoadedStudy, Options]:
    """Return the study that repeats a search's leading points, and the options that run it.

    Its trials have other seeds than those of the search, whose best values owe a part of their lead to chance.

    Args:
        loaded: the search.
        results: those of the search in the store.

    Raises:
        RayparError: the study is not a search, or fewer than two points have a metric.
    """
    search = loaded.study
    if not search.is_search:
        hint = "leave it out: --repeats sets the trials of each point"
        raise RayparError(f"--repeat-best {num_points}: {loaded.path} is not a search", hint=hint)
    analysis = analyse(search, results)
    points = [p.point for p, _ in scored_points(analysis.question, analysis.points)][:num_points]
    if len(points) < 2:
        have = "only one trial has" if points else "no trial has"
        hint = f"run `raypar study {loaded.path}` first"
        raise RayparError(f"--repeat-best {num_points}: {have} {search.judged_by.name} in the store", hint=hint)
    kept = {each.name: getattr(search, each.name) for each in fields(Study) if each.name not in OF_A_SEARCH}
    changes = {
        "name": search.name + SUFFIX,
        "space": {key: Grid(tuple(dict.fromkeys(p[key] for p in points))) for key in search.space},
        "baseline": {},
        "target": None,  # repeats train to their end: `raypar recommend --target` compares their times to the target
        "description": f"Is {point_label(points[0])} the best of {search.name}?",
        "listed": tuple(points),
        "leader": points[0] if search.target is None else {},
    }
    study = ListedStudy(**{**kept, **changes})
    return replace(loaded, study=study), replace(options, source=source_of(study, first_repeat=1))
