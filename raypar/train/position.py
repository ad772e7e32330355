"""Position of a rank in its collective operations, by which ranks are found that wait for others in vain.

What is counted are the collective operations that a rank has begun in each process group; torch counts them for its own
checks. A rank that has begun one that another rank, which is done, has not, waits for it until the time-out of the
group, half an hour. Point-to-point operations count as well with gloo, not with NCCL.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

EVERY_S = 2.0
STANDS_S = 20.0  # a rank that has not moved for so long says so, again and again
MAX_CPU_SHARE = 0.1  # of a core: a process that waits in a collective operation of gloo takes none
# Parts of torch in which a rank waits for others.
COLLECTIVE = ("torch/distributed/", "torch/nn/parallel/", "torch/autograd/", "torch/_tensor.py")
NAMES = {"_engine_run_backward": "backward"}


@dataclass(frozen=True)
class Position:
    """Position of a rank.

    Attributes:
        calls: collective operations that it has begun, by process group.
        is_out: it begins no more: it has left its loop, or waits for another rank outside of the groups.
        has_left: it has left its loop, not stopped by a report.
        stands_s: seconds for which it has not moved; 0: it moves.
        operation: what it stands in (``backward``, ``barrier``), as torch names it; empty: it is not in torch's code.
        place: line of the user's code, ``train.py:12`` or ``train, line 12``; empty: unknown.
    """

    calls: Mapping[str, int] = field(default_factory=dict)
    is_out: bool = False
    has_left: bool = False
    stands_s: float = 0.0
    operation: str = ""
    place: str = ""


def calls() -> dict[str, int]:
    """Return how many collective operations this process has begun in each of its process groups."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    with contextlib.suppress(Exception):  # groups that are being destroyed; a torch without these names
        world = c10d._world
        return {world.pg_names[group]: group._get_sequence_number_for_group() for group in list(world.pg_map)}
    return {}


class PositionWatch(threading.Thread):
    """Thread that says where the main thread stands, once it has not moved for a while.

    Args:
        send: gets the position. While it is held off, by a report, nobody looks.
        on_cpu: the rank trains on the CPU. A GPU's rank may take its core while it waits, and stands anywhere.
    """

    def __init__(self, send: Callable[[Callable[[], Position | None]], None], *, on_cpu: bool) -> None:
        super().__init__(daemon=True, name="position-watch")
        self._send, self._on_cpu = send, on_cpu
        self._main = threading.main_thread().ident
        self._over = threading.Event()
        self._seen: object = None  # where the main thread was
        self._since_s = self._cpu_s = 0.0
        self._is_said = False

    def run(self) -> None:
        while not self._over.wait(EVERY_S):
            self._send(self._look)

    def close(self) -> None:
        self._over.set()
        self.join()

    def _look(self) -> Position | None:
        """Return what is to be said now, if anything."""
        now_s, cpu_s, begun = time.monotonic(), time.process_time(), calls()
        frames = list(_frames(sys._current_frames().get(self._main or 0)))
        seen = (begun, [(id(frame), frame.f_lasti) for frame in frames])
        operation = _operation(frames)
        is_busy = self._on_cpu and (cpu_s - self._cpu_s > MAX_CPU_SHARE * EVERY_S or not operation)
        self._cpu_s = cpu_s
        if seen != self._seen or is_busy:
            self._seen, self._since_s = seen, now_s
            was_said, self._is_said = self._is_said, False
            return Position(begun) if was_said else None
        if now_s - self._since_s < STANDS_S:
            return None
        self._is_said = True
        return Position(begun, stands_s=now_s - self._since_s, operation=operation, place=_place(frames))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _operation(frames: list[FrameType]) -> str:
    """Return torch's name of the operation that the innermost frame belongs to; empty where it may not wait in one."""
    if not frames or not any(part in frames[0].f_code.co_filename for part in COLLECTIVE):
        return ""
    name = frames[0].f_code.co_name
    return NAMES.get(name, name)


def _place(frames: list[FrameType]) -> str:
    """Return the innermost line that is neither torch's nor of another installed package."""
    for frame in frames:
        path = Path(frame.f_code.co_filename)
        if not {"site-packages", "dist-packages"} & {*path.parts}:
            # Code that was pickled by value has no file.
            return f"{path.name}:{frame.f_lineno}" if path.suffix else f"{frame.f_code.co_name}, line {frame.f_lineno}"
    return ""
