"""Load by other processes while a trial was timed, and the thresholds above which it disturbs the trial."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from raypar import units
from raypar.study.trial import TrialResult

MAX_TAKEN = 0.05  # of the time of a worker's cores
MIN_TAKEN_S = 0.05  # five ticks of the kernel's clock
# Share of the machine's cores, for load that left the trial's own cores alone but shared memory, caches and clocks.
MAX_BUSY = 0.1
# Share of the cores above which, in most trials, times show nothing; less is a caveat.
MAX_TRUSTED = 0.25


class Load(NamedTuple):
    """Load by other processes while a trial was timed, on its most loaded machine; 0 if not measured."""

    taken: float | None  # share of the time of a worker's own cores; None if it had none, or nothing was measured
    busy_cores: float  # on average
    num_cores: int

    @property
    def busy(self) -> float:
        """Share of the machine that was busy with it."""
        return self.busy_cores / self.num_cores if self.num_cores else 0.0

    @property
    def share_of_cores(self) -> float:
        return max(self.taken or 0.0, self.busy)

    def disturbs(self, timed_s: float) -> bool:
        if self.taken is not None:
            return self.busy > MAX_BUSY or (self.taken > MAX_TAKEN and self.taken * timed_s > MIN_TAKEN_S)
        return self.busy > MAX_TAKEN  # it may have used the trial's cores


def disturbing_load(result: TrialResult) -> Load | None:
    """Return the load by other processes if it disturbed the trial; None otherwise."""
    measured = [
        (rank.other_load_cores, rank.num_node_cores)
        for rank in result.conditions.ranks
        if rank.other_load_cores is not None and rank.num_node_cores
    ]
    busy_cores, num_cores = max(measured, key=lambda pair: pair[0] / pair[1], default=(0.0, 0))
    load = Load(result.conditions.largest("foreign_cpu_share"), busy_cores, num_cores)
    return load if load.disturbs(result.train_time_s or result.wall_s or math.inf) else None


def disturbing_loads(finished: Sequence[TrialResult]) -> list[Load]:
    return [load for result in finished if (load := disturbing_load(result)) is not None]


def doubt_of_times(finished: Sequence[TrialResult]) -> str:
    """Return the reason why times show nothing if most trials were strongly disturbed; empty otherwise."""
    disturbed = [load for load in disturbing_loads(finished) if load.share_of_cores > MAX_TRUSTED]
    if 2 * len(disturbed) <= len(finished):
        return ""
    most = units.percent(max(load.share_of_cores for load in disturbed))
    of_all = f"{len(disturbed)} of {units.counted(len(finished), 'trial')}"
    return f"other processes used up to {most} of the cores in {of_all}"
