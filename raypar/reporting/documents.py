"""Documents that ``--json`` prints: the keys of each verb's, and of the parts that they share.

A document holds what the verb's text holds, numbers unrounded. The functions that make it stand beside those that print
the text, and need this module for its types alone. Dataclasses in a document (an `Estimate`, say) are part of the
format with all their fields.

docs/json.md describes the format; docs/schema.json is its JSON Schema, which ``python -m raypar.reporting.documents``
prints. Within a version of the format, keys and the values of enumerations are only added.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from typing_extensions import TypeAliasType, TypedDict  # of `typing`, pydantic takes it from Python 3.12 on

from raypar.reporting.text import as_utf8
from raypar.study.quantity import View, limited, of_view
from raypar.study.space import Value
from raypar.study.trial import COUNTERS, FailureKind, Placement, TrialState

if TYPE_CHECKING:
    from raypar.analysis.comparison import Gate
    from raypar.analysis.effects import Effects, Importances
    from raypar.analysis.goodput import BatchGroup
    from raypar.analysis.laws import Scaling
    from raypar.analysis.recommend import Constraints, Decision
    from raypar.analysis.scaling import Measurement
    from raypar.analysis.stats import Estimate
    from raypar.analysis.time_to_target import Target
    from raypar.predict.network import Algorithm, Network, Topology
    from raypar.predict.predict import JobSpec
    from raypar.predict.step_model import Limit, StepTime

Values: TypeAlias = Mapping[str, Value]  # hyperparameters

# Words for an `analysis.comparison.Outcome`: in a report, of two studies, of two revisions, of their metrics.
Outcome = TypeAliasType(
    "Outcome", Literal["faster", "slower", "equivalent", "inconclusive", "unconfirmed", "disturbed"]
)
Difference = TypeAliasType(
    "Difference", Literal["slower", "faster", "inconclusive", "disturbed", "no interval", "no time"]
)
Change = TypeAliasType("Change", Literal["slower", "faster", "equivalent", "inconclusive", "untimed"])
MetricChange = TypeAliasType("MetricChange", Literal["equal", "different", "inconclusive", "unknown"])
OUTCOMES: Mapping[str, Outcome] = {
    "faster": "faster",
    "slower": "slower",
    "equivalent": "equivalent",
    "inconclusive": "inconclusive",
    "unconfirmed": "unconfirmed",
    "disturbed": "disturbed",
}
DIFFERENCES: Mapping[str, Difference] = {
    "slower": "slower",
    "faster": "faster",
    "inconclusive": "inconclusive",
    "disturbed": "disturbed",
    "unconfirmed": "no interval",
    "missing": "no time",
}
CHANGES: Mapping[str, Change] = {
    "slower": "slower",
    "faster": "faster",
    "equivalent": "equivalent",
    "inconclusive": "inconclusive",
    "unconfirmed": "inconclusive",
    "missing": "untimed",
}
METRIC_CHANGES: Mapping[str, MetricChange] = {
    "equal": "equal",
    "higher": "different",
    "lower": "different",
    "inconclusive": "inconclusive",
    "unconfirmed": "inconclusive",
    "missing": "unknown",
}


class Spread(dict[str, Any]):
    """Keys of an entry that come from a table, `SPREAD`: they stand in the document in place of this mapping's key."""


# By entry: its key that is such a mapping, and the keys with their descriptions.
SPREAD: Mapping[str, tuple[str, Callable[[], Mapping[str, str]]]] = {
    "StudyEntry": ("counts", lambda: dict.fromkeys(COUNTERS, "")),
    "TrialEntry": ("quantities", lambda: {q.key: q.about for q in of_view(View.RECORD)}),
    "PointEntry": ("quantities", lambda: {q.key: q.about for q in of_view(View.POINTS)}),
    "CandidateEntry": ("quantities", lambda: {q.key: q.about for q in of_view(View.CHOICE)}),
    "Constraints": ("limits", lambda: {f"max_{q.key}": limit.about for q, limit in limited().items()}),
}


class Document(TypedDict):
    """Output of a verb, which each document names as its ``kind``; ``schema`` is the version of the format."""

    schema: Literal[1]


# ---- list, show


class StudyEntry(TypedDict):
    """A study in the store; the counts of trials are sums over its executions.

    Attributes:
        last_used_at_s: Unix time.
    """

    name: str
    num_executions: int
    counts: Mapping[str, int]
    last_used_at_s: float


class ListDocument(Document):
    """Studies in the store, the last used one first."""

    kind: Literal["list"]
    studies: Sequence[StudyEntry]


class TrialEntry(TypedDict):
    """A trial. Times are of the slowest rank; ``raypar store export`` writes all that is stored of it.

    Attributes:
        identity: hash of what determines the result.
        point: the swept hyperparameters.
        repeat: from 1; also the block that it was run in.
        order: position in the study's execution order, from 1.
        reason: why it failed or diverged, in a line.
        log_path: output of the rank that failed first.
        started_at_s: Unix time.
        metric: the study's metric in the last report.
        final: the last report.
    """

    identity: str
    point: Values
    repeat: int
    order: int
    seed: int
    state: TrialState
    reason: str | None
    failure_kind: FailureKind | None
    log_path: str | None
    attempts: int
    started_at_s: float
    quantities: Mapping[str, float | None]
    metric: float | None
    final: Values


class ShowDocument(Document):
    """Trials of a study, block by block in the order in which they were run.

    Attributes:
        scope: the executions that ``--since`` restricts it to; None: all.
        metric: name of the study's metric.
    """

    kind: Literal["show"]
    study: str
    scope: str | None
    metric: str
    trials: Sequence[TrialEntry]


# ---- recommend, and its part of a report


class CandidateEntry(TypedDict):
    """A point that may be recommended, with the numbers that count: up to the target where one is asked for.

    Attributes:
        num_trials: all of them.
        num_finished: those whose times and metrics count.
        num_reached: trials that reached the target; None where none is asked for.
        metric: the study's, after the last epoch.
        exclusion: why it can't be chosen; None: it can.
        is_close_call: whether that hangs on a limit within the interval, or on one trial.
        is_metric_worse: whether its metric is significantly worse than the best point's, by more than the margin.
        is_on_front: whether no other beats it in time, metric, cost and energy.
    """

    point: Values
    num_workers: int | None
    num_trials: int
    num_finished: int
    num_reached: int | None
    time_s: Estimate | None
    metric: Estimate | None
    efficiency: Estimate | None
    quantities: Mapping[str, Estimate | None]
    exclusion: str | None
    is_close_call: bool
    is_metric_worse: bool
    is_on_front: bool


class SettlingEntry(TypedDict):
    """Trials that would settle which point is the fastest.

    Attributes:
        num_repeats: about how many trials each of the points needs in all; None: too many to be worth it.
        spread_is_known: whether the trials so far show how much they vary; else the number is only a beginning.
        text: the same in a sentence.
        command: what runs them; None in a report, and where `instead` is there.
        instead: what to do where there is no command.
    """

    points: Sequence[Values]
    num_repeats: int | None
    spread_is_known: bool
    text: str
    command: str | None
    instead: str | None


class RecommendationEntry(TypedDict):
    """Recommended point.

    Attributes:
        objective: what was looked for, in words.
        decision: clear: faster than every other that qualifies; tied: none of these is much faster; unclear: one may
            be, and `chosen` is only leading; none: no point qualifies.
        runner_up: the fastest of the others.
        lead: time of the runner-up over that of the chosen one.
        rivals: points that do not differ significantly from the chosen one.
    """

    objective: str
    decision: Decision
    chosen: CandidateEntry | None
    runner_up: CandidateEntry | None
    lead: Estimate | None
    rivals: Sequence[Values]
    settling: SettlingEntry | None


class RecommendDocument(Document):
    """Recommendation of a study.

    Attributes:
        scope: the executions that ``--since`` restricts it to; None: all.
        metric: name of the study's metric.
        mode: "max" or "min" of it is better.
        metric_unit: "share", "percent" or "number"; None: no trial reported it.
        answer: the recommendation in sentences.
        doubt: why times can't be trusted.
        time_metric: what the times are where no target is asked for: ``train_time_s`` or ``wall_s``.
        energy_source: what the energies are of.
        constraints: what was asked for; its `metric_margin` is None where that is the default.
        metric_margin: how much worse than the best a metric may be.
        candidates: all points, the chosen one first, then those that qualify by their time, then the others.
        batches: effect of the batch size, where a target is asked for.
        excluded: a sentence on trials of other settings.
    """

    kind: Literal["recommend"]
    study: str
    scope: str | None
    metric: str
    mode: str
    metric_unit: str | None
    answer: str
    doubt: str | None
    time_metric: str
    energy_source: str | None
    constraints: Constraints
    metric_margin: float
    recommendation: RecommendationEntry
    candidates: Sequence[CandidateEntry]
    batches: Sequence[BatchGroup]
    excluded: str | None


# ---- fit, and its part of a report


class WorkerCountEntry(TypedDict):
    """Numbers of a worker count.

    Attributes:
        measured: the quantity, in the unit of its group.
        speedup: over the baseline.
        efficiency: speedup over that of perfect scaling.
        serial_fraction: that the speedup shows: Karp and Flatt's in strong scaling, Gustafson's in weak scaling.
        karp_flatt: the former, in strong scaling.
        why_no_fraction: why there is none, but for the baseline.
    """

    num_workers: int
    measured: Estimate
    speedup: Estimate
    efficiency: Estimate
    serial_fraction: Estimate | None
    karp_flatt: Estimate | None
    why_no_fraction: str | None


class StepEntry(TypedDict):
    """Step from a worker count to one at least twice as large.

    Attributes:
        start: workers before.
        end: workers after.
        gain: the rate over that before, of one doubling.
        worker_time_ratio: time of all workers together for the same work, over that before.
    """

    start: int
    end: int
    gain: Estimate
    worker_time_ratio: float


class ParameterEntry(TypedDict):
    """A parameter of a law."""

    name: str
    estimate: Estimate


class LawErrorEntry(TypedDict):
    """Errors of a law at a worker count.

    Attributes:
        residual: the measured rate over the fitted one, minus 1.
        cv_error: the same of the law fitted to the other worker counts alone: abs(log(ratio)).
    """

    num_workers: int
    residual: float
    cv_error: float


class ExtrapolationEntry(TypedDict):
    """Speedup that a law predicts beyond the measured worker counts."""

    num_workers: int
    speedup: Estimate


class FittedLawEntry(TypedDict):
    """A law's parameters, and what it predicts.

    Attributes:
        holds: whether it misses the measurements by no more than their noise, or by little.
        limit: Amdahl's: the speedup that no worker count exceeds.
        peak_num_workers: Gunther's: the worker count with the highest rate.
    """

    holds: bool
    parameters: Sequence[ParameterEntry]
    errors: Sequence[LawErrorEntry]
    extrapolated: Sequence[ExtrapolationEntry]
    limit: Estimate | None
    peak_num_workers: Estimate | None
    peak_speedup: Estimate | None


class LawEntry(TypedDict):
    """A law of scaling, fitted or not.

    Attributes:
        formula: the speedup over the baseline.
        text: the law in sentences.
    """

    name: str
    formula: str
    text: str
    why_not_fitted: str | None
    fit: FittedLawEntry | None


class ExcludedCountEntry(TypedDict):
    """A worker count without a finished trial, and why."""

    num_workers: int
    reason: str


class ScalingEntry(TypedDict):
    """Scaling of runs that differ only in their number of workers.

    Attributes:
        label: of the runs; None where they are all.
        point: the other swept hyperparameters; empty for a file.
        quantity: what was measured.
        unit: of it; None where a file doesn't have it.
        baseline: the worker count that speedups are over.
        points: from the fewest workers.
        steps: doublings, or more.
        better_law: name of the law that predicts left-out worker counts significantly better.
        better: the same in a sentence.
        why_no_interval: why the laws' parameters have no intervals.
        answer: where to stop, in a sentence.
    """

    label: str | None
    point: Values
    scaling: Scaling
    quantity: Measurement
    unit: str | None
    baseline: int
    points: Sequence[WorkerCountEntry]
    steps: Sequence[StepEntry]
    laws: Sequence[LawEntry]
    better_law: str | None
    better: str | None
    why_no_interval: str | None
    answer: str
    excluded: Sequence[ExcludedCountEntry]


class FitDocument(Document):
    """Scaling of a study or a file.

    Attributes:
        source: name of the study, or path of the file.
        reading: a sentence on what the columns of a file were understood to be.
        doubt: why times can't be trusted, so that `groups` name no worker count to stop at.
        groups: each fitted on its own.
        excluded: a sentence on trials of other settings.
    """

    kind: Literal["fit"]
    source: str
    reading: str | None
    doubt: str | None
    groups: Sequence[ScalingEntry]
    excluded: str | None


# ---- report


class ComparisonEntry(TypedDict):
    """Comparison of a point with its baseline.

    Attributes:
        compared: what of the point is compared: ``2 workers``.
        baseline: the same of its baseline: ``1``.
        setting: hyperparameters that both share: ``batch_size=96``.
    """

    point: Values
    compared: str
    baseline: str
    setting: str | None
    outcome: Outcome
    speedup: Estimate | None
    efficiency: Estimate | None


class PointEntry(TypedDict):
    """Trials of a point, and estimates from the finished ones.

    Attributes:
        outcome: what became of the trials where none finished.
        time_s: of the report's time metric.
        speedup: over the baseline; 1 for the baseline itself.
        efficiency: speedup over that of perfect scaling.
        metric: the study's, after the last epoch.
        step_time_median_s: over all steps of all finished trials, slowest rank; None where the store has no steps.
        step_time_p95_s: 95th percentile of the same.
    """

    point: Values
    num_workers: int | None
    is_baseline: bool
    num_trials: int
    num_finished: int
    outcome: TrialState | None
    time_s: Estimate | None
    speedup: Estimate | None
    efficiency: Estimate | None
    metric: Estimate | None
    quantities: Mapping[str, Estimate | None]
    step_time_median_s: float | None
    step_time_p95_s: float | None


class CaveatEntry(TypedDict):
    """One thing to mind.

    Attributes:
        check: name of the check.
        summary: beginning of the detail.
        advice: what to do about it.
    """

    check: str
    summary: str
    detail: str
    advice: str


class BreakdownEntry(TypedDict):
    """Parts of a point's step, mean over its ranks.

    Attributes:
        num_steps: that they are the mean of.
        step_s: median without the profiler, slowest rank.
        overhead: what the profiler adds to a step, as a share.
        parts_s: they add up to a step with the profiler.
        hidden_communication_s: communication while a rank works.
        utilisation: model FLOP utilisation, as a share.
    """

    point: Values
    num_steps: int
    step_s: float
    overhead: float
    parts_s: Mapping[str, float]
    hidden_communication_s: float
    utilisation: float | None


class ReportDocument(Document):
    """Report on a study.

    Attributes:
        scope: the executions that ``--since`` restricts it to; None: all.
        question: the first sentence of the study's description.
        answer: to the question.
        recommended: the recommended or leading point in sentences; None in a search, whose answer names it.
        status: how a study with ``--until settled`` stands.
        doubt: why times can't be trusted, so that none of them is compared.
        final_test: outcome on the test set in a sentence; None where no model has seen it.
        swept: the swept hyperparameters.
        baseline: what points are compared with: the point that differs only in these values.
        metric: name of the study's metric.
        mode: "max" or "min" of it is better.
        metric_unit: "share", "percent" or "number"; None: no trial reported it.
        time_metric: what the times are: ``train_time_s`` (the timed steps alone) or ``wall_s`` (everything).
        energy_source: what the energies are of.
        num_by_state: trials by their end.
        wall_s: of all trials together.
        comparisons: of all points that have a speedup.
        importances: of the hyperparameters of a search.
        points: those of a search by their metric, the best first.
        caveats: the gravest first.
        statements: what else the numbers show.
        scaling: of points that differ only in ``num_workers``.
        effects: of each hyperparameter; None where fewer than two are swept.
        target: what `batches` are on the way to: the best value of the metric that every trial reached.
        batches: effect of the batch size.
        breakdowns: where a step's time goes, of points that were looked into.
    """

    kind: Literal["report"]
    study: str
    scope: str | None
    question: str | None
    answer: str
    recommended: str | None
    status: str | None
    doubt: str | None
    final_test: str | None
    workload: str | None
    swept: Sequence[str]
    baseline: Values
    metric: str
    mode: str
    metric_unit: str | None
    time_metric: str
    energy_source: str | None
    price_per_node_hour: float | None
    num_trials: int
    num_by_state: Mapping[TrialState, int]
    wall_s: float | None
    comparisons: Sequence[ComparisonEntry]
    recommendation: RecommendationEntry | None
    importances: Importances | None
    points: Sequence[PointEntry]
    caveats: Sequence[CaveatEntry]
    statements: Sequence[str]
    scaling: Sequence[ScalingEntry]
    effects: Effects | None
    target: Target | None
    batches: Sequence[BatchGroup]
    breakdowns: Sequence[BreakdownEntry]


# ---- compare


class SideEntry(TypedDict):
    """One of two studies.

    Attributes:
        store: its MLflow store.
        doubt: why its times can't be trusted.
        is_origin_known: whether the store has where it comes from (versions, machine, commit).
        is_uncommitted: whether it ran code with changes that no commit has.
        only: points that the other study lacks.
        excluded: a sentence on trials of other settings.
    """

    study: str
    store: str
    doubt: str | None
    is_origin_known: bool
    is_uncommitted: bool
    only: Sequence[Values]
    excluded: str | None


class PointSideEntry(TypedDict):
    """One study's trials of a point.

    Attributes:
        outcome: what became of them where none finished.
        time_s: of the comparison's time metric.
        metric: after the last epoch.
    """

    num_finished: int
    num_diverged: int
    outcome: TrialState | None
    time_s: Estimate | None
    metric: Estimate | None


class ValuePair(TypedDict):
    """A hyperparameter in both studies."""

    a: Value
    b: Value


class OriginPair(TypedDict):
    """A version, machine or commit in both studies: each value that occurred."""

    a: Sequence[str]
    b: Sequence[str]


class MatchedEntry(TypedDict):
    """A point of both studies.

    Attributes:
        difference: B against A, or against all that B is allowed to take.
        gate: result at this point of ``--fail-if-slower``; None without it.
        ratio: how many times as long B takes as A for the same work.
        metric_change: B's metric minus A's.
        execution_changes: how its trials were run differently.
    """

    point: Values
    difference: Difference
    gate: Gate | None
    ratio: Estimate | None
    metric_change: Estimate | None
    a: PointSideEntry
    b: PointSideEntry
    execution_changes: Mapping[str, ValuePair]


class UnlikeEntry(TypedDict):
    """A point that is not compared, for the studies do different work there, and how that differs."""

    point: Values
    changes: Mapping[str, ValuePair]


class GateEntry(TypedDict):
    """Result of ``--fail-if-slower``.

    Attributes:
        allowed_share: how much slower B may be.
    """

    allowed_share: float
    result: Gate
    exit_code: int


class CompareDocument(Document):
    """Comparison of two studies.

    Attributes:
        a: the reference.
        b: what is held against it.
        answer: the claims in sentences.
        limitation: what no interval covers.
        notes: on what is not compared, and on other differences.
        metric: name of A's metric.
        metric_unit: "share", "percent" or "number"; None: no trial reported it in A.
        time_metric: what the times are: ``train_time_s`` or ``wall_s``.
        gate: None without ``--fail-if-slower``.
        missing: points that A has a time of and B no trial that did the same work.
        origins: what differs in where the studies come from.
    """

    kind: Literal["compare"]
    a: SideEntry
    b: SideEntry
    answer: str
    limitation: str
    notes: Sequence[str]
    metric: str
    metric_unit: str | None
    time_metric: str
    gate: GateEntry | None
    points: Sequence[MatchedEntry]
    missing: Sequence[Values]
    unlike: Sequence[UnlikeEntry]
    origins: Mapping[str, OriginPair]


# ---- ab


class RevisionEntry(TypedDict):
    """A point under both revisions.

    Attributes:
        point: without the revision.
        change: B's time against A's.
        ratio: how many times as long B takes as A for the same work.
        num_pairs: blocks with a time of both that count.
        num_disturbed_pairs: blocks in which other load disturbed one of the two.
        num_more_blocks: about how many more settle an inconclusive point; None: unknown.
        metric_result: B's metric against A's.
        metric_change: B's metric minus A's.
        has_equal_losses: whether all losses of all epochs are equal in all pairs; None: none are reported.
    """

    point: Values
    change: Change
    ratio: Estimate | None
    num_pairs: int
    num_disturbed_pairs: int
    num_more_blocks: int | None
    metric_result: MetricChange
    metric_change: Estimate | None
    has_equal_losses: bool | None


class AbDocument(Document):
    """Comparison of two revisions of the code.

    Attributes:
        study: name in the store, for ``raypar report``.
        a: label of the reference.
        b: label of what is held against it.
        answer: the verdict in sentences.
        margin: a difference that does not matter, as a share.
        metric: name of the study's metric.
        time_metric: what the times are: ``train_time_s`` or ``wall_s``.
        num_failed: trials that failed.
        gate: None without ``--fail-if-slower``.
    """

    kind: Literal["ab"]
    study: str
    a: str
    b: str
    answer: str
    margin: float
    metric: str
    time_metric: str
    num_failed: int
    exit_code: int
    gate: GateEntry | None
    points: Sequence[RevisionEntry]


# ---- predict


class PredictionEntry(TypedDict):
    """Predicted times of a worker count, at best.

    Attributes:
        is_asked: whether ``--workers`` names it.
        text: the prediction in a sentence.
        batch_size: global.
        parts: of a step's time.
        speedup: over one worker.
        training_s: of all epochs.
        limit: the main cause that keeps it from being faster.
        measured_step_time_s: None where this was not measured.
        extrapolated: in what it goes beyond what was measured.
    """

    num_workers: int
    is_asked: bool
    text: str
    batch_size: int
    step_time_s: Estimate
    parts: StepTime[float]
    throughput_samples_per_s: Estimate
    speedup: Estimate
    efficiency: Estimate
    epoch_s: Estimate
    training_s: Estimate
    limit: Limit
    measured_step_time_s: Estimate | None
    extrapolated: Sequence[str]


class CalibrationEntry(TypedDict):
    """Costs of one worker's step, as fitted to the measurements.

    Attributes:
        fixed_s: whatever its batch.
        per_sample_s: for each sample.
        variation: coefficient of variation of its step times.
        is_variation_measured: else it is what is usual.
    """

    fixed_s: float
    per_sample_s: float
    variation: float
    is_variation_measured: bool
    num_layers: int
    num_gradient_bytes: int


class PredictDocument(Document):
    """Prediction for other worker counts.

    Attributes:
        title: the study, and the settings that choose the point.
        answer: the predictions that were asked for, and what limits the largest, in sentences.
        note: in which sense these are bounds.
        fastest: the worker count with the highest throughput, of those up to the largest.
        most_workers: as many as the global batch has samples; None: any number can work.
        job: the training that is predicted.
        algorithm: of the all-reduce.
        network_source: where the network comes from.
        assumptions: a sentence each.
        caveats: those of the study.
    """

    kind: Literal["predict"]
    study: str
    title: str
    answer: str
    note: str
    predictions: Sequence[PredictionEntry]
    fastest: int
    most_workers: int | None
    job: JobSpec
    calibration: CalibrationEntry
    network: Network | Topology
    network_source: str
    algorithm: Algorithm
    assumptions: Sequence[str]
    caveats: Sequence[str]


# ---- plan, doctor, work


class PlannedEntry(TypedDict):
    """A trial that is to run.

    Attributes:
        repeat: from 1; also the block that it is run in.
        order: position in the study's execution order, from 1.
    """

    identity: str
    point: Values
    num_workers: int
    repeat: int
    order: int
    seed: int


class PlanDocument(Document):
    """Trials of a study that are done, and those still to run.

    Attributes:
        baseline: what points are compared with.
        metric: that points are judged by.
        mode: "max" or "min" of it is better.
        metric_unit: "share", "percent" or "number"; None: to be read from the values.
        is_search: whether points are drawn; then `trials` is empty.
        num_trials: in all, as far as decided.
        max_trials: the most that ``--until settled`` may run; else `num_trials`.
        isolation: warm: gangs serve trial after trial; fresh: a gang for every trial.
        gangs: their shapes.
        num_cores: that trials take at a time.
        num_all_cores: that there are.
        estimated_s: for what is to run; None before the first trials.
        num_timed_trials: stored trials that the estimate is from.
        timed_study: whose these are; None: the study's own.
        trials: to run.
    """

    kind: Literal["plan"]
    study: str
    description: str | None
    workload: str
    swept: Sequence[str]
    baseline: Values
    metric: str
    mode: str
    metric_unit: str | None
    is_search: bool
    num_points: int
    num_trials: int
    max_trials: int
    num_done: int
    num_to_run: int
    isolation: str
    gangs: Sequence[Placement]
    num_cores: int | None
    num_all_cores: float
    estimated_s: float | None
    num_timed_trials: int
    timed_study: str | None
    trials: Sequence[PlannedEntry]


class CheckEntry(TypedDict):
    """Result of a check.

    Attributes:
        fix: of one that failed.
    """

    name: str
    detail: str
    is_ok: bool
    fix: str | None


class DoctorDocument(Document):
    """Checks of the machine.

    Attributes:
        is_ok: whether all passed.
    """

    kind: Literal["doctor"]
    is_ok: bool
    checks: Sequence[CheckEntry]


class LayerEntry(TypedDict):
    """Work of the layers of one type, for one sample.

    Attributes:
        kind: the type.
        is_of_macs: whether the numbers are multiply-accumulates; else plain operations, which are in no total.
        by_weights: for the gradient by weights and biases.
        by_inputs: for the gradient by the layer's inputs.
    """

    kind: str
    is_of_macs: bool
    forward: int
    by_weights: int
    by_inputs: int


class LeastTimeEntry(TypedDict):
    """The least time that some samples can take.

    Attributes:
        num_samples: over all epochs.
        flop: forward and backward.
    """

    num_samples: int
    flop: int
    least_s: float


class WorkDocument(Document):
    """Work of training a network.

    Attributes:
        title: the workload and its settings.
        num_parameters: trained weights and biases.
        macs_forward: multiply-accumulates of a sample's forward pass.
        macs: the same, forward and backward.
        flop: 2 for each of these.
        peak_flop_per_s: what the hardware reaches at most.
        peak_source: where that comes from.
        iteration: one batch.
        training: None where the size of the training set is unknown.
    """

    kind: Literal["work"]
    workload: str
    title: str
    num_parameters: int
    layers: Sequence[LayerEntry]
    macs_forward: int
    macs: int
    flop: int
    peak_flop_per_s: float
    peak_source: str
    iteration: LeastTimeEntry
    epochs: int
    training: LeastTimeEntry | None


# ---- fit-batch


class LargestEntry(TypedDict):
    """Largest batch that fits at a point.

    Attributes:
        batch_size: per worker, the largest that was run and fits; None: there is none.
        peak_bytes: memory of a worker with it.
        too_large: the smallest batch per worker that was run and does not fit; None: none was too large.
        reason: why that does not fit.
        num_trials: batch sizes that were run.
        is_final: the search is over; else it was interrupted, or a trial failed.
        is_all_data: the training set allows no larger batch.
        failure: why a trial failed; empty: none did.
    """

    point: Values
    num_workers: int
    batch_size: int | None
    peak_bytes: float | None
    too_large: int | None
    reason: str
    num_trials: int
    is_final: bool
    is_all_data: bool
    failure: str


class FitBatchDocument(Document):
    """Largest batch per worker that fits into memory, at each point.

    Attributes:
        max_memory: the limit; None: all that a GPU has.
    """

    kind: Literal["fit-batch"]
    max_memory: str | None
    points: Sequence[LargestEntry]


AnyDocument: TypeAlias = (
    ListDocument
    | ShowDocument
    | ReportDocument
    | RecommendDocument
    | CompareDocument
    | AbDocument
    | FitDocument
    | PredictDocument
    | PlanDocument
    | DoctorDocument
    | WorkDocument
    | FitBatchDocument
)


def to_json(document: AnyDocument) -> str:
    """Return a document as JSON in ASCII, which any console shows."""
    text = json.dumps(_plain(document), indent=1, allow_nan=False)
    return text.replace("\x7f", r"\u007f")  # the one control character that `json` leaves as it is


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: NaN and infinity become null, enumerations their values, tuples arrays."""
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        spread = (each.items() if isinstance(each, Spread) else [(key, each)] for key, each in value.items())
        return {as_utf8(str(_plain(key))): _plain(each) for key, each in chain.from_iterable(spread)}
    if isinstance(value, (tuple, list)):
        return list(map(_plain, value))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return as_utf8(value) if isinstance(value, str) else value


def schema() -> dict[str, Any]:
    """Return the JSON Schema of all documents, with docstrings as descriptions."""
    # pydantic looks up the names of annotations among the local ones, too; these modules take long to import.
    from pydantic import TypeAdapter

    from raypar.analysis.comparison import Gate  # noqa: F401
    from raypar.analysis.effects import Effects, Importances  # noqa: F401
    from raypar.analysis.goodput import BatchGroup  # noqa: F401
    from raypar.analysis.laws import Scaling  # noqa: F401
    from raypar.analysis.recommend import Constraints, Decision  # noqa: F401
    from raypar.analysis.scaling import Measurement  # noqa: F401
    from raypar.analysis.stats import Estimate  # noqa: F401
    from raypar.analysis.time_to_target import Target  # noqa: F401
    from raypar.predict.network import Algorithm, Network, Topology  # noqa: F401
    from raypar.predict.predict import JobSpec  # noqa: F401
    from raypar.predict.step_model import Limit, StepTime  # noqa: F401

    adapter: TypeAdapter[Any] = TypeAdapter(AnyDocument)
    made = adapter.json_schema(mode="serialization")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "raypar --json",
        "description": "What raypar prints with --json; docs/json.md has examples.",
        "oneOf": made["anyOf"],
        "$defs": {name: _described(name, _tidy(made["$defs"][name])) for name in sorted(made["$defs"])},
    }


def _tidy(node: Any) -> Any:
    """Return a part of pydantic's schema without titles and defaults; each number may be null, as NaN is."""
    if isinstance(node, list):
        return list(map(_tidy, node))
    if not isinstance(node, dict):
        return node
    tidied = {
        key: _tidy(value)
        for key, value in node.items()
        if key != "default" and not (key == "title" and isinstance(value, str))
    }
    if tidied.get("type") == "number":
        tidied["type"] = ["number", "null"]
    if choices := tidied.get("anyOf"):
        simple = [choice["type"] for choice in choices if choice.keys() == {"type"}]
        types = dict.fromkeys(name for each in simple for name in ([each] if isinstance(each, str) else each))
        others = [choice for choice in choices if choice.keys() != {"type"}]
        merged = [{"type": list(types)}] * bool(types) + others
        tidied = {**tidied, "anyOf": merged} if len(merged) > 1 else merged[0]
    return tidied


def _described(name: str, definition: dict[str, Any]) -> dict[str, Any]:
    """Return a definition with its docstring taken apart: the text, and the description of each property."""
    text, attributes = _docstring(definition.get("description", ""))
    attributes = {"schema": "version of the format.", "kind": "the verb."} | attributes
    spread, keys = SPREAD.get(name, ("", dict))
    properties: dict[str, Any] = {}
    for key, value in definition.get("properties", {}).items():
        if key != spread:
            properties[key] = {**value, "description": attributes[key]} if key in attributes else value
            continue
        for each, about in keys().items():
            of_each = value["additionalProperties"]
            properties[each] = {**of_each, "description": _in_json(about)} if about else of_each
    described = {**definition, **({"description": text} if text else {})}
    return {**described, "properties": properties, "required": list(properties)} if properties else described


def _in_json(text: str) -> str:
    """Return a text in words of JSON."""
    for python, of_json in {"None": "null", "True": "true", "False": "false"}.items():
        text = re.sub(rf"\b{python}\b", of_json, text)
    return text.replace("``", "`")


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return what a docstring has before its attributes, and the text of each of these."""
    head, _, listed = _in_json(text).partition("Attributes:\n")
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", listed, re.MULTILINE)
    return " ".join(head.split()), {key: " ".join(about.split()) for key, about in entries}


if __name__ == "__main__":
    print(json.dumps(schema(), indent=1))
