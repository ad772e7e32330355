"""Checks of what was measured on the machines while trials were timed: others' work, and the clocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from raypar import units
from raypar.analysis.checks_kinds import Check, Evidence, Finding
from raypar.study.trial import TrialResult

MAX_TAKEN = 0.05  # of the time of a worker's cores
MIN_TAKEN_S = 0.05  # five ticks of the clock by which it is counted
# Of the machine's cores, where the trial's own are known to be left alone: memory, caches and clocks are shared still.
MAX_BUSY = 0.1
MAX_CLOCK_CHANGE = 0.05


@dataclass(frozen=True)
class _Load:
    """Others' work while a trial was timed, on the machine where it was most.

    Attributes:
        taken: share of a worker's own cores' time; None where the trial had none, or nothing was measured.
        busy_cores: of the machine, on average; None: not measured.
        num_cores: of that machine.
    """

    taken: float | None
    busy_cores: float | None
    num_cores: int

    @property
    def busy(self) -> float:
        """The machine's share that was busy with it."""
        return self.busy_cores / self.num_cores if self.busy_cores is not None and self.num_cores else 0.0

    def disturbs(self, timed_s: float) -> bool:
        if self.taken is not None:
            return self.busy > MAX_BUSY or (self.taken > MAX_TAKEN and self.taken * timed_s > MIN_TAKEN_S)
        return self.busy > MAX_TAKEN  # nothing kept it off the cores that the trial ran on


def other_load(evidence: Evidence) -> Iterator[Finding]:
    """Others' work that took the trials' cores, or kept a good part of the machine busy."""
    finished = evidence.finished
    # Not cpu_wait_share: a rank's own threads (gloo's beside torch's) wait for each other too.
    loads = [(_load_of(r), r.train_time_s or r.wall_s or math.inf) for r in finished]
    disturbed = [load for load, timed_s in loads if load.disturbs(timed_s)]
    if not disturbed:
        return
    told = []
    if taken := max((load.taken for load in disturbed if load.taken is not None), default=0.0):
        told.append(f"it took {units.percent(taken)} of the time of a worker's own cores")
    most = max(disturbed, key=lambda load: load.busy)
    if most.busy_cores is not None and most.busy:
        told.append(f"it kept {most.busy_cores:.1f} of a machine's {units.counted(most.num_cores, 'core')} busy")
    yield Finding(
        Check.OTHER_LOAD,
        f"Other work ran while {len(disturbed)} of {units.counted(len(finished), 'trial')} were timed; at worst "
        f"{' and '.join(told)}.",
    )


def throttled(evidence: Evidence) -> Iterator[Finding]:
    """Cores that slowed down for their heat."""
    counts = [sum(_numbers(r.environment.get("throttles"))) for r in evidence.finished]
    if hot := [count for count in counts if count > 0]:
        yield Finding(
            Check.THROTTLED,
            f"Cores became too hot and slowed down while {len(hot)} of {units.counted(len(counts), 'trial')} were "
            f"timed (up to {units.counted(round(max(hot)), 'time')} in one).",
        )


def clock_changes(evidence: Evidence) -> Iterator[Finding]:
    """Clocks that ran slower or faster at a trial's end than at its beginning, or in one trial than in another."""
    finished = evidence.finished
    within = [(c, r) for r in finished if (c := _change_within(r)) is not None and abs(c) > MAX_CLOCK_CHANGE]
    if within:
        change, result = max(within, key=lambda pair: abs(pair[0]))
        yield Finding(
            Check.CLOCK_CHANGES,
            f"The cores' clock was another at the end than at the beginning of {len(within)} of "
            f"{units.counted(len(finished), 'trial')}: by up to {units.percent(abs(change))} "
            f"{'slower' if change < 0 else 'faster'} ({result.spec.label}).",
        )
    means = [(sum(mhz) / len(mhz), r) for r in finished if (mhz := _numbers(r.environment.get("cpu_mhz_mean")))]
    if not means:
        return
    (slowest, slow), (fastest, fast) = (pick(means, key=lambda pair: pair[0]) for pick in (min, max))
    if fastest > slowest * (1 + MAX_CLOCK_CHANGE):
        yield Finding(
            Check.CLOCK_CHANGES,
            f"The cores' clock was another in some trials than in others: {slowest / 1e3:.2f} GHz in "
            f"{slow.spec.label}, {fastest / 1e3:.2f} GHz in {fast.spec.label}.",
        )


def _load_of(result: TrialResult) -> _Load:
    environment = result.environment
    taken = _numbers(environment.get("foreign_cpu_share"))
    busy, cores = environment.get("other_load_cores"), environment.get("num_node_cores")
    ranks = zip(busy, cores, strict=False) if isinstance(busy, Sequence) and isinstance(cores, Sequence) else ()
    known = [(b, int(c)) for b, c in ranks if _numbers(b) and _numbers(c) and c > 0]
    busy_cores, num_cores = max(known, key=lambda pair: pair[0] / pair[1], default=(None, 0))
    return _Load(max(taken, default=None), busy_cores, num_cores)


def _change_within(result: TrialResult) -> float | None:
    """Relative change of the clock from a trial's beginning to its end; of the rank that changed most."""
    first, last = (result.environment.get(f"cpu_mhz_{which}") for which in ("first", "last"))
    if not isinstance(first, Sequence) or not isinstance(last, Sequence):
        return None
    changes = [e / b - 1 for b, e in zip(first, last, strict=False) if _numbers(b) and _numbers(e) and b > 0]
    return max(changes, key=abs, default=None)


def _numbers(told: Any) -> list[float]:
    """The finite numbers of what the ranks tell (or of one number for all)."""
    listed = told if isinstance(told, (list, tuple)) else [told]
    return [float(n) for n in listed if isinstance(n, (int, float)) and not isinstance(n, bool) and math.isfinite(n)]
