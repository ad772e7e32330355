"""Plan of an execution: finished trials, missing trials and whether they can run, decided before anything starts."""

from __future__ import annotations

import json
import statistics
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from raypar.analysis.question import Question, current_results, question_of
from raypar.errors import Mistake, RayparError, StudyError, cut, is_for_training
from raypar.execution.options import Options
from raypar.execution.source import FixedList, TrialSource, source_of
from raypar.provenance import changed_files
from raypar.run.cluster import Cluster
from raypar.run.runner import StoppedPoints
from raypar.study.loader import LoadedStudy
from raypar.study.options import ON_CPU, OPTIONS, Auto, resolve
from raypar.study.part import StudyPart
from raypar.study.space import DOMAINS, Grid, examples
from raypar.study.study import Study
from raypar.study.trial import FailureKind, Placement, TrialResult, TrialSpec
from raypar.study.validation import validate
from raypar.study.workload import Config, Workload
from raypar.units import counted

T = TypeVar("T")
NO_CODE: Mapping[str, Mapping[str, str]] = {}
ONE_CORE = "each GPU worker has 1 core, shared by its main thread, autograd, loader processes and NCCL: {}"
NOT_STARTED = "device=auto: cpu, because no node with a GPU is up; --set device=cuda makes the cluster start some"
ADDS_GPUS = "device=auto: cuda, on GPU nodes that the cluster still has to add; --set device=cpu needs none"


class TimeEstimate(NamedTuple):
    """Estimated time of the missing trials.

    Attributes:
        study: study whose trials it is based on; empty: this study.
    """

    seconds: float
    num_trials: int
    study: str = ""


@dataclass(frozen=True)
class ExecutionPlan:
    """Trials of a study that are done, and those still to run.

    Attributes:
        specs: every trial decided so far, in order; empty for a search, which draws its points.
        done: results already in the store, including the failures of stopped points.
        missing: specs still to run.
        auto: values of the options that the study leaves to the machines.
        notices: messages for the user on these values.
        allowed_share, code: see `Question`.
    """

    study: Study
    specs: tuple[TrialSpec, ...]
    done: tuple[TrialResult, ...]
    missing: tuple[TrialSpec, ...]
    cluster: Cluster
    auto: Auto = ON_CPU
    notices: tuple[str, ...] = ()
    allowed_share: float | None = None
    code: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: NO_CODE)
    source: TrialSource = field(default_factory=FixedList)

    @property
    def question(self) -> Question:
        return replace(question_of(self.study, self.auto), allowed_share=self.allowed_share, code=self.code)

    def code_of(self, spec: TrialSpec) -> Mapping[str, str]:
        """Return the digests of the source files that a trial runs."""
        return _code_of(spec, self.code)

    @property
    def num_trials(self) -> int:
        if self.study.is_search:
            return self.study.num_trials * len(self.study.points())
        return len(self.specs)

    @property
    def num_missing(self) -> int:
        if self.study.is_search:
            return max(0, self.num_trials - len(self.done))
        return len(self.missing)  # points such as device=auto and device=cpu may share their trials

    @property
    def placements(self) -> tuple[Placement, ...]:
        return tuple(dict.fromkeys(spec.placement for spec in self.specs))

    @property
    def to_check(self) -> tuple[TrialSpec, ...]:
        """One trial of each point to run. Those that differ in the workload's own hyperparameters come first."""
        specs = self.missing or drawable(self.study, self.auto)
        of_points = {spec.point_name: spec for spec in reversed(specs)}
        of_workloads = {_key(spec.config, self.study.workload.options): spec for spec in of_points.values()}
        return tuple({id(spec): spec for spec in (*of_workloads.values(), *of_points.values())}.values())

    def with_more(self, specs: Sequence[TrialSpec]) -> ExecutionPlan:
        """Return the plan with these further trials."""
        return replace(self, specs=(*self.specs, *specs), missing=(*self.missing, *specs))

    def continued(self, complete: Mapping[str, TrialResult]) -> ExecutionPlan:
        """Return the plan with further trials of its source, up to the first ones that the store lacks.

        Args:
            complete: results in the store by identity.
        """
        plan = self
        while not plan.missing and (specs := plan.source.next(plan, plan.done).specs):
            plan = replace(
                plan,
                specs=(*plan.specs, *specs),
                done=(*plan.done, *(complete[spec.identity] for spec in specs if spec.identity in complete)),
                missing=tuple(spec for spec in specs if spec.identity not in complete),
            )
        return plan

    def estimate(self, stored: Sequence[TrialResult], *, only_alike: bool = False) -> TimeEstimate | None:
        """Estimate the time of the missing trials from the median wall times of similar stored trials.

        Trials with the same config are preferred to those with other ``epochs``, these to those with the same
        placement, and these to all others. Training and evaluation times are scaled to the number of epochs.

        Args:
            stored: results of any study.
            only_alike: only use trials with the same config except for ``epochs``.

        Returns:
            None if a missing trial has no similar one.
        """
        timed = [r for r in stored if r.is_measured and r.wall_s and r.spec.workload == self.study.workload.name]
        groups: list[dict[object, list[TrialResult]]] = []
        kinds = _KINDS_ALIKE[:2] if only_alike else _KINDS_ALIKE
        for kind in kinds:
            groups.append({})
            for result in timed:
                groups[-1].setdefault(kind(result.spec), []).append(result)
        seconds, used, medians_s = 0.0, set[int](), dict[tuple[int, object], float]()
        specs: Sequence[TrialSpec | None] = self.missing or [None] * self.num_missing  # a search has not drawn them yet
        for spec in specs:
            alike = (by[kind(spec)] for kind, by in zip(kinds, groups, strict=True) if spec and kind(spec) in by)
            chosen = next(alike, [] if spec or only_alike else timed)
            if not chosen:
                return None
            epochs = spec.config.get("epochs") if spec else None
            if (key := (id(chosen), epochs)) not in medians_s:
                medians_s[key] = statistics.median(_scaled_wall_s(result, epochs) for result in chosen)
                used.update(map(id, chosen))
            seconds += medians_s[key]
        return TimeEstimate(seconds, len(used)) if used else None


def plan_of(loaded: LoadedStudy, options: Options, cluster: Cluster, stored: Sequence[TrialResult]) -> ExecutionPlan:
    """Return the plan of an execution. Raises RayparError as `make_plan` does."""
    return make_plan(
        loaded.study,
        cluster,
        stored,
        where=loaded.path,
        with_ray=options.with_ray,
        code=options.codes(loaded),
        retry_failed=options.flags.retry_failed,
        allowed_share=options.allowed_share,
        source=options.source,
        part=options.part,
    )


def make_plan(
    study: Study,
    cluster: Cluster,
    stored: Sequence[TrialResult],
    *,
    where: Path | str = "study",
    with_ray: bool = True,
    code: Mapping[str, Mapping[str, str]] = NO_CODE,
    retry_failed: bool = False,
    allowed_share: float | None = None,
    source: TrialSource | None = None,
    part: StudyPart | None = None,
) -> ExecutionPlan:
    """Expand the study, refuse trials that can never run, and skip finished ones.

    Args:
        stored: results to reuse.
        where: the study's file, for messages.
        code, allowed_share: see `Question`.
        retry_failed: try points again that were stopped by an error in the same code.
        source: source of its trials; None: that of the study.
        part: part of the study to run; None: all of it.

    Raises:
        RayparError: a trial can never run on the cluster, the searcher or scheduler can't run, or the study can't be
            divided into parts.
    """
    if study.searcher is not None or study.scheduler is not None:
        from raypar.run.local_search import local_mistakes  # imports Ray Tune
        from raypar.run.search import search_mistakes

        if mistakes := (search_mistakes if with_ray else local_mistakes)(study):
            raise StudyError(mistakes, where=where)
    complete = {result.spec.identity: result for result in stored if result.is_complete}
    auto, notices = choose_auto(study, cluster, stored, where=where)
    source = source or source_of(study)
    specs = source.first(study, stored, auto)
    if part is not None:
        part.check(study)
        specs = tuple(spec for spec in specs if part.has(spec) or spec.identity in complete)
    if mistakes := _validate(study, specs or drawable(study, auto), cluster):
        raise StudyError(mistakes, where=where)
    identities = {spec.identity for spec in specs}
    over = complete if retry_failed else complete | _stopped(stored, identities, code)
    done = tuple(result for identity, result in over.items() if identity in identities)
    if study.is_search:
        done = current_results(question_of(study, auto), tuple(complete.values())).results
    missing = tuple(spec for spec in specs if spec.identity not in over)
    plan = ExecutionPlan(study, specs, done, missing, cluster, auto, notices, allowed_share, code, source)
    return plan.continued(complete)


def choose_auto(
    study: Study, cluster: Cluster, stored: Sequence[TrialResult] = (), *, where: Path | str = "FILE"
) -> tuple[Auto, tuple[str, ...]]:
    """Choose the values that a study leaves to the machines; return them with notices for the user.

    ``device="auto"`` is cuda if every gang of the study fits on the GPUs and torch can use them, else cpu. It never
    makes an autoscaler start a first GPU node, which costs money. Values of stored trials of the same question are
    kept, because another device or number of cores makes other trials.

    Args:
        stored: results of the study to reuse.
        where: the study's file, for messages.

    Raises:
        RayparError: the stored trials ran on GPUs, which can't be used now.
    """
    complete = tuple(result for result in stored if result.is_complete)
    results = sorted(current_results(question_of(study), complete).results, key=lambda result: result.started_at)
    before = [result.spec.placement for result in results]
    share = cluster.cores_per_gpu or 1
    on_gpu = Auto("cuda", _kept(share, [each.cpus_per_worker for each in before if each.device == "cuda"]))
    if not _leaves_device_open(study):
        return on_gpu, _one_core(study, on_gpu, share)
    problem, fix = _gpu_problem(study, cluster, on_gpu)
    best = "cuda" if not problem and cluster.has_gpu else "cpu"
    device = _kept(best, [each.device for each in before if each.device in ("cpu", "cuda")])
    trials = counted(sum(each.device == device for each in before), "stored trial")
    if problem and device == "cuda":
        hint = f"`raypar study {where} --set device=cpu` runs all trials on the CPU; --fresh chooses again for all"
        raise RayparError(f"device=auto: cuda, to match {trials}, but {problem}", hint=hint)
    auto = replace(on_gpu, device=device)
    has_node = any(node.get("GPU", 0) for node in cluster.nodes)
    if device == "cuda":
        return auto, (*_one_core(study, auto, share), *(() if has_node else (ADDS_GPUS,)))
    if device != best:
        return auto, (f"device=auto: cpu, to match {trials}; --fresh chooses again",)
    if cluster.cores_per_gpu is None:
        return auto, ()
    return auto, (f"device=auto: cpu, because {problem}{fix}" if problem else NOT_STARTED,)


def _kept(best: T, before: Sequence[T]) -> T:
    """Return the best value if it or none was used before, else the one used last."""
    return best if not before or best in before else before[-1]


def _leaves_device_open(study: Study) -> bool:
    device = {**study.workload.defaults, **study.config, **study.space}.get("device", "auto")
    return "auto" in (examples(device) if isinstance(device, DOMAINS) else (device,))


def _gpu_problem(study: Study, cluster: Cluster, on_gpu: Auto) -> tuple[str, str]:
    """Return why some trials of a study can't use a GPU, and the fix, as the end of that sentence; empty if all can."""
    if cluster.cores_per_gpu is None:
        return f"{'this machine' if cluster.is_own else 'the cluster'} has no GPU", ""
    if cluster.gpu_problem:
        return cluster.gpu_problem, "; --set device=cuda uses it anyway"
    placements = _placements(study, on_gpu)
    refusals = cluster.refusals(placements)
    if not refusals:
        return "", ""
    placement, reason = next(iter(refusals.items()))
    refused = {each.num_workers for each in refusals}
    able = sorted({each.num_workers for each in placements} - refused)
    fix = f"; --set num_workers={','.join(map(str, able))} runs on cuda" if able else ""
    return f"num_workers={placement.num_workers} {reason}", fix


def _one_core(study: Study, auto: Auto, share: int) -> tuple[str, ...]:
    """Return the notice that GPU workers have one core each, unless the study varies the number of cores."""
    if study.space.keys() & {"cpus_per_worker", "cpu_affinity"}:
        return ()
    if not any(each.device == "cuda" and each.cpus_per_worker == 1 for each in _placements(study, auto)):
        return ()
    return (ONE_CORE.format(f"set cpus_per_worker={share}" if share > 1 else "the nodes have no more per GPU"),)


def _code_of(spec: TrialSpec, code: Mapping[str, Mapping[str, str]]) -> Mapping[str, str]:
    return code.get(spec.placement.revision, {})


def _stopped(
    stored: Sequence[TrialResult], identities: Collection[str], code: Mapping[str, Mapping[str, str]]
) -> dict[str, TrialResult]:
    """Return the failed trials of points stopped by an error in the study's current code, by identity."""
    of_points: dict[str, list[TrialResult]] = {}
    for result in stored:
        if result.spec.identity in identities and not changed_files(result.code, _code_of(result.spec, code)):
            of_points.setdefault(result.spec.point_name, []).append(result)
    stopped = StoppedPoints()
    over: dict[str, TrialResult] = {}
    for results in of_points.values():
        for result in results:
            stopped.note(result.spec, result.failure, has_reported=bool(result.reports))
        is_stopped = stopped.refusal(results[0].spec) or any(
            result.failure and result.failure.kind is FailureKind.SKIPPED for result in results
        )
        if is_stopped and not any(result.is_complete for result in results):
            over |= {result.spec.identity: result for result in results}
    return over


# Keys of trials that take similar times, the most similar first.
_KINDS_ALIKE: tuple[Callable[[TrialSpec], object], ...] = (
    lambda spec: _key(spec.config, spec.config),
    lambda spec: _key(spec.config, [key for key in spec.config if key != "epochs"]),
    lambda spec: spec.placement,
    lambda _: None,
)


def _scaled_wall_s(result: TrialResult, epochs: object) -> float:
    """Return a trial's wall time in seconds, scaled to a number of epochs if both numbers are known."""
    before, wall_s = result.spec.config.get("epochs"), result.wall_s or 0.0
    if not (isinstance(before, int) and isinstance(epochs, int) and before > 0):
        return wall_s
    return wall_s + ((result.train_time_s or 0.0) + (result.eval_time_s or 0.0)) * (epochs / before - 1)


def lacks_nodes(study: Study, cluster: Cluster) -> bool:
    """Return whether a study has to wait for nodes that are starting.

    It has to if a gang doesn't fit on the present nodes or spreads over all nodes, or if ``device="auto"`` depends on
    the GPUs of the new nodes.
    """
    auto, _ = choose_auto(study, cluster)
    if cluster.awaits_unknown_nodes and auto.device == "cpu" and _leaves_device_open(study):
        return True
    placements = _placements(study, auto)
    return any(placement.nodes == "spread" for placement in placements) or bool(cluster.refusals(placements))


def _placements(study: Study, auto: Auto) -> tuple[Placement, ...]:
    return tuple(dict.fromkeys(spec.placement for spec in drawable(study, auto)))


def drawable(study: Study, auto: Auto) -> tuple[TrialSpec, ...]:
    """Return a trial of every point; for a search, trials with every listed value but not every combination."""
    drawn = {key: examples(domain) for key, domain in study.space.items() if not isinstance(domain, Grid)}
    first = {key: values[0] for key, values in drawn.items()}
    draws = [first, *({**first, key: value} for key, values in drawn.items() for value in values[1:])]
    points = [{**draw, **point} for point in study.points() for draw in draws]
    return tuple(study.trial(point, 0, auto=auto) for point in points)


def _validate(study: Study, specs: Sequence[TrialSpec], cluster: Cluster) -> list[Mistake]:
    """Return the reasons why trials can never run on the cluster, each once."""
    mistakes: dict[str, Mistake] = {}
    checked: dict[str, tuple[str, str] | None] = {}
    strategy_options = (
        "strategy",
        "num_workers",
        "activation_checkpointing",
        *(key for key, option in OPTIONS.items() if option.strategies),
    )

    def check_strategy(workload: Workload, config: Config) -> tuple[str, str] | None:
        key = _key(config, (*workload.options, *strategy_options))
        if key not in checked:
            from raypar.parallel.strategy import check_compatible  # needs torch, and may build a model

            checked[key] = check_compatible(workload, config)
        return checked[key]

    for spec in specs:
        if spec.repeat > 0:  # same config as the first repeat
            continue
        # A search learns draw by draw which values are too large.
        must_fit = not study.is_search
        every = validate(
            spec.config,
            study.workload,
            cluster,
            swept=study.space,
            must_fit=must_fit,
            check_strategy=check_strategy,
        )
        mistakes |= {str(mistake): mistake for mistake in every}
    return list(mistakes.values())


def _key(config: Config, options: Iterable[str]) -> str:
    return json.dumps({key: config.get(key) for key in options}, sort_keys=True, default=str)


def check_data(study: Study, path: Path) -> None:
    """Check that the data and the script of a command exist. Raises RayparError, also for errors of ``prepare``.

    Args:
        path: the study's file.
    """
    configs = {"": resolve(study.workload, study.config)}
    if not study.is_search:
        options = (*study.workload.options, "loader")
        configs = {_key(spec.config, options): dict(spec.config) for spec in study.trials()}
    for config in configs.values():
        try:
            study.workload.prepare(config)
        except RayparError:
            raise
        except Exception as error:  # the user's own code
            if is_for_training(error):
                raise
            last_line = cut(traceback.format_exception_only(error)[-1].strip())
            message = f"workload {study.workload.name}: prepare raises {last_line}"
            raise RayparError(message, hint="fix that function, or leave it out") from error
    script = study.workload.script
    if script and not (path.parent / script).is_file():
        problem = f"{path}: workload.command: {script}: there is no such file in {path.parent}"
        raise RayparError(problem, hint="paths are relative to the study file's folder, or to folder= of the workload")
