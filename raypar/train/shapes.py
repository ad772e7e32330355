"""A look at a network through a few samples, on torch's meta device where it can be: shapes without numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from raypar.errors import RayparError
from raypar.study.workload import Config, Data, Workload

# Batch normalisation in training wants more than one value per channel, which a 1 x 1 image has not alone.
NUM_SAMPLES = 2

T = TypeVar("T")


def few_inputs(workload: Workload, config: Config) -> Tensor:
    """Inputs of `NUM_SAMPLES` samples as the model gets them, from the workload's own data."""
    assert workload.data is not None, "a workload that is no train loop has data"
    return _sample(workload.data(_of_few(config)))


def looked_at(workload: Workload, config: Config, sample: Tensor, look: Callable[[nn.Module, Tensor], T]) -> T:
    """What `look` finds at the network, run on shapes alone if it can be.

    Raises:
        RayparError: `look` did, or the network can't be built, or can't take the sample.
    """
    assert workload.model is not None, "a workload that is no train loop has a model"
    ways: tuple[tuple[str, str, Tensor], ...] = (
        ("meta", "meta", torch.empty_like(sample, device="meta")),
        ("cpu", "meta", torch.empty_like(sample, device="meta")),  # for one that looks at numbers when it is built
        ("cpu", "cpu", sample),  # or when it is run
    )
    for built_on, run_on, inputs in ways:
        try:
            with torch.device(built_on):
                model = workload.model(config).to(run_on)
            with torch.device(run_on):
                return look(model, inputs)
        except RayparError:
            raise
        except Exception as error:  # whatever a network may raise; the last is told
            why = (str(error).splitlines() or [type(error).__name__])[0]
    raise RayparError(
        f"workload {workload.name}: the network can't be built, or can't take its samples: {why}",
        hint=f"`raypar workloads {workload.name}` shows what its options may be",
    )


def _of_few(config: Config) -> Config:
    """Made-up images need not be made in full to see the shape of one."""
    if config.get("source") != "synthetic":
        return config
    return {**config, **{key: NUM_SAMPLES for key in ("num_images", "num_classes") if key in config}}


def _sample(data: Data) -> Tensor:
    if data.train is not None:
        some = data.train.inputs[:NUM_SAMPLES]
        some = data.transform(some) if data.transform else some
        return some.float() if some.dtype == torch.uint8 else some
    assert data.train_dataset is not None, "a workload's data has train or train_dataset"
    return torch.stack([data.train_dataset[i][0] for i in range(NUM_SAMPLES)])
