"""Listings: plans, studies, workloads and the work of a network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from raypar import units
from raypar.errors import cut
from raypar.reporting.documents import Spread
from raypar.reporting.text import Column, print_line, print_table, value_column
from raypar.study.blocks import repeats_text
from raypar.study.metric import Metric
from raypar.study.options import known_options
from raypar.study.quantity import TRAIN_TIME, WALL_TIME, View, of_view
from raypar.study.study import Study
from raypar.study.trial import COUNTERS, FailureKind, Placement, TrialResult, TrialSpec, point_label, reason_of
from raypar.study.workload import AnyWorkload

if TYPE_CHECKING:
    from raypar.reporting.documents import LeastTimeEntry, PlanDocument, ShowDocument, StudyEntry, WorkDocument
    from raypar.train.flops import LayerWork, Work


MAX_LABELS = 4  # trials named in a line
MAX_REASON_CHARS = 80


def plan_document(
    study: Study,
    missing: Sequence[TrialSpec],
    *,
    num_trials: int,
    num_missing: int,
    placements: Iterable[Placement],
    num_cpus: float,
    isolation: str,
    estimated_s: float | None,
    num_timed: int = 0,
    timed_study: str = "",
) -> PlanDocument:
    """Return a study's plan: points, trials, gangs, order, resources, time.

    Args:
        estimated_s: for the missing trials, in seconds, from `num_timed` stored trials, of `timed_study` if it is
            another study.
    """
    gangs, num_points = list(placements), len(study.points())
    return {
        "schema": 1,
        "kind": "plan",
        "study": study.name,
        "description": study.description or None,
        "workload": study.workload.name,
        "swept": list(study.space),
        "baseline": study.baseline,
        "metric": study.judged_by.name,
        "mode": study.judged_by.mode,
        "metric_unit": study.judged_by.unit or None,
        "is_search": study.is_search,
        "num_points": num_points,
        "num_trials": num_trials,
        "max_trials": max(num_points * study.max_repeats, num_trials) if study.until else num_trials,
        "num_done": num_trials - num_missing,
        "num_to_run": num_missing,
        "isolation": isolation,
        "gangs": gangs,
        "num_cores": max((gang.num_cpus for gang in gangs), default=None),
        "num_all_cores": num_cpus,
        "estimated_s": estimated_s,
        "num_timed_trials": num_timed,
        "timed_study": timed_study or None,
        "trials": [
            {
                "identity": spec.identity,
                "point": spec.point,
                "num_workers": spec.placement.num_workers,
                "repeat": spec.repeat + 1,
                "order": spec.order + 1,
                "seed": spec.seed,
            }
            for spec in missing
        ],
    }


def print_plan(console: Console, study: Study, plan: PlanDocument) -> None:
    """Print a study's plan."""
    from raypar.analysis.question import asked_by

    if asked := study.description or asked_by(study):
        console.print(Text(asked, style="italic"))
    what, num_trials = [f"workload {study.workload.name}"], plan["num_trials"]
    if study.is_search:
        what.append(f"a search of {units.counted(num_trials, 'trial')}")
    else:
        points, trials = units.counted(plan["num_points"], "point"), units.counted(num_trials, "trial")
        if study.until:
            trials = f"{num_trials} to {units.counted(plan['max_trials'], 'trial')}"
        what.append(f"{points} × {repeats_text(study)} = {trials}")
    print_line(console, f"{study.name}: " + ", ".join(what))
    if study.baseline:
        print_line(console, f"compared with: {point_label(study.baseline)}")
    print_line(console, f"judged by: {study.judged_by.text}")
    if plan["gangs"]:
        kind = "warm, kept between trials" if plan["isolation"] == "warm" else "fresh for every trial"
        print_line(console, f"gangs ({kind}): " + "; ".join(map(str, plan["gangs"])))
        print_line(console, f"cores: {plan['num_cores']:g} at a time of {plan['num_all_cores']:g}")
    if plan["num_done"] > 0:
        print_line(console, f"done already: {plan['num_done']}; to run: {plan['num_to_run']}")
    estimated_s = plan["estimated_s"]
    estimate = "not known before the first trials"
    if estimated_s is not None:
        of = f" of `{plan['timed_study']}`" if plan["timed_study"] else ""
        num_timed = units.counted(plan["num_timed_trials"], "stored trial")
        estimate = f"about {units.rough_seconds(estimated_s)} (from {num_timed}{of})"
    if plan["num_to_run"]:
        print_line(console, f"time for what is to run: {estimate}")
    if trials_to_run := plan["trials"]:
        columns = [
            value_column("order", [trial["order"] for trial in trials_to_run]),
            value_column("block", [trial["repeat"] for trial in trials_to_run]),
            value_column("workers", [trial["num_workers"] for trial in trials_to_run]),
            *(value_column(key, [trial["point"][key] for trial in trials_to_run]) for key in study.space),
        ]
        print_table(console, columns)


def print_failures(console: Console, failures: Sequence[TrialResult], log_dir: Path) -> None:
    """Print each error once, with its trials, the end of its traceback and the log of its first trial."""
    alike: dict[str, list[TrialResult]] = {}
    skipped: list[str] = []
    for result in failures:
        assert result.failure is not None
        if result.failure.kind is FailureKind.SKIPPED:
            skipped.append(result.spec.label)
        else:
            alike.setdefault(result.failure.message, []).append(result)
    for message, results in alike.items():
        labels = units.listed((result.spec.label for result in results), MAX_LABELS)
        print_line(console, f"failed: {labels}: {message}", style="red")
        failure = results[0].failure
        assert failure is not None
        if failure.traceback:
            last = [line for line in failure.traceback.strip().splitlines() if line.strip()][-3:]
            print_line(console, "\n".join(f"    {cut(line)}" for line in last))
        if failure.log_path:
            print_line(console, f"    log: {failure.log_path}")
    if skipped:
        print_line(console, f"not run, as their points had failed: {units.listed(skipped, MAX_LABELS)}")
    if any(r.failure is not None and Path(r.failure.log_path).is_relative_to(log_dir) for r in failures):
        print_line(console, f"all logs of this execution: {log_dir}")


def print_studies(console: Console, studies: Sequence[StudyEntry]) -> None:
    """Print one line per study: its name, executions, trials by state, and when it was last used."""
    counts = {"executions": [s["num_executions"] for s in studies]}
    for key, state in COUNTERS.items():
        of_each = [s["counts"][key] for s in studies]
        if any(of_each) or not state.traits.is_rare:
            counts[state.said_of(2).replace("do not", "don't")] = of_each
    used = [datetime.fromtimestamp(s["last_used_at_s"]).strftime("%Y-%m-%d %H:%M") for s in studies]
    numbers = [value_column(name, values) for name, values in counts.items()]
    print_table(console, [Column("study", [s["name"] for s in studies]), *numbers, Column("last used", used)])


def print_trials(console: Console, results: Sequence[TrialResult], metric: Metric) -> None:
    """Print one line per trial of a study, with the study's metric."""
    keys = list(dict.fromkeys(key for result in results for key in result.spec.point))
    trials, always = _in_order(results), (TRAIN_TIME, WALL_TIME)
    measured = {q: [q.text(q.of(r)) for r in trials] for q in of_view(View.TRIALS)}
    columns = [
        *(value_column(key, [r.spec.point.get(key) for r in trials]) for key in keys),
        Column("#", [str(r.spec.repeat + 1) for r in trials], True),
        Column("state", list(map(_state, trials)), is_prose=True),
        *(Column(q.head, cells, True) for q, cells in measured.items() if q in always or set(cells) != {units.MISSING}),
        Column(metric.name, [metric.show(r.final.get(metric.name)) for r in trials], True),
    ]
    print_table(console, columns)


def show_document(study: str, results: Sequence[TrialResult], metric: str, scope: str = "") -> ShowDocument:
    """Return the content of `print_trials` as a document."""
    return {
        "schema": 1,
        "kind": "show",
        "study": study,
        "scope": scope or None,
        "metric": metric,
        "trials": [
            {
                "identity": r.spec.identity,
                "point": r.spec.point,
                "repeat": r.spec.repeat + 1,
                "order": r.spec.order + 1,
                "seed": r.spec.seed,
                "state": r.state,
                "reason": reason_of(r) or None,
                "failure_kind": r.failure.kind if r.failure else None,
                "log_path": (r.failure.log_path or None) if r.failure else None,
                "attempts": r.attempts,
                "started_at_s": r.started_at,
                "quantities": Spread({q.key: q.of(r) for q in of_view(View.RECORD)}),
                "metric": r.final.get(metric),
                "final": r.final,
            }
            for r in _in_order(results)
        ],
    }


def _in_order(results: Iterable[TrialResult]) -> list[TrialResult]:
    """Return the trials block by block, in the order in which they ran."""
    return sorted(results, key=lambda r: (r.spec.repeat, r.spec.order))


def _state(result: TrialResult) -> str:
    if result.failure is not None and result.failure.kind is FailureKind.SKIPPED:
        return reason_of(result)[:MAX_REASON_CHARS]  # the reason why it did not run
    return f"{result.state}: {reason_of(result)[:MAX_REASON_CHARS]}" if reason_of(result) else result.state.value


def print_workloads(console: Console, workloads: Iterable[AnyWorkload]) -> None:
    """Print one row per workload: name, data set with its size, metric, description."""
    every = list(workloads)
    columns = [
        Column("workload", [each.name for each in every]),
        Column("data set", [each.dataset for each in every], is_prose=True),
        Column("metric", [each.metric_of().name for each in every]),
        Column("what", [each.description for each in every], is_prose=True),
    ]
    print_table(console, columns)


def print_workload(console: Console, workload: AnyWorkload) -> None:
    """Print a workload with its own and raypar's options, and their defaults for it."""
    for text in (f"{workload.name}: {workload.description}", f"data set: {workload.dataset}"):
        print_line(console, text)
    print_line(console, f"metric: {workload.metric_of().text}")
    options_by_key = known_options(workload)
    keys = [*workload.options, *(key for key in options_by_key if key not in workload.options)]
    options = [options_by_key[key] for key in keys]
    defaults = [units.MISSING if each.default is None else units.value_of(each.default) for each in options]
    docs = Column("what", [each.doc for each in options], is_prose=True)
    print_table(console, [Column("option", keys), Column("default", defaults), docs])


@dataclass(frozen=True)
class WorkAssumptions:
    """Assumptions about a training whose work is estimated."""

    batch_size: int
    epochs: int
    num_samples: int | None  # size of the training set; None: unknown
    peak_flops: float  # peak of the hardware in FLOP/s
    peak_source: str  # source of the peak, for readers


def print_work(console: Console, title: str, work: Work, assumed: WorkAssumptions) -> None:
    """Print weights, work by type of layer, and the minimum time of an iteration and of the training."""
    line = partial(print_line, console)
    size = " × ".join(map(str, work.input_shape)) or "1"
    line(f"{title}: {units.count(work.num_parameters)} weights; input of one sample: {size}")
    what = {True: "multiply-accumulates", False: "operations of layers without multiply-accumulates"}
    for is_of_macs, counted in what.items():
        layers = [layer for layer in work.layers if layer.is_of_macs is is_of_macs]
        if layers or is_of_macs:
            line(f"\nof one sample, {counted}:")
            print_table(console, _layer_columns(layers))
    times = units.number(work.macs / work.macs_forward, 3) if work.macs_forward else units.MISSING
    line(
        f"\nforward and backward: {scaled(work.macs, 'MAC')} = {scaled(work.flop, 'FLOP')} a sample, "
        f"{times} times the forward pass"
    )
    line(f"peak: {scaled(assumed.peak_flops, 'FLOP/s')} ({assumed.peak_source})")
    iteration = f"an iteration of {units.counted(assumed.batch_size, 'sample')}"
    num_samples_of = {iteration: assumed.batch_size}
    if assumed.num_samples is not None:
        epochs = units.counted(assumed.epochs, "epoch")
        training = f"training, {epochs} of {units.counted(assumed.num_samples, 'sample')}"
        num_samples_of[training] = assumed.epochs * assumed.num_samples
    for what_for, num_samples in num_samples_of.items():
        least = units.seconds(work.flop * num_samples / assumed.peak_flops)
        line(f"{what_for}: {scaled(work.flop * num_samples, 'FLOP')}, at least {least}")
    if assumed.num_samples is None:
        line("training: the size of the training set is not known; give it with --samples N")


def work_document(workload: str, title: str, work: Work, assumed: WorkAssumptions) -> WorkDocument:
    """Return the content of `print_work` as a document."""

    def least(num_samples: int) -> LeastTimeEntry:
        flop = work.flop * num_samples
        return {"num_samples": num_samples, "flop": flop, "least_s": flop / assumed.peak_flops}

    return {
        "schema": 1,
        "kind": "work",
        "workload": workload,
        "title": title,
        "num_parameters": work.num_parameters,
        "layers": [
            {
                "kind": layer.kind,
                "is_of_macs": layer.is_of_macs,
                "forward": layer.forward,
                "by_weights": layer.by_weights,
                "by_inputs": layer.by_inputs,
            }
            for layer in work.layers
        ],
        "macs_forward": work.macs_forward,
        "macs": work.macs,
        "flop": work.flop,
        "peak_flop_per_s": assumed.peak_flops,
        "peak_source": assumed.peak_source,
        "iteration": least(assumed.batch_size),
        "epochs": assumed.epochs,
        "training": None if assumed.num_samples is None else least(assumed.epochs * assumed.num_samples),
    }


def scaled(value: float, unit: str) -> str:
    """Return three significant digits with an SI prefix: ``4.09 GMAC``, ``112 TFLOP/s``."""
    for factor, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T")):
        if value >= factor * 0.9995:
            return f"{units.number(value / factor, 3)} {prefix}{unit}"
    text = units.compact(value)
    return f"{text[:-1]} {text[-1]}{unit}" if text[-1].isalpha() else f"{text} {unit}"


def _layer_columns(layers: Sequence[LayerWork]) -> list[Column]:
    counts = {
        "forward": [layer.forward for layer in layers],
        "by weights": [layer.by_weights for layer in layers],
        "by inputs": [layer.by_inputs for layer in layers],
    }
    numbers = [
        Column(head, [units.compact(count) if count >= 1000 else str(count) for count in (*each, sum(each))], True)
        for head, each in counts.items()
    ]
    return [Column("layers", [*(layer.kind for layer in layers), "total"]), *numbers]
