"""From an optimizer's name to torch's optimizer, or to one for large batches that torch lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from raypar.study.workload import Config
from raypar.train.large_batch import LAMB, LARS
from raypar.train.schedule import scaled_lr

# The names are study.options.OPTIMIZERS; momentum and nesterov are SGD with the usual 0.9.
_MAKERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "nesterov": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adadelta": torch.optim.Adadelta,
    "lars": partial(LARS, momentum=0.9, trust_coefficient=0.001),
    "lamb": LAMB,
}


def build_optimizer(parameters: Iterable[Any], config: Config) -> Optimizer:
    """The optimizer that ``config["optimizer"]`` names, with the config's scaled lr and weight_decay."""
    return _MAKERS[config["optimizer"]](parameters, lr=scaled_lr(config), weight_decay=config["weight_decay"])
