"""Comparison of the losses of two trainings that should do the same work."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import TypeAlias

from raypar import units

Losses: TypeAlias = Mapping[int, float]  # by step

# The first losses are equal but for rounding. Later, rounding has grown.
NUM_EXACT_LOSSES = 20
LOSS_TOLERANCE = 1e-3  # relative difference of these losses
END_TOLERANCE = 0.02  # relative difference of the mean losses of the last tenth
NUM_ERRORS = 2.0  # standard errors of that difference, by which rounding alone may change it in an unsteady training


def difference(first: Losses, second: Losses) -> str | None:
    """Return how the losses of two trainings differ; empty: by no more than rounding; None: they share no step."""
    steps = sorted(first.keys() & second.keys())
    if not steps:
        return None
    exact = steps[:NUM_EXACT_LOSSES]
    # A loss near zero may differ by a small part of what was learned.
    slack = LOSS_TOLERANCE * max(abs(first[step]) for step in exact)
    for step in exact:
        if not math.isclose(first[step], second[step], rel_tol=LOSS_TOLERANCE, abs_tol=slack):
            by = units.percent(LOSS_TOLERANCE, 1)
            return f"differ by more than {by} from step {step} on: {first[step]:.4g} and {second[step]:.4g}"
    ends = [_end({step: losses[step] for step in steps}) for losses in (first, second)]
    one, other = map(statistics.fmean, ends)
    if len(ends[0]) > 1:
        error = math.sqrt(sum(statistics.variance(end) / len(end) for end in ends))
        slack = max(slack, NUM_ERRORS * error)
    if not math.isclose(one, other, rel_tol=END_TOLERANCE, abs_tol=slack):
        return f"differ by more than {units.percent(END_TOLERANCE)} at the end: {one:.4g} and {other:.4g}"
    return ""


def end_of(losses: Losses) -> float:
    """Return the mean loss of the last tenth of the steps."""
    return statistics.fmean(_end(losses))


def _end(losses: Losses) -> list[float]:
    return [losses[step] for step in sorted(losses)[-max(1, len(losses) // 10) :]]
