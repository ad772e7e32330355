"""Studies as Ray jobs: packed, submitted, followed and stopped through the head's dashboard.

The job is a `raypar study` on the head, so that nothing of a study depends on who has submitted it. It runs in a folder
of the study's own in the head's home: Ray removes what has travelled when the job is over, and a store must outlive it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from raypar import units
from raypar.errors import ClusterError, RayparError, cut, shortened
from raypar.masking import masked
from raypar.run.auth import admitted
from raypar.scratch import scratch_folder
from raypar.search_path import is_reserved, owner_of

TUNNEL_HINT = (
    "the dashboard listens on the head alone: `ray attach cluster.yaml -p 8265` or "
    "`ssh -N -L 8265:127.0.0.1:8265 HEAD` brings it to http://127.0.0.1:8265"
)
CONNECT_TIMEOUT_S = 4.0
ANSWER_TIMEOUT_S = 4.0
OVERRIDES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # Ray would take them instead of what it is given
# They write of every upload, and of the end.
TALKATIVE = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
)


def is_dashboard(address: str | None) -> bool:
    """Return whether it is the address of a dashboard, not of a Ray."""
    return address is not None and address.startswith(("http://", "https://"))


def check_dashboard(address: str) -> None:
    """Raise ClusterError for what is no address of a dashboard; nothing is contacted."""
    wrong, hint = "", "write http://127.0.0.1:8265"
    try:
        parts = urlsplit(address)
        is_host = bool(parts.hostname) and parts.port != 0 and not parts.path.strip("/")
        if not is_dashboard(address):
            wrong = "is no dashboard, http://host:port"
        elif not is_host or parts.query or parts.fragment:
            wrong = "is no http://host:port"
        elif parts.username is not None or parts.password is not None:
            wrong = "is no place for a password, since command lines can be seen"
            hint = "give the cluster's token in RAY_AUTH_TOKEN_PATH"
    except ValueError:  # its port is no number
        wrong = "is no http://host:port"
    if wrong:
        raise ClusterError(f"--address {shortened(masked(address))}: {wrong}", hint=hint)


@contextlib.contextmanager
def connected(address: str, notice: Callable[[str], object]) -> Iterator[Jobs]:
    """Connect to the studies of the cluster whose dashboard is at the address.

    Args:
        notice: gets warnings about the cluster.

    Raises:
        ClusterError: there is none, or it refuses us.
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
    with contextlib.ExitStack() as stack:
        try:
            _check_answers(address)
            takes_everybody = stack.enter_context(admitted(address, lambda address: _client(address).list_jobs()))
            client = _client(address)
        except ClusterError:
            raise
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


def _check_answers(address: str) -> None:
    """Raise TimeoutError where nothing answers in time: Ray's client would wait without end."""
    import requests

    try:
        requests.get(address, timeout=(CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S), stream=True).close()
    except requests.Timeout:
        raise TimeoutError(f"nothing answers within {CONNECT_TIMEOUT_S + ANSWER_TIMEOUT_S:g} s") from None
    except requests.RequestException:
        return  # Ray's own message is better


def _client(address: str) -> Any:
    from ray.job_submission import JobSubmissionClient

    hidden = {name: os.environ.pop(name) for name in OVERRIDES if name in os.environ}
    try:
        return JobSubmissionClient(address)
    finally:
        os.environ.update(hidden)


# What one message of Ray can hold, and so a working_dir.
MAX_BYTES = 500 * 1024**2
_OWN = ("mlflow.db", "mlflow.db-wal", "mlflow.db-shm", "mlflow.db-journal", "mlruns", "mlartifacts")
_MADE = frozenset({"__pycache__", "node_modules", "venv", *_OWN})
_PRIVATE = (".pem", ".key", ".pyc")
TOO_LARGE_HINT = (
    "list what a study doesn't need in a .gitignore beside it, or give the study a folder of its own; data that is on "
    "the cluster already is named with --data-dir"
)


def pack(study_file: Path, modules: Collection[Path], to: Path) -> tuple[Path, ...]:
    """Copy what travels with a study into a folder.

    That is the study file, the local modules that it imported, and what else lies in its folder, but for hidden files,
    virtual environments, stores, keys, and what git ignores.

    Args:
        study_file: absolute.
        modules: files of the study's folder; they travel even where git ignores them.
        to: an empty folder.

    Returns:
        The copied files, relative to the folder.

    Raises:
        RayparError: it is more than Ray takes, has modules that would hide Python's there, or is a folder that is no
            study's.
    """
    folder = study_file.parent
    if folder in (Path.home(), Path(folder.anchor)):
        raise RayparError(
            f"{study_file}: lies in {folder}, and what lies beside a study travels with it",
            hint="give the study a folder of its own",
        )
    not_ignored = _not_ignored(folder)
    files: list[Path] = []
    sizes: Counter[str] = Counter()
    for path in _files(folder):
        if not_ignored is None or path in not_ignored or path in {study_file, *modules}:
            files.append(path.relative_to(folder))
            sizes[files[-1].parts[0]] += path.stat().st_size
    if sizes.total() > MAX_BYTES:
        largest = ", ".join(f"{name} ({units.size(size)})" for name, size in sizes.most_common(3))
        beside = f"what lies beside it is {units.size(sizes.total())}"
        raise RayparError(
            f"{study_file}: {beside}, and Ray takes {units.size(MAX_BYTES)}: {largest}", hint=TOO_LARGE_HINT
        )
    # Ray puts the folder into PYTHONPATH on the cluster, before anything else.
    modules_there = {name.stem for name in files if name.suffix == ".py" and len(name.parts) == 1}
    packages = {name.parts[0] for name in files if name.parts[1:] == ("__init__.py",)}
    if hiding := sorted(filter(is_reserved, modules_there | packages)):
        names = " and ".join(f"the module `{name}` {owner_of(name)}" for name in hiding)
        hint = "rename the file of that name, or list it in a .gitignore beside the study"
        raise RayparError(f"{study_file}: what travels with it hides {names} on the cluster", hint=hint)
    for name in files:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(folder / name, to / name)
        except OSError as error:
            hint = "make it readable, or list it in a .gitignore beside the study"
            raise RayparError(f"{folder / name}: can't be read: {error.strerror}", hint=hint) from None
    return tuple(files)


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files below, without those that never travel; links to folders are not followed."""

    def may_travel(path: Path) -> bool:
        is_private = path.name.startswith(".") or path.suffix in _PRIVATE
        return not (is_private or path.name in _MADE or (path / "pyvenv.cfg").exists())

    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if may_travel(Path(root, name)))
        paths = (Path(root, name) for name in sorted(files))
        yield from (path for path in paths if may_travel(path) and path.is_file())


def _not_ignored(folder: Path) -> frozenset[Path] | None:
    """Return the files below that git doesn't ignore, in a repository or not; None without git."""

    def git(*arguments: str) -> bytes | None:
        command = ["git", "-C", str(folder), *arguments]
        try:
            return subprocess.run(command, capture_output=True, check=True, timeout=60, stdin=subprocess.DEVNULL).stdout
        except (OSError, subprocess.SubprocessError):
            return None

    list_files = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = git(*list_files)
    if names is None:
        with scratch_folder() as empty:
            git("init", "--bare", "--quiet", str(empty))
            names = git(f"--git-dir={empty}", f"--work-tree={folder}", *list_files)
    return None if names is None else frozenset(folder / os.fsdecode(name) for name in names.split(b"\0") if name)


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
    """A study on a cluster."""

    id: str
    study: str
    status: str  # PENDING, RUNNING, or how it ended: STOPPED, SUCCEEDED, FAILED
    message: str  # Ray's own, of one that failed
    exit_code: int | None  # of the study; None while it runs, where it was stopped, or never started
    submitted_at: float  # Unix time

    @property
    def is_over(self) -> bool:
        return self.status in ("STOPPED", "SUCCEEDED", "FAILED")


def command_on_head(study: str, file_name: str, flags: Sequence[str]) -> str:
    """Return the shell command that runs a study on the head, started in the folder that has travelled.

    ``~/`` at the start of a word is the head's home.
    """

    def quoted(word: str) -> str:
        return f'"$HOME"/{shlex.quote(word[2:])}' if word.startswith("~/") else shlex.quote(word)

    folder = f'"$HOME"/{STUDIES}/{shlex.quote(study)}'
    words = " ".join(quoted(word) for word in ("--address", "auto", *flags))
    return (
        f'travelled="$PWD" && mkdir -p {folder} && cd {folder} && PATH="$PATH:{USUAL_BIN}" '
        f'exec raypar study "$travelled"/{shlex.quote(file_name)} {words}'
    )


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
        with self._requesting():
            details = self._client.list_jobs()
            running = self._latest(details).get(study)
            if running is not None and not running.is_over:
                raise RunsAlready(study)
            # Of clients that have seen the same jobs only the first one gets the next number.
            job_id = _next_id(study, [each.submission_id or "" for each in details])
            variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S), **environment}
            try:
                self._client.submit_job(
                    entrypoint=command,
                    submission_id=job_id,
                    runtime_env={"working_dir": str(folder), "env_vars": variables},
                    metadata={STUDY_KEY: study},
                )
            except RuntimeError as error:
                if f"submission_id {job_id} already exists" in str(error):
                    raise RunsAlready(study) from error
                raise
        return job_id

    def studies(self) -> dict[str, Job]:
        """Return each study's job: the latest of those that run, or else the latest of all."""
        with self._requesting():
            return self._latest(self._client.list_jobs())

    @staticmethod
    def _latest(details: Sequence[Any]) -> dict[str, Job]:
        jobs = [_job(each) for each in details if STUDY_KEY in (each.metadata or {})]
        return {job.study: job for job in sorted(jobs, key=lambda job: (not job.is_over, job.submitted_at))}

    def stop(self, job_id: str) -> int:
        """Ask it to stop, as Ctrl-C would; return the number of characters that it has written before."""
        with self._requesting():
            num_logged = len(self._client.get_job_logs(job_id) or "")
            self._client.stop_job(job_id)
        return num_logged

    def follow(self, job_id: str, write: Callable[[str], object], skip: int = 0) -> Job:
        """Pass on what a study writes, until it is over; reconnect where the connection is lost.

        Args:
            write: called with whole lines.
            skip: characters at the beginning to leave out.

        Raises:
            ClusterError: the dashboard can't be reached any more.
        """
        import asyncio

        import aiohttp

        num_written = skip
        lost_at: float | None = None

        async def take() -> None:
            nonlocal num_written
            num_read = 0  # from the log's beginning
            async for chunk in self._client.tail_job_logs(job_id):
                num_read += len(chunk)
                if num_read > num_written:
                    write(chunk[num_written - num_read :])
                    num_written = num_read

        while True:
            before = num_written
            try:
                asyncio.run(take())
                job = _job(self._client.get_job_info(job_id))
                if job.is_over:
                    return job
                lost_at = None
            except (RuntimeError, OSError, aiohttp.ClientError) as error:
                if lost_at is None or num_written > before:
                    lost_at = time.monotonic()
                if time.monotonic() - lost_at > RECONNECT_S:
                    raise ClusterError(
                        f"--address {self._address}: the dashboard was lost: {cut(str(error))}",
                        hint="a study goes on as long as its cluster does: `raypar cluster attach` follows it again",
                    ) from None
            time.sleep(1.0)

    @contextlib.contextmanager
    def _requesting(self) -> Iterator[None]:
        """Turn any error of a request into one message."""
        try:
            yield
        except RayparError:
            raise
        except Exception as error:
            raise ClusterError(f"--address {self._address}: {cut(str(error))}", hint=TUNNEL_HINT) from error


def _next_id(study: str, ids: Sequence[str]) -> str:
    """Return the id after those of the study's jobs so far; it becomes part of an address and of a file's name."""
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
        exit_code=128 - code if code is not None and code < 0 else code,  # a signal's, as in a shell
        submitted_at=(details.start_time or 0) / 1000,
    )
