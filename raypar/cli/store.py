"""Commands on stored studies, and those that list workloads and check the installation."""

from __future__ import annotations

import contextlib
import shlex
import sys
import webbrowser
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from raypar.cli import common
from raypar.errors import RayparError
from raypar.files import make_private_folder
from raypar.masking import masked
from raypar.reporting.text import strip_control
from raypar.signals import handle_signals
from raypar.track.names import safe_name
from raypar.units import counted

REPORTS = Path(".raypar/reports")


def list_studies(tracking_uri: common.TrackingUri = None, as_json: common.AsJson = False) -> None:
    """List the studies in the store."""
    from raypar.execution.stored import hint_above
    from raypar.reporting.listings import StudiesView, print_studies

    store = common.store_of(tracking_uri)
    studies = store.studies()
    if as_json:
        common.print_json(StudiesView(studies))
    elif not studies:
        common.say(common.stdout(), "no studies yet: `raypar study FILE` makes one")
        if above := hint_above(store):
            common.say(common.stdout(), f"  → {above}")
    else:
        print_studies(common.stdout(), studies)


def delete(name: common.StudyName, yes: common.Yes = False, tracking_uri: common.TrackingUri = None) -> None:
    """Delete a study.

    Its executions and trials leave the store and this folder's journals.
    """
    uri = common.uri_of(tracking_uri)
    with handle_signals(), changed_study(name, uri) as what:
        from raypar.track.uploader import delete_study

        confirm(f"delete {what}?", yes)
        experiment_id = delete_study(name, uri, Path.cwd())
        common.say(common.stdout(), f"deleted {what}")
        undo = (
            f"MLFLOW_TRACKING_URI={shlex.quote(masked(uri))} mlflow experiments restore --experiment-id {experiment_id}"
        )
        common.say(common.stdout(), f"  → undo: `{undo}`; its files stay until `mlflow gc` removes them")


def rename(
    name: common.StudyName,
    new: Annotated[str, typer.Argument(metavar="NEW", help="Its name from now on.")],
    yes: common.Yes = False,
    tracking_uri: common.TrackingUri = None,
) -> None:
    """Give a study another name.

    Its trials in the store get the new name. Its file has to be renamed too.
    """
    from raypar.study.study import name_problem

    if wrong := name_problem(new):
        raise RayparError(f"{new!r}: the name of a study {wrong}", hint="choose another name")
    if new == name:
        raise RayparError(f"study `{name}` has that name already", hint="choose another name")
    uri = common.uri_of(tracking_uri)
    with handle_signals(), changed_study(name, uri, new) as what:
        from rich.console import Console
        from rich.progress import track

        from raypar.track.uploader import rename_study

        confirm(f"rename {what} to `{new}`?", yes)
        console = Console(stderr=True)
        shown = partial(track, description="trials", console=console, transient=True, disable=not console.is_terminal)
        rename_study(name, new, uri, Path.cwd(), shown)
        common.say(common.stdout(), f"renamed {what} to `{new}`")
        common.say(common.stdout(), f"  → to go on with it, rename its file to {new}.py, or set Study(name={new!r})")


@contextlib.contextmanager
def changed_study(name: str, uri: str, new: str | None = None) -> Iterator[str]:
    """Keep a study from being run while it is changed, and give its name with what is stored of it.

    Raises:
        RayparError: it is not in the store, or being run, or there is a study `new`.
    """
    from raypar.execution.stored import unknown_study
    from raypar.run.locks import Holder, one_execution
    from raypar.run.study_lease import leased_study
    from raypar.track.client import lease_path, store_identity

    store = common.store_of(uri)
    with contextlib.ExitStack() as stack:
        for each in sorted({name, new or name}):
            me = Holder.here(each, ["raypar", *sys.argv[1:]])
            stack.enter_context(one_execution(me, store_identity(uri)))
            stack.enter_context(leased_study(me, lease_path(each, uri, Path.cwd())))
        executions = store.executions(name)
        if not executions and store.experiment_id(name) is None:
            raise unknown_study(name, store)
        if new is not None and (store.executions(new) or store.experiment_id(new) is not None):
            hint = f"choose another name, or `raypar store delete {new}` first"
            raise RayparError(f"there is a study `{new}` already", hint=hint)
        counts = counted(len(executions), "execution"), counted(len(store.results(name)), "trial")
        yield f"study `{name}` ({', '.join(counts)}, in {masked(uri)})"


def confirm(question: str, yes: bool) -> None:
    """Ask, unless the answer was given. Exits where it is no, and raises RayparError where there is none."""
    try:
        if yes or typer.confirm(strip_control(question), err=True):
            return
    except typer.Abort:
        typer.echo(err=True)  # the cursor stands behind the question
        raise RayparError("there was no answer, so nothing was changed", hint="answer y, or give --yes") from None
    common.complain("nothing was changed")
    raise typer.Exit(common.EXIT_FAILED)


def show(
    name: common.StudyName,
    since: common.Since = None,
    tracking_uri: common.TrackingUri = None,
    as_json: common.AsJson = False,
) -> None:
    """Show every trial of a study."""
    from raypar.analysis.question import reported_values
    from raypar.execution.stored import results_since, unknown_study
    from raypar.reporting.listings import TrialsView, print_trials
    from raypar.study.metric import Metric

    store = common.store_of(tracking_uri)
    results = store.results(name)
    if not results:
        raise unknown_study(name, store)
    results, scope = results_since(since, name, results, store)
    asked = store.question(name)
    metric = Metric(
        *(str(asked.get(key, default)) for key, default in (("metric", "accuracy"), ("mode", ""), ("unit", "")))
    )
    view = TrialsView.of(name, results, metric.read_from(reported_values(results, metric.name)), scope)
    if as_json:
        common.print_json(view)
        return
    if scope:
        common.say(common.stdout(), f"{name}: {counted(len(results), 'trial')} {scope}")
    print_trials(common.stdout(), view)


def report(
    name: common.StudyName,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it as one HTML file too, which needs nothing else.")
    ] = None,
    open_html: Annotated[
        bool, typer.Option("--open", help="Open it in the browser; without --html a file in .raypar/reports.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show all comparisons, scaling, effects, where time goes, all warnings.")
    ] = False,
    figures: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write each figure into a file of its own too.")
    ] = None,
    figure_format: Annotated[
        Literal["svg", "png"] | None, typer.Option("--format", help="Of the files of --figures. (default: both)")
    ] = None,
    since: common.Since = None,
    price: common.Price = None,
    tracking_uri: common.TrackingUri = None,
    as_json: common.AsJson = False,
) -> None:
    """Show the answer of a stored study."""
    from raypar.execution.stored import read_study
    from raypar.reporting.console import print_report
    from raypar.reporting.text import check_file, check_folder, write_text
    from raypar.reporting.view import StudyView

    files = {"--html": html, "--open": open_html, "--figures": figures, "--format": figure_format}
    common.check_json_alone(as_json, {**files, "--verbose": verbose})
    common.check_positive("--price", price)
    if html is not None:
        check_file(html)
    elif open_html:
        check_folder(REPORTS)
    if figures is not None:
        check_folder(figures)
    study = read_study(name, common.uri_of(tracking_uri), Path.cwd(), price_per_node_hour=price, since=since)
    view = StudyView(study.analysis)
    if as_json:
        common.print_json(view)
        return
    print_report(view, common.stdout(), verbose=verbose)
    if open_html and html is None:
        html = REPORTS / f"{safe_name(name)}.html"
        with contextlib.suppress(OSError):  # reported when the page is written
            make_private_folder(REPORTS)
    if html is not None:
        from raypar.reporting.html import Origin, html_report

        origin = Origin(study.tags, study.description, study.source)
        write_text(html, html_report(view, study.analysis.evidence.results, origin))
        common.say(common.stdout(), f"wrote {html}")
        if open_html and not webbrowser.open(html.resolve().as_uri()):
            common.say(common.stdout(), "no browser found here: open the file in one")
    if figures is not None:
        from raypar.reporting.figures import figures_of, write_figures

        kinds = [figure_format] if figure_format else ["svg", "png"]
        written = write_figures(figures_of(study.analysis, study.analysis.evidence.results), figures, kinds)
        names = ", ".join(dict.fromkeys(path.stem for path in written)) or "no figure"
        common.say(common.stdout(), f"wrote {len(written)} files to {figures} ({' and '.join(kinds)}): {names}")


def workloads(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[WORKLOAD]",
            help="Show this one with its options.",
            autocompletion=common.complete_workload,
        ),
    ] = None,
) -> None:
    """List the workloads that ship with raypar, or show one.

    The list has the data set and the metric of each, also of those that installed packages add. One is shown with its
    options.
    """
    from raypar.reporting.listings import print_workload, print_workloads
    from raypar.workloads import WORKLOADS

    if name is None:
        print_workloads(common.stdout(), WORKLOADS.values())
    else:
        print_workload(common.stdout(), common.workload_named(name))


def sync(tracking_uri: common.TrackingUri = None) -> None:
    """Upload results that are not in the store yet."""
    from raypar.track.uploader import sync as send

    sent = send(Path.cwd(), tracking_uri)
    counts = f"sent {sent.num_uploaded} records; {sent.num_left} wait on disk, {sent.num_rejected} were refused"
    for line in (counts, *sent.problems):
        common.say(common.stdout(), line)
    if sent.num_left:
        raise typer.Exit(common.EXIT_FAILED)


def ui(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[STUDY]",
            help="Open its points. (default: those of the last used one)",
            autocompletion=common.complete_study,
        ),
    ] = None,
    tracking_uri: common.TrackingUri = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The next free port from here on.")] = 5000,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Listen there; another than the default lets others in.")
    ] = "127.0.0.1",
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="Let in whoever reaches it, other users of this machine too.")
    ] = False,
    open_page: Annotated[
        bool, typer.Option("--open/--no-open", help="Open it in the browser, at a terminal with a display.")
    ] = True,
) -> None:
    """Show the studies in MLflow's UI, in the browser.

    It opens at a study's points, for you on this machine only, until Ctrl-C. The link opens once, in one browser. Of a
    store that is a server already, its links are shown.
    """
    from raypar.track.client import has_server
    from raypar.track.one_time_link import Access
    from raypar.track.server import home_url, serve

    uri = common.uri_of(tracking_uri)
    common.study_url(uri, "", name)  # a study that isn't there is reported before anything is started

    access = None if no_auth or has_server(uri) else Access()
    with contextlib.ExitStack() as until_the_end:

        def announce(server_url: str) -> None:
            link = access.link if access else str
            home, study = home_url(server_url), common.study_url(uri, server_url, name)
            if study is not None:
                common.say(common.stdout(), f"{study[0]}: {link(study[1])}")
            common.say(common.stdout(), f"{'all studies: ' if study else ''}{link(home)}")
            if access:
                common.say(common.stdout(), "a link opens once, in one browser; run `raypar ui` again for another")
            if open_page and common.has_browser():
                url = study[1] if study else home
                typer.launch(until_the_end.enter_context(access.page(url)).as_uri() if access else url)

        if has_server(uri):
            announce(masked(uri))
        else:
            warn = partial(typer.echo, err=True)
            serve(uri, Path.cwd(), port=port, host=host, access=access, announce=announce, warn=warn)


def doctor(
    data_dir: common.DataDir = None,
    tracking_uri: common.TrackingUri = None,
    address: common.Address = None,
    as_json: common.AsJson = False,
) -> None:
    """Check the installation, data, store and Ray, with fixes.

    The checks cover versions, cores, memory, data sets, the store, and that Ray starts or the cluster can be reached.
    """
    common.set_data_dir(data_dir)
    from raypar.doctor import examine
    from raypar.reporting.listings import DoctorView

    with common.quiet(Path.cwd() / ".raypar" / "logs" / "doctor.log") as console:
        checks = []
        for check in examine(Path.cwd(), common.uri_of(tracking_uri), address):
            checks.append(check)
            if as_json:
                continue
            common.say(console, f"{'ok' if check.is_ok else 'FAIL':5} {check.name}: {check.detail}")
            if check.advice:
                common.say(console, f"      → {check.advice}")
    view = DoctorView(checks)
    if as_json:
        common.print_json(view)
    if not view.is_ok:
        raise typer.Exit(common.EXIT_FAILED)


def export(
    name: common.StudyName,
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="All trials as .csv, .json or .parquet; a summary as .md.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
    tracking_uri: common.TrackingUri = None,
) -> None:
    """Write a study's trials, or a summary, into a file.

    Trials are for other programs, a summary is for a paper or a pull request. A table has a row per trial; units stand
    in the columns' names. A .json also has the reports and the time of every step.
    """
    from raypar.execution.stored import read_study
    from raypar.reporting.export import MARKDOWN, check_path, markdown_of, write
    from raypar.reporting.text import write_text
    from raypar.reporting.view import StudyView

    check_path(path, force=force)
    study = read_study(name, common.uri_of(tracking_uri), Path.cwd())
    if path.suffix.lower() == MARKDOWN:
        write_text(path, markdown_of(StudyView(study.analysis), study.origin, study.description))
        common.say(common.stdout(), f"wrote a summary of {name} to {path}")
        return
    write(path, study.question, study.results, lambda identity: study.store.step_times(name, identity))
    common.say(common.stdout(), f"wrote the {len(study.results)} trials of {name} to {path}")


def compare(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="The study that is the reference.", autocompletion=common.complete_study),
    ],
    b: Annotated[
        str,
        typer.Argument(metavar="B", help="The study that is held against it.", autocompletion=common.complete_study),
    ],
    baseline_uri: Annotated[
        str | None, common.where(metavar="URI", help="The MLflow store of A. (default: that of B)")
    ] = None,
    tracking_uri: common.TrackingUri = None,
    fail_if_slower: common.FailIfSlower = None,
    inconclusive: common.Inconclusive = None,
    as_json: common.AsJson = False,
) -> None:
    """Compare two studies: of other machines, versions or branches.

    Points with the same values are compared, as independent samples; other differences are listed.
    """
    allowed = common.allowed_share(fail_if_slower, inconclusive)
    from raypar.analysis.compare import Side
    from raypar.analysis.compare import compare as compared
    from raypar.execution.stored import read_study
    from raypar.reporting.compare import CompareView, print_comparison

    uris = [common.uri_of(baseline_uri or tracking_uri), common.uri_of(tracking_uri)]
    if a == b and uris[0] == uris[1]:
        hint = "name two studies, or give the store of A with --baseline-uri"
        raise RayparError(f"`{a}` is compared with itself", hint=hint)
    studies = [read_study(name, uri, Path.cwd()) for name, uri in zip((a, b), uris, strict=True)]
    sides = [Side(study.question, study.results, study.origin) for study in studies]
    comparison = compared(sides[0], sides[1], allowed)
    gate = comparison.gate if allowed is not None else None
    code = None if gate is None else common.gate_code(gate, inconclusive)
    view = CompareView(comparison, (masked(uris[0]), masked(uris[1])), code)
    if not as_json:
        print_comparison(common.stdout(), view)
    if allowed is not None and gate is None:
        raise RayparError(
            f"--fail-if-slower {fail_if_slower}: no point has a time in both studies, so there is nothing to judge",
            hint="run both studies with the same swept values and the same config",
        )
    if as_json:
        common.print_json(view)
    if code:
        raise typer.Exit(code)


def generate(
    name: common.StudyName,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What the model is to go on from.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Write at most so many tokens.")] = 128,
    tracking_uri: common.TrackingUri = None,
) -> None:
    """Generate text with the best model that a study kept."""
    from raypar.execution.stored import unknown_study
    from raypar.study.trial import best_first

    store = common.store_of(tracking_uri)
    results = store.results(name)
    if not results:
        raise unknown_study(name, store)
    question = store.question(name)
    for result in best_first(results, question.get("metric", ""), question.get("mode", "max")):
        folder = store.model_folder(name, result.spec.identity)
        if folder is not None:
            write = generator_of(result.spec.workload)
            typer.echo(strip_control(f"{result.spec.label} writes:"), err=True)
            typer.echo(strip_control(write(folder, prompt, max_new_tokens)))
            return
    raise RayparError(f"study `{name}` has kept no model", hint="run it with --set keep_model=true --fresh")


def generator_of(workload: str) -> Callable[[Path, str, int], str]:
    """Return the function that generates text with a model of the listed workload of that name."""
    from raypar.study.workload import Workload
    from raypar.workloads import WORKLOADS

    generators = {key: w.generate for key, w in WORKLOADS.items() if isinstance(w, Workload)}
    writers = ", ".join(key for key, write in generators.items() if write is not None)
    if workload not in WORKLOADS:
        message = f"workload `{workload}` does not ship with raypar, so raypar can't generate text with it"
        raise RayparError(message, hint=f"these write: {writers}")
    if (write := generators.get(workload)) is None:
        raise RayparError(f"workload `{workload}` generates no text", hint=f"these do: {writers}")
    return write
