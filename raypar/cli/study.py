"""Commands that run a study or show what they would run."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raypar.cli import cluster, common
from raypar.cli.flags import takes, words_of
from raypar.cli.target import Baseline, Grids, Save, Target, study_file
from raypar.errors import NotForTraining, RayparError, check_for_training
from raypar.execution.flags import RunFlags
from raypar.signals import handle_signals, uninterrupted

if TYPE_CHECKING:
    from rich.console import Console, Group

    from raypar.analysis.question import Question
    from raypar.execution.options import Options
    from raypar.execution.plan import ExecutionPlan, TimeEstimate
    from raypar.execution.results import ExecutionOutcome
    from raypar.predict.memory import PointMemory
    from raypar.reporting.live import Display, LiveView
    from raypar.run.runner import Listener
    from raypar.study.loader import LoadedStudy
    from raypar.study.study import Study
    from raypar.study.trial import TrialResult, TrialSpec

MAX_OTHER_STUDIES = 10  # searched for trials to estimate a plan's time from


def run(
    loaded: LoadedStudy, options: Options, announce: Callable[[Console, ExecutionOutcome], None] | None = None
) -> ExecutionOutcome:
    """Execute a study and print its report.

    Args:
        announce: called before the report if there are results; prints what precedes it.
    """
    from raypar.execution.execute import execute, new_log_dir
    from raypar.masking import masked
    from raypar.run.jobs import TALLY
    from raypar.track.client import has_server

    if options.flags.address is None:
        check_for_training("the trials run here")
    log_dir = new_log_dir(options.project_dir)
    with common.quiet(log_dir / common.DRIVER_LOG) as console:

        def view(plan: ExecutionPlan) -> LiveView:
            return Beginning.of(options, plan).view(console)

        outcome: ExecutionOutcome = execute(loaded, options, log_dir, view, common.notices_on(console))
        if tally := os.environ.get(TALLY):
            Path(tally).write_text(str(outcome.num_finished))
        # The terminal may have been closed.
        gone = contextlib.suppress(OSError) if outcome.was_interrupted else contextlib.nullcontext()
        with uninterrupted(), gone:
            if announce is not None and outcome.num_done:
                announce(console, outcome)
            print_outcome(
                console, outcome, resume_command(loaded, options), shows_breakdown=options.profiling.num_steps > 0
            )
            if outcome.num_done and has_server(options.tracking_uri) and not outcome.num_unsent:
                with contextlib.suppress(RayparError):  # the server has gone in the meantime
                    url = common.study_url(options.tracking_uri, masked(options.tracking_uri), loaded.study.name)
                    common.say(console, "{} in MLflow: {}".format(*url or ("", "")))
    return outcome


@dataclass(frozen=True)
class Beginning:
    """Plan of an execution, as the live view needs it. `raypar.reporting.live.LiveView` describes the other fields."""

    num_stored: int
    num_trials: int
    done: Sequence[TrialResult]
    queued: Sequence[TrialSpec]
    question: Question
    starting: str

    @classmethod
    def of(cls, options: Options, plan: ExecutionPlan) -> Beginning:
        from raypar.reporting.live import STARTING_RAY, STARTING_WORKERS

        starting = STARTING_RAY if options.with_ray and options.flags.address is None else STARTING_WORKERS
        num_stored = plan.num_trials - plan.num_missing
        return cls(num_stored, plan.num_trials, plan.done, plan.missing, plan.question, starting)

    def view(self, console: Console, display: Callable[[Callable[[], Group]], Display] | None = None) -> LiveView:
        """Return the view, after a line on stored trials."""
        from raypar.reporting.live import LiveView

        if self.num_stored:
            what = f"{self.num_stored} of {self.num_trials} trials are in the store already and are not run again"
            common.say(console, what)
        return LiveView(
            console,
            self.num_trials,
            done=self.done,
            queued=self.queued,
            question=self.question,
            starting=self.starting,
            display=display,
        )


@contextlib.contextmanager
def executed(
    loaded: LoadedStudy, options: Options, *, shows_trials: bool = False
) -> Iterator[tuple[Console, ExecutionOutcome]]:
    """Execute a study whose report the block prints. Notices are printed before the block, failures after it.

    Args:
        shows_trials: show which trials run and have ended.
    """
    from raypar.execution.execute import execute, new_log_dir
    from raypar.reporting.listings import print_failures

    log_dir = new_log_dir(options.project_dir)
    with common.quiet(log_dir / common.DRIVER_LOG) as console:
        listen = common.notices_on(console)

        def view(plan: ExecutionPlan) -> contextlib.AbstractContextManager[Listener]:
            beginning = Beginning.of(options, plan)
            return beginning.view(console) if shows_trials else contextlib.nullcontext(listen)

        outcome = execute(loaded, options, log_dir, view, listen)
        yield console, outcome
        if outcome.failures:
            print_failures(console, outcome.failures, outcome.log_dir)


def print_outcome(console: Console, outcome: ExecutionOutcome, resume: str, *, shows_breakdown: bool = False) -> None:
    """Print the report of an execution, its failures, and how to continue.

    Args:
        resume: command that continues the study.
        shows_breakdown: also show the breakdown of a step's time, otherwise only in the verbose report.
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
        how = "`raypar store sync` uploads them, or shows why not"
        common.say(console, f"{num} records are not in the store yet; {how}")
    if outcome.was_interrupted and not outcome.num_done:
        common.say(console, f"interrupted before the first trial ended; run `{resume}` to continue")
    elif outcome.was_interrupted and not outcome.partial:
        common.say(console, "interrupted after the last trial")
    elif outcome.was_interrupted:
        common.say(console, f"interrupted; run `{resume}` to continue")
    elif outcome.broke_off:
        common.say(console, f"broke off; run `{resume}` to continue")


def resume_command(loaded: LoadedStudy, options: Options) -> str:
    """Return the command that continues a study in this folder. All other flags are stored with the study."""
    from raypar.execution.options import has_to_be_named, is_in_folder
    from raypar.masking import masked
    from raypar.run.jobs import SUBMITTED_AS
    from raypar.track.store import default_tracking_uri

    if submitted_as := os.environ.get(SUBMITTED_AS):
        return submitted_as
    if options.revisions or options.source:
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
def study(target: Target, flags: RunFlags, grid: Grids = None, baseline: Baseline = None, save: Save = None) -> None:
    """Run a study and report its answer.

    Trials that the store already has are not run again. A script or a command line needs no study file.

    Examples:  raypar study studies/batch_size.py --data-dir data --set epochs=1 --repeats 5
        raypar study train.py --grid num_workers=1,2
        raypar study "torchrun --nproc-per-node={num_workers} train.py --lr {lr}" --grid num_workers=1,2 --grid lr=0.1
    """
    with handle_signals():
        from raypar.study.loader import name_of

        file = study_file(target, grid, baseline, save)
        dashboard = cluster.dashboard_in(flags)
        try:
            loaded = load(file, replace(flags, data_dir=None) if dashboard else flags)
            name, path = loaded.study.name, loaded.path
        except NotForTraining as error:
            if dashboard is None:
                raise
            cluster.say(f"{error.message}: the head of the cluster will check the study")
            name, path = name_of(file), file.resolve()
        if dashboard:
            uri = common.uri_of(flags.tracking_uri)
            words = words_of(flags, without="address")
            raise typer.Exit(cluster.submit(name, path, dashboard, words, common.own_command(), uri))
        options = options_here(flags)
        if flags.repeat_best is not None:
            loaded, options = _repeating_best(loaded, options, flags.repeat_best)
        if flags.dry_run:
            show_plan(loaded, options)
        else:
            common.exit_as(run(loaded, options))


def _repeating_best(loaded: LoadedStudy, options: Options, num_points: int) -> tuple[LoadedStudy, Options]:
    """Return the study that repeats the leading points of a search, and the options that run it."""
    from raypar.execution.repeat_best import repeating_best

    stored = common.store_of(options.tracking_uri).results(loaded.study.name)
    return repeating_best(loaded, options, num_points, stored)


@takes(
    *("gpu_memory", "set", "repeats", "seed", "address", "data_dir", "tracking_uri"),
    *("until", "budget", "margin", "max_repeats"),
)
def plan(
    target: Target,
    flags: RunFlags,
    grid: Grids = None,
    baseline: Baseline = None,
    gpu_memory: common.GpuMemory = None,
    as_json: common.AsJson = False,
) -> None:
    """Show what a study would run, and for how long.

    The plan lists points, trials, gangs, their order and resources, and the points that don't fit into a GPU. Nothing
    is started.

    Examples:  raypar plan studies/batch_size.py --set num_workers=1,2,4
        raypar plan train.py --grid num_workers=1,2
    """
    gpu_bytes = common.gpu_bytes(gpu_memory)
    loaded = load(study_file(target, grid, baseline, None), flags)
    show_plan(loaded, options_here(flags), gpu_bytes=gpu_bytes, as_json=as_json)


@takes("retry_failed", "file", "address", "data_dir", "tracking_uri")
def resume(
    name: common.StudyName,
    flags: RunFlags,
    file: Annotated[
        Path | None,
        common.where(metavar="FILE", help="The study file, if it has moved or is in another folder."),
    ] = None,
) -> None:
    """Run the missing trials of an interrupted study.

    File and flags are those of its last execution.

    Example:  raypar store resume batch_size
    """
    with handle_signals():
        from raypar.execution.options import ResumeFlags
        from raypar.execution.stored import unknown_study

        store = common.store_of(flags.tracking_uri)
        stored = store.resume_info(name)
        if not stored and store.results(name):
            hint = f"write a study file, or `raypar store delete {name}` and import all runs again"
            raise RayparError(f"study `{name}` was imported: raypar has no code to run", hint=hint)
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
    """Load a study as its flags change it. Raises RayparError if its models can't be logged or its steps profiled."""
    from raypar.study.loader import load_study
    from raypar.trace import mark

    mark("cli: starts")
    common.set_data_dir(flags.data_dir)
    with handle_signals():
        loaded = load_study(file, flags.set, flags.of_study)
    if asked := flags.keeps_models:
        loaded = keeping_models(loaded, asked)
    if flags.num_profiled_steps:
        check_can_profile(loaded.study, "--profile")
    return loaded


def options_here(flags: RunFlags, **others: Any) -> Options:
    """Return the options of a command in this folder: its flags, and other fields of `Options`."""
    from raypar.execution.options import Options

    uri = common.uri_of(flags.tracking_uri)
    return Options(project_dir=Path.cwd(), tracking_uri=uri, flags=flags, command=common.own_command(), **others)


def keeping_models(loaded: LoadedStudy, asked: str) -> LoadedStudy:
    """Return the study with trials that keep models. Raises RayparError if they can't be logged. `asked`: the flag."""
    from raypar.execution.best_model import check_can_log, with_models

    check_can_log(loaded.study, asked)
    return replace(loaded, study=with_models(loaded.study))


def check_can_profile(study: Study, asked: str) -> None:
    """Raise RayparError if the steps of the study's training code can't be profiled. `asked`: what profiles them."""
    from raypar.study.workload import CommandWorkload

    if not isinstance(study.workload, CommandWorkload):
        check_is_model(study, asked)


def check_is_model(study: Study, asked: str) -> None:
    """Raise RayparError if the study's workload has training code of its own. `asked`: what can't be done with it."""
    from raypar.study.workload import Workload

    if not isinstance(study.workload, Workload):
        what = f"{asked}: workload {study.workload.name} is a {study.workload.kind}"
        hint = "use torch.profiler in its code, or make a Workload of model and data"
        raise RayparError(f"{what}, whose steps raypar can't instrument", hint=hint)


def predicted_memory(loaded: LoadedStudy, gpu_bytes: float | None, asked: str) -> tuple[PointMemory, ...]:
    """Return the predicted memory of a worker at each point of a study.

    Args:
        gpu_bytes: memory of a GPU; None: on CPUs.
        asked: what asks for it.

    Raises:
        RayparError: it can't be predicted for this study, or its data are missing.
    """
    from raypar.execution.plan import check_data
    from raypar.predict.memory import predict_study_memory
    from raypar.study.workload import CommandWorkload

    check_for_training("without it raypar can't run the model's steps")
    study = loaded.study
    if not isinstance(study.workload, CommandWorkload):
        check_is_model(study, asked)
    if study.is_search:
        hint = "give its space values: --set lr=0.1"
        raise RayparError(f"{asked}: {loaded.path} is a search, which has no fixed points", hint=hint)
    check_data(study, loaded.path)
    return predict_study_memory(study, loaded.path.parent, gpu_bytes)


def show_plan(loaded: LoadedStudy, options: Options, *, gpu_bytes: float | None = None, as_json: bool = False) -> None:
    """Print what a study would run.

    Args:
        gpu_bytes: memory of a GPU, to name the points that may not fit; None: not asked for.
    """
    from raypar.execution.execute import changed_code, stored_results
    from raypar.execution.machine import cluster_for
    from raypar.execution.origin import check_origin
    from raypar.execution.plan import check_data, plan_of
    from raypar.reporting.listings import PlanView, print_plan

    check_data(loaded.study, loaded.path)
    memory = () if gpu_bytes is None else predicted_memory(loaded, gpu_bytes, "raypar plan --gpu-memory")
    store = common.store_of(options.tracking_uri)
    check_origin(loaded, options, store)
    done = stored_results(loaded.study.name, options, store)
    with cluster_for(loaded.study, options, common.notices_on(common.stdout())) as cluster:
        made = plan_of(loaded, options, cluster, done)
    for text in filter(None, (*made.notices, changed_code(made))):
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
        gpu_bytes=gpu_bytes,
        memory=memory,
    )
    if as_json:
        common.print_json(plan)
    else:
        print_plan(common.stdout(), plan)


def time_estimate(made: ExecutionPlan, done: Sequence[TrialResult], options: Options) -> TimeEstimate | None:
    """Estimate the time of a plan's missing trials from those of the study, or of one with the same configs."""
    if (estimate := made.estimate(done)) or not made.num_missing:
        return estimate
    store = common.store_of(options.tracking_uri)
    for other in store.studies()[:MAX_OTHER_STUDIES]:
        if estimate := made.estimate(store.results(other.name), only_alike=True):
            return estimate._replace(study="" if other.name == made.study.name else other.name)
    return None
