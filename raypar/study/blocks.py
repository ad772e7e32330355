"""Blocks of a study: one repeat of each of its points, in random order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from raypar.study.options import ON_CPU, Auto
from raypar.study.space import Value
from raypar.study.trial import REVISION, Placement, TrialSpec, point_label
from raypar.units import counted

if TYPE_CHECKING:
    from raypar.study.study import Study

MIN_BLOCKS = 3  # that a study which runs until it is settled completes before it first evaluates its results


def num_first_blocks(study: Study) -> int:
    """Return the number of blocks before anything is decided."""
    return max(MIN_BLOCKS, study.num_repeats) if study.until else study.num_repeats


def repeats_text(study: Study) -> str:
    """Return ``3 repeats``, or ``3 to 30 repeats, until settled``."""
    if not study.until:
        return counted(study.num_repeats, "repeat")
    return f"{num_first_blocks(study)} to {study.max_repeats} repeats, until {study.until}"


def block(
    study: Study, repeat: int, points: Sequence[Mapping[str, Value]], *, auto: Auto = ON_CPU
) -> tuple[TrialSpec, ...]:
    """Return a trial of each point, in execution order, the same for the same study and points.

    Placements are in random order, and so are the trials within a placement, so that a drift over time can't be
    mistaken for the effect of a hyperparameter. Trials that differ only in the revision of the code follow each other.
    """
    shuffled = random.Random(f"{study.seed}/{repeat}")
    by_placement: dict[Placement, dict[str, list[TrialSpec]]] = {}
    for point in points:
        spec = study.trial(point, repeat, auto=auto)
        rest = point_label({key: value for key, value in point.items() if key != REVISION})
        group = by_placement.setdefault(replace(spec.placement, revision=""), {})
        group.setdefault(rest, []).append(spec)
    groups = [list(group.values()) for group in by_placement.values()]
    shuffled.shuffle(groups)
    for pairs in groups:
        shuffled.shuffle(pairs)
        for pair in pairs:
            shuffled.shuffle(pair)
    ordered = itertools.chain.from_iterable(itertools.chain(*groups))
    first = repeat * len(study.points())
    return tuple(replace(spec, order=first + i) for i, spec in enumerate(ordered))
