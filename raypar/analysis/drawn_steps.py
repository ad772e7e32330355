"""Step times of a training as calibrated, and as other repeats of the measurements might have given them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raypar.analysis.calibration import Calibration, step_times
from raypar.analysis.network import Topology
from raypar.analysis.stats import LEVEL, Estimate, Method
from raypar.analysis.step_model import Communication, StepTimes
from raypar.analysis.training import Training

Floats: TypeAlias = NDArray[np.float64]


def training_steps(
    calibration: Calibration, training: Training, communication: Communication, workers: NDArray[Any], **draw: Floats
) -> StepTimes:
    batches = training.global_batch(workers)
    data_s: float | Floats = 0.0
    if training.input_samples_per_s is not None:
        network = communication.network
        in_node = network.workers_per_node if isinstance(network, Topology) else 1
        data_s = np.minimum(workers, in_node) * batches / workers / training.input_samples_per_s
    return step_times(
        calibration,
        workers,
        batches,
        communication,
        data_s=data_s,
        accumulation_steps=training.accumulation_steps,
        **draw,
    )


class DrawnSteps:
    """Step times of some worker counts, as calibrated and as drawn, and what follows from them."""

    def __init__(
        self, calibration: Calibration, training: Training, communication: Communication, workers: NDArray[Any]
    ) -> None:
        self.workers = workers
        self.batches = training.global_batch(workers)
        self._num_samples = min(len(p.step_times_s) for p in calibration.points)
        # One worker comes last, for the speedups.
        with_one = np.append(workers, 1)
        self._best = training_steps(calibration, training, communication, with_one).step_time_s
        self._rows: Floats | None = None
        if calibration.draws is not None:
            draw = {"fixed_s": calibration.draws[:, :1], "per_sample_s": calibration.draws[:, 1:]}
            self._rows = training_steps(calibration, training, communication, with_one, **draw).step_time_s

    def told(self, quantity: Callable[[Floats], Any]) -> Estimate:
        """What `quantity` makes of step times, shape ``(..., workers and one worker)``."""
        value = float(quantity(self._best))
        if self._rows is None:
            return Estimate(value, None, None, self._num_samples, None, Method.SINGLE)
        low, high = np.quantile(quantity(self._rows), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return Estimate(
            value, min(float(low), value), max(float(high), value), self._num_samples, LEVEL, Method.BOOTSTRAP
        )
