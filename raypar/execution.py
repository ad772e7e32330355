"""One execution of a study: plan it, run what is missing, store every result, say what it all means."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TypeAlias

from raypar import units
from raypar.analysis.chosen import with_final_test
from raypar.analysis.speedup import StudyAnalysis, analyse
from raypar.final_model import is_logged, log_final_model, other_trials
from raypar.final_test import final_test, last_final_test
from raypar.keeper import Keeper
from raypar.options import Options
from raypar.planning import Plan, check_data, make_plan
from raypar.record import execution_record, scaling_metrics
from raypar.run.cluster import Cluster, joined_cluster, this_machine
from raypar.run.events import Listener, Notice
from raypar.run.runner import Interrupted
from raypar.runners import runner_for
from raypar.study.loader import LoadedStudy
from raypar.study.trial import TrialResult
from raypar.track.models import MODEL_NAME
from raypar.track.recorder import Execution, Recorder
from raypar.track.store import Store
from raypar.track.system import SystemMonitor

CHANGED_FILE = (
    "the study file has changed since its stored results were made; those of unchanged points are kept "
    "(--fresh runs everything again)"
)
REPORT_FILE = "report.html"
NO_REPORT = "the report was not stored as HTML, {}; `raypar report {} --html FILE` makes it"
NO_PROFILE = "the store has {} without a profile: `raypar profile` looks into one of them, --fresh runs them again"


ListenerOf: TypeAlias = Callable[[Plan], contextlib.AbstractContextManager[Listener]]


@dataclass
class Outcome:
    """How an execution ended."""

    analysis: StudyAnalysis
    num_failed: int
    num_unsent: int
    was_interrupted: bool
    log_dir: Path
    failures: list[TrialResult] = field(default_factory=list)


def stored_results(study_name: str, options: Options) -> tuple[TrialResult, ...]:
    """What the store and the spool have of the study, unless everything is to be run again."""
    return () if options.rerun_all else Store(options.tracking_uri, options.project_dir).results(study_name)


def execute(loaded: LoadedStudy, options: Options, listener_of: ListenerOf, notice: Listener) -> Outcome:
    """Run what is missing of a study.

    Args:
        listener_of: called with the plan; a context manager that gives the listener to show progress with.
        notice: gets what is to be said before there is a plan.

    Raises:
        RayparError: before anything was run.
    """
    study = loaded.study
    check_data(study)
    store = Store(options.tracking_uri, options.project_dir)
    store.check_writable()
    done = stored_results(study.name, options)
    log_dir = options.project_dir / ".raypar" / "logs" / f"{datetime.now():%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(cluster_at(options.address))
        plan = make_plan(study, cluster, done, where=loaded.path, with_ray=options.with_ray)
        if plan.done and (old := store.study_source(study.name)) is not None and old != loaded.source:
            notice(Notice(CHANGED_FILE))
        if options.num_profiled_steps and (unknown := _num_without_profile(plan)):
            notice(Notice(NO_PROFILE.format(units.counted(unknown, "point"))))
        results = {result.spec.identity: result for result in plan.done}
        if not plan.num_missing:
            stored = with_final_test(analyse(study, plan.done), last_final_test(store, study.name))
            num_unsent = _log_model_alone(loaded, options, stored, results, store, log_dir, notice)
            return Outcome(stored, 0, num_unsent, False, log_dir)
        if options.log_model and (others := other_trials(done, plan.missing)):
            notice(Notice(others))
        execution = execution_record(loaded, options)
        recorder = Recorder(execution, tracking_uri=options.tracking_uri, project_dir=options.project_dir)
        recorder.start(upload=False)
        monitor = stack.enter_context(SystemMonitor()) if options.system_metrics else None
        keeper = Keeper(study, results, recorder, stack.enter_context(listener_of(plan)), log_dir, monitor)
        interrupted = False
        try:
            log_dir.mkdir(parents=True)
            with runner_for(loaded, options, plan, log_dir) as runner:
                runner.run(study, plan.missing or tuple(result.spec for result in plan.done), keeper)
            analysis = analyse(study, tuple(results.values()))
            if study.workload.has_test and not keeper.failures:
                analysis = final_test(study, analysis, results, store, recorder)
            if options.log_model:
                log_final_model(study, analysis, results, store, recorder, log_dir / MODEL_NAME, keeper)
        except (Interrupted, KeyboardInterrupt):
            interrupted = True
            analysis = analyse(study, tuple(results.values()))
        except BaseException:
            recorder.close("failed")
            raise
        recorder.record_metrics(scaling_metrics(analysis))
        if not interrupted and not options.only_profiles:
            _add_report(recorder, execution, analysis, tuple(results.values()), keeper)
        num_unsent = recorder.close("killed" if interrupted else "failed" if keeper.failures else "finished")
    return Outcome(analysis, len(keeper.failures), num_unsent, interrupted, log_dir, keeper.failures)


def _log_model_alone(
    loaded: LoadedStudy,
    options: Options,
    analysis: StudyAnalysis,
    results: Mapping[str, TrialResult],
    store: Store,
    log_dir: Path,
    notice: Listener,
) -> int:
    """What ``--log-model`` asks for where no trial is missing; how many records are not in the store."""
    if not options.log_model or is_logged(loaded.study, analysis, results, store):
        return 0
    execution = execution_record(loaded, options)
    recorder = Recorder(execution, tracking_uri=options.tracking_uri, project_dir=options.project_dir)
    recorder.start()
    try:
        log_final_model(loaded.study, analysis, results, store, recorder, log_dir / MODEL_NAME, notice)
    except BaseException:
        recorder.close("failed")
        raise
    return recorder.close("finished")


def _add_report(
    recorder: Recorder,
    execution: Execution,
    analysis: StudyAnalysis,
    results: Sequence[TrialResult],
    notice: Listener,
) -> None:
    """The report as HTML among the execution's files. What goes wrong with it is told, and costs nothing else."""
    try:
        from raypar.report.html import Origin, html_report

        origin = Origin(execution.tags, execution.description, execution.study_source)
        recorder.add_artifact(REPORT_FILE, html_report(analysis, results, origin))
    except Exception as error:
        notice(Notice(NO_REPORT.format(f"{type(error).__name__}: {error}", execution.study)))


def _num_without_profile(plan: Plan) -> int:
    """How many trials of the first repeat are not run again and were not looked into."""
    return sum(not result.profile for result in plan.done if result.spec.repeat == 0)


def cluster_at(address: str | None) -> contextlib.AbstractContextManager[Cluster]:
    """The cluster at the address, joined; without one, what a private Ray would have, before it is started."""
    return joined_cluster(address) if address else contextlib.nullcontext(this_machine())
