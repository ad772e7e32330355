"""Time limit of a run whose machines are lent until a known moment, such as those of a Slurm job.

A trial that the limit would cut off is lost, and a block of which a part runs later, on other machines, compares less
well. So no trial starts that is expected to end too late, and no block, unless it would be the run's first: a block may
be longer than any job.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from raypar.errors import RayparError
from raypar.study.trial import TrialSpec

ENDS_AT = "RAYPAR_ENDS_AT"  # variable: Unix time at which a study has to have ended
NO_TIME = "{} left, too short for the next trials: the study stops"


def end_of_time(environment: Mapping[str, str] = os.environ) -> float | None:
    """Return the Unix time by which this program has to have ended; None: no limit. Raises RayparError."""
    if not (text := environment.get(ENDS_AT)):
        return None
    try:
        return float(text)
    except ValueError:
        raise RayparError(f"{ENDS_AT}={text}: must be a Unix time in seconds", hint="unset it: no limit") from None


class TimeLimit:
    """Decides which trials still start.

    Args:
        ends_at: Unix time.
        expected_s: expected seconds of a trial; None: unknown.
        clock: returns the Unix time; None: the system's.
    """

    def __init__(
        self, ends_at: float, expected_s: Callable[[TrialSpec], float | None], clock: Callable[[], float] | None = None
    ) -> None:
        self._ends_at, self._expected_s, self._clock = ends_at, expected_s, clock or time.time
        self._begun: set[int] = set()  # blocks, by their repeat

    @property
    def left_s(self) -> float:
        return self._ends_at - self._clock()

    def note_start(self, spec: TrialSpec) -> None:
        """Note that a trial starts."""
        self._begun.add(spec.repeat)

    def in_time(self, waiting: Sequence[TrialSpec], num_slots: int) -> list[bool]:
        """Return, for each waiting trial, whether it may start, as far as the durations are known.

        Args:
            waiting: all of them, in their order.
            num_slots: number of trials that run at a time.
        """
        left_s, needed_s = self.left_s, [self._expected_s(spec) for spec in waiting]
        blocks: defaultdict[int, list[float | None]] = defaultdict(list)
        for spec, seconds in zip(waiting, needed_s, strict=True):
            blocks[spec.repeat].append(seconds)
        starting = {
            repeat: repeat in self._begun or not self._begun or _block_s(of_block, num_slots) <= left_s
            for repeat, of_block in blocks.items()
        }
        return [
            left_s > 0 and starting[spec.repeat] and (seconds or 0.0) <= left_s
            for spec, seconds in zip(waiting, needed_s, strict=True)
        ]


def _block_s(trials_s: Sequence[float | None], num_slots: int) -> float:
    """Return the expected seconds of a block's trials; those of unknown length count as the average."""
    known_s = [seconds for seconds in trials_s if seconds is not None]
    if not known_s:
        return 0.0
    return max(statistics.mean(known_s) * len(trials_s) / num_slots, *known_s)
