"""Commands of clusters: submit a study to one from outside, attach to it and stop it; add a machine to one."""

from __future__ import annotations

import contextlib
import getpass
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raypar.cli.common import EXIT_FAILED
from raypar.errors import RayparError, suggest
from raypar.masking import MASK, masked
from raypar.reporting.text import ascii_fallback, strip_control
from raypar.scratch import scratch_folder
from raypar.signals import Interrupted, handle_signals, uninterrupted

if TYPE_CHECKING:
    from raypar.execution.options import Options
    from raypar.run.jobs import Job, Jobs


EXIT_STOPPED = 143  # what a study that SIGTERM has ended exits with
# What Ray writes at the start of a job's log.
_OF_RAY = re.compile(r"Running entrypoint for job |[\d :,-]+\tINFO job_manager\.py")
DASHBOARD = "http://127.0.0.1:8265"
Dashboard = Annotated[
    str, typer.Option("--address", metavar="URL", help="The dashboard of the cluster that the study runs on.")
]
SubmittedStudy = Annotated[str, typer.Argument(metavar="STUDY", help="The study's name, as `raypar study` printed it.")]


def attach(study: SubmittedStudy, address: Dashboard = DASHBOARD) -> None:
    """Follow a submitted study to its end.

    Its output is shown from the beginning. The exit code is that of the study.
    """
    with handle_signals(), submitted(study, address) as (jobs, job):
        with detached_by_signals(study, address):
            over = jobs.follow(job.id, write)
        raise typer.Exit(ended(over))


def stop(study: SubmittedStudy, address: Dashboard = DASHBOARD) -> None:
    """Stop a submitted study; its finished trials are kept.

    The study ends as after Ctrl-C, with a report that says what it lacks.
    """
    with handle_signals(), submitted(study, address) as (jobs, job):
        if job.is_over:
            say(f"study {study} does not run: it {ENDED[job.status]} before")
            return
        num_logged = jobs.stop(job.id)
        say(f"study {study} is asked to stop")
        with detached_by_signals(study, address):
            over = jobs.follow(job.id, write, skip=num_logged)
        say(f"study {study} {ENDED[over.status]}")


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
COPY_TOKEN = "(umask 077 && ssh {source} cat {path} >~/.ray/auth_token)\n"
OF_TORCH = ("torch", "torchvision")  # from one index, whose versions fit each other


def add_node(
    address: Annotated[
        str, typer.Option(metavar="ADDRESS", help="The cluster that this machine is a node of: auto or host:port.")
    ] = "auto",
) -> None:
    """Print the commands that add a machine to a cluster.

    Run it on a node of the cluster, and what it prints on the new machine. Running studies use the machine.
    """
    with handle_signals():
        from raypar.provenance import versions
        from raypar.run.auth import token_file
        from raypar.run.cluster import contact

        folder = Path(__file__).resolve().parents[2]
        if not (folder / "pyproject.toml").exists():
            hint = "install it from its repository, as cluster-local.yaml does: `pip install -e raypar`"
            raise RayparError(f"raypar in {folder} is no copy of its repository, which a new machine needs", hint=hint)
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


def dashboard_in(
    address: str | None, data_dir: Path | None, tracking_uri: str | None, *, no_ray: bool, dry_run: bool
) -> str | None:
    """Return the address of a dashboard to submit to, else None. Raises RayparError for flags that exclude it."""
    from raypar.run.jobs import check_dashboard, is_dashboard

    if address is None or not is_dashboard(address):
        return None
    check_dashboard(address)
    for flag, is_given in {"--no-ray": no_ray, "--dry-run": dry_run}.items():
        if is_given:
            raise RayparError(f"--address {address} and {flag} exclude each other", hint="leave one out")
    if data_dir is not None and not (data_dir.is_absolute() or str(data_dir).startswith("~/")):
        hint = "write an absolute path, or '~/…' in quotes"
        raise RayparError(f"--data-dir {data_dir}: has to be a folder of the cluster's head", hint=hint)
    if tracking_uri is not None and MASK in masked(tracking_uri):
        raise RayparError(
            f"--tracking-uri {masked(tracking_uri)}: a job's command can be seen by all who use the cluster",
            hint="set MLFLOW_TRACKING_URI where the head's Ray is started, and leave --tracking-uri out",
        )
    return address


def submit(
    study: str, path: Path, modules: Sequence[Path], address: str, other_flags: Mapping[str, object], options: Options
) -> int:
    """Start a study on the cluster and follow it; return its exit code. Raises RayparError where nothing was started.

    Args:
        path, modules: its file, absolute, and the files beside it that it imports.
        other_flags: those that `options` doesn't hold as they were given.
    """
    from raypar.execution.origin import ORIGIN_VARIABLE, CodeOrigin
    from raypar.run.jobs import STUDIES, SUBMITTED_AS, RunsAlready, command_on_head, pack

    flags = {
        "--set": options.settings,
        "--isolation": options.isolation,
        "--fresh": options.rerun_all,
        "--retry-failed": options.retry_failed,
        "--trial-timeout": options.trial_timeout_s,
        "--load-timeout": options.load_timeout_s,
        "--profile": bool(options.profiling.num_steps),
        "--log-model": options.log_model,
        "--system-metrics": options.system_metrics,
        "--exclusive": options.exclusive,
        "--min-nodes": options.min_nodes,
        **other_flags,
    }
    command = command_on_head(study, path.name, words_of(flags))
    with connected_to(address) as jobs:
        num_columns, submitted_as = shutil.get_terminal_size().columns, masked(shlex.join(options.command))
        origin = masked(CodeOrigin.of(path, options.tracking_uri).to_json())
        environment = {"COLUMNS": str(num_columns), SUBMITTED_AS: submitted_as, ORIGIN_VARIABLE: origin}
        with detached_by_signals(study, address):
            with uninterrupted(), scratch_folder() as scratch:
                folder = scratch / "study"
                folder.mkdir()
                travels = pack(path, modules, folder)
                try:
                    job_id = jobs.submit(study, folder, command, environment)
                except RunsAlready as error:
                    hint = f"`{again('attach', study, address)}` shows it, `{again('stop', study, address)}` ends it"
                    raise RayparError(error.message, hint=hint) from error
                files = "its file" if len(travels) == 1 else f"{len(travels)} files"
                say(
                    f"study {study} is submitted with {files}; it goes on without this terminal, "
                    f"in ~/{STUDIES}/{study} on the head of the cluster"
                )
            return ended(jobs.follow(job_id, write))


def words_of(flags: Mapping[str, object]) -> list[str]:
    """Return a command line's words for flags by name: several values, one, or a switch."""
    words: list[str] = []
    for flag, value in flags.items():
        if value is True:
            words.append(flag)
        elif isinstance(value, Path):
            words += [flag, str(value)]  # apart, so that a ~ is seen
        elif isinstance(value, (list, tuple)):
            words += [f"{flag}={each}" for each in value]
        elif value is not None and value is not False:
            words.append(f"{flag}={value}")
    return words


@contextlib.contextmanager
def submitted(study: str, address: str) -> Iterator[tuple[Jobs, Job]]:
    """Connect to a cluster on which a study was submitted. Raises RayparError where there is none, or it is local."""
    with contextlib.ExitStack() as stack:
        try:
            jobs = stack.enter_context(connected_to(address))
            job = job_of(study, jobs, address)
        except RayparError as error:
            raise local_study(study) or error from None
        yield jobs, job


def local_study(study: str) -> RayparError | None:
    """Return the error of a study that is not on a cluster but in this folder's store; None where it is not there."""
    from raypar.cli.common import store_of, uri_of
    from raypar.run.locks import runner_of
    from raypar.track.client import store_identity

    if by := runner_of(study, store_identity(uri_of(None))):
        hint = f"Ctrl-C in its terminal stops it, or `kill -INT {by.pid}`: finished trials are kept"
        return RayparError(f"study `{study}` is local: {by.process} runs it (`{by.command}`)", hint=hint)
    with contextlib.suppress(RayparError):  # of a store that can't be read, nothing is said here
        if study in {stored.name for stored in store_of(None).studies()}:
            hint = f"`raypar report {study}` shows its results, `raypar store resume {study}` runs what is missing"
            return RayparError(f"study `{study}` is local, and nothing runs it now", hint=hint)
    return None


def job_of(study: str, jobs: Jobs, address: str) -> Job:
    """Return the job of the study, as `Jobs.studies` has it. Raises RayparError where there is none."""
    by_study = jobs.studies()
    if study not in by_study:
        hint = suggest(study, list(by_study)) if by_study else f"`raypar study FILE --address {address}` submits one"
        raise RayparError(f"no study `{study}` was submitted to {address}", hint=hint)
    return by_study[study]


def connected_to(address: str) -> contextlib.AbstractContextManager[Jobs]:
    from raypar.run.jobs import connected

    return connected(address, say)


@contextlib.contextmanager
def detached_by_signals(study: str, address: str) -> Iterator[None]:
    """Let Ctrl-C detach from a study that goes on."""
    try:
        yield
    except KeyboardInterrupt as error:
        with contextlib.suppress(OSError):  # a closed terminal
            show, end = again("attach", study, address), again("stop", study, address)
            say(f"detached: the study goes on; `{show}` shows it again, `{end}` ends it")
        raise typer.Exit((error if isinstance(error, Interrupted) else Interrupted()).exit_code) from None


ENDED = {"STOPPED": "was stopped", "SUCCEEDED": "has ended", "FAILED": "has failed"}


def ended(job: Job) -> int:
    """Return the exit code of a study that is over, and say so where it was stopped."""
    from raypar.run.jobs import NO_COMMAND, NO_RAYPAR_HINT

    if job.status == "STOPPED":
        say(f"study {job.study} was stopped")
        return EXIT_STOPPED
    if job.exit_code == NO_COMMAND:
        raise RayparError("the head of the cluster finds no `raypar`", hint=NO_RAYPAR_HINT)
    if job.status == "FAILED" and job.exit_code is None:
        raise RayparError(f"study `{job.study}` did not start: {job.message}", hint="`raypar doctor` on the head helps")
    return job.exit_code or (0 if job.status == "SUCCEEDED" else EXIT_FAILED)


def again(verb: str, study: str, address: str) -> str:
    words = ["raypar", "cluster", verb, study]
    return shlex.join(words if address == DASHBOARD else [*words, "--address", address])


def say(text: str) -> None:
    """Print for the user of this terminal; standard output is the study's."""
    typer.echo(text, err=True)


def write(text: str) -> None:
    """Print what a study has written elsewhere, without control characters."""
    lines = [line for line in text.splitlines(keepends=True) if not _OF_RAY.match(line)]
    try:
        sys.stdout.write(ascii_fallback(masked(strip_control("".join(lines))), sys.stdout.encoding or "utf-8"))
        sys.stdout.flush()
    except BrokenPipeError:
        raise SystemExit(0) from None  # `| head` has seen enough
