"""Commands on stored studies, and those that list workloads and check the installation."""

from __future__ import annotations

import contextlib
import shlex
import webbrowser
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from raypar.cli import common
from raypar.errors import RayparError
from raypar.files import make_private_folder
from raypar.masking import masked
from raypar.reporting.text import check_file, strip_control, write_text
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

    Its executions and trials are removed from the store and this folder's journals.

    Example:  raypar store delete batch_size
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
    new: Annotated[str, typer.Argument(metavar="NEW", help="New name.")],
    yes: common.Yes = False,
    tracking_uri: common.TrackingUri = None,
) -> None:
    """Give a study another name.

    This renames its trials in the store. Rename its file yourself.

    Example:  raypar store rename batch_size batch_size_old
    """
    from raypar.study.study import name_problem

    if wrong := name_problem(new):
        raise RayparError(f"{new!r}: the name of a study {wrong}", hint="choose another name")
    if new == name:
        raise RayparError(f"study `{name}` already has that name", hint="choose another name")
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
        common.say(common.stdout(), f"  → to continue it, rename its file to {new}.py, or set Study(name={new!r})")


@contextlib.contextmanager
def changed_study(name: str, uri: str, new: str | None = None) -> Iterator[str]:
    """Keep a study from running while the block changes it. Yields a description of the stored study.

    Raises:
        RayparError: the study is not in the store or is running, or a study `new` exists.
    """
    from raypar.execution.machine import alone
    from raypar.execution.stored import unknown_study

    store = common.store_of(uri)
    with contextlib.ExitStack() as stack:
        for each in sorted({name, new or name}):
            stack.enter_context(alone(each, common.own_command(), uri, Path.cwd()))
        executions = store.executions(name)
        if not executions and store.experiment_id(name) is None:
            raise unknown_study(name, store)
        if new is not None and (store.executions(new) or store.experiment_id(new) is not None):
            hint = f"choose another name, or `raypar store delete {new}` first"
            raise RayparError(f"a study `{new}` already exists", hint=hint)
        counts = counted(len(executions), "execution"), counted(len(store.results(name)), "trial")
        yield f"study `{name}` ({', '.join(counts)}, in {masked(uri)})"


def confirm(question: str, yes: bool) -> None:
    """Ask for confirmation unless `yes`. Exits if the answer is no. Raises RayparError if there is no answer."""
    try:
        if yes or typer.confirm(strip_control(question), err=True):
            return
    except typer.Abort:
        typer.echo(err=True)  # the cursor is still behind the question
        raise RayparError("no answer, so nothing was changed", hint="answer y, or give --yes") from None
    common.complain("nothing was changed")
    raise typer.Exit(common.EXIT_FAILED)


def show(
    name: common.StudyName,
    since: common.Since = None,
    tracking_uri: common.TrackingUri = None,
    as_json: common.AsJson = False,
) -> None:
    """Show every trial of a study.

    Example:  raypar store show batch_size
    """
    from raypar.analysis.question import reported_values
    from raypar.execution.stored import results_of, results_since
    from raypar.reporting.listings import TrialsView, print_trials
    from raypar.study.metric import Metric

    store = common.store_of(tracking_uri)
    results, scope = results_since(since, name, results_of(name, store), store)
    asked = {"metric": "accuracy", "mode": "", "unit": "", **store.question(name)}
    metric = Metric(str(asked["metric"]), str(asked["mode"]), str(asked["unit"]))
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
        Path | None, typer.Option(metavar="FILE", help="Also write the report as one self-contained HTML file.")
    ] = None,
    open_html: Annotated[
        bool, typer.Option("--open", help="Open the HTML report in the browser (without --html in .raypar/reports).")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show all comparisons, scaling, effects, time breakdowns and warnings.")
    ] = False,
    figures: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Also write each figure into a file.")] = None,
    figure_format: Annotated[
        Literal["svg", "png"] | None, typer.Option("--format", help="Format of the figures. (default: both)")
    ] = None,
    since: common.Since = None,
    price: common.Price = None,
    tracking_uri: common.TrackingUri = None,
    as_json: common.AsJson = False,
) -> None:
    """Show the answer of a stored study.

    Example:  raypar report batch_size --html report.html --open
    """
    from raypar.execution.stored import read_study
    from raypar.reporting.console import print_report
    from raypar.reporting.text import check_folder
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
            common.say(common.stdout(), "no browser found: open the file yourself")
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
            help="Show this one with its options, or that of a Python file.",
            autocompletion=common.complete_workload,
        ),
    ] = None,
) -> None:
    """List the workloads that ship with raypar, or show one.

    The list has the data set and the metric of each workload, including those of installed packages.

    Example:  raypar model list mnist_cnn
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
    counts = f"uploaded {sent.num_uploaded} records; {sent.num_left} are left on disk, {sent.num_rejected} were refused"
    for line in (counts, *sent.problems):
        common.say(common.stdout(), line)
    if sent.num_left:
        raise typer.Exit(common.EXIT_FAILED)


def ui(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[STUDY]",
            help="Study to open. (default: the one used last)",
            autocompletion=common.complete_study,
        ),
    ] = None,
    tracking_uri: common.TrackingUri = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port, or the next free one.")] = 5000,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; others can connect to any but the default.")
    ] = "127.0.0.1",
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="Admit everybody who reaches it, including other users.")
    ] = False,
    open_page: Annotated[
        bool, typer.Option("--open/--no-open", help="Open it in the browser if there is a display.")
    ] = True,
) -> None:
    """Show the studies in MLflow's UI, in the browser.

    It opens at a study's points and runs until Ctrl-C. Only you can open it, and only on this machine. The link works
    once, in one browser. If the store is a server, only its links are shown.

    Examples:  raypar ui    raypar ui batch_size --port 5050
    """
    from raypar.track.client import has_server
    from raypar.track.one_time_link import Access
    from raypar.track.server import home_url, serve

    uri = common.uri_of(tracking_uri)
    common.study_url(uri, "", name)  # raises for an unknown study before anything is started

    access = None if no_auth or has_server(uri) else Access()
    with contextlib.ExitStack() as until_the_end:

        def announce(server_url: str) -> None:
            link = access.link if access else str
            home, study = home_url(server_url), common.study_url(uri, server_url, name)
            if study is not None:
                common.say(common.stdout(), f"{study[0]}: {link(study[1])}")
            common.say(common.stdout(), f"{'all studies: ' if study else ''}{link(home)}")
            if access:
                common.say(common.stdout(), "a link works once, in one browser; run `raypar ui` again for another")
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

    The checks cover versions, cores, memory, data sets, the store, and a start of Ray or the connection to a cluster.
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
        Path | None,
        typer.Argument(metavar="[FILE]", help="All trials: .csv, .json or .parquet; a summary: .md."),
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write all trials as TensorBoard's event files.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the file, or an earlier export, if it is there.")
    ] = False,
    tracking_uri: common.TrackingUri = None,
) -> None:
    """Write a study's trials, or a summary, into a file.

    A table has a row per trial, with units in the column names. A .json also has the reports and every step time. A
    summary is for a paper or a pull request. TensorBoard shows the trials' curves, and in HParams a row per point.

    Examples:  raypar store export batch_size trials.csv    raypar store export batch_size --tensorboard runs
    """
    from raypar.analysis.analyse import trusted_speedups
    from raypar.execution.stored import read_study
    from raypar.reporting.export import MARKDOWN, check_path, markdown_of, write
    from raypar.reporting.tensorboard import check_log_folder, write_event_files
    from raypar.reporting.text import write_text
    from raypar.reporting.view import StudyView

    if path is None and tensorboard is None:
        raise RayparError(
            "nothing to write", hint="name a FILE (.csv, .json, .parquet or .md), or --tensorboard FOLDER"
        )
    if path is not None:
        check_path(path, force=force)
    if tensorboard is not None:
        check_log_folder(tensorboard, force=force)
    study = read_study(name, common.uri_of(tracking_uri), Path.cwd())
    if tensorboard is not None:
        write_event_files(tensorboard, study.results, trusted_speedups(study.question, study.results))
        shown = f"`tensorboard --logdir {shlex.quote(str(tensorboard))}` shows them"
        common.say(common.stdout(), f"wrote the {len(study.results)} trials of {name} to {tensorboard}; {shown}")
    if path is None:
        return
    if path.suffix.lower() == MARKDOWN:
        write_text(path, markdown_of(StudyView(study.analysis), study.origin, study.description))
        common.say(common.stdout(), f"wrote a summary of {name} to {path}")
        return
    write(path, study.question, study.results, lambda identity: study.store.step_times(name, identity))
    common.say(common.stdout(), f"wrote the {len(study.results)} trials of {name} to {path}")


def compare(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="Reference study.", autocompletion=common.complete_study),
    ],
    b: Annotated[
        str,
        typer.Argument(metavar="B", help="Study to compare with it.", autocompletion=common.complete_study),
    ],
    baseline_uri: Annotated[
        str | None, common.where(metavar="URI", help="MLflow store of A. (default: that of B)")
    ] = None,
    tracking_uri: common.TrackingUri = None,
    fail_if_slower: common.FailIfSlower = None,
    inconclusive: common.Inconclusive = None,
    html: common.ComparisonHtml = None,
    as_json: common.AsJson = False,
) -> None:
    """Compare studies of two machines, versions or branches.

    Points with the same values are compared as independent samples. Other differences are listed.

    Examples:  raypar store compare main_branch my_branch --fail-if-slower 5%
        raypar store compare main_branch my_branch --html comparison.html
    """
    common.check_json_alone(as_json, {"--html": html})
    if html is not None:
        check_file(html)
    allowed = common.allowed_share(fail_if_slower, inconclusive)
    from raypar.analysis.compare import Side
    from raypar.analysis.compare import compare as compared
    from raypar.execution.stored import read_study
    from raypar.reporting.compare import CompareView, print_comparison

    uris = [common.uri_of(baseline_uri or tracking_uri), common.uri_of(tracking_uri)]
    if a == b and uris[0] == uris[1]:
        hint = "name two studies, or the store of A with --baseline-uri"
        raise RayparError(f"`{a}` would be compared with itself", hint=hint)
    studies = [read_study(name, uri, Path.cwd()) for name, uri in zip((a, b), uris, strict=True)]
    sides = [Side(study.question, study.results, study.origin) for study in studies]
    comparison = compared(sides[0], sides[1], allowed)
    gate = comparison.gate if allowed is not None else None
    code = None if gate is None else common.gate_code(gate, inconclusive)
    view = CompareView(comparison, (masked(uris[0]), masked(uris[1])), code)
    if not as_json:
        print_comparison(common.stdout(), view)
    if html is not None:
        from raypar.reporting.comparison_page import compare_page

        write_text(html, compare_page(view))
        common.say(common.stdout(), f"wrote {html}")
    if allowed is not None and gate is None:
        raise RayparError(
            f"--fail-if-slower {fail_if_slower}: no point has a time in both studies, so nothing can be judged",
            hint="run both studies with the same swept values and the same config",
        )
    if as_json:
        common.print_json(view)
    if code:
        raise typer.Exit(code)


def generate(
    name: common.StudyName,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Write at most N tokens.")] = 128,
    tracking_uri: common.TrackingUri = None,
) -> None:
    """Generate text with the best model that a study kept.

    Example:  raypar model generate gpt2_finetune --prompt "Write a function to add two numbers."
    """
    from raypar.execution.stored import results_of
    from raypar.study.trial import best_first
    from raypar.study.workload import Workload

    store = common.store_of(tracking_uri)
    results = results_of(name, store)
    question = store.question(name)
    for result in best_first(results, question.get("metric", ""), question.get("mode", "max")):
        folder = store.model_folder(name, result.spec.identity)
        if folder is not None:
            workload = common.workload_of_study(store, name, result.spec.workload)
            if workload is None:
                problem = f"the file of study `{name}` is not in this folder, and no workload `{result.spec.workload}`"
                raise RayparError(f"{problem} ships with raypar", hint="run it where the study was run")
            if not isinstance(workload, Workload) or workload.generate is None:
                hint = "give the Workload generate=, which writes with a model that its save= kept"
                raise RayparError(f"workload `{workload.name}` generates no text", hint=hint)
            typer.echo(strip_control(f"text by {result.spec.label}:"), err=True)
            typer.echo(strip_control(workload.generate(folder, prompt, max_new_tokens)))
            return
    raise RayparError(f"study `{name}` kept no model", hint="run it with --set keep_model=true --fresh")
