"""Studies as Ray jobs, submitted, followed and stopped through the dashboard of a cluster's head.

The job is a `raypar study` on the head, so a study doesn't depend on the machine that submitted it. It runs in a folder
in the head's home, since Ray removes the uploaded files when the job is over, and the store must remain.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.errors import ClusterError, RayparError, cut, shortened
from raypar.masking import masked
from raypar.provenance import ignored_by_git
from raypar.run.auth import admitted
from raypar.search_path import is_reserved, owner_of

if TYPE_CHECKING:
    from ray.dashboard.modules.job.pydantic_models import JobDetails
    from ray.job_submission import JobSubmissionClient

TUNNEL_HINT = (
    "the dashboard listens only on the head: `ray attach cluster.yaml -p 8265` or "
    "`ssh -N -L 8265:127.0.0.1:8265 HEAD` forwards it to http://127.0.0.1:8265"
)
FOLLOW_HINT = "the study continues on the cluster: `raypar cluster attach` follows it again"
UPLOAD_HINT = (
    "a .gitignore or .rayignore beside the study excludes files that it doesn't need; --data-dir names data that is "
    "already on the cluster"
)
ANSWER_TIMEOUT_S = 4.0
_DASHBOARD = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[^\s/@:?#\[\]]+)(:\d{1,5})?/?")
OVERRIDES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # they override the address that Ray's client is given
# These loggers report every upload and every file that Ray skips.
_TALKATIVE = ("ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk", "ray._private.runtime_env")

STUDIES = "raypar-studies"  # in the head's home
# Variable for `raypar study` on the head: the command that submitted it, which also continues it.
SUBMITTED_AS = "RAYPAR_SUBMITTED_AS"
# Variable for `raypar study` in a Slurm job: file for the number of trials that it finished.
TALLY = "RAYPAR_TALLY"
STUDY_KEY = "raypar_study"
# A stopping study ends its trials, sends its records and writes a report. Ray's default wait is 3 s.
STOP_WAIT_S = 120
# cluster.yaml installs raypar here. It is not on the PATH of a Ray that was started by its full path.
USUAL_BIN = "$HOME/venv/bin"
# In addition to .git, .venv, venv, __pycache__ and .gitignore or .rayignore. `.*` would match the folder itself.
EXCLUDED = (".?*", "*.pem", "*.key", "*.pyc", "node_modules", "mlflow.db*", "mlruns", "mlartifacts")


def check_dashboard(address: str) -> None:
    """Raise ClusterError if the text is not the address of a dashboard. Contacts nothing."""
    if not _DASHBOARD.fullmatch(address):
        hint = "write http://127.0.0.1:8265; a token goes into RAY_AUTH_TOKEN_PATH"
        raise ClusterError(
            f"--address {shortened(masked(address))}: must be the URL of a dashboard, http://host:port", hint=hint
        )


def connect(address: str, notice: Callable[[str], object]) -> JobSubmissionClient:
    """Return Ray's client for the jobs of the cluster whose dashboard is at the address.

    Args:
        notice: called with warnings about the cluster.

    Raises:
        ClusterError: there is no dashboard, or it refuses the connection.
    """
    check_dashboard(address)
    try:
        import aiohttp  # noqa: F401
        import requests
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        hint = "pip install 'raypar[client]'"
        raise ClusterError(f"--address {address}: {error.name} is missing here", hint=hint) from None
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)

    def client(address: str) -> JobSubmissionClient:
        hidden = {name: os.environ.pop(name) for name in OVERRIDES if name in os.environ}
        try:
            return JobSubmissionClient(address)
        finally:
            os.environ.update(hidden)

    try:
        # Ray's client would wait forever for an answer.
        requests.get(address, timeout=ANSWER_TIMEOUT_S, stream=True).close()
    except requests.RequestException as error:
        raise ClusterError(f"no Ray dashboard answers at --address {address}", hint=TUNNEL_HINT) from error
    with requesting(address), admitted(address, lambda address: client(address).list_jobs()) as takes_everybody:
        if takes_everybody:
            notice(
                f"the Ray at {address} requires no token: anyone who can reach it can run code there "
                "(start it with RAY_AUTH_MODE=token)"
            )
        return client(address)


@contextlib.contextmanager
def requesting(address: str, hint: str = TUNNEL_HINT) -> Iterator[None]:
    """Turn any error of a request to a dashboard into one message, its last line."""
    try:
        yield
    except RayparError:
        raise
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        raise ClusterError(f"--address {address}: {cut(text.splitlines()[-1])}", hint=hint) from error


def submit(client: JobSubmissionClient, study: str, file: Path, command: str, environment: Mapping[str, str]) -> str:
    """Start a study as a job. Ray uploads the folder of its file. Returns the job's id.

    Args:
        file: absolute path.
        environment: variables of the job, visible to all users of the cluster.

    Raises:
        RayparError: the folder holds more than the study, or modules that would hide Python's on the cluster.
        Exception: any error of Ray.
    """
    excluded = excluded_files(file)
    job_id: str = client.submit_job(
        entrypoint=command,
        runtime_env={
            "working_dir": str(file.parent),
            "excludes": excluded,
            "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S), **environment},
        },
        metadata={STUDY_KEY: study},
    )
    return job_id


def excluded_files(file: Path) -> list[str]:
    """Return patterns of the files in a study's folder that stay here, in addition to Ray's own.

    Raises:
        RayparError: the folder holds more than the study, or modules that would hide Python's on the cluster.
    """
    folder = file.parent
    if folder in (Path.home(), Path(folder.anchor)):
        problem = f"{file}: raypar would upload the study's whole folder, {folder}"
        raise RayparError(problem, hint="move the study to a separate folder")
    # Ray puts the folder into PYTHONPATH on the cluster, before anything else.
    modules = (each for each in folder.iterdir() if each.suffix == ".py" or (each / "__init__.py").exists())
    if hiding := sorted(each.stem for each in modules if is_reserved(each.stem)):
        names = " and ".join(f"the module `{name}` {owner_of(name)}" for name in hiding)
        raise RayparError(f"{file}: a file beside it hides {names} on the cluster", hint="rename the file")
    # Ray would follow links to other folders, and upload virtual environments with unusual names.
    folders = (path for path in folder.iterdir() if path.is_dir())
    # The study itself, last, is sent in any case: that of a script is hidden.
    others = [path for path in folders if path.is_symlink() or (path / "pyvenv.cfg").exists()]
    return [
        *EXCLUDED,
        *map(_pattern, [*(path.name for path in others), *ignored_by_git(folder)]),
        f"!{_pattern(file.name)}",
    ]


def _pattern(path: str) -> str:
    """Return a ``.gitignore`` pattern that matches only this path."""
    return "/" + re.sub(r"([][*?!#\\ ])", r"\\\1", path)


def words_on_head(*words: str) -> str:
    """Return words of a shell command, in which ``~/`` at the start of a word is the head's home."""
    return " ".join(f'"$HOME"/{shlex.quote(w[2:])}' if w.startswith("~/") else shlex.quote(w) for w in words)


def command_on_head(study: str, file_name: str, flags: Sequence[str]) -> str:
    """Return the shell command that runs a study on the head, started in the uploaded folder."""
    folder = f'"$HOME"/{STUDIES}/{shlex.quote(study)}'
    words = words_on_head("--address", "auto", *flags)
    return (
        f'uploaded="$PWD" && mkdir -p {folder} && cd {folder} && PATH="$PATH:{USUAL_BIN}" '
        f'exec raypar study "$uploaded"/{shlex.quote(file_name)} {words}'
    )


def latest_jobs(client: JobSubmissionClient) -> dict[str, JobDetails]:
    """Return each study's job: the latest running one, or else the latest of all."""
    jobs = [job for job in client.list_jobs() if STUDY_KEY in (job.metadata or {})]
    jobs.sort(key=lambda job: (not job.status.is_terminal(), job.start_time or 0))
    return {job.metadata[STUDY_KEY]: job for job in jobs}


def follow(client: JobSubmissionClient, job_id: str, write: Callable[[str], object], skip: int = 0) -> JobDetails:
    """Forward a study's output until it is over.

    Args:
        write: called with whole lines.
        skip: number of characters to skip at the beginning.

    Raises:
        ClusterError: the dashboard can no longer be reached.
    """
    import asyncio

    async def tail() -> None:
        num_read = 0
        async for chunk in client.tail_job_logs(job_id):
            write(chunk[max(skip - num_read, 0) :])
            num_read += len(chunk)

    with requesting(client.get_address(), FOLLOW_HINT):
        asyncio.run(tail())
        job: Any = client.get_job_info(job_id)
        if not job.status.is_terminal():
            raise ConnectionError("the connection was lost")
    return job
