"""Building blocks of networks: activations by name, perceptrons, an option for dropout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from raypar.study.workload import Option

if TYPE_CHECKING:
    from torch import nn

# Names of torch.nn classes, not the classes: a study file that loads this must not wait for torch.
ACTIVATIONS: Mapping[str, str] = {
    "relu": "ReLU",
    "leaky_relu": "LeakyReLU",
    "elu": "ELU",
    "gelu": "GELU",
    "silu": "SiLU",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
}


def dropout(default: float, note: str = "") -> Option:
    """Return the hyperparameter of a network's dropout; `note` ends its description."""
    return Option(
        default,
        float,
        f"share of the features dropped in a training step{note}",
        lambda v: None if isinstance(v, (int, float)) and 0 <= v < 1 else "must be from 0 to below 1",
    )


def activation(name: str) -> nn.Module:
    """Return the activation as a layer with torch's default settings; it keeps the shape of its input."""
    from torch import nn

    layer: nn.Module = getattr(nn, ACTIVATIONS[name])()
    return layer


def perceptron(sizes: Sequence[int], name: str) -> nn.Sequential:
    """Build linear layers of `sizes`, from inputs to scores, with the activation between them."""
    from torch import nn

    *hidden, last = pairwise(sizes)
    layers = [layer for pair in hidden for layer in (nn.Linear(*pair), activation(name))]
    return nn.Sequential(*layers, nn.Linear(*last))
