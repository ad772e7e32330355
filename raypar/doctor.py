"""Examination of what raypar needs on this machine, with a fix for each problem."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from raypar import units
from raypar.errors import ClusterError, DataError, StoreError
from raypar.masking import masked
from raypar.provenance import cpu_model, gpu_model, versions
from raypar.run.cluster import joined_cluster, this_machine, versions_of_nodes
from raypar.run.private_ray import OBJECT_STORE_BYTES, private_ray
from raypar.track.journal import journal_paths, read_ack, target
from raypar.track.server import FIRST_PORT, free_port
from raypar.track.store import Store
from raypar.train.affinity import CAN_PIN, allowed_cores, host_cores, pin
from raypar.workloads.datasets import IMAGE_SETS, data_dir, ensure_files, ensure_image_set, named_dir
from raypar.workloads.gpt2_code import MBPP
from raypar.workloads.tweets import TWEETS


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `mend` says what to do where it is amiss."""

    what: str
    found: str
    is_well: bool = True
    mend: str = ""


def well_or(what: str, found: str, *, is_well: bool, mend: str) -> Finding:
    """A finding whose way out is told only where it is needed."""
    return Finding(what, found, is_well, "" if is_well else mend)


OLDEST_PYTHON = (3, 11)
DISTRIBUTION = "raypar"
TORCH = """
import json, torch, torchvision
print(json.dumps([torch.__version__, torchvision.__version__, torch.cuda.device_count(), torch.version.cuda]))
"""


def python() -> Finding:
    told = ", ".join(f"{name} {version}" for name, version in versions().items())
    oldest = ".".join(map(str, OLDEST_PYTHON))
    return well_or(
        "versions",
        told,
        is_well=sys.version_info >= OLDEST_PYTHON,
        mend=f"make an environment of Python {oldest} or later",
    )


def versions_in_range() -> Iterator[Finding]:
    """The packages that are absent or of another version than raypar asks for; one finding where there is none."""
    amiss = list(out_of_range(metadata.requires(DISTRIBUTION) or ()))
    if not amiss:
        yield Finding("packages", "all there, in the versions asked for")
        return
    for requirement, installed in amiss:
        yield Finding(
            "packages",
            f"{requirement.name} {installed or 'is not installed'}; asked for is {requirement.specifier or 'any'}",
            is_well=False,
            mend=f"pip install '{requirement.name}{_extras(requirement)}{requirement.specifier}'",
        )


def out_of_range(requirements: Iterable[str]) -> Iterator[tuple[Requirement, str | None]]:
    """Which of the requirements this environment does not meet, and what it has instead. Those of extras count only
    where the package is there."""
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        is_extra = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            if not is_extra:
                yield requirement, None
            continue
        if not requirement.specifier.contains(Version(installed), prereleases=True):
            yield requirement, installed


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


@dataclass(frozen=True)
class TorchFound:
    """How importing torch went; `num_gpus` is None where it can't be imported."""

    finding: Finding
    num_gpus: int | None


def torch_imports() -> TorchFound:
    """In a process of its own: a broken torch may end the interpreter."""
    done = subprocess.run([sys.executable, "-c", TORCH], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        torch, torchvision, num_gpus, cuda = json.loads(done.stdout.splitlines()[-1])
        built = f"for CUDA {cuda}" if cuda else "without CUDA"
        return TorchFound(Finding("torch and torchvision", f"import ({torch} {built}, {torchvision})"), num_gpus)
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    mend = "install both from the same index, in one command"
    if importlib.util.find_spec("torch") is None:
        last, mend = "not here: reports and `--address http://…` work, trials don't", "pip install 'raypar[train]'"
    return TorchFound(Finding("torch and torchvision", last, False, mend), None)


GANG_BYTES = 2 * 1024**3  # what a gang of two workers and Ray's own processes take
MIN_OPEN_FILES = 4096  # Ray's own advice
MAX_OTHER_LOAD = 0.1  # of the cores
LOAD_WINDOW_S = 0.5
CGROUPS = Path("/sys/fs/cgroup")
SHARED_MEMORY = Path("/dev/shm")


def cores() -> Finding:
    there = host_cores()
    physical = len({(core.package, core.physical) for core in there})
    told = f"{len(there)} ({cpu_model()})"
    if physical < len(there):
        told += f"; these are hardware threads of {physical} cores: two workers on one core share it"
    return Finding("cores", told)


def cpu_quota(folder: Path = CGROUPS) -> Iterator[Finding]:
    """Told only where a container may use less time than its cores have: its trials are stopped again and again."""
    try:  # the second version of control groups: "max 100000", or microseconds of a period
        quota, period = (folder / "cpu.max").read_text().split()
        allowed = int(quota) / int(period)
    except (OSError, ValueError):
        return
    if allowed < (count := len(allowed_cores())):
        yield Finding(
            "CPU quota",
            f"the time of {allowed:g} cores, of {count}",
            is_well=False,
            mend=f"give the container whole cores (docker run --cpuset-cpus 0-{max(0, int(allowed) - 1)}): past a "
            "quota the kernel stops trials until its next period",
        )


def pinning() -> Finding:
    mend = "nothing to be done: trials may disturb each other, and the report says how far they did"
    if not CAN_PIN:
        return Finding("pinning", "this system can't bind processes to cores", is_well=True, mend=mend)
    before = os.sched_getaffinity(0)
    try:
        bound = pin(allowed_cores()[:1])
    except OSError as error:
        return Finding("pinning", f"processes can't be bound to cores: {error.strerror}", is_well=False, mend=mend)
    finally:
        pin(before)
    return Finding("pinning", "processes can be bound to cores" if bound else "not possible here")


def other_load() -> Finding:
    """How busy others keep the machine right now."""
    busy = psutil.cpu_percent(interval=LOAD_WINDOW_S) / 100
    return well_or(
        "other load",
        f"{units.percent(busy)} of the cores are busy right now",
        is_well=busy <= MAX_OTHER_LOAD,
        mend="end what else runs before you time trials",
    )


def memory() -> Finding:
    free = psutil.virtual_memory().available
    return well_or(
        "memory",
        f"{units.size(free)} to be had",
        is_well=free >= GANG_BYTES,
        mend=f"free some: a gang of two workers takes about {units.size(GANG_BYTES)}",
    )


def shared_memory(folder: Path = SHARED_MEMORY) -> Iterator[Finding]:
    """Ray keeps its objects there; loader processes hand over batches through it."""
    if not folder.is_dir():  # macOS
        return
    free = shutil.disk_usage(folder).free
    yield well_or(
        "shared memory",
        f"{units.size(free)} free in {folder}",
        is_well=free >= OBJECT_STORE_BYTES,
        mend=f"give it {units.size(2 * OBJECT_STORE_BYTES)} or more (docker run --shm-size=1g)",
    )


def open_files() -> Finding:
    if sys.platform == "win32":
        return Finding("open files", "no limit is known here")
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    can_raise = hard == resource.RLIM_INFINITY or hard >= MIN_OPEN_FILES
    return well_or(
        "open files",
        "any number" if unlimited else f"{units.count(soft)} a process",
        # Ray raises its own soft limit as far as the hard one lets it.
        is_well=unlimited or soft >= MIN_OPEN_FILES or can_raise,
        mend=f"ulimit -n {MIN_OPEN_FILES}; Ray opens many connections",
    )


def num_gpus(folder: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """As the driver counts them."""
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def gpus(num_seen_by_torch: int | None) -> Finding:
    """The driver's GPUs against those that torch can use (None: torch can't be asked)."""
    model, there = gpu_model(), num_gpus()
    if not there and not num_seen_by_torch:
        return Finding("GPU", "none")
    if num_seen_by_torch is None:
        return Finding("GPU", f"{there} × {model}; torch can't say whether it sees them")
    if num_seen_by_torch:
        return Finding("GPU", f"{num_seen_by_torch} × {model or 'a GPU'}, and torch uses them")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    mend = "unset CUDA_VISIBLE_DEVICES" if hidden else "install torch for CUDA, for a version that this driver supports"
    return Finding("GPU", f"{there} × {model}, and torch sees none", is_well=False, mend=mend)


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
        for path in journal_paths(project_dir)
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
