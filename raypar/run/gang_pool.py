"""Pool of a run's gangs: starts and closes them in Ray, and leases cores to their trials."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import ray
from ray._private.state import available_resources_per_node

from raypar.run.cluster import node_types
from raypar.run.gang import Greeting, Turn, host_id, train_gang
from raypar.run.placement import CoreLeases, Node, NodeAssignment, needed
from raypar.run.ranks import ForkAgent, answers
from raypar.run.scheduler import ROUNDING, GangPhase, GangState
from raypar.study.options import node_label_of
from raypar.study.trial import Placement, TrialSpec
from raypar.trace import mark
from raypar.train.affinity import Core
from raypar.train.job import Revision, RunSettings

MIN_FREE_MEMORY = 0.25  # with less of this machine's memory left, a new gang takes the place of an idle one
NODE_ID_LABEL = "ray.io/node-id"  # every node of Ray's has it
MACHINE_LABEL = "raypar-machine"  # names a node's machine where its host doesn't (pods, simulated clusters)
RAY_DELAY_S = 3.0  # what a gang that has ended gives back, Ray shows by then
TINY_CPU = 0.001  # what a worker reserves in Ray where the broker alone decides about the cores


@dataclass(frozen=True)
class GangPolicy:
    """Resources of gangs."""

    owns_cluster: bool  # this Ray was started for the run, on one machine
    max_parked: int  # idle gangs on a machine; where another is to start, the one that is needed last is closed
    fork_addresses: Mapping[str, str] = field(default_factory=dict)  # of the driver's fork servers, by revision
    cores: Sequence[Core] | None = None  # that trials may use; None: all of each machine


@dataclass(eq=False)
class Gang(GangState):
    """A gang that was started."""

    serves_once: bool = False  # it closes after its first trial
    started_s: float = field(default_factory=time.monotonic)
    workers: dict[int, Greeting] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)  # ranks that are ready for the next turn
    master_address: tuple[str, int] = ("", 0)
    num_turns: int = 0  # trials that it has begun
    turn: Turn | None = None  # the one that it is busy with
    is_closing: bool = False

    @property
    def is_complete(self) -> bool:
        return len(self.workers) == self.placement.num_workers

    @property
    def hosts(self) -> dict[int, str]:
        return {rank: self.workers[rank].host for rank in sorted(self.workers)}

    @property
    def hostnames(self) -> dict[int, str]:
        return {rank: self.workers[rank].hostname for rank in sorted(self.workers)}

    def worker_is_up(self, greeting: Greeting) -> None:
        self.workers[greeting.rank] = greeting
        if self.is_complete:
            self.nodes = Counter(worker.node_id for worker in self.workers.values())

    def worker_is_ready(self, rank: int, master_address: tuple[str, int] | None) -> None:
        """Note that a rank waits for the next turn; the last one makes the gang idle."""
        self.ready.add(rank)
        self.master_address = master_address or self.master_address
        if len(self.ready) == self.placement.num_workers and self.phase is not GangPhase.CLOSING:
            self.phase, self.last_used_s = GangPhase.IDLE, time.monotonic()

    def begin(self, turn: Turn) -> None:
        """Let the idle gang run a trial."""
        assert self.phase is GangPhase.IDLE
        self.phase, self.turn = GangPhase.BUSY, turn
        self.num_turns += 1
        self.ready.clear()
        self.is_closing = self.is_closing or self.serves_once

    def end_turn(self) -> None:
        self.turn = None
        self.phase = GangPhase.CLOSING if self.is_closing else GangPhase.RETURNING

    def close(self) -> None:
        """Let its workers leave, after the trial that it is busy with."""
        self.is_closing = True
        if self.phase is not GangPhase.BUSY:
            self.phase = GangPhase.CLOSING


class GangPool:
    """Starts gangs and closes them, and leases cores to their trials. Lives on the broker's event loop."""

    def __init__(self, settings: RunSettings, policy: GangPolicy) -> None:
        self.gangs: dict[str, Gang] = {}
        self._settings, self._policy = settings, policy
        self._loop = asyncio.get_running_loop()
        self._broker = ray.get_runtime_context().current_actor
        self._numbers = itertools.count(1)
        self._cores = CoreLeases()
        self._agents: dict[tuple[str, str], Any] = {}  # by node and revision
        self._requested: dict[Placement, Any] = {}  # the placement groups that wait for nodes
        self._is_warm = settings.isolation == "warm"
        self._is_exclusive = policy.owns_cluster or settings.exclusive
        self.nodes = alive_nodes()
        # Also where all its nodes are there now: it replaces those that are lost.
        self.may_grow = not policy.owns_cluster and any(each.resources and each.max_count for each in node_types())
        if self._is_warm and not policy.fork_addresses:
            for node in self.nodes:  # before the first gang asks for them
                for revision in settings.revisions or (settings.revision(),):
                    self._agent(node.id, revision)

    def refresh(self) -> bool:
        """Look up the nodes; return whether they have changed. (Nobody adds nodes to a Ray of our own.)"""
        if self._policy.owns_cluster:
            return False
        before, self.nodes = self.nodes, alive_nodes()
        return {node.id for node in before} != {node.id for node in self.nodes}

    def give_up_lost(self) -> None:
        """Close the gangs that are starting on a node that was lost; Ray would wait a minute for it.

        What waits for them can have other gangs meanwhile. One that Ray has placed elsewhere leaves once it is up.
        """
        alive = {node.id for node in self.nodes}
        for gang in self.gangs.values():
            if gang.phase is GangPhase.STARTING and not alive.issuperset(gang.nodes):
                gang.close()
                _free_place(gang)

    @property
    def is_short_of_memory(self) -> bool:
        memory = psutil.virtual_memory()
        return bool(memory.available < MIN_FREE_MEMORY * memory.total)

    def reserved(self, placement: Placement) -> dict[str, float]:
        """Return what a worker of a gang reserves in Ray: what it needs, or a sliver where leases keep trials apart."""
        gpu = {"GPU": 1.0} if placement.device == "cuda" else {}
        return {"CPU": TINY_CPU if self._is_exclusive else float(placement.cpus_per_worker), **gpu}

    def request_nodes(self, placements: Collection[Placement]) -> list[Placement]:
        """Let the autoscaler see what gangs of these need, as placement groups that wait; return the new ones."""
        for placement in [p for p in self._requested if p not in placements]:
            ray.util.remove_placement_group(self._requested.pop(placement))  # its nodes are there: they are for gangs
        new = [placement for placement in placements if placement not in self._requested]
        for placement in new:
            bundles, strategy = [needed(placement)] * placement.num_workers, _strategy(placement)
            labels = _labels(placement)
            self._requested[placement] = ray.util.placement_group(bundles, strategy, bundle_label_selector=labels)
        return new

    def _selection(self, placement: Placement, nodes: NodeAssignment) -> tuple[str, list[dict[str, str]]]:
        """Return Ray's strategy and the labels of each worker's node; Ray chooses where others have taken the nodes."""
        if len(self.nodes) > 1 and (self._is_exclusive or self._are_free(placement, nodes)):
            return "PACK", [{NODE_ID_LABEL: node_id} for node_id, count in nodes.items() for _ in range(count)]
        return _strategy(placement) if len(self.nodes) > 1 else "PACK", _labels(placement) or []

    def _are_free(self, placement: Placement, nodes: NodeAssignment) -> bool:
        """Return whether the nodes have in Ray what the gang reserves; wait a little, since Ray shows it late."""
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

    def start(
        self, placement: Placement, nodes: NodeAssignment, on_end: Callable[[Gang, BaseException | None], object]
    ) -> Gang:
        """Start a gang on these nodes, in a thread of its own; `on_end` gets it, and why it was lost, after its end."""
        gang = Gang(f"{next(self._numbers)}", placement, GangPhase.STARTING, nodes, serves_once=not self._is_warm)
        self.gangs[gang.id] = gang
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
                )
            except BaseException as e:
                error = e
            self._loop.call_soon_threadsafe(self._ended, gang, error, on_end)

        threading.Thread(target=run, daemon=True, name=f"gang-{gang.id}").start()
        return gang

    def close(self) -> None:
        """Close all gangs."""
        for gang in self.gangs.values():
            gang.close()

    async def fork_address(self, gang_id: str, greeting: Greeting) -> str:
        """Return the address of the fork server of a worker's node; empty where ranks are fresh interpreters."""
        if not self._is_warm:
            return ""
        revision = self._settings.revision(self.gangs[gang_id].placement.revision)
        address = self._policy.fork_addresses.get(revision.label, "")
        if greeting.host == host_id() and answers(address):
            return address
        return str(await self._agent(greeting.node_id, revision).address.remote())

    def greet(self, gang_id: str, greeting: Greeting) -> Gang:
        """Take in a worker that is up, with the cores of its machine."""
        gang = self.gangs[gang_id]
        node = next((node for node in self.nodes if node.id == greeting.node_id), None)
        if node is not None:
            name = node.labels.get(MACHINE_LABEL) or greeting.hostname
            greeting = replace(greeting, host=node.machine, hostname=name)
        self._cores.add_host(greeting.host, greeting.cores if self._policy.cores is None else self._policy.cores)
        gang.worker_is_up(greeting)
        return gang

    def refusal(self, gang: Gang, spec: TrialSpec) -> str | None:
        """Return why the trial can never have the cores that it names where the gang is; None if it can."""
        return self._cores.refusal(gang.hosts, spec.config.get("cpu_affinity"))

    def lease(self, gang: Gang, spec: TrialSpec) -> dict[int, tuple[int, ...]] | None:
        """Lease cores to every rank of the gang; None where they are not free now."""
        num_cores, near = gang.placement.cpus_per_worker, {rank: each.near for rank, each in gang.workers.items()}
        return self._cores.lease(gang.hosts, num_cores, spec.config.get("cpu_affinity"), near)

    def to_lock(self, gang: Gang, cores: Mapping[int, tuple[int, ...]] | None) -> dict[int, tuple[int, ...]]:
        """Return the cores that each rank's worker locks for a trial: the first rank on a machine locks for all.

        The driver itself locks those of its own machine. Labelled machines (pods) don't share the numbers of their
        cores.

        Args:
            cores: of the trial's ranks; None: the trial has its machines to itself.
        """
        labelled = {node.machine for node in self.nodes if MACHINE_LABEL in node.labels}
        to_lock: dict[int, tuple[int, ...]] = {}
        first_rank: dict[str, int] = {}
        for rank, host in gang.hosts.items():
            if self._policy.owns_cluster or host in labelled:
                continue
            first = first_rank.setdefault(host, rank)
            if cores is None:
                to_lock[first] = tuple(core.number for core in gang.workers[first].cores)
            else:
                to_lock[first] = (*to_lock.get(first, ()), *cores.get(rank, ()))
        return to_lock

    def release(self, gang: Gang) -> None:
        """Take back the cores of the gang's trial, which is over."""
        if gang.turn is not None:
            self._cores.release(gang.hosts, gang.turn.cores)
            gang.end_turn()

    def _ended(
        self, gang: Gang, error: BaseException | None, on_end: Callable[[Gang, BaseException | None], object]
    ) -> None:
        del self.gangs[gang.id]
        if not gang.is_closing:
            # Train's own cleaner needs the dashboard; without it the group of a lost gang would hold its resources.
            _free_place(gang)
        on_end(gang, error)

    def _agent(self, node_id: str, revision: Revision) -> Any:
        """The actor that owns the node's fork server of a revision, started where there is none yet."""
        if (node_id, revision.label) not in self._agents:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            where = NodeAffinitySchedulingStrategy(node_id, soft=False)
            agent = ray.remote(num_cpus=0)(ForkAgent).options(scheduling_strategy=where)
            self._agents[node_id, revision.label] = agent.remote(revision)
        return self._agents[node_id, revision.label]


def _free_place(gang: Gang) -> None:
    """Give what a gang's workers reserve back to Ray, and end those that still are there."""
    group = next((w.placement_group for w in gang.workers.values() if w.placement_group), None)
    if group is not None:
        ray.util.remove_placement_group(group)


def _strategy(placement: Placement) -> str:
    """Return Ray's name for it; it has none for several workers on each of some nodes."""
    if isinstance(nodes := placement.nodes, int):
        return "STRICT_PACK" if nodes == 1 else "STRICT_SPREAD" if nodes == placement.num_workers else "SPREAD"
    return str(nodes).upper()


def _labels(placement: Placement) -> list[dict[str, str]] | None:
    """Return the labels that each worker's node has to have; None: any."""
    label = placement.node_label
    return [dict([node_label_of(label)])] * placement.num_workers if label else None


def alive_nodes() -> tuple[Node, ...]:
    """Return Ray's nodes that are up: those of one host name and address are on one machine."""
    return tuple(
        Node(
            node["NodeID"],
            node["Labels"].get(MACHINE_LABEL) or f"{node['NodeManagerHostname']}/{node['NodeManagerAddress']}",
            node["Resources"],
            node["Labels"],
        )
        for node in ray.nodes()
        if node["Alive"]
    )
