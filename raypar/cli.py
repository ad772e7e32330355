"""The command line: verbs only. Whatever is heavy is imported inside the commands, so that help is instant."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raypar.errors import EXIT_BAD_INPUT, RayparError

if TYPE_CHECKING:
    from rich.console import Console

    from raypar.execution import Options, Outcome, Plan
    from raypar.study.loader import LoadedStudy

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="raypar",
    help="Declare a training study, run it on warm Ray Train gangs, and learn what parallelism bought.",
    epilog="Examples:  raypar study studies/quickstart.py    raypar report quickstart    raypar ui",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

StudyFile = Annotated[Path, typer.Argument(metavar="FILE", help="The study file, e.g. studies/quickstart.py.")]
StudyName = Annotated[str, typer.Argument(metavar="STUDY", help="The study's name, as `raypar list` shows it.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Fix a hyperparameter, or sweep it: --set num_workers=1,2."),
]
Repeats = Annotated[int | None, typer.Option(help="Run every point this often.")]
Seed = Annotated[int | None, typer.Option(help="Derive everything random from this.")]
Address = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="A Ray cluster that is there: auto, host:port. [default: a local Ray]"),
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Where data sets are. [default: RAYPAR_DATA_DIR, else the user's cache]"),
]
TrackingUri = Annotated[
    str | None,
    typer.Option(metavar="URI", help="The MLflow store. [default: MLFLOW_TRACKING_URI, else ./mlflow.db]"),
]
Isolation = Annotated[str, typer.Option(help="warm: gangs serve trial after trial; fresh: a gang for every trial.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Run trials again that the store has results of.")]
NoRay = Annotated[bool, typer.Option("--no-ray", help="Run on this machine without Ray (no searches).")]
Timeout = Annotated[
    float | None,
    typer.Option("--trial-timeout", metavar="SECONDS", help="A trial that takes longer counts as hung."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Show the version and leave.")] = False) -> None:
    if version:
        from raypar import __version__

        typer.echo(f"raypar {__version__}")
        raise typer.Exit


@app.command(epilog="Example:  raypar study studies/batch_size.py --data-dir data --set epochs=1 --repeats 5")
def study(
    file: StudyFile,
    settings: Settings = None,
    repeats: Repeats = None,
    seed: Seed = None,
    address: Address = None,
    data_dir: DataDir = None,
    tracking_uri: TrackingUri = None,
    isolation: Isolation = "warm",
    fresh: Fresh = False,
    no_ray: NoRay = False,
    trial_timeout: Timeout = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan only, as `raypar plan`.")] = False,
    debug: Debug = False,
) -> None:
    """Run a study: what the store has is kept, the rest is run, and the report says what it means."""
    with told(debug):
        loaded = load(file, settings, repeats, seed, data_dir)
        options = options_of(address, tracking_uri, isolation, fresh, no_ray, trial_timeout, settings)
        if dry_run:
            show_plan(loaded, options)
        else:
            run(loaded, options)


@app.command(epilog="Example:  raypar plan studies/batch_size.py --set num_workers=1,2,4")
def plan(
    file: StudyFile,
    settings: Settings = None,
    repeats: Repeats = None,
    seed: Seed = None,
    address: Address = None,
    data_dir: DataDir = None,
    tracking_uri: TrackingUri = None,
    debug: Debug = False,
) -> None:
    """Show what a study would do: points, trials, gangs, order, resources, time. Starts nothing."""
    with told(debug):
        loaded = load(file, settings, repeats, seed, data_dir)
        show_plan(loaded, options_of(address, tracking_uri, "warm", False, False, None, settings))


@app.command(epilog="Example:  raypar resume batch_size")
def resume(
    name: StudyName,
    address: Address = None,
    data_dir: DataDir = None,
    tracking_uri: TrackingUri = None,
    debug: Debug = False,
) -> None:
    """Run what is missing of a study that was interrupted, with the file and the flags of its last execution."""
    with told(debug):
        store = store_of(tracking_uri)
        last = store.resume_info(name)
        if not last:
            raise unknown_study(name, store)
        settings = [str(setting) for setting in last["set"]]
        loaded = load(Path(last["file"]), settings, int(last["repeats"]), int(last["seed"]), data_dir)
        run(loaded, options_of(address, tracking_uri, "warm", False, False, None, settings))


@app.command("list")
def list_studies(tracking_uri: TrackingUri = None, debug: Debug = False) -> None:
    """List the studies in the store."""
    with told(debug):
        from raypar.report.plan import print_studies

        studies = store_of(tracking_uri).studies()
        if not studies:
            stdout().print("no studies yet: `raypar study FILE` makes one")
            return
        rows = [(s.name, s.num_executions, s.num_finished, s.num_failed, s.last_used_at) for s in studies]
        print_studies(stdout(), rows)


@app.command()
def show(name: StudyName, tracking_uri: TrackingUri = None, debug: Debug = False) -> None:
    """Show every trial of a study."""
    with told(debug):
        from raypar.report.plan import print_trials

        store = store_of(tracking_uri)
        results = store.results(name)
        if not results:
            raise unknown_study(name, store)
        print_trials(stdout(), results)


@app.command()
def report(name: StudyName, tracking_uri: TrackingUri = None, debug: Debug = False) -> None:
    """Say what a study found, from the store; nothing is run."""
    with told(debug):
        from raypar.analysis.question import question_from_dict
        from raypar.analysis.speedup import analyse
        from raypar.report.console import print_report

        store = store_of(tracking_uri)
        results = store.results(name)
        if not results:
            raise unknown_study(name, store)
        print_report(analyse(question_from_dict(store.question(name)), results), stdout())


@app.command()
def sync(tracking_uri: TrackingUri = None, debug: Debug = False) -> None:
    """Write results to the store that it could not take when they were made."""
    with told(debug):
        from raypar.track.sync import sync as send

        sent = send(Path.cwd(), tracking_uri)
        say(
            stdout(),
            f"sent {sent.num_uploaded} records; {sent.num_left} wait on disk, {sent.num_rejected} were refused",
        )
        for problem in sent.problems:
            say(stdout(), problem)
        if sent.num_left:
            raise typer.Exit(EXIT_FAILED)


@app.command(epilog="Example:  raypar ui --port 5050")
def ui(
    tracking_uri: TrackingUri = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The next free port from here on.")] = 5000,
    debug: Debug = False,
) -> None:
    """Open MLflow's UI on the store, on this machine only, until Ctrl-C."""
    with told(debug):
        from raypar.track.server import serve

        serve(uri_of(tracking_uri), Path.cwd(), port=port, announce=typer.echo)


@app.command()
def doctor(
    data_dir: DataDir = None,
    tracking_uri: TrackingUri = None,
    debug: Debug = False,
) -> None:
    """Check versions, cores, data, the store, and that Ray starts; say how to mend what is amiss."""
    with told(debug):
        set_data_dir(data_dir)
        from raypar.doctor import examine

        with quiet(Path.cwd() / ".raypar" / "logs" / "doctor.log") as console:
            all_well = True
            for finding in examine(Path.cwd(), uri_of(tracking_uri)):
                all_well &= finding.is_well
                mark = "ok  " if finding.is_well else "AMISS"
                console.print(f"{mark:5} {finding.what}: {finding.found}", highlight=False, markup=False)
                if finding.mend:
                    console.print(f"      → {finding.mend}", highlight=False, markup=False)
        if not all_well:
            raise typer.Exit(EXIT_FAILED)


# ---- what the commands share


def load(
    file: Path, settings: list[str] | None, repeats: int | None, seed: int | None, data_dir: Path | None
) -> LoadedStudy:
    from raypar.study.loader import load_study
    from raypar.trace import mark

    mark("cli: starts")
    set_data_dir(data_dir)
    return load_study(file, settings or (), repeats, seed)


def set_data_dir(data_dir: Path | None) -> None:
    if data_dir is None:
        return
    if not data_dir.is_dir():
        raise RayparError(f"--data-dir {data_dir}: there is no such folder", hint="name the folder that holds the data")
    os.environ["RAYPAR_DATA_DIR"] = str(data_dir.resolve())


def uri_of(tracking_uri: str | None) -> str:
    from raypar.track.store import default_tracking_uri

    return tracking_uri or default_tracking_uri(Path.cwd())


def store_of(tracking_uri: str | None) -> Any:
    from raypar.track.store import Store

    return Store(uri_of(tracking_uri), Path.cwd())


def unknown_study(name: str, store: Any) -> RayparError:
    from raypar.errors import suggest

    known = [s.name for s in store.studies()]
    hint = suggest(name, known) if known else "the store is empty: `raypar study FILE` makes a study"
    return RayparError(f"no study `{name}` in the store", hint=hint)


def options_of(
    address: str | None,
    tracking_uri: str | None,
    isolation: str,
    fresh: bool,
    no_ray: bool,
    trial_timeout: float | None,
    settings: list[str] | None,
) -> Options:
    from raypar.execution import Options
    from raypar.run.runner import ISOLATIONS

    if isolation not in ISOLATIONS:
        raise RayparError(f"--isolation {isolation}: unknown", hint=f"one of {', '.join(ISOLATIONS)}")
    if trial_timeout is not None and trial_timeout <= 0:
        raise RayparError(f"--trial-timeout {trial_timeout:g}: must be greater than 0", hint="give it in seconds")
    if no_ray and address:
        raise RayparError(f"--address {address} and --no-ray exclude each other", hint="leave one out")
    return Options(
        project_dir=Path.cwd(),
        tracking_uri=uri_of(tracking_uri),
        address=address,
        with_ray=not no_ray,
        isolation=isolation,
        rerun_all=fresh,
        trial_timeout_s=trial_timeout,
        command=("raypar", *sys.argv[1:]),
        settings=settings or (),
    )


def show_plan(loaded: LoadedStudy, options: Options) -> None:
    from raypar.execution import check_data, cluster_at, make_plan, stored_results
    from raypar.report.plan import print_plan

    check_data(loaded.study)
    done = stored_results(loaded.study.name, options)
    with cluster_at(options.address) as cluster:
        made = make_plan(loaded.study, cluster, done, where=loaded.path)
    print_plan(
        stdout(),
        loaded.study,
        made.missing,
        num_trials=made.num_trials,
        num_missing=made.num_missing,
        placements=made.placements,
        num_cpus=made.cluster.num_cpus,
        estimated_s=made.estimated_s(),
        isolation=options.isolation,
    )


def run(loaded: LoadedStudy, options: Options) -> None:
    from raypar.execution import execute
    from raypar.report.console import print_report
    from raypar.report.live import LiveView
    from raypar.report.plan import print_failures
    from raypar.run.events import Notice

    with quiet(options.project_dir / ".raypar" / "logs" / "driver.log") as console:

        def view(made: Plan) -> LiveView:
            done = made.num_trials - made.num_missing
            if done:
                say(console, f"{done} of {made.num_trials} trials are in the store already and are not run again")
            return LiveView(console, made.num_trials, num_done_before=done)

        def notice(event: Any) -> None:
            if isinstance(event, Notice):
                say(console, event.text)

        outcome: Outcome = execute(loaded, options, view, notice)
        print_report(outcome.analysis, console)
        if outcome.failures:
            print_failures(console, outcome.failures, outcome.log_dir)
        if outcome.num_unsent:
            say(console, f"the store took not all: {outcome.num_unsent} records wait on disk; `raypar sync` sends them")
        if outcome.was_interrupted:
            say(console, f"interrupted; `raypar resume {loaded.study.name}` runs the rest")
        say(console, f"`raypar ui` shows the runs in MLflow, `raypar report {loaded.study.name}` this table again")
    if outcome.was_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if outcome.num_failed:
        raise typer.Exit(EXIT_FAILED)


def say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def stdout() -> Console:
    from rich.console import Console

    return Console(soft_wrap=False)


@contextlib.contextmanager
def quiet(log_path: Path) -> Iterator[Console]:
    """A console on the real standard output, while everything else that prints (Ray, MLflow, whatever they start)
    writes to a log file instead."""
    from rich.console import Console

    log_path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {fd: os.dup(fd) for fd in (1, 2)}
    with log_path.open("ab") as log, os.fdopen(os.dup(saved[1]), "w", encoding=sys.stdout.encoding) as real:
        for fd in saved:
            os.dup2(log.fileno(), fd)
        try:
            yield Console(file=real)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for fd, original in saved.items():
                os.dup2(original, fd)
                os.close(original)


@contextlib.contextmanager
def told(debug: bool) -> Iterator[None]:
    """What the user can mend is told in one message, exit code 2; tracebacks only where they were asked for."""
    try:
        yield
    except RayparError as error:
        if debug:
            raise
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_BAD_INPUT) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except typer.Exit:
        raise
    except Exception as error:
        if debug:
            raise
        typer.echo(f"error: {type(error).__name__}: {error}\n  → --debug shows where; .raypar/logs has more", err=True)
        raise typer.Exit(EXIT_FAILED) from None


def main() -> None:
    app()
