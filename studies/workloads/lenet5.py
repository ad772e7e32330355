"""LeNet-5 on MNIST: as published in 1998, or as usually drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypar.study.workload import Config, Workload, one_of
from raypar.workloads.activations import ACTIVATIONS, activation
from raypar.workloads.mnist_mlp import data, prepare

if TYPE_CHECKING:
    from torch import Tensor, nn

# Table I of the paper: the maps of S2 that each map of C3 sees.
TRIPLES = tuple(tuple((first + i) % 6 for i in range(3)) for first in range(6))
QUADRUPLES = (
    *(tuple((first + i) % 6 for i in range(4)) for first in range(6)),
    *((0, 1, 3, 4), (1, 2, 4, 5), (0, 2, 3, 5)),
)


def build(config: Config) -> nn.Module:
    """Build the network of LeCun et al. 1998, "Gradient-based learning applied to document recognition".

    From ``(batch, 1, 28, 28)``, padded to 32 x 32, to scores of ``(batch, 10)``: 6 maps of 5 x 5 filters (C1), pooled
    by 2 x 2 (S2), 16 maps of 5 x 5 (C3), pooled (S4), then 120 (C5), 84 (F6) and 10 units.

    connections=partial is the paper's: a map of C3 sees three, four or six maps of S2 (1,516 weights and biases), and
    pooling has a factor and a bias for each map. Up to F6 that makes the paper's 60,000 weights; the last layer's 840,
    which it fixes by hand, are learned here, without biases. A sample takes 326,520 multiply-accumulates in
    convolutions and fully connected layers. The 341k of most tables are the paper's 340,908 connections: they add
    7,880 of pooling (5 for an output) and 6,508 biases. A step takes about three times as long on a CPU as with
    connections=full, though it computes less: convolutions by groups are slow.

    connections=full is the usual drawing: every map of C3 sees all of S2, pooling has no weights. 61,706 weights and
    416,520 multiply-accumulates.
    """
    import torch
    from torch import nn

    name, is_partial = config["activation"], config["connections"] == "partial"

    class ScaledMaps(nn.Module):
        """A trained factor and bias per map, ``(batch, num_maps, height, width)`` in and out."""

        def __init__(self, num_maps: int) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(num_maps, 1, 1))
            self.bias = nn.Parameter(torch.zeros(num_maps, 1, 1))

        def forward(self, maps: Tensor) -> Tensor:
            return maps * self.factor + self.bias

    class PartialConvolution(nn.Module):
        """C3 by Table I, ``(batch, 6, 14, 14)`` to ``(batch, 16, 10, 10)``; only connected maps are computed."""

        def __init__(self) -> None:
            super().__init__()
            self.of_three = nn.Conv2d(3 * len(TRIPLES), len(TRIPLES), 5, groups=len(TRIPLES))
            self.of_four = nn.Conv2d(4 * len(QUADRUPLES), len(QUADRUPLES), 5, groups=len(QUADRUPLES))
            self.of_all = nn.Conv2d(6, 1, 5)
            self.triples = [number for seen in TRIPLES for number in seen]
            self.quadruples = [number for seen in QUADRUPLES for number in seen]

        def forward(self, maps: Tensor) -> Tensor:
            groups = (self.of_three(maps[:, self.triples]), self.of_four(maps[:, self.quadruples]), self.of_all(maps))
            return torch.cat(groups, dim=1)

    def pooled(num_maps: int) -> list[nn.Module]:
        return [nn.AvgPool2d(2), *([ScaledMaps(num_maps), activation(name)] if is_partial else [])]

    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        activation(name),
        *pooled(6),
        PartialConvolution() if is_partial else nn.Conv2d(6, 16, 5),
        activation(name),
        *pooled(16),
        nn.Flatten(),
        nn.Linear(400, 120),
        activation(name),
        nn.Linear(120, 84),
        activation(name),
        nn.Linear(84, 10, bias=not is_partial),
    )


lenet5 = Workload(
    name="lenet5",
    model=build,
    data=data,
    num_train_samples=60_000,
    options={
        "connections": one_of("partial", ("partial", "full"), "partial: as published in 1998; full: as usually drawn"),
        "activation": one_of("tanh", ACTIVATIONS),
    },
    # 98.6 % after four epochs with the published connections.
    defaults={"optimizer": "momentum", "lr": 0.03, "batch_size": 64, "epochs": 5},
    prepare=prepare,
    description="LeNet-5, two convolutions and three fully connected layers",
    dataset="MNIST, 60,000 + 10,000 images",
)
