"""Comparison of two sets of trials: the only place that calls one faster, higher or equivalent.

The outcome follows only from an interval, a limit and a margin. Verdict, `raypar ab`, `raypar store compare`,
``--until settled``, the recommendation and the checks all use a `Comparison`. Reports and documents only word it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, StrEnum

from raypar.analysis.stats import Estimate


class Outcome(StrEnum):
    """Outcome of a comparison, for the second set of trials against the first."""

    FASTER = "faster"
    SLOWER = "slower"
    HIGHER = "higher"  # of a metric
    LOWER = "lower"
    EQUAL = "equal"  # in every pair, to the last digit
    EQUIVALENT = "equivalent"  # within the margin, with confidence
    INCONCLUSIVE = "inconclusive"
    UNCONFIRMED = "unconfirmed"  # one trial each
    DISTURBED = "disturbed"  # most trials were disturbed by other processes
    MISSING = "missing"  # one of the two has no value


@dataclass(frozen=True)
class Scale:
    """Scale of a comparison.

    Attributes:
        neutral: value at which both are equal.
        above: outcome if the interval lies above the limit.
        below: outcome if it lies below.
        is_ratio: whether a margin is a share (0.05 for 5 % more or less) rather than a difference.
    """

    neutral: float
    above: Outcome
    below: Outcome
    is_ratio: bool

    def holds(self, interval: Estimate, margin: float) -> bool:
        """Return whether an interval lies within a margin of the neutral value."""
        if interval.low is None or interval.high is None:
            return False
        least, most = (1 / (1 + margin), 1 + margin) if self.is_ratio else (-margin, margin)
        return least <= interval.low <= interval.high <= most


SPEEDUP = Scale(1.0, Outcome.FASTER, Outcome.SLOWER, is_ratio=True)
TIME_RATIO = Scale(1.0, Outcome.SLOWER, Outcome.FASTER, is_ratio=True)
METRIC_CHANGE = Scale(0.0, Outcome.HIGHER, Outcome.LOWER, is_ratio=False)


@dataclass(frozen=True)
class Comparison:
    """Comparison of the second set of trials with the first.

    Attributes:
        estimate: on the scale; None if one of the two has no value.
        scale: of the estimate.
        limit: value beyond which a difference is claimed, such as 1 / 1.05 for a speedup if 5 % slower is allowed;
            None: neutral.
        margin: of equivalence; None: no test of equivalence.
        bounds: interval that is compared with the margin; None: that of the estimate.
        is_equal: whether all pairs are equal to the last digit.
        doubt: reason why the values can't be trusted; empty if they can.
    """

    estimate: Estimate | None
    scale: Scale = SPEEDUP
    limit: float | None = None
    margin: float | None = None
    bounds: Estimate | None = None
    is_equal: bool = False
    doubt: str = ""

    @property
    def outcome(self) -> Outcome:
        """Outcome: the only rule that calls one thing faster, slower, better or worse than another.

        Times are called faster or slower however small the difference. A metric within the margin is equivalent even
        if a difference is shown, because equal batches on different numbers of workers differ by rounding.
        """
        estimate, limit = self.estimate, self.scale.neutral if self.limit is None else self.limit
        if estimate is None:
            return Outcome.MISSING
        if self.doubt:
            return Outcome.DISTURBED
        if self.is_equal:
            return Outcome.EQUAL
        if self.is_within_margin and not self.scale.is_ratio:
            return Outcome.EQUIVALENT
        if estimate.low is None:
            return Outcome.UNCONFIRMED
        if estimate.excludes(limit):
            return self.scale.above if estimate.value > limit else self.scale.below
        return Outcome.EQUIVALENT if self.is_within_margin else Outcome.INCONCLUSIVE

    @property
    def is_within_margin(self) -> bool:
        """True if both are shown to be within the margin of each other; False without a margin."""
        interval = self.bounds or self.estimate
        return self.margin is not None and interval is not None and self.scale.holds(interval, self.margin)

    @property
    def differs(self) -> bool:
        """True if the interval lies on one side of the limit."""
        return self.outcome in (self.scale.above, self.scale.below)

    @property
    def is_settled(self) -> bool:
        """True if more trials would hardly change the outcome."""
        return self.differs or self.outcome in (Outcome.EQUAL, Outcome.EQUIVALENT)

    def rules_out(self, outcome: Outcome) -> bool:
        """Return whether the interval excludes this outcome, because it lies on the other side of the limit."""
        estimate, limit = self.estimate, self.scale.neutral if self.limit is None else self.limit
        if self.doubt or estimate is None or estimate.low is None or estimate.high is None:
            return False
        return estimate.high <= limit if outcome is self.scale.above else estimate.low >= limit


class Gate(Enum):
    """Result of comparing B's slowdown with the allowed one."""

    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"


def gate_of(comparison: Comparison, *, is_lost: bool, is_doubtful: bool = False) -> Gate:
    """Return whether B is at most as slow as the comparison's limit allows.

    Args:
        is_lost: whether B lacks a time that it should have, which is worse than a slow one.
        is_doubtful: whether B's times can't prove a pass, however good they are.
    """
    if is_lost or comparison.outcome is Outcome.SLOWER:
        return Gate.FAILED
    return Gate.PASSED if comparison.rules_out(Outcome.SLOWER) and not is_doubtful else Gate.INCONCLUSIVE


def gate_of_all(gates: Collection[Gate | None]) -> Gate:
    """Return the result over several points: failed if any failed, passed if all that count passed."""
    if Gate.FAILED in gates:
        return Gate.FAILED
    return Gate.PASSED if Gate.PASSED in gates and Gate.INCONCLUSIVE not in gates else Gate.INCONCLUSIVE
