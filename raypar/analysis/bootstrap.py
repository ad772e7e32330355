"""Medians of samples drawn anew, with replacement: what other repeats might have given.

Efron, "Bootstrap methods: another look at the jackknife", Annals of Statistics 7(1), 1979.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

NUM_RESAMPLES = 10_000
BOOTSTRAP_SEED = 20150915


def resampled_medians(top: Floats, bottom: Floats, *, paired: bool) -> tuple[Floats, Floats]:
    """Medians of both samples, shape ``(NUM_RESAMPLES,)`` each; pairs are drawn whole.

    The same samples give the same medians.
    """
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    drawn_top = rng.integers(len(top), size=(NUM_RESAMPLES, len(top)))
    drawn_bottom = drawn_top if paired else rng.integers(len(bottom), size=(NUM_RESAMPLES, len(bottom)))
    return np.median(top[drawn_top], axis=1), np.median(bottom[drawn_bottom], axis=1)
