"""Gradient noise scale of a study's points: the batch up to which a larger batch pays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

from raypar import units
from raypar.analysis.question import PointSamples
from raypar.analysis.stats import LEVEL, Estimate, Method
from raypar.study.gradient_noise import Moments, measured_blocks, noise_scale, weighted
from raypar.study.trial import point_label

MAX_NAMED = 2
MAX_SPREAD = 4.0  # of an interval's bounds, for a sentence that names a batch size


def noise_scale_of(samples: PointSamples) -> Estimate | None:
    """Estimate the noise scale of a point's trials, in samples; None if they don't show it."""
    return noise_scale_estimate([blocks for r in samples.measured if (blocks := measured_blocks(r.conditions))])


def noise_scale_estimate(trials: Sequence[Sequence[Moments]]) -> Estimate | None:
    """Estimate the noise scale of trials, in samples; None if they don't show it.

    It is a ratio of means, with Fieller's interval (E. C. Fieller, "Some problems in interval estimation", JRSS B 16,
    1954), which has no upper bound if the mean of |G|² may be 0. The variances come from the differences of successive
    blocks (J. von Neumann et al., "The mean square successive difference", Annals of Mathematical Statistics 12, 1941):
    the noise scale grows during a training, which is no error of its mean.

    Args:
        trials: blocks of each trial, at least one.
    """
    if (value := noise_scale([block for blocks in trials for block in blocks])) is None:
        return None
    parts = [np.array([weighted(block) for block in blocks]) for blocks in trials]
    size, steps = sum(map(len, parts)), np.concatenate([np.diff(of_trial, axis=0) for of_trial in parts])
    if len(steps) < 2:
        return Estimate(value, None, None, size, None, Method.SINGLE)
    (top, bottom), covariance = np.concatenate(parts).mean(0), steps.T @ steps / (2 * len(steps) * size)
    num_freedom = 2 * len(steps) ** 2 / (3 * len(steps) - 1)  # of the mean square difference of normal values
    a, b, c = (
        x * y - stdtrit(num_freedom, (1 + LEVEL) / 2) ** 2 * covariance[i, j]
        for x, y, i, j in ((bottom, bottom, 1, 1), (top, bottom, 0, 1), (top, top, 0, 0))
    )
    root = math.sqrt(max(0.0, b * b - a * c))  # of a·ratio² - 2·b·ratio + c <= 0
    if a > 0:
        low, high = (b - root) / a, (b + root) / a
    else:
        low, high = (c / (b + root) if b + root > 0 and c > 0 else 0.0), math.inf
    return Estimate(value, max(0.0, float(low)), float(high), size, LEVEL, Method.FIELLER)


def noise_scale_lines(points: Sequence[PointSamples]) -> list[str]:
    """Return the sentence on the batch beyond which progress hardly gains; empty if no trial measured its noise."""
    estimates = [(p, e) for p in points if (e := noise_scale_of(p)) is not None]
    if not estimates:
        return []
    shown = [f"{noise_scale_text(e)} at {point_label(p.point)}" for p, e in estimates]
    scales = f"gradient noise scale {units.listed(shown, MAX_NAMED, separator='; ')}"
    narrow = [e.value for _, e in estimates if is_narrow(e)]
    if not narrow:
        return [f"The batch beyond which more workers buy no progress is inconclusive: {scales}. Train for more steps."]
    about = 2 ** round(float(np.mean(np.log2(narrow))))
    return [f"Beyond about {units.count(about)} samples a step, more workers buy throughput, not progress: {scales}."]


def is_narrow(of: Estimate) -> bool:
    """Return whether an interval is narrow enough to name a batch size."""
    return of.low is not None and of.high is not None and 0 < of.high <= MAX_SPREAD * of.low


def noise_scale_text(of: Estimate) -> str:
    """Return ``480 [390, 610]``, in whole samples."""
    return units.whole(of.value) + units.brackets(of, units.whole)
