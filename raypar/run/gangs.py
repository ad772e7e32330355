"""The gangs of a broker: which there are, which can be started, and who may have which cores."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray

from raypar.run.capacity import CoreLeases, eligible, shares
from raypar.run.gang import ForkAgent, Greeting, Where, host_id, train_gang
from raypar.run.processes import answers
from raypar.run.runner import RunSettings
from raypar.study.nodes import label_of
from raypar.study.trial import Placement, TrialSpec
from raypar.trace import mark

MIN_FREE_MEMORY = 0.25  # with less of this machine's memory left, a new gang takes the place of a parked one
NODE_ID_LABEL = "ray.io/node-id"  # every node of Ray's has it
TINY_CPU = 0.001  # what a worker reserves in Ray where the broker alone decides about the cores


@dataclass(frozen=True)
class GangPolicy:
    """How gangs get their resources.

    Attributes:
        owns_cluster: nobody else uses this Ray: gangs reserve next to no CPU, and the leases keep trials apart.
            Otherwise gangs reserve what they need, and parked ones make room for others.
        max_parked: more idle gangs than this are closed, least recently used first.
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
    started_s: float = field(default_factory=time.monotonic)
    last_used_s: float = field(default_factory=time.monotonic)
    workers: dict[int, Greeting] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)  # ranks that are ready for the next turn
    master_address: tuple[str, int] = ("", 0)
    num_turns: int = 0
    current: Any = None
    is_closing: bool = False

    @property
    def is_idle(self) -> bool:
        return self.current is None and not self.is_closing and len(self.waiting) == self.placement.num_workers

    @property
    def hosts(self) -> dict[int, str]:
        return {rank: self.workers[rank].host for rank in sorted(self.workers)}


class GangPool:
    """Starts gangs, parks them, closes them, and leases cores to their trials. Lives on the broker's event loop."""

    def __init__(self, settings: RunSettings, policy: GangPolicy, on_end: Callable[[Gang, str], Any]) -> None:
        self.gangs: dict[str, Gang] = {}
        self._settings, self._policy, self._on_end = settings, policy, on_end
        self._loop = asyncio.get_running_loop()
        self._broker = ray.get_runtime_context().current_actor
        self._numbers = itertools.count(1)
        self._cores = CoreLeases()
        self._agents: dict[str, Any] = {}
        self._is_warm = settings.isolation == "warm"
        if self._is_warm and not policy.fork_address:
            for node in alive_nodes():  # before the first gang asks for them
                self._agent(node["NodeID"])

    def idle_for(self, placement: Placement) -> Gang | None:
        return next((g for g in self.gangs.values() if g.is_idle and g.placement == placement), None)

    def num_coming(self, placement: Placement) -> int:
        """Gangs of the placement that are starting or busy: each will take a trial that waits."""
        return sum(g.placement == placement and not g.is_idle and not g.is_closing for g in self.gangs.values())

    def make_room(self, placement: Placement, wanted: set[Placement]) -> bool:
        """Whether a gang can be started now; where not yet, closes parked gangs that nobody in `wanted` waits for."""
        idle = sorted((g for g in self.gangs.values() if g.is_idle), key=lambda g: g.last_used_s)
        spare = [g for g in idle if g.placement not in wanted]
        memory = psutil.virtual_memory()
        is_short = memory.available < MIN_FREE_MEMORY * memory.total
        if spare and (len(idle) >= self._policy.max_parked or is_short):
            spare.pop(0).is_closing = True
        nodes = alive_nodes()
        if self._shares(placement, nodes, self._free(nodes)) is None:
            for gang in spare:
                gang.is_closing = True
            return False
        return True

    def _free(self, nodes: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
        """What the gangs have left of each node; for one that is on its way, of the nodes that it may come to."""
        free = {node["NodeID"]: dict(node["Resources"]) for node in nodes}

        def take(node_id: str, placement: Placement, num_workers: int) -> None:
            for kind, amount in self._reserved(placement).items() if node_id in free else ():
                free[node_id][kind] = free[node_id].get(kind, 0) - amount * num_workers

        for gang in self.gangs.values():
            for worker in gang.workers.values():
                take(worker.node_id, gang.placement, 1)
        for gang in self.gangs.values():
            if not gang.workers:
                coming = self._shares(gang.placement, nodes, list(free.values())) or ()
                for node_id, num_workers in zip(list(free), coming, strict=False):
                    take(node_id, gang.placement, num_workers)
        return list(free.values())

    def _shares(
        self, placement: Placement, nodes: Sequence[Mapping[str, Any]], free: Sequence[Mapping[str, float]]
    ) -> tuple[int, ...] | None:
        """How many workers of a gang each node would take; None: there is no room for it now."""
        of_label = eligible(placement, free, [node["Labels"] for node in nodes])
        return shares(placement, self._reserved(placement), of_label)

    def _where(self, placement: Placement) -> Where:
        """For Ray: a strategy of its own where it has one, else the nodes that have most room."""
        label = dict([label_of(placement.node_label)]) if placement.node_label else {}
        of_each = (label,) * placement.num_workers if label else ()
        if not isinstance(placement.nodes, int):
            return Where(str(placement.nodes).upper(), of_each)
        if placement.nodes in (1, placement.num_workers):
            return Where("STRICT_PACK" if placement.nodes == 1 else "STRICT_SPREAD", of_each)
        nodes = alive_nodes()
        taken = self._shares(placement, nodes, self._free(nodes)) or ()
        chosen = [node["NodeID"] for node, count in zip(nodes, taken, strict=False) for _ in range(count)]
        return Where("PACK", tuple({NODE_ID_LABEL: node_id} for node_id in chosen) or of_each)

    def start(self, placement: Placement) -> Gang:
        """Start a gang in a thread of its own; its workers will say hello."""
        where = self._where(placement)
        gang = Gang(f"{next(self._numbers)}", placement)
        self.gangs[gang.id] = gang
        mark("broker: gang starts")

        def run() -> None:
            error = "it ended"
            try:
                train_gang(
                    self._broker,
                    gang.id,
                    placement,
                    self._reserved(placement),
                    where,
                    str(Path(self._settings.log_dir) / "gangs"),
                    fresh=not self._is_warm,
                )
            except BaseException as e:
                error = f"{type(e).__name__}: {e}"
            asyncio.run_coroutine_threadsafe(self._ended(gang, error), self._loop)

        threading.Thread(target=run, daemon=True, name=f"gang-{gang.id}").start()
        return gang

    async def greet(self, gang: Gang, rank: int, greeting: Greeting) -> str:
        """A worker is up. Returns its node's fork server's address (empty where ranks are fresh interpreters)."""
        if not self._is_warm:
            address = ""
        elif greeting.host == host_id() and answers(self._policy.fork_address):
            address = self._policy.fork_address
        else:
            address = await self._agent(greeting.node_id).address.remote()
        self._cores.add_host(greeting.host, greeting.cores)
        gang.workers[rank] = greeting
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

    def _reserved(self, placement: Placement) -> dict[str, float]:
        """What a worker of a gang reserves in Ray."""
        gpu = {"GPU": 1.0} if placement.device == "cuda" else {}
        return {"CPU": TINY_CPU if self._policy.owns_cluster else float(placement.cpus_per_worker), **gpu}

    def _agent(self, node_id: str) -> Any:
        """The actor that owns the node's fork server, started where there is none yet."""
        if node_id not in self._agents:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            where = NodeAffinitySchedulingStrategy(node_id, soft=False)
            agent = ray.remote(num_cpus=0)(ForkAgent).options(scheduling_strategy=where)
            self._agents[node_id] = agent.remote(self._settings.preload, self._settings.sys_path)
        return self._agents[node_id]


def alive_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def totals_and_labels(nodes: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, float]], list[dict[str, str]]]:
    """What each node has in all, and its labels, as `raypar.run.capacity` takes them."""
    return [dict(node["Resources"]) for node in nodes], [dict(node["Labels"]) for node in nodes]
