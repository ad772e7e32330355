"""Facts of a training for its outlook: its exchange of gradients, its links, and its kind of model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raypar.analysis.laws import Scaling
from raypar.predict.network import Network
from raypar.predict.overhead import Fabric, Facts, Link, ModelFamily
from raypar.predict.step_model import LayerCost
from raypar.study.strategy import Exchange, exchange_of
from raypar.study.workload import Config

BYTES_PER_PARAMETER = 4
FAST_LINK_BYTES_PER_S = 50e9  # above any PCI Express x16 link in use, below any NVLink
RDMA_LATENCY_S = 10e-6  # TCP between two machines takes longer
_KINDS: Mapping[ModelFamily, tuple[str, ...]] = {
    ModelFamily.CONVOLUTIONAL: ("Conv1d", "Conv2d", "Conv3d"),
    ModelFamily.RECURRENT: ("RNN", "LSTM", "GRU"),
}


def link_kind(network: Network | None) -> Link | None:
    """Return the kind of links within a node from their bandwidth; None: not known."""
    if network is None:
        return None
    return Link.FAST if network.bandwidth_bytes_per_s >= FAST_LINK_BYTES_PER_S else Link.BUS


def fabric_of(latency_s: float | None) -> Fabric | None:
    """Return the kind of network between nodes from its latency; None: not known."""
    if latency_s is None:
        return None
    return Fabric.RDMA if latency_s <= RDMA_LATENCY_S else Fabric.TCP


def family_of_layers(layers: Sequence[LayerCost]) -> ModelFamily | None:
    """Return the kind of model whose layers do most of the work; None if the layers are not known."""
    total = sum(layer.backward_share for layer in layers)
    if not any(layer.kind for layer in layers) or not total:
        return None
    for family, kinds in _KINDS.items():
        if sum(layer.backward_share for layer in layers if layer.kind in kinds) > total / 2:
            return family
    return ModelFamily.OTHER


def facts_of(
    *,
    config: Config | None = None,
    scaling: Scaling | None = None,
    layers: Sequence[LayerCost] = (),
    num_parameters: float | None = None,
    step_time_s: float | None = None,
    within: Network | None = None,
    latency_s: float | None = None,
) -> Facts:
    """Return the facts of a training.

    Args:
        config: hyperparameters; None: not known, all-reduce is assumed.
        num_parameters: None: from the gradients of the layers.
        within: links within a node, if given.
        latency_s: of the network between nodes, if given.
    """
    num_bytes = sum(layer.num_gradient_bytes for layer in layers)
    return Facts(
        scaling=scaling,
        exchange=Exchange.ALL_REDUCE if config is None else exchange_of(config),
        within=link_kind(within),
        between=fabric_of(latency_s),
        family=family_of_layers(layers),
        step_time_s=step_time_s,
        num_parameters=num_parameters or num_bytes / BYTES_PER_PARAMETER or None,
    )
