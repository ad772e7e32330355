"""Studies as jobs of a cluster (Ray Jobs): submitted, followed and stopped through the dashboard of its head.

The job is a `raypar study` on the head, so that nothing of a study depends on who has submitted it. It runs in a folder
of the study's own in the head's home: Ray removes what has travelled when the job is over, and a store must outlive it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from raypar.errors import ClusterError, RayparError, cut, shortened
from raypar.masking import masked
from raypar.run.authentication import admitted

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
TUNNEL_HINT = (
    "the dashboard listens on the head alone: `ray attach cluster.yaml -p 8265` or "
    "`ssh -N -L 8265:127.0.0.1:8265 HEAD` brings it to http://127.0.0.1:8265"
)
OVERRIDES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # Ray would take them instead of what it is given

TALKATIVE = (  # of every upload, and of the end
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
)


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


def is_dashboard(address: str | None) -> bool:
    """Whether it is the address of a dashboard, and not of a Ray."""
    return address is not None and address.startswith(("http://", "https://"))


def check_dashboard(address: str) -> None:
    """Raises ClusterError for what is no address of a dashboard; looks for none."""
    hint = "write http://127.0.0.1:8265"
    if not is_dashboard(address):
        raise ClusterError(f"--address {shortened(masked(address))}: is no dashboard, http://host:port", hint=hint)
    try:
        parts = urlsplit(address)
        is_one = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_one = False
    if not is_one or parts.path.strip("/") or parts.query or parts.fragment:
        raise ClusterError(f"--address {shortened(masked(address))}: is no http://host:port", hint=hint)
    if parts.username is not None or parts.password is not None:
        what = "is no place for a password, since command lines can be seen"
        raise ClusterError(
            f"--address {masked(address)}: {what}", hint="give the cluster's token in RAY_AUTH_TOKEN_PATH"
        )


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


class Jobs:
    """The studies of one cluster; from `connected`."""

    def __init__(self, client: Any, address: str) -> None:
        self._client = client
        self._address = address

    def submit(self, study: str, folder: Path, command: str, environment: Mapping[str, str]) -> str:
        """Start a study; what it needs is in the folder. Returns the job's id.

        Args:
            environment: can be seen by all who use the cluster.
        """
        job_id = f"raypar-{uuid.uuid4().hex[:12]}"
        with self._told():
            self._client.submit_job(
                entrypoint=command,
                submission_id=job_id,
                runtime_env={
                    "working_dir": str(folder),
                    "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S), **environment},
                },
                metadata={STUDY_KEY: study},
            )
        return job_id

    def studies(self) -> dict[str, Job]:
        """The job of each study that was submitted here: the latest of those that run, or else the latest of all."""
        with self._told():
            details = [each for each in self._client.list_jobs() if STUDY_KEY in (each.metadata or {})]
        found: dict[str, Job] = {}
        # Two clients may submit a study at the same moment: neither is to run unseen.
        for job in sorted(map(_job, details), key=lambda job: (job.is_over, -job.submitted_at)):
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
    """The studies of the cluster whose dashboard is at the address.

    Args:
        notice: gets what there is to say about the cluster.

    Raises:
        ClusterError: there is none, or it doesn't take us.
    """
    check_dashboard(address)
    try:
        import aiohttp  # noqa: F401
        import requests  # noqa: F401
        from ray.job_submission import JobSubmissionClient  # noqa: F401
    except ImportError as error:
        hint = "pip install 'raypar[client]'"
        raise ClusterError(f"--address {address}: {error.name} is missing here", hint=hint) from None
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    with admitted(address, _refuses) as takes_everybody:
        try:
            client = _client(address)
        except Exception as error:
            raise ClusterError(
                f"no Ray dashboard at --address {address}: {cut(str(error))}", hint=TUNNEL_HINT
            ) from error
        if takes_everybody:
            notice(
                f"the Ray at {address} runs the code of whoever reaches it: it asks for no token "
                "(start it with RAY_AUTH_MODE=token)"
            )
        yield Jobs(client, address)


def _refuses(address: str) -> bool:
    from ray.exceptions import AuthenticationError

    try:
        _client(address).list_jobs()
    except AuthenticationError:
        return True
    except Exception:
        return False  # something else is wrong, which is told when we connect
    return False


def _client(address: str) -> Any:
    from ray.job_submission import JobSubmissionClient

    hidden = {name: os.environ.pop(name) for name in OVERRIDES if name in os.environ}
    try:
        return JobSubmissionClient(address)
    finally:
        os.environ.update(hidden)
