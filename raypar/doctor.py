"""Checks of everything raypar needs on this machine, each with a fix in case it fails."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import psutil
from packaging.requirements import Requirement
from packaging.version import Version

from raypar import units
from raypar.errors import ClusterError, DataError, RayparError, StoreError
from raypar.gpus import Gpu, NoDriver, all_gpus, nvml, torch_problem, visible_gpus
from raypar.masking import masked
from raypar.observe.quota import cpu_quota
from raypar.provenance import cpu_model, versions
from raypar.reporting.listings import CheckResult
from raypar.run.cluster import joined_cluster, this_machine, versions_of_nodes
from raypar.run.private_ray import OBJECT_STORE_BYTES, private_ray
from raypar.track.journal import journal_paths, read_ack
from raypar.track.store import Store
from raypar.train.affinity import CAN_PIN, allowed_cores, host_cores, pin
from raypar.workloads.datasets import DATA_DIR_VARIABLE, IMAGE_SETS, data_dir, ensure_files, named_dir

DISTRIBUTION = "raypar"
TORCH = """
import json, torch, torchvision, torch.distributed as dist
num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
has_nccl = dist.is_available() and dist.is_nccl_available()
nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else ""
print(json.dumps([torch.__version__, torchvision.__version__, torch.version.cuda, num_gpus, nccl]))
"""
GANG_BYTES = 2 * 1024**3  # taken by a gang of two workers and Ray's own processes
MIN_FREE_BYTES = 2 * 1024**3
MIN_OPEN_FILES = 4096  # Ray's own advice
MAX_OTHER_LOAD = 0.1  # of the cores
LOAD_WINDOW_S = 0.5
SHARED_MEMORY = Path("/dev/shm")


class TorchGpus(NamedTuple):
    """GPUs as torch sees them: their number, and the version of its NCCL (empty: built without)."""

    num_gpus: int
    nccl: str


def failed(name: str, error: RayparError) -> CheckResult:
    return CheckResult(name, error.message, False, error.hint or "")


def examine(project_dir: Path, tracking_uri: str, address: str | None = None) -> Iterator[CheckResult]:
    """Run all checks, the slow ones last.

    Starts and stops a private Ray; with an address it checks the cluster there instead.
    """
    checks: tuple[Callable[[], CheckResult | Iterator[CheckResult]], ...] = (
        installed_versions,
        versions_in_range,
        cores,
        quota_of_cpus,
        pinning,
        other_load,
        memory,
        shared_memory,
        open_files,
        partial(disk, project_dir),
        data_sets,
        partial(store, project_dir, tracking_uri),
        partial(unsent, project_dir),
    )
    for check in checks:
        result = check()
        yield from (result,) if isinstance(result, CheckResult) else result
    torch, torch_gpus = torch_imports()
    yield torch
    yield from gpus(torch_gpus)
    yield cluster(address) if address else own_ray()


def installed_versions() -> CheckResult:
    return CheckResult("versions", ", ".join(f"{name} {version}" for name, version in versions().items()))


def versions_in_range() -> Iterator[CheckResult]:
    """Yield a failed check for each package that is missing or out of range; one passed check if all are fine."""
    unmet = list(unmet_requirements(metadata.requires(DISTRIBUTION) or ()))
    for requirement, installed in unmet:
        name, specifier = requirement.name, requirement.specifier
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        detail = f"{name} {installed or 'is not installed'}; required: {specifier or 'any version'}"
        yield CheckResult("packages", detail, False, f"pip install '{name}{extras}{specifier}'")
    if not unmet:
        yield CheckResult("packages", "all installed, in the required versions")


def unmet_requirements(requirements: Iterable[str]) -> Iterator[tuple[Requirement, str | None]]:
    """Yield each unmet requirement with the installed version, which is None for a missing package.

    Requirements of extras count only if the package is installed.
    """
    for text in requirements:
        requirement = Requirement(text)
        is_extra = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            if not is_extra:
                yield requirement, None
            continue
        if not requirement.specifier.contains(Version(installed), prereleases=True):
            yield requirement, installed


def torch_imports() -> tuple[CheckResult, TorchGpus | None]:
    """Import torch in a child process, as a broken build may crash the interpreter, and count the GPUs it sees."""
    done = subprocess.run([sys.executable, "-P", "-c", TORCH], capture_output=True, text=True, check=False)
    name = "torch and torchvision"
    if done.returncode == 0:
        torch, torchvision, cuda, num_gpus, nccl = json.loads(done.stdout.splitlines()[-1])
        built = f"for CUDA {cuda}" if cuda else "without CUDA"
        return CheckResult(name, f"import ({torch} {built}, {torchvision})"), TorchGpus(num_gpus, nccl)
    if importlib.util.find_spec("torch") is None:
        detail = "not installed: reports and `--address http://…` work, trials don't"
        return CheckResult(name, detail, False, "pip install 'raypar[train]'"), None
    last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return CheckResult(name, last_line, False, "install both from the same index, in one command"), None


def cores() -> CheckResult:
    threads = host_cores()
    physical = len({(core.package, core.physical) for core in threads})
    shared = f"; these are hardware threads of {physical} cores: two workers on one core share it"
    return CheckResult("cores", f"{len(threads)} ({cpu_model()}){shared if physical < len(threads) else ''}")


def quota_of_cpus() -> Iterator[CheckResult]:
    """Yield a failed check if a container's CPU quota leaves it no cores of its own."""
    quota, num_allowed = cpu_quota(), len(allowed_cores())
    if quota < num_allowed:
        usable = units.counted(len(host_cores()), "core")
        detail = f"{quota:g} of {num_allowed} cores: raypar uses {usable}, and can't pin workers to cores of their own"
        cpuset = f"docker run --cpuset-cpus 0-{max(0, int(quota) - 1)}"
        fix = f"give the container whole cores: {cpuset}; in Kubernetes, whole CPUs and the static CPU manager"
        yield CheckResult("CPU quota", detail, False, fix)


def pinning() -> CheckResult:
    unpinned = "trials may disturb each other; the report shows by how much"
    if not CAN_PIN:
        return CheckResult("pinning", f"this system can't bind processes to cores: {unpinned}")
    before = os.sched_getaffinity(0)
    try:
        is_bound = pin(allowed_cores()[:1])
    except OSError as error:
        return CheckResult("pinning", f"processes can't be bound to cores: {error.strerror}", False, unpinned)
    finally:
        pin(before)
    return CheckResult("pinning", "processes can be bound to cores" if is_bound else "not possible here")


def other_load() -> CheckResult:
    busy = psutil.cpu_percent(interval=LOAD_WINDOW_S) / 100
    detail = f"{units.percent(busy)} of the cores are busy right now"
    return CheckResult("other load", detail, busy <= MAX_OTHER_LOAD, "stop other programs before you time trials")


def memory() -> CheckResult:
    free = psutil.virtual_memory().available
    fix = f"free some memory: a gang of two workers takes about {units.size(GANG_BYTES)}"
    return CheckResult("memory", f"{units.size(free)} available", free >= GANG_BYTES, fix)


def shared_memory(folder: Path = SHARED_MEMORY) -> Iterator[CheckResult]:
    """Check the folder for Ray's objects and the batches of loader processes. macOS has none."""
    if folder.is_dir():
        free = shutil.disk_usage(folder).free
        fix = f"give it {units.size(2 * OBJECT_STORE_BYTES)} or more (docker run --shm-size=1g)"
        yield CheckResult("shared memory", f"{units.size(free)} free in {folder}", free >= OBJECT_STORE_BYTES, fix)


def open_files() -> CheckResult:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Ray raises its soft limit up to the hard one.
    is_ok = resource.RLIM_INFINITY in (soft, hard) or max(soft, hard) >= MIN_OPEN_FILES
    detail = "unlimited" if soft == resource.RLIM_INFINITY else f"{units.count(soft)} per process"
    return CheckResult("open files", detail, is_ok, f"ulimit -n {MIN_OPEN_FILES}; Ray opens many connections")


def gpus(of_torch: TorchGpus | None) -> Iterator[CheckResult]:
    """Check this machine's GPUs against those that torch sees (None: unknown), NCCL and the driver's settings."""
    there = all_gpus()
    yield _torch_sees(there, of_torch)
    if there:
        if of_torch and of_torch.num_gpus and not of_torch.nccl:
            fix = "install a torch build with NCCL: workers on GPUs exchange gradients through it"
            yield CheckResult("NCCL", "this torch is built without it", False, fix)
        elif of_torch and of_torch.num_gpus:
            yield CheckResult("NCCL", of_torch.nccl)
        yield from persistence()


def _torch_sees(there: tuple[Gpu, ...], of_torch: TorchGpus | None) -> CheckResult:
    if not there:
        return CheckResult(
            "GPU", f"{of_torch.num_gpus}, and torch uses them" if of_torch and of_torch.num_gpus else "none"
        )
    visible = visible_gpus()
    models = ", ".join(f"{count} × {name}" for name, count in Counter(gpu.name for gpu in visible or there).items())
    if of_torch is None:
        return CheckResult("GPU", f"{models}; whether torch sees them is unknown")
    if visible and (problem := torch_problem(visible)):
        fix = "install a newer driver, or a torch that is built for this one (https://pytorch.org/get-started)"
        return CheckResult("GPU", f"{models}, and torch can't use them: {problem}", False, fix)
    if of_torch.num_gpus:
        return CheckResult("GPU", f"{models}, and torch uses them")
    fix = "see what `python -c 'import torch; torch.cuda.init()'` prints" if visible else "unset CUDA_VISIBLE_DEVICES"
    return CheckResult("GPU", f"{models}, and torch sees none", False, fix)


def persistence() -> Iterator[CheckResult]:
    """Check that the driver stays loaded while no process uses a GPU; yield nothing without NVML."""
    with contextlib.suppress(NoDriver), nvml() as library:
        handles = map(library.nvmlDeviceGetHandleByIndex, range(library.nvmlDeviceGetCount()))
        num_off = sum(library.nvmlDeviceGetPersistenceMode(each) != library.NVML_FEATURE_ENABLED for each in handles)
        detail = f"off for {units.counted(num_off, 'GPU')}" if num_off else "on"
        fix = "run sudo nvidia-smi -pm 1: otherwise the driver reloads for each trial, and fixed clocks are lost"
        yield CheckResult("GPU persistence mode", detail, not num_off, fix)


def disk(project_dir: Path) -> Iterator[CheckResult]:
    """Check the disks of the project's folder and of temporary files, where Ray keeps its logs and sockets."""
    temporary = Path(tempfile.gettempdir())
    for name, folder in (("disk", project_dir), ("disk for Ray", temporary)):
        free = shutil.disk_usage(folder).free
        yield CheckResult(name, f"{units.size(free)} free in {folder}", free > MIN_FREE_BYTES, "free some space")
        if folder.stat().st_dev == temporary.stat().st_dev:
            return


def data_sets() -> Iterator[CheckResult]:
    """Check the data sets on disk, and list the missing ones, which a study may download."""
    folder = data_dir()
    absent = [name for name, files in IMAGE_SETS.items() if not (folder / files.folder).is_dir()]
    for name, files in IMAGE_SETS.items():
        if name not in absent:
            try:
                ensure_files(files)
                yield CheckResult("data", f"{name} is complete, in {folder}")
            except DataError as error:
                yield failed("data", error)
    if absent:
        effect = f"fails, since {DATA_DIR_VARIABLE} is set" if named_dir() else "downloads it"
        yield CheckResult("data", f"not in {folder}: {', '.join(absent)}; a study that needs one {effect}")


def store(project_dir: Path, tracking_uri: str) -> CheckResult:
    try:
        Store(tracking_uri, project_dir).check_writable()
    except StoreError as error:
        return failed("store", error)
    return CheckResult("store", masked(tracking_uri))


def unsent(project_dir: Path) -> Iterator[CheckResult]:
    """Yield a failed check if results on this disk have not reached their store."""
    paths = journal_paths(project_dir)
    num = sum((ack := read_ack(path))[0] is None or path.stat().st_size > ack[1] for path in paths)
    if num:
        detail = f"{units.counted(num, 'execution')} not completely in the store; the journal has the rest"
        fix = "run `raypar store sync` (a running study uploads its own results)"
        yield CheckResult("results", detail, False, fix)


def own_ray() -> CheckResult:
    started_s = time.monotonic()
    try:
        with private_ray(this_machine()):
            start_time_s = time.monotonic() - started_s
    except ClusterError as error:
        return failed("Ray", error)
    return CheckResult("Ray", f"starts in {units.seconds(start_time_s)}")


def cluster(address: str) -> CheckResult:
    """Check that the cluster's nodes have the versions of this machine, and describe it.

    Build labels don't count: nodes with GPUs may have torch 2.15.0, the others 2.15.0+cpu.
    """
    try:
        with joined_cluster(address) as joined:
            by_node = {node: _releases(there) for node, there in versions_of_nodes().items()}
    except ClusterError as error:
        return failed("cluster", error)
    totals = {kind: sum(node.get(kind, 0) for node in joined.nodes) for kind in ("CPU", "GPU")}
    resources = ", ".join(f"{total:g} {kind}s" for kind, total in totals.items() if total)
    detail = f"{units.counted(len(joined.nodes), 'node')}{f' with {resources}' if resources else ''} at {address}"
    detail += ", and an autoscaler that may add more" * joined.may_grow
    here = _releases(versions())
    differing = {node: there for node, there in by_node.items() if there != here}
    if not differing:
        return CheckResult("cluster", f"{detail}, all with the versions of this machine")
    name, there = next(iter(differing.items()))
    pairs = [f"{key} {there.get(key, 'absent')} there, {here[key]} here" for key in here if there.get(key) != here[key]]
    detail += f"; versions differ on {units.counted(len(differing), 'node')}, such as {name}: {'; '.join(pairs)}"
    return CheckResult("cluster", detail, False, "install the same versions everywhere: timings must not mix them")


def _releases(installed: Mapping[str, str]) -> dict[str, str]:
    return {name: version.partition("+")[0] for name, version in installed.items()}
