"""Profile of a trial: the parts of its steps on each rank. `raypar.measure.breakdown` computes it from recordings."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from raypar.study.conditions import Stored

DATA_WAIT, COPY, FORWARD, BACKWARD, OPTIMIZER = "data_wait", "copy_to_device", "forward", "backward", "optimizer"
COMMUNICATION, STRAGGLERS, BUBBLE, OTHER = "exposed_communication", "stragglers", "bubble", "other"
PARTS = (DATA_WAIT, COPY, FORWARD, BACKWARD, OPTIMIZER, COMMUNICATION, STRAGGLERS, BUBBLE, OTHER)


@dataclass(frozen=True)
class Breakdown:
    """Parts of one rank's step in seconds; for several steps, the mean.

    Attributes:
        parts: `PARTS` to seconds; they add up to `step_s`.
        hidden_s: communication that overlaps with the rank's work.
        waits_for: rank to the part of `STRAGGLERS` during which it was the last one.
    """

    step_s: float
    parts: Mapping[str, float]
    hidden_s: float
    waits_for: Mapping[int, float] = field(default_factory=dict)

    @property
    def hidden_share(self) -> float | None:
        """Share of the rank's communication that is hidden; None without communication."""
        total_s = self.hidden_s + self.parts[COMMUNICATION]
        return self.hidden_s / total_s if total_s > 0 else None


@dataclass(frozen=True)
class Profile:
    """Breakdown of a trial's steps.

    Attributes:
        ranks: by rank, in the profiled steps.
        num_steps: number of profiled steps averaged: the middle half of all, by time.
        step_s: median step without the profiler, slowest rank.
        overhead: relative increase of a step's time by the profiler: 0.08 for 8 %; None: the timed steps themselves
            were observed.
        shares_clock: all ranks ran on one machine; else their clocks were compared at barriers.
        matches_collectives: waiting for stragglers is separate from communication.
        utilisation: model FLOP utilisation: the workers' FLOP/s in the model's forward and backward pass, divided by
            the FLOP/s of matrix products on all of them at once; None: the model's FLOP can't be counted.
        flop_per_sample: FLOP of the model per sample, forward and backward.
        peak_flops: FLOP/s of all workers together.
    """

    ranks: tuple[Breakdown, ...]
    num_steps: int
    step_s: float
    overhead: float | None
    shares_clock: bool = True
    matches_collectives: bool = True
    utilisation: float | None = None
    flop_per_sample: float | None = None
    peak_flops: float | None = None

    @property
    def mean(self) -> Breakdown:
        """Mean over the ranks."""
        return mean_of(self.ranks)

    def to_stored(self) -> dict[str, Any]:
        """Return the profile for JSON."""
        return asdict(self)

    @classmethod
    def from_stored(cls, raw: Stored) -> Profile | None:
        """Restore a profile from the result of `to_stored`; None for any other mapping."""
        try:
            ranks = tuple(
                Breakdown(
                    **{
                        **rank,
                        "parts": {**dict.fromkeys(PARTS, 0.0), **rank["parts"]},
                        "waits_for": {int(k): v for k, v in rank["waits_for"].items()},
                    }
                )
                for rank in raw["ranks"]
            )
            return cls(**{**raw, "ranks": ranks}) if ranks else None
        except (KeyError, TypeError, ValueError, AttributeError):
            return None

    def metrics(self) -> dict[str, float]:
        """Return the ranks' mean for MLflow: ``profile/backward_s``, ``profile/hidden_communication_s`` …"""
        mean = self.mean
        metrics = {f"profile/{part}_s": seconds for part, seconds in mean.parts.items()}
        metrics |= {"profile/step_s": mean.step_s, "profile/hidden_communication_s": mean.hidden_s}
        if self.overhead is not None:
            metrics["profile/overhead"] = self.overhead
        if self.utilisation is not None:
            metrics["profile/model_flop_utilisation"] = self.utilisation
        return metrics


def profile_of_repeats(profiles: Sequence[Profile]) -> Profile:
    """Return the profile of a point with several trials: their mean if timed steps were observed, else the last one."""
    last = profiles[-1]
    if last.overhead is not None:
        return last
    return replace(
        last,
        ranks=tuple(mean_of(of_rank) for of_rank in zip(*(profile.ranks for profile in profiles), strict=False)),
        num_steps=sum(profile.num_steps for profile in profiles),
        step_s=statistics.median(profile.step_s for profile in profiles),
    )


def mean_of(breakdowns: Sequence[Breakdown]) -> Breakdown:
    """Return the mean. If parts add up in each breakdown, they add up in the mean."""
    num = len(breakdowns)
    return Breakdown(
        step_s=sum(b.step_s for b in breakdowns) / num,
        parts={part: sum(b.parts[part] for b in breakdowns) / num for part in PARTS},
        hidden_s=sum(b.hidden_s for b in breakdowns) / num,
        waits_for={
            rank: sum(b.waits_for.get(rank, 0.0) for b in breakdowns) / num
            for rank in sorted({rank for b in breakdowns for rank in b.waits_for})
        },
    )
