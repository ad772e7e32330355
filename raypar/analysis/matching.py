"""Which points of two studies do the same work, and in what they differ.

Points are matched by value: what one study sweeps stands in the other's config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from raypar.analysis.question import PointKey, PointSamples, point_key
from raypar.study.space import Value

# How a trial is run, not what it computes: may differ between points that are compared, and is told.
MEANS = (
    *("device", "cpus_per_worker", "cpu_affinity", "nodes", "node_label", "num_threads", "compile", "channels_last"),
    *("loader", "num_loader_workers", "prefetch_factor", "pin_memory"),
    *("bucket_mb", "overlap", "static_graph", "fsdp_reshard"),
    *("num_warmup_steps", "eval_batch_size", "keep_model"),
)


@dataclass(frozen=True)
class Matching:
    """Every point of either study, once: in a pair of (A's, B's), or alone."""

    pairs: tuple[tuple[PointSamples, PointSamples], ...]
    unlike: tuple[tuple[PointSamples, PointSamples], ...]
    only_a: tuple[PointSamples, ...]
    only_b: tuple[PointSamples, ...]


def match(points_a: Sequence[PointSamples], points_b: Sequence[PointSamples], keys: Sequence[str]) -> Matching:
    """The points of A and B that agree.

    They have the same values of all that either study sweeps: what one sweeps stands in the other's config. Those that
    also agree in the rest of what their trials compute are pairs, the others are `unlike`. `MEANS` may differ, and so
    may a hyperparameter that only one of them knows: a newer version has more.

    Args:
        points_a: different points, each with its config.
        points_b: the same.
        keys: all that either study sweeps.
    """
    of_b: dict[PointKey, list[PointSamples]] = {}
    for p in points_b:
        of_b.setdefault(point_key(values_of(p, keys)), []).append(p)
    both = [(p, same.pop(0)) for p in points_a if (same := of_b.get(point_key(values_of(p, keys))))]
    taken = {id(p) for pair in both for p in pair}
    unlike = {id(a) for a, b in both if config_changes(a.config, b.config, is_work)}
    return Matching(
        pairs=tuple(pair for pair in both if id(pair[0]) not in unlike),
        unlike=tuple(pair for pair in both if id(pair[0]) in unlike),
        only_a=tuple(p for p in points_a if id(p) not in taken),
        only_b=tuple(p for p in points_b if id(p) not in taken),
    )


def values_of(samples: PointSamples, keys: Sequence[str]) -> dict[str, Value]:
    """The values that a point's trials had of these hyperparameters; without what they did not know."""
    every = {**samples.config, **samples.point}
    return {key: every[key] for key in keys if key in every}


def config_changes(
    first: Mapping[str, Value], second: Mapping[str, Value], is_meant: Callable[[str], bool]
) -> dict[str, tuple[Value, Value]]:
    """What both configs have and differ in, as (A's, B's)."""
    return {
        key: (value, second[key])
        for key, value in first.items()
        if key in second and is_meant(key) and point_key({key: value}) != point_key({key: second[key]})
    }


def is_work(key: str) -> bool:
    return key not in MEANS


def is_means(key: str) -> bool:
    return key in MEANS
