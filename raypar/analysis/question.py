"""Question of a study as its analysis needs it, and its current results sorted by point.

A study's store may hold trials with other settings (epochs, learning rate, seeds) from earlier executions. They answer
a different question and are excluded. Points with other values of the swept hyperparameters are kept.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, TypeAlias

from raypar import units
from raypar.analysis.load import disturbing_load
from raypar.study.blocks import num_first_blocks
from raypar.study.conditions import Stored
from raypar.study.metric import Metric
from raypar.study.options import ON_CPU, Auto, leaves_cores_open, resolve
from raypar.study.price import Price
from raypar.study.script_settings import SCRIPT_SETTINGS, WHAT_IF, is_counterfactual
from raypar.study.space import Value, examples
from raypar.study.study import ListedStudy, Study
from raypar.study.trial import IDENTITY_IGNORED, REVISION, TrialResult, TrialState, latest, timed_work
from raypar.study.workload import Config

PointKey: TypeAlias = tuple[tuple[str, bool, Value], ...]

MARGIN = 0.1  # default for a loss of time that is not worth more trials
MIN_QUIET = 6  # fewest pairs of undisturbed trials of two revisions with which only these may be compared
QUIETER = 0.5  # their scatter relative to that of all blocks, below which only these are compared
MAX_NAMED = 3  # settings, and values of one
TRAIN_TIME = "train_time_s"
WALL_TIME = "wall_s"
_SENTENCE_END = re.compile(r"[.?!](?=\s|$)")
# Hyperparameters that should not change the work of a point, and so not its loss.
OF_EQUAL_WORK = frozenset(
    ("num_workers", "nodes", "node_label", "device", "cpus_per_worker", "cpu_affinity", "num_threads", REVISION)
) | (SCRIPT_SETTINGS.keys() - {WHAT_IF})


@dataclass(frozen=True)
class Question:
    """Question of a study, which is stored beside its results, so that a report needs no study file.

    Attributes:
        baseline: values of the baseline: a point is compared with the point that differs only in these.
        space_keys: the swept hyperparameters, in display order.
        metric: key in a trial's last report that measures how good the trial is.
        mode: "max" or "min", whichever is better for the metric.
        unit: of the metric, as in `Metric`; empty: not declared, and not inferred from the values yet.
        metric_chosen_by: who chose the metric; empty: the user.
        points: every point, if the study lists them, including those without a result; () for a search.
        is_search: points are drawn rather than listed.
        target: value of the metric at which trials of a search end, which are compared by their time until then; None:
            trials train to their end.
        leader: point that led a search, whose leading points this study repeats; empty for other studies.
        num_repeats: intended number of trials per point, 1 in a search; None: unknown.
        max_repeats: maximum number of them, for a study that runs until it is settled; None for others.
        margin: a loss of time that is not worth more trials, as a share.
        allowed_share: how much slower than its baseline a point may be, as a share. The study then settles this
            instead of the speedup. None: no such limit.
        workload: its name; empty: unknown.
        config: fixed hyperparameters, including defaults, without those that follow from others; empty: unknown.
            ``num_threads`` is None if it follows from ``cpus_per_worker``.
        seed: of the first repeat; None: unknown.
        text: first sentence of the study's description, or a question that follows from the swept hyperparameters.
        code: digests of the study's present source files, by revision (``""`` for a single one); empty: unknown.
    """

    study_name: str
    baseline: Mapping[str, Value]
    space_keys: tuple[str, ...]
    metric: str = "accuracy"
    mode: str = "max"
    points: tuple[Mapping[str, Value], ...] = ()
    num_repeats: int | None = None
    max_repeats: int | None = None
    margin: float = MARGIN
    allowed_share: float | None = None
    price_per_node_hour: Price | None = None
    workload: str = ""
    config: Mapping[str, Value] = field(default_factory=dict)
    seed: int | None = None
    text: str = ""
    code: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    unit: str = ""
    metric_chosen_by: str = ""
    is_search: bool = False
    target: float | None = None
    leader: Mapping[str, Value] = field(default_factory=dict)

    @property
    def judged_by(self) -> Metric:
        """Metric that measures how good a trial is."""
        return Metric(self.metric, self.mode, self.unit)

    def with_unit(self, results: Iterable[TrialResult]) -> Question:
        """Return the question with the unit of its metric, inferred from the values if it is not declared."""
        return replace(self, unit=self.judged_by.read_from(reported_values(results, self.metric)).unit)

    def baseline_of(self, point: Mapping[str, Value]) -> dict[str, Value]:
        """Return the point that `point` is compared with; the point itself if it is a baseline."""
        return {**point, **{k: v for k, v in self.baseline.items() if k in point}}

    def is_baseline(self, point: Mapping[str, Value]) -> bool:
        return bool(self.baseline) and point_key(self.baseline_of(point)) == point_key(point)

    def compared_keys(self) -> tuple[str, ...]:
        """Return the swept hyperparameters in which a point differs from its baseline; they share all others."""
        return tuple(k for k in self.space_keys if k in self.baseline)


def question_of(study: Study, auto: Auto | None = None) -> Question:
    """Return the question that `study` asks.

    Args:
        auto: values chosen for settings that depend on the machines; None: any.
    """
    return Question(
        study_name=study.name,
        baseline=dict(study.baseline),
        space_keys=tuple(study.space),
        metric=study.judged_by.name,
        mode=study.judged_by.mode,
        points=() if study.is_search else study.points(),
        num_repeats=1 if study.is_search else num_first_blocks(study),
        max_repeats=study.max_repeats if study.until else None,
        margin=float(study.margin) if study.until else MARGIN,
        price_per_node_hour=study.price_per_node_hour,
        workload=study.workload.name,
        config=_fixed(study, auto),
        seed=study.seed,
        text=first_sentence(study.description) or asked_by(study),
        metric_chosen_by=study.workload.metric_chosen_by if not study.metric else "",
        unit=study.judged_by.unit,
        is_search=study.is_search,
        target=study.target,
        leader=study.leader if isinstance(study, ListedStudy) else {},
    )


def asked_by(study: Study) -> str:
    """Return a question derived from the study's comparisons; empty if it compares nothing."""
    swept = [key for key, domain in study.space.items() if len(examples(domain)) > 1 and key != REVISION]
    keys = [key for key in swept if key in study.baseline] or swept
    if not keys:
        return ""
    names, of = units.listed(keys, MAX_NAMED, word="and"), f"for {study.workload.name}?"
    if keys == ["num_workers"]:
        is_second = examples(study.space["num_workers"]) == (1, 2)
        return f"Does a second worker pay off {of}" if is_second else f"Do more workers pay off {of}"
    if keys == ["cpus_per_worker"]:
        return f"Do more cores pay off {of}"
    return f"What {'does' if len(keys) == 1 else 'do'} {names} change {of}"


def reported_values(results: Iterable[TrialResult], metric: str) -> Iterator[float]:
    """Yield every value of a metric in the reports of trials."""
    for result in results:
        for report in result.reports:
            if (value := report.get(metric)) is not None:
                yield value


def first_sentence(description: str) -> str:
    """Return the text up to the first full stop, question or exclamation mark that precedes a blank or the end."""
    text = " ".join(description.split())
    end = _SENTENCE_END.search(text)
    return text[: end.end()] if end else text


def after_first_sentence(description: str) -> str:
    """Return the text after its `first_sentence`, as written."""
    end = _SENTENCE_END.search(description.strip())
    return description.strip()[end.end() :].strip() if end else ""


def _fixed(study: Study, auto: Auto | None) -> dict[str, Value]:
    """Return the hyperparameters that all trials share, set by the study or left at their defaults."""
    every = resolve(study.workload, study.config, auto or ON_CPU)
    fixed: dict[str, Value] = {k: v for k, v in every.items() if k not in study.space and k not in IDENTITY_IGNORED}
    chosen = {**study.workload.defaults, **study.config, **study.space}
    if chosen.get("num_threads") is None and "num_threads" in fixed:
        fixed["num_threads"] = None
    follows = {
        "batch_size": chosen.get("per_worker_batch_size") is not None,
        "cpus_per_worker": chosen.get("cpu_affinity") is not None
        or (leaves_cores_open(study.workload, study.config) and (auto is None or "device" in study.space)),
        "device": auto is None and chosen.get("device", "auto") == "auto",
    }
    return {key: value for key, value in fixed.items() if not follows.get(key)}


def question_to_dict(question: Question) -> dict[str, Any]:
    """Return the stored form of a question. A search is stored as a question of one repeat without points."""
    return {key: value for key, value in asdict(question).items() if key != "is_search"}


def question_from_dict(raw: Stored) -> Question:
    """Restore a question from its stored form; an older store lacks some keys.

    Raises:
        TypeError: the mapping is not a question.
    """

    def with_tuples(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: with_tuples(v) for k, v in value.items()}
        return tuple(map(with_tuples, value)) if isinstance(value, list) else value

    given = {f.name: with_tuples(raw[f.name]) for f in fields(Question) if f.name in raw}
    return Question(**{"is_search": not raw.get("points") and raw.get("num_repeats") == 1, **given})


@dataclass(frozen=True)
class Sample:
    """Measurements of one finished trial (see `TrialResult.is_measured`).

    Attributes:
        time_s: the study's time metric, in seconds; None if the trial has none.
        throughput: samples per second of the timed region; None if raypar could not instrument it.
        metric: the study's metric in the last report; None if it has none, or is a counterfactual.
    """

    identity: str
    time_s: float | None
    throughput: float | None
    metric: float | None

    @property
    def num_samples(self) -> float | None:
        """Samples trained on in the timed region; None if unknown."""
        return None if self.throughput is None or self.time_s is None else self.throughput * self.time_s


@dataclass(frozen=True)
class PointSamples:
    """Trials of one point.

    Attributes:
        config: all hyperparameters; empty for a point without trials.
        samples: its finished trials by repeat, in order.
        results: all its trials, in any state.
        stopped_metrics: last value of the metric in trials that a scheduler stopped, by repeat.
        matched_times: for two revisions, seconds to compare by number of the pair; None: those of the samples.
    """

    point: Mapping[str, Value]
    config: Config = field(default_factory=dict)
    samples: Mapping[int, Sample] = field(default_factory=dict)
    results: tuple[TrialResult, ...] = ()
    stopped_metrics: Mapping[int, float] = field(default_factory=dict)
    matched_times: Mapping[int, float] | None = None

    @property
    def num_workers(self) -> int | None:
        workers = self.config.get("num_workers", self.point.get("num_workers"))
        return workers if isinstance(workers, int) else None

    @property
    def values(self) -> dict[str, Any]:
        """All hyperparameters, those of the point last."""
        return {**self.config, **self.point}

    @property
    def times(self) -> dict[int, float]:
        """Seconds of the time metric by repeat, for finished trials that have it; or `matched_times` if set."""
        return self.by_repeat("time_s") if self.matched_times is None else dict(self.matched_times)

    @property
    def searched_metrics(self) -> list[float]:
        """Values of the metric that a search compares: of finished trials, or else the last ones of stopped trials."""
        return self.all_of("metric") or list(self.stopped_metrics.values())

    @property
    def rest(self) -> dict[str, Value]:
        """The point without its number of workers."""
        return {key: value for key, value in self.point.items() if key != "num_workers"}

    @property
    def measured(self) -> list[TrialResult]:
        """Its finished trials."""
        return [result for result in self.results if result.is_measured]

    @property
    def unusable(self) -> list[TrialResult]:
        """Its trials that diverged."""
        return [result for result in self.results if result.state.traits.is_unusable]

    @property
    def outcome(self) -> TrialState | None:
        """State of its trials if none finished, the most informative one of several; None for other points."""
        if not self.results or self.measured:
            return None
        states = [result.state for result in self.results]
        return min(states, key=lambda state: (state.traits.is_usable, not state.traits.is_result))

    def by_repeat(self, quantity: str) -> dict[int, float]:
        """Return all known values of `quantity` (an attribute of `Sample`) by repeat, in order."""
        pairs = ((repeat, getattr(sample, quantity)) for repeat, sample in self.samples.items())
        return {repeat: value for repeat, value in pairs if value is not None}

    def all_of(self, quantity: str) -> list[float]:
        """Return all known values of `quantity`, in the order of the repeats."""
        return list(self.by_repeat(quantity).values())


def point_key(point: Mapping[str, Value]) -> PointKey:
    """Return a hashable form, equal for equal points: 1 and 1.0 are the same value, 1 and True are not."""
    # Sort by key only, because values of different types have no order.
    return tuple(
        (k, isinstance(v, bool), tuple(v) if isinstance(v, list) else v)
        for k, v in sorted(point.items(), key=itemgetter(0))
    )


def time_metric_of(results: Iterable[TrialResult]) -> str:
    """Return ``train_time_s`` if every finished trial has it for the same stretch of work, else ``wall_s``."""
    return time_metric_for(works_of(results))


def works_of(results: Iterable[TrialResult]) -> set[str | None]:
    """Return the stretches of work that finished trials have timed; None: one has no ``train_time_s``, or unknown."""
    timed = (r for r in results if r.is_measured and not r.conditions.is_untrained)
    return {None if r.train_time_s is None else timed_work(r) for r in timed}


def time_metric_for(works: Collection[str | None]) -> str:
    """Return the time that can be compared among trials that have timed this work."""
    return TRAIN_TIME if len(works) < 2 and None not in works else WALL_TIME


def collect(question: Question, results: Sequence[TrialResult], time_metric: str) -> tuple[PointSamples, ...]:
    """Group results by point. Points are sorted by their values and include listed ones without a result."""
    groups: dict[PointKey, tuple[Mapping[str, Value], list[TrialResult]]] = {
        point_key(p): (p, []) for p in question.points
    }
    for result in latest(results):
        point = result.spec.point
        groups.setdefault(point_key(point), (point, []))[1].append(result)
    gathered = [point_samples(question, point, of_point, time_metric) for point, of_point in groups.values()]
    if REVISION in question.baseline:
        gathered = _with_quiet_pairs(gathered)
    order = point_order(question)
    return tuple(sorted(gathered, key=lambda p: order(p.point)))


def point_order(question: Question) -> Callable[[Mapping[str, Value]], Any]:
    """Return the function that gives a point's sort key: by its values, words in the study's order."""
    words = dict.fromkeys(v for p in question.points for v in p.items() if isinstance(v[1], str))
    return partial(_order, question, {word: i for i, word in enumerate(words)})


def _with_quiet_pairs(gathered: Sequence[PointSamples]) -> list[PointSamples]:
    """Return the points of two revisions, with only their undisturbed trials if that helps."""
    pairs: dict[PointKey, list[PointSamples]] = {}
    for p in gathered:
        pairs.setdefault(point_key({key: value for key, value in p.point.items() if key != REVISION}), []).append(p)
    return [p for pair in pairs.values() for p in (_matched(*pair) if len(pair) == 2 else pair)]


def _matched(a: PointSamples, b: PointSamples) -> tuple[PointSamples, PointSamples]:
    """Return both points with the times of their undisturbed trials paired in order: first with first, and so on.

    Load affects both alike, so selecting by it favours neither. The blocks remain the pairs if there are fewer than
    `MIN_QUIET` such pairs, or if these scatter hardly less, which means that the load was elsewhere on the machine.
    """
    disturbed = [{r.spec.repeat for r in p.results if disturbing_load(r) is not None} for p in (a, b)]
    blocks = sorted(a.times.keys() & b.times.keys())
    sides = (a.times, b.times)
    quiet = [[t for r, t in of.items() if r not in noisy] for of, noisy in zip(sides, disturbed, strict=True)]
    num_pairs = min(map(len, quiet))
    if num_pairs < MIN_QUIET or not any(disturbed) or len(blocks) < MIN_QUIET:
        return a, b
    of_quiet = statistics.stdev(math.log(of_b / of_a) for of_a, of_b in zip(*quiet, strict=False))
    of_blocks = statistics.stdev(math.log(b.times[r] / a.times[r]) for r in blocks)
    if of_quiet >= QUIETER * of_blocks:
        return a, b
    matched = [dict(enumerate(of[:num_pairs])) for of in quiet]
    return replace(a, matched_times=matched[0]), replace(b, matched_times=matched[1])


def with_baselines(
    question: Question, gathered: Sequence[PointSamples]
) -> list[tuple[PointSamples, PointSamples | None]]:
    """Pair each point with its baseline; None if the study has no baseline, or the baseline no trials."""
    by_key = {point_key(p.point): p for p in gathered} if question.baseline else {}
    return [(p, by_key.get(point_key(question.baseline_of(p.point)))) for p in gathered]


def point_samples(
    question: Question, point: Mapping[str, Value], results: Sequence[TrialResult], time_metric: str
) -> PointSamples:
    """Return the samples of a point's trials."""
    results = [_with_times_that_count(r) for r in sorted(results, key=lambda r: (r.spec.repeat, r.started_at))]
    is_train_time = time_metric == TRAIN_TIME

    def sample(result: TrialResult) -> Sample:
        return Sample(
            identity=result.spec.identity,
            time_s=_finite(result.train_time_s if is_train_time else result.wall_s, above=0),
            # With wall-clock times, the throughput would refer to a different stretch of time.
            throughput=_finite(result.throughput_samples_per_s, above=0) if is_train_time else None,
            # A counterfactual trains something else.
            metric=None if is_counterfactual(result.spec.config) else _finite(result.final.get(question.metric)),
        )

    samples = {r.spec.repeat: sample(r) for r in results if r.is_measured}
    stopped = {r.spec.repeat: _finite(r.final.get(question.metric)) for r in results if r.state is TrialState.STOPPED}
    of_stopped = {repeat: metric for repeat, metric in stopped.items() if metric is not None}
    return PointSamples(point, results[-1].spec.config if results else {}, samples, tuple(results), of_stopped)


def _with_times_that_count(result: TrialResult) -> TrialResult:
    """Return the result, without times and derived values if the trial stalled or trained nothing.

    Such times are not a property of the point. Metrics and memory still count.
    """
    if not result.conditions.stalls_s and not result.conditions.is_untrained:
        return result
    return replace(result, train_time_s=None, wall_s=None, throughput_samples_per_s=None, energy_j=None)


def _finite(value: float | None, above: float = -math.inf) -> float | None:
    return value if value is not None and above < value < math.inf else None


def _order(
    question: Question, listed: Mapping[tuple[str, Value], int], point: Mapping[str, Value]
) -> tuple[tuple[int, Any, str], ...]:
    """Return a sort key by the point's values: None, numbers, tuples, then words in the study's order."""

    def rank(key: str, value: Value) -> tuple[int, Any, str]:
        if value is None:
            return (0, 0, "")
        if isinstance(value, (int, float)):
            return (1, value, "")
        if isinstance(value, (tuple, list)):
            return (2, tuple(value), "")
        return (3, listed.get((key, value), len(listed)), str(value))

    keys = (*question.space_keys, *sorted(k for k in point if k not in question.space_keys))
    return tuple(rank(key, point.get(key)) for key in keys)


@dataclass(frozen=True)
class CurrentResults:
    """Trials that answer a question, and those that don't.

    Attributes:
        results: trials with the question's settings; their points have its swept hyperparameters.
        excluded: the other trials.
        settings: settings in which these differ, each with the question's value.
    """

    question: Question
    results: tuple[TrialResult, ...]
    excluded: tuple[TrialResult, ...]
    settings: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """Sentence on the excluded trials; empty if there are none."""
        return excluded_sentence(len(self.excluded), self.settings)

    @cached_property
    def time_metric(self) -> str:
        return time_metric_of(self.results)

    @cached_property
    def points(self) -> tuple[PointSamples, ...]:
        """Current results grouped by point."""
        return collect(self.question, self.results, self.time_metric)


def excluded_subject(number: int) -> str:
    return f"{units.counted(number, 'trial')} of other settings excluded"


def excluded_sentence(number: int, settings: Sequence[str]) -> str:
    return f"{excluded_subject(number)}: {settings_text(settings)}." if number else ""


def current_results(question: Question, results: Sequence[TrialResult]) -> CurrentResults:
    """Separate the trials that answer `question`, that of the last execution, from those with other settings."""
    current, excluded = [], []
    settings: dict[str, tuple[Value, dict[Value, None]]] = {}  # the question's value, and all others
    for result in results:
        differences = _other_settings(question, result)
        if not differences:
            current.append(_as_asked(question, result))
            continue
        excluded.append(result)
        for key, (expected, actual) in differences.items():
            settings.setdefault(key, (expected, {}))[1][actual] = None
    parts = tuple(
        f"{key}={settings_text(map(units.value_of, others))} instead of {units.value_of(expected)}"
        for key, (expected, others) in settings.items()
    )
    return CurrentResults(question, tuple(current), tuple(excluded), parts)


def _other_settings(question: Question, result: TrialResult) -> dict[str, tuple[Value, Value]]:
    """Return the settings in which a trial differs from the question, as (the question's, the trial's)."""
    spec = result.spec
    config: Config = spec.config
    differences: dict[str, tuple[Value, Value]] = {}
    if question.workload and spec.workload != question.workload:
        differences["workload"] = (question.workload, spec.workload)
    if question.seed is not None and spec.seed - spec.repeat != question.seed:
        differences["seed"] = (question.seed, spec.seed - spec.repeat)
    for key, expected in question.config.items():
        if key not in config:
            continue  # an older version did not have it
        if key == "num_threads" and expected is None:
            expected = config.get("cpus_per_worker")
        actual = config[key]
        if type(actual) is type(expected) and actual == expected:
            continue  # fast path for the usual case
        if point_key({key: expected}) != point_key({key: actual}):
            differences[key] = (expected, tuple(actual) if isinstance(actual, list) else actual)
    return differences


def _as_asked(question: Question, result: TrialResult) -> TrialResult:
    """Return the result with its point in this question; an earlier execution may have swept more or fewer keys."""
    spec = result.spec
    keys = question.space_keys
    if not question.config or tuple(spec.point) == keys or any(key not in spec.config for key in keys):
        return result
    return replace(result, spec=replace(spec, point={key: spec.config[key] for key in keys}))


def settings_text(parts: Iterable[str]) -> str:
    return units.listed(parts, MAX_NAMED, word="and")
