"""Multi-layer perceptron of any width and depth on synthetic data, for strategies that split a network.

Weights grow with the square of `width` while the data stays small, so that strategies dominate the time, not loading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypar.study.workload import Config, Data, Split, Workload, whole_number
from raypar.workloads.activations import perceptron

if TYPE_CHECKING:
    from torch import nn

SEED = 0
# Distance of a class's centre from the origin, in standard deviations of the noise. Two centres are about 5.7 apart for
# any num_features: with ten classes, one sample in fifty is nearer to a wrong centre.
DISTANCE = 4.0


def build(config: Config) -> nn.Module:
    """Build a perceptron with `depth` hidden layers of `width` units, each followed by ReLU.

    Weights are drawn after He et al. 2015 (arXiv:1502.01852, eq. 10); with torch's smaller defaults, twelve hidden
    layers learn nothing in an epoch.
    """
    from torch import nn

    sizes = [config["num_features"], *[config["width"]] * config["depth"], config["num_classes"]]
    model = perceptron(sizes, "relu")
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return model


def data(config: Config) -> Data:
    """Return Gaussian noise around a centre per class: inputs of shape ``(num_samples, num_features)``, float32.

    Deterministic. ``val`` has a quarter as many samples as ``train``, around the same centres. Classes alternate, so
    that every prefix is stratified.
    """
    import torch

    num_classes, num_features, num_train = config["num_classes"], config["num_features"], config["num_points"]
    random = torch.Generator().manual_seed(SEED)
    directions = torch.nn.functional.normalize(torch.randn(num_classes, num_features, generator=random))

    def draw(num_samples: int) -> Split:
        targets = torch.arange(num_samples) % num_classes
        noise = torch.randn(num_samples, num_features, generator=random)
        return Split(noise.add_(directions[targets], alpha=DISTANCE), targets)

    return Data(train=draw(num_train), val=draw(-(-num_train // 4)))


wide_mlp = Workload(
    name="wide_mlp",
    model=build,
    data=data,
    num_train_samples=lambda config: config["num_points"],
    options={
        "width": whole_number(1024, "units of each hidden layer"),
        "depth": whole_number(4, "hidden layers"),
        "num_features": whole_number(256, "numbers in a sample", at_least=2),
        "num_classes": whole_number(10, "each around its own centre", at_least=2),
        "num_points": whole_number(8192, "training samples; a quarter as many for validation"),
    },
    defaults={"optimizer": "adam", "lr": 0.0005, "batch_size": 128, "epochs": 1},
    description="multi-layer perceptron of any width and depth, to be split",
    dataset="made-up points around class centres, 8,192 + 2,048, embedded",
)
