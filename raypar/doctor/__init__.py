"""Looks at what raypar needs on this machine, and says how to mend what is amiss."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from raypar.doctor.finding import Finding
from raypar.doctor.installed import python, torch_imports, versions_in_range
from raypar.doctor.machine import cores, cpu_quota, gpus, memory, open_files, other_load, pinning, shared_memory
from raypar.doctor.services import cluster, data_sets, disk, own_ray, port, store, unsent

__all__ = ["Finding", "examine"]


def examine(project_dir: Path, tracking_uri: str, address: str | None = None) -> Iterator[Finding]:
    """Look at one thing after the other, the slow ones last.

    Starts and stops a private Ray; with an address it looks at the cluster there instead.
    """
    yield python()
    yield from versions_in_range()
    yield cores()
    yield from cpu_quota()
    yield pinning()
    yield other_load()
    yield memory()
    yield from shared_memory()
    yield open_files()
    yield from disk(project_dir)
    yield from data_sets()
    yield store(project_dir, tracking_uri)
    yield from unsent(project_dir)
    yield port(tracking_uri)
    visible = torch_imports()
    yield visible.finding
    yield gpus(visible.num_gpus)
    yield cluster(address) if address else own_ray()
