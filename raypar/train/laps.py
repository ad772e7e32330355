"""Step times of training code that raypar didn't write, from the moments at which it reports."""

from __future__ import annotations

BY_STEP, BY_REPORT, UNTIMED = "raypar.step", "reports", ""


class LapTimer:
    """Turns the moments of steps and reports, seconds on one clock, into step times.

    A step lasts from the end of the step before, or from the report before, to its own end; where the first one began
    is unknown, and so it is not counted. Without steps, what lies between two reports counts as one.
    """

    def __init__(self) -> None:
        self._step_times_s: list[float] = []
        self._report_times_s: list[float] = []
        self._step_began_s: float | None = None
        self._reported_s: float | None = None

    def step(self, at_s: float) -> None:
        """Take the end of a step."""
        if self._step_began_s is not None:
            self._step_times_s.append(at_s - self._step_began_s)
        self._step_began_s = at_s

    def report(self, at_s: float, until_s: float | None = None) -> None:
        """Take a report, which itself lasted until `until_s`."""
        if self._reported_s is not None:
            self._report_times_s.append(at_s - self._reported_s)
        self._reported_s = self._step_began_s = at_s if until_s is None else until_s

    @property
    def times_s(self) -> tuple[float, ...]:
        """Times of the steps, or of what lies between two reports; empty where there are neither."""
        return tuple(self._step_times_s or self._report_times_s)

    @property
    def train_time_s(self) -> float | None:
        """Their sum; None where there are none."""
        return sum(self.times_s) if self.times_s else None

    @property
    def source(self) -> str:
        """`BY_STEP`, `BY_REPORT` or `UNTIMED`."""
        return BY_STEP if self._step_times_s else BY_REPORT if self._report_times_s else UNTIMED
