"""The Ray that a study runs on: a private one that ends with the study, or one that is there already."""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from raypar.errors import ClusterError, shortened
from raypar.masking import secret_variables
from raypar.run.authentication import admitted, own_token
from raypar.run.capacity import refusal
from raypar.run.head import HeadWatch, head_processes
from raypar.run.interruption import Interrupted, end_descendants, reheed, what_broke
from raypar.study.trial import Placement
from raypar.trace import mark
from raypar.train.affinity import CAN_PIN, Core, allowed_cores, pin, topology

OBJECT_STORE_BYTES = 200 * 1024**2  # raypar passes small messages only
# Read by Train in the processes that start gangs. The first is the price of noticing a dead gang: polling more often
# would take time from the trials that are being timed.
TRAIN_ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1.0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
CONNECT_TIMEOUT_S = 5.0
SHUTDOWN_TIMEOUT_S = 20.0
LOST_TIMEOUT_S = 2.0  # a minute after it has lost its head, Ray ends this process
AGENTS = ("ray::DashboardAgent", "dashboard/agent.py", "ray::RuntimeEnvAgent", "runtime_env/agent/main.py")
CONNECT_HINT = "is the cluster up and the address right? Without --address, a local Ray is started"


@dataclass(frozen=True)
class Cluster:
    """What there is to run on.

    Attributes:
        nodes: the totals of each node, ``{"CPU": 8, "GPU": 1}``.
        is_own: nobody else uses it.
        may_grow: an autoscaler may add nodes.
        cores: what workers can be pinned to; None where only the machines that they run on know.
        has_mps: there is an Apple GPU.
        labels: Ray's, of each node; empty where no node has any.
        takes_everybody: it runs the code of whoever reaches it, without a token.
    """

    nodes: tuple[Mapping[str, float], ...]
    is_own: bool
    may_grow: bool = False
    cores: tuple[Core, ...] | None = None
    has_mps: bool = False
    labels: tuple[Mapping[str, str], ...] = ()
    takes_everybody: bool = False

    @property
    def default_device(self) -> str:
        """What ``device="auto"`` means here."""
        return "cuda" if any(node.get("GPU", 0) for node in self.nodes) else "cpu"

    @property
    def num_cpus(self) -> float:
        return sum(node.get("CPU", 0) for node in self.nodes)

    def refusals(self, placements: Sequence[Placement]) -> dict[Placement, str]:
        """Which of the placements can never run here, and why."""
        if self.may_grow:
            return {}
        found = {placement: refusal(placement, self.nodes, self.labels or None) for placement in placements}
        return {placement: why for placement, why in found.items() if why}


def this_machine() -> Cluster:
    """What a private Ray would have, told without starting it."""
    gpus = Path("/proc/driver/nvidia/gpus")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        num_gpus = len([part for part in visible.split(",") if part.strip() not in ("", "-1", "NoDevFiles")])
    else:
        num_gpus = len(list(gpus.iterdir())) if gpus.is_dir() else 0
    cores = allowed_cores()
    node: dict[str, float] = {"CPU": len(cores)}
    if num_gpus:
        node["GPU"] = num_gpus
    has_mps = sys.platform == "darwin" and platform.machine() == "arm64"
    return Cluster((node,), is_own=True, cores=topology(cores) if CAN_PIN else (), has_mps=has_mps)


@contextlib.contextmanager
def private_ray(machine: Cluster, taken: Collection[int]) -> Iterator[None]:
    """A Ray of our own: loopback only, with a token of its own, quiet, gone at the end.

    Its processes don't inherit what looks like a secret: one of them may show a piece of its environment in a process
    listing, at the moment when it takes its name.

    Args:
        machine: from `this_machine`.
        taken: the cores that trials will be on. Where they leave some free, this process (and so Ray's own, which
            inherit it) keeps to those.

    Raises:
        ClusterError: Ray doesn't start.
    """
    cores = allowed_cores()
    before = os.sched_getaffinity(0) if CAN_PIN else set()
    if CAN_PIN and taken and (free := set(cores).difference(taken)):
        pin(free)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.update(TRAIN_ENVIRONMENT)  # Ray's processes inherit it
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray._private import ray_constants

    # What Ray does on macOS and Windows, where clusters are off: every port of it on 127.0.0.1. On Linux it would
    # listen on all interfaces.
    ray_constants.ENABLE_RAY_CLUSTER = False
    older = frozenset(child.pid for child in psutil.Process().children())
    mark("ray: init")
    with own_token() as token_folder:
        try:
            with _in_groups_of_their_own(), _without_secrets():
                ray.init(
                    address="local",  # a bare init would join whatever cluster it finds
                    num_cpus=len(cores),
                    num_gpus=int(machine.nodes[0].get("GPU", 0)),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="ERROR",
                    object_store_memory=OBJECT_STORE_BYTES,
                )
        except BaseException as error:
            _end_ray(older)
            if isinstance(error, SystemExit):  # Ray's own answer to SIGTERM
                raise Interrupted(signal.SIGTERM) from None
            if not isinstance(error, Exception):
                raise
            hint = "`raypar doctor` looks for the cause"
            raise ClusterError(f"Ray does not start here: {error}", hint=hint) from error
        reheed()
        mark("ray: is up")
        watch = HeadWatch(head_processes())
        try:
            with _leavings_end_with_us(token_folder), watch.watching():
                yield
        except KeyboardInterrupt:
            if (lost := what_broke()) is None:
                raise
            raise lost from None
        finally:
            _end_ray(older, is_lost=bool(watch.lost))
            if before:
                pin(before)


@contextlib.contextmanager
def _in_groups_of_their_own() -> Iterator[None]:
    """Ray's processes get process groups of their own: a signal to ours (a closed terminal's, `timeout`'s) is not for
    them, since without them the study could not be ended in good order."""
    from ray._private import services

    plain = services.ConsolePopen
    if sys.platform == "linux":  # elsewhere Ray itself needs them in our group, to end them with us
        services.ConsolePopen = partial(plain, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = plain


def _end_ray(older: frozenset[int], *, is_lost: bool = False) -> None:
    """Shut Ray down, by force where it doesn't answer any more (its processes were killed with their machine's others).

    Args:
        older: children of this process that are not Ray's.
        is_lost: it won't answer.
    """
    import ray

    if is_lost:
        end_descendants(but=older)
        atexit.unregister(ray.shutdown)

    def shut_down() -> None:
        with contextlib.suppress(Exception):
            ray.shutdown()

    ending = threading.Thread(target=shut_down, daemon=True)
    ending.start()
    ending.join(LOST_TIMEOUT_S if is_lost else SHUTDOWN_TIMEOUT_S)
    end_descendants(but=older)


@contextlib.contextmanager
def _without_secrets() -> Iterator[None]:
    """What is started meanwhile doesn't inherit them."""
    hidden = secret_variables(os.environ)
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


@contextlib.contextmanager
def _leavings_end_with_us(folder: Path) -> Iterator[None]:
    """Where this process is killed, Ray's processes end with it, but for the raylet's agents: these try for a minute to
    tell a GCS that is gone. A shell waits for our end, to end them, and to remove the folder."""
    agents = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(name in " ".join(process.cmdline()) for name in AGENTS):
                agents.append(str(process.pid))
    shell = subprocess.Popen(
        ["/bin/sh", "-c", 'read line || { kill -9 "$@"; rm -rf -- "$0"; }', str(folder), *agents],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        shell.communicate(b"\n")


def check_address(address: str) -> None:
    """Raises ClusterError for what is no address of a Ray cluster that is there; looks for none."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto" or (host.strip() and "/" not in host and port.isdecimal() and 0 < int(port) < 65536):
        return
    if address == "local":
        raise ClusterError("--address local: is no cluster that is there", hint="leave it out: a local Ray is started")
    if address.startswith(("http://", "https://")):
        hint = "`raypar study FILE --address URL` submits a study to it; finished trials are kept"
        raise ClusterError(f"--address {shortened(address)}: is a dashboard, and no Ray", hint=hint)
    wrong = "has no port" if not colon else "is no host:port"
    hint = "write auto, host:6379 or ray://host:10001, or leave it out: a local Ray is started"
    raise ClusterError(f"--address {shortened(address)}: {wrong}", hint=hint)


def _check_reachable(address: str) -> str:
    """The address, without ``auto``. Raises an OSError where nobody listens: `ray.init` would wait for minutes, and say
    little then."""
    if address == "auto":
        from ray._private.services import canonicalize_bootstrap_address

        address = canonicalize_bootstrap_address(address) or address
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():  # otherwise Ray knows best what is wrong with it
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    return address


def without_frames(error: Exception) -> str:
    """What Ray says, in one line; its servers put whole tracebacks into their answers."""
    said, _, frames = str(error).partition("Traceback (most recent call last):")
    last = [line for line in frames.splitlines() if line and not line.startswith(" ")][-1:]
    return " ".join(" ".join([said, *last]).split())


def may_grow() -> bool:
    """Whether the cluster that this process is connected to has an autoscaler that may add nodes."""
    from ray._private.state import state

    return bool(state.get_max_resources_from_cluster_config())


@contextlib.contextmanager
def joined_cluster(address: str) -> Iterator[Cluster]:
    """A Ray that is there already (``auto``, ``host:port``); it is left running.

    Raises:
        ClusterError: it can't be reached, or doesn't take us.
    """
    check_address(address)
    import ray

    with contextlib.ExitStack() as stack:
        try:
            found = _check_reachable(address)
            takes_everybody = stack.enter_context(admitted(found))
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except SystemExit:  # Ray's own answer to SIGTERM
            raise Interrupted(signal.SIGTERM) from None
        except ClusterError:
            raise
        except Exception as error:
            raise ClusterError(
                f"no Ray cluster at --address {address}: {without_frames(error)}", hint=CONNECT_HINT
            ) from error
        reheed()
        try:
            alive = [node for node in ray.nodes() if node["Alive"]]
            nodes = tuple(dict(node["Resources"]) for node in alive)
            labels = tuple(dict(node["Labels"]) for node in alive)
            # Asked on the cluster: a ray:// client has no view of the autoscaler.
            grows: bool = ray.get(ray.remote(num_cpus=0)(may_grow).remote())
            yield Cluster(nodes, is_own=False, may_grow=grows, labels=labels, takes_everybody=takes_everybody)
        finally:
            ray.shutdown()
