"""Shared parts of the commands: options, the store, the console, error reporting."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

import typer

from raypar.cli.flags import option
from raypar.errors import (
    EXIT_BAD_INPUT,
    BrokeOff,
    NotForTraining,
    RayparError,
    StoreError,
    cut,
    is_for_training,
    message_of,
)
from raypar.execution.flags import WHAT, WHERE
from raypar.files import close_to_others
from raypar.masking import masked
from raypar.reporting.text import strip_control
from raypar.signals import EXIT_NOBODY_READS, Interrupted, handle_signals, is_closed, redirected_stderr
from raypar.units import SIZES_BYTES, parsed

if TYPE_CHECKING:
    from rich.console import Console

    from raypar.analysis.comparison import Gate
    from raypar.execution.results import ExecutionOutcome
    from raypar.reporting.documents import Document
    from raypar.run.runner import Event, Listener
    from raypar.study.space import Value
    from raypar.study.workload import AnyWorkload
    from raypar.track.store import Store

EXIT_FAILED = 1
EXIT_INCONCLUSIVE = 3
DRIVER_LOG = "driver.log"  # in an execution's log folder: what Ray and MLflow print in the driver
OUTPUT = "Output"  # the last panel of a verb's help
# Options in panels that several verbs share. Options without a panel come first.
what, where, output = (partial(typer.Option, rich_help_panel=panel) for panel in (WHAT, WHERE, OUTPUT))
_BAD_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)


def set_data_dir(data_dir: Path | None) -> None:
    if data_dir is None:
        return
    if not data_dir.is_dir():
        raise RayparError(f"--data-dir {data_dir}: there is no such folder", hint="name the folder that holds the data")
    os.environ["RAYPAR_DATA_DIR"] = str(data_dir.resolve())


def own_command() -> tuple[str, ...]:
    """Return the words of this process's command line."""
    return ("raypar", *sys.argv[1:])


def uri_of(tracking_uri: str | None) -> str:
    from raypar.track.check import check_form
    from raypar.track.store import default_tracking_uri

    uri = tracking_uri or default_tracking_uri(Path.cwd())
    check_form(uri)
    return uri


def store_of(tracking_uri: str | None) -> Store:
    from raypar.track.store import Store

    return Store(uri_of(tracking_uri), Path.cwd())


def study_url(tracking_uri: str, server_url: str, name: str | None = None) -> tuple[str, str] | None:
    """Return a study, by default the one used last, and the URL of its view. Raises RayparError for an unknown name."""
    from raypar.execution.stored import unknown_study
    from raypar.track.view import experiment_url

    store = store_of(tracking_uri)
    ids = {study.name: study.experiment_id for study in store.studies() if study.experiment_id}
    if name is not None and name not in ids:
        raise unknown_study(name, store)
    if not ids:
        return None
    name = name or next(iter(ids))
    return name, experiment_url(server_url, ids[name])


def has_browser() -> bool:
    """Return whether the user is at a terminal of this machine that can show a browser."""
    has_display = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    return has_display and sys.stdout.isatty() and not os.environ.get("SSH_CONNECTION")


def check_positive(flag: str, value: float | None, example: str = "2.5") -> None:
    """Raise RayparError unless a number is finite and greater than 0."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise RayparError(f"{flag} {value}: must be greater than 0", hint=f"write {flag} {example}, or leave it out")


def allowed_share(fail_if_slower: str | None, inconclusive: str | None) -> float | None:
    """Return 0.05 for ``--fail-if-slower 5%``; None without it. Raises RayparError for ``--inconclusive`` alone."""
    if fail_if_slower is not None:
        if (percent := parsed(fail_if_slower, {"%": 1.0})) is None:
            problem = f"--fail-if-slower {fail_if_slower}: must be a percentage of 0 or more"
            raise RayparError(problem, hint="write --fail-if-slower 5%")
        return percent / 100
    if inconclusive is not None:
        problem = f"--inconclusive {inconclusive}: without --fail-if-slower nothing is judged"
        raise RayparError(problem, hint="add --fail-if-slower 5%")
    return None


def gate_code(gate: Gate, inconclusive: str | None) -> int:
    """Return the exit code for a verdict on ``--fail-if-slower``."""
    of_unclear = {None: EXIT_INCONCLUSIVE, "ok": 0, "fail": EXIT_FAILED}[inconclusive]
    return {"passed": 0, "failed": EXIT_FAILED, "inconclusive": of_unclear}[gate.value]


def parse_quantity(flag: str, text: str | None, scales: Mapping[str, float], name: str, examples: str) -> float | None:
    """Return a flag's quantity in the unit of scale 1; None if the flag is not given.

    Args:
        scales: scales of the units, by lower-case name.
        name: noun for the message.

    Raises:
        RayparError: the text is not a quantity greater than 0.
    """
    if text is None:
        return None
    if not (value := parsed(text, scales)):
        raise RayparError(f"{flag} {text}: must be a positive {name}", hint=f"write {flag} {examples}")
    return value


def gpu_bytes(text: str | None) -> float | None:
    """Return the bytes of ``--gpu-memory``; None if it is not given. Raises RayparError for a bad size."""
    return parse_quantity("--gpu-memory", text, SIZES_BYTES, "size", "80GB or 24GiB")


def chosen_values(settings: Sequence[str]) -> dict[str, tuple[Value, ...]]:
    """Return the values of ``--set key=A`` and ``--set key=A,B`` by key. They choose points of a stored study."""
    from raypar.study.overrides import parse_value, split_setting
    from raypar.study.space import DOMAINS, Grid, problem

    chosen: dict[str, tuple[Value, ...]] = {}
    for setting in settings:
        try:
            key, text = split_setting(setting)
            value = parse_value(text)
        except ValueError as error:
            raise RayparError(f"--set {setting}: {error}", hint="write --set key=value: --set batch_size=64") from None
        if key in chosen:
            raise RayparError(f"--set {key} is given twice", hint=f"write --set {key}=A,B")
        if isinstance(value, Grid):
            if wrong := problem(value):
                raise RayparError(f"--set {setting}: {wrong}", hint=f"give each value once: --set {key}=A,B")
            chosen[key] = value.values
        elif isinstance(value, DOMAINS):
            raise RayparError(f"--set {setting}: is a range", hint=f"give values: --set {key}=A,B")
        else:
            chosen[key] = (value,)
    return chosen


def exit_as(outcome: ExecutionOutcome) -> None:
    """Exit with 128 + the number of the signal that ended an execution, or for its failures. Raises its `broke_off`."""
    if outcome.interrupted_by is not None:
        raise typer.Exit(128 + outcome.interrupted_by)
    if outcome.broke_off:
        raise outcome.broke_off
    if outcome.failures:
        raise typer.Exit(EXIT_FAILED)


def path_from_here(path: Path) -> str:
    """Return a path, relative to this folder if it is below."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def workload_named(name: str) -> AnyWorkload:
    """Return the listed workload of that name, or that of a Python file. Raises RayparError if there is none."""
    from raypar.errors import suggest
    from raypar.workloads import WORKLOADS

    if name.endswith(".py"):
        from raypar.study.loader import load_workload

        return load_workload(Path(name))
    if name not in WORKLOADS:
        raise RayparError(f"no workload `{name}`", hint=suggest(name, list(WORKLOADS)))
    return WORKLOADS[name]


def workload_of_study(store: Store, study: str, workload: str) -> AnyWorkload | None:
    """Return the workload of a stored study from its file, else the listed one of that name; None: neither.

    A store is data, so a file that it names is only run if it is in this folder.

    Args:
        workload: name that the trials have stored.

    Raises:
        NotForTraining: the file imports what is missing here.
    """
    from raypar.execution.options import is_in_folder
    from raypar.study.loader import load_study
    from raypar.workloads import WORKLOADS

    last = store.resume_info(study)
    if last and is_in_folder(str(last.get("file", "")), Path.cwd()):
        if last.get("data_dir"):
            os.environ.setdefault("RAYPAR_DATA_DIR", str(last["data_dir"]))
        try:
            with handle_signals():
                loaded = load_study(Path(last["file"]), [str(each) for each in last.get("set", ())])
            if loaded.study.workload.name == workload:
                return loaded.study.workload
        except NotForTraining:
            raise
        except RayparError:
            pass
    return WORKLOADS.get(workload)


# Standard output while `document_alone` redirects other prints to standard error.
_document_stream: ContextVar[TextIO | None] = ContextVar("_document_stream", default=None)


@contextlib.contextmanager
def document_alone(*, is_asked: bool) -> Iterator[None]:
    """Reserve standard output for `print_json`, if asked. Study files, notes and warnings print to standard error."""
    if not is_asked:
        yield
        return
    token = _document_stream.set(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _document_stream.reset(token)


def print_json(document: Document) -> None:
    """Print a view as JSON on standard output."""
    from raypar.reporting.documents import to_json

    print(to_json(document), file=_document_stream.get(), flush=True)


def print_text(text: str) -> None:
    """Print a text on standard output, also within `document_alone`."""
    print(text, end="", file=_document_stream.get(), flush=True)


def check_json_alone(as_json: bool, others: Mapping[str, object]) -> None:
    """Raise RayparError if ``--json`` is given with flags of other views. `others`: their values by name."""
    given = [flag for flag, value in others.items() if value]
    if as_json and given:
        them = "it" if len(given) == 1 else "them"
        raise RayparError(f"--json and {' and '.join(given)} exclude each other", hint=f"leave out --json, or {them}")


def say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def notices_on(console: Console) -> Listener:
    """Return a listener that prints only notices."""
    from raypar.run.runner import Notice

    def listen(event: Event) -> None:
        if isinstance(event, Notice):
            say(console, event.text)

    return listen


def stdout() -> Console:
    from raypar.reporting.text import TerminalConsole

    return TerminalConsole(soft_wrap=False)


@contextlib.contextmanager
def quiet(log_path: Path) -> Iterator[Console]:
    """Yield a console on standard output, or on standard error with ``--json``. Other prints go to a log file.

    This also covers processes and libraries such as Ray and MLflow.
    """
    from raypar.reporting.text import TerminalConsole

    made = [folder for folder in log_path.parents if not folder.exists()]
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        for folder in made:
            close_to_others(folder)
        log_path.touch()
    except OSError as error:
        _remove(made)
        hint = "run in a folder that you may write to"
        raise StoreError(f"{log_path}: can't be written: {error.strerror}", hint=hint) from None
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {fd: os.dup(fd) for fd in (1, 2)}
    shown_on = 1 if _document_stream.get() is None else 2
    with log_path.open("ab") as log, os.fdopen(os.dup(saved[shown_on]), "w", encoding=sys.stdout.encoding) as real:
        for fd in saved:
            os.dup2(log.fileno(), fd)
        try:
            with redirected_stderr(saved[2]):
                yield TerminalConsole(file=real)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for fd, original in saved.items():
                os.dup2(original, fd)
                os.close(original)
            if not os.fstat(log.fileno()).st_size:
                log_path.unlink(missing_ok=True)
                _remove(made)


def _remove(folders: Sequence[Path]) -> None:
    """Remove empty folders, the innermost first."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def complain(text: str) -> None:
    """Print an error without passwords and control characters."""
    with contextlib.suppress(BrokenPipeError):
        typer.echo(f"error: {strip_control(masked(text))}", err=True)


@contextlib.contextmanager
def report_errors(debug: bool) -> Iterator[None]:
    """Report an error in one message, with exit code 2 if the user can fix it. `debug`: show its traceback."""
    try:
        yield
    except RayparError as error:
        if debug:
            raise
        complain(str(error))
        raise typer.Exit(EXIT_FAILED if isinstance(error, BrokeOff) else EXIT_BAD_INPUT) from None
    except KeyboardInterrupt as error:
        code = (error if isinstance(error, Interrupted) else Interrupted()).exit_code
        if code != EXIT_NOBODY_READS:
            with contextlib.suppress(OSError):  # a closed terminal
                typer.echo("interrupted", err=True)
        raise typer.Exit(code) from None
    except typer.Exit:
        raise
    except Exception as error:
        if isinstance(error, BrokenPipeError) and is_closed(sys.stdout):
            raise typer.Exit(EXIT_NOBODY_READS) from None
        if debug:
            raise
        if isinstance(error, OSError) and error.errno in _BAD_PATH:
            complain(f"{cut(str(error.filename), 100)}: {error.strerror}\n  → give another path")
            raise typer.Exit(EXIT_BAD_INPUT) from None
        if is_for_training(error):
            complain(str(NotForTraining(f"{getattr(error, 'name', '')} is not in this environment")))
            raise typer.Exit(EXIT_BAD_INPUT) from None
        complain(f"{type(error).__name__}: {cut(message_of(error))}\n  → --debug shows where; .raypar/logs has more")
        raise typer.Exit(EXIT_FAILED) from None


StudyFile = Annotated[Path, typer.Argument(metavar="FILE", help="Study file, for example studies/quickstart.py.")]


def complete_study(context: typer.Context, incomplete: str) -> list[str]:
    """Complete a study's name in a shell; return nothing if the store can't be read."""
    with contextlib.suppress(Exception):
        from raypar.track.store import study_names

        names = study_names(uri_of(context.params.get("tracking_uri")), Path.cwd())
        return [name for name in names if name.startswith(incomplete)]
    return []


def complete_workload(incomplete: str) -> list[str]:
    """Complete the name of a listed workload in a shell."""
    with contextlib.suppress(Exception):
        from raypar.workloads import WORKLOADS

        return [name for name in WORKLOADS if name.startswith(incomplete)]
    return []


def is_table(source: str) -> bool:
    """Return whether an argument names a file of measurements, rather than a study."""
    from raypar.analysis.sheet import SUFFIXES

    return source.lower().endswith(SUFFIXES) or Path(source).is_file()


StudyName = Annotated[
    str,
    typer.Argument(metavar="STUDY", help="Name of the study; `raypar list` shows it.", autocompletion=complete_study),
]
Since = Annotated[
    str | None,
    typer.Option(
        metavar="DATE|EXECUTION",
        help="Use only trials since 2026-11-23, 2026-11-23T14:00, last, or the number or id of an execution.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Don't ask.")]
Address = Annotated[str | None, option("address")]
DataDir = Annotated[Path | None, option("data_dir")]
TrackingUri = Annotated[str | None, option("tracking_uri")]
FailIfSlower = Annotated[
    str | None,
    output(
        metavar="PERCENT",
        help="5%: exit code 0 if B is shown to be at most 5 % slower at every point, 1 if it is shown to be slower "
        "at one or has no result there, 3 if neither is shown.",
    ),
]
Inconclusive = Annotated[
    Literal["ok", "fail"] | None,
    output(help="With --fail-if-slower: exit with 0 (ok) or 1 (fail) instead of 3."),
]
ComparisonHtml = Annotated[
    Path | None, output("--html", metavar="FILE", help="Also write the comparison as one self-contained HTML file.")
]
Price = Annotated[
    float | None, typer.Option(metavar="X", help="Price of a node per hour. (default: that of the study)")
]
GpuMemory = Annotated[
    str | None, what("--gpu-memory", metavar="SIZE", help="Memory of a GPU: 80GB. Also predict which points fit.")
]
AsJson = Annotated[bool, output("--json", help="Print one JSON document instead (docs/json.md).")]
Debug = Annotated[bool, output("--debug", help="Show tracebacks.")]
