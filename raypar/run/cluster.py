"""Clusters: this machine, or a Ray cluster that this process joins and whose head it monitors."""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import platform
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from raypar import gpus, provenance, units
from raypar.errors import ClusterError, shortened
from raypar.run.auth import admitted
from raypar.run.placement import refusal
from raypar.signals import Interrupted, reinstall_handlers
from raypar.study.trial import Placement
from raypar.train.affinity import CAN_PIN, Core, host_cores, own_cores

# Train reads these in the processes that start gangs. The first sets how soon a dead gang is noticed; more frequent
# polls would slow down the trials that are being timed. The broker itself looks for preempted nodes
# (`raypar.run.departures`), so that no gang needs Train's watcher, an actor that polls.
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
NODES_TIMEOUT_S = 120.0
NODES_POLL_S = 0.5
MAX_GROWTH = 1000  # nodes of one type, if the autoscaler has no limit
CONNECT_HINT = "check that the cluster is up and the address is right; without --address, raypar starts a local Ray"
CLIENT_HINT = "from outside the cluster use --address http://HEAD:8265, on its head --address auto"


@dataclass(frozen=True)
class NodeType:
    """Nodes of one kind that an autoscaler starts.

    Attributes:
        min_count: number of nodes that are always up or being started.
        resources: totals of each node; empty: unknown until a node is up.
        labels: Ray labels of each node.
    """

    min_count: int
    max_count: int
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[float, float]:
        return _shape(self.resources)


def _shape(resources: Mapping[str, float]) -> tuple[float, float]:
    return resources.get("CPU", 0), resources.get("GPU", 0)


@dataclass(frozen=True)
class Cluster:
    """Resources to run on."""

    nodes: tuple[Mapping[str, float], ...]  # totals of each node, ``{"CPU": 8, "GPU": 1}``
    is_own: bool  # nobody else uses it
    node_types: tuple[NodeType, ...] = ()  # nodes that an autoscaler starts
    cores: tuple[Core, ...] | None = None  # cores that workers can be pinned to; None: only the machines know
    has_mps: bool = False  # it has an Apple GPU
    labels: tuple[Mapping[str, str], ...] = ()  # Ray labels of each node; empty if no node has any
    takes_everybody: bool = False  # it runs code of any client, without a token
    remedy: str = "give the --address of a larger cluster"  # what to do where it is too small
    gpu_problem: str = ""  # why torch can't use the GPUs, as far as this process can see

    @property
    def num_cpus(self) -> float:
        return sum(node.get("CPU", 0) for node in self.nodes)

    @property
    def awaits_unknown_nodes(self) -> bool:
        """True while nodes are being started whose resources are not known yet."""
        return len(self.nodes) < self.num_promised and any(t.min_count and not t.resources for t in self.node_types)

    @property
    def num_promised(self) -> int:
        """Number of nodes, including the head, that are up or being started."""
        return 1 + sum(node_type.min_count for node_type in self.node_types)

    @cached_property
    def growth(self) -> tuple[NodeType, ...]:
        """Nodes that the autoscaler may still add, by type."""
        present = Counter(map(_shape, self.nodes))
        added: list[NodeType] = []
        for node_type in self.node_types:
            if node_type.resources:
                num_present = min(present[node_type.shape], node_type.max_count)
                present[node_type.shape] -= num_present
                added += [node_type] * (node_type.max_count - num_present)
        return tuple(added)

    @property
    def nodes_to_be(self) -> tuple[Mapping[str, float], ...]:
        """Totals of each node that is up or that the autoscaler may still add."""
        return (*self.nodes, *(each.resources for each in self.growth))

    @property
    def has_gpu(self) -> bool:
        """True if a node with a GPU is up or being started."""
        promised = (each.resources for each in self.node_types if each.min_count)
        return any(node.get("GPU", 0) for node in (*self.nodes, *promised))

    @property
    def cores_per_gpu(self) -> int | None:
        """Number of cores for the worker of each GPU, on the node with the fewest; None: there is no GPU."""
        shapes = set(map(_shape, self.nodes_to_be))
        return min((max(1, int(cpu // gpu)) for cpu, gpu in shapes if cpu >= 1 and gpu >= 1), default=None)

    @property
    def may_grow(self) -> bool:
        return bool(self.growth)

    def refusals(self, placements: Iterable[Placement]) -> dict[Placement, str]:
        """Return the placements that can never run here, each with the reason."""
        labels = (*(self.labels or [{}] * len(self.nodes)), *(each.labels for each in self.growth))
        reasons = {placement: refusal(placement, self.nodes_to_be, labels) for placement in placements}
        return {placement: reason for placement, reason in reasons.items() if reason}


def this_machine() -> Cluster:
    """Return the resources that a private Ray would have, without starting it."""
    visible = gpus.visible_gpus()
    node = {"CPU": len(host_cores())} | ({"GPU": len(visible)} if visible else {})
    return Cluster(
        (node,),
        is_own=True,
        cores=own_cores() if CAN_PIN else (),
        has_mps=sys.platform == "darwin" and platform.machine() == "arm64",
        gpu_problem=(gpus.torch_problem(visible) or "") if visible else "",
    )


def check_address(address: str) -> None:
    """Raise ClusterError if the text is not an address of a running Ray. Contacts nothing."""
    host, colon, port = address.rpartition(":")
    if address == "auto" or (host.strip() and "/" not in host and port.isdecimal() and 0 < int(port) < 65536):
        return
    if address.startswith("ray://"):
        wrong, hint = "ray:// addresses are not supported", CLIENT_HINT
    elif address == "local":
        wrong, hint = "names no running cluster", "leave it out: raypar then starts a local Ray"
    elif address.startswith(("http://", "https://")):
        wrong = "is a dashboard's address, not Ray's"
        hint = "`raypar study FILE --address URL` submits a study to it; finished trials are kept"
    else:
        wrong = "must be host:port" if colon else "has no port"
        hint = "write auto or host:6379, or leave it out: raypar then starts a local Ray"
    raise ClusterError(f"--address {shortened(address)}: {wrong}", hint=hint)


def is_of_others(address: str) -> bool:
    """Return whether another user of this machine may listen at one of its addresses (``auto``, ``host:port``).

    Ray resolves ``auto`` from files and processes of this machine, whoever owns them. False if nothing listens.
    """
    try:
        host, _, port = _resolved(address).rpartition(":")
    except ConnectionError:  # Ray is not running
        return False
    addresses_here = {
        each.address.partition("%")[0] for addresses in psutil.net_if_addrs().values() for each in addresses
    }
    if not host.startswith("127.") and host.strip("[]") not in {"localhost", *addresses_here}:
        return True  # on another machine
    try:
        listening = (c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
        pids = {c.pid for c in listening if c.laddr and c.laddr.port == int(port)}
        return any(pid is None or psutil.Process(pid).username() != psutil.Process().username() for pid in pids)
    except psutil.Error:
        return True  # unknown


def _resolved(address: str) -> str:
    """Resolve ``auto`` to the address of this machine's Ray. Raises ConnectionError if there is none."""
    if address != "auto":
        return address
    from ray._private.services import canonicalize_bootstrap_address

    return canonicalize_bootstrap_address(address) or address


def _check_reachable(address: str) -> str:
    """Resolve ``auto``; raise OSError if nothing listens there, since `ray.init` would wait for minutes."""
    address = _resolved(address)
    if address.rpartition(":")[2].isdigit():  # otherwise Ray's own message is better
        reach(address)
    return address


def reach(address: str) -> str:
    """Return this machine's address as ``host:port`` sees it. Raises OSError if nothing listens there."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S) as connection:
        return str(connection.getsockname()[0])


def node_types() -> tuple[NodeType, ...]:
    """Return the node types that the joined cluster's autoscaler starts; empty: none, or unknown.

    Some platforms report them to Ray. For a cluster of `ray up`, they come from the autoscaler's configuration file,
    which is on the head.
    """
    import ray
    from ray._private.state import state

    if (reported := state.get_cluster_config()) is not None:
        groups = reported.node_group_configs
        return tuple(NodeType(g.min_count, _limited(g.max_count), dict(g.resources)) for g in groups)
    file = _autoscaling_file(ray.get_runtime_context().gcs_address)
    if file is None:
        return ()
    try:
        import yaml
        from ray.autoscaler._private.util import prepare_config

        config = prepare_config(yaml.safe_load(file.read_text()))
        return tuple(
            NodeType(
                each.get("min_workers", 0),
                _limited(min(each["max_workers"], config["max_workers"])),
                each.get("resources", {}),
                each.get("labels", {}),
            )
            for each in config["available_node_types"].values()
        )
    except Exception:  # another user's file, or another Ray version
        return ()


def _limited(count: int) -> int:
    return MAX_GROWTH if count < 0 else min(count, MAX_GROWTH)


def _autoscaling_file(gcs_address: str) -> Path | None:
    """Return the configuration file of this address's autoscaler, if it runs on this machine."""
    flag = "--autoscaling-config="
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if f"--gcs-address={gcs_address}" in words:
            for word in words:
                if word.startswith(flag):
                    return Path(word.removeprefix(flag)).expanduser()
    return None


class _NoFolders(list[str]):
    """List of folders that stays empty."""

    def extend(self, _: Iterable[str]) -> None:
        """Do nothing."""


def job_config() -> Any:
    """Return a job configuration with which Ray's workers don't import from the current folder.

    Ray puts that folder first on the path, before its own late imports. Trials get the study's folder from `put_first`.
    """
    from ray.job_config import JobConfig

    config = JobConfig()
    config._py_driver_sys_path = _NoFolders()
    return config


@contextlib.contextmanager
def joined_cluster(address: str) -> Iterator[Cluster]:
    """Connect to a running Ray (``auto``, ``host:port``) and leave it running.

    Raises:
        ClusterError: it can't be reached, or refuses the connection.
    """
    check_address(address)
    import ray

    with contextlib.ExitStack() as stack:
        with _errors_reported(address):
            takes_everybody = stack.enter_context(admitted(_check_reachable(address)))
            ray.init(address=address, job_config=job_config(), log_to_driver=False, logging_level="ERROR")
        reinstall_handlers()
        stack.callback(shut_down)
        yield _as_it_is(Cluster((), is_own=False, node_types=node_types(), takes_everybody=takes_everybody))


@contextlib.contextmanager
def _errors_reported(address: str) -> Iterator[None]:
    """Raise a ClusterError for any error that keeps this process from connecting."""
    try:
        yield
    except SystemExit:  # raised by Ray on SIGTERM
        raise Interrupted(signal.SIGTERM) from None
    except ClusterError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ClusterError(f"no Ray cluster at --address {address}: {reason}", hint=CONNECT_HINT) from error


@dataclass(frozen=True)
class Contact:
    """Access to a running Ray from other machines.

    Attributes:
        address: ``host:port`` of its head.
        from_ip: IP address of this machine as the head sees it.
        takes_everybody: it accepts clients without a token.
    """

    address: str
    from_ip: str
    takes_everybody: bool


def contact(address: str) -> Contact:
    """Return how other machines reach the cluster at the address (``auto``, ``host:port``), without joining it.

    Raises:
        ClusterError: it can't be reached, or only from this machine.
    """
    check_address(address)
    with _errors_reported(address):
        address = _check_reachable(address)
        from_ip = reach(address)
        with admitted(address) as takes_everybody:
            there = Contact(address, from_ip, takes_everybody)
    if ipaddress.ip_address(from_ip).is_loopback:
        hint = "start its head with --node-ip-address=IP, an address that other machines can reach"
        raise ClusterError(f"--address {address}: can be reached only from this machine", hint=hint)
    return there


def _as_it_is(cluster: Cluster) -> Cluster:
    """Return the joined cluster with its current nodes."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    nodes, labels = (tuple(dict(node[key]) for node in alive) for key in ("Resources", "Labels"))
    return replace(cluster, nodes=nodes, labels=labels)


def wait_for_nodes(cluster: Cluster, num_nodes: int, notice: Callable[[str], object]) -> Cluster:
    """Wait up to `NODES_TIMEOUT_S` for the joined cluster to have `num_nodes` nodes; return it with its new nodes.

    Args:
        notice: called with a line whenever nodes have joined.
    """
    until_s = time.monotonic() + NODES_TIMEOUT_S
    num_shown: int | None = None
    while (num := len(cluster.nodes)) < num_nodes and time.monotonic() < until_s:
        if num != num_shown:
            notice(f"waiting for nodes: {num} of {num_nodes} …")
            num_shown = num
        time.sleep(NODES_POLL_S)
        cluster = _as_it_is(cluster)
    if num < num_nodes:
        notice(f"{num} of {units.counted(num_nodes, 'node')} joined within {NODES_TIMEOUT_S:g} s")
    return cluster


def shut_down(timeout_s: float = LEAVE_TIMEOUT_S) -> None:
    """Leave Ray, without waiting for an answer of a lost Ray."""
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
    """Return the result of `raypar.provenance.versions` on each node of the joined cluster, by node address.

    Raises:
        ray.exceptions.GetTimeoutError: a node doesn't answer.
    """
    return on_every_node(provenance.versions, timeout_s=VERSIONS_TIMEOUT_S)


def on_every_node(function: Callable[..., Any], *arguments: Any, timeout_s: float) -> dict[str, Any]:
    """Call a module's function on each node of the joined cluster; return the results by node address.

    Raises:
        ray.exceptions.GetTimeoutError: a node doesn't answer.
    """
    import ray
    from ray import cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    cloudpickle.register_pickle_by_value(sys.modules[function.__module__])  # nodes may have a different raypar, or none
    remote = ray.remote(num_cpus=0)(function)
    answers = {
        node["NodeManagerAddress"]: remote.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(*arguments)
        for node in ray.nodes()
        if node["Alive"]
    }
    return dict(zip(answers, ray.get(list(answers.values()), timeout=timeout_s), strict=True))
