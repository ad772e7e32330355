"""Shared parts of the commands: options, the store, the console, error reporting."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

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
from raypar.signals import EXIT_NOBODY_READS, Interrupted, is_closed, redirected_stderr
from raypar.units import parsed

if TYPE_CHECKING:
    from rich.console import Console

    from raypar.analysis.comparison import Gate
    from raypar.execution.results import ExecutionOutcome
    from raypar.reporting.documents import Document
    from raypar.study.space import Value
    from raypar.study.workload import AnyWorkload


EXIT_FAILED = 1
EXIT_INCONCLUSIVE = 3
DRIVER_LOG = "driver.log"  # in an execution's log folder: what Ray and MLflow print in the driver
OUTPUT = "Output"  # the last panel of a verb's help
# Options of the panels that several verbs have. Those without a panel stand first.
what, where, output = (partial(typer.Option, rich_help_panel=panel) for panel in (WHAT, WHERE, OUTPUT))
_NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)  # whatever it was given for


def set_data_dir(data_dir: Path | None) -> None:
    if data_dir is None:
        return
    if not data_dir.is_dir():
        raise RayparError(f"--data-dir {data_dir}: there is no such folder", hint="name the folder that holds the data")
    os.environ["RAYPAR_DATA_DIR"] = str(data_dir.resolve())


def uri_of(tracking_uri: str | None) -> str:
    from raypar.track.check import check_form
    from raypar.track.store import default_tracking_uri

    uri = tracking_uri or default_tracking_uri(Path.cwd())
    check_form(uri)
    return uri


def store_of(tracking_uri: str | None) -> Any:
    from raypar.track.store import Store

    return Store(uri_of(tracking_uri), Path.cwd())


def study_url(tracking_uri: str, server_url: str, name: str | None = None) -> tuple[str, str] | None:
    """Return a study, by default the last used, and its view's address. Raises RayparError for an unknown name."""
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
    """Return True where a user at a terminal of this machine can see a browser."""
    has_display = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    return has_display and sys.stdout.isatty() and not os.environ.get("SSH_CONNECTION")


def check_positive(flag: str, value: float | None, example: str = "2.5") -> None:
    """Raise RayparError for a number that is not finite, or not greater than 0."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise RayparError(f"{flag} {value}: must be greater than 0", hint=f"write {flag} {example}, or leave it out")


def allowed_share(fail_if_slower: str | None, inconclusive: str | None) -> float | None:
    """Return 0.05 for ``--fail-if-slower 5%``; None without: nothing is judged, and ``--inconclusive`` is refused."""
    if fail_if_slower is not None:
        return _share_of(fail_if_slower)
    if inconclusive is not None:
        problem = f"--inconclusive {inconclusive}: without --fail-if-slower nothing is judged"
        raise RayparError(problem, hint="add --fail-if-slower 5%")
    return None


def _share_of(text: str) -> float:
    """Return 0.05 for ``5%``. Raises RayparError for what is no percentage of 0 or more."""
    number, sign, rest = text.strip().partition("%")
    try:
        percent = float(number)
    except ValueError:
        percent = math.nan
    if not sign or rest or "_" in number or not 0 <= percent < math.inf:
        hint = "write --fail-if-slower 5%"
        raise RayparError(f"--fail-if-slower {text}: must be a percentage of 0 or more", hint=hint)
    return percent / 100


def gate_code(gate: Gate, inconclusive: str | None) -> int:
    """Return the exit code of a verdict on ``--fail-if-slower``."""
    of_unclear = {None: EXIT_INCONCLUSIVE, "ok": 0, "fail": EXIT_FAILED}[inconclusive]
    return {"passed": 0, "failed": EXIT_FAILED, "inconclusive": of_unclear}[gate.value]


def parse_quantity(flag: str, text: str | None, scales: Mapping[str, float], name: str, examples: str) -> float | None:
    """Return a number with one of the units, by lower-case name, in the unit that is worth 1; None without a flag.

    Raises:
        RayparError: it is none, or not greater than 0; the message has the quantity's `name`.
    """
    if text is None:
        return None
    if not (value := parsed(text, scales)):
        raise RayparError(f"{flag} {text}: is no {name} greater than 0", hint=f"write {flag} {examples}")
    return value


def chosen_values(settings: Sequence[str]) -> dict[str, tuple[Value, ...]]:
    """Return the values by key of ``--set key=A`` and ``key=A,B``, which choose among a stored study's points."""
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
    """Exit as an execution ended: with 128 + the number of a signal, or with a failure. Raises what broke it off."""
    if outcome.interrupted_by is not None:
        raise typer.Exit(128 + outcome.interrupted_by)
    if outcome.broke_off:
        raise outcome.broke_off
    if outcome.failures:
        raise typer.Exit(EXIT_FAILED)


def path_from_here(path: Path) -> str:
    """Return a path relative to this folder where it lies beneath it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def workload_named(name: str) -> AnyWorkload:
    """Return the workload of that name among those that are listed. Raises RayparError where there is none."""
    from raypar.errors import suggest
    from raypar.workloads import WORKLOADS

    if name not in WORKLOADS:
        raise RayparError(f"no workload `{name}`", hint=suggest(name, list(WORKLOADS)))
    return WORKLOADS[name]


# The standard output, while `document_alone` sends what else is printed to standard error.
_document_stream: ContextVar[TextIO | None] = ContextVar("_document_stream", default=None)


@contextlib.contextmanager
def document_alone(*, is_asked: bool) -> Iterator[None]:
    """Leave standard output to `print_json`, if asked: study files, notes and warnings print to standard error."""
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
    """Print a text on standard output, within `document_alone`, too."""
    print(text, end="", file=_document_stream.get(), flush=True)


def check_json_alone(as_json: bool, others: Mapping[str, object]) -> None:
    """Raise RayparError where ``--json`` comes with flags of other views, by their names."""
    given = [flag for flag, value in others.items() if value]
    if as_json and given:
        them = "it" if len(given) == 1 else "them"
        raise RayparError(f"--json and {' and '.join(given)} exclude each other", hint=f"leave out --json, or {them}")


def say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def notices_on(console: Console) -> Callable[[Any], None]:
    """Return a listener of runs that prints notices, and nothing else."""
    from raypar.run.runner import Notice

    def listen(event: Any) -> None:
        if isinstance(event, Notice):
            say(console, event.text)

    return listen


def stdout() -> Console:
    from raypar.reporting.text import TerminalConsole

    return TerminalConsole(soft_wrap=False)


@contextlib.contextmanager
def quiet(log_path: Path) -> Iterator[Console]:
    """Give a console on the real standard output; everything else that prints (Ray, MLflow) writes to a log file.

    With ``--json`` the console is on standard error.
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
            if not os.fstat(log.fileno()).st_size:  # nothing was run
                log_path.unlink(missing_ok=True)
                _remove(made)


def _remove(folders: Sequence[Path]) -> None:
    """Remove folders that are empty, from the innermost on."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def complain(text: str) -> None:
    """Print an error, without passwords and control characters."""
    with contextlib.suppress(BrokenPipeError):  # nobody reads it: the exit code says it
        typer.echo(f"error: {strip_control(masked(text))}", err=True)


@contextlib.contextmanager
def report_errors(debug: bool) -> Iterator[None]:
    """Report errors in one message: exit code 2 for those that the user can fix; tracebacks only on request."""
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
        if isinstance(error, OSError) and error.errno in _NO_PATH:
            complain(f"{cut(str(error.filename), 100)}: {error.strerror}\n  → give another path")
            raise typer.Exit(EXIT_BAD_INPUT) from None
        if is_for_training(error):
            complain(str(NotForTraining(f"{getattr(error, 'name', '')} is not in this environment")))
            raise typer.Exit(EXIT_BAD_INPUT) from None
        complain(f"{type(error).__name__}: {cut(message_of(error))}\n  → --debug shows where; .raypar/logs has more")
        raise typer.Exit(EXIT_FAILED) from None


StudyFile = Annotated[Path, typer.Argument(metavar="FILE", help="The study file, e.g. studies/quickstart.py.")]


def complete_study(context: typer.Context, incomplete: str) -> list[str]:
    """Complete a study's name in a shell; nothing where the store can't be read."""
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


StudyName = Annotated[
    str,
    typer.Argument(metavar="STUDY", help="The study's name, as `raypar list` shows it.", autocompletion=complete_study),
]
Since = Annotated[
    str | None,
    typer.Option(
        metavar="DATE|EXECUTION",
        help="Only trials since then: 2026-11-23, 2026-11-23T14:00, last, or the number or id of an execution.",
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
        help="5%: exit code 0 if B is shown to be at most so much slower at all points, 1 if it is shown to be "
        "slower at one, or has no result there, 3 if neither is shown.",
    ),
]
Inconclusive = Annotated[
    Literal["ok", "fail"] | None,
    output(help="Exit with 0 (ok) or 1 (fail) instead of 3, with --fail-if-slower."),
]
Price = Annotated[
    float | None, typer.Option(metavar="X", help="What a node costs an hour. (default: the study's price)")
]
AsJson = Annotated[bool, output("--json", help="Print one JSON document instead, in the format of docs/json.md.")]
Debug = Annotated[bool, output("--debug", help="Show tracebacks.")]
