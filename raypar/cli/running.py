"""The commands that run a study, or say what they would run: what is asked, checked before anything starts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raypar.cli.common import (
    say,
    set_data_dir,
    stdout,
    store_of,
    told,
    unknown_study,
    uri_of,
)
from raypar.cli.executing import run
from raypar.cli.options import (
    Address,
    DataDir,
    Debug,
    Exclusive,
    Fresh,
    Isolation,
    LogModel,
    NoRay,
    Repeats,
    Seed,
    Settings,
    StudyFile,
    StudyName,
    SystemMetrics,
    Timeout,
    TrackingUri,
)
from raypar.cli.submitting import dashboard_in, submit, unchecked
from raypar.errors import NotForTraining, RayparError
from raypar.signals import handle_signals

if TYPE_CHECKING:
    from raypar.execution.options import Options
    from raypar.study.loader import LoadedStudy
    from raypar.study.study import Study


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
    profile: Annotated[
        bool, typer.Option("--profile", help="Look into some steps of each point, after its training.")
    ] = False,
    log_model: LogModel = False,
    system_metrics: SystemMetrics = False,
    exclusive: Exclusive = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan only, as `raypar plan`.")] = False,
    debug: Debug = False,
) -> None:
    """Run a study: what the store has is kept, the rest is run, and the report says what it means."""
    with told(debug), handle_signals():
        from raypar.train.job import NUM_PROFILED_STEPS

        if exclusive and not address:
            raise RayparError("--exclusive without --address", hint="leave it out: a local Ray is yours alone anyway")
        dashboard = dashboard_in(address, data_dir, tracking_uri, no_ray=no_ray, dry_run=dry_run)
        try:
            loaded = load(file, settings, repeats, seed, None if dashboard else data_dir)
            if log_model:
                loaded = keeping_models(loaded)
            if profile:
                check_can_profile(loaded.study, "--profile")
            name, path, modules = loaded.study.name, loaded.path, loaded.module_files
        except NotForTraining as error:
            if dashboard is None:
                raise
            name, path, modules = unchecked(file, error)
        options = replace(
            options_here(tracking_uri),
            address=None if dashboard else address,
            isolation=isolation,
            rerun_all=fresh,
            with_ray=not no_ray,
            trial_timeout_s=trial_timeout,
            settings=settings or (),
            num_profiled_steps=NUM_PROFILED_STEPS if profile else 0,
            log_model=log_model,
            system_metrics=system_metrics,
            exclusive=exclusive,
        )
        if dashboard:
            own = {"--repeats": repeats, "--seed": seed, "--data-dir": data_dir, "--tracking-uri": tracking_uri}
            raise typer.Exit(submit(name, path, modules, dashboard, own, options))
        if dry_run:
            show_plan(loaded, options)
        else:
            run(loaded, options)


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
        show_plan(loaded, replace(options_here(tracking_uri), address=address, settings=settings or ()))


def resume(
    name: StudyName,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The study file, where it lies outside of this folder.")
    ] = None,
    address: Address = None,
    data_dir: DataDir = None,
    tracking_uri: TrackingUri = None,
    debug: Debug = False,
) -> None:
    """Run what is missing of a study that was interrupted, with the file and the flags of its last execution."""
    with told(debug), handle_signals():
        from raypar.execution.options import ResumeFlags

        store = store_of(tracking_uri)
        stored = store.resume_info(name)
        if not stored:
            raise unknown_study(name, store)
        last = ResumeFlags.from_stored(name, stored).trusted(name, Path.cwd(), file=file, address=address)
        if data_dir is None and last.data_dir is not None:
            data_dir = Path(last.data_dir)
        loaded = load(Path(last.file), last.set, last.repeats, last.seed, data_dir)
        if last.log_model:
            loaded = keeping_models(loaded)
        run(loaded, last.applied_to(options_here(tracking_uri)))


def load(
    file: Path, settings: list[str] | None, repeats: int | None, seed: int | None, data_dir: Path | None
) -> LoadedStudy:
    from raypar.study.loader import load_study
    from raypar.trace import mark

    mark("cli: starts")
    set_data_dir(data_dir)
    return load_study(file, settings or (), repeats, seed)


def options_here(tracking_uri: str | None) -> Options:
    """Return the options of a command in this folder that was given no other flags."""
    from raypar.execution.options import Options

    return Options(project_dir=Path.cwd(), tracking_uri=uri_of(tracking_uri), command=("raypar", *sys.argv[1:]))


def keeping_models(loaded: LoadedStudy) -> LoadedStudy:
    """The study as ``--log-model`` needs it. Raises RayparError where its models can't be logged."""
    from raypar.execution.best_model import check_can_log, with_models

    check_can_log(loaded.study)
    return replace(loaded, study=with_models(loaded.study))


def check_can_profile(study: Study, asked: str) -> None:
    """Raises RayparError for a study of a train loop."""
    if study.workload.is_train_loop:
        raise RayparError(
            f"{asked}: workload {study.workload.name} is a train loop, whose steps raypar can't look into",
            hint="use torch.profiler in the loop, or make a Workload of model and data",
        )


def show_plan(loaded: LoadedStudy, options: Options) -> None:
    from raypar.execution.execute import changed_code, cluster_at, stored_results
    from raypar.execution.plan import check_data, make_plan
    from raypar.report.listings import print_plan

    check_data(loaded.study)
    done = stored_results(loaded.study.name, options)
    with cluster_at(options.address) as cluster:
        made = make_plan(loaded.study, cluster, done, where=loaded.path)
    if changed := changed_code(made, loaded):
        say(stdout(), changed)
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
