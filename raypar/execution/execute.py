"""One execution of a study: plan, run what is missing, analyse, report."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from raypar import units
from raypar.analysis.analyse import StudyAnalysis, analyse
from raypar.errors import StoreError, cut, message_of
from raypar.execution.best_model import (
    final_test,
    is_logged,
    last_final_test,
    log_all_models,
    log_final_model,
    other_trials,
    unlogged,
    with_final_test,
)
from raypar.execution.machine import alone, cluster_for, leased_machine, other_load
from raypar.execution.options import Options
from raypar.execution.origin import check_origin
from raypar.execution.part import check_machines, machines_of
from raypar.execution.plan import ExecutionPlan, check_data, plan_of
from raypar.execution.prepare import Prepared, prepared, runner_for
from raypar.execution.results import (
    ExecutionOutcome,
    ResultHandler,
    execution_record,
    note_of,
    record_summary,
    speedup_curves,
)
from raypar.execution.running import run_trials
from raypar.masking import masked
from raypar.measure.cpu import CpuMonitor
from raypar.provenance import changed_files, files_text
from raypar.run.cluster import Cluster
from raypar.run.locks import Holder, present
from raypar.run.runner import Listener, Notice, Runner
from raypar.scratch import remove_abandoned
from raypar.signals import uninterrupted
from raypar.study.loader import LoadedStudy
from raypar.study.part import describe
from raypar.study.study import Study
from raypar.study.trial import TrialResult
from raypar.track.client import lease_path
from raypar.track.recorder import Execution, Recorder
from raypar.track.runs import BEST_MODEL, KEPT_MODEL
from raypar.track.store import Store
from raypar.track.uploader import end_abandoned
from raypar.train.affinity import allowed_cores

REPORT_FILE = "report.html"
CHANGED_CODE = "{} in the store ran other code: {} changed since. They are kept; --fresh runs all trials again"
OPEN_CLUSTER = (
    "anyone who can reach the Ray at {} can run code there and see yours: it requires no token "
    "(start it with RAY_AUTH_MODE=token)"
)
NOT_TESTED = "the chosen models were not evaluated on the test set, {}: {}; fix it, then run the study again"
NO_REPORT = "the report was not stored as HTML, {}; `raypar report {} --html FILE` writes it"
STOPPED_BEFORE = "{} failed before, and the code has not changed: {} are not run again (--retry-failed runs them)"
NO_PROFILE = "the store has {} without a profile: `raypar model profile` profiles one of them, --fresh runs them again"

ListenerOf: TypeAlias = Callable[[ExecutionPlan], contextlib.AbstractContextManager[Listener]]


def new_log_dir(project_dir: Path) -> Path:
    """Return the path of a folder for the logs of one execution. The folder does not exist yet."""
    return project_dir / ".raypar/logs" / f"{datetime.now():%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"


def report_page(outcome: ExecutionOutcome, execution: Execution) -> str:
    """Return the report as HTML."""
    from raypar.reporting.html import Origin, html_report
    from raypar.reporting.view import StudyView

    origin = Origin(execution.tags, execution.description, execution.study_source, outcome.partial)
    return html_report(StudyView(outcome.analysis), tuple(outcome.results.values()), origin)


@dataclass(frozen=True)
class Services:
    """Parts of raypar that an execution uses. Tests replace them."""

    store: Callable[[str, Path], Store] = Store
    recorder: Callable[..., Recorder] = Recorder
    cluster: Callable[[Study, Options, Listener], AbstractContextManager[Cluster]] = cluster_for
    machines: Callable[[Cluster], Mapping[str, Mapping[str, str]]] = machines_of
    other_load: Callable[[CpuMonitor, float], str] = other_load
    prepared: Callable[..., AbstractContextManager[Prepared]] = prepared
    runner: Callable[[Prepared, Options, ExecutionPlan, Recorder], AbstractContextManager[Runner]] = runner_for
    final_test: Callable[..., StudyAnalysis] = final_test
    report_page: Callable[[ExecutionOutcome, Execution], str] = report_page
    end_abandoned: Callable[[Path, str], object] = end_abandoned
    clock_s: Callable[[], float] = time.monotonic


SERVICES = Services()


def execute(
    loaded: LoadedStudy,
    options: Options,
    log_dir: Path,
    listener_of: ListenerOf,
    notice: Listener,
    services: Services = SERVICES,
) -> ExecutionOutcome:
    """Run the missing trials of a study: plan, run, analyse, report. Raises RayparError before anything runs.

    Args:
        log_dir: from `new_log_dir`.
        listener_of: returns, for a plan, a context manager that yields the listener for progress.
        notice: listener for messages before there is a plan.
    """
    begun_s, core_monitor, study = services.clock_s(), CpuMonitor(allowed_cores()), loaded.study
    core_monitor.start()
    this = _Execution(loaded, options, notice, services, services.store(options.tracking_uri, options.project_dir))
    with contextlib.ExitStack() as stack:
        part = options.part
        me = stack.enter_context(alone(study.name, options.command, options.tracking_uri, options.project_dir, part))
        check_data(study, loaded.path)
        this.store.check_writable()
        has_moved = check_origin(loaded, options, this.store)
        plan = this.plan(stack.enter_context(services.cluster(study, options, notice)))
        failures = [result for result in plan.done if not result.is_complete]
        outcome = ExecutionOutcome(plan, log_dir, {result.spec.identity: result for result in plan.done}, failures)
        if not plan.num_missing and not _lacks_final_test(plan, this.store):
            this.end_without_trials(outcome, has_moved=has_moved)
            return outcome

        if part is not None and plan.num_missing:
            whole = lease_path(study.name, options.tracking_uri, options.project_dir)
            check_machines(part, services.machines(plan.cluster), whole, has_results=bool(plan.done))
        neighbours: Callable[[], frozenset[Holder]] = frozenset
        if plan.num_missing and plan.cluster.cores is not None:
            plan = stack.enter_context(leased_machine(plan, me, notice, share=options.flags.share_machine))
            neighbours = stack.enter_context(present(me))
            outcome.plan = plan

        def tell_load() -> None:
            if plan.cluster.cores is None or study.is_search:
                return
            if text := services.other_load(core_monitor, services.clock_s() - begun_s):
                notice(Notice(text))

        ready = None
        if plan.num_missing:
            ready = stack.enter_context(services.prepared(loaded, options, plan, log_dir, tell_load))
        answer = note_of(analyse(plan.question, plan.done)) if plan.done else ""
        execution = execution_record(loaded, options, plan.question, answer)
        # A trial on all cores of this machine waits for uploads.
        in_background = options.with_ray and plan.cluster.is_own
        recorder = stack.enter_context(this.recorder(execution, upload=False, in_background=in_background))
        view = stack.enter_context(listener_of(plan))
        handler = ResultHandler(outcome, recorder, view, neighbours)
        with outcome.noting_the_end():
            if ready is not None:
                run_trials(services.runner(ready, options, plan, recorder), handler, services.clock_s)
            recorder.flush()
            this.choose_model(handler)
        with outcome.noting_the_end(), uninterrupted():
            this.report(execution, handler)
        if not (outcome.was_interrupted or outcome.num_unsent):
            services.end_abandoned(options.project_dir, options.tracking_uri)
    return outcome


@dataclass(frozen=True)
class _Execution:
    """Steps of an execution, with the state that they share."""

    loaded: LoadedStudy
    options: Options
    notice: Listener
    services: Services
    store: Store

    def plan(self, cluster: Cluster) -> ExecutionPlan:
        """Return the plan on a cluster after reporting its notices."""
        loaded, options = self.loaded, self.options
        stored = stored_results(loaded.study.name, options, self.store)
        plan = plan_of(loaded, options, cluster, stored)
        for text in _notices(options, plan, stored):
            self.notice(Notice(text))
        return plan

    def end_without_trials(self, outcome: ExecutionOutcome, *, has_moved: bool) -> None:
        """End an execution of a study without missing trials. Its model may still have to be logged."""
        study, options = self.loaded.study, self.options
        outcome.analysis = with_final_test(outcome.analysis, last_final_test(self.store, study.name))
        logs_best = options.flags.log_model and not is_logged(study, outcome.analysis, outcome.results, self.store)
        logs_all = options.flags.log_all_models and bool(unlogged(study, outcome.results, self.store))
        if logs_best or logs_all or has_moved:
            execution = execution_record(self.loaded, options, outcome.plan.question, note_of(outcome.analysis))
            with self.recorder(execution, upload=True) as recorder:
                self.log_models(outcome, recorder, self.notice, best=logs_best, every=logs_all)
                outcome.num_unsent = recorder.close("finished")
        self.services.end_abandoned(options.project_dir, options.tracking_uri)
        remove_abandoned()  # otherwise done when a run makes its folders

    @contextlib.contextmanager
    def recorder(self, execution: Execution, *, upload: bool, in_background: bool = False) -> Iterator[Recorder]:
        """Yield the recorder of an execution, which has failed unless the block closes it with another status.

        Args:
            in_background: see `Recorder`.
        """
        tracking_uri, project_dir = self.options.tracking_uri, self.options.project_dir
        recorder = self.services.recorder(
            execution, tracking_uri=tracking_uri, project_dir=project_dir, in_background=in_background
        )
        recorder.start(upload=upload)
        try:
            yield recorder
        finally:
            with contextlib.suppress(StoreError):
                recorder.close("failed")

    def choose_model(self, handler: ResultHandler) -> None:
        """Test the chosen models and log the best one, if the study and its flags ask for it.

        An error in the test only causes a notice.
        """
        study, outcome = self.loaded.study, handler.outcome
        if study.workload.has_test and not outcome.failures:
            given = (study, outcome.analysis, outcome.results, self.store, handler.recorder)
            try:
                outcome.analysis = self.services.final_test(*given)
            except StoreError:
                raise
            except Exception as error:  # the user's code
                handler(Notice(NOT_TESTED.format(type(error).__name__, cut(message_of(error)))))
        flags = self.options.flags
        self.log_models(outcome, handler.recorder, handler, best=flags.log_model, every=flags.log_all_models)

    def log_models(
        self, outcome: ExecutionOutcome, recorder: Recorder, notice: Listener, *, best: bool, every: bool
    ) -> None:
        study, results, store, folder = self.loaded.study, outcome.results, self.store, outcome.log_dir
        if best:
            log_final_model(study, outcome.analysis, results, store, recorder, folder / BEST_MODEL, notice)
        if every:
            log_all_models(study, results, store, recorder, folder / KEPT_MODEL, notice)

    def report(self, execution: Execution, handler: ResultHandler) -> None:
        """Store the answer and the HTML report. An error in the report only causes a notice."""
        outcome, recorder = handler.outcome, handler.recorder
        if outcome.results and not self.options.instead_of_training:
            recorder.record_metrics(speedup_curves(outcome.analysis))
            record_summary(recorder, lambda: outcome.analysis)
            try:
                recorder.add_artifact(REPORT_FILE, self.services.report_page(outcome, execution))
            except Exception as error:
                handler(Notice(NO_REPORT.format(f"{type(error).__name__}: {error}", execution.study)))
        outcome.num_unsent = recorder.close(outcome.status)


def stored_results(study_name: str, options: Options, store: Store) -> tuple[TrialResult, ...]:
    """Return the study's results in the store and the journals, without those to be made again."""
    if options.flags.fresh:
        return ()
    return tuple(result for result in store.results(study_name) if result.started_at >= options.not_before)


def changed_code(plan: ExecutionPlan) -> str:
    """Return the notice that finished trials ran other code than the study's current one; empty if none did."""
    changed = (changed_files(result.code, plan.code_of(result.spec)) for result in plan.done)
    changes = list(filter(None, changed))
    files = files_text(chain.from_iterable(changes))
    return CHANGED_CODE.format(units.counted(len(changes), "trial"), files) if changes else ""


def _notices(options: Options, plan: ExecutionPlan, stored: Sequence[TrialResult]) -> Iterator[str]:
    if plan.cluster.takes_everybody:
        yield OPEN_CLUSTER.format(masked(str(options.flags.address)))
    yield from plan.notices
    if options.part is not None:
        yield describe(options.part, plan.study)
    if text := changed_code(plan):
        yield text
    if failed := [result for result in plan.done if not result.is_complete]:
        num_points = len({result.spec.point_name for result in failed})
        yield STOPPED_BEFORE.format(units.counted(num_points, "point"), units.counted(len(failed), "trial"))
    num_unprofiled = sum(not r.profile for r in plan.done if r.spec.repeat == 0 and r.is_complete)
    if options.profiling.num_steps and num_unprofiled:
        yield NO_PROFILE.format(units.counted(num_unprofiled, "point"))
    if options.flags.keeps_models and (text := other_trials(stored, plan.missing)):
        yield text


def _lacks_final_test(plan: ExecutionPlan, store: Store) -> bool:
    """Return whether an interruption after the last trial left the chosen models untested."""
    if not plan.study.workload.has_test or not any(result.spec.config.get("keep_model") for result in plan.done):
        return False
    return last_final_test(store, plan.study.name) is None
