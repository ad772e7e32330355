"""One execution of a study: plan it, run what is missing, store every result, say what it all means."""

from __future__ import annotations

import contextlib
import signal
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from raypar import units
from raypar.analysis.analyse import StudyAnalysis, analyse
from raypar.analysis.chosen import with_final_test
from raypar.errors import BrokeOff, NotForTraining, RayparError, StoreError, check_for_training
from raypar.final_model import is_logged, log_final_model, other_trials
from raypar.final_test import final_test, last_final_test
from raypar.keeper import Keeper
from raypar.masking import masked
from raypar.options import Options
from raypar.planning import Plan, check_data, make_plan
from raypar.record import execution_record, scaling_metrics
from raypar.run.cluster import Cluster, joined_cluster, this_machine
from raypar.run.runner import Listener, Notice
from raypar.runners import runner_for
from raypar.signals import Interrupted, uninterrupted
from raypar.study.code import changed_files, files_text
from raypar.study.loader import LoadedStudy
from raypar.study.study import Study
from raypar.study.trial import TrialResult
from raypar.track.client import MODEL_NAME
from raypar.track.recorder import Execution, Recorder, Status
from raypar.track.store import Store
from raypar.track.system_metrics import SystemMonitor

CHANGED_CODE = "{} in the store ran other code: {} changed since. They are kept; --fresh runs all trials anew"
OPEN_CLUSTER = (
    "the Ray at {} runs the code of whoever reaches it, and shows them yours: it asks for no token "
    "(start it with RAY_AUTH_MODE=token)"
)
REPORT_FILE = "report.html"
NO_REPORT = "the report was not stored as HTML, {}; `raypar report {} --html FILE` makes it"
STOPPING = "interrupted: what runs is ended, what has ended is kept (a second Ctrl-C exits at once)"
PARTIAL = "Partial: {} when {} of {} were done."
NO_PROFILE = "the store has {} without a profile: `raypar profile` looks into one of them, --fresh runs them again"


ListenerOf: TypeAlias = Callable[[Plan], contextlib.AbstractContextManager[Listener]]


@dataclass
class Outcome:
    """How an execution ended.

    Attributes:
        num_unsent: records that the store did not take yet.
        num_trials: all trials of the study.
        num_done: of them, those that have a result by now, failures included.
        interrupted_by: the number of the signal that ended it; None: it ended by itself.
        broke_off: why it could not go on; None: it could.
    """

    analysis: StudyAnalysis
    log_dir: Path
    num_trials: int
    num_done: int
    num_unsent: int = 0
    interrupted_by: int | None = None
    broke_off: BrokeOff | None = None
    failures: list[TrialResult] = field(default_factory=list)

    @property
    def num_failed(self) -> int:
        return len(self.failures)

    @property
    def was_interrupted(self) -> bool:
        return self.interrupted_by is not None

    @property
    def partial(self) -> str:
        """What a report has to say of what it lacks; empty where it lacks nothing."""
        if not (self.was_interrupted or self.broke_off) or self.num_done >= self.num_trials:
            return ""
        how = "interrupted" if self.was_interrupted else "broke off"
        return PARTIAL.format(how, self.num_done, units.counted(self.num_trials, "trial"))


def stored_results(study_name: str, options: Options) -> tuple[TrialResult, ...]:
    """What the store and the spool have of the study, without what is to be run again."""
    if options.rerun_all:
        return ()
    known = Store(options.tracking_uri, options.project_dir).results(study_name)
    return tuple(result for result in known if result.started_at >= options.not_before)


def check_can_train(options: Options) -> None:
    """Raises NotForTraining where trials would run on this machine, and it has nothing to train with."""
    if options.address is None:
        check_for_training("the trials run here")


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
        if plan.cluster.takes_everybody:
            notice(Notice(OPEN_CLUSTER.format(masked(str(options.address)))))
        if changed := changed_code(plan, loaded):
            notice(Notice(changed))
        if options.num_profiled_steps and (unknown := _num_without_profile(plan)):
            notice(Notice(NO_PROFILE.format(units.counted(unknown, "point"))))
        results = {result.spec.identity: result for result in plan.done}
        if not plan.num_missing and not _lacks_final_test(study, plan, store):
            analysis = with_final_test(analyse(study, plan.done), last_final_test(store, study.name))
            num_unsent = _log_model_alone(loaded, options, analysis, results, store, log_dir, notice)
            return Outcome(analysis, log_dir, plan.num_trials, plan.num_trials, num_unsent)
        if options.log_model and (others := other_trials(done, plan.missing)):
            notice(Notice(others))
        execution = execution_record(loaded, options)
        recorder = Recorder(execution, tracking_uri=options.tracking_uri, project_dir=options.project_dir)
        recorder.start(upload=False)
        monitor = stack.enter_context(SystemMonitor()) if options.system_metrics else None
        view = stack.enter_context(listener_of(plan))
        keeper = Keeper(study, results, recorder, view, log_dir, monitor, loaded.code)
        interrupted_by: int | None = None
        broke_off: BrokeOff | None = None
        try:
            if plan.num_missing:
                log_dir.mkdir(parents=True)
                _run(loaded, options, plan, keeper, log_dir)
            analysis = analyse(study, tuple(results.values()))
            if study.workload.has_test and not keeper.failures:
                analysis = final_test(study, analysis, results, store, recorder)
            if options.log_model:
                log_final_model(study, analysis, results, store, recorder, log_dir / MODEL_NAME, keeper)
        except KeyboardInterrupt as error:
            interrupted_by = _signal_of(error)
            analysis = analyse(study, tuple(results.values()))
        except BrokeOff as error:
            broke_off = error
            analysis = analyse(study, tuple(results.values()))
        except BaseException:
            recorder.close("failed")
            raise
        outcome = Outcome(
            analysis,
            log_dir,
            plan.num_trials,
            len(results),
            interrupted_by=interrupted_by,
            broke_off=broke_off,
            failures=keeper.failures,
        )
        try:
            with uninterrupted():
                recorder.record_metrics(scaling_metrics(analysis))
                if results and not options.only_profiles:
                    _add_report(recorder, execution, outcome, tuple(results.values()), keeper)
                has_failed = bool(keeper.failures or outcome.broke_off)
                status: Status = "killed" if outcome.was_interrupted else "failed" if has_failed else "finished"
                outcome.num_unsent = recorder.close(status)
        except KeyboardInterrupt as error:
            outcome.interrupted_by = _signal_of(error)
        except StoreError as error:  # every result is kept, or was told not to be
            outcome.broke_off = outcome.broke_off or BrokeOff.by(error)
            with contextlib.suppress(StoreError):
                recorder.close("failed")
    return outcome


def changed_code(plan: Plan, loaded: LoadedStudy) -> str:
    """Return the notice of finished trials that ran other code than the study has now; empty if none did."""
    changes = [files for result in plan.done if (files := changed_files(result.code, loaded.code))]
    return (
        CHANGED_CODE.format(units.counted(len(changes), "trial"), files_text(chain.from_iterable(changes)))
        if changes
        else ""
    )


def _run(loaded: LoadedStudy, options: Options, plan: Plan, keeper: Keeper, log_dir: Path) -> None:
    has_begun = False
    try:
        with runner_for(loaded, options, plan, log_dir) as runner:
            has_begun = True
            try:
                runner.run(loaded.study, plan.missing or tuple(result.spec for result in plan.done), keeper)
            except KeyboardInterrupt:
                keeper(Notice(STOPPING))  # before all that was started is ended, which takes seconds
                raise
    except RayparError as error:
        if has_begun and not isinstance(error, NotForTraining):
            raise BrokeOff.by(error) from error
        raise
    finally:
        keeper.close()


def _signal_of(error: KeyboardInterrupt) -> int:
    return error.signal_number if isinstance(error, Interrupted) else int(signal.SIGINT)


def _lacks_final_test(study: Study, plan: Plan, store: Store) -> bool:
    """Whether the study was interrupted between its last trial and the test of the models that it chose."""
    if not study.workload.has_test or not any(result.spec.config.get("keep_model") for result in plan.done):
        return False
    return last_final_test(store, study.name) is None


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
    outcome: Outcome,
    results: Sequence[TrialResult],
    notice: Listener,
) -> None:
    """The report as HTML among the execution's files. What goes wrong with it is told, and costs nothing else."""
    try:
        from raypar.report.html import Origin, html_report

        origin = Origin(execution.tags, execution.description, execution.study_source, outcome.partial)
        recorder.add_artifact(REPORT_FILE, html_report(outcome.analysis, results, origin))
    except Exception as error:
        notice(Notice(NO_REPORT.format(f"{type(error).__name__}: {error}", execution.study)))


def _num_without_profile(plan: Plan) -> int:
    """How many trials of the first repeat are not run again and were not looked into."""
    return sum(not result.profile for result in plan.done if result.spec.repeat == 0)


def cluster_at(address: str | None) -> contextlib.AbstractContextManager[Cluster]:
    """The cluster at the address, joined; without one, what a private Ray would have, before it is started."""
    return joined_cluster(address) if address else contextlib.nullcontext(this_machine())
