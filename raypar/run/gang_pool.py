"""The gangs of a broker: which there are, which can be started, and who may have which cores."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private.state import available_resources_per_node

from raypar.run.gang import ForkAgent, Greeting, Where, host_id, train_gang
from raypar.run.placement import CoreLeases, Node, On, needed
from raypar.run.ranks import answers
from raypar.run.scheduler import ROUNDING, Phase, Rules, Standing
from raypar.study.options import node_label_of
from raypar.study.space import Value
from raypar.study.trial import Placement, TrialSpec
from raypar.trace import mark
from raypar.train.job import RunSettings

MIN_FREE_MEMORY = 0.25  # with less of this machine's memory left, a new gang takes the place of a parked one
NODE_ID_LABEL = "ray.io/node-id"  # every node of Ray's has it
MACHINE_LABEL = "raypar-machine"
TOLD_LATE_S = 3.0  # what a gang that has ended gives back, Ray tells by then
TINY_CPU = 0.001  # what a worker reserves in Ray where the broker alone decides about the cores


@dataclass(frozen=True)
class GangPolicy:
    """How gangs get their resources.

    Attributes:
        owns_cluster: this Ray was started for the run, on one machine.
        max_parked: idle gangs on a machine; where another is to start, the one that is needed last makes way.
        fork_address: the fork server of this machine, where the driver has started one.
    """

    owns_cluster: bool
    max_parked: int
    fork_address: str = ""


@dataclass(eq=False)
class Gang:
    """A gang that was started; `num_turns` trials were assigned to it, `current` is the one it is busy with."""

    id: str
    placement: Placement
    on: On
    started_s: float = field(default_factory=time.monotonic)
    last_used_s: float = field(default_factory=time.monotonic)
    workers: dict[int, Greeting] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)  # ranks that are ready for the next turn
    master_address: tuple[str, int] = ("", 0)
    num_turns: int = 0
    current: Any = None
    is_closing: bool = False

    @property
    def phase(self) -> Phase:
        if self.current is not None:
            return Phase.BUSY
        if self.is_closing:
            return Phase.CLOSING
        if len(self.waiting) == self.placement.num_workers:
            return Phase.IDLE
        return Phase.RETURNING if self.num_turns else Phase.STARTING

    @property
    def hosts(self) -> dict[int, str]:
        return {rank: self.workers[rank].host for rank in sorted(self.workers)}


class GangPool:
    """Starts gangs and closes them, and leases cores to their trials. Lives on the broker's event loop."""

    def __init__(self, settings: RunSettings, policy: GangPolicy, on_end: Callable[[Gang, str], Any]) -> None:
        self.gangs: dict[str, Gang] = {}
        self._settings, self._policy, self._on_end = settings, policy, on_end
        self._loop = asyncio.get_running_loop()
        self._broker = ray.get_runtime_context().current_actor
        self._numbers = itertools.count(1)
        self._cores = CoreLeases()
        self._agents: dict[str, Any] = {}
        self._asked_for: dict[Placement, Any] = {}  # the placement groups that say so
        self._is_warm = settings.isolation == "warm"
        self._is_exclusive = policy.owns_cluster or settings.exclusive
        self.nodes = alive_nodes()
        if self._is_warm and not policy.fork_address:
            for known in self.nodes:  # before the first gang asks for them
                self._agent(known.id)

    def look(self) -> bool:
        """See which nodes there are; whether they are others than before. (Nobody adds nodes to a Ray of our own.)"""
        if self._policy.owns_cluster:
            return False
        before, self.nodes = self.nodes, alive_nodes()
        return {node.id for node in before} != {node.id for node in self.nodes}

    def standings(self, ends_in_s: Callable[[Gang], float | None]) -> list[Standing]:
        """How every gang stands, for `raypar.run.scheduler`."""
        return [
            Standing(gang.id, gang.placement, gang.phase, gang.on, gang.last_used_s, ends_in_s(gang))
            for gang in self.gangs.values()
        ]

    @property
    def is_short_of_memory(self) -> bool:
        memory = psutil.virtual_memory()
        return bool(memory.available < MIN_FREE_MEMORY * memory.total)

    def rules(self, max_trials: int | None) -> Rules:
        """For a run with so many trials at a time; None: every trial has its machines to itself."""
        return Rules(max_trials is None, max_trials, self.reserved, self._policy.max_parked)

    def reserved(self, placement: Placement) -> dict[str, float]:
        """What a worker of a gang reserves in Ray: what it needs, so that others' jobs are not in its way, and parked
        gangs make room for others. Where there are no others, the leases alone keep trials apart."""
        gpu = {"GPU": 1.0} if placement.device == "cuda" else {}
        return {"CPU": TINY_CPU if self._is_exclusive else float(placement.cpus_per_worker), **gpu}

    def ask_for_nodes(self, placements: Collection[Placement]) -> list[Placement]:
        """Let the autoscaler see what gangs of these need, and of no others: as placement groups that wait.

        Returns those that it has not been asked for before.
        """
        for placement in [p for p in self._asked_for if p not in placements]:
            ray.util.remove_placement_group(self._asked_for.pop(placement))  # its nodes are there: they are for gangs
        new = [placement for placement in placements if placement not in self._asked_for]
        for placement in new:
            bundles = [needed(placement)] * placement.num_workers
            label = [dict([node_label_of(placement.node_label)])] * len(bundles) if placement.node_label else None
            self._asked_for[placement] = ray.util.placement_group(
                bundles, _strategy(placement.nodes, len(bundles)), bundle_label_selector=label
            )
        return new

    def _where(self, placement: Placement, on: On) -> Where:
        """For Ray: on these nodes. Where there is one alone, it needn't be said; where others than us have taken them,
        Ray knows better than we do."""
        if len(self.nodes) > 1 and (self._is_exclusive or self._are_free(placement, on)):
            of_each = [node_id for node_id, count in on.items() for _ in range(count)]
            return Where("PACK", tuple({NODE_ID_LABEL: node_id} for node_id in of_each))
        label = dict([node_label_of(placement.node_label)]) if placement.node_label else {}
        strategy = _strategy(placement.nodes, placement.num_workers) if len(self.nodes) > 1 else "PACK"
        return Where(strategy, (label,) * placement.num_workers if label else ())

    def _are_free(self, placement: Placement, on: On) -> bool:
        """Whether the nodes have in Ray what the gang reserves; waits a little, since Ray tells it late."""
        until_s = time.monotonic() + TOLD_LATE_S
        while True:
            free = available_resources_per_node()
            if all(
                free.get(node_id, {}).get(kind, 0) >= amount * count - ROUNDING
                for node_id, count in on.items()
                for kind, amount in self.reserved(placement).items()
            ):
                return True
            if time.monotonic() > until_s:
                return False
            time.sleep(0.1)

    def start(self, placement: Placement, on: On) -> Gang:
        """Start a gang on these nodes, in a thread of its own; its workers will say hello."""
        gang = Gang(f"{next(self._numbers)}", placement, on)
        self.gangs[gang.id] = gang
        mark("broker: gang starts")

        def run() -> None:
            error = "it ended"
            try:
                train_gang(
                    self._broker,
                    gang.id,
                    placement,
                    self.reserved(placement),
                    self._where(placement, on),
                    str(Path(self._settings.log_dir) / "gangs"),
                    fresh=not self._is_warm,
                )
            except BaseException as e:
                error = f"{type(e).__name__}: {e}"
            asyncio.run_coroutine_threadsafe(self._ended(gang, error), self._loop)

        threading.Thread(target=run, daemon=True, name=f"gang-{gang.id}").start()
        return gang

    async def greet(self, gang: Gang, greeting: Greeting) -> str:
        """A worker is up. Returns its node's fork server's address (empty where ranks are fresh interpreters)."""
        if not self._is_warm:
            address = ""
        elif greeting.host == host_id() and answers(self._policy.fork_address):
            address = self._policy.fork_address
        else:
            address = await self._agent(greeting.node_id).address.remote()
        node = next((node for node in self.nodes if node.id == greeting.node_id), None)
        if node is not None:
            name = node.labels.get(MACHINE_LABEL) or greeting.hostname
            greeting = replace(greeting, host=node.machine, hostname=name)
        self._cores.add_host(greeting.host, greeting.cores)
        gang.workers[greeting.rank] = greeting
        if len(gang.workers) == gang.placement.num_workers:
            gang.on = Counter(worker.node_id for worker in gang.workers.values())
        return address

    def ready(self, gang: Gang, rank: int) -> None:
        """A rank is ready for its gang's next turn."""
        gang.waiting.add(rank)
        if len(gang.waiting) == gang.placement.num_workers:
            gang.last_used_s = time.monotonic()
            if not self._is_warm and gang.num_turns:
                gang.is_closing = True

    def refusal(self, gang: Gang, spec: TrialSpec) -> str | None:
        """Why the trial can never have the cores that it names where the gang is; None if it can."""
        return self._cores.refusal(gang.hosts, spec.config.get("cpu_affinity"))

    def lease(self, gang: Gang, spec: TrialSpec) -> dict[int, tuple[int, ...]] | None:
        """Cores for every rank of the gang, each core to one rank at a time; None where they are not free now."""
        return self._cores.lease(gang.hosts, gang.placement.cpus_per_worker, spec.config.get("cpu_affinity"))

    def release(self, gang: Gang, cores: Mapping[int, tuple[int, ...]]) -> None:
        self._cores.release(gang.hosts, cores)
        gang.current = None

    async def _ended(self, gang: Gang, error: str) -> None:
        del self.gangs[gang.id]
        group = next((w.placement_group for w in gang.workers.values() if w.placement_group), None)
        if not gang.is_closing and group is not None:
            # Train's own cleaner needs the dashboard; without it the group of a lost gang would hold its resources.
            ray.util.remove_placement_group(group)
        await self._on_end(gang, error)

    def _agent(self, node_id: str) -> Any:
        """The actor that owns the node's fork server, started where there is none yet."""
        if node_id not in self._agents:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            where = NodeAffinitySchedulingStrategy(node_id, soft=False)
            agent = ray.remote(num_cpus=0)(ForkAgent).options(scheduling_strategy=where)
            self._agents[node_id] = agent.remote(self._settings.preload, self._settings.sys_path)
        return self._agents[node_id]


def _strategy(nodes: Value, num_workers: int) -> str:
    """What Ray calls it. It has no word for some nodes of several workers each."""
    if isinstance(nodes, int):
        return "STRICT_PACK" if nodes == 1 else "STRICT_SPREAD" if nodes == num_workers else "SPREAD"
    return str(nodes).upper()


def alive_nodes() -> tuple[Node, ...]:
    """Ray's nodes that are up.

    Nodes of one machine have its host name and its address. The label ``raypar-machine`` says otherwise: which of them
    are on one machine (pods, say), or, where a cluster is only simulated, which ones are to count as machines.
    """
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
