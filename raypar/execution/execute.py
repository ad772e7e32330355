"""One execution of a study: plan, run what is missing, analyse, report."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import TypeAlias

from raypar import units
from raypar.analysis.analyse import analyse
from raypar.analysis.load import MAX_BUSY
from raypar.analysis.settle import Stopped
from raypar.errors import BrokeOff, ClusterError, NotForTraining, RayparError, StoreError, WorkloadError
from raypar.execution.best_model import (
    final_test,
    is_logged,
    last_final_test,
    log_final_model,
    other_trials,
    with_final_test,
)
from raypar.execution.options import Options
from raypar.execution.origin import check_origin
from raypar.execution.plan import ExecutionPlan, NextSpecs, check_data, lacks_nodes, make_plan, next_block
from raypar.execution.results import (
    ExecutionOutcome,
    ResultHandler,
    execution_record,
    note_of,
    record_summary,
    speedup_curves,
)
from raypar.execution.revisions import pickle_by_value, preload_of
from raypar.files import make_private_folder
from raypar.gpus import visible_gpus, visible_only
from raypar.masking import masked, secret_variables
from raypar.provenance import changed_files, files_text
from raypar.run.cluster import (
    Cluster,
    joined_cluster,
    on_every_node,
    this_machine,
    wait_for_nodes,
    watch_of_cluster,
)
from raypar.run.locks import Holder, leased_cores, leased_gpus, one_execution, present
from raypar.run.placement import near_first
from raypar.run.private_ray import private_ray
from raypar.run.ranks import ForkAgent, check_workload
from raypar.run.runner import Event, Listener, Notice, Runner, TrialEnded, TrialsAdded, TrialStarted
from raypar.run.study_lease import leased_study
from raypar.scratch import LOGS_PREFIX, remove_abandoned, remove_logs
from raypar.signals import raise_again, uninterrupted
from raypar.study.loader import LoadedStudy
from raypar.study.space import examples
from raypar.study.study import Study
from raypar.study.trial import TrialResult, TrialSpec, point_label
from raypar.track.client import MODEL_NAME, lease_path, store_identity
from raypar.track.recorder import Execution, Recorder
from raypar.track.store import Store
from raypar.track.system_metrics import system_sampled
from raypar.track.uploader import end_abandoned
from raypar.train.affinity import allowed_cores, cores_near_gpu, host_cores
from raypar.train.job import CheckJob, RunSettings
from raypar.train.telemetry import CpuMonitor

# Variables of the driver's environment that a trial's processes need: on every node, and on this machine alone.
PASSED_ON, PASSED_ON_HERE = ("RAYPAR_DATA_DIR",), ("XDG_CACHE_HOME", "HOME")
# Beginnings of the names of those that configure the network between ranks: NCCL, gloo, and libfabric for EFA.
NETWORK_VARIABLES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "FI_")
PLACING = ("device", "num_workers")  # options that decide how many GPUs a trial has
REPORT_FILE = "report.html"
CHECK_LOG = "check.log"
LOGS_TIMEOUT_S = 10.0
CHANGED_CODE = "{} in the store ran other code: {} changed since. They are kept; --fresh runs all trials anew"
OPEN_CLUSTER = (
    "the Ray at {} runs the code of whoever reaches it, and shows them yours: it asks for no token "
    "(start it with RAY_AUTH_MODE=token)"
)
NO_REPORT = "the report was not stored as HTML, {}; `raypar report {} --html FILE` makes it"
OTHER_LOAD = "other processes use {} of the cores: times will be noisy; wait until idle"
MIN_LOAD_S, MAX_LOAD_S = 0.5, 5.0  # over which other load is measured: long enough to be seen, and no longer ago
STOPPING = "stopping: finished trials are kept (a second Ctrl-C exits at once)"
STOPPED_BEFORE = "{} failed before, and the code has not changed: {} are not run again (--retry-failed runs them)"
NO_PROFILE = "the store has {} without a profile: `raypar model profile` profiles one of them, --fresh runs them again"

ListenerOf: TypeAlias = Callable[[ExecutionPlan], contextlib.AbstractContextManager[Listener]]


def new_log_dir(project_dir: Path) -> Path:
    """Return a folder for the logs of one execution, which is still to be made."""
    return project_dir / ".raypar/logs" / f"{datetime.now():%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"


def execute(
    loaded: LoadedStudy, options: Options, log_dir: Path, listener_of: ListenerOf, notice: Listener
) -> ExecutionOutcome:
    """Run what is missing of a study: plan, run, analyse, report. Raises RayparError before anything was run.

    Args:
        log_dir: from `new_log_dir`.
        listener_of: called with the plan; a context manager that gives the listener to show progress with.
        notice: gets what is to be reported before there is a plan.
    """
    begun_s, core_monitor = time.monotonic(), CpuMonitor(allowed_cores())
    core_monitor.start()
    study, store = loaded.study, Store(options.tracking_uri, options.project_dir)
    me = Holder.here(study.name, options.command)
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_execution(me, store_identity(options.tracking_uri)))
        path = lease_path(study.name, options.tracking_uri, options.project_dir)
        stack.enter_context(leased_study(me, path))
        check_data(study, loaded.path)
        store.check_writable()
        has_moved = check_origin(loaded, options, store)
        cluster = stack.enter_context(cluster_for(study, options, notice))
        stored = stored_results(study.name, options)
        code_of = None if options.flags.retry_failed else partial(options.code_of, loaded=loaded)
        plan = make_plan(
            study,
            cluster,
            stored,
            where=loaded.path,
            with_ray=options.with_ray,
            code_of=code_of,
            allowed_share=options.allowed_share,
        )
        plan = replace(plan, code=options.codes(loaded))
        if options.next_specs is not None:
            plan = plan.continued(stored, options.next_specs)
        for text in _notices(loaded, options, plan, stored):
            notice(Notice(text))
        failures = [result for result in plan.done if not result.is_complete]
        outcome = ExecutionOutcome(plan, log_dir, {result.spec.identity: result for result in plan.done}, failures)
        if not plan.num_missing and not _lacks_final_test(plan, store):
            outcome.analysis = with_final_test(outcome.analysis, last_final_test(store, study.name))
            if options.flags.log_model and not is_logged(study, outcome.analysis, outcome.results, store):
                _log_model_alone(loaded, options, outcome, store, notice)
            elif has_moved:
                with _recorder(_record_of(loaded, options, outcome), options, upload=True) as recorder:
                    outcome.num_unsent = recorder.close("finished")
            end_abandoned(options.project_dir, options.tracking_uri)
            remove_abandoned()  # as a run does that makes such folders itself
            return outcome

        neighbours: Callable[[], frozenset[Holder]] = frozenset
        if plan.num_missing and plan.cluster.cores is not None:
            plan = stack.enter_context(_on_leased_machine(plan, me, notice, share=options.flags.share_machine))
            neighbours = stack.enter_context(present(me))
            outcome.plan = plan
            if not study.is_search and (text := other_load(core_monitor, time.monotonic() - begun_s)):
                notice(Notice(text))
        ready = stack.enter_context(prepared(loaded, options, plan, log_dir)) if plan.num_missing else None
        answer = note_of(analyse(plan.question, plan.done)) if plan.done else ""
        execution = execution_record(loaded, options, plan.question, answer)
        recorder = stack.enter_context(_recorder(execution, options, upload=False))
        view = stack.enter_context(listener_of(plan))
        code_of = partial(options.code_of, loaded=loaded)
        handler = ResultHandler(outcome, recorder, view, code_of=code_of, neighbours=neighbours)
        with outcome.noting_the_end():
            if ready is not None:
                _run(ready, options, plan, handler, log_dir)
            if study.workload.has_test and not outcome.failures:
                outcome.analysis = final_test(study, outcome.analysis, outcome.results, store, recorder)
            if options.flags.log_model:
                folder = log_dir / MODEL_NAME
                log_final_model(study, outcome.analysis, outcome.results, store, recorder, folder, handler)
        with outcome.noting_the_end(), uninterrupted():
            if outcome.results and not options.profiling.instead_of_training:
                recorder.record_metrics(speedup_curves(outcome.analysis))
                record_summary(recorder, lambda: outcome.analysis)
                _add_report(recorder, execution, outcome, handler)
            outcome.num_unsent = recorder.close(outcome.status)
        if not (outcome.was_interrupted or outcome.num_unsent):
            end_abandoned(options.project_dir, options.tracking_uri)
    return outcome


@contextlib.contextmanager
def _on_leased_machine(plan: ExecutionPlan, me: Holder, notice: Listener, *, share: bool) -> Iterator[ExecutionPlan]:
    """Lease what a study needs of this machine, and hide other GPUs from what it starts.

    A study on the CPU has all cores, one on GPUs has these GPUs and keeps to their share of the cores. GPUs come first:
    a study that waits for them keeps no cores from others.

    Yields:
        The plan on the leased parts.
    """
    cores, mine = plan.cluster.cores or host_cores(), set[int]()
    widest, most = _num_gpus(plan)
    with contextlib.ExitStack() as stack:
        if visible := visible_gpus() if widest else ():
            least = min(widest * (plan.study.max_concurrent_trials or 1), len(visible))
            gpus = stack.enter_context(leased_gpus(me, visible, least, max(least, most), notice, share=share))
            near = near_first(cores, {i: cores_near_gpu(i) for i in range(len(visible))}, len(cores) // len(visible))
            mine = {number for i, gpu in enumerate(visible) if gpu in gpus for number in near[i]}
            stack.enter_context(visible_only(gpus))
            node = {**plan.cluster.nodes[0], "GPU": len(gpus)}
            plan = replace(plan, cluster=replace(plan.cluster, nodes=(node,)))
        if not (visible and plan.is_on_gpus):
            stack.enter_context(leased_cores(me, cores, notice, share=share))
        elif plan.fits_on(mine):
            cores = tuple(core for core in cores if core.number in mine)
        yield plan.within(plan.trial_cores(cores))


def _num_gpus(plan: ExecutionPlan) -> tuple[int, int]:
    """Return how many GPUs the largest trial needs, and how many the gangs of all placements have side by side."""
    study = plan.study
    placements = {spec.placement for spec in (plan.specs if study.until else plan.missing)}
    if study.is_search:
        drawn = [[(key, value) for value in examples(study.space[key])] for key in PLACING if key in study.space]
        placements = {study.trial(dict(p), 0, auto=plan.auto).placement for p in product(*drawn)}
    counts = [placement.num_workers for placement in placements if placement.device == "cuda"]
    return max(counts, default=0), sum(counts)


@contextlib.contextmanager
def cluster_for(study: Study, options: Options, notice: Listener) -> Iterator[Cluster]:
    """Join the cluster that a study is to run on; without an address, describe the private Ray still to be started.

    `ray up` returns before the workers have joined: where the study needs them, they are waited for.

    Raises:
        ClusterError: it can't be joined, or has fewer nodes than asked for.
    """
    if options.flags.address is None:
        yield this_machine()
        return
    with joined_cluster(options.flags.address) as cluster:
        num_nodes, least = cluster.num_promised if lacks_nodes(study, cluster) else 0, options.flags.min_nodes or 0
        cluster = wait_for_nodes(cluster, max(num_nodes, least), lambda text: notice(Notice(text)))
        if len(cluster.nodes) < least:
            problem = f"--min-nodes {least}: the cluster has {units.counted(len(cluster.nodes), 'node')}"
            raise ClusterError(problem, hint="`ray status` on its head shows why; or ask for fewer")
        yield cluster


def stored_results(study_name: str, options: Options) -> tuple[TrialResult, ...]:
    """Return the study's results in the store and the journals, without those that are to be made again."""
    if options.flags.fresh:
        return ()
    results = Store(options.tracking_uri, options.project_dir).results(study_name)
    return tuple(result for result in results if result.started_at >= options.not_before)


def other_load(monitor: CpuMonitor, elapsed_s: float) -> str:
    """Return the notice of other load that would disturb the trials; empty where there is little.

    Args:
        monitor: of the cores of this process, started `elapsed_s` ago; what this process did since doesn't count.
    """
    if elapsed_s > MAX_LOAD_S:  # data was downloaded, or another study waited for
        monitor.start()
        elapsed_s = 0.0
    time.sleep(max(0.0, MIN_LOAD_S - elapsed_s))
    monitor.stop()
    share = monitor.summary().get("foreign_cpu_share", 0.0)
    return OTHER_LOAD.format(units.percent(share)) if share > MAX_BUSY else ""


def changed_code(plan: ExecutionPlan, loaded: LoadedStudy, options: Options) -> str:
    """Return the notice of finished trials that ran other code than the study has now; empty if none did."""
    changed = (changed_files(result.code, options.code_of(result.spec, loaded)) for result in plan.done)
    changes = list(filter(None, changed))
    files = files_text(chain.from_iterable(changes))
    return CHANGED_CODE.format(units.counted(len(changes), "trial"), files) if changes else ""


def _notices(
    loaded: LoadedStudy, options: Options, plan: ExecutionPlan, stored: Sequence[TrialResult]
) -> Iterator[str]:
    if plan.cluster.takes_everybody:
        yield OPEN_CLUSTER.format(masked(str(options.flags.address)))
    yield from plan.notices
    if text := changed_code(plan, loaded, options):
        yield text
    if failed := [result for result in plan.done if not result.is_complete]:
        num_points = len({point_label(result.spec.point) for result in failed})
        yield STOPPED_BEFORE.format(units.counted(num_points, "point"), units.counted(len(failed), "trial"))
    num_unprofiled = sum(not r.profile for r in plan.done if r.spec.repeat == 0 and r.is_complete)
    if options.profiling.num_steps and num_unprofiled:
        yield NO_PROFILE.format(units.counted(num_unprofiled, "point"))
    if options.flags.log_model and (text := other_trials(stored, plan.missing)):
        yield text


def _lacks_final_test(plan: ExecutionPlan, store: Store) -> bool:
    """Return whether the study was interrupted between its last trial and the test of the models that it chose."""
    if not plan.study.workload.has_test or not any(result.spec.config.get("keep_model") for result in plan.done):
        return False
    return last_final_test(store, plan.study.name) is None


def _log_model_alone(
    loaded: LoadedStudy, options: Options, outcome: ExecutionOutcome, store: Store, notice: Listener
) -> None:
    """Log the best model of a study that has no trial missing, as an execution of its own."""
    with _recorder(_record_of(loaded, options, outcome), options, upload=True) as recorder:
        folder = outcome.log_dir / MODEL_NAME
        log_final_model(loaded.study, outcome.analysis, outcome.results, store, recorder, folder, notice)
        outcome.num_unsent = recorder.close("finished")


def _record_of(loaded: LoadedStudy, options: Options, outcome: ExecutionOutcome) -> Execution:
    """Return an execution of a study that has no trial missing."""
    return execution_record(loaded, options, outcome.plan.question, note_of(outcome.analysis))


@contextlib.contextmanager
def _recorder(execution: Execution, options: Options, *, upload: bool) -> Iterator[Recorder]:
    """Record an execution, which has failed if the block doesn't close it with another status."""
    recorder = Recorder(execution, tracking_uri=options.tracking_uri, project_dir=options.project_dir)
    recorder.start(upload=upload)
    try:
        yield recorder
    finally:
        with contextlib.suppress(StoreError):
            recorder.close("failed")


def _run(ready: Prepared, options: Options, plan: ExecutionPlan, handler: ResultHandler, log_dir: Path) -> None:
    """Run what is missing, and what is decided on meanwhile."""
    log_dir.mkdir(parents=True, exist_ok=True)
    study = plan.study
    if study.until and plan.done:
        of, _ = next_block(plan, plan.done)
        handler(TrialsAdded((), of.text, of.later_s))
    has_begun = False
    try:
        with runner_for(ready, options, plan) as runner:
            has_begun = True
            try:
                specs = plan.missing or tuple(result.spec for result in plan.done)
                clock = _BudgetClock(study.budget_s, handler)
                more = partial(_more, handler, clock) if study.until else None
                if (next_specs := options.next_specs) is not None:
                    more = partial(_decided, handler, next_specs)
                raise_again()
                runner.run(study, specs, clock, more)
            except KeyboardInterrupt:
                handler(Notice(STOPPING))  # before all that was started is ended, which takes seconds
                raise
            finally:
                if not plan.cluster.is_own:
                    _remove_logs_of_nodes(log_dir, handler.outcome.failures)
    except RayparError as error:
        if has_begun and not isinstance(error, (NotForTraining, WorkloadError)):
            raise BrokeOff.by(error) from error
        raise
    finally:
        handler.close()


def _remove_logs_of_nodes(log_dir: Path, failures: Sequence[TrialResult]) -> None:
    """Remove the logs that an execution has left on the nodes of a cluster, but for those of failed trials."""
    name, failed = f"{LOGS_PREFIX}{log_dir.name}", [failure.spec.identity for failure in failures]
    remove_logs(name, failed)
    with uninterrupted(), contextlib.suppress(Exception):  # a node that is lost removes them when they are old
        on_every_node(remove_logs, name, failed, timeout_s=LOGS_TIMEOUT_S)


@dataclass
class _BudgetClock:
    """Listener that passes all events on, and measures what is left of a study's budget.

    The budget is for trials: its clock starts with the first one. Waiting for cores and starting Ray don't count.
    """

    budget_s: float | None
    handler: ResultHandler
    _begun_s: float | None = None

    def __call__(self, event: Event) -> None:
        if self._begun_s is None and isinstance(event, (TrialStarted, TrialEnded)):
            self._begun_s = time.monotonic()
        self.handler(event)

    @property
    def left_s(self) -> float:
        """Seconds; infinite without a budget."""
        if self.budget_s is None:
            return math.inf
        return self.budget_s - (0.0 if self._begun_s is None else time.monotonic() - self._begun_s)


def _more(handler: ResultHandler, clock: _BudgetClock) -> tuple[TrialSpec, ...]:
    """Return the next block of a study that runs until it is settled; nothing where it ends."""
    outcome = handler.outcome
    of, specs = next_block(outcome.plan, tuple(outcome.results.values()))
    later_s = of.later_s
    if specs:
        left_s = clock.left_s - (of.block_s or 0.0)
        if left_s < 0:
            outcome.stopped = Stopped.BUDGET
            return ()
        later_s = None if later_s is None else min(later_s, left_s)
    if specs:
        outcome.plan = outcome.plan.with_more(specs)
        handler(TrialsAdded(specs, of.text, later_s))
    return specs


def _decided(handler: ResultHandler, next_specs: NextSpecs) -> tuple[TrialSpec, ...]:
    """Return the trials that the results so far ask for; nothing where it ends."""
    outcome = handler.outcome
    if specs := tuple(next_specs(outcome.plan, tuple(outcome.results.values()))):
        outcome.plan = outcome.plan.with_more(specs)
        handler(TrialsAdded(specs, "a batch size at each point"))
    return specs


def _add_report(recorder: Recorder, execution: Execution, outcome: ExecutionOutcome, notice: Listener) -> None:
    """Store the report as HTML with the execution. A failure costs a notice, and nothing else."""
    try:
        from raypar.reporting.html import Origin, html_report

        origin = Origin(execution.tags, execution.description, execution.study_source, outcome.partial)
        recorder.add_artifact(REPORT_FILE, html_report(outcome.analysis, tuple(outcome.results.values()), origin))
    except Exception as error:
        notice(Notice(NO_REPORT.format(f"{type(error).__name__}: {error}", execution.study)))


def network_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that configure the network between ranks."""
    return {name: value for name, value in environment.items() if name.startswith(NETWORK_VARIABLES)}


def rank_environment(environment: Mapping[str, str], *, is_own: bool) -> dict[str, str]:
    """Return the variables of the driver's environment that the ranks get.

    Args:
        is_own: they run on this machine alone, which nobody else uses. Other nodes have homes of their own.
    """
    names = [*PASSED_ON, *network_environment(environment)]
    if is_own:
        # A private Ray has not inherited secrets; a trial's code may need them, to fetch its data. To machines that
        # others share none is sent.
        names += [*PASSED_ON_HERE, *secret_variables(environment)]
    return {name: environment[name] for name in names if name in environment}


@dataclass(frozen=True)
class Prepared:
    """Settings of a run, and what it needs of this machine, started before anything is recorded.

    Attributes:
        servers: fork servers, by the label of the revision that they serve.
    """

    settings: RunSettings
    servers: Mapping[str, ForkAgent]


@contextlib.contextmanager
def prepared(loaded: LoadedStudy, options: Options, plan: ExecutionPlan, log_dir: Path) -> Iterator[Prepared]:
    """Start the fork servers of this machine, and have one check data and model of what is to run.

    Raises:
        WorkloadError: with every mistake in them.
    """
    pickle_by_value(loaded)
    settings = RunSettings(
        # Other nodes don't have this project's folder; each has its own for temporary files.
        log_dir=log_dir if plan.cluster.is_own else Path(tempfile.gettempdir()) / f"{LOGS_PREFIX}{log_dir.name}",
        isolation=options.flags.isolation,
        environment=rank_environment(os.environ, is_own=plan.cluster.is_own),
        sys_path=(str(loaded.path.parent),),
        preload=preload_of(loaded),
        trial_timeout_s=options.flags.trial_timeout,
        auto=plan.auto,
        driver_dir=None if plan.cluster.is_own else log_dir.absolute(),
        profiling=options.profiling,
        exclusive=options.flags.exclusive,
        sources={} if plan.cluster.is_own else loaded.sources,
        revisions=options.revisions,
        sampling=system_sampled if options.flags.system_metrics else None,
    )
    with contextlib.ExitStack() as stack:
        servers: dict[str, ForkAgent] = {}
        if options.flags.isolation == "warm" and (plan.cluster.is_own or not options.with_ray):
            for revision in settings.revisions or (settings.revision(),):
                servers[revision.label] = stack.enter_context(contextlib.closing(ForkAgent(revision)))
        if options.with_ray:  # while the servers import
            threading.Thread(target=_import_ray, daemon=True).start()
        _check_workload(plan, settings, servers, log_dir)
        yield Prepared(settings, servers)


def _import_ray() -> None:
    """Import Ray and then what stands on it: of two threads that import Ray at once, one may see half of it."""
    importlib.import_module("ray")
    importlib.import_module("raypar.run.tune")


def _check_workload(
    plan: ExecutionPlan, settings: RunSettings, servers: Mapping[str, ForkAgent], log_dir: Path
) -> None:
    """Raise WorkloadError where data or model of what is to run have mistakes.

    Of train loops and commands, of two versions of the code, and without a fork server, the trials show them.
    """
    workload = plan.study.workload
    if workload.foreign_kind or settings.revisions or not servers:
        return
    import cloudpickle

    points = {point_label(spec.point): spec.config for spec in plan.to_check}
    job = CheckJob(
        cloudpickle.dumps(workload), tuple(points.items()), plan.study.seed, settings.sys_path, settings.environment
    )
    log_dir.mkdir(parents=True, exist_ok=True)
    if mistakes := check_workload(servers[""].address(), job, log_dir / CHECK_LOG):
        raise WorkloadError.of(workload.name, mistakes)


@contextlib.contextmanager
def runner_for(ready: Prepared, options: Options, plan: ExecutionPlan) -> Iterator[Runner]:
    """Start what runs the trials, and stop it after."""
    settings = ready.settings
    if not options.with_ray:
        from raypar.run.local import LocalRunner

        with LocalRunner(settings, plan.cluster.cores, ready.servers) as local:
            yield local
        return
    with contextlib.ExitStack() as stack:
        _import_ray()
        if plan.cluster.is_own:
            stack.enter_context(private_ray(plan.cluster, [core.number for core in plan.cluster.cores or ()]))
        else:
            make_private_folder(settings.log_dir)
            stack.enter_context(watch_of_cluster().watching())
        from raypar.run.tune import TuneRunner

        addresses = {label: server.address() for label, server in ready.servers.items()}
        yield TuneRunner(settings, owns_cluster=plan.cluster.is_own, fork_addresses=addresses, cores=plan.cluster.cores)
