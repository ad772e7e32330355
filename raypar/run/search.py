"""Searchers and schedulers of Ray Tune: checks before a search starts, and copies as a run needs them.

raypar compares trials, so each has the same hyperparameters from its first step to its last. Schedulers that stop
trials early fit in. Those that pause trials, change their hyperparameters or copy weights between them do not.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ray import tune
from ray.tune.schedulers import (
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    PopulationBasedTrainingReplay,
    ResourceChangingScheduler,
    TrialScheduler,
)
from ray.tune.search import SearchAlgorithm, Searcher

from raypar.errors import Mistake, Shown, closest
from raypar.study.metric import Metric
from raypar.study.space import Choice, Domain, Grid, LogUniform, RandInt, Uniform, Value, contains
from raypar.study.study import REPORTED, Study
from raypar.study.trial import TRAINED, TrialResult, bad_losses, gain, trained_s
from raypar.study.workload import Workload

PAUSES = "it pauses trials and continues them later, which raypar's trials don't do"
USE_ASHA = "take ASHAScheduler(), which stops the same trials without pausing any"
# Schedulers that raypar's trials can't follow: the reason, and the fix.
REFUSED: Mapping[type, tuple[str, str]] = {
    HyperBandScheduler: (PAUSES, USE_ASHA),
    PopulationBasedTraining: (
        "it changes the hyperparameters of a running trial and copies weights between trials, so no trial shows what "
        "its hyperparameters do",
        "search with ASHAScheduler() and OptunaSearch(), or make a whole population one trial (docs/searches.md)",
    ),
    PopulationBasedTrainingReplay: (
        "it changes the hyperparameters of a running trial",
        "put the schedule of hyperparameters into the training code",
    ),
    ResourceChangingScheduler: (
        "it changes the cores of a running trial, which would spoil its times",
        "fix num_workers and cpus_per_worker, or search over them",
    ),
}
# Objects of Optuna that Ray Tune wraps or has itself: package, role, and the fix.
OF_OPTUNA = (
    ("optuna.samplers", "searcher", "write searcher=OptunaSearch(sampler={}(…)), from ray.tune.search.optuna"),
    ("optuna.pruners", "scheduler", "take Ray Tune's: ASHAScheduler() for successive halving, MedianStoppingRule()"),
    ("optuna.study", "searcher", "write searcher=OptunaSearch(), which makes its own study"),
)
KINDS: Mapping[str, tuple[type, ...]] = {"searcher": (Searcher, SearchAlgorithm), "scheduler": (TrialScheduler,)}
EXAMPLES = {"searcher": "OptunaSearch()", "scheduler": "ASHAScheduler()"}
TIME_TO_TARGET = "time_to_target_s"  # objective of a searcher, in reports of a search with a target
NOT_REACHED_S = 1e9  # more than any time to the target
# Keys that Tune adds to each report.
OF_TUNE = ("training_iteration", "time_total_s", "time_since_restore", "iterations_since_restore", "timestamp")


def search_mistakes(study: Study) -> list[Mistake]:
    """Return what keeps a study's searcher and scheduler from running."""
    return [*_mistakes_of(study, "searcher"), *_mistakes_of(study, "scheduler")] or [*_refusals(study)]


def tune_space(study: Study) -> dict[str, Any]:
    """Return a study's space as Tune's domains."""
    return {key: _tune_domain(domain) for key, domain in study.space.items()}


def point_of(study: Study, config: Mapping[str, Any]) -> dict[str, Value]:
    """Return the point that Tune drew, from a trial's config."""
    return {key: config[key] for key in study.space}


def _tune_domain(domain: Domain) -> Any:
    if isinstance(domain, (Grid, Choice)):
        return (tune.grid_search if isinstance(domain, Grid) else tune.choice)(list(domain.values))
    draw = {Uniform: tune.uniform, LogUniform: tune.loguniform, RandInt: tune.randint}[type(domain)]
    return draw(domain.low, domain.high)


def for_run(study: Study) -> tuple[Any, Any]:
    """Return copies of a study's searcher and scheduler with its metric and mode, so that Tune needs none.

    A run needs copies because Tune changes both, and a run may start again after its broker was lost. With a target,
    the scheduler compares the metric of running trials, and the searcher their times to the target.
    """
    searcher, scheduler = copy.deepcopy(study.searcher), copy.deepcopy(study.scheduler)
    metric, mode = study.judged_by.name, study.judged_by.mode
    for each in _nested(searcher):
        each._metric, each._mode = (metric, mode) if study.target is None else (TIME_TO_TARGET, "min")
    if scheduler is not None:
        scheduler._metric = scheduler._mode = None
        scheduler.set_search_properties(metric, mode)
    if isinstance(scheduler, MedianStoppingRule):
        scheduler._min_time_slice = float("inf")  # else it pauses trials until others have caught up
    return searcher, scheduler


def informed(study: Study, results: Sequence[TrialResult]) -> Study:
    """Return a study whose searcher knows earlier results, and so continues its search instead of repeating it.

    Only a searcher with ``evaluated_rewards``, such as OptunaSearch, can know them. Others start from scratch.
    """
    searcher = copy.deepcopy(study.searcher)
    innermost: Any = inner(searcher) if searcher is not None else None
    rewards = [
        (result.spec.point, reward)
        for result in results
        if all(key in result.spec.point and contains(of, result.spec.point[key]) for key, of in study.space.items())
        and (reward := _reward(study, result)) is not None
    ]
    if not rewards or not hasattr(innermost, "_evaluated_rewards"):
        return study
    innermost._points_to_evaluate = [{**point} for point, _ in rewards]
    innermost._evaluated_rewards = [reward for _, reward in rewards]
    if getattr(innermost, "_seed", None) is not None:
        innermost._seed += len(rewards)  # its first points are drawn at random, whatever it knows
    return replace(study, searcher=searcher)


def _reward(study: Study, result: TrialResult) -> float | None:
    """Return a searcher's objective of a stored trial; None if it had none."""
    reports = TuneReports.of(study)
    for report in result.reports if result.state.traits.is_usable else ():
        reports.take(report)
    value = reports.last.get(study.judged_by.name if study.target is None else TIME_TO_TARGET)
    return None if value is None else float(value)


def time_to_target_s(study_target: float, mode: str, value: float, time_s: float) -> float:
    """Return a searcher's objective: seconds to the target, or far more, by its distance, if it is not reached.

    Args:
        value: last value of the metric.
        time_s: seconds of training until then.
    """
    missing = gain(mode, study_target) - gain(mode, value)
    return time_s if missing <= 0 else NOT_REACHED_S * (1 + missing / max(abs(study_target), abs(missing)))


@dataclass
class TuneReports:
    """Reports of a trial as searchers and schedulers see them.

    Both see only reports that can be compared with others, because ASHA would never stop a trial whose metric is not
    finite, and Optuna would never learn of its end.

    Attributes:
        metric: the study's metric, with its mode.
        target: value of the metric at which the trial ends; None: none.
        last: last report that they saw.
    """

    metric: str
    mode: str
    target: float | None
    last: Mapping[str, Any] = field(default_factory=dict)
    _num: int = 0
    _trained_s: float = 0.0

    @classmethod
    def of(cls, study: Study) -> TuneReports:
        return cls(study.judged_by.name, study.judged_by.mode, study.target)

    def take(self, report: Mapping[str, float]) -> dict[str, Any] | None:
        """Return the next report for Tune, with ``done`` if the trial has reached its target; None: it sees nothing."""
        self._num += 1
        self._trained_s = trained_s(report, self._trained_s)
        value = report.get(self.metric)
        if bad_losses(report) or not math.isfinite(value or 0.0):
            return None
        seen: dict[str, Any] = {**report, TRAINED: self._trained_s, "training_iteration": self._num, "done": False}
        if self.target is not None and value is not None:
            seen[TIME_TO_TARGET] = time_to_target_s(self.target, self.mode, value, self._trained_s)
            seen["done"] = seen[TIME_TO_TARGET] <= self._trained_s
        self.last = seen
        return seen


def inner(searcher: Any) -> Any:
    """Return the searcher that a limiter or repeater wraps, or the searcher itself."""
    return [*_nested(searcher)][-1]


def _nested(searcher: Any) -> Iterator[Any]:
    """Yield a searcher and those that it wraps, the innermost last; nothing for None."""
    while searcher is not None:
        yield searcher
        searcher = getattr(searcher, "searcher", None)


def _mistakes_of(study: Study, role: str) -> Iterator[Mistake]:
    given = getattr(study, role)
    if given is None:
        return
    kind, shown = type(given), Shown(f"{type(given).__name__}(…)")
    if not isinstance(given, KINDS[role]):
        fixes = (fix.format(kind.__name__) for package, _, fix in OF_OPTUNA if kind.__module__.startswith(package))
        hint = next(fixes, f"give an object of ray.tune: {role}={EXAMPLES[role]}")
        yield Mistake(role, shown, f"is not a {role} of Ray Tune", hint=hint)
        return
    for refused, (problem, hint) in REFUSED.items():
        if isinstance(given, refused):
            yield Mistake(role, shown, problem, hint=hint)
            return
    if isinstance(given, MedianStoppingRule) and not given._hard_stop:
        yield Mistake("scheduler.hard_stop", False, PAUSES, hint="leave hard_stop out, so that it stops trials")
    yield from _metric_mistakes(study, role, inner(given))
    if (time_attr := getattr(given, "_time_attr", None)) is not None and not _has(study, time_attr):
        keys = ["training_iteration", TRAINED, *_reported(study.workload)]
        near = closest(str(time_attr), keys)
        hint = f'did you mean "{near[0]}"?' if near else f'"training_iteration" counts reports, "{TRAINED}" seconds'
        yield Mistake(f"{role}.time_attr", time_attr, "is not in the reports of the trials", hint=hint)
    if role == "searcher" and getattr(inner(given), "_space", None):
        wrong = "has a space of its own"
        hint = f"write the space into the study: Study(space={{…}}, searcher={kind.__name__}())"
        yield Mistake("searcher", shown, wrong, hint=hint)


def _metric_mistakes(study: Study, role: str, given: Any) -> Iterator[Mistake]:
    """Yield the mistakes of a searcher's or scheduler's own metric and mode, which must be those of the study."""
    judged_by, name = study.judged_by, type(given).__name__
    metric, mode = getattr(given, "_metric", None), getattr(given, "_mode", None)
    if isinstance(metric, (list, tuple)):
        hint = f"leave metric and mode out of {name}(): the study's are used ({judged_by.name}, {judged_by.mode})"
        yield Mistake(f"{role}.metric", metric, "is more than one metric", hint=hint)
        return
    if metric is not None and metric != judged_by.name:
        hint = f"leave metric and mode out of {name}(): the study's are used ({judged_by.name}, {judged_by.mode})"
        if _has(study, metric):
            hint = f'leave it out of {name}(), or judge trials by it: Study(metric="{metric}")'
        yield Mistake(f"{role}.metric", metric, f"but trials are judged by {judged_by.name}", hint=hint)
    elif mode is not None and mode != judged_by.mode:
        hint = f'leave it out of {name}(), or set Study(mode="{mode}")'
        yield Mistake(f"{role}.mode", mode, f"but trials are judged by {_text(judged_by)}", hint=hint)


def _text(metric: Metric) -> str:
    return f"{metric.name}, {metric.goal}"


def _reported(workload: Any) -> list[str]:
    """Return the keys that trials report, as far as they are known."""
    return [*getattr(workload, "metric_names", ()), *REPORTED, "epoch", "step", "lr"]


def _has(study: Study, key: str) -> bool:
    """Return whether reports have a key; what training code of the user reports is unknown."""
    workload = study.workload
    is_known = isinstance(workload, Workload) and isinstance(workload.metrics, Mapping | None)
    return not is_known or key in (*OF_TUNE, TRAINED, *_reported(workload))


def _refusals(study: Study) -> Iterator[Mistake]:
    """Yield what Tune itself refuses when it starts a run with this searcher and scheduler."""
    for role, arguments in (("searcher", (None, None, tune_space(study))), ("scheduler", (None, None))):
        if (given := getattr(study, role)) is None:
            continue
        hint = f"see the documentation of {type(given).__name__}, or leave out its arguments"
        try:
            searcher, scheduler = for_run(study)
            of_role = searcher if role == "searcher" else scheduler
            why = "" if of_role.set_search_properties(*arguments) else "its metric, mode or space is set already"
        except Exception as error:  # of any installed package
            why = f"{type(error).__name__}: {error}"
        if why:
            yield Mistake(role, Shown(f"{type(given).__name__}(…)"), f"Ray Tune refuses it: {why}", hint=hint)
