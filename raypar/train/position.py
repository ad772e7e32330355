"""Position of a rank in its collective operations, to find ranks that wait for others in vain.

torch counts the collective operations that a rank has begun in each process group. A rank that begins one more than a
finished rank would wait until the time-out of the group, half an hour. With gloo, but not with NCCL, point-to-point
operations count too.
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
STANDS_S = 20.0  # after this time without movement, a rank reports its position repeatedly
MAX_CPU_SHARE = 0.1  # of a core: a process that waits in a collective operation of gloo uses no CPU
# Parts of torch in which a rank waits for others.
COLLECTIVE = ("torch/distributed/", "torch/nn/parallel/", "torch/autograd/", "torch/_tensor.py")
OBSERVER = str(Path(__file__).parents[1] / "observe")  # its functions are between torch's and the user's
NAMES = {"_engine_run_backward": "backward"}


@dataclass(frozen=True)
class Position:
    """Position of a rank.

    Attributes:
        calls: collective operations that it has begun, by process group.
        is_out: it begins no further operations, because it has left its loop, or waits for another rank by other means.
        has_left: it has left its loop, without being stopped at a report.
        stands_s: seconds since its last movement; 0: it moves.
        operation: torch's name of the operation that it waits in (``backward``, ``barrier``); empty: not in torch.
        place: line of the user's code, ``train.py:12`` or ``train, line 12``; empty: unknown.
    """

    calls: Mapping[str, int] = field(default_factory=dict)
    is_out: bool = False
    has_left: bool = False
    stands_s: float = 0.0
    operation: str = ""
    place: str = ""


def calls() -> dict[str, int]:
    """Return the number of collective operations that this process has begun in each of its process groups."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    with contextlib.suppress(Exception):  # groups that are being destroyed; a torch without these names
        world = c10d._world
        return {world.pg_names[group]: group._get_sequence_number_for_group() for group in list(world.pg_map)}
    return {}


class PositionWatch(threading.Thread):
    """Thread that reports the position of the main thread once it has not moved for a while.

    Args:
        send: receives a function that returns the position. While a report blocks it, the position is not checked.
        on_cpu: the rank trains on the CPU. A rank on a GPU may use its core while it waits, in any code.
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
        """Return the position if there is one to report."""
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
        if not frame.f_code.co_filename.startswith(OBSERVER):
            yield frame
        frame = frame.f_back


def _operation(frames: list[FrameType]) -> str:
    """Return torch's name of the operation of the innermost frame; empty if it can't be one that waits."""
    if not frames or not any(part in frames[0].f_code.co_filename for part in COLLECTIVE):
        return ""
    name = frames[0].f_code.co_name
    return NAMES.get(name, name)


def _place(frames: list[FrameType]) -> str:
    """Return the innermost line outside torch and other installed packages."""
    for frame in frames:
        path = Path(frame.f_code.co_filename)
        if not {"site-packages", "dist-packages"} & {*path.parts}:
            # Code that was pickled by value has no file.
            return f"{path.name}:{frame.f_lineno}" if path.suffix else f"{frame.f_code.co_name}, line {frame.f_lineno}"
    return ""
