"""All-reduce: every rank gets the mean gradient, in buckets while the backward pass still runs, and steps by itself."""

from __future__ import annotations

from torch import nn

from raypar.parallel.place import Place


class AllReduce:
    """torch's DistributedDataParallel (Li et al. 2020, https://arxiv.org/abs/2006.15704)."""

    steps_here = True

    def __init__(self, model: nn.Module, place: Place) -> None:
        devices = [place.device.index] if place.device.type == "cuda" else None
        self.module: nn.Module = nn.parallel.DistributedDataParallel(model, device_ids=devices)

    def combine(self) -> None:
        """The backward pass did it."""

    def spread(self) -> None:
        """Equal gradients make equal steps."""
