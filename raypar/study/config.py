"""A trial's complete config: what a study chose, over the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raypar.study.affinity import affinity_width
from raypar.study.options import known_options
from raypar.study.space import Value
from raypar.study.workload import Workload


def resolve(workload: Workload, chosen: Mapping[str, Value], default_device: str = "cpu") -> dict[str, Value]:
    """A complete config: what was chosen over the defaults; ``per_worker_batch_size`` settles ``batch_size``."""
    known = known_options(workload)
    config: dict[str, Any] = {key: option.default for key, option in known.items()}
    config.update(chosen)
    if not workload.is_train_loop:
        if config["per_worker_batch_size"] is not None:
            config["batch_size"] = config["per_worker_batch_size"] * config["num_workers"]
        if config["lr_base_batch_size"] is None:
            config["lr_base_batch_size"] = known["batch_size"].default
    if (width := affinity_width(config["cpu_affinity"], config["num_workers"])) is not None:
        config["cpus_per_worker"] = width
    if config["device"] == "auto":
        config["device"] = default_device
    if config["num_threads"] is None:
        config["num_threads"] = config["cpus_per_worker"]
    # So that `lr=1` and `lr=1.0` are one trial.
    floats = {key for key, option in known.items() if option.kind is float}
    return {key: float(v) if key in floats and v is not None else v for key, v in config.items()}
