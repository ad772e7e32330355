"""Studies as jobs of a cluster (Ray Jobs): submitted, followed and stopped through the dashboard of its head.

The job is a `raypar study` on the head, so that nothing of a study depends on who has submitted it. It runs in a folder
of the study's own in the head's home: Ray removes what has travelled when the job is over, and a store must outlive it.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypar.errors import ClusterError, RayparError, cut
from raypar.run.dashboard import TUNNEL_HINT, job_client

STUDIES = "raypar-studies"  # in the head's home
# Read by `raypar study` on the head: the command that submitted it, and so the one that goes on with it.
SUBMITTED_AS = "RAYPAR_SUBMITTED_AS"
STUDY_KEY = "raypar_study"
# A study that is asked to stop ends its trials, sends its records and writes a report. Ray would wait 3 s.
STOP_WAIT_S = 120
RECONNECT_S = 60.0
NO_COMMAND = 127  # a shell's exit code
# Where cluster.yaml installs raypar; a Ray that was started by its path doesn't have it on its own PATH.
USUAL_BIN = "$HOME/venv/bin"
NO_RAYPAR_HINT = "install it there, and start the head's Ray with its environment active: `source venv/bin/activate`"


@dataclass(frozen=True)
class Job:
    """A study on a cluster.

    Attributes:
        status: PENDING, RUNNING, or how it ended: STOPPED, SUCCEEDED, FAILED.
        message: Ray's own, of one that failed.
        exit_code: of the study; None while it runs, where it was stopped, or never started.
        submitted_at: Unix time.
    """

    id: str
    study: str
    status: str
    message: str
    exit_code: int | None
    submitted_at: float

    @property
    def is_over(self) -> bool:
        return self.status in ("STOPPED", "SUCCEEDED", "FAILED")


def command_on_head(study: str, file_name: str, flags: Sequence[str]) -> str:
    """The shell command that runs a study on the head; started in the folder that has travelled.

    ``~/`` at the start of a word is the head's home.
    """
    folder = f'"$HOME"/{STUDIES}/{shlex.quote(study)}'
    words = " ".join(_quoted(word) for word in ("--address", "auto", *flags))
    return (
        f'travelled="$PWD" && mkdir -p {folder} && cd {folder} && PATH="$PATH:{USUAL_BIN}" '
        f'exec raypar study "$travelled"/{shlex.quote(file_name)} {words}'
    )


def _quoted(word: str) -> str:
    return f'"$HOME"/{shlex.quote(word[2:])}' if word.startswith("~/") else shlex.quote(word)


class RunsAlready(ClusterError):
    """A study that is submitted runs on the cluster already."""

    def __init__(self, study: str) -> None:
        super().__init__(f"study `{study}` runs on this cluster already")


class Jobs:
    """The studies of one cluster; from `connected`."""

    def __init__(self, client: Any, address: str) -> None:
        self._client = client
        self._address = address

    def submit(self, study: str, folder: Path, command: str, environment: Mapping[str, str]) -> str:
        """Start a study; what it needs is in the folder. Returns the job's id.

        Args:
            environment: can be seen by all who use the cluster.

        Raises:
            RunsAlready: the study; or another client has submitted it in the same moment.
            ClusterError: the dashboard can't be reached any more.
        """
        with self._told():
            details = self._client.list_jobs()
        running = self._latest(details).get(study)
        if running is not None and not running.is_over:
            raise RunsAlready(study)
        # Of clients that have seen the same jobs only the first one gets the next number.
        job_id = _next_id(study, [each.submission_id or "" for each in details])
        with self._told():
            try:
                self._client.submit_job(
                    entrypoint=command,
                    submission_id=job_id,
                    runtime_env={
                        "working_dir": str(folder),
                        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S), **environment},
                    },
                    metadata={STUDY_KEY: study},
                )
            except RuntimeError as error:
                if f"submission_id {job_id} already exists" in str(error):
                    raise RunsAlready(study) from error
                raise
        return job_id

    def studies(self) -> dict[str, Job]:
        """The job of each study that was submitted here: the latest of those that run, or else the latest of all."""
        with self._told():
            return self._latest(self._client.list_jobs())

    @staticmethod
    def _latest(details: Sequence[Any]) -> dict[str, Job]:
        jobs = [_job(each) for each in details if STUDY_KEY in (each.metadata or {})]
        found: dict[str, Job] = {}
        for job in sorted(jobs, key=lambda job: (job.is_over, -job.submitted_at)):
            found.setdefault(job.study, job)
        return found

    def job(self, job_id: str) -> Job:
        with self._told():
            return _job(self._client.get_job_info(job_id))

    def num_logged(self, job_id: str) -> int:
        """How many characters the study has written by now."""
        with self._told():
            return len(self._client.get_job_logs(job_id) or "")

    def stop(self, job_id: str) -> None:
        """Ask it to stop, as Ctrl-C would; it may go on for a while."""
        with self._told():
            self._client.stop_job(job_id)

    def follow(self, job_id: str, write: Callable[[str], object], skip: int = 0) -> Job:
        """Hand on what a study writes, until it is over; a connection that is lost is made again.

        Args:
            write: called with whole lines.
            skip: so many characters at the beginning are left out.

        Raises:
            ClusterError: the dashboard can't be reached any more.
        """
        import asyncio

        log = _Log(write, skip)
        lost_at: float | None = None
        while True:
            before = log.told
            try:
                asyncio.run(log.take(self._client.tail_job_logs(job_id)))
                job = _job(self._client.get_job_info(job_id))
                if job.is_over:
                    return job
                lost_at = None
            except _lost() as error:
                if lost_at is None or log.told > before:
                    lost_at = time.monotonic()
                if time.monotonic() - lost_at > RECONNECT_S:
                    raise ClusterError(
                        f"--address {self._address}: the dashboard is gone: {cut(str(error))}",
                        hint="a study goes on as long as its cluster does: `raypar attach` follows it again",
                    ) from None
            time.sleep(1.0)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """What goes wrong with a request as one message."""
        try:
            yield
        except RayparError:
            raise
        except Exception as error:
            raise ClusterError(f"--address {self._address}: {cut(str(error))}", hint=TUNNEL_HINT) from error


class _Log:
    """What a study writes, handed on once, however often it is read from its beginning.

    Attributes:
        told: how many characters were handed on, or left out.
    """

    def __init__(self, write: Callable[[str], object], skip: int) -> None:
        self._write = write
        self.told = skip

    async def take(self, chunks: AsyncIterator[str]) -> None:
        read = 0
        async for chunk in chunks:
            read += len(chunk)
            if read > self.told:
                self._write(chunk[self.told - read :])
                self.told = read


def _lost() -> tuple[type[Exception], ...]:
    """What is raised where a connection is lost."""
    import aiohttp

    return (RuntimeError, OSError, aiohttp.ClientError)


def _next_id(study: str, ids: Sequence[str]) -> str:
    """The id after those of the study's jobs so far; it becomes part of an address and of a file's name."""
    stem = f"raypar-{re.sub(r'[^A-Za-z0-9_-]', '_', study)[:80]}-"
    numbers = [int(each[len(stem) :]) for each in ids if re.fullmatch(re.escape(stem) + r"\d+", each, re.ASCII)]
    return f"{stem}{max(numbers, default=0) + 1}"


def _job(details: Any) -> Job:
    code = details.driver_exit_code
    return Job(
        id=details.submission_id,
        study=(details.metadata or {}).get(STUDY_KEY, ""),
        status=str(getattr(details.status, "value", details.status)),
        message=details.message or "",
        exit_code=128 - code if code is not None and code < 0 else code,  # a signal's, as a shell tells it
        submitted_at=(details.start_time or 0) / 1000,
    )


@contextlib.contextmanager
def connected(address: str, notice: Callable[[str], object]) -> Iterator[Jobs]:
    """The studies of the cluster whose dashboard is at the address; what it takes and raises, `job_client` says."""
    with job_client(address, notice) as client:
        yield Jobs(client, address)
