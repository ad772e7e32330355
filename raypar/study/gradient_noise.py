"""Gradient noise scale: the batch size at which the noise of a gradient is as large as the gradient.

After McCandlish et al. 2018, "An Empirical Model of Large-Batch Training" (https://arxiv.org/abs/1812.06162). With the
true gradient G and the covariance Σ of the gradients of single samples, it is tr(Σ) / |G|², in samples. A step on a
batch of B samples makes 1 / (1 + noise scale / B) of the progress that a step on all samples would make.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from raypar.study.conditions import Conditions

NOISE_SCALE = "noise_scale"  # key in reports, in samples
# Blocks of consecutive steps that a trial stores. Over fewer steps, quotients of their means would be biased.
MAX_BLOCKS, MIN_STEPS = 20, 10


class Moments(NamedTuple):
    """Estimates from the gradients of one step, or their means over several.

    Attributes:
        trace: tr(Σ); may be negative by chance.
        square: |G|²; may be negative by chance.
        norm: squared norm of the batch's mean gradient; its expectation is |G|² + tr(Σ) / B.
    """

    trace: float
    square: float
    norm: float


def moments_of(small: float, big: float, per_sample_small: float, per_sample_big: float) -> Moments:
    """Estimate tr(Σ) and |G|² from the gradients of a batch and of its parts, without bias (appendix A.1).

    Parts may have different sizes: E|g|² = |G|² + tr(Σ) / size holds for the means of both sides, too.

    Args:
        small: mean of |g|² over the parts.
        big: |g|² of the batch.
        per_sample_small: mean of 1 / samples over the parts.
        per_sample_big: 1 / samples of the batch.
    """
    trace = (small - big) / (per_sample_small - per_sample_big)
    return Moments(trace, big - trace * per_sample_big, big)


def mean_of(moments: Sequence[Moments]) -> Moments:
    """Return the mean of at least one step's or block's moments."""
    return Moments(*(sum(values) / len(moments) for values in zip(*moments, strict=True)))


def in_blocks(steps: Sequence[Moments]) -> tuple[Moments, ...]:
    """Return the means of runs of consecutive steps of nearly equal lengths; one run if there are few steps."""
    num = min(max(1, len(steps) // MIN_STEPS), MAX_BLOCKS, len(steps))
    return tuple(mean_of(steps[i * len(steps) // num : (i + 1) * len(steps) // num]) for i in range(num))


def measured_blocks(conditions: Conditions) -> tuple[Moments, ...]:
    """Return the moments of a trial's blocks, in order; empty if they were not measured."""
    stored = next(iter(conditions.of_ranks("gradient_noise")), ())
    return tuple(Moments(*block) for block in stored if len(block) == len(Moments._fields))


def weighted(block: Moments) -> tuple[float, float]:
    """Return a block's part of numerator and denominator of the noise scale of a training.

    The paper's critical batch is E / S, with dE = noise scale · dS and a block's optimal steps dS proportional to
    1 / (1 + noise scale / B) = |G|² / `norm`: the noise scale grows while the loss falls, and progress is its weight.
    """
    return (block.trace / block.norm, block.square / block.norm) if block.norm > 0 else (0.0, 0.0)


def noise_scale(blocks: Sequence[Moments]) -> float | None:
    """Return the noise scale of a training in samples, weighted by progress; None if the blocks don't show it."""
    numerator, denominator = (sum(parts) for parts in zip(*map(weighted, blocks), strict=True)) if blocks else (0, 0)
    return numerator / denominator if numerator > 0 and denominator > 0 else None
