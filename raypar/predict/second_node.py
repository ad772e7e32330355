"""Step times and batches from which more nodes pay, by the step model on measured links.

Nodes are added at the same batch per worker (weak scaling), as one does for throughput. N nodes pay if they train more
samples/s than one. A node whose step is too short waits longer for the other nodes' gradients than their samples are
worth. So there is a least step time, and for a network of known cost a least batch, from which a second node pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raypar.predict.all_reduces import MeasuredLink
from raypar.predict.calibration import Calibration
from raypar.predict.network import Algorithm, Floats, Topology
from raypar.predict.step_model import Communication, LayerCost, simulate_steps

STEP_TIMES_S = np.geomspace(1e-5, 1e5, 4001)  # of which neighbours differ by 0.6 %
MAX_BATCH = 2**24
NEARLY = 0.9  # share of the full gain
NUM_LAYERS = 50
FP32_BYTES = 4


def equal_layers(num_parameters: float) -> tuple[LayerCost, ...]:
    """Return an unknown network: `NUM_LAYERS` equal layers, with twice as much work backward as forward."""
    share = 1 / (3 * NUM_LAYERS)
    num_bytes = round(num_parameters * FP32_BYTES / NUM_LAYERS)
    return tuple(LayerCost(f"layer {i}", num_bytes, 2 * share, share) for i in range(NUM_LAYERS))


@dataclass(frozen=True)
class Nodes:
    """One node and several, whose links were measured.

    Attributes:
        workers_per_node: 1 if the links within a node were not measured.
    """

    workers_per_node: int
    num_nodes: int
    communication: Communication

    @classmethod
    def of(cls, within: MeasuredLink | None, between: MeasuredLink) -> Nodes:
        """Return the nodes of measured links."""
        how = Algorithm.GLOO if between.device == "cpu" else Algorithm.AUTO
        if within is None:
            return cls(1, between.num_nodes, Communication(between.network, how))
        links = Topology(within.num_workers, within.network, between.network)
        return cls(within.num_workers, between.num_nodes, Communication(links, how))

    @property
    def num_workers(self) -> Floats:
        """Workers of one node, and of all."""
        return np.array([[1.0], [float(self.num_nodes)]]) * float(self.workers_per_node)

    def least_step_s(self, layers: Sequence[LayerCost], gain: float = 1.0) -> float | None:
        """Return the step time of one node from which all nodes train `gain` times as many samples/s; None: never."""
        steps = simulate_steps(layers, self.num_workers, self.communication, compute_s=STEP_TIMES_S).step_time_s
        first = _first(self._gains(steps), gain)
        return None if first is None else float(steps[0, first])

    def least_batch(self, calibration: Calibration, gain: float = 1.0) -> int | None:
        """Return the samples per step of a node from which all nodes train `gain` times as many samples/s."""
        batches = np.unique(np.round(np.geomspace(1, MAX_BATCH, 1000)))
        first = _first(self._gains(self._steps_s(calibration, batches)), gain)
        return None if first is None else int(batches[first])

    def rates(self, calibration: Calibration, batch_size: int) -> tuple[float, float]:
        """Return the samples/s of one node and of all, at best, for the samples per step of a node."""
        one_s, all_s = self._steps_s(calibration, np.array([float(batch_size)]))[:, 0]
        return float(batch_size / one_s), float(self.num_nodes * batch_size / all_s)

    def _steps_s(self, calibration: Calibration, batches: Floats) -> Floats:
        """Return the step times of one node and of all, for the samples per step of a node."""
        num_nodes = self.num_workers / self.workers_per_node
        return calibration.step_times(self.num_workers, batches * num_nodes, self.communication).step_time_s

    def _gains(self, steps_s: Floats) -> Floats:
        gains: Floats = self.num_nodes * steps_s[0] / steps_s[1]
        return gains


def _first(gains: Floats, least: float) -> int | None:
    """Return the first position from which all gains are larger than `least`; None if the last is not."""
    missed = np.flatnonzero(gains <= least)
    first = int(missed[-1]) + 1 if len(missed) else 0
    return first if first < len(gains) else None


@dataclass(frozen=True)
class SecondNode:
    """Least step times at which the measured nodes pay, for a number of parameters.

    Attributes:
        gradient_bytes: in fp32.
        all_reduce_s: time of all gradients between the nodes, by the fitted link.
        pays_from_s: step time of one node from which all nodes train more samples/s than one; None: never.
        nearly_full_from_s: the same for `NEARLY` of as many nodes' samples/s.
    """

    num_parameters: int
    gradient_bytes: int
    all_reduce_s: float
    pays_from_s: float | None
    nearly_full_from_s: float | None

    @classmethod
    def of(cls, nodes: Nodes, between: MeasuredLink, num_parameters: int) -> SecondNode:
        """Return the step times for a network of `equal_layers`."""
        layers = equal_layers(num_parameters)
        num_bytes = num_parameters * FP32_BYTES
        return cls(
            num_parameters,
            num_bytes,
            between.time_s(num_bytes),
            nodes.least_step_s(layers),
            nodes.least_step_s(layers, NEARLY * nodes.num_nodes),
        )


@dataclass(frozen=True)
class StudyNodes:
    """Verdict of the measured nodes for a study.

    Attributes:
        batch_size: samples per step of a node.
        one_samples_per_s, all_samples_per_s: of one node and of all, at best.
        pays_from_batch: samples per step of a node from which all train more samples/s than one; None: never.
        pays_from_samples_per_s: samples/s of one node with that batch.
    """

    study: str
    workers_per_node: int
    batch_size: int
    one_samples_per_s: float
    all_samples_per_s: float
    pays_from_batch: int | None
    pays_from_samples_per_s: float | None

    @classmethod
    def of(cls, nodes: Nodes, study: str, calibration: Calibration, batch_size: int) -> StudyNodes:
        """Return the verdict for a calibrated study."""
        least = nodes.least_batch(calibration)
        at_least = None if least is None else nodes.rates(calibration, least)[0]
        return cls(study, nodes.workers_per_node, batch_size, *nodes.rates(calibration, batch_size), least, at_least)
