"""What a layer of a network adds to a training step."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class LayerCost:
    """One layer; the shares of all layers add up to 1, forward and backward together.

    Attributes:
        name: as the model calls it.
        num_gradient_bytes: of its own gradients, which are sent as they are (not compressed).
        backward_share: of the time that a step computes, what its gradients take.
        forward_share: the same of its forward pass.
        num_gradients: tensors of them (weights, biases), which are sent one by one where nothing is fused.
    """

    name: str
    num_gradient_bytes: int
    backward_share: float
    forward_share: float
    num_gradients: int = 1


def one_layer(num_gradient_bytes: int) -> tuple[LayerCost, ...]:
    """A network of which nothing but its size is known: all gradients are there at the end of the backward pass."""
    # The backward pass computes gradients by weights and by inputs: twice the work of the forward pass.
    return (LayerCost("all layers", num_gradient_bytes, 2 / 3, 1 / 3),)


def read_layers(path: Path) -> tuple[LayerCost, ...] | None:
    """What `write_layers` has put there; None where there is nothing that can be read."""
    try:
        return tuple(LayerCost(**raw) for raw in json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_layers(path: Path, layers: tuple[LayerCost, ...]) -> None:
    """Keep layers for a later call: importing torch and building a network take seconds. A full disk is no error."""
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps([asdict(layer) for layer in layers]), encoding="utf-8")
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
