"""Step times of training code that raypar didn't write, from the moments at which it reports."""

from __future__ import annotations

from collections.abc import Mapping

BY_STEP, BY_REPORT, UNTIMED = "raypar.step", "reports", ""
STEP_KEYS = ("step", "global_step")


def num_steps_of(report: Mapping[str, float]) -> float | None:
    """Return the steps so far by a report that counts them; None for others."""
    return next((report[key] for key in STEP_KEYS if key in report), None)


class LapTimer:
    """Turns the moments of steps and reports, seconds on one clock, into step times.

    A step lasts from the end of the step before, or from the report before, to its own end; where the first one began
    is unknown, and so it is not counted. Without steps, what lies between two reports is a lap: one step, or as many as
    the reports' own counts of steps differ by.
    """

    def __init__(self) -> None:
        self._step_times_s: list[float] = []
        self._lap_times_s: list[float] = []
        self._lap_step_times_s: list[float] = []  # of each lap, the mean of its steps
        self._step_began_s: float | None = None
        self._reported_s: float | None = None
        self._num_steps: float | None = None  # by the last report

    def step(self, at_s: float) -> None:
        """Take the end of a step."""
        if self._step_began_s is not None:
            self._step_times_s.append(at_s - self._step_began_s)
        self._step_began_s = at_s

    def report(
        self,
        at_s: float,
        until_s: float | None = None,
        *,
        num_steps: float | None = None,
        is_ordered: bool = True,
    ) -> None:
        """Take a report.

        Args:
            until_s: the end of the report itself, where it takes time; None: `at_s`.
            num_steps: steps so far, where the report counts them.
            is_ordered: it comes in its place among the steps. Output doesn't: when it was written is known about only,
                and so it begins no step.
        """
        if self._reported_s is not None:
            lap_s = at_s - self._reported_s
            lap_steps = 1.0 if num_steps is None or self._num_steps is None else num_steps - self._num_steps
            self._lap_times_s.append(lap_s)
            self._lap_step_times_s.append(lap_s / lap_steps if lap_steps >= 1 else lap_s)
        self._reported_s, self._num_steps = at_s if until_s is None else until_s, num_steps
        if is_ordered:
            self._step_began_s = self._reported_s

    @property
    def times_s(self) -> tuple[float, ...]:
        """Times of the steps, or the mean of each lap's steps; empty where there are neither."""
        return tuple(self._step_times_s or self._lap_step_times_s)

    @property
    def train_time_s(self) -> float | None:
        """Time of all steps, or of all laps; None where there are none."""
        times_s = self._step_times_s or self._lap_times_s
        return sum(times_s) if times_s else None

    @property
    def source(self) -> str:
        """`BY_STEP`, `BY_REPORT` or `UNTIMED`."""
        return BY_STEP if self._step_times_s else BY_REPORT if self._lap_times_s else UNTIMED
