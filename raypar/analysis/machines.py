"""Machines that a study's trials ran on, by kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from raypar.study.trial import TrialResult


@dataclass(frozen=True)
class MachineKind:
    """Machines of one kind.

    Attributes:
        cpu_model: empty: unknown.
        num_cores: cores of a machine; 0: unknown.
        gpus: names of their GPUs that trials used.
        nodes: host names.
        num_trials: trials with a worker on one of them.
    """

    cpu_model: str
    num_cores: int
    gpus: tuple[str, ...]
    nodes: tuple[str, ...]
    num_trials: int


def machine_kinds(results: Iterable[TrialResult]) -> tuple[MachineKind, ...]:
    """Return the kinds of machines that ran these trials, the one with most trials first."""
    trials_of: defaultdict[str, set[str]] = defaultdict(set)
    cpus: dict[str, tuple[str, int]] = {}
    gpus: defaultdict[str, set[str]] = defaultdict(set)
    for result in results:
        nodes, ranks = result.conditions.node, result.conditions.ranks
        # If some ranks were lost, it is unknown which node each of the others was on.
        for node, rank in zip(nodes, ranks, strict=True) if len(nodes) == len(ranks) else ():
            trials_of[node].add(result.spec.identity)
            cpus[node] = rank.cpu_model or "", rank.num_node_cores or 0
            if result.spec.placement.device == "cuda" and rank.device_name:
                gpus[node].add(rank.device_name)
    alike: defaultdict[tuple[str, int, tuple[str, ...]], list[str]] = defaultdict(list)
    for node in sorted(cpus):
        alike[*cpus[node], tuple(sorted(gpus[node]))].append(node)
    kinds = [
        MachineKind(*kind, tuple(names), len(set[str]().union(*(trials_of[name] for name in names))))
        for kind, names in alike.items()
    ]
    return tuple(sorted(kinds, key=lambda kind: -kind.num_trials))
