"""A multi-layer perceptron as wide and deep as one likes, on made-up data: for ways to split a network.

Its weights grow with the square of `width`, the data stays small: what a strategy costs is seen, not the loading.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from raypar.study.workload import Config, Data, Split, Workload, whole_number

if TYPE_CHECKING:
    from torch import nn

SEED = 0
# Of a class's centre from the origin, in standard deviations of the noise. Two centres are about 5.7 apart, whatever
# num_features, so that of ten classes one sample in fifty is nearer to a wrong centre than to its own.
DISTANCE = 4.0


def build(config: Config) -> nn.Module:
    """features - width - … - width - classes, with `depth` hidden layers and ReLU behind each.

    Weights are drawn as He et al. 2015 (arXiv:1502.01852, eq. 10) would have it: with torch's own, which are smaller,
    twelve hidden layers learn nothing in an epoch.
    """
    from torch import nn

    sizes = [config["num_features"], *[config["width"]] * config["depth"]]
    hidden = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(sizes[-1], config["num_classes"]))
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return model


def data(config: Config) -> Data:
    """Normal noise around a centre for each class: inputs of shape ``(num_samples, num_features)``, float32.

    The same every time. ``val`` has a quarter as many samples as ``train``, all of them other ones around the same
    centres. The classes take turns: any beginning holds every class in its share.
    """
    import torch

    num_classes, num_features, num_train = config["num_classes"], config["num_features"], config["num_points"]
    random = torch.Generator().manual_seed(SEED)
    directions = torch.nn.functional.normalize(torch.randn(num_classes, num_features, generator=random))

    def drawn(num_samples: int) -> Split:
        targets = torch.arange(num_samples) % num_classes
        noise = torch.randn(num_samples, num_features, generator=random)
        return Split(noise.add_(directions[targets], alpha=DISTANCE), targets)

    return Data(train=drawn(num_train), val=drawn(-(-num_train // 4)))


def num_train_points(config: Config) -> int:
    return int(config["num_points"])


wide_mlp = Workload(
    name="wide_mlp",
    model=build,
    data=data,
    num_train_samples=num_train_points,
    options={
        "width": whole_number(1024, "units of each hidden layer"),
        "depth": whole_number(4, "hidden layers"),
        "num_features": whole_number(256, "numbers in a sample", at_least=2),
        "num_classes": whole_number(10, "each with a centre of its own", at_least=2),
        "num_points": whole_number(8192, "samples for training; a quarter as many are made for validation"),
    },
    defaults={"optimizer": "adam", "lr": 0.0005, "batch_size": 128, "epochs": 1},
    description="multi-layer perceptron of any width and depth, to be split",
    dataset="made-up points around class centres, 8,192 + 2,048, embedded",
)
