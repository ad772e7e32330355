"""Two points face to face: which is faster, how sure that is, and how many repeats it would take to be surer.

Trials of the same block are compared with each other where there are such; else the two are independent samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtr

from raypar.analysis.stats import (
    LEVEL,
    MEDIAN_TO_MEAN_ERROR,
    MIN_RANKED,
    NUM_RESAMPLES,
    Estimate,
    ratio_estimate,
    resampled_medians,
)

MARGIN = 0.1  # a loss of time that is not worth more trials
POWER = 0.8


class Basis(StrEnum):
    """Where a confidence comes from, in words that fit a report."""

    BOOTSTRAP = f"bootstrap over the repeats, {NUM_RESAMPLES:,} resamples"
    STUDENT = "Student t on logarithms, assumes log-normal times"


@dataclass(frozen=True)
class Confidence:
    """How sure something is.

    Attributes:
        share: 0 to 1, of the resamples or of the distribution.
        num_samples: how many pairs, or how many trials of the point that has fewer.
        is_paired: whether trials of the same block were compared.
    """

    share: float
    basis: Basis
    num_samples: int
    is_paired: bool


def time_ratio(slow: Mapping[int, float], fast: Mapping[int, float]) -> Estimate:
    """How many times as long the first takes as the second: seconds by repeat, at least one each."""
    tops, bottoms, paired = _sides(slow, fast)
    return ratio_estimate(tops, bottoms, paired=paired)


def confidence_of(slow: Mapping[int, float], fast: Mapping[int, float], at_least: float = 1.0) -> Confidence | None:
    """How sure it is that the first takes more than `at_least` times as long; None where either has one trial only."""
    tops, bottoms, paired = _sides(slow, fast)
    size = min(len(tops), len(bottoms))
    if size < 2:
        return None
    top, bottom = np.log(tops), np.log(bottoms) + math.log(at_least)
    if size >= MIN_RANKED:
        return Confidence(_bootstrap_share(top, bottom, paired=paired), Basis.BOOTSTRAP, size, paired)
    if paired:
        centre = float(np.median(top - bottom))
    else:
        centre = float(np.median(top) - np.median(bottom))
    error = MEDIAN_TO_MEAN_ERROR * _error(top, bottom, paired=paired)
    # Degrees of freedom of the smaller group: Welch's are never fewer.
    share = float(stdtr(size - 1, centre / error)) if error > 0 else 0.5 + 0.5 * float(np.sign(centre))
    return Confidence(share, Basis.STUDENT, size, paired)


def joint_share(shares: Sequence[float]) -> float:
    """How sure it is that all of some things are so, each of them as sure as this, however they depend on each other.

    Bonferroni's bound, 1 - sum(1 - share). Whoever has the least median of many owes a part of that to luck: that it
    beats the next one says less, the more there are. No less than what guessing among them would do.
    """
    return max(1 - sum(1 - share for share in shares), 1 / (len(shares) + 1))


def repeats_needed(slow: Mapping[int, float], fast: Mapping[int, float]) -> int | None:
    """About how many trials each of the two needs until the study can tell; None where no spread is known yet.

    It can tell when the ratio's interval excludes 1, or when it ends before a difference that matters (`MARGIN`):
    whichever takes less. The count is that of a normal test of the log ratio with the spread that was observed,
    n = ((z(97.5 %) + z(80 %)) · sqrt(π/2) · spread / distance)².
    """
    tops, bottoms, paired = _sides(slow, fast)
    size = min(len(tops), len(bottoms))
    if size < 2:
        return None
    top, bottom = np.log(tops), np.log(bottoms)
    spread = _error(top, bottom, paired=paired) * math.sqrt(size)
    difference = abs(float(np.median(top) - np.median(bottom)))
    distance = max(difference, math.log1p(MARGIN) - difference)
    wanted = (float(ndtri((1 + LEVEL) / 2)) + float(ndtri(POWER))) * MEDIAN_TO_MEAN_ERROR * spread / distance
    return max(math.ceil(wanted**2), MIN_RANKED, size + 1)


def _sides(slow: Mapping[int, float], fast: Mapping[int, float]) -> tuple[list[float], list[float], bool]:
    """The times to compare, and whether they are pairs."""
    both = sorted(slow.keys() & fast.keys())
    if both and (len(both) > 1 or min(len(slow), len(fast)) == 1):
        return [slow[r] for r in both], [fast[r] for r in both], True
    return [slow[r] for r in sorted(slow)], [fast[r] for r in sorted(fast)], False


def _error(top: NDArray[np.float64], bottom: NDArray[np.float64], *, paired: bool) -> float:
    """Standard error of the mean difference."""
    if paired:
        return float(np.std(top - bottom, ddof=1)) / math.sqrt(len(top))
    return math.sqrt(sum(float(np.var(side, ddof=1)) / len(side) for side in (top, bottom)))


def _bootstrap_share(top: NDArray[np.float64], bottom: NDArray[np.float64], *, paired: bool) -> float:
    """Share of resamples in which the first median is larger; equal ones count half."""
    tops, bottoms = resampled_medians(top, bottom, paired=paired)
    signs = np.sign(tops - bottoms)
    return float(0.5 + 0.5 * np.mean(signs))
