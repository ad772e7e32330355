"""Clusters: this machine, or a Ray cluster that is joined and whose head is monitored."""

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
START_LIMIT_S = 180.0  # of a Ray of our own, which takes 10 s; on a busy machine a minute
NODES_TIMEOUT_S = 120.0
NODES_POLL_S = 0.5
MAX_GROWTH = 1000  # nodes of one type, where an autoscaler has no limit
CONNECT_HINT = "is the cluster up and the address right? Without --address, a local Ray is started"
CLIENT_HINT = "from outside the cluster use --address http://HEAD:8265, on its head --address auto"


@dataclass(frozen=True)
class NodeType:
    """Nodes of one kind that an autoscaler starts.

    Attributes:
        min_count: it always has so many, or is starting them.
        resources: totals of each; empty: only the nodes themselves know them.
        labels: Ray's, of each.
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

    nodes: tuple[Mapping[str, float], ...]  # the totals of each node, ``{"CPU": 8, "GPU": 1}``
    is_own: bool  # nobody else uses it
    node_types: tuple[NodeType, ...] = ()  # what an autoscaler starts
    cores: tuple[Core, ...] | None = None  # what workers can be pinned to; None: only the machines know
    has_mps: bool = False  # there is an Apple GPU
    labels: tuple[Mapping[str, str], ...] = ()  # Ray's, of each node; empty where no node has any
    takes_everybody: bool = False  # it runs the code of whoever reaches it, without a token
    gpu_problem: str = ""  # why torch can't use the GPUs, as far as this process can see

    @property
    def num_cpus(self) -> float:
        return sum(node.get("CPU", 0) for node in self.nodes)

    @property
    def awaits_unknown_nodes(self) -> bool:
        """True while nodes are being started whose resources only they themselves know."""
        return len(self.nodes) < self.num_promised and any(t.min_count and not t.resources for t in self.node_types)

    @property
    def num_promised(self) -> int:
        """Nodes, the head included, that are there or are being started."""
        return 1 + sum(node_type.min_count for node_type in self.node_types)

    @cached_property
    def growth(self) -> tuple[NodeType, ...]:
        """Nodes that the autoscaler may still add, by their type."""
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
        """Totals of each node that is there or that the autoscaler may still add."""
        return (*self.nodes, *(each.resources for each in self.growth))

    @property
    def has_gpu(self) -> bool:
        """True where a node with a GPU is up or being started."""
        promised = (each.resources for each in self.node_types if each.min_count)
        return any(node.get("GPU", 0) for node in (*self.nodes, *promised))

    @property
    def cores_per_gpu(self) -> int | None:
        """Cores that every GPU's worker can have to itself, on whichever node; None: there is no GPU."""
        shapes = set(map(_shape, self.nodes_to_be))
        return min((max(1, int(cpu // gpu)) for cpu, gpu in shapes if cpu >= 1 and gpu >= 1), default=None)

    @property
    def may_grow(self) -> bool:
        return bool(self.growth)

    def refusals(self, placements: Iterable[Placement]) -> dict[Placement, str]:
        """Return the placements that can never run here, with the reason."""
        labels = (*(self.labels or [{}] * len(self.nodes)), *(each.labels for each in self.growth))
        reasons = {placement: refusal(placement, self.nodes_to_be, labels) for placement in placements}
        return {placement: reason for placement, reason in reasons.items() if reason}


def this_machine() -> Cluster:
    """Return what a private Ray would have, without starting it."""
    cores, visible = allowed_cores(), gpus.visible_gpus()
    node = {"CPU": len(cores)} | ({"GPU": len(visible)} if visible else {})
    return Cluster(
        (node,),
        is_own=True,
        cores=topology(cores) if CAN_PIN else (),
        has_mps=sys.platform == "darwin" and platform.machine() == "arm64",
        gpu_problem=(gpus.torch_problem(visible) or "") if visible else "",
    )


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


def is_of_others(address: str) -> bool:
    """Return whether another user of this machine may listen at an address of it (``auto``, ``host:port``).

    Ray finds ``auto`` in files and processes of this machine, whoever's they are. False where nobody listens.
    """
    try:
        host, _, port = _resolved(address).rpartition(":")
    except ConnectionError:  # there is no Ray
        return False
    addresses_here = {
        each.address.partition("%")[0] for addresses in psutil.net_if_addrs().values() for each in addresses
    }
    if not host.startswith("127.") and host.strip("[]") not in {"localhost", *addresses_here}:
        return True  # another machine's, which only the user can know
    try:
        listening = (c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
        pids = {c.pid for c in listening if c.laddr and c.laddr.port == int(port)}
        return any(pid is None or psutil.Process(pid).username() != psutil.Process().username() for pid in pids)
    except psutil.Error:  # the system doesn't say
        return True


def _resolved(address: str) -> str:
    """Return an address, that of the Ray on this machine for ``auto``. Raises ConnectionError where there is none."""
    if address != "auto":
        return address
    from ray._private.services import canonicalize_bootstrap_address

    return canonicalize_bootstrap_address(address) or address


def _check_reachable(address: str) -> str:
    """Resolve ``auto``; raise OSError where nobody listens: `ray.init` would wait for minutes."""
    address = _resolved(address)
    if address.rpartition(":")[2].isdigit():  # otherwise Ray's own message is better
        _connect(address)
    return address


def _connect(address: str) -> str:
    """Return this machine's address as ``host:port`` sees it. Raises OSError where nobody listens there."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S) as connection:
        return str(connection.getsockname()[0])


def node_types() -> tuple[NodeType, ...]:
    """Return what the autoscaler of the joined cluster starts; empty where there is none, or nobody says.

    Some platforms report it to Ray. The autoscaler that `ray up` starts doesn't: its configuration is read, for which
    this process has to be on the head.
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
    except Exception:  # another user's, or of another Ray
        return ()


def _limited(count: int) -> int:
    return MAX_GROWTH if count < 0 else min(count, MAX_GROWTH)


def _autoscaling_file(gcs_address: str) -> Path | None:
    """Return the configuration of the autoscaler of this address, if it runs on this machine."""
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
    """Return a configuration with which Ray's workers don't import from the current folder.

    Ray puts that folder first, before its own late imports. Trials get the study's folder from `put_first`.
    """
    from ray.job_config import JobConfig

    config = JobConfig()
    config._py_driver_sys_path = _NoFolders()
    return config


@contextlib.contextmanager
def joined_cluster(address: str) -> Iterator[Cluster]:
    """Connect to a running Ray (``auto``, ``host:port``), which is left running.

    Raises:
        ClusterError: it can't be reached, or refuses us.
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
    """Raise a ClusterError for whatever keeps this process from connecting."""
    try:
        yield
    except SystemExit:  # Ray's own answer to SIGTERM
        raise Interrupted(signal.SIGTERM) from None
    except ClusterError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ClusterError(f"no Ray cluster at --address {address}: {reason}", hint=CONNECT_HINT) from error


@dataclass(frozen=True)
class Contact:
    """Way for other machines to reach a running Ray.

    Attributes:
        address: of its head, ``host:port``.
        from_ip: this machine's, as the head sees it.
        takes_everybody: without a token.
    """

    address: str
    from_ip: str
    takes_everybody: bool


def contact(address: str) -> Contact:
    """Return how others reach the cluster at the address (``auto``, ``host:port``), without joining it.

    Raises:
        ClusterError: it can't be reached, or from this machine alone.
    """
    check_address(address)
    with _errors_reported(address):
        address = _check_reachable(address)
        from_ip = _connect(address)
        with admitted(address) as takes_everybody:
            there = Contact(address, from_ip, takes_everybody)
    if ipaddress.ip_address(from_ip).is_loopback:
        hint = "start its head with --node-ip-address=IP, an address that other machines can reach"
        raise ClusterError(f"--address {address}: can be reached from this machine alone", hint=hint)
    return there


def _as_it_is(cluster: Cluster) -> Cluster:
    """Return the joined cluster with the nodes that it has now."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    nodes, labels = (tuple(dict(node[key]) for node in alive) for key in ("Resources", "Labels"))
    return replace(cluster, nodes=nodes, labels=labels)


def wait_for_nodes(cluster: Cluster, num_nodes: int, notice: Callable[[str], object]) -> Cluster:
    """Wait until the joined cluster has so many nodes, but no longer than `NODES_TIMEOUT_S`; return it as it is then.

    Args:
        notice: gets a line whenever nodes have joined.
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
    return on_every_node(provenance.versions, timeout_s=VERSIONS_TIMEOUT_S)


def on_every_node(function: Callable[..., Any], *arguments: Any, timeout_s: float) -> dict[str, Any]:
    """Call a module's function on each node of the joined cluster; return the results by the nodes' addresses.

    Raises:
        ray.exceptions.GetTimeoutError: a node doesn't answer.
    """
    import ray
    from ray import cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    cloudpickle.register_pickle_by_value(sys.modules[function.__module__])  # nodes may have another raypar, or none
    remote = ray.remote(num_cpus=0)(function)
    answers = {
        node["NodeManagerAddress"]: remote.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(*arguments)
        for node in ray.nodes()
        if node["Alive"]
    }
    return dict(zip(answers, ray.get(list(answers.values()), timeout=timeout_s), strict=True))


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
                    exit_now(1, f"error: {loss}\nbroke off; `raypar store resume` runs the rest\n")
                return


def watch_of_own(pids: Mapping[str, int], is_up: Callable[[], bool] = lambda: True) -> HeadWatch:
    """Return a monitor of a Ray that this process has started, or starts.

    Args:
        pids: process ids, by `NAMES`; may grow meanwhile.
        is_up: tells whether it has started; it may take so long and no longer.
    """

    begun_s = time.monotonic()

    def loss() -> ClusterError | None:
        ended = next((name for name, pid in list(pids.items()) if not is_running(pid)), None)
        if ended is None:
            if is_up() or time.monotonic() - begun_s < START_LIMIT_S:
                return None
            hint = "is this machine too busy for it? `top` shows what runs"
            return ClusterError(f"Ray has not come up within {units.seconds(START_LIMIT_S)}", hint=hint)
        message = f"Ray was lost: {NAMES[ended]} ended (process {pids[ended]})"
        return ClusterError(message, hint="it was killed, or ran out of memory: `dmesg` shows the latter")

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
