"""One step of one worker count, by the step model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raypar.predict.step_model import Communication, LayerCost, StepTime, simulate_steps


def simulate_step(
    layers: Sequence[LayerCost],
    num_workers: int,
    communication: Communication,
    *,
    compute_s: float,
    optimizer_s: float = 0.0,
    data_s: float = 0.0,
    variation: float = 0.0,
    accumulation_steps: int = 1,
) -> StepTime:
    """Return the time of one step: see `simulate_steps`."""
    times = simulate_steps(
        layers,
        np.array([num_workers]),
        communication,
        compute_s=np.array([compute_s]),
        optimizer_s=np.array([optimizer_s]),
        data_s=np.array([data_s]),
        variation=variation,
        accumulation_steps=accumulation_steps,
    )
    return times.at(0)
