"""How far off predictions are: each measured point, predicted from the points of other worker counts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from raypar.analysis.calibration import Calibration, calibrate, fit_study_network
from raypar.analysis.drawn_steps import DrawnSteps
from raypar.analysis.laws import Scaling
from raypar.analysis.network import Network, Topology
from raypar.analysis.stats import Estimate, median_estimate
from raypar.analysis.step_model import Communication
from raypar.analysis.training import Training


@dataclass(frozen=True)
class LeftOut:
    """A measured point, predicted from the others.

    Attributes:
        measured: its step time.
        predicted: as the others have it; None where they can't tell.
        why_not: what keeps them from it.
    """

    num_workers: int
    batch_size: int
    measured: Estimate
    predicted: Estimate | None
    why_not: str = ""

    @property
    def error(self) -> float | None:
        """How far the prediction is off, as a share of what was measured."""
        return None if self.predicted is None else self.predicted.value / self.measured.value - 1

    @property
    def is_within(self) -> bool | None:
        """Whether the predicted value lies in the measured interval; None where there is none of either."""
        if self.predicted is None or self.measured.low is None:
            return None
        return not self.measured.excludes(self.predicted.value)


def leave_one_out(
    calibration: Calibration,
    communication: Communication,
    network: Network | Topology | None = None,
    accumulation_steps: int = 1,
) -> tuple[LeftOut, ...]:
    """Every measured point of several workers, predicted without the points of its worker count.

    Args:
        calibration: of the whole study.
        communication: how the study's gradients were sent; its network is not looked at.
        network: the one that the study ran on, as a probe has it; None: fitted to the other worker counts.
    """
    found = []
    for point in calibration.of_several:
        others = [p for p in calibration.points if p.num_workers != point.num_workers]
        rest = calibrate(others, calibration.layers, calibration.variation)
        measured = median_estimate(point.step_times_s)
        if network is None and not rest.of_several:
            why = "no other count of several workers was measured, so the network is not known: give it, or probe it"
            found.append(LeftOut(point.num_workers, point.batch_size, measured, None, why))
            continue
        link = network if network is not None else fit_study_network(rest, communication, accumulation_steps)[0]
        training = Training(Scaling.STRONG, point.batch_size, 1, accumulation_steps=accumulation_steps)
        how = replace(communication, network=link)
        drawn = DrawnSteps(rest, training, how, np.array([point.num_workers]))
        found.append(LeftOut(point.num_workers, point.batch_size, measured, drawn.told(lambda t: t[..., 0])))
    return tuple(found)
