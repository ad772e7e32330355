"""Placement of gangs on nodes and of trials on cores."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from raypar.study.options import absent_cores, listed_cores, node_label_of
from raypar.study.space import Value
from raypar.study.trial import Placement
from raypar.train.affinity import Core, cores_near_gpu


def eligible(
    placement: Placement, nodes: Sequence[Mapping[str, float]], labels: Sequence[Mapping[str, str]] | None = None
) -> tuple[Mapping[str, float], ...]:
    """Return the nodes, each without resources if it lacks the placement's label.

    Args:
        nodes: totals of each node, ``{"CPU": 8, "GPU": 1}``.
        labels: labels of each node; None: no node has any.
    """
    if placement.node_label is None:
        return tuple(nodes)
    key, value = node_label_of(placement.node_label)
    labels = labels if labels is not None else [{}] * len(nodes)
    return tuple(node if label.get(key) == value else {} for node, label in zip(nodes, labels, strict=True))


def shares(
    placement: Placement, need: Mapping[str, float], free: Sequence[Mapping[str, float]]
) -> tuple[int, ...] | None:
    """Return how many of the placement's workers each node takes; None: they don't fit.

    Args:
        need: resources of a worker.
        free: free resources of each node, negative where a reservation takes more than is free.
    """
    room = [
        max(0, min((int(node.get(kind, 0) // amount) for kind, amount in need.items() if amount), default=0))
        for node in free
    ]
    order = sorted(range(len(room)), key=lambda i: (-room[i], i))  # workers are alike, so largest first succeeds
    counts, left = [0] * len(room), placement.num_workers
    if isinstance(placement.nodes, int):
        base, more = divmod(left, placement.nodes)
        chosen = order[: placement.nodes]
        for nth, i in enumerate(chosen):
            counts[i] = base + (nth < more)
        fits = base > 0 and len(chosen) == placement.nodes and all(room[i] >= counts[i] for i in chosen)
        return tuple(counts) if fits else None
    if sum(room) < left:
        return None
    while left:
        for i in order:
            taken = min(left, room[i] - counts[i], 1 if placement.nodes == "spread" else left)
            counts[i] += taken
            left -= taken
    return tuple(counts)


def refusal(
    placement: Placement, nodes: Sequence[Mapping[str, float]], labels: Sequence[Mapping[str, str]] | None = None
) -> str | None:
    """Return why a gang of this placement can never run on these nodes; None if it can."""
    need, some = needed(placement), [node for node in eligible(placement, nodes, labels) if node]
    where = f"nodes with {placement.node_label}" if placement.node_label else "cluster"
    if not some and placement.node_label:
        pairs = {f"{k}={v}" for label in labels or () for k, v in label.items() if not k.startswith("ray.io/node-id")}
        return f"no node has the label {placement.node_label}; there are: {', '.join(sorted(pairs)) or 'none'}"
    if shares(placement, need, some) is not None:
        return None
    for kind in ("GPU", "CPU"):
        amount = placement.num_workers * need.get(kind, 0)
        total = sum(node.get(kind, 0) for node in some)
        if amount > total:
            verb = "have" if placement.node_label else "has"
            return f"needs {amount:g} {kind}{'s' if amount > 1 else ''} in one gang, the {where} {verb} {total:g}"
    shape = ", ".join(f"{k} {v:g}" for k, v in need.items())
    workers = f"{placement.num_workers} workers with {shape} each"
    if isinstance(placement.nodes, int):
        able = sum(all(node.get(kind, 0) >= amount for kind, amount in need.items()) for node in some)
        there = where if placement.node_label else "cluster's nodes"
        return f"needs {workers}, evenly on {placement.nodes} nodes; {able} of the {there} can hold one"
    return f"needs {workers}, and no {placement.num_workers} fit on the nodes"


def needed(placement: Placement) -> dict[str, float]:
    """Return the resources that each of its workers takes from a node."""
    return {"CPU": placement.cpus_per_worker, **({"GPU": 1} if placement.device == "cuda" else {})}


def spread_out(free: Sequence[Core], count: int) -> tuple[Core, ...]:
    """Choose cores evenly from all sockets, using second threads only after all physical cores are in use.

    Cores of one socket are adjacent in the result, so that equal parts of it lie close together.
    """
    rest, chosen = set(free), list[Core]()
    of_physical, of_package = Counter[int](), Counter[int]()
    for _ in range(count):
        best = min(rest, key=lambda core: (of_physical[core.physical], of_package[core.package], core.number))
        rest.remove(best)
        chosen.append(best)
        of_physical[best.physical] += 1
        of_package[best.package] += 1
    return tuple(sorted(chosen, key=lambda core: (core.package, core.physical, core.number)))


def close_together(free: Sequence[Core], count: int) -> tuple[Core, ...]:
    """Choose cores of as few sockets as possible, and there of as few physical cores as possible."""
    return tuple(
        core
        for package, num_of_package in _fewest(free, count, lambda core: core.package)
        for physical, num_of_physical in _fewest(package, num_of_package, lambda core: core.physical)
        for core in sorted(physical, key=lambda core: core.number)[:num_of_physical]
    )


def _fewest(free: Sequence[Core], count: int, part: Callable[[Core], int]) -> list[tuple[list[Core], int]]:
    """Return the fewest parts (sockets, physical cores) that hold `count` cores, and how many to take of each."""
    parts = [list(cores) for _, cores in itertools.groupby(sorted(free, key=part), key=part)]
    taken: list[tuple[list[Core], int]] = []
    while count:
        # Take the last cores from the smallest part that has enough, and leave larger parts for others.
        holding = [cores for cores in parts if len(cores) >= count]
        best = min(holding, key=len) if holding else max(parts, key=len)
        taken.append((best, min(count, len(best))))
        count -= taken[-1][1]
        parts.remove(best)
    return taken


def near_first(free: Sequence[Core], near: Mapping[int, Collection[int]], count: int) -> dict[int, tuple[int, ...]]:
    """Choose `count` cores for each rank: first those near its GPU, then any others.

    Args:
        free: at least as many cores as all ranks need.
        near: numbers of the cores near each rank's GPU; empty for a rank without a GPU.
    """
    left = [core.number for core in free]
    chosen: dict[int, tuple[int, ...]] = dict.fromkeys(near, ())
    for only_near in (True, False):  # all ranks get near cores before any rank gets others
        for rank, numbers in chosen.items():
            candidates = [number for number in left if number in near[rank] or not only_near]
            chosen[rank] = (*numbers, *candidates[: count - len(numbers)])
            left = [number for number in left if number not in chosen[rank]]
    return chosen


class CoreLeases:
    """Cores of nodes, each leased to one rank at a time. Nodes on one machine (pods, simulated nodes) share cores."""

    def __init__(self) -> None:
        self._all: dict[str, tuple[Core, ...]] = {}  # by node
        self._machine: dict[str, str] = {}
        self._leased: dict[str, set[int]] = {}  # by machine

    def add_node(self, node: str, cores: Sequence[Core], machine: str = "") -> None:
        """Add a node with the cores that it may use, unless it is there.

        Args:
            machine: on which core numbers mean the same as on other nodes of it; empty: it has no other node.
        """
        if node not in self._all:
            self._all[node] = tuple(sorted(cores, key=lambda core: core.number))
            self._machine[node] = machine or node
            self._leased.setdefault(self._machine[node], set())

    def refusal(self, nodes: Mapping[int, str], affinity: Value) -> str | None:
        """Return why ranks on these nodes can never get the cores that the affinity lists; None if they can."""
        cores = (self._all[node] for node in dict.fromkeys(nodes.values()))
        return next(filter(None, (absent_cores(affinity, [core.number for core in each]) for each in cores)), None)

    def lease(
        self,
        nodes: Mapping[int, str],
        num_cores: int,
        affinity: Value = None,
        near: Mapping[int, Collection[int]] | None = None,
    ) -> dict[int, tuple[int, ...]] | None:
        """Lease cores to every rank on its node; return None if they are not free now.

        Every rank gets `num_cores` cores: the first free ones, preferably near its GPU, or those that the affinity
        "spread" or "compact" selects. If the affinity lists cores, they are divided among the ranks of each node, which
        must have them (see `refusal`). A gang that never fits its machines' cores (several simulated nodes) gets none
        and runs unpinned.

        Args:
            nodes: node of each rank.
            near: numbers of the cores near each rank's GPU.
        """
        machines = {self._machine[node] for node in nodes.values()}
        leased = {machine: set(self._leased[machine]) for machine in machines}
        cores = self._chosen(nodes, num_cores, affinity, near or {}, leased)
        if cores is None:
            is_empty = not any(self._leased[machine] for machine in machines)
            fits = not is_empty and self._chosen(
                nodes, num_cores, affinity, near or {}, {machine: set() for machine in machines}
            )
            return None if fits or listed_cores(affinity) is not None else {}
        self._leased |= leased
        return {rank: cores[rank] for rank in nodes}

    def _chosen(
        self,
        nodes: Mapping[int, str],
        num_cores: int,
        affinity: Value,
        near: Mapping[int, Collection[int]],
        leased: dict[str, set[int]],
    ) -> dict[int, tuple[int, ...]] | None:
        """Return cores for each rank, and add them to those that are leased, by machine; None: too few are free."""
        ranks: dict[str, list[int]] = {}
        for rank, node in nodes.items():
            ranks.setdefault(node, []).append(rank)
        cores: dict[int, tuple[int, ...]] = {}
        for node, local in ranks.items():
            taken = leased[self._machine[node]]
            free = [core for core in self._all[node] if core.number not in taken]
            if affinity is None and len(local) * num_cores <= len(free):
                chosen = near_first(free, {rank: near.get(rank, ()) for rank in local}, num_cores)
            elif (some := _choose(free, len(local) * num_cores, affinity)) is not None:
                bounds = [i * len(some) // len(local) for i in range(len(local) + 1)]
                chosen = {rank: some[a:b] for rank, (a, b) in zip(local, itertools.pairwise(bounds), strict=True)}
            else:
                return None
            cores |= chosen
            taken.update(*chosen.values())
        return cores

    def release(self, nodes: Mapping[int, str], cores: Mapping[int, Sequence[int]]) -> None:
        for rank, leased in cores.items():
            self._leased[self._machine[nodes[rank]]].difference_update(leased)


def cores_of_trials(placed: Collection[tuple[Placement, Value]], machine: Sequence[Core], least: int) -> frozenset[int]:
    """Return the numbers of the cores that trials may lease, each alone on the machine.

    Args:
        placed: placement and affinity of each trial.
        least: number of cores to return at least, if the machine has them.
    """
    numbers, chosen = [core.number for core in machine], set[int]()
    for placement, affinity in placed:
        leases, ranks = CoreLeases(), dict.fromkeys(range(placement.num_workers), "here")
        leases.add_node("here", machine)
        near = {rank: cores_near_gpu(rank) for rank in ranks} if placement.device == "cuda" else {}
        cores = leases.lease(ranks, placement.cpus_per_worker, affinity, near)
        chosen.update(*cores.values() if cores else [numbers])
    others = [number for number in numbers if number not in chosen]
    return frozenset([*chosen, *others[: max(0, least - len(chosen))]])


def _choose(free: Sequence[Core], count: int, affinity: Value) -> tuple[int, ...] | None:
    """Return the numbers of `count` free cores, or of those that the affinity lists; None if they are not free."""
    if (listed := listed_cores(affinity)) is not None:
        return listed if {core.number for core in free}.issuperset(listed) else None
    if count > len(free):
        return None
    choose = {"spread": spread_out, "compact": close_together}.get(str(affinity), lambda free, count: free[:count])
    return tuple(core.number for core in choose(free, count))


NodeAssignment = Mapping[str, int]  # number of workers by node id


@dataclass(frozen=True)
class Node:
    """A Ray node: its resources (``{"CPU": 8, "GPU": 1}``) and its machine."""

    id: str
    machine: str
    has: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


def num_machines(nodes: Sequence[Node]) -> int:
    """Return the number of machines that can run something."""
    return len({node.machine for node in nodes if node.has.get("CPU", 0) >= 1})


class FreeResources:
    """Resources of the nodes that are free for trials.

    Args:
        exclusive: a machine that runs a trial has no free resources.
    """

    def __init__(self, nodes: Sequence[Node], exclusive: bool) -> None:
        self._nodes, self._exclusive = nodes, exclusive
        self._left = {node.id: dict(node.has) for node in nodes}
        self._machine = {node.id: node.machine for node in nodes}
        self._taken: set[str] = set()

    def take(self, placement: Placement, nodes: NodeAssignment) -> None:
        for node_id, count in nodes.items():
            if node_id in self._left:  # otherwise it was lost
                self._taken.add(self._machine[node_id])
                for kind, amount in needed(placement).items():
                    self._left[node_id][kind] = self._left[node_id].get(kind, 0) - amount * count

    def has(self, placement: Placement, nodes: NodeAssignment) -> bool:
        return bool(nodes) and all(
            node_id in self._left
            and all(self._free(node_id).get(kind, 0) >= amount * count for kind, amount in needed(placement).items())
            for node_id, count in nodes.items()
        )

    def find(self, placement: Placement) -> NodeAssignment | None:
        """Return nodes for a new gang; None if there are none now.

        An exclusive trial gets as many nodes as on an empty cluster: the meaning of "pack" and "spread" doesn't depend
        on other trials. The smallest suitable nodes are chosen, which leaves large ones for others.
        """
        labels = [node.labels for node in self._nodes]
        free = list(eligible(placement, [self._free(node.id) for node in self._nodes], labels))
        counts = shares(placement, needed(placement), free)
        if counts is None or not self._exclusive:
            return self._assignment(counts)
        on_empty = shares(placement, needed(placement), eligible(placement, [n.has for n in self._nodes], labels))
        if _num_used(counts) != _num_used(on_empty):
            return None
        return self._assignment(_on_smallest(placement, free, _num_used(on_empty)))

    def _free(self, node_id: str) -> Mapping[str, float]:
        return {} if self._exclusive and self._machine[node_id] in self._taken else self._left[node_id]

    def _assignment(self, counts: Sequence[int] | None) -> NodeAssignment | None:
        if counts is None:
            return None
        return {node.id: count for node, count in zip(self._nodes, counts, strict=True) if count}


def _on_smallest(placement: Placement, free: Sequence[Mapping[str, float]], num_nodes: int) -> tuple[int, ...] | None:
    """Return the shares on the smallest `num_nodes` nodes that suffice (see `shares`)."""
    need, rest = needed(placement), list(free)

    def without(nodes: Sequence[int]) -> tuple[int, ...] | None:
        left_out = set(nodes)
        counts = shares(placement, need, [{} if i in left_out else node for i, node in enumerate(rest)])
        return counts if _num_used(counts) == num_nodes else None

    alike: defaultdict[tuple[tuple[str, float], ...], list[int]] = defaultdict(list)
    for i, node in enumerate(free):
        alike[tuple(sorted(node.items()))].append(i)
    for nodes in sorted(alike.values(), key=lambda nodes: -free[nodes[0]].get("CPU", 0)):
        # What fits without some nodes also fits without fewer, so bisection finds how many can be left out.
        num_out = bisect_left(range(len(nodes)), True, key=lambda last: without(nodes[: last + 1]) is None)
        for i in nodes[:num_out]:
            rest[i] = {}
    return shares(placement, need, rest)


def _num_used(counts: Sequence[int] | None) -> int:
    return sum(1 for count in counts or () if count)
