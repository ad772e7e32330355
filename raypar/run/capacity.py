"""What fits where: placements on nodes, and trials on cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raypar.study.trial import Placement


def fits(placement: Placement, nodes: Sequence[Mapping[str, float]]) -> bool:
    """Whether a gang of this placement can ever run on nodes with these totals (``{"CPU": 8, "GPU": 1}``).

    Workers are alike, so that filling node after node finds a way if there is one.
    """
    need = _need(placement)
    return sum(min(int(node.get(k, 0) // v) for k, v in need.items()) for node in nodes) >= placement.num_workers


def refusal(placement: Placement, nodes: Sequence[Mapping[str, float]]) -> str | None:
    """Why a gang of this placement can never run on these nodes, with the numbers; None if it can."""
    if fits(placement, nodes):
        return None
    for kind in ("GPU", "CPU"):
        need = placement.num_workers * _need(placement).get(kind, 0)
        total = sum(node.get(kind, 0) for node in nodes)
        if need > total:
            return f"needs {need:g} {kind}{'s' if need > 1 else ''} in one gang, the cluster has {total:g}"
    shape = ", ".join(f"{k} {v:g}" for k, v in _need(placement).items())
    return f"needs {placement.num_workers} workers with {shape} each, and no {placement.num_workers} fit on the nodes"


def _need(placement: Placement) -> dict[str, float]:
    need: dict[str, float] = {"CPU": placement.cpus_per_worker}
    if placement.device == "cuda":
        need["GPU"] = 1
    return need


class CoreLeases:
    """Which cores of which machine are free; no core is leased twice."""

    def __init__(self) -> None:
        self._all: dict[str, tuple[int, ...]] = {}
        self._free: dict[str, list[int]] = {}

    def add_host(self, host: str, cores: Sequence[int]) -> None:
        if host not in self._all:
            self._all[host] = tuple(cores)
            self._free[host] = list(cores)

    def lease(self, hosts: Mapping[int, str], num_cores: int) -> dict[int, tuple[int, ...]] | None:
        """`num_cores` for every rank on its host; None where they are not free now.

        A gang that a machine's cores can never hold (several Ray nodes simulated on one machine) gets none at all
        and runs unpinned, which its results show.
        """
        counts: dict[str, int] = {}
        for host in hosts.values():
            counts[host] = counts.get(host, 0) + num_cores
        if any(count > len(self._all[host]) for host, count in counts.items()):
            return {}
        if any(count > len(self._free[host]) for host, count in counts.items()):
            return None
        return {rank: tuple(self._free[host].pop(0) for _ in range(num_cores)) for rank, host in hosts.items()}

    def release(self, hosts: Mapping[int, str], cores: Mapping[int, Sequence[int]]) -> None:
        for rank, leased in cores.items():
            free = self._free[hosts[rank]]
            free.extend(leased)
            free.sort()
