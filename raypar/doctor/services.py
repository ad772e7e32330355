"""What is around a study: disk, data, the store, a port for its page, and Ray."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from raypar import units
from raypar.doctor.finding import Finding, well_or
from raypar.errors import ClusterError, DataError, StoreError
from raypar.masking import masked
from raypar.provenance import versions
from raypar.run.cluster import joined_cluster, this_machine
from raypar.run.nodes import versions_of_nodes
from raypar.run.private_ray import private_ray
from raypar.track.server import FIRST_PORT, free_port
from raypar.track.spool import read_ack, spools, target
from raypar.track.store import Store
from raypar.workloads.datasets import IMAGE_SETS, data_dir, ensure_image_set, named_dir
from raypar.workloads.files import ensure_files
from raypar.workloads.gpt2_code import MBPP
from raypar.workloads.tweets import TWEETS

MIN_FREE_BYTES = 2 * 1024**3


def disk(project_dir: Path) -> Iterator[Finding]:
    """The project's folder, and the one for temporary files, where Ray has its logs and sockets."""
    temporary = Path(tempfile.gettempdir())
    for what, folder in (("disk", project_dir), ("disk for Ray", temporary)):
        free = shutil.disk_usage(folder).free
        yield well_or(what, f"{units.size(free)} free in {folder}", is_well=free > MIN_FREE_BYTES, mend="free some")
        if folder.stat().st_dev == temporary.stat().st_dev:
            return


def data_sets() -> Iterator[Finding]:
    """Each data set that is there, or should be; one that is downloaded when it is needed is told as that."""
    folder = data_dir()
    absent = []
    for name, place, ensure in _data_sets():
        if not (folder / place).is_dir():
            absent.append(name)
            continue
        try:
            ensure()
            yield Finding("data", f"{name} is there and whole, in {folder}")
        except DataError as error:
            yield Finding("data", error.message, False, error.hint or "")
    if absent:
        what_then = "refused: the folder was named" if named_dir() else "made to download it"
        yield Finding("data", f"not in {folder}: {', '.join(absent)}; a study that needs one is {what_then}")


def _data_sets() -> Iterator[tuple[str, str, Callable[[], Path]]]:
    """Name, folder below that of all data, and what says whether it is whole."""
    for name in IMAGE_SETS:
        yield name, f"{name}/raw", partial(ensure_image_set, name)
    for files in (TWEETS, MBPP):
        yield files.name, files.folder, partial(ensure_files, files)


def store(project_dir: Path, tracking_uri: str) -> Finding:
    try:
        Store(tracking_uri, project_dir).check_writable()
    except StoreError as error:
        return Finding("store", error.message, False, error.hint or "")
    return Finding("store", masked(tracking_uri))


def unsent(project_dir: Path) -> Iterator[Finding]:
    """Results on this disk that their store has not taken yet."""
    waiting = [
        path
        for path in spools(project_dir)
        if (uri := target(path)) is None or path.stat().st_size > read_ack(path, uri)
    ]
    if waiting:
        yield Finding(
            "results",
            f"{units.counted(len(waiting), 'execution')} not wholly in the store; the journal has them",
            is_well=False,
            mend="`raypar sync` sends them (those of a study that runs now are sent by it)",
        )


def port(tracking_uri: str) -> Finding:
    """Whether `raypar ui` finds one."""
    if urlsplit(tracking_uri).scheme in ("http", "https"):
        return Finding("port", "none is needed: the store has a server")
    try:
        free = free_port(FIRST_PORT)
    except StoreError as error:
        return Finding("port", error.message, False, error.hint or "")
    taken = "" if free == FIRST_PORT else f" ({FIRST_PORT} is taken)"
    return Finding("port", f"{free} is free for `raypar ui`{taken}")


def own_ray() -> Finding:
    started_s = time.monotonic()
    try:
        with private_ray(this_machine(), ()):
            took_s = time.monotonic() - started_s
    except ClusterError as error:
        return Finding("Ray", error.message, False, "look into /tmp/ray/session_latest/logs; is /dev/shm large enough?")
    return Finding("Ray", f"starts in {units.seconds(took_s)}")


def cluster(address: str) -> Finding:
    """The cluster that is there: what it has, and whether its nodes have the versions of this machine."""
    try:
        with joined_cluster(address) as joined:
            nodes = versions_of_nodes()
    except ClusterError as error:
        return Finding("cluster", error.message, False, error.hint or "")
    resources = ", ".join(
        f"{sum(node.get(kind, 0) for node in joined.nodes):g} {kind}s"
        for kind in ("CPU", "GPU")
        if _has(joined.nodes, kind)
    )
    told = f"{units.counted(len(joined.nodes), 'node')}{f' with {resources}' if resources else ''} at {address}"
    if joined.may_grow:
        told += ", and an autoscaler that may add more"
    own = versions()
    other = {node: found for node, found in nodes.items() if found != own}
    if not other:
        return Finding("cluster", f"{told}; the versions of this machine on each")
    name, found = next(iter(other.items()))
    differing = [
        f"{key} {found.get(key, 'absent')} there, {own[key]} here" for key in own if found.get(key) != own[key]
    ]
    return Finding(
        "cluster",
        f"{told}; other versions on {units.counted(len(other), 'node')}, such as {name}: {'; '.join(differing)}",
        is_well=False,
        mend="install the same versions everywhere: timings must not mix them",
    )


def _has(nodes: tuple[Mapping[str, float], ...], kind: str) -> bool:
    return any(node.get(kind) for node in nodes)
