"""Detection of ranks that wait in a collective operation for ranks that never join, long before torch's timeout.

The usual cause is an uneven number of batches: one rank is done, or at its report, while another is still in a step.
"""

from __future__ import annotations

from collections.abc import Mapping

from raypar.run.ranks import OF_LOST_RANKS, RankEnd
from raypar.study.trial import Failure, FailureKind
from raypar.train.position import STANDS_S, Position
from raypar.units import listed

DIFFER_S = 45.0  # ranks in different operations for this long are deadlocked; before that, one may be slow
UNEVEN = "uneven numbers of batches per rank: {}"
FIX = (
    "give all ranks the same number of batches (DistributedSampler, drop_last=True), or let finished ranks wait in "
    "torch.distributed.algorithms.join.Join"
)
GLOO_MISMATCH = "Is there a distributed collective mismatch in your code?"
POINT_TO_POINT = ("send", "recv")  # different operations that may match


class Standstill:
    """Last known positions of a trial's ranks.

    Args:
        log_path: log of the trial's first rank.
    """

    def __init__(self, world_size: int, log_path: str) -> None:
        self._world_size, self._log_path = world_size, log_path
        self._out: dict[int, Position] = {}
        self._standing: dict[int, Position] = {}

    def note(self, rank: int, position: Position) -> Failure | None:
        """Note a rank's position; return why the trial can't continue, if that is certain."""
        for positions, is_in in ((self._out, position.is_out), (self._standing, _stands(position))):
            positions.pop(rank, None)
            if is_in:
                positions[rank] = position
        if not self._standing:
            return None
        out, standing = (dict(sorted(positions.items())) for positions in (self._out, self._standing))
        text = _waiting_for(standing, out)
        if not text and len(standing) == self._world_size:
            text = _apart(standing)
        return uneven(text, next(iter(standing)), self._log_path) if text else None


def _stands(position: Position) -> bool:
    return not position.is_out and position.stands_s >= STANDS_S


def _waiting_for(standing: Mapping[int, Position], out: Mapping[int, Position]) -> str:
    """Return a text that names a rank in an operation that a rank outside its loop never begins; empty: unknown."""
    for rank, position in standing.items():
        for other, there in out.items():
            if not _is_ahead(position.calls, there.calls):
                continue
            if there.has_left:
                return f"{_where(rank, position)} waits for rank {other}, which has left its loop"
            if rank == 0:  # whose report the other waits for
                return f"{_where(rank, position)} waits for rank {other}, which waits for its report"
    return ""


def _apart(standing: Mapping[int, Position]) -> str:
    """Return a text that names the different operations of deadlocked ranks; empty: they may still continue."""
    positions = list(standing.values())
    operations = [each.operation for each in positions]
    is_certain = (
        len(set(operations)) > 1
        and all(operations)
        and not any(word in operation for operation in operations for word in POINT_TO_POINT)
        and all(each.stands_s >= DIFFER_S and each.calls == positions[0].calls for each in positions)
    )
    places = [_where(rank, position) for rank, position in standing.items()]
    return f"{listed(places, 4, word='and')} wait for each other" if is_certain else ""


def _where(rank: int, position: Position) -> str:
    words = [
        f"rank {rank}",
        position.operation and f"in {position.operation}",
        position.place and f"({position.place})",
    ]
    return " ".join(filter(None, words))


def uneven(text: str, rank: int, log_path: str, traceback: str = "") -> Failure:
    """Return the failure of a trial whose ranks had uneven numbers of batches."""
    return Failure(FailureKind.ERROR, f"{UNEVEN.format(text)}; {FIX}", rank, traceback, log_path)


def explained(failure: Failure | None, ends: Mapping[int, RankEnd]) -> Failure | None:
    """Return why a trial failed, given the ends of all its ranks.

    If a rank lost its connections to ranks that had left their loops, it was in an operation that they never began.
    Gloo aborts a rank that receives more data than its operation expects.
    """
    if failure is None or (rank := failure.rank) is None:
        return failure
    if failure.kind in OF_LOST_RANKS:
        for other, end in ends.items():
            if end.failure is not None and GLOO_MISMATCH in end.failure.traceback:
                text = f"rank {other} was in another collective operation than the rest"
                return uneven(text, other, end.failure.log_path, end.failure.traceback)
    if failure.kind is not FailureKind.PEER_LOST:
        return failure
    begun = ends[rank].position.calls if rank in ends else {}
    for other, end in ends.items():
        if end.position.has_left and _is_ahead(begun, end.position.calls):
            text = f"rank {rank} was still in a step, or another collective operation, when rank {other} left its loop"
            return uneven(text, rank, failure.log_path, failure.traceback)
    return failure


def _is_ahead(calls: Mapping[str, int], others: Mapping[str, int]) -> bool:
    """Return whether a rank has begun an operation in a group that another member has not begun."""
    return any(count > others.get(group, count) for group, count in calls.items())
