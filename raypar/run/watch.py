"""Monitors of the processes that Ray depends on. They abort a study whose Ray is lost."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from raypar import units
from raypar.errors import ClusterError
from raypar.run.cluster import CONNECT_TIMEOUT_S, reach
from raypar.signals import abort, exit_now, is_running, is_stopped

START_LIMIT_S = 180.0  # for a private Ray, which takes 10 s, or a minute on a busy machine
GRACE_S = 15.0
PATIENCE_S = 20.0  # shorter outages of the head are ignored
STOPPED_LIMIT_S = 30.0  # without its head for a minute, Ray ends this process, and gives no reason
CLUSTER_HINT = "start the cluster again: finished trials are kept"
NAMES = {"gcs_server": "its head, gcs_server,", "raylet": "its raylet"}


class HeadWatch:
    """Monitor of the processes that Ray depends on. Aborts the study if one is lost.

    Args:
        loss: returns the error of a loss; None: nothing is lost.
        every_s: seconds between two calls of `loss`.
    """

    def __init__(self, loss: Callable[[], ClusterError | None], *, every_s: float) -> None:
        self.lost = False  # a loss was noticed
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
                if abort(loss) and not self._over.wait(GRACE_S):  # the main thread is stuck in foreign code
                    exit_now(1, f"error: {loss}\nbroke off; `raypar store resume` runs the rest\n")
                return


def watch_of_own(pids: Mapping[str, int], is_up: Callable[[], bool] = lambda: True) -> HeadWatch:
    """Return a monitor of a Ray that this process has started or is starting.

    Args:
        pids: process ids, by `NAMES`; may grow meanwhile.
        is_up: returns whether Ray has started, which it must within `START_LIMIT_S`.
    """
    begun_s = time.monotonic()
    stopped_since_s: dict[str, float] = {}

    def loss() -> ClusterError | None:
        for name, pid in list(pids.items()):
            lost = f"Ray was lost: {NAMES[name]}"
            if not is_running(pid):
                hint = "it was killed, or ran out of memory: `dmesg` shows the latter"
                return ClusterError(f"{lost} ended (process {pid})", hint=hint)
            if not is_stopped(pid):
                stopped_since_s.pop(name, None)
            elif time.monotonic() - stopped_since_s.setdefault(name, time.monotonic()) >= STOPPED_LIMIT_S:
                problem = f"{lost} was stopped for {units.seconds(STOPPED_LIMIT_S)} (process {pid})"
                return ClusterError(problem, hint="a signal such as SIGSTOP, or a debugger, stopped it")
        if is_up() or time.monotonic() - begun_s < START_LIMIT_S:
            return None
        hint = "this machine may be too busy: `top` shows what runs"
        return ClusterError(f"Ray did not start within {units.seconds(START_LIMIT_S)}", hint=hint)

    return HeadWatch(loss, every_s=0.25)


def watch_of_cluster(address: str = "", patience_s: float = PATIENCE_S) -> HeadWatch:
    """Return a monitor of a cluster whose head listens at ``host:port``.

    At a loss, Tune may be in a call that can't be interrupted. The process then ends without a report.

    Args:
        address: address of the head; empty: the cluster that this process has joined.
        patience_s: seconds after which an unreachable head counts as lost.
    """
    import ray

    address = address or ray.get_runtime_context().gcs_address
    last_s = time.monotonic()

    def loss() -> ClusterError | None:
        nonlocal last_s
        try:
            reach(address)
        except OSError:
            if time.monotonic() - last_s < patience_s:
                return None
            return ClusterError(f"Ray was lost: its head at {address} can no longer be reached", hint=CLUSTER_HINT)
        last_s = time.monotonic()
        return None

    return HeadWatch(loss, every_s=min(CONNECT_TIMEOUT_S, patience_s / 4))
