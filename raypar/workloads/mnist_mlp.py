"""MNIST with a multi-layer perceptron of 784-128-10."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypar.study.workload import Config, Data, Workload, one_of
from raypar.workloads.activations import ACTIVATIONS, perceptron
from raypar.workloads.datasets import ensure_image_set, image_data

if TYPE_CHECKING:
    from torch import nn

MEAN, STD = 0.1307, 0.3081  # of the training pixels, as fractions of 255


def build(config: Config) -> nn.Module:
    from torch import nn

    return nn.Sequential(nn.Flatten(), *perceptron([28 * 28, config["hidden_size"], 10], config["activation"]))


def data(config: Config) -> Data:
    return image_data("MNIST", config, mean=MEAN, std=STD)


def prepare(_: Config) -> None:
    ensure_image_set("MNIST")


mnist_mlp = Workload(
    name="mnist_mlp",
    model=build,
    data=data,
    num_train_samples=60_000,
    options={"hidden_size": 128, "activation": one_of("relu", ACTIVATIONS)},
    defaults={"optimizer": "sgd", "lr": 0.1, "batch_size": 64, "epochs": 3},
    prepare=prepare,
    description="multi-layer perceptron, 784-128-10",
    dataset="MNIST, 60,000 + 10,000 images",
)
