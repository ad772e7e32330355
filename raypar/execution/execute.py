"""One execution of a study: plan, run what is missing, analyse, report."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from raypar import units
from raypar.analysis.analyse import StudyAnalysis, analyse
from raypar.errors import BrokeOff, NotForTraining, RayparError, StoreError, check_for_training
from raypar.execution.best_model import (
    final_test,
    is_logged,
    last_final_test,
    log_final_model,
    other_trials,
    with_final_test,
)
from raypar.execution.options import Options
from raypar.execution.plan import Plan, check_data, make_plan
from raypar.execution.results import Keeper, execution_record, scaling_metrics
from raypar.masking import masked, secret_variables
from raypar.run.cluster import Cluster, joined_cluster, this_machine, watch_of_joined
from raypar.run.private_ray import private_ray
from raypar.run.ranks import ForkServer
from raypar.run.runner import Listener, Notice, Runner
from raypar.signals import Interrupted, uninterrupted
from raypar.study.code import changed_files, files_text
from raypar.study.loader import LoadedStudy
from raypar.study.study import Study
from raypar.study.trial import TrialResult
from raypar.track.client import MODEL_NAME
from raypar.track.recorder import Execution, Recorder, Status
from raypar.track.store import Store
from raypar.track.system_metrics import SystemMonitor
from raypar.train.job import RunSettings

CLUSTER_LOGS = Path("/tmp/raypar-logs")  # on every node of a cluster that is not our own
# What a trial's processes have to see of the driver's environment.
PASSED_ON = ("RAYPAR_DATA_DIR", "XDG_CACHE_HOME", "HOME")


@contextlib.contextmanager
def runner_for(loaded: LoadedStudy, options: Options, plan: Plan, log_dir: Path) -> Iterator[Runner]:
    """What runs the trials, ready to; with all that had to be started for it, and is stopped after."""
    import cloudpickle

    # The study's functions travel by value: the ranks don't import the study file.
    for name in (loaded.module_name, *loaded.local_modules):
        cloudpickle.register_pickle_by_value(sys.modules[name])
    settings = RunSettings(
        # Other nodes don't have this project's folder.
        log_dir=log_dir if plan.cluster.is_own else CLUSTER_LOGS / log_dir.name,
        isolation=options.isolation,
        environment={key: os.environ[key] for key in _passed_on(plan) if key in os.environ},
        sys_path=(str(loaded.path.parent),),
        preload=tuple(dict.fromkeys((*loaded.study.workload.preload, *loaded.imported_modules))),
        trial_timeout_s=options.trial_timeout_s,
        default_device=plan.cluster.default_device,
        ships_artifacts=not plan.cluster.is_own,
        profiling=options.profiling,
        exclusive=options.exclusive,
    )
    if not options.with_ray:
        from raypar.run.local import LocalRunner

        with LocalRunner(settings) as local:
            yield local
        return
    with contextlib.ExitStack() as stack:
        fork_address = ""
        if plan.cluster.is_own:
            if options.isolation == "warm":
                # Before Ray, so that its imports run while Ray starts.
                server = stack.enter_context(contextlib.closing(ForkServer(settings.preload, settings.sys_path)))
                fork_address = server.address
            # Ray's start is mostly waiting; Tune's import is not.
            importing = threading.Thread(target=_import_tuner)
            importing.start()
            stack.enter_context(private_ray(plan.cluster, plan.trial_cores))
            importing.join()
        else:
            stack.enter_context(watch_of_joined().watching())
        from raypar.run.tune import TuneRunner

        yield TuneRunner(settings, owns_cluster=plan.cluster.is_own, fork_address=fork_address)


def _passed_on(plan: Plan) -> Iterator[str]:
    """The variables that a trial's processes get from here. A Ray of our own has not inherited secrets; a trial's code
    may need them, to fetch its data. To machines that others share none is sent."""
    yield from PASSED_ON
    if plan.cluster.is_own:
        yield from secret_variables(os.environ)


def _import_tuner() -> None:
    import raypar.run.tune  # noqa: F401


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
        if options.profiling.num_steps and (unknown := _num_without_profile(plan)):
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
                if results and not options.profiling.instead_of_training:
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
