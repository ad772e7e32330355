"""Clusters: this machine, or a Ray cluster that is joined and whose head is monitored."""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raypar import provenance
from raypar.errors import ClusterError, shortened
from raypar.run.auth import admitted
from raypar.run.placement import refusal
from raypar.signals import Interrupted, abort, exit_now, is_running, reinstall_handlers
from raypar.study.trial import Placement
from raypar.train.affinity import CAN_PIN, Core, allowed_cores, topology

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
LEAVE_TIMEOUT_S = 10.0
CONNECT_HINT = "is the cluster up and the address right? Without --address, a local Ray is started"
CLIENT_HINT = "from outside the cluster use --address http://HEAD:8265, on its head --address auto"


@dataclass(frozen=True)
class Cluster:
    """Resources to run on."""

    nodes: tuple[Mapping[str, float], ...]  # the totals of each node, ``{"CPU": 8, "GPU": 1}``
    is_own: bool  # nobody else uses it
    may_grow: bool = False  # an autoscaler may add nodes
    cores: tuple[Core, ...] | None = None  # what workers can be pinned to; None: only the machines know
    has_mps: bool = False  # there is an Apple GPU
    labels: tuple[Mapping[str, str], ...] = ()  # Ray's, of each node; empty where no node has any
    takes_everybody: bool = False  # it runs the code of whoever reaches it, without a token

    @property
    def default_device(self) -> str:
        """The meaning of ``device="auto"`` here."""
        return "cuda" if any(node.get("GPU", 0) for node in self.nodes) else "cpu"

    @property
    def num_cpus(self) -> float:
        return sum(node.get("CPU", 0) for node in self.nodes)

    def refusals(self, placements: Sequence[Placement]) -> dict[Placement, str]:
        """Return the placements that can never run here, with the reason."""
        if self.may_grow:
            return {}
        reasons = {placement: refusal(placement, self.nodes, self.labels or None) for placement in placements}
        return {placement: reason for placement, reason in reasons.items() if reason}


def this_machine() -> Cluster:
    """Return what a private Ray would have, without starting it."""
    visible, gpus = os.environ.get("CUDA_VISIBLE_DEVICES"), Path("/proc/driver/nvidia/gpus")
    if visible is not None:
        num_gpus = len([part for part in visible.split(",") if part.strip() not in ("", "-1", "NoDevFiles")])
    else:
        num_gpus = len(list(gpus.iterdir())) if gpus.is_dir() else 0
    cores = allowed_cores()
    node = {"CPU": len(cores)} | ({"GPU": num_gpus} if num_gpus else {})
    has_mps = sys.platform == "darwin" and platform.machine() == "arm64"
    return Cluster((node,), is_own=True, cores=topology(cores) if CAN_PIN else (), has_mps=has_mps)


def check_address(address: str) -> None:
    """Raise ClusterError for what is no address of a running Ray; nothing is contacted."""
    host, colon, port = address.rpartition(":")
    if address == "auto" or (host.strip() and "/" not in host and port.isdecimal() and 0 < int(port) < 65536):
        return
    if address.startswith("ray://"):
        wrong, hint = "ray:// addresses are not supported", CLIENT_HINT
    elif address == "local":
        wrong, hint = "is no cluster that is there", "leave it out: a local Ray is started"
    elif address.startswith(("http://", "https://")):
        wrong = "is a dashboard, and no Ray"
        hint = "`raypar study FILE --address URL` submits a study to it; finished trials are kept"
    else:
        wrong = "is no host:port" if colon else "has no port"
        hint = "write auto or host:6379, or leave it out: a local Ray is started"
    raise ClusterError(f"--address {shortened(address)}: {wrong}", hint=hint)


def _check_reachable(address: str) -> str:
    """Resolve ``auto``; raise OSError where nobody listens: `ray.init` would wait for minutes."""
    if address == "auto":
        from ray._private.services import canonicalize_bootstrap_address

        address = canonicalize_bootstrap_address(address) or address
    if address.rpartition(":")[2].isdigit():  # otherwise Ray's own message is better
        _connect(address)
    return address


def _connect(address: str) -> None:
    """Raise OSError where nobody listens at ``host:port``."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()


def may_grow() -> bool:
    """Return whether the connected cluster has an autoscaler that may add nodes."""
    from ray._private.state import state

    return bool(state.get_max_resources_from_cluster_config())


@contextlib.contextmanager
def joined_cluster(address: str) -> Iterator[Cluster]:
    """Connect to a running Ray (``auto``, ``host:port``), which is left running.

    Raises:
        ClusterError: it can't be reached, or refuses us.
    """
    check_address(address)
    import ray

    with contextlib.ExitStack() as stack:
        try:
            takes_everybody = stack.enter_context(admitted(_check_reachable(address)))
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except SystemExit:  # Ray's own answer to SIGTERM
            raise Interrupted(signal.SIGTERM) from None
        except ClusterError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ClusterError(f"no Ray cluster at --address {address}: {reason}", hint=CONNECT_HINT) from error
        reinstall_handlers()
        stack.callback(shut_down)
        alive = [node for node in ray.nodes() if node["Alive"]]
        yield Cluster(
            tuple(dict(node["Resources"]) for node in alive),
            is_own=False,
            may_grow=may_grow(),
            labels=tuple(dict(node["Labels"]) for node in alive),
            takes_everybody=takes_everybody,
        )


def shut_down(timeout_s: float = LEAVE_TIMEOUT_S) -> None:
    """Leave Ray; where it was lost, without waiting for an answer."""
    import ray

    def leave() -> None:
        with contextlib.suppress(Exception):
            ray.shutdown()

    leaving = threading.Thread(target=leave, daemon=True)
    leaving.start()
    leaving.join(timeout_s)
    if leaving.is_alive():
        atexit.unregister(ray.shutdown)


VERSIONS_TIMEOUT_S = 60.0


def versions_of_nodes() -> dict[str, dict[str, str]]:
    """Return, by the address of each node of the joined cluster, what `raypar.provenance.versions` returns there.

    Raises:
        ray.exceptions.GetTimeoutError: a node doesn't answer.
    """
    import ray
    from ray import cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    cloudpickle.register_pickle_by_value(provenance)  # nodes may have another raypar, or none
    versions = ray.remote(num_cpus=0)(provenance.versions)
    answers = {
        node["NodeManagerAddress"]: versions.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in ray.nodes()
        if node["Alive"]
    }
    return dict(zip(answers, ray.get(list(answers.values()), timeout=VERSIONS_TIMEOUT_S), strict=True))


GRACE_S = 15.0
PATIENCE_S = 20.0  # a head that is away for less comes back unnoticed, as far as Ray can do without it
CLUSTER_HINT = "start the cluster again: finished trials are kept"
NAMES = {"gcs_server": "its head, gcs_server", "raylet": "its raylet"}


class HeadWatch:
    """Monitor of what Ray can't do without: aborts the study where it is lost.

    Args:
        loss: what is lost; None as long as all is there.
        every_s: how often to ask.
    """

    def __init__(self, loss: Callable[[], ClusterError | None], *, every_s: float) -> None:
        self.lost = False  # or it was seen
        self._loss, self._every_s = loss, every_s
        self._over = threading.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        thread = threading.Thread(target=self._look, daemon=True, name="head-watch")
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
            self.lost = self.lost or self._loss() is not None

    def _look(self) -> None:
        while not self._over.wait(self._every_s):
            if (loss := self._loss()) is not None:
                self.lost = True
                if abort(loss) and not self._over.wait(GRACE_S):  # the main thread waits in foreign code
                    exit_now(1, f"error: {loss}\nbroke off; `raypar resume` runs the rest\n")
                return


def watch_of_own(pids: Mapping[str, int]) -> HeadWatch:
    """Return a monitor of a Ray that this process has started; args: from `head_processes`."""

    def loss() -> ClusterError | None:
        ended = next((name for name, pid in pids.items() if not is_running(pid)), None)
        if ended is None:
            return None
        message = f"Ray was lost: {NAMES[ended]} ended (process {pids[ended]})"
        return ClusterError(message, hint="it was killed, or ran out of memory: `dmesg` tells of the latter")

    return HeadWatch(loss, every_s=0.25)


def watch_of_cluster(address: str = "", patience_s: float = PATIENCE_S) -> HeadWatch:
    """Return a monitor of a cluster whose head listens at ``host:port``; lost is one unreachable for so long.

    By then Tune may wait for it in a call that nothing interrupts: the process then ends without a report.

    Args:
        address: empty: of the cluster that this process has joined.
    """
    import ray

    address = address or ray.get_runtime_context().gcs_address
    last_s = time.monotonic()

    def loss() -> ClusterError | None:
        nonlocal last_s
        try:
            _connect(address)
        except OSError:
            if time.monotonic() - last_s < patience_s:
                return None
            return ClusterError(f"Ray was lost: its head at {address} can't be reached any more", hint=CLUSTER_HINT)
        last_s = time.monotonic()
        return None

    return HeadWatch(loss, every_s=min(CONNECT_TIMEOUT_S, patience_s / 4))


def head_processes() -> dict[str, int]:
    """Return the ids of the processes that the Ray of this process can't do without."""
    from ray._private import worker

    node = worker._global_node
    if node is None:
        return {}
    return {name: node.all_processes[name][0].process.pid for name in NAMES if name in node.all_processes}
