"""Commands that run a study or show what they would run."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raypar.cli import cluster, common
from raypar.cli.flags import takes
from raypar.errors import NotForTraining, RayparError, check_for_training
from raypar.execution.flags import RunFlags
from raypar.signals import handle_signals, uninterrupted

if TYPE_CHECKING:
    from rich.console import Console

    from raypar.execution.options import Options
    from raypar.execution.plan import ExecutionPlan, TimeEstimate
    from raypar.execution.results import ExecutionOutcome
    from raypar.study.loader import LoadedStudy
    from raypar.study.study import Study
    from raypar.study.trial import TrialResult

MAX_OTHER_STUDIES = 10  # whose trials a plan looks at, where the study has none


def run(
    loaded: LoadedStudy, options: Options, announce: Callable[[Console, ExecutionOutcome], None] | None = None
) -> ExecutionOutcome:
    """Execute a study, and print its report.

    Args:
        announce: prints what stands before the report, where there are results.
    """
    from raypar.execution.execute import execute, new_log_dir
    from raypar.masking import masked
    from raypar.reporting.live import STARTING_RAY, STARTING_WORKERS, LiveView
    from raypar.track.client import has_server

    if options.flags.address is None:
        check_for_training("the trials run here")
    log_dir = new_log_dir(options.project_dir)
    with common.quiet(log_dir / common.DRIVER_LOG) as console:

        def view(made: ExecutionPlan) -> LiveView:
            if done := made.num_trials - made.num_missing:
                stored = f"{done} of {made.num_trials} trials are in the store already and are not run again"
                common.say(console, stored)
            starting = STARTING_RAY if options.with_ray and options.flags.address is None else STARTING_WORKERS
            return LiveView(
                console, made.num_trials, done=made.done, queued=made.missing, question=made.question, starting=starting
            )

        outcome: ExecutionOutcome = execute(loaded, options, log_dir, view, common.notices_on(console))
        # A terminal that was closed takes no report.
        gone = contextlib.suppress(OSError) if outcome.was_interrupted else contextlib.nullcontext()
        with uninterrupted(), gone:
            if announce is not None and outcome.num_done:
                announce(console, outcome)
            print_outcome(
                console, outcome, resume_command(loaded, options), shows_breakdown=options.profiling.num_steps > 0
            )
            if outcome.num_done and has_server(options.tracking_uri) and not outcome.num_unsent:
                with contextlib.suppress(RayparError):  # gone in this very moment: that costs a line
                    url = common.study_url(options.tracking_uri, masked(options.tracking_uri), loaded.study.name)
                    common.say(console, "{} in MLflow: {}".format(*url or ("", "")))
    return outcome


def print_outcome(console: Console, outcome: ExecutionOutcome, resume: str, *, shows_breakdown: bool = False) -> None:
    """Print the report of an execution, its failures, and how to go on.

    Args:
        resume: the command that goes on.
        shows_breakdown: where the time of a step goes, too, which is else in the verbose report alone.
    """
    from raypar.reporting.console import print_report
    from raypar.reporting.listings import print_failures
    from raypar.reporting.profile import breakdown_section
    from raypar.reporting.view import StudyView

    if outcome.partial and outcome.num_done:
        common.say(console, outcome.partial)
    if outcome.num_done:
        print_report(StudyView(outcome.analysis), console)
        for part in breakdown_section(
            outcome.analysis.profiles if shows_breakdown else (), console.width, console.encoding
        ):
            console.print(part)
    if outcome.failures:
        print_failures(console, outcome.failures, outcome.log_dir)
    if num := outcome.num_unsent:
        common.say(console, f"the store took not all: {num} records wait on disk; `raypar store sync` sends them")
    if outcome.was_interrupted and not outcome.num_done:
        common.say(console, f"interrupted before a trial had ended; `{resume}` runs them")
    elif outcome.was_interrupted and not outcome.partial:
        common.say(console, "interrupted when every trial was done")
    elif outcome.was_interrupted:
        common.say(console, f"interrupted; `{resume}` runs the rest")
    elif outcome.broke_off:
        common.say(console, f"broke off; `{resume}` runs the rest")


def resume_command(loaded: LoadedStudy, options: Options) -> str:
    """Return the command that goes on with a study in this folder; all other flags are stored with it."""
    from raypar.execution.options import has_to_be_named, is_in_folder
    from raypar.masking import masked
    from raypar.run.jobs import SUBMITTED_AS
    from raypar.track.store import default_tracking_uri

    if submitted_as := os.environ.get(SUBMITTED_AS):
        return submitted_as
    if options.revisions:
        return masked(shlex.join(options.command))
    words = ["raypar", "store", "resume", loaded.study.name]
    if not is_in_folder(str(loaded.path), options.project_dir):
        words += ["--file", str(loaded.path)]
    if options.flags.address is not None and has_to_be_named(options.flags.address):
        words += ["--address", options.flags.address]
    if options.tracking_uri != default_tracking_uri(options.project_dir):
        words += ["--tracking-uri", options.tracking_uri]
    return masked(shlex.join(words))


@takes()
def study(context: typer.Context, file: common.StudyFile, flags: RunFlags) -> None:
    """Run a study and report its answer.

    Trials that the store already has are not run again.
    """
    with handle_signals():
        from raypar.study.loader import name_of

        dashboard = cluster.dashboard_in(flags)
        try:
            loaded = load(file, replace(flags, data_dir=None) if dashboard else flags)
            name, path = loaded.study.name, loaded.path
        except NotForTraining as error:
            if dashboard is None:
                raise
            cluster.say(f"{error.message}: the study is not checked here, but on the head of the cluster")
            name, path = name_of(file), file.resolve()
        if dashboard:
            words, uri = cluster.flags_given(context), common.uri_of(flags.tracking_uri)
            raise typer.Exit(cluster.submit(name, path, dashboard, words, own_command(), uri))
        options = options_here(flags)
        if flags.dry_run:
            show_plan(loaded, options)
        else:
            common.exit_as(run(loaded, options))


@takes("set", "repeats", "seed", "address", "data_dir", "tracking_uri", "until", "budget", "margin", "max_repeats")
def plan(file: common.StudyFile, flags: RunFlags, as_json: common.AsJson = False) -> None:
    """Show what a study would run, and for how long.

    The plan lists points, trials, gangs, their order and resources. Nothing is started.
    """
    show_plan(load(file, flags), options_here(flags), as_json=as_json)


@takes("retry_failed", "file", "address", "data_dir", "tracking_uri")
def resume(
    name: common.StudyName,
    flags: RunFlags,
    file: Annotated[
        Path | None,
        common.where(metavar="FILE", help="The study file, where it has moved or is elsewhere."),
    ] = None,
) -> None:
    """Run the missing trials of an interrupted study.

    The file and the flags are those of its last execution.
    """
    with handle_signals():
        from raypar.execution.options import ResumeFlags
        from raypar.execution.stored import unknown_study

        store = common.store_of(flags.tracking_uri)
        stored = store.resume_info(name)
        if not stored:
            raise unknown_study(name, store)
        last = ResumeFlags.from_stored(name, stored)
        if last.command:
            problem = f"study `{name}` is continued by the command that ran it, not by `raypar store resume`"
            raise RayparError(problem, hint=f"run `{last.command}` to continue; finished trials are kept")
        last = last.trusted(name, Path.cwd(), file=file, address=flags.address)
        given = {key: getattr(flags, key) for key in ("retry_failed", "tracking_uri")}
        again = replace(last.flags, data_dir=flags.data_dir or last.flags.data_dir, **given)
        path = Path(last.file)
        loaded = load(path, again)
        if loaded.study.name != name:
            hint = f"rename the file to {name}.py, or set Study(name={name!r})"
            raise RayparError(f"{path} declares study `{loaded.study.name}`, not `{name}`", hint=hint)
        common.exit_as(run(loaded, options_here(again, not_before=last.not_before, has_moved=file is not None)))


def load(file: Path, flags: RunFlags) -> LoadedStudy:
    """Load a study as the flags change it. Raises RayparError where its models can't be logged, or steps profiled."""
    from raypar.study.loader import load_study
    from raypar.trace import mark

    mark("cli: starts")
    common.set_data_dir(flags.data_dir)
    with handle_signals():
        loaded = load_study(file, flags.set, flags.changes)
    if flags.log_model:
        loaded = keeping_models(loaded)
    if flags.num_profiled_steps:
        check_can_profile(loaded.study, "--profile")
    return loaded


def options_here(flags: RunFlags, **others: Any) -> Options:
    """Return the options of a command in this folder: its flags, and other fields of `Options`."""
    from raypar.execution.options import Options

    uri = common.uri_of(flags.tracking_uri)
    return Options(project_dir=Path.cwd(), tracking_uri=uri, flags=flags, command=own_command(), **others)


def own_command() -> tuple[str, ...]:
    """Return the words of this process's command line."""
    return ("raypar", *sys.argv[1:])


def keeping_models(loaded: LoadedStudy) -> LoadedStudy:
    """Return the study as ``--log-model`` needs it. Raises RayparError where its models can't be logged."""
    from raypar.execution.best_model import check_can_log, with_models

    check_can_log(loaded.study)
    return replace(loaded, study=with_models(loaded.study))


def check_can_profile(study: Study, asked: str) -> None:
    """Raise RayparError for a study of training code that raypar can't instrument."""
    from raypar.study.workload import Workload

    if not isinstance(study.workload, Workload):
        what = f"{asked}: workload {study.workload.name} is a {study.workload.kind}"
        hint = "use torch.profiler in its code, or make a Workload of model and data"
        raise RayparError(f"{what}, whose steps raypar can't instrument", hint=hint)


def show_plan(loaded: LoadedStudy, options: Options, *, as_json: bool = False) -> None:
    from raypar.execution.execute import changed_code, stored_results
    from raypar.execution.machine import cluster_for
    from raypar.execution.origin import check_origin
    from raypar.execution.plan import check_data, make_plan
    from raypar.reporting.listings import PlanView, print_plan

    check_data(loaded.study, loaded.path)
    store = common.store_of(options.tracking_uri)
    check_origin(loaded, options, store)
    done = stored_results(loaded.study.name, options, store)
    with cluster_for(loaded.study, options, common.notices_on(common.stdout())) as cluster:
        code_of = None if options.flags.retry_failed else partial(options.code_of, loaded=loaded)
        made = make_plan(loaded.study, cluster, done, where=loaded.path, code_of=code_of)
    for text in filter(None, (*made.notices, changed_code(made, loaded, options))):
        common.say(common.stdout(), text)
    estimate = time_estimate(made, done, options)
    plan = PlanView(
        loaded.study,
        made.missing,
        num_trials=made.num_trials,
        num_to_run=made.num_missing,
        gangs=list(made.placements),
        num_all_cores=made.cluster.num_cpus,
        isolation=options.flags.isolation,
        estimated_s=estimate.seconds if estimate else None,
        num_timed_trials=estimate.num_trials if estimate else 0,
        timed_study=estimate.study if estimate else "",
    )
    if as_json:
        common.print_json(plan)
    else:
        print_plan(common.stdout(), plan)


def time_estimate(made: ExecutionPlan, done: Sequence[TrialResult], options: Options) -> TimeEstimate | None:
    """Estimate the time of what a plan has missing, by the study's own trials or those of one with the same config."""
    if (estimate := made.estimate(done)) or not made.num_missing:
        return estimate
    store = common.store_of(options.tracking_uri)
    for other in store.studies()[:MAX_OTHER_STUDIES]:
        if estimate := made.estimate(store.results(other.name), only_alike=True):
            return estimate._replace(study="" if other.name == made.study.name else other.name)
    return None
