"""The nodes that trials run on, and what is free on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raypar.run.capacity import eligible, needed, shares
from raypar.study.trial import Placement

On = Mapping[str, int]  # how many workers are on which node, by its id


@dataclass(frozen=True)
class Node:
    """A Ray node: what it has (``{"CPU": 8, "GPU": 1}``), and the machine that it is on."""

    id: str
    machine: str
    has: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


def num_machines(nodes: Sequence[Node]) -> int:
    """Machines that can run something."""
    return len({node.machine for node in nodes if node.has.get("CPU", 0) >= 1})


class Room:
    """What is free on the nodes for trials."""

    def __init__(self, nodes: Sequence[Node], alone: bool) -> None:
        self._nodes, self._alone = nodes, alone
        self._left = {node.id: dict(node.has) for node in nodes}
        self._machine = {node.id: node.machine for node in nodes}
        self._taken: set[str] = set()

    def take(self, placement: Placement, on: On) -> None:
        for node_id, count in on.items():
            if node_id in self._left:  # otherwise it is gone
                self._taken.add(self._machine[node_id])
                for kind, amount in needed(placement).items():
                    self._left[node_id][kind] = self._left[node_id].get(kind, 0) - amount * count

    def has(self, placement: Placement, on: On) -> bool:
        return bool(on) and all(
            node_id in self._left
            and all(self._free(node_id).get(kind, 0) >= amount * count for kind, amount in needed(placement).items())
            for node_id, count in on.items()
        )

    def find(self, placement: Placement) -> On | None:
        """Nodes for a new gang, None where there are none now.

        A trial that is to be alone gets as many nodes as it would have on the empty cluster: what "pack" and "spread"
        mean must not depend on who is there already. Of the nodes that will do, the smallest, so that what needs the
        large ones finds them.
        """
        labels = [node.labels for node in self._nodes]
        free = list(eligible(placement, [self._free(node.id) for node in self._nodes], labels))
        found = shares(placement, needed(placement), free)
        if found is None or not self._alone:
            return self._on(found)
        on_empty = shares(placement, needed(placement), eligible(placement, [n.has for n in self._nodes], labels))
        wanted = _num_used(on_empty)
        if _num_used(found) != wanted:
            return None
        for i in sorted(range(len(free)), key=lambda i: -free[i].get("CPU", 0)):
            kept, free[i] = free[i], {}
            fewer = shares(placement, needed(placement), free)
            if fewer is not None and _num_used(fewer) == wanted:
                found = fewer
            else:
                free[i] = kept
        return self._on(found)

    def _free(self, node_id: str) -> Mapping[str, float]:
        return {} if self._alone and self._machine[node_id] in self._taken else self._left[node_id]

    def _on(self, found: Sequence[int] | None) -> On | None:
        if found is None:
            return None
        return {node.id: count for node, count in zip(self._nodes, found, strict=True) if count}


def _num_used(counts: Sequence[int] | None) -> int:
    return sum(1 for count in counts or () if count)
