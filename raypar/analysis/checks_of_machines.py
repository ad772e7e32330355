"""Checks of what trials ran on: cores, threads, and whether it was the same for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raypar import units
from raypar.analysis.checks_kinds import Check, Evidence, Finding, named
from raypar.study.trial import TrialResult


def mixed_hardware(evidence: Evidence) -> Iterator[Finding]:
    """Trials on one kind of device that met different models of it, or that each ran on one node, but on unlike ones.

    Nodes are alike that have CPUs of one model and as many cores; what isn't known of a node is not taken to be alike.
    Trials that spread over nodes are not compared by node: that is what was asked.
    """
    by_device: dict[Any, list[TrialResult]] = {}
    for result in evidence.finished:
        by_device.setdefault(result.spec.config.get("device"), []).append(result)
    for results in by_device.values():
        for key, what in (("device_name", "devices"), ("cpu_model", "CPU models")):
            models = [names for r in results if (names := _names(r, key))]
            if kinds := _several({name for names in models for name in names}):
                yield Finding(Check.MIXED_HARDWARE, f"Trials ran on different {what}: {named(kinds)}.")
        if told := _unlike_nodes(results):
            yield Finding(Check.MIXED_HARDWARE, f"Trials ran on {told}.")


def resumed(evidence: Evidence) -> Iterator[Finding]:
    """Trials whose times are of more than one attempt."""
    finished = evidence.finished
    labels = [r.spec.label for r in finished if r.environment.get("resumed_at_epoch")]
    if labels:
        yield Finding(
            Check.RESUMED,
            f"{len(labels)} of {units.counted(len(finished), 'trial')} went on from a checkpoint after a failure: "
            f"{named(labels)}.",
        )


def shared_cores(evidence: Evidence) -> Iterator[Finding]:
    finished = evidence.finished
    unpinned = sum(_is_unpinned(r.environment.get("cores")) for r in finished)
    if unpinned:
        yield Finding(
            Check.SHARED_CORES, f"{unpinned} of {units.counted(len(finished), 'trial')} had no cores of their own."
        )


def side_by_side(evidence: Evidence) -> Iterator[Finding]:
    """Trials that shared with others of the study what their times depend on: a machine, or, between machines, the
    network."""
    finished = evidence.finished
    sharing = [count for r in finished if (count := _count(r, "num_sharing"))]
    if sharing:
        yield Finding(
            Check.SIDE_BY_SIDE,
            f"{len(sharing)} of {units.counted(len(finished), 'trial')} shared a machine, its memory and clock with "
            f"others of the study (up to {max(sharing)} at a time).",
        )
    spread = [r for r in finished if len(_names(r, "node")) > 1]
    beside = [count for r in spread if (count := _count(r, "num_beside"))]
    if beside:
        yield Finding(
            Check.SIDE_BY_SIDE,
            f"{len(beside)} of {units.counted(len(spread), 'trial')} over several machines shared the network with "
            f"others of the study (up to {max(beside)} at a time).",
        )


def too_many_threads(evidence: Evidence) -> Iterator[Finding]:
    finished = evidence.finished
    crowded = [(t, c) for r in finished for t, c in _threads_on_cores(r.environment) if t > c > 0]
    if crowded:
        threads, cores = max(crowded, key=lambda pair: pair[0] / pair[1])
        yield Finding(
            Check.TOO_MANY_THREADS,
            f"A worker had {units.counted(threads, 'torch thread')} on {units.counted(cores, 'core')}: that can be "
            "many times slower than one thread a core.",
        )


def _count(result: TrialResult, key: str) -> int:
    told = result.environment.get(key)
    return told if isinstance(told, int) else 0


def _names(result: TrialResult, key: str) -> set[str]:
    """What the trial's ranks tell under this key."""
    told = result.environment.get(key)
    return {name for name in told if isinstance(name, str)} if isinstance(told, (list, tuple)) else set()


def _several(names: set[str]) -> list[str]:
    """The names in order where there is more than one, else nothing."""
    return sorted(names) if len(names) > 1 else []


def _unlike_nodes(results: Sequence[TrialResult]) -> str:
    """How the nodes differ that trials had to themselves; empty where they are alike, or differ in the CPU's model
    alone, which is told by itself."""
    models: dict[str, set[str]] = {}
    cores: dict[str, set[int]] = {}
    for result in results:
        nodes = _names(result, "node")
        if len(nodes) == 1:
            (node,) = nodes
            models.setdefault(node, set()).update(_names(result, "cpu_model"))
            counts = result.environment.get("num_node_cores")
            known = counts if isinstance(counts, (list, tuple)) else ()
            cores.setdefault(node, set()).update(count for count in known if isinstance(count, int))
    if len(models) < 2:
        return ""
    if not all(models.values()) or not all(cores.values()):
        return f"different nodes: {named(sorted(models))}"
    if len(set().union(*cores.values())) == 1:
        return ""
    sizes = [f"{node} ({units.counted(max(cores[node]), 'core')})" for node in sorted(cores)]
    return f"nodes of different sizes: {named(sizes)}"


def _is_unpinned(cores: Any) -> bool:
    """Whether any rank's list of cores is empty; unknown counts as no."""
    if not isinstance(cores, Sequence):
        return False
    return len(cores) == 0 or any(isinstance(of_rank, Sequence) and len(of_rank) == 0 for of_rank in cores)


def _threads_on_cores(environment: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Of every rank that tells: its torch threads, and its cores."""
    threads, cores = environment.get("num_threads"), environment.get("cores")
    if isinstance(threads, Sequence) and isinstance(cores, Sequence):
        for count, own in zip(threads, cores, strict=False):
            if isinstance(count, int) and isinstance(own, Sequence):
                yield count, len(own)
