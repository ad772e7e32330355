"""The points that are worth considering: those that no other beats in every respect.

A point is dominated by another one that is at least as good in every respect by its median, and better in one of them
by more than chance: there the data can tell the two apart. Points that are told apart in no respect don't dominate each
other, however their medians lie. The relation has no circles, so there always is a front. Where everything can be told
apart, it is the front as known from the literature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

CanTell: TypeAlias = Callable[[int, int, int], bool]


def _always(_one: int, _other: int, _objective: int) -> bool:
    return True


def pareto_front(medians: Sequence[Sequence[float]], can_tell: CanTell = _always) -> tuple[int, ...]:
    """The indices of the points on the front, in their order.

    Args:
        medians: ``[point][objective]``, finite; less is better: what is to be large comes with its sign turned.
        can_tell: whether the data can tell point `one` from point `other` in an objective; asked for differing medians.
    """
    table = np.asarray(medians, dtype=float)
    front = []
    for i in range(len(table)):
        # Of thousands of points few are as good in all: those alone are looked at one by one.
        as_good = (table <= table[i]).all(axis=1)
        as_good[i] = False
        if not any(dominates(medians, int(j), i, can_tell) for j in np.flatnonzero(as_good)):
            front.append(i)
    return tuple(front)


def dominates(medians: Sequence[Sequence[float]], one: int, other: int, can_tell: CanTell = _always) -> bool:
    """Whether point `one` leaves nothing to be said for `other`."""
    pairs = list(zip(medians[one], medians[other], strict=True))
    if any(own > theirs for own, theirs in pairs):
        return False
    return any(own < theirs and can_tell(one, other, k) for k, (own, theirs) in enumerate(pairs))
