"""One execution of a study: plan it, run what is missing, store every result, say what it all means."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tarfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TypeAlias

from raypar import units
from raypar.analysis.breakdown import Profile, profile_of
from raypar.analysis.chosen import with_final_test
from raypar.analysis.question import question_of
from raypar.analysis.speedup import StudyAnalysis, analyse, pair_speedups
from raypar.analysis.stats import Estimate
from raypar.final_test import final_test, last_final_test
from raypar.planning import Plan, check_data, make_plan
from raypar.provenance import provenance
from raypar.run.cluster import Cluster, joined_cluster, private_ray, this_machine
from raypar.run.events import Event, Listener, Notice, TrialEnded
from raypar.run.processes import ForkServer
from raypar.run.runner import ARTIFACT_FOLDER, Interrupted, Runner, RunSettings
from raypar.study.loader import LoadedStudy
from raypar.study.space import Value
from raypar.study.study import Study
from raypar.study.trial import TrialResult, TrialState
from raypar.track.recorder import Execution, Recorder
from raypar.track.store import Store
from raypar.train.job import PROFILE_FOLDER

CLUSTER_LOGS = Path("/tmp/raypar-logs")  # on every node of a cluster that is not our own
CHANGED_FILE = (
    "the study file has changed since its stored results were made; those of unchanged points are kept "
    "(--fresh runs everything again)"
)
BREAKDOWN_FILE = "breakdown.json"
REPORT_FILE = "report.html"
NO_REPORT = "the report was not stored as HTML, {}; `raypar report {} --html FILE` makes it"
NO_PROFILE = "the store has {} without a profile: `raypar profile` looks into one of them, --fresh runs them again"
# What a trial's processes have to see of the driver's environment.
PASSED_ON = ("RAYPAR_DATA_DIR", "XDG_CACHE_HOME", "HOME")


@dataclass(frozen=True)
class Options:
    """Where and how a study is run; what is run stands in its file.

    Attributes:
        address: of a Ray cluster that is there (``auto``, ``host:port``); None: a private one.
        with_ray: False: ranks are forked on this machine, without Ray.
        rerun_all: run trials too whose results the store has.
        command: the command line, for the record.
        settings: ``--set`` as given, for a later ``resume``.
        num_profiled_steps: after the training of every trial of the first repeat, so many are looked into; 0: none.
        only_profiles: trials don't train, they are only looked into.
    """

    project_dir: Path
    tracking_uri: str
    address: str | None = None
    with_ray: bool = True
    isolation: str = "warm"
    rerun_all: bool = False
    trial_timeout_s: float | None = None
    command: Sequence[str] = ()
    settings: Sequence[str] = ()
    num_profiled_steps: int = 0
    only_profiles: bool = False


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
            return Outcome(stored, 0, 0, False, log_dir)
        execution = _execution(loaded, options)
        recorder = Recorder(execution, tracking_uri=options.tracking_uri, project_dir=options.project_dir)
        recorder.start(upload=False)
        keeper = _Keeper(study, results, recorder, stack.enter_context(listener_of(plan)), log_dir)
        interrupted = False
        try:
            log_dir.mkdir(parents=True)
            with _runner(loaded, options, plan, log_dir) as runner:
                runner.run(study, plan.missing or tuple(result.spec for result in plan.done), keeper)
            analysis = analyse(study, tuple(results.values()))
            if study.workload.has_test and not keeper.failures:
                analysis = final_test(study, analysis, results, store, recorder)
        except (Interrupted, KeyboardInterrupt):
            interrupted = True
            analysis = analyse(study, tuple(results.values()))
        except BaseException:
            recorder.close("failed")
            raise
        recorder.record_metrics(_scaling(analysis))
        if not interrupted and not options.only_profiles:
            _add_report(recorder, execution, analysis, tuple(results.values()), keeper)
        num_unsent = recorder.close("killed" if interrupted else "failed" if keeper.failures else "finished")
    return Outcome(analysis, len(keeper.failures), num_unsent, interrupted, log_dir, keeper.failures)


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


class _Keeper:
    """Listens to a run: keeps and stores every result, and passes everything on to whoever shows it."""

    def __init__(
        self, study: Study, results: dict[str, TrialResult], recorder: Recorder, view: Listener, log_dir: Path
    ) -> None:
        self._question = question_of(study)
        self._results, self._recorder, self._view, self._log_dir = results, recorder, view, log_dir
        self._paired: set[str] = set(pair_speedups(self._question, tuple(results.values())))
        self.failures: list[TrialResult] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, TrialEnded):
            artifact_dir = self._artifact_dir(event)
            result, profile = _with_profile(event.result)
            if profile is not None and artifact_dir is not None:
                (artifact_dir / PROFILE_FOLDER).mkdir(exist_ok=True)
                (artifact_dir / PROFILE_FOLDER / BREAKDOWN_FILE).write_text(json.dumps(profile.to_dict(), indent=1))
            self._recorder.record(result, artifact_dir=artifact_dir)
            if profile is not None:
                self._recorder.record_trial_metrics({result.spec.identity: profile.metrics()})
            if result.state is TrialState.FAILED:
                self.failures.append(result)
            self._results[result.spec.identity] = result
            self._record_speedups()
        self._view(event)

    def _artifact_dir(self, ended: TrialEnded) -> Path | None:
        """The folder of what the trial has kept beside its numbers, if it has."""
        folder = self._log_dir / ended.result.spec.identity / ARTIFACT_FOLDER
        if ended.artifacts:
            folder.mkdir(parents=True, exist_ok=True)
            with tarfile.open(fileobj=io.BytesIO(ended.artifacts)) as tar:
                tar.extractall(folder, filter="data")
        return folder if folder.is_dir() else None

    def _record_speedups(self) -> None:
        speedups = pair_speedups(self._question, tuple(self._results.values()))
        fresh = {identity: s for identity, s in speedups.items() if identity not in self._paired}
        if not fresh:
            return
        self._paired |= fresh.keys()
        metrics: dict[str, Mapping[str, float]] = {}
        for identity, speedup in fresh.items():
            spec = self._results[identity].spec
            metrics[identity] = {"speedup": speedup}
            base = self._question.baseline.get("num_workers")
            if isinstance(base, int):
                metrics[identity] = {"speedup": speedup, "efficiency": speedup * base / spec.placement.num_workers}
        self._recorder.record_trial_metrics(metrics)


def _with_profile(result: TrialResult) -> tuple[TrialResult, Profile | None]:
    """The result, with what its ranks recorded taken together."""
    recorded = result.profile.get("recorded")
    profile = profile_of(recorded, result.spec.config) if recorded else None
    return replace(result, profile=profile.to_dict() if profile else {}), profile


def _scaling(analysis: StudyAnalysis) -> list[tuple[str, float, int]]:
    """Speedup, efficiency and serial fraction as metrics over the number of workers, so that MLflow draws curves."""
    found: list[tuple[str, float, int]] = []

    def add(name: str, point: Mapping[str, Value], estimate: Estimate, num_workers: int) -> None:
        name = f"scaling/{name}" + "".join(f" {k} {v}" for k, v in point.items() if k != "num_workers")
        found.append((name, estimate.value, num_workers))
        for side, value in (("low", estimate.low), ("high", estimate.high)):
            if value is not None:
                found.append((f"{name} {side}", value, num_workers))

    for point in analysis.points:
        for name, estimate in (("speedup", point.speedup), ("efficiency", point.efficiency)):
            if estimate is not None and point.num_workers is not None:
                add(name, point.point, estimate, point.num_workers)
    for group in analysis.worker_groups:
        for num_workers, fraction in group.karp_flatt.items():
            add("karp_flatt", group.point, fraction, num_workers)
    return found


@contextlib.contextmanager
def _runner(loaded: LoadedStudy, options: Options, plan: Plan, log_dir: Path) -> Iterator[Runner]:
    """What runs the trials, ready to; with all that had to be started for it, and is stopped after."""
    import cloudpickle

    # The study's functions travel by value: the ranks don't import the study file.
    for name in (loaded.module_name, *loaded.local_modules):
        cloudpickle.register_pickle_by_value(sys.modules[name])
    settings = RunSettings(
        # Other nodes don't have this project's folder.
        log_dir=log_dir if plan.cluster.is_own else CLUSTER_LOGS / log_dir.name,
        isolation=options.isolation,
        environment={key: os.environ[key] for key in PASSED_ON if key in os.environ},
        sys_path=(str(loaded.path.parent),),
        preload=tuple(dict.fromkeys((*loaded.study.workload.preload, *loaded.imported_modules))),
        trial_timeout_s=options.trial_timeout_s,
        default_device=plan.cluster.default_device,
        ships_artifacts=not plan.cluster.is_own,
        num_profiled_steps=options.num_profiled_steps,
        only_profiles=options.only_profiles,
    )
    if not options.with_ray:
        from raypar.run.local import LocalRunner

        with LocalRunner(settings) as local:
            yield local
        return
    if options.address and options.address.startswith("ray://"):
        from raypar.run.remote import RemoteRunner

        yield RemoteRunner(settings)
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
        from raypar.run.tuner import TuneRunner

        yield TuneRunner(settings, owns_cluster=plan.cluster.is_own, fork_address=fork_address)


def _import_tuner() -> None:
    import raypar.run.tuner  # noqa: F401


def _execution(loaded: LoadedStudy, options: Options) -> Execution:
    study = loaded.study
    resume = {
        "file": str(loaded.path),
        "set": list(options.settings),
        "repeats": study.num_repeats,
        "seed": study.seed,
        "data_dir": os.environ.get("RAYPAR_DATA_DIR"),
        "address": options.address,
        "isolation": options.isolation,
        "no_ray": not options.with_ray,
        "trial_timeout": options.trial_timeout_s,
        "num_profiled_steps": options.num_profiled_steps,
    }
    return Execution(
        uid=uuid.uuid4().hex,
        study=study.name,
        started_at=datetime.now().timestamp(),
        params={
            "workload": study.workload.name,
            "num_repeats": str(study.num_repeats),
            "seed": str(study.seed),
            **{key: str(value) for key, value in study.config.items()},
            **{f"space.{key}": str(domain) for key, domain in study.space.items()},
            **{f"baseline.{key}": str(value) for key, value in study.baseline.items()},
        },
        tags={
            **provenance(loaded.path, options.command),
            "raypar.question": json.dumps(asdict(question_of(study)), separators=(",", ":")),
            "raypar.resume": json.dumps(resume, separators=(",", ":")),
        },
        description=study.description,
        study_file=loaded.path,
        study_source=loaded.source,
    )
