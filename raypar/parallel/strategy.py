"""How the ranks of a trial come to the same weights after every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import nn

from raypar.parallel.ddp import AllReduce
from raypar.parallel.gather_broadcast import GatherBroadcast
from raypar.parallel.place import Place


class Strategy(Protocol):
    """One step is: forward and backward through `module`, `combine`, the optimizer where `steps_here`, `spread`."""

    module: nn.Module
    steps_here: bool  # whether this rank runs the optimizer

    def combine(self) -> None:
        """After the backward pass: the mean gradients are where the optimizer runs."""
        ...

    def spread(self) -> None:
        """After the optimizer: every rank has its weights."""
        ...


class Alone:
    """One rank: nothing to agree on."""

    steps_here = True

    def __init__(self, model: nn.Module) -> None:
        self.module = model

    def combine(self) -> None:
        pass

    def spread(self) -> None:
        pass


# The names are study.options.STRATEGIES.
_STRATEGIES: Mapping[str, Callable[[nn.Module, Place], Strategy]] = {
    "ddp": AllReduce,
    "gather_broadcast": GatherBroadcast,
}


def build_strategy(name: str, model: nn.Module, place: Place) -> Strategy:
    """The strategy of that name around a model whose weights are the same on every rank."""
    return _STRATEGIES[name](model, place) if place.world_size > 1 else Alone(model)
