"""Pool of a run's gangs as its dispatcher sees it: where gangs run, their states, and the cores that they lease.

There are two kinds: processes of this machine (`raypar.run.local`), and gangs in Ray (`raypar.run.gang_pool`).
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import psutil

from raypar.files import make_private_folder
from raypar.run.placement import CoreLeases, Node, NodeAssignment
from raypar.run.ranks import ForkClient, RankProcess, spawn
from raypar.run.scheduler import GangPhase, GangState
from raypar.study.trial import Placement, TrialSpec
from raypar.train.affinity import Core, ProcessTree
from raypar.train.job import RankContext, RunSettings, TrialJob

MIN_FREE_MEMORY = 0.25  # if less of this machine's memory is free, a new gang replaces an idle one
MACHINE_LABEL = "raypar-machine"  # of simulated machines: names one, which shares no cores with others
TINY_CPU = 0.001  # reservation of a worker in Ray if only the broker assigns cores


@dataclass(frozen=True)
class Greeting:
    """A gang's worker and its machine, as the worker describes them to the dispatcher."""

    node_id: str
    host: str  # the machine: nodes of one host, such as two pods, share its cores
    hostname: str
    context: RankContext  # of its ranks, without the parts that depend on the turn
    cores: tuple[Core, ...]  # of the host
    near: frozenset[int] = frozenset()  # numbers of the cores of its GPU's NUMA node; empty: no GPU, or unknown
    placement_group: Any = None


@dataclass(frozen=True)
class Turn:
    """One attempt at a trial by a gang, as the dispatcher gives it to the gang's workers.

    Attributes:
        attempt: number of the attempt, from 1.
        uid: the trial's name in the run.
        cores: cores of each rank; ranks without an entry are not pinned.
        to_lock: cores that a rank's worker locks for the trial. The first rank on a machine locks those of all its
            ranks.
    """

    spec: TrialSpec
    attempt: int
    uid: str
    master_address: tuple[str, int]
    cores: Mapping[int, tuple[int, ...]]
    to_lock: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def of(self, ranks: range) -> Turn:
        """Return the turn with the cores of these ranks only."""
        cores, to_lock = ({rank: of[rank] for rank in ranks if rank in of} for of in (self.cores, self.to_lock))
        return replace(self, cores=cores, to_lock=to_lock)


def start_rank(
    job: TrialJob, turn: Turn, context: RankContext, forks: ForkClient | None, listen: socket.socket
) -> tuple[RankProcess, RankContext]:
    """Start a rank of a turn with its job; return it with its complete context. Raises ForkServerLost.

    Args:
        job: the turn's job on this node.
        context: context of the worker's greeting.
        forks: client of the fork server to use; None: start a fresh interpreter.
        listen: socket of the turn's address, which rank 0 gets.
    """
    context = replace(
        context,
        master_address=turn.master_address,
        requested_at_s=time.monotonic(),
        cores=turn.cores.get(context.rank, ()),
        node_cores=tuple(core for rank in context.node_ranks for core in turn.cores.get(rank, ())),
    )
    log_path, of_first = job.log_path(context.rank), None if context.rank else listen
    make_private_folder(log_path.parent)
    process = forks.fork(log_path, of_first) if forks else spawn(log_path, of_first, job.revision)
    with contextlib.suppress(OSError):  # it has ended; its exit code says more
        process.connection.send((job, context))
    return process, context


@dataclass(frozen=True)
class GangPolicy:
    """Resources of gangs."""

    owns_cluster: bool  # this Ray was started for the run, on one machine
    max_parked: int  # maximum number of idle gangs on a machine; to start another, the one needed last is closed
    fork_addresses: Mapping[str, str] = field(default_factory=dict)  # of the driver's fork servers, by revision
    cores: Sequence[Core] | None = None  # cores that trials may use; None: all of each machine
    own_ray: ProcessTree | None = None  # processes that leave these cores before the first trial; None: none
    forks_ahead: bool = True  # see `raypar.run.ranks.ForkClient`
    is_local: bool = False  # a gang is part of the driver's process and serves one trial


@dataclass(eq=False)
class Gang(GangState):
    """A gang that was started."""

    serves_once: bool = False  # it closes after its first trial
    is_local: bool = False  # see `GangPolicy`; results don't name it, and nothing runs beside it
    started_s: float = field(default_factory=time.monotonic)
    workers: dict[int, Greeting] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)  # ranks that are ready for the next turn
    master_address: tuple[str, int] = ("", 0)
    num_turns: int = 0  # number of trials that it has begun
    turn: Turn | None = None  # its running trial
    is_closing: bool = False

    @property
    def is_complete(self) -> bool:
        return len(self.workers) == self.placement.num_workers

    @property
    def node_of(self) -> dict[int, str]:
        return {rank: self.workers[rank].node_id for rank in sorted(self.workers)}

    @property
    def hosts(self) -> dict[int, str]:
        return {rank: self.workers[rank].host for rank in sorted(self.workers)}

    @property
    def hostnames(self) -> dict[int, str]:
        return {rank: self.workers[rank].hostname for rank in sorted(self.workers)}

    def worker_is_up(self, greeting: Greeting) -> None:
        self.workers[greeting.context.rank] = greeting
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
        """Let its workers leave after the current trial."""
        self.is_closing = True
        if self.phase is not GangPhase.BUSY:
            self.phase = GangPhase.CLOSING


# Called after a gang's end, with the reason for its loss in one line, and the whole error.
OnEnd: TypeAlias = Callable[[Gang, str, str], object]


class Pool:
    """Starts gangs and closes them, and leases cores to their trials.

    Attributes:
        may_grow: nodes may be added during the run.
    """

    may_grow = False

    def __init__(self, nodes: Sequence[Node], settings: RunSettings, policy: GangPolicy) -> None:
        self.gangs: dict[str, Gang] = {}
        self.nodes = nodes
        self._settings, self._policy = settings, policy
        self._is_warm = settings.isolation == "warm"
        self._is_exclusive = policy.owns_cluster or settings.exclusive
        self._numbers = itertools.count(1)
        self._cores = CoreLeases()

    def start(self, placement: Placement, nodes: NodeAssignment, on_end: OnEnd) -> Gang:
        """Start a gang on these nodes."""
        is_local = self._policy.is_local
        name, serves_once = str(next(self._numbers)), is_local or not self._is_warm
        self.gangs[name] = gang = Gang(
            name, placement, GangPhase.STARTING, nodes, serves_once=serves_once, is_local=is_local
        )
        return gang

    def close(self) -> None:
        """Close all gangs."""
        for gang in self.gangs.values():
            gang.close()

    def refresh(self) -> bool:
        """Look up the nodes; return whether they have changed."""
        return False

    def departed(self, gang: Gang) -> dict[str, str]:
        """Return how nodes of a lost gang left on purpose, or are leaving: ``{"spot-3": "was preempted"}``."""
        return {}

    def request_nodes(self, placements: Collection[Placement]) -> list[Placement]:
        """Request nodes for gangs of exactly these placements; return the new placements."""
        return []

    @property
    def is_short_of_memory(self) -> bool:
        memory = psutil.virtual_memory()
        return bool(memory.available < MIN_FREE_MEMORY * memory.total)

    def reserved(self, placement: Placement) -> dict[str, float]:
        """Return the resources that a gang's worker reserves in Ray: a sliver of a CPU if leases keep trials apart."""
        gpu = {"GPU": 1.0} if placement.device == "cuda" else {}
        return {"CPU": TINY_CPU if self._is_exclusive else float(placement.cpus_per_worker), **gpu}

    def greet(self, gang_id: str, greeting: Greeting) -> Gang:
        """Register a started worker and the cores of its machine."""
        gang = self.gangs[gang_id]
        node = next((node for node in self.nodes if node.id == greeting.node_id), None)
        if node is not None:
            named = node.labels.get(MACHINE_LABEL)
            greeting = replace(greeting, host=named or greeting.host, hostname=named or greeting.hostname)
        cores = greeting.cores if self._policy.cores is None else self._policy.cores
        self._cores.add_node(greeting.node_id, cores, greeting.host)
        gang.worker_is_up(greeting)
        return gang

    def refusal(self, gang: Gang, spec: TrialSpec) -> str | None:
        """Return why the trial can never get the cores that it lists on the gang's machines; None if it can."""
        return self._cores.refusal(gang.node_of, spec.config.get("cpu_affinity"))

    def lease(self, gang: Gang, spec: TrialSpec) -> dict[int, tuple[int, ...]] | None:
        """Lease cores to every rank of the gang; return None if they are not free now."""
        num_cores, near = gang.placement.cpus_per_worker, {rank: each.near for rank, each in gang.workers.items()}
        return self._cores.lease(gang.node_of, num_cores, spec.config.get("cpu_affinity"), near)

    def to_lock(self, gang: Gang, cores: Mapping[int, tuple[int, ...]] | None) -> dict[int, tuple[int, ...]]:
        """Return the cores that each rank's worker locks for a trial: the first rank on a machine locks for all.

        The driver locks the cores of its own machine. Simulated machines share no cores.

        Args:
            cores: cores of the trial's ranks; None: the trial has its machines to itself.
        """
        # Containers of one machine may have different folders of locks.
        machines = {node.id: node.machine for node in self.nodes}
        labelled = {node.id for node in self.nodes if MACHINE_LABEL in node.labels}
        to_lock: dict[int, tuple[int, ...]] = {}
        first_rank: dict[str, int] = {}
        for rank, node in gang.node_of.items():
            if self._policy.owns_cluster or node in labelled:
                continue
            first = first_rank.setdefault(machines.get(node, node), rank)
            if cores is None:
                to_lock[first] = tuple(core.number for core in gang.workers[first].cores)
            else:
                to_lock[first] = (*to_lock.get(first, ()), *cores.get(rank, ()))
        return to_lock

    def release(self, gang: Gang) -> None:
        """Release the cores of the gang's finished trial."""
        if gang.turn is not None:
            self._cores.release(gang.node_of, gang.turn.cores)
            gang.end_turn()
