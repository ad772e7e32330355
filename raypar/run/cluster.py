"""What a study runs on: this machine, or a Ray cluster that is there already and is joined."""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raypar.errors import ClusterError, shortened
from raypar.run.authentication import admitted
from raypar.run.capacity import refusal
from raypar.signals import Interrupted, reinstall_handlers
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


def check_address(address: str) -> None:
    """Raises ClusterError for what is no address of a Ray cluster that is there; looks for none."""
    if address.startswith("ray://"):
        raise ClusterError(f"--address {shortened(address)}: ray:// addresses are not supported", hint=CLIENT_HINT)
    host, colon, port = address.rpartition(":")
    if address == "auto" or (host.strip() and "/" not in host and port.isdecimal() and 0 < int(port) < 65536):
        return
    if address == "local":
        raise ClusterError("--address local: is no cluster that is there", hint="leave it out: a local Ray is started")
    if address.startswith(("http://", "https://")):
        hint = "`raypar study FILE --address URL` submits a study to it; finished trials are kept"
        raise ClusterError(f"--address {shortened(address)}: is a dashboard, and no Ray", hint=hint)
    wrong = "has no port" if not colon else "is no host:port"
    hint = "write auto or host:6379, or leave it out: a local Ray is started"
    raise ClusterError(f"--address {shortened(address)}: {wrong}", hint=hint)


def _check_reachable(address: str) -> str:
    """The address, without ``auto``. Raises an OSError where nobody listens: `ray.init` would wait for minutes, and say
    little then."""
    if address == "auto":
        from ray._private.services import canonicalize_bootstrap_address

        address = canonicalize_bootstrap_address(address) or address
    host, _, port = address.rpartition(":")
    if host and port.isdigit():  # otherwise Ray knows best what is wrong with it
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    return address


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
            reason = " ".join(str(error).split())
            raise ClusterError(f"no Ray cluster at --address {address}: {reason}", hint=CONNECT_HINT) from error
        reinstall_handlers()
        stack.callback(_leave)
        alive = [node for node in ray.nodes() if node["Alive"]]
        nodes = tuple(dict(node["Resources"]) for node in alive)
        labels = tuple(dict(node["Labels"]) for node in alive)
        yield Cluster(nodes, is_own=False, may_grow=may_grow(), labels=labels, takes_everybody=takes_everybody)


def _leave() -> None:
    """Of a cluster; where it was lost, without waiting for an answer."""
    import ray

    leaving = threading.Thread(target=ray.shutdown, daemon=True)
    leaving.start()
    leaving.join(LEAVE_TIMEOUT_S)
    if leaving.is_alive():
        atexit.unregister(ray.shutdown)
