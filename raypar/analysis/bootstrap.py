"""Medians of samples drawn anew, with replacement: what other repeats might have given.

Efron, "Bootstrap methods: another look at the jackknife", Annals of Statistics 7(1), 1979.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = NDArray[Any]  # unsigned integers

NUM_RESAMPLES = 10_000
BOOTSTRAP_SEED = 20150915
MOST_KEPT = 100  # values in samples whose draws are kept
MOST_DRAWN = 2_000_000  # numbers in memory at a time


def resampled_medians(top: Floats, bottom: Floats, *, paired: bool) -> tuple[Floats, Floats]:
    """Medians of both samples, shape ``(NUM_RESAMPLES,)`` each; pairs are drawn whole.

    The same samples give the same medians.
    """
    if paired:
        top_counts = bottom_counts = _draws(len(top))[0]
    else:
        top_counts, bottom_counts = _draws(len(top), len(bottom))
    return _drawn_medians(top, top_counts), _drawn_medians(bottom, bottom_counts)


def _draws(*sizes: int) -> tuple[Counts, ...]:
    """For samples of these sizes, how often each value is in each resample: ``[value, resample]``.

    A report asks for the same few sizes thousands of times.
    """
    return _kept_draws(sizes) if sum(sizes) <= MOST_KEPT else _drawn(sizes)


@lru_cache(maxsize=16)
def _kept_draws(sizes: tuple[int, ...]) -> tuple[Counts, ...]:
    return _drawn(sizes)


def _drawn(sizes: tuple[int, ...]) -> tuple[Counts, ...]:
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    found = []
    for size in sizes:
        counts = np.empty((size, NUM_RESAMPLES), dtype=np.min_scalar_type(size))
        num_rows = max(1, MOST_DRAWN // size)  # at a time: the stream is the same as of all at once
        for start in range(0, NUM_RESAMPLES, num_rows):
            rows = min(num_rows, NUM_RESAMPLES - start)
            places = rng.integers(size, size=(rows, size)) + size * np.arange(rows)[:, np.newaxis]
            counts[:, start : start + rows] = np.bincount(places.ravel(), minlength=rows * size).reshape(rows, size).T
        found.append(counts)
    return tuple(found)


def _drawn_medians(sample: Floats, counts: Counts) -> Floats:
    """The median of each resample, from how often it holds each value: sorting once is enough for all of them."""
    size = len(sample)
    order = np.argsort(sample)
    reached = np.zeros_like(counts[0])  # how many of the resample's values are at most the i-th smallest of the sample
    low, high = np.zeros_like(reached), np.zeros_like(reached)
    for row in order:
        reached += counts[row]
        low += reached < (size + 1) // 2
        high += reached < size // 2 + 1
    return np.asarray((sample[order[low]] + sample[order[high]]) / 2)
