"""What a layer of a network adds to a training step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerCost:
    """One layer; the shares of all layers add up to 1, forward and backward together.

    Attributes:
        name: as the model calls it.
        num_gradient_bytes: of its own gradients, which are sent as they are (not compressed).
        backward_share: of the time that a step computes, what its gradients take.
        forward_share: the same of its forward pass.
    """

    name: str
    num_gradient_bytes: int
    backward_share: float
    forward_share: float


def one_layer(num_gradient_bytes: int) -> tuple[LayerCost, ...]:
    """A network of which nothing but its size is known: all gradients are there at the end of the backward pass."""
    # The backward pass computes gradients by weights and by inputs: twice the work of the forward pass.
    return (LayerCost("all layers", num_gradient_bytes, 2 / 3, 1 / 3),)
