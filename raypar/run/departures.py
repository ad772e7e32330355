"""Nodes that leave a Ray cluster on purpose: preempted spot machines, and those that an autoscaler or a user removes.

Ray learns of a preemption by its drain API: from a cloud's autoscaler, from KubeRay, from ``ray drain-node``, or from
``ray start --block`` on the node if it gets SIGTERM. Until it is gone, the node then is *draining*: Ray places nothing
there, and what runs there continues. A machine that disappears without such a notice looks like one that failed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import ray
from ray._private.state import state
from ray.core.generated.common_pb2 import NodeDeathInfo

from raypar.run.pool import MACHINE_LABEL

PREEMPTED = "was preempted"
# Reasons of Ray for a node's end that say that somebody wanted it.
ON_PURPOSE: Mapping[int, str] = {
    NodeDeathInfo.EXPECTED_TERMINATION: "was stopped",
    NodeDeathInfo.AUTOSCALER_DRAIN_PREEMPTED: PREEMPTED,
    NodeDeathInfo.AUTOSCALER_DRAIN_IDLE: "was removed by the autoscaler",
}


class Departures:
    """Record of the notices of nodes. Ray forgets that of a node that ends before its deadline."""

    def __init__(self) -> None:
        self._announced: set[str] = set()

    def draining(self) -> Collection[str]:
        """Look up and return the ids of the nodes that are draining."""
        draining: Collection[str] = state.get_draining_nodes().keys()
        self._announced.update(draining)
        return draining

    def of(self, node_ids: Collection[str]) -> dict[str, str]:
        """Return how those of the nodes that left, or are about to, do so: ``{"spot-3": "was preempted"}``."""
        self.draining()
        nodes = [node for node in ray.nodes() if node["NodeID"] in node_ids]
        ways = {
            name_of(node): PREEMPTED if node["NodeID"] in self._announced else ON_PURPOSE.get(node["DeathReason"], "")
            for node in nodes
        }
        return {name: way for name, way in ways.items() if way}


def name_of(node: Mapping[str, object]) -> str:
    """Return the name that results give a node's machine."""
    labels = node["Labels"]
    return str((isinstance(labels, Mapping) and labels.get(MACHINE_LABEL)) or node["NodeManagerHostname"])
