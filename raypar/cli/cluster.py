"""Commands for clusters: submit a study from outside, follow it, stop it, and add a machine."""

from __future__ import annotations

import contextlib
import getpass
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raypar.errors import RayparError, suggest
from raypar.execution.flags import RunFlags, all_flags
from raypar.masking import MASK, masked
from raypar.reporting.text import ascii_fallback, strip_control
from raypar.signals import Interrupted, handle_signals, uninterrupted

if TYPE_CHECKING:
    from ray.dashboard.modules.job.pydantic_models import JobDetails
    from ray.job_submission import JobSubmissionClient


EXIT_STOPPED = 143  # exit code of a study that SIGTERM ended
NO_COMMAND = 127  # a shell's exit code
NO_RAYPAR_HINT = "install it there, and start the head's Ray with its environment active: `source venv/bin/activate`"
LOCAL_HINT = "Ctrl-C in its terminal stops a study on this machine, `raypar report` shows its results"
# Lines of Ray at the start of a job's log.
_OF_RAY = re.compile(r"Running entrypoint for job |[\d :,-]+\tINFO job_manager\.py")
DASHBOARD = "http://127.0.0.1:8265"
Dashboard = Annotated[str, typer.Option("--address", metavar="URL", help="Dashboard of the study's cluster.")]
SubmittedStudy = Annotated[str, typer.Argument(metavar="STUDY", help="Name of the study; `raypar study` printed it.")]


def attach(study: SubmittedStudy, address: Dashboard = DASHBOARD) -> None:
    """Follow a submitted study to its end.

    Shows its output from the beginning. The exit code is that of the study.

    Example:  raypar cluster attach batch_size --address http://127.0.0.1:8265
    """
    from raypar.run.jobs import follow

    with handle_signals(), detached_by_signals(study, address):
        client, job = submitted(study, address)
        over = follow(client, job.submission_id, write)
    raise typer.Exit(ended(study, over))


def stop(study: SubmittedStudy, address: Dashboard = DASHBOARD) -> None:
    """Stop a submitted study; its finished trials are kept.

    The study ends as after Ctrl-C, with a report of the finished trials.

    Example:  raypar cluster stop batch_size --address http://127.0.0.1:8265
    """
    from raypar.run.jobs import follow, requesting

    with handle_signals(), detached_by_signals(study, address):
        client, job = submitted(study, address)
        if job.status.is_terminal():
            say(f"study {study} is not running: it {ENDED[job.status.value]}")
            return
        with requesting(address):
            num_logged = len(client.get_job_logs(job.submission_id) or "")
            client.stop_job(job.submission_id)
        say(f"stopping study {study}")
        over = follow(client, job.submission_id, write, skip=num_logged)
    say(f"study {study} {ENDED[over.status.value]}")


NODE_SCRIPT = """\
# Run this on the new machine: Linux, Python {python} with venv, rsync, and SSH to {source}.
set -eu
mkdir -p ~/.ray && chmod 700 ~/.ray
{copy_token}rsync -a --exclude=.venv --exclude=.git --exclude=.raypar {folder} ~/raypar
test -x ~/venv/bin/python || python{python} -m venv ~/venv
~/venv/bin/pip install -q {torch} \\
  $(nvidia-smi -L >/dev/null 2>&1 || echo --index-url https://download.pytorch.org/whl/cpu)
~/venv/bin/pip install -q -e ~/raypar'[train,client]' {others}
{mode}~/venv/bin/ray start --address={address} --num-cpus="$(nproc)" --labels host="$(hostname)" --disable-usage-stats
"""
# -n: the script may come from standard input, by `ssh NEW bash -s`.
COPY_TOKEN = "(umask 077 && ssh -n {source} cat {path} >~/.ray/auth_token)\n"
OF_TORCH = ("torch", "torchvision")  # from the same index, so that their versions match


def add_node(
    address: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Cluster of this machine: auto or host:port.")
    ] = "auto",
) -> None:
    """Print the commands that add a machine to a cluster.

    Run this command on a node of the cluster, and the printed commands on the new machine. Running studies use it.

    Example:  raypar cluster add-node >add-node.sh    # and there: bash add-node.sh
    """
    with handle_signals():
        from raypar.provenance import versions
        from raypar.run.auth import token_file
        from raypar.run.cluster import contact

        folder = Path(__file__).resolve().parents[2]
        if not (folder / "pyproject.toml").exists():
            hint = "install it as cluster-local.yaml does, from a clone: `pip install -e raypar`"
            raise RayparError(f"{folder} must be a clone of raypar's repository, to copy to new machines", hint=hint)
        there = contact(address)
        source = f"{getpass.getuser()}@{there.from_ip}"
        copy_token = mode = ""
        if not there.takes_everybody:
            copy_token = COPY_TOKEN.format(source=source, path=shlex.quote(str(token_file())))
            mode = "RAY_AUTH_MODE=token "
        python, pins = "", dict[str, str]()
        for name, version in versions().items():
            if name == "python":
                python = version.rpartition(".")[0]
            elif name != "raypar":
                pins[name] = f"{name}=={version.partition('+')[0]}"
        script = NODE_SCRIPT.format(
            python=python,
            source=source,
            copy_token=copy_token,
            folder=shlex.quote(f"{source}:{folder}/"),
            torch=" ".join(pins[name] for name in OF_TORCH if name in pins),
            others=" ".join(pin for name, pin in pins.items() if name not in OF_TORCH),
            mode=mode,
            address=there.address,
        )
        typer.echo(script, nl=False)


def dashboard_in(flags: RunFlags) -> str | None:
    """Return the dashboard to submit to; None: run here. Raises RayparError for flags that exclude submission."""
    from raypar.run.jobs import check_dashboard

    address = flags.address
    if address is None or not address.startswith(("http://", "https://")):
        return None
    check_dashboard(address)
    for flag in all_flags():
        if not flag.is_submitted and getattr(flags, flag.name):
            raise RayparError(f"--address {address} and {flag.word} exclude each other", hint="leave one out")
    check_on_head(flags, "set MLFLOW_TRACKING_URI before the head's Ray starts")
    return address


def check_on_head(flags: RunFlags, other_way: str) -> None:
    """Raise RayparError for values that don't apply on a cluster's head, or would show its users a password.

    Args:
        other_way: how to give the head a tracking URI with a password.
    """
    data_dir, tracking_uri = flags.data_dir, flags.tracking_uri
    if data_dir is not None and not (data_dir.is_absolute() or str(data_dir).startswith("~/")):
        hint = "write an absolute path, or '~/…' in quotes"
        raise RayparError(f"--data-dir {data_dir}: must be a folder of the cluster's head", hint=hint)
    if tracking_uri is not None and MASK in masked(tracking_uri):
        raise RayparError(
            f"--tracking-uri {masked(tracking_uri)}: all users of the cluster can see a job's command",
            hint=f"leave it out, and {other_way}",
        )


def submit(
    study: str, path: Path, address: str, flags: Sequence[str], command: Sequence[str], tracking_uri: str
) -> int:
    """Start a study on the cluster, follow it, and return its exit code. Raises RayparError if it was not started.

    Args:
        path: the study's file, absolute.
        flags: words of the command line that apply on the head.
        command: words of the command that submits the study.
    """
    from raypar.execution.origin import ORIGIN_VARIABLE, CodeOrigin
    from raypar.run import jobs

    client = jobs.connect(address, say)
    environment = {
        "COLUMNS": str(shutil.get_terminal_size().columns),
        jobs.SUBMITTED_AS: masked(shlex.join(command)),
        ORIGIN_VARIABLE: masked(CodeOrigin.of(path, tracking_uri).to_json()),
    }
    with jobs.requesting(address, jobs.UPLOAD_HINT), uninterrupted():
        running = jobs.latest_jobs(client).get(study)
        if running is not None and not running.status.is_terminal():
            raise RayparError(f"study `{study}` is already running on this cluster", hint=ways(study, address))
        job_id = jobs.submit(client, study, path, jobs.command_on_head(study, path.name, flags), environment)
        folder = f"~/{jobs.STUDIES}/{study} on the head of the cluster"
        say(f"submitted study {study}; it runs in {folder} and doesn't need this terminal")
    with detached_by_signals(study, address):
        over = jobs.follow(client, job_id, write)
    return ended(study, over)


def submitted(study: str, address: str) -> tuple[JobSubmissionClient, JobDetails]:
    """Return a client of a cluster, and the job of a study. Raises RayparError if there is no such job."""
    from raypar.run.jobs import connect, latest_jobs, requesting
    from raypar.run.sbatch import latest_job

    try:
        client = connect(address, say)
        with requesting(address):
            jobs = latest_jobs(client)
        if study not in jobs:
            hint = suggest(study, list(jobs)) if jobs else f"`raypar study FILE --address {address}` submits one"
            raise RayparError(f"no study `{study}` was submitted to {address}", hint=hint)
    except RayparError as error:
        hint = f"{error.hint}; {LOCAL_HINT}"
        if job := latest_job(study, Path.cwd()):
            number, output = job
            follow = f"`tail -F {shlex.quote(str(output))}` follows it"
            hint = f"Slurm job {number} has it: {follow}, `scancel --batch --signal=TERM {number}` stops it"
        raise RayparError(error.message, hint=hint) from error
    return client, jobs[study]


@contextlib.contextmanager
def detached_by_signals(study: str, address: str) -> Iterator[None]:
    """Let Ctrl-C detach from a study that continues."""
    try:
        yield
    except KeyboardInterrupt as error:
        with contextlib.suppress(OSError):  # a closed terminal
            say(f"detached: the study continues; {ways(study, address)}")
        raise typer.Exit((error if isinstance(error, Interrupted) else Interrupted()).exit_code) from None


ENDED = {"STOPPED": "was stopped", "SUCCEEDED": "has ended", "FAILED": "has failed"}


def ended(study: str, job: JobDetails) -> int:
    """Return the exit code of a study that has ended. Raises RayparError if it did not start."""
    if job.status.value == "STOPPED":
        say(f"study {study} was stopped")
        return EXIT_STOPPED
    code = job.driver_exit_code
    if code == NO_COMMAND:
        raise RayparError("`raypar` is not installed on the head of the cluster", hint=NO_RAYPAR_HINT)
    if job.status.value == "FAILED" and code is None:
        raise RayparError(f"study `{study}` did not start: {job.message}", hint="`raypar doctor` on the head helps")
    return 128 - code if code and code < 0 else code or 0  # for a signal, that of a shell


def ways(study: str, address: str) -> str:
    """Return the commands that follow and stop a study, for messages."""
    words = f"{shlex.quote(study)} --address {address}"
    return f"`raypar cluster attach {words}` follows it, `raypar cluster stop {words}` stops it"


def say(text: str) -> None:
    """Print to standard error, because standard output is for the study's."""
    typer.echo(text, err=True)


def write(text: str) -> None:
    """Print the output of a submitted study without control characters."""
    lines = [line for line in text.splitlines(keepends=True) if not _OF_RAY.match(line)]
    try:
        sys.stdout.write(ascii_fallback(masked(strip_control("".join(lines))), sys.stdout.encoding or "utf-8"))
        sys.stdout.flush()
    except BrokenPipeError:
        raise SystemExit(0) from None  # for example, after `| head`
