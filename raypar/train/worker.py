"""Entry point of a rank's process: pin cores, seed, join the process group, train, report.

A fork server or a fresh interpreter calls `main` with a connection to the runner. The process ends with the trial, so
nothing is left behind for the next one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from raypar.errors import ClusterError, DoesNotFit, Mistake, WorkloadError, cut, message_of
from raypar.gpus import VISIBLE, VISIBLE_AMD, all_gpus, torch_problem
from raypar.masking import masked
from raypar.provenance import cpu_model
from raypar.scratch import room_for
from raypar.search_path import put_first
from raypar.study.trial import FailureKind
from raypar.study.workload import AnyWorkload, CommandWorkload, TrainLoopWorkload, Workload
from raypar.trace import mark
from raypar.train.affinity import bind_rank
from raypar.train.job import CHECKPOINT_FOLDER, CheckJob, RankContext, RankOutcome, TrialJob
from raypar.train.position import Position, PositionWatch, calls
from raypar.train.transport import transport_of
from raypar.units import counted

# The errors of torch's collectives after another rank is lost: gloo in a RuntimeError, NCCL and the store by type.
_LOST = re.compile(r"gloo.*(Connection (closed|reset) by peer|Broken pipe|Connection refused)", re.DOTALL)
_LOST_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")
_LOADER_DIED = re.compile(r"DataLoader worker .*(is killed by signal|exited unexpectedly)", re.DOTALL)
# Torch's and the system's words, and the status of cuBLAS, cuDNN, cuSOLVER and the like.
_NO_MEMORY = re.compile(
    r"can't allocate memory|cannot allocate memory|out of memory|(?-i:\bCU[A-Z]+_\w*ALLOC(ATION)?_FAILED\b)",
    re.IGNORECASE,
)
_OF_GPU = re.compile(r"\bCUDA\b|\bHIP\b|\bCU[A-Z]+_")
_LIMITED = re.compile(r"[0-9] [KMG]?i?B allowed")  # by `raypar.measure.memory.limit_on_gpu`
# Errors that NCCL gives the same type as that of a lost peer.
_NCCL_MISUSED = re.compile(r"Duplicate GPU detected|ncclInvalid(Usage|Argument)")
# CUDA's texts (cudaGetErrorString) for hardware that failed; "unspecified launch failure" is a program's own error.
_DEVICE_FAILED = re.compile(
    r"uncorrectable (ECC|NVLink) error|hardware stack error|or a hardware error|GPU has fallen off the bus|GPU is lost",
    re.IGNORECASE,
)


def failure_kind(error: BaseException) -> FailureKind:
    """Return the kind of an exception that a rank raised: ERROR unless it is recognised as something else."""
    name, text = type(error).__name__, message_of(error)
    if isinstance(error, WorkloadError):
        return FailureKind.INVALID
    if isinstance(error, DoesNotFit):
        return FailureKind.DOES_NOT_FIT
    if isinstance(error, RuntimeError) and _DEVICE_FAILED.search(text):
        return FailureKind.DEVICE
    is_shortage = isinstance(error, (RuntimeError, OSError)) and _NO_MEMORY.search(text)
    if name == "OutOfMemoryError" or (is_shortage and _OF_GPU.search(text)):
        from raypar.measure.memory import has_gpu_alone

        # If others use the GPU, the free memory does not show whether the trial fits.
        fits_nowhere = _LIMITED.search(text) or has_gpu_alone()
        return FailureKind.DOES_NOT_FIT if fits_nowhere else FailureKind.OUT_OF_MEMORY
    if isinstance(error, MemoryError) or is_shortage:
        return FailureKind.OUT_OF_MEMORY
    is_misuse = isinstance(error, RuntimeError) and _NCCL_MISUSED.search(text)
    if not is_misuse and (name in _LOST_TYPES or (isinstance(error, RuntimeError) and _LOST.search(text))):
        return FailureKind.PEER_LOST
    if isinstance(error, RuntimeError) and _LOADER_DIED.search(text):
        return FailureKind.CRASH
    return FailureKind.ERROR


LOADER_END_S = 1.0  # within this time, a loader process whose connection is lost has ended
COLLECTIVE_TIMEOUT_S = 1800.0
SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"  # 1: NCCL takes several ranks on one GPU, and so does raypar
# An empty list hides all GPUs from CUDA, and none from HIP.
NO_GPUS = {VISIBLE: "", VISIBLE_AMD: "-1"}
NO_GPU_FOR_RANK = "device=cuda, and the process with local rank {} sees {}: {}; {}"
NO_GPU_HINT = "`raypar doctor` on that node checks its GPUs, driver and torch; device=cpu needs none"
LISTENER_LENGTH = len("pymp-12345678/listener-12345678")  # of the sockets of multiprocessing
MAX_MESSAGE_CHARS, MAX_TRACEBACK_CHARS = 2000, 20_000  # of a failure; the rank's log has more


class PipeChannel:
    """A rank's connection to its supervisor; messages are ``(kind, …)`` tuples."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # a report is answered before anything else is sent

    def report(self, metrics: Mapping[str, float]) -> bool:
        with self._lock:
            self._connection.send(("report", dict(metrics), Position(calls())))
            return bool(self._connection.recv())

    def send_position(self, look: Callable[[], Position | None]) -> None:
        """Send the position that `look` returns, if any."""
        with self._lock:
            if (position := look()) is not None:
                self._connection.send(("position", position))


def main(connection: Connection, listen_fd: int | None = None) -> None:
    """Run the `TrialJob` and `RankContext` that the connection sends, and answer.

    The answer is ``("done", RankOutcome)`` or ``("error", kind, type, message, traceback)``. For a `CheckJob` (and
    None) it is ``("checked", mistakes)``.

    Args:
        listen_fd: rank 0 of several: the listening socket behind ``context.master_address``.
    """
    try:
        try:
            job, context = connection.recv()  # fails if a class in it can't be imported here
            mark("rank: starts")
            if isinstance(job, CheckJob):
                connection.send(("checked", check(job)))
                return
            outcome = run_rank(job, context, PipeChannel(connection), listen_fd)
        finally:
            _ignore_loaders()
        connection.send(("done", outcome))
    except BaseException as caught:
        _ignore_loaders()  # again, because torch's handler may have raised before the first call
        error = _loader_error(caught) or caught
        text = masked("".join(traceback.format_exception(error)))  # it may quote a password or a key
        print(text, file=sys.stderr)
        message = cut(masked(message_of(error)), MAX_MESSAGE_CHARS)
        connection.send(("error", failure_kind(error), type(error).__name__, message, cut(text, MAX_TRACEBACK_CHARS)))
    sys.stdout.flush()
    sys.stderr.flush()


def check(job: CheckJob) -> list[Mistake]:
    """Return the mistakes in data and model of the job's points."""
    alone = dict.fromkeys(("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK"), "0")
    alone |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    os.environ.update({**job.environment, **NO_GPUS, **alone})
    put_first(job.sys_path)
    from raypar.train.logged_run import nothing_logged
    from raypar.train.workload_check import mistakes_of_points

    with nothing_logged():
        return mistakes_of_points(pickle.loads(job.workload), job.points, job.seed)


def _ignore_loaders() -> None:
    """Ignore loader processes that end: torch would raise an error anywhere in the rank's code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _loader_error(error: BaseException) -> BaseException | None:
    """Return torch's error if a loader process has failed, which explains the rank's error.

    The rank may have noticed a lost connection first, a moment before the process has ended.
    """
    until_s = time.monotonic() + (LOADER_END_S if isinstance(error, (EOFError, ConnectionError)) else 0)
    while (torch := sys.modules.get("torch")) is not None:
        try:
            torch._C._error_if_any_worker_fails()
        except RuntimeError as of_loader:
            return of_loader
        if time.monotonic() >= until_s:
            break
        time.sleep(0.05)
    return None


def run_rank(job: TrialJob, context: RankContext, channel: PipeChannel, listen_fd: int | None = None) -> RankOutcome:
    """Set the process up for the trial, and train."""
    config: Mapping[str, Any] = job.spec.config
    # Still single-threaded: every later thread inherits it.
    cores = bind_rank(context.cores, config.get("cpu_affinity"))
    # A trial on the CPU sees no GPU, whatever its code asks torch.cuda.
    hidden = {} if config["device"] == "cuda" else NO_GPUS
    os.environ.update({**job.settings.environment, **context.environment, **hidden})
    put_first(job.revision.sys_path)
    # With a longer path, loader processes would hang. A command still gets the user's TMPDIR.
    tempfile.tempdir = str(room_for(LISTENER_LENGTH, Path(tempfile.gettempdir())))

    import torch

    from raypar.train.generators import seed_generators

    if not job.revision.is_command:  # such a rank computes nothing, and its forks begin like new processes
        torch.set_num_threads(config["num_threads"])  # may start threads, which forks would lack
        seed_generators(job.spec.seed, config["device"])  # a fork has inherited its server's generators
    workload: AnyWorkload = pickle.loads(job.workload)
    if isinstance(workload, CommandWorkload):
        from raypar.train.command import run_command

        return run_command(workload.command, job, context, channel, listen_fd)
    device = _device(config, context)
    with _process_group(context, device, listen_fd):
        outcome = _watched(partial(_trained, workload, job, context, channel, cores, device), channel, context, device)
    conditions = replace(
        outcome.conditions,
        cores=cores,
        num_threads=torch.get_num_threads(),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        cpu_model=cpu_model(),
        pid=os.getpid(),
        transport=transport_of(device.type, job.log_path(context.rank)) if context.world_size > 1 else None,
    )
    return replace(outcome, wall_s=time.monotonic() - context.requested_at_s, conditions=conditions)


def _trained(
    workload: AnyWorkload,
    job: TrialJob,
    context: RankContext,
    channel: PipeChannel,
    cores: tuple[int, ...],
    device: Any,
) -> RankOutcome:
    """Run the training of this rank."""
    config = job.spec.config
    if isinstance(workload, TrainLoopWorkload):
        from raypar.measure.telemetry import Telemetry
        from raypar.train.train_loop import run_train_loop

        telemetry = Telemetry(cores, device)
        return run_train_loop(workload.train_loop, config, context, channel, telemetry, job, workload.hyperparameters)
    from raypar.parallel.strategy import DistContext
    from raypar.train.logged_run import private_store
    from raypar.train.loop import train
    from raypar.train.shared_data import SharedData

    assert isinstance(workload, Workload)
    with private_store(job, is_first=context.rank == 0) as private:
        private.redirect()
        outcome = train(
            workload,
            config,
            job.spec.seed,
            DistContext(context.rank, context.world_size, device),
            channel,
            start_s=context.requested_at_s,
            cores=cores,
            artifact_dir=job.artifact_dir,
            checkpoint_dir=job.folder / CHECKPOINT_FOLDER,
            profiling=job.profiling,
            shared=SharedData(hashlib.sha256(job.workload).hexdigest()),
        )
        overruled = private.keep().overruled
    return replace(outcome, conditions=replace(outcome.conditions, logged_elsewhere=overruled or None))


def _watched(run: Callable[[], RankOutcome], channel: PipeChannel, context: RankContext, device: Any) -> RankOutcome:
    """Call `run`. Meanwhile, and at its end, report the position of this rank among several."""
    if context.world_size == 1:
        return run()
    watch, has_left = PositionWatch(channel.send_position, on_cpu=device.type == "cpu"), False
    watch.start()
    try:
        outcome = run()
        has_left = not outcome.stopped  # a rank that a report has stopped leaves at the same point as the others
        return outcome
    finally:  # before the group is destroyed, which the others may notice first
        watch.close()
        channel.send_position(lambda: Position(calls(), is_out=has_left, has_left=has_left))


def _device(config: Mapping[str, Any], context: RankContext) -> Any:
    import torch

    if config["device"] != "cuda":
        return torch.device(config["device"])
    num_gpus = torch.cuda.device_count()
    number = context.local_rank
    if num_gpus and os.environ.get(SHARED_GPU) == "1":
        number %= num_gpus
    if number >= num_gpus:
        lists = [f"{name} is {os.environ[name]!r}" for name in (VISIBLE, VISIBLE_AMD) if name in os.environ]
        why = torch_problem(all_gpus()) or "each worker needs its own GPU"
        sees = counted(num_gpus, "GPU") if num_gpus else "no GPU"
        lists_text = ", ".join(lists) or f"{VISIBLE} is not set"
        raise ClusterError(NO_GPU_FOR_RANK.format(context.local_rank, sees, lists_text, why), hint=NO_GPU_HINT)
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def _interface_of(address: str) -> str | None:
    """Return the name of this machine's network interface with the address; None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    return None


@contextlib.contextmanager
def _process_group(context: RankContext, device: Any, listen_fd: int | None) -> Any:
    """Set torchrun's and Ray Train's variables; with several ranks, join the process group."""
    host, port = context.master_address
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port), ACCELERATE_TORCH_DEVICE=str(device))
    os.environ["GROUP_RANK"] = os.environ["NODE_RANK"] = str(context.node_rank)
    for name in ("rank", "world_size", "local_rank", "local_world_size"):
        os.environ[name.upper()] = str(getattr(context, name))
    if context.world_size == 1:
        yield
        return
    import torch.distributed as dist

    if context.local_world_size == context.world_size:
        # One node: no host name has to resolve, and nothing listens beyond the machine.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    elif interface := _interface_of(context.node_ip):
        # By default, gloo takes the address of the host's name, which may be 127.0.1.1, and NCCL the first interface,
        # which may be a bridge of this machine's containers.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # "=": no other with this prefix
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        context.world_size,
        is_master=context.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listen_fd if context.rank == 0 else None,
    )
    # With a device, NCCL connects here instead of in the first step, and never uses another rank's GPU.
    backend: dict[str, Any] = {"backend": "nccl", "device_id": device} if device.type == "cuda" else {"backend": "gloo"}
    dist.init_process_group(**backend, store=store, rank=context.rank, world_size=context.world_size, timeout=timeout)
    yield  # no clean-up after an error: the peers may hang in a collective until their supervisors end them
    if dist.is_initialized():
        dist.destroy_process_group()
