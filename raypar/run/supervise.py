"""One rank from its start to its end: feed it its job, pass its reports on, and say how it ended."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from raypar.run.processes import RankProcess
from raypar.study.trial import Failure, FailureKind
from raypar.train.job import RankJob, RankOutcome

EXIT_GRACE_S = 5.0
LOG_TAIL_CHARS = 4000


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended: with an outcome, or with a failure."""

    outcome: RankOutcome | None = None
    failure: Failure | None = None


def supervise(process: RankProcess, job: RankJob, on_report: Callable[[int, Mapping[str, float]], bool]) -> RankEnd:
    """Run a started rank to its end.

    Args:
        on_report: gets the index and the metrics of each report; its answer (go on?) goes back to the rank.

    Killing the process from another thread ends this, with a failure.
    """
    end: RankEnd | None = None
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
                case ("error", kind, message, traceback):
                    text = f"{kind}: {message}" if message else kind
                    end = RankEnd(failure=Failure(FailureKind.ERROR, text, job.rank, traceback, job.log_path))
    except (EOFError, OSError):
        pass  # the process is gone; its exit code says more
    code = process.join(EXIT_GRACE_S)
    if code is None:
        process.kill()
        code = process.join(EXIT_GRACE_S)
    process.connection.close()
    return end or RankEnd(failure=_crash(job, code))


def _crash(job: RankJob, code: int | None) -> Failure:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        cause = f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    else:
        cause = f"ended with exit code {code}"
    return Failure(FailureKind.CRASH, f"rank {job.rank} {cause}", job.rank, log_tail(job.log_path), job.log_path)


def log_tail(log_path: str) -> str:
    """The end of a log, for a failure that left no traceback; empty if there is no log."""
    try:
        return Path(log_path).read_text(errors="replace")[-LOG_TAIL_CHARS:]
    except OSError:
        return ""
