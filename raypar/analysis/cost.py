"""What a training costs: nodes × hours × price of a node-hour.

Nodes are the machines that its workers ran on, each paid for whole, however many of its cores were used. The hours are
those of the time that is compared; what a study leaves out of it (start-up, evaluation) is not paid for here either.
"""

from __future__ import annotations

from collections.abc import Sequence

from raypar.analysis.question import PointSamples
from raypar.analysis.stats import Estimate
from raypar.units import HOUR_S


def num_nodes(samples: PointSamples) -> int | None:
    """On how many machines the workers of a point's trials ran, the most of any trial; None where unknown."""
    listed = [result.environment.get("node") for result in samples.results]
    counts = [len(set(nodes)) for nodes in listed if isinstance(nodes, Sequence) and not isinstance(nodes, str)]
    return max((count for count in counts if count), default=None)


def cost_of(time_s: Estimate | None, nodes: int | None, price_per_node_hour: float | None) -> Estimate | None:
    """In the currency of the price; None where anything is unknown."""
    if time_s is None or nodes is None or price_per_node_hour is None:
        return None
    return time_s.scaled(nodes * price_per_node_hour / HOUR_S)
