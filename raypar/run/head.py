"""Whether the head of a private Ray is alive: without it Ray waits for a minute, and then ends this process unasked."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping

from raypar.errors import ClusterError
from raypar.run.interruption import break_off, give_up
from raypar.run.processes import is_running

LOOK_EVERY_S = 0.25
GRACE_S = 15.0
NAMES = {"gcs_server": "its head, gcs_server", "raylet": "its raylet"}
LOST = "Ray was lost: {} ended (process {})"
LOST_HINT = "it was killed, or ran out of memory: `dmesg` tells of the latter"


class HeadWatch:
    """Looks after the processes that Ray can't do without, and breaks the study off where one ends.

    Attributes:
        lost: which one has ended; empty as long as all are there.
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self.lost = ""
        self._pids = pids
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
            self.lost = self.lost or self._ended()

    def _look(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            self.lost = self._ended()
            if self.lost:
                error = ClusterError(self.lost, hint=LOST_HINT)
                if break_off(error) and not self._over.wait(GRACE_S):
                    give_up(error)
                return

    def _ended(self) -> str:
        for name, pid in self._pids.items():
            if not is_running(pid):
                return LOST.format(NAMES.get(name, name), pid)
        return ""


def head_processes() -> dict[str, int]:
    """Of the Ray that this process has started: the ids of the processes that it can't do without."""
    from ray._private import worker

    node = worker._global_node
    if node is None:
        return {}
    return {name: node.all_processes[name][0].process.pid for name in NAMES if name in node.all_processes}
