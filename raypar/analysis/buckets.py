"""What is sent as one: the buckets that gradients fill as the backward pass makes them."""

from __future__ import annotations

from collections.abc import Sequence

from raypar.train.layer_cost import LayerCost

MIB = 2**20
# torch's DistributedDataParallel; the first bucket is small so that sending begins early.
DEFAULT_BUCKET_BYTES = 25 * MIB
FIRST_BUCKET_BYTES = 1 * MIB


def buckets(layers: Sequence[LayerCost], bucket_bytes: float | None = None) -> list[tuple[float, float]]:
    """What is sent as one, in that order: (bytes, share of the backward pass after which they are ready).

    A bucket is closed by the layer with which it holds its bytes, as torch does it with single tensors.

    Args:
        layers: in the order of the forward pass.
        bucket_bytes: as in `Communication`.
    """
    found: list[tuple[float, float]] = []
    filled, passed = 0.0, 0.0
    for layer in reversed(layers):
        passed += layer.backward_share
        filled += layer.num_gradient_bytes
        if bucket_bytes == 0:  # a layer's tensors are taken to be alike: what counts is how many messages they are
            if layer.num_gradient_bytes:
                found += [(layer.num_gradient_bytes / layer.num_gradients, passed)] * layer.num_gradients
            filled = 0.0
            continue
        if bucket_bytes is not None:
            full = bucket_bytes
        else:
            full = DEFAULT_BUCKET_BYTES if found else FIRST_BUCKET_BYTES
        if filled and filled >= full:
            found.append((filled, passed))
            filled = 0.0
    if filled:
        found.append((filled, passed))
    return found
