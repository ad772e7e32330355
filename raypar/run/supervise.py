"""One rank from its start to its end: feed it its job, pass its reports on, and say how it ended."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from raypar.run.processes import RankProcess
from raypar.study.trial import Failure, FailureKind
from raypar.train.job import RankJob, RankOutcome

EXIT_GRACE_S = 5.0
LOG_TAIL_CHARS = 4000


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended: with an outcome, or with a failure.

    Attributes:
        was_killed: from here, so that its end explains nothing.
    """

    outcome: RankOutcome | None = None
    failure: Failure | None = None
    was_killed: bool = False


def cause(first: Failure | None, end: RankEnd) -> Failure | None:
    """Why a trial failed, as far as is known when one more of its ranks has ended.

    A rank that lost its peers may be heard before the peer that died, which is why it did.

    Args:
        first: what was known before.
    """
    if first is None or (first.kind is FailureKind.PEER_LOST and not end.was_killed):
        return end.failure or first
    return first


def supervise(process: RankProcess, job: RankJob, on_report: Callable[[int, Mapping[str, float]], bool]) -> RankEnd:
    """Run a started rank to its end.

    Args:
        on_report: gets the index and the metrics of each report; its answer (go on?) goes back to the rank.

    Killing the process from another thread ends this, with a failure.
    """
    end: RankEnd | None = None
    kills_before = num_memory_kills()
    try:
        process.connection.send(job)
        index = 0
        while end is None:
            match process.connection.recv():
                case ("report", metrics):
                    process.connection.send(on_report(index, metrics))
                    index += 1
                case ("done", outcome):
                    end = RankEnd(outcome=outcome)
                case ("error", kind, name, message, traceback):
                    text = f"{name}: {message}" if message else name
                    end = RankEnd(failure=Failure(kind, text, job.rank, traceback, job.log_path))
    except (EOFError, OSError):
        pass  # the process is gone; its exit code says more
    code = process.join(EXIT_GRACE_S)
    if code is None:
        process.kill()
        code = process.join(EXIT_GRACE_S)
    process.connection.close()
    # The kernel counts for the whole machine: what it killed may have been another's, in the same moment.
    took_too_much = not process.was_killed and num_memory_kills() > kills_before
    if end is None:
        return RankEnd(failure=_crash(job, code, took_too_much), was_killed=process.was_killed)
    if took_too_much and end.failure is not None and end.failure.kind is FailureKind.CRASH:  # of one of its loaders
        return RankEnd(failure=replace(end.failure, kind=FailureKind.OUT_OF_MEMORY))
    return end


def _crash(job: RankJob, code: int | None, took_too_much: bool) -> Failure:
    kind = FailureKind.CRASH
    if code == -signal.SIGKILL and took_too_much:
        kind, how = FailureKind.OUT_OF_MEMORY, "was killed by the kernel: the machine, or its group, is out of memory"
    elif code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    else:
        how = f"ended with exit code {code}"
    return Failure(kind, f"rank {job.rank} {how}", job.rank, log_tail(job.log_path), job.log_path)


def num_memory_kills() -> int:
    """How many processes of this machine the kernel has killed for their memory since it started (``oom_kill`` in
    /proc/vmstat, groups with a limit of their own included); always 0 where it doesn't tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def log_tail(log_path: str) -> str:
    """The end of a log, for a failure that left no traceback; empty if there is no log."""
    try:
        return Path(log_path).read_text(errors="replace")[-LOG_TAIL_CHARS:]
    except OSError:
        return ""
