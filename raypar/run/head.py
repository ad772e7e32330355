"""Whether Ray's head is alive: without it Ray waits for a minute, and then ends this process unasked."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from raypar.errors import ClusterError
from raypar.signals import abort, exit_now, is_running

GRACE_S = 15.0
CONNECT_TIMEOUT_S = 5.0
PATIENCE_S = 20.0  # a head that is away for less comes back unnoticed, as far as Ray can do without it
CLUSTER_HINT = "start the cluster again: finished trials are kept"
NAMES = {"gcs_server": "its head, gcs_server", "raylet": "its raylet"}


class HeadWatch:
    """Looks after what Ray can't do without, and breaks the study off where it is lost.

    Args:
        loss: what is lost; None as long as all is there.
        every_s: how often to ask.

    Attributes:
        lost: whether that was seen.
    """

    def __init__(self, loss: Callable[[], ClusterError | None], *, every_s: float) -> None:
        self.lost = False
        self._loss, self._every_s = loss, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True, name="head-watch")

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()
            self.lost = self.lost or self._loss() is not None

    def _look(self) -> None:
        while not self._over.wait(self._every_s):
            if (loss := self._loss()) is not None:
                self.lost = True
                if abort(loss) and not self._over.wait(GRACE_S):  # the main thread waits in foreign code
                    exit_now(1, f"error: {loss}\nbroke off; `raypar resume` runs the rest\n")
                return


def watch_of_own(pids: Mapping[str, int]) -> HeadWatch:
    """Of a Ray that this process has started; args: from `head_processes`."""

    def loss() -> ClusterError | None:
        for name, pid in pids.items():
            if not is_running(pid):
                hint = "it was killed, or ran out of memory: `dmesg` tells of the latter"
                return ClusterError(f"Ray was lost: {NAMES.get(name, name)} ended (process {pid})", hint=hint)
        return None

    return HeadWatch(loss, every_s=0.25)


def watch_of_joined() -> HeadWatch:
    """Of the cluster that this process has joined as a driver."""
    import ray

    return watch_of_cluster(ray.get_runtime_context().gcs_address)


def watch_of_cluster(address: str, patience_s: float = PATIENCE_S) -> HeadWatch:
    """Of a cluster whose head listens at ``host:port``; lost is one that can't be reached for so long.

    By then Tune may wait for it in a call that nothing interrupts: the process then ends without a report.
    """
    host, _, port = address.rpartition(":")
    last_s = time.monotonic()

    def loss() -> ClusterError | None:
        nonlocal last_s
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        except OSError:
            if time.monotonic() - last_s < patience_s:
                return None
            return ClusterError(f"Ray was lost: its head at {address} can't be reached any more", hint=CLUSTER_HINT)
        last_s = time.monotonic()
        return None

    return HeadWatch(loss, every_s=min(CONNECT_TIMEOUT_S, patience_s / 4))


def head_processes() -> dict[str, int]:
    """Of the Ray that this process has started: the ids of the processes that it can't do without."""
    from ray._private import worker

    node = worker._global_node
    if node is None:
        return {}
    return {name: node.all_processes[name][0].process.pid for name in NAMES if name in node.all_processes}
