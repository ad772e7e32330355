"""The question of a study as its analysis needs it, and its current results sorted by point.

A study's name may hold trials of other settings: another number of epochs, another learning rate, other seeds, asked
for in an earlier execution. They answer another question, and stand in no median of this one. Other values of what is
swept are no other settings: those points stand beside the ones of the last execution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, TypeAlias

from raypar import units
from raypar.study.options import resolve
from raypar.study.space import Value
from raypar.study.study import Study
from raypar.study.trial import IDENTITY_IGNORED, TrialResult, TrialState, latest

PointKey: TypeAlias = tuple[tuple[str, bool, Value], ...]

TRAIN_TIME = "train_time_s"
WALL_TIME = "wall_s"


@dataclass(frozen=True)
class Question:
    """What a study asks; small enough to be stored beside its results, so that a report needs no study file.

    Attributes:
        study_name: how the study is called.
        baseline: what a point is compared with: the point that differs only in these values; empty: with nothing.
        space_keys: the swept hyperparameters, in the order in which they are shown.
        metric: key of the last report that says how good a trial is.
        mode: "max" or "min" of it is better.
        points: every point, where the study lists them; () for a search. One without a result is shown as such.
        num_repeats: how many trials every point should have, 1 in a search; None: unknown.
        price_per_node_hour: what a machine costs an hour; None: unknown.
        workload: name of what is trained; empty: unknown.
        config: the hyperparameters that it fixes, the defaults included, without those that follow from others; empty:
            unknown. ``num_threads`` is None where it follows from ``cpus_per_worker``.
        seed: of the first repeat; None: unknown.
    """

    study_name: str
    baseline: Mapping[str, Value]
    space_keys: tuple[str, ...]
    metric: str = "accuracy"
    mode: str = "max"
    points: tuple[Mapping[str, Value], ...] = ()
    num_repeats: int | None = None
    price_per_node_hour: float | None = None
    workload: str = ""
    config: Mapping[str, Value] = field(default_factory=dict)
    seed: int | None = None

    def baseline_of(self, point: Mapping[str, Value]) -> dict[str, Value]:
        """The point that `point` is compared with; itself where it is a baseline."""
        return {**point, **{k: v for k, v in self.baseline.items() if k in point}}

    def is_baseline(self, point: Mapping[str, Value]) -> bool:
        return bool(self.baseline) and point_key(self.baseline_of(point)) == point_key(point)

    @property
    def is_search(self) -> bool:
        """Whether its points are drawn, not listed."""
        return not self.points and self.num_repeats == 1

    def compared_keys(self) -> tuple[str, ...]:
        """The swept hyperparameters in which a point differs from its baseline."""
        return tuple(k for k in self.space_keys if k in self.baseline)

    def other_keys(self) -> tuple[str, ...]:
        """The swept hyperparameters that a point shares with its baseline."""
        return tuple(k for k in self.space_keys if k not in self.baseline)


def question_of(study: Study) -> Question:
    """What `study` asks."""
    return Question(
        study_name=study.name,
        baseline=dict(study.baseline),
        space_keys=tuple(study.space),
        metric=study.metric,
        mode=study.mode,
        points=() if study.is_search else study.points(),
        num_repeats=1 if study.is_search else study.num_repeats,
        price_per_node_hour=study.price_per_node_hour,
        workload=study.workload.name,
        config=_fixed(study),
        seed=study.seed,
    )


def _fixed(study: Study) -> dict[str, Value]:
    """What every trial of the study has alike because the study says so, or leaves the default."""
    every = resolve(study.workload, study.config)
    fixed: dict[str, Value] = {k: v for k, v in every.items() if k not in study.space and k not in IDENTITY_IGNORED}
    chosen = {**study.workload.defaults, **study.config, **study.space}
    if chosen.get("num_threads") is None and "num_threads" in fixed:
        fixed["num_threads"] = None
    follows = {
        "batch_size": chosen.get("per_worker_batch_size") is not None,
        "cpus_per_worker": chosen.get("cpu_affinity") is not None,
        "device": chosen.get("device", "auto") == "auto",
    }
    return {key: value for key, value in fixed.items() if not follows.get(key)}


def question_from_dict(raw: Mapping[str, Any]) -> Question:
    """A question from its ``dataclasses.asdict`` form as JSON gives it back.

    Raises:
        KeyError, TypeError: it is none.
    """

    def values(mapping: Mapping[str, Any]) -> dict[str, Value]:
        return {k: tuple(v) if isinstance(v, list) else v for k, v in mapping.items()}

    return Question(
        study_name=raw["study_name"],
        baseline=values(raw["baseline"]),
        space_keys=tuple(raw["space_keys"]),
        metric=raw["metric"],
        mode=raw["mode"],
        points=tuple(values(point) for point in raw["points"]),
        num_repeats=raw["num_repeats"],
        # An older store has none of these.
        price_per_node_hour=raw.get("price_per_node_hour"),
        workload=raw.get("workload", ""),
        config=values(raw.get("config", {})),
        seed=raw.get("seed"),
    )


@dataclass(frozen=True)
class Sample:
    """What one finished trial says.

    Attributes:
        time_s: the study's time metric, greater than 0; None where the trial has none.
        throughput: samples per second of the timed region; None where raypar could not look into it.
        metric: the study's metric of the last report, or None.
    """

    identity: str
    time_s: float | None
    throughput: float | None
    metric: float | None

    @property
    def num_samples(self) -> float | None:
        """Samples trained on in the timed region; None where unknown."""
        return None if self.throughput is None or self.time_s is None else self.throughput * self.time_s


@dataclass(frozen=True)
class PointSamples:
    """The trials of one point.

    Attributes:
        config: every hyperparameter, of any of its trials; empty for a point without one.
        samples: its finished trials by repeat.
        results: all its trials, whatever became of them.
    """

    point: Mapping[str, Value]
    config: Mapping[str, Any] = field(default_factory=dict)
    samples: Mapping[int, Sample] = field(default_factory=dict)
    results: tuple[TrialResult, ...] = ()

    @property
    def num_workers(self) -> int | None:
        workers = self.config.get("num_workers", self.point.get("num_workers"))
        return workers if isinstance(workers, int) else None

    @property
    def times(self) -> dict[int, float]:
        """Seconds of the time metric by repeat, of the finished trials that have it."""
        return {repeat: s.time_s for repeat, s in self.samples.items() if s.time_s is not None}

    def num_in(self, state: TrialState) -> int:
        """How many of its trials ended in this state."""
        return sum(result.state is state for result in self.results)

    def all_of(self, quantity: str) -> list[float]:
        """Every known `quantity` (an attribute of `Sample`), in the order of the repeats."""
        found = [getattr(self.samples[repeat], quantity) for repeat in sorted(self.samples)]
        return [value for value in found if value is not None]


def point_key(point: Mapping[str, Value]) -> PointKey:
    """A hashable form, equal for equal points: 1 and 1.0 are the same value, 1 and True are not."""
    # Sorted by key alone: values of different types have no order.
    return tuple(
        (k, isinstance(v, bool), tuple(v) if isinstance(v, list) else v)
        for k, v in sorted(point.items(), key=itemgetter(0))
    )


def time_metric_of(results: Iterable[TrialResult]) -> str:
    """``train_time_s`` where every finished trial has it, else ``wall_s`` (train loops that raypar can't look into)."""
    finished = [r for r in results if r.state is TrialState.FINISHED]
    return TRAIN_TIME if all(r.train_time_s is not None for r in finished) else WALL_TIME


def collect(question: Question, results: Sequence[TrialResult], time_metric: str) -> tuple[PointSamples, ...]:
    """The results sorted by point; points in the order of their values, listed ones without a result included."""
    by_key: dict[PointKey, list[TrialResult]] = {point_key(p): [] for p in question.points}
    points: dict[PointKey, Mapping[str, Value]] = {point_key(p): p for p in question.points}
    for result in latest(results):
        key = point_key(result.spec.point)
        points.setdefault(key, result.spec.point)
        by_key.setdefault(key, []).append(result)
    gathered = [_point_samples(question, points[key], by_key[key], time_metric) for key in by_key]
    words: dict[tuple[str, Value], None] = dict.fromkeys(
        (k, v) for p in question.points for k, v in p.items() if isinstance(v, str)
    )
    listed = {word: i for i, word in enumerate(words)}
    return tuple(sorted(gathered, key=lambda p: _order(question, listed, p.point)))


def _point_samples(
    question: Question, point: Mapping[str, Value], results: list[TrialResult], time_metric: str
) -> PointSamples:
    results = sorted(results, key=lambda r: (r.spec.repeat, r.started_at))
    return PointSamples(
        point=point,
        config=results[-1].spec.config if results else {},
        samples={r.spec.repeat: _sample(question, r, time_metric) for r in results if r.state is TrialState.FINISHED},
        results=tuple(results),
    )


def _sample(question: Question, result: TrialResult, time_metric: str) -> Sample:
    time_s = result.train_time_s if time_metric == TRAIN_TIME else result.wall_s
    return Sample(
        identity=result.spec.identity,
        time_s=_positive(time_s),
        # Over the wall-clock time a throughput would not be that of the same stretch of time.
        throughput=_positive(result.throughput_samples_per_s) if time_metric == TRAIN_TIME else None,
        metric=_finite(result.final.get(question.metric)),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _positive(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) and value > 0 else None


def _order(
    question: Question, listed: Mapping[tuple[str, Value], int], point: Mapping[str, Value]
) -> tuple[tuple[int, Any, str], ...]:
    """Sorts points by their values, key by key: None, numbers, tuples, then words as the study lists them."""

    def rank(key: str, value: Value) -> tuple[int, Any, str]:
        match value:
            case None:
                return (0, 0, "")
            case bool() | int() | float():
                return (1, value, "")
            case tuple() | list():
                return (2, tuple(value), "")
            case _:
                return (3, listed.get((key, value), len(listed)), str(value))

    keys = (*question.space_keys, *sorted(k for k in point if k not in question.space_keys))
    return tuple(rank(key, point.get(key)) for key in keys)


MAX_NAMED = 3  # settings, and values of one
SEED = "seed"
WORKLOAD = "workload"


@dataclass(frozen=True)
class CurrentResults:
    """The trials of a study, parted.

    Attributes:
        results: those of what was asked last, in the order given; with its swept hyperparameters as their points.
        excluded: the others.
        settings: in what these differ: what was asked last, and every other value.
    """

    results: tuple[TrialResult, ...]
    excluded: tuple[TrialResult, ...]
    settings: Mapping[str, tuple[Value, tuple[Value, ...]]]

    def sentence(self) -> str:
        """What was set aside; empty where nothing was."""
        return excluded_sentence(len(self.excluded), self.settings)


def current_results(question: Question, results: Sequence[TrialResult]) -> CurrentResults:
    """The trials of this question and the others. All are of it where the store does not say what it fixes.

    Args:
        question: as the last execution asked it.
        results: of all executions.
    """
    kept, excluded = [], []
    settings: dict[str, tuple[Value, dict[Value, None]]] = {}
    for result in results:
        others = _other_settings(question, result)
        if not others:
            kept.append(_as_asked(question, result))
            continue
        excluded.append(result)
        for key, (wanted, own) in others.items():
            settings.setdefault(key, (wanted, {}))[1][own] = None
    told = {key: (wanted, tuple(values)) for key, (wanted, values) in settings.items()}
    return CurrentResults(tuple(kept), tuple(excluded), told)


def excluded_sentence(num_trials: int, settings: Mapping[str, tuple[Value, tuple[Value, ...]]]) -> str:
    """A sentence on so many trials of other settings; empty for none."""
    if not num_trials:
        return ""
    parts = [
        f"{key}={_listed(map(units.value_of, others))} instead of {units.value_of(wanted)}"
        for key, (wanted, others) in settings.items()
    ]
    return f"{units.counted(num_trials, 'trial')} of other settings set aside: {_listed(parts)}."


def _other_settings(question: Question, result: TrialResult) -> dict[str, tuple[Value, Value]]:
    """What the question fixes and the trial has another value of, as (the question's, the trial's)."""
    spec = result.spec
    config: Mapping[str, Any] = spec.config
    found: dict[str, tuple[Value, Value]] = {}
    if question.workload and spec.workload != question.workload:
        found[WORKLOAD] = (question.workload, spec.workload)
    if question.seed is not None and spec.seed - spec.repeat != question.seed:
        found[SEED] = (question.seed, spec.seed - spec.repeat)
    for key, wanted in question.config.items():
        if key not in config:
            continue  # an older version did not know it
        if key == "num_threads" and wanted is None:
            wanted = config.get("cpus_per_worker")
        own = config[key]
        if type(own) is type(wanted) and own == wanted:
            continue  # the usual case, told quickly
        if point_key({key: wanted}) != point_key({key: own}):
            found[key] = (wanted, tuple(own) if isinstance(own, list) else own)
    return found


def _as_asked(question: Question, result: TrialResult) -> TrialResult:
    """An earlier execution may have swept more, or less: what it fixed is a value of the point all the same."""
    spec = result.spec
    keys = question.space_keys
    if not question.config or tuple(spec.point) == keys or any(key not in spec.config for key in keys):
        return result
    return replace(result, spec=replace(spec, point={key: spec.config[key] for key in keys}))


def _listed(parts: Iterable[str]) -> str:
    return units.listed(parts, MAX_NAMED, word="and")
