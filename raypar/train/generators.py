"""Random number generators of a rank: Python's, numpy's and torch's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def seed_generators(seed: int, device_type: str = "cpu") -> None:
    """Seed every generator that a trial's code may draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    seed_torch(seed, device_type)


def seed_torch(seed: int, device_type: str) -> None:
    """Do the same as `torch.manual_seed`, which takes 1 ms in a new process for devices that a CPU trial lacks."""
    if device_type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's random number generators."""
    algorithm, words, *rest = np.random.get_state()
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [algorithm, np.asarray(words).tolist(), *rest],  # a checkpoint holds tensors and plain values only
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state()
    return states


def set_generator_states(saved: Mapping[str, Any], device: torch.device) -> None:
    """Restore `generator_states`."""
    version, keys, gauss = saved["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(tuple(saved["numpy"]))
    torch.set_rng_state(saved["torch"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(saved["device"])


@contextlib.contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Restore the random number generators after the block."""
    states = generator_states(device)
    try:
        yield
    finally:
        set_generator_states(states, device)
