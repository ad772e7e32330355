"""Pool of gangs in Ray, which starts them on the nodes of the cluster."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import ActorDiedError

from raypar.measure.telemetry import this_machine
from raypar.run.cluster import node_types
from raypar.run.departures import Departures
from raypar.run.gang import loss_reason, train_gang
from raypar.run.placement import Node, NodeAssignment, needed
from raypar.run.pool import MACHINE_LABEL, Gang, GangPolicy, Greeting, OnEnd, Pool
from raypar.run.ranks import ForkAgent, answers
from raypar.run.scheduler import ROUNDING, GangPhase
from raypar.study.options import node_label_of
from raypar.study.trial import Placement, TrialSpec
from raypar.trace import mark
from raypar.train.affinity import ProcessTree
from raypar.train.job import Revision, RunSettings

NODE_ID_LABEL = "ray.io/node-id"  # every Ray node has it
RAY_DELAY_S = 3.0  # Ray shows an ended gang's resources as free within this time


class GangPool(Pool):
    """Pool of gangs in Ray. Runs on the broker's event loop."""

    _own_ray: ProcessTree | None = None  # until its processes have left the cores of the trials

    def __init__(self, settings: RunSettings, policy: GangPolicy) -> None:
        self._departures = Departures()
        super().__init__(alive_nodes(self._departures.draining()), settings, policy)
        self._loop = asyncio.get_running_loop()
        self._broker = ray.get_runtime_context().current_actor
        self._agents: dict[tuple[str, str], Any] = {}  # by node and revision
        self._requested: dict[Placement, Any] = {}  # the placement groups that wait for nodes
        self._own_ray = policy.own_ray
        # Even if all its nodes are up now, the autoscaler replaces lost ones.
        self.may_grow = not policy.owns_cluster and any(each.resources and each.max_count for each in node_types())
        if self._is_warm and not policy.fork_addresses:
            for node in self.nodes:  # before the first gang needs them
                for revision in settings.revisions or (settings.revision(),):
                    self._agent(node.id, revision)

    def refresh(self) -> bool:
        """Look up the nodes; return whether they have changed. (A private Ray never gets new nodes.)"""
        if self._policy.owns_cluster:
            return False
        before, self.nodes = self.nodes, alive_nodes(self._departures.draining())
        has_changed = {node.id for node in before} != {node.id for node in self.nodes}
        if has_changed:
            self.give_up_lost()
        return has_changed

    def give_up_lost(self) -> None:
        """Close the gangs on nodes that are lost or draining.

        For one that is starting, Ray would wait a minute. Waiting trials can then use other gangs. A gang that Ray has
        placed elsewhere leaves once it is up, and one with a trial after that.
        """
        alive = {node.id for node in self.nodes}
        for gang in self.gangs.values():
            if alive.issuperset(gang.nodes):
                continue
            was_starting = gang.phase is GangPhase.STARTING
            gang.close()
            if was_starting:
                _free_place(gang)

    def departed(self, gang: Gang) -> dict[str, str]:
        """Return how nodes of a gang left on purpose, see `Pool.departed`."""
        return {} if self._policy.owns_cluster else self._departures.of(gang.nodes)

    def request_nodes(self, placements: Collection[Placement]) -> list[Placement]:
        """Show the autoscaler what gangs of these placements need, as pending placement groups; return the new ones."""
        for placement in [p for p in self._requested if p not in placements]:
            ray.util.remove_placement_group(self._requested.pop(placement))  # its nodes are up: free them for gangs
        new = [placement for placement in placements if placement not in self._requested]
        for placement in new:
            bundles, strategy = [needed(placement)] * placement.num_workers, _strategy(placement)
            labels = _labels(placement)
            self._requested[placement] = ray.util.placement_group(bundles, strategy, bundle_label_selector=labels)
        return new

    def _selection(self, placement: Placement, nodes: NodeAssignment) -> tuple[str, list[dict[str, str]]]:
        """Return Ray's strategy and the labels of each worker's node. If other jobs took the nodes, Ray chooses."""
        if len(self.nodes) > 1 and (self._is_exclusive or self._are_free(placement, nodes)):
            return "PACK", [{NODE_ID_LABEL: node_id} for node_id, count in nodes.items() for _ in range(count)]
        return _strategy(placement) if len(self.nodes) > 1 else "PACK", _labels(placement) or []

    def _are_free(self, placement: Placement, nodes: NodeAssignment) -> bool:
        """Return whether the nodes have the resources that the gang reserves. Waits briefly, as Ray reports late."""
        until_s = time.monotonic() + RAY_DELAY_S
        least = {kind: amount - ROUNDING for kind, amount in self.reserved(placement).items()}
        while True:
            free = available_resources_per_node()
            has = [(free.get(node_id, {}), count) for node_id, count in nodes.items()]
            if all(left.get(kind, 0) >= amount * count for left, count in has for kind, amount in least.items()):
                return True
            if time.monotonic() > until_s:
                return False
            time.sleep(0.1)

    def start(self, placement: Placement, nodes: NodeAssignment, on_end: OnEnd) -> Gang:
        """Start a gang on these nodes, in a new thread; `on_end` is called after its end."""
        gang = super().start(placement, nodes, on_end)
        mark("broker: gang starts")

        def run() -> None:
            error: BaseException | None = None
            try:
                train_gang(
                    self._broker,
                    gang.id,
                    placement,
                    self.reserved(placement),
                    *self._selection(placement, nodes),
                    str(self._settings.here().log_dir / "gangs"),
                    fresh=not self._is_warm,
                    forks_ahead=self._policy.forks_ahead,
                    on_private_ray=self._policy.owns_cluster,
                )
            except BaseException as e:
                error = e
            self._loop.call_soon_threadsafe(self._ended, gang, error, on_end)

        threading.Thread(target=run, daemon=True, name=f"gang-{gang.id}").start()
        return gang

    def lease(self, gang: Gang, spec: TrialSpec) -> dict[int, tuple[int, ...]] | None:
        """Lease cores to every rank of the gang, see `Pool.lease`. The driver and Ray start on all cores."""
        if self._own_ray is not None:
            self._own_ray.keep_off([core.number for core in self._policy.cores or ()])
            self._own_ray = None
        return super().lease(gang, spec)

    async def fork_address(self, gang_id: str, greeting: Greeting) -> str:
        """Return the address of the fork server of a worker's node; empty if ranks are fresh interpreters."""
        if not self._is_warm:
            return ""
        revision = self._settings.revision(self.gangs[gang_id].placement.revision)
        address = self._policy.fork_addresses.get(revision.label, "")
        if greeting.host == this_machine() and answers(address):
            return address
        agent = self._agent(greeting.node_id, revision)
        try:
            return str(await agent.address.remote())
        except ActorDiedError:  # for example, it was killed for lack of memory
            if self._agent(greeting.node_id, revision) is agent:  # another worker has not replaced it yet
                del self._agents[greeting.node_id, revision.label]
            return str(await self._agent(greeting.node_id, revision).address.remote())

    def _ended(self, gang: Gang, error: BaseException | None, on_end: OnEnd) -> None:
        del self.gangs[gang.id]
        if error is not None or not gang.is_closing:
            # Train's cleaner needs the dashboard. Without a cleaner, a lost gang's group would keep its resources.
            _free_place(gang)
        on_end(gang, loss_reason(error, gang.hostnames), str(error or ""))

    def _agent(self, node_id: str, revision: Revision) -> Any:
        """Return the actor that owns the node's fork server of a revision; start it if there is none."""
        if (node_id, revision.label) not in self._agents:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            where = NodeAffinitySchedulingStrategy(node_id, soft=False)
            agent = ray.remote(num_cpus=0)(ForkAgent).options(scheduling_strategy=where)
            self._agents[node_id, revision.label] = agent.remote(revision)
        return self._agents[node_id, revision.label]


def _free_place(gang: Gang) -> None:
    """Release the resources of a gang's workers in Ray, and end workers that still exist."""
    group = next((w.placement_group for w in gang.workers.values() if w.placement_group), None)
    if group is not None:
        ray.util.remove_placement_group(group)


def _strategy(placement: Placement) -> str:
    """Return Ray's strategy. "SPREAD" stands for several workers on each of several nodes, which Ray can't express."""
    if isinstance(nodes := placement.nodes, int):
        return "STRICT_PACK" if nodes == 1 else "STRICT_SPREAD" if nodes == placement.num_workers else "SPREAD"
    return str(nodes).upper()


def _labels(placement: Placement) -> list[dict[str, str]] | None:
    """Return the labels that each worker's node must have; None: any node."""
    label = placement.node_label
    return [dict([node_label_of(label)])] * placement.num_workers if label else None


def alive_nodes(draining: Collection[str] = ()) -> tuple[Node, ...]:
    """Return Ray's nodes that are up and not draining. Nodes with one host name and address are on one machine."""
    return tuple(
        Node(
            node["NodeID"],
            node["Labels"].get(MACHINE_LABEL) or f"{node['NodeManagerHostname']}/{node['NodeManagerAddress']}",
            node["Resources"],
            node["Labels"],
        )
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in draining
    )
