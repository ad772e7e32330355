"""Private Ray, started for one study on this machine and always stopped with all its processes."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from raypar.errors import BrokeOff, ClusterError
from raypar.masking import secret_variables
from raypar.run.auth import own_token
from raypar.run.cluster import TRAIN_ENVIRONMENT, Cluster, job_config, shut_down
from raypar.run.watch import NAMES, watch_of_own
from raypar.scratch import make_folder, remove_folder
from raypar.signals import Interrupted, abort_reason, end_descendants, raise_again, reinstall_handlers
from raypar.trace import mark
from raypar.train.affinity import CAN_PIN, ProcessTree, pin

OBJECT_STORE_BYTES = 200 * 1024**2  # raypar passes small messages only
SHUTDOWN_TIMEOUT_S = 20.0
RAY_SOCKET_LENGTH = 67  # of the longest: ray/session_2026-01-31_12-59-59_123456_1234567/sockets/plasma_store
DEFAULTS = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray records each call for the dashboard, which is off: the head's memory would grow with the trials.
    # (Without any records, this process segfaults when Ray loses its head: Ray 2.60.)
    "RAY_task_events_max_num_task_in_gcs": "1000",
    "RAY_task_events_max_dropped_task_attempts_tracked_per_job_in_gcs": "1000",
}
UNUSED_SERVICES = ("start_monitor", "start_log_monitor", "start_api_server")  # methods of Ray's Node
LOST_TIMEOUT_S = 2.0  # Ray ends this process a minute after it has lost its head
# Several attempts: processes that are ending may still write into the folder.
CLEAN_UP = 'read line || { kill -9 "$@"; for i in 1 2 3 4 5; do rm -rf -- "$0" && break; sleep 1; done; }'
AGENTS = ("ray::DashboardAgent", "dashboard/agent.py", "ray::RuntimeEnvAgent", "runtime_env/agent/main.py")


@contextlib.contextmanager
def private_ray(machine: Cluster) -> Iterator[ProcessTree]:
    """Run a private Ray that listens on loopback only, with its own token and without secrets.

    Yields this process and Ray's.

    Args:
        machine: result of `this_machine`.

    Raises:
        ClusterError: Ray doesn't start.
        BrokeOff: Ray was lost, possibly while it was starting.
    """
    before = os.sched_getaffinity(0) if CAN_PIN else set()
    os.environ.update(TRAIN_ENVIRONMENT)  # Ray's processes inherit it
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    older = frozenset(child.pid for child in psutil.Process().children())
    with private_folder() as folder, own_token(folder):
        processes: dict[str, int] = {}
        is_up = threading.Event()
        watch = watch_of_own(processes, is_up.is_set)
        try:
            with watch.watching():
                _start_ray(int(machine.num_cpus), int(machine.nodes[0].get("GPU", 0)), folder / "ray", processes)
                is_up.set()
                with _leavings_end_with_us(folder):
                    yield ProcessTree(os.getpid(), older)
        except KeyboardInterrupt:
            if not isinstance(lost := abort_reason(), ClusterError):
                raise
            raise BrokeOff.by(lost) from None
        finally:
            if before:  # trials may have moved it
                pin(before)
            _end_ray(older, is_lost=watch.lost)


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Create a folder for Ray's token, sockets and logs that only the user can read.

    It is removed at the end. If Ray did not start or was lost, it stays for its logs, and the next study removes it.
    """
    parent = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    folder = make_folder(parent, socket=RAY_SOCKET_LENGTH)
    try:
        yield folder
    except (ClusterError, BrokeOff):
        raise
    except BaseException:
        remove_folder(folder)
        raise
    remove_folder(folder)


def _start_ray(num_cpus: int, num_gpus: int, folder: Path, processes: dict[str, int]) -> None:
    """Start Ray. Adds the ids of its essential processes to `processes`, by `NAMES`, as soon as they exist."""
    import ray
    from ray._private import ray_constants

    # As on macOS and Windows, where clusters are off, Ray then listens on 127.0.0.1 only. On Linux it would listen on
    # all interfaces.
    ray_constants.ENABLE_RAY_CLUSTER = False
    mark("ray: init")
    try:
        with processes_noted(processes), _without_services(), _without_secrets():
            ray.init(
                address="local",  # without it, init would join any cluster that it finds
                job_config=job_config(),
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(folder),  # Ray makes it accessible to all, but not its parent
            )
    except SystemExit:  # raised by Ray on SIGTERM
        raise Interrupted(signal.SIGTERM) from None
    except Exception as error:
        hint = f"is /dev/shm large enough? Ray's logs are in {folder}/session_latest/logs"
        raise ClusterError(f"Ray does not start here: {error}", hint=hint) from error
    reinstall_handlers()
    raise_again()
    mark("ray: is up")


@contextlib.contextmanager
def processes_noted(processes: dict[str, int]) -> Iterator[None]:
    """Record Ray's processes as they start, in separate process groups.

    Signals to our group (from a closed terminal or `timeout`) must not reach them.
    """
    from ray._private import services

    plain = services.ConsolePopen
    # On other systems Ray needs them in our group, to end them with us.
    group = {"process_group": 0} if sys.platform == "linux" else {}

    def start(command: Sequence[str], *arguments: Any, **flags: Any) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = plain(command, *arguments, **flags, **group)
        if (name := Path(command[0]).name) in NAMES:
            processes[name] = process.pid
        return process

    services.ConsolePopen = start
    try:
        yield
    finally:
        services.ConsolePopen = plain


@contextlib.contextmanager
def _without_services() -> Iterator[None]:
    """Have Ray start neither its autoscaler, nor the dashboard's server, nor what forwards logs to the driver.

    A private Ray uses none of them, and they take half of its start and most of its end.
    """
    from ray._private.node import Node

    def start_none(self: Any, *_: Any, **__: Any) -> None:
        self._webui_url = ""  # Ray's result of `init` has it

    plain = {name: vars(Node)[name] for name in UNUSED_SERVICES if name in vars(Node)}
    for name in plain:
        setattr(Node, name, start_none)
    try:
        yield
    finally:
        for name, method in plain.items():
            setattr(Node, name, method)


def _end_ray(older: frozenset[int], *, is_lost: bool = False) -> None:
    """Shut Ray down, by force if it is lost. `older`: children of this process that don't belong to Ray."""
    import ray

    if is_lost:
        end_descendants(but=older)
        atexit.unregister(ray.shutdown)
    shut_down(LOST_TIMEOUT_S if is_lost else SHUTDOWN_TIMEOUT_S)
    end_descendants(but=older)


@contextlib.contextmanager
def _without_secrets() -> Iterator[None]:
    """Hide secrets from processes started meanwhile: a process listing may show part of their environment."""
    hidden = secret_variables(os.environ)
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


@contextlib.contextmanager
def _leavings_end_with_us(folder: Path) -> Iterator[None]:
    """Have a shell end the raylet's agents and remove the folder if this process is killed.

    Ray's other processes end with this one. The agents would try for a minute to reach a GCS that has ended.
    """
    agents = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            agents += [str(process.pid)] if any(name in " ".join(process.cmdline()) for name in AGENTS) else []
    shell = subprocess.Popen(
        ["/bin/sh", "-c", CLEAN_UP, str(folder), *agents],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        shell.communicate(b"\n")
