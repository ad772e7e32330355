"""Step times of the user's own training code, from the times of its steps or reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

BY_STEP, BY_REPORT, UNTIMED = "raypar.step", "reports", ""
# Counts in a report that give its position in the work, and the unit of each.
COUNTS: Mapping[str, str] = {"epoch": "epoch", "step": "step", "global_step": "step"}


@dataclass(frozen=True)
class StepTimes:
    """Times of the steps of training code that raypar didn't write.

    Attributes:
        source: `BY_STEP`, `BY_REPORT` or `UNTIMED`.
        cover: part of the work that the times cover: ``epochs 1 to 5``; empty unless they are from reports.
        times_s: times of the steps, or of one epoch or step of each lap.
        train_time_s: time of all steps, or of all laps; None: unknown.
    """

    source: str = UNTIMED
    cover: str = ""
    times_s: tuple[float, ...] = ()
    train_time_s: float | None = None


class LapTimer:
    """Conversion of the times of steps and reports, seconds on one clock, to step times.

    A step lasts from the end of the previous step or report to its own end. The start of the first step is unknown, so
    it counts as an average step. That keeps points with 5 and with 10 steps comparable.

    Without steps, a lap is the time between two reports that count the work: one for each epoch, or several with the
    current step. The first lap, which begins with the process, does not count. Reports without counts give no times: a
    script that prints every 100 batches covers 300 of 350 on one worker, but 100 of 175 on each of two.
    """

    def __init__(self) -> None:
        self._step_times_s: list[float] = []
        self._num_steps = 0
        self._step_began_s: float | None = None
        self._reports: list[tuple[float, float, dict[str, float]]] = []  # begin and end of each, and its counts

    def step(self, at_s: float) -> None:
        """Note the end of a step."""
        self._num_steps += 1
        if self._step_began_s is not None:
            self._step_times_s.append(at_s - self._step_began_s)
        self._step_began_s = at_s

    def report(
        self, metrics: Mapping[str, float], at_s: float, until_s: float | None = None, *, is_ordered: bool = True
    ) -> None:
        """Note a report.

        Args:
            until_s: end of the report itself; None: `at_s`.
            is_ordered: the report is in order with the steps, and starts the next one. Lines of output are not, because
                the time when they were written is approximate.
        """
        until_s = at_s if until_s is None else until_s
        self._reports.append((at_s, until_s, {key: metrics[key] for key in COUNTS if key in metrics}))
        if is_ordered:
            self._step_began_s = until_s

    def result(self) -> StepTimes:
        """Return the times of the steps, or else those of the laps."""
        if times_s := self._step_times_s:
            return StepTimes(BY_STEP, "", tuple(times_s), sum(times_s) / len(times_s) * self._num_steps)
        return self._laps()

    def _laps(self) -> StepTimes:
        for key, unit in COUNTS.items():
            counted = [i for i, (_, _, counts) in enumerate(self._reports) if key in counts]
            if len(counted) < 2 or counted[-1] - counted[0] != len(counted) - 1:  # a report between them has no count
                continue
            numbers = [self._reports[i][2][key] for i in counted]
            gaps = [b - a for a, b in pairwise(numbers)]
            # With several reports per epoch, each may begin anywhere in it.
            is_usable = all(gap == 1 if unit == "epoch" else gap >= 1 for gap in gaps)
            if is_usable and all(float(number).is_integer() for number in numbers):
                times_s = [self._reports[j][0] - self._reports[i][1] for i, j in pairwise(counted)]
                cover = f"{unit}s {numbers[0]:.0f} to {numbers[-1]:.0f}"
                of_units = tuple(t / gap for t, gap in zip(times_s, gaps, strict=True))
                return StepTimes(BY_REPORT, cover, of_units, sum(times_s) or None)
        return StepTimes()
