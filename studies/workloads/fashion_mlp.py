"""Fashion-MNIST with a perceptron of two hidden layers, 784-hidden-hidden-10, selected on a validation split."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypar.study.workload import Config, Data, Workload, one_of
from raypar.workloads.activations import ACTIVATIONS, perceptron
from raypar.workloads.datasets import ensure_image_set, image_data

if TYPE_CHECKING:
    from torch import nn

MEAN, STD = 0.2860, 0.3530  # of the training pixels, as fractions of 255
NUM_VAL = 10_000


def build(config: Config) -> nn.Module:
    """Build a perceptron of 784-hidden-hidden-10."""
    from torch import nn

    sizes = [28 * 28, config["hidden_size"], config["hidden_size"], 10]
    return nn.Sequential(nn.Flatten(), *perceptron(sizes, config["activation"]))


def data(config: Config) -> Data:
    """Return 50,000 training images, the last 10,000 of them held out as ``val``, and the 10,000 test images."""
    return image_data("FashionMNIST", config, mean=MEAN, std=STD, num_val=NUM_VAL)


fashion_mlp = Workload(
    name="fashion_mlp",
    model=build,
    data=data,
    num_train_samples=60_000 - NUM_VAL,
    options={"hidden_size": 128, "activation": one_of("sigmoid", ACTIVATIONS)},
    # keep_model: the models that are best on the validation split see the test split.
    defaults={"optimizer": "adam", "lr": 0.001, "batch_size": 64, "epochs": 10, "keep_model": True},
    prepare=lambda _: ensure_image_set("FashionMNIST"),
    description="multi-layer perceptron of two hidden layers, 784-128-128-10, sigmoid",
    dataset="Fashion-MNIST, 50,000 + 10,000 + 10,000 images",
    has_test=True,
)
