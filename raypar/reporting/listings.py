"""Listings: plans, studies, trials, workloads, checks of the machine, the work of a network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from raypar import units
from raypar.errors import cut
from raypar.predict.memory import PointMemory
from raypar.reporting.documents import Document
from raypar.reporting.memory import fit_lines
from raypar.reporting.text import Column, print_line, print_table, value_column
from raypar.study.blocks import repeats_text
from raypar.study.metric import Metric
from raypar.study.options import known_options
from raypar.study.quantity import TRAIN_TIME, WALL_TIME, View, of_view
from raypar.study.study import Study
from raypar.study.trial import COUNTERS, FailureKind, Placement, TrialResult, TrialSpec, point_label
from raypar.study.workload import AnyWorkload

if TYPE_CHECKING:
    from raypar.track.store import StudySummary
    from raypar.train.flops import LayerWork, Work


MAX_LABELS = 4  # trials named in a line
MAX_REASON_CHARS = 80


@dataclass(frozen=True)
class PlanView(Document):
    """Trials of a study that are done, and those still to run.

    Attributes:
        missing: trials to run; empty for a search, whose points are drawn.
        num_trials: number of all trials, as far as decided.
        gangs: shapes of the gangs.
        num_all_cores: cores of all machines.
        isolation: warm: a gang serves many trials; fresh: each trial has a new gang.
        estimated_s: time of the trials to run; None before the first trials.
        num_timed_trials: number of stored trials behind the estimate.
        timed_study: study of these trials; empty: this study.
        gpu_bytes: memory of a GPU; None: not given.
        memory: predicted memory of each point on such a GPU; empty without `gpu_bytes`.
    """

    kind = "plan"
    shown = (
        "study=study.name description=study.description workload=study.workload.name swept baseline=study.baseline "
        "metric=study.judged_by.name mode=study.judged_by.mode metric_unit=study.judged_by.unit "
        "is_search=study.is_search num_points num_trials max_trials num_done num_to_run isolation gangs num_cores "
        "num_all_cores estimated_s num_timed_trials timed_study gpu_bytes memory trials=missing"
    )
    study: Study
    missing: Sequence[TrialSpec]
    num_trials: int
    num_to_run: int
    gangs: Sequence[Placement]
    num_all_cores: float
    isolation: str
    estimated_s: float | None = None
    num_timed_trials: int = 0
    timed_study: str = ""
    gpu_bytes: float | None = None
    memory: Sequence[PointMemory] = ()

    @property
    def swept(self) -> Sequence[str]:
        return list(self.study.space)

    @cached_property
    def num_points(self) -> int:
        return len(self.study.points())

    @property
    def max_trials(self) -> int:
        """The most trials that ``--until settled`` may run; else `num_trials`."""
        return max(self.num_points * self.study.max_repeats, self.num_trials) if self.study.until else self.num_trials

    @property
    def num_done(self) -> int:
        return self.num_trials - self.num_to_run

    @property
    def num_cores(self) -> int | None:
        """Cores that trials take at a time."""
        return max((gang.num_cpus for gang in self.gangs), default=None)


def _drawn(study: Study) -> str:
    """Return how a search draws its points, and when its trials end."""
    parts = [f"by {type(study.searcher).__name__}" if study.searcher is not None else "at random"]
    if study.scheduler is not None:
        parts.append(f"{type(study.scheduler).__name__} stops trials early")
    if study.target is not None:
        parts.append(f"trials end at {study.judged_by.name} {study.target:g}")
    return ", ".join(parts)


def print_plan(console: Console, plan: PlanView) -> None:
    """Print a study's plan."""
    from raypar.analysis.question import asked_by

    study = plan.study
    if asked := study.description or asked_by(study):
        console.print(Text(asked, style="italic"))
    what = [f"workload {study.workload.name}"]
    if study.is_search:
        what.append(f"a search of {units.counted(plan.num_trials, 'trial')}")
    else:
        points, trials = units.counted(plan.num_points, "point"), units.counted(plan.num_trials, "trial")
        if study.until:
            trials = f"{plan.num_trials} to {units.counted(plan.max_trials, 'trial')}"
        what.append(f"{points} × {repeats_text(study)} = {trials}")
    print_line(console, f"{study.name}: " + ", ".join(what))
    if study.baseline:
        print_line(console, f"compared with: {point_label(study.baseline)}")
    print_line(console, f"judged by: {study.judged_by.text}")
    if study.is_search:
        print_line(console, f"points: {_drawn(study)}")
    if plan.gangs:
        kind = "warm, kept between trials" if plan.isolation == "warm" else "fresh for every trial"
        print_line(console, f"gangs ({kind}): " + "; ".join(map(str, plan.gangs)))
        print_line(console, f"cores: {plan.num_cores:g} of {plan.num_all_cores:g} at a time")
    if plan.num_done > 0:
        print_line(console, f"done already: {plan.num_done}; to run: {plan.num_to_run}")
    estimate = "unknown before the first trials"
    if plan.estimated_s is not None:
        of = f" of `{plan.timed_study}`" if plan.timed_study else ""
        num_timed = units.counted(plan.num_timed_trials, "stored trial")
        estimate = f"about {units.rough_seconds(plan.estimated_s)} (from {num_timed}{of})"
    if plan.num_to_run:
        print_line(console, f"estimated time: {estimate}")
    if plan.gpu_bytes is not None:
        for text in fit_lines(plan.memory, plan.gpu_bytes):
            print_line(console, text)
    if plan.missing:
        columns = [
            value_column("order", [spec.order + 1 for spec in plan.missing]),
            value_column("block", [spec.repeat + 1 for spec in plan.missing]),
            value_column("workers", [spec.placement.num_workers for spec in plan.missing]),
            *(value_column(key, [spec.point[key] for spec in plan.missing]) for key in study.space),
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
        print_line(console, f"not run, because their points had failed: {units.listed(skipped, MAX_LABELS)}")
    if any(r.failure is not None and Path(r.failure.log_path).is_relative_to(log_dir) for r in failures):
        print_line(console, f"all logs of this execution: {log_dir}")


@dataclass(frozen=True)
class StudiesView(Document):
    """Studies in the store, the last used one first."""

    kind = "list"
    studies: Sequence[StudySummary]


def print_studies(console: Console, studies: Sequence[StudySummary]) -> None:
    """Print one line per study: its name, executions, trials by state, and when it was last used."""
    counts = {"executions": [s.num_executions for s in studies]}
    for key, state in COUNTERS.items():
        of_each = [s.counts[key] for s in studies]
        if any(of_each) or not state.traits.is_rare:
            counts[state.said_of(2).replace("do not", "don't")] = of_each
    used = [datetime.fromtimestamp(s.last_used_at).strftime("%Y-%m-%d %H:%M") for s in studies]
    numbers = [value_column(name, values) for name, values in counts.items()]
    print_table(console, [Column("study", [s.name for s in studies]), *numbers, Column("last used", used)])


@dataclass(frozen=True)
class TrialsView(Document):
    """Trials of a study, block by block in the order in which they ran.

    Attributes:
        metric: the study's metric.
        scope: the executions that ``--since`` selects; empty: all.
    """

    kind = "show"
    shown = "study scope metric=metric.name trials"
    study: str
    trials: Sequence[TrialResult]
    metric: Metric
    scope: str = ""

    @classmethod
    def of(cls, study: str, results: Iterable[TrialResult], metric: Metric, scope: str = "") -> TrialsView:
        """Return the view of a study's trials, which come in any order."""
        return cls(study, sorted(results, key=lambda r: (r.spec.repeat, r.spec.order)), metric, scope)


def print_trials(console: Console, view: TrialsView) -> None:
    """Print one line per trial of a study, with the study's metric."""
    trials, metric, always = view.trials, view.metric, (TRAIN_TIME, WALL_TIME)
    keys = list(dict.fromkeys(key for result in trials for key in result.spec.point))
    measured = {q: [q.text(q.of(r)) for r in trials] for q in of_view(View.TRIALS)}
    columns = [
        *(value_column(key, [r.spec.point.get(key) for r in trials]) for key in keys),
        Column("#", [str(r.spec.repeat + 1) for r in trials], True),
        Column("state", list(map(_state, trials)), is_prose=True),
        *(Column(q.head, cells, True) for q, cells in measured.items() if q in always or set(cells) != {units.MISSING}),
        Column(metric.name, [metric.show(r.final.get(metric.name)) for r in trials], True),
    ]
    print_table(console, columns)


def _state(result: TrialResult) -> str:
    if result.failure is not None and result.failure.kind is FailureKind.SKIPPED:
        return result.reason[:MAX_REASON_CHARS]  # the reason why it did not run
    return f"{result.state}: {result.reason[:MAX_REASON_CHARS]}" if result.reason else result.state.value


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
class CheckResult:
    """Result of a check of the machine.

    Attributes:
        fix: what to do if the check failed.
    """

    name: str
    detail: str
    is_ok: bool = True
    fix: str = ""

    @property
    def advice(self) -> str:
        """Fix of a check that failed."""
        return "" if self.is_ok else self.fix


@dataclass(frozen=True)
class DoctorView(Document):
    """Checks of the machine."""

    kind = "doctor"
    shown = "is_ok checks"
    checks: Sequence[CheckResult]

    @property
    def is_ok(self) -> bool:
        """True if all checks passed."""
        return all(check.is_ok for check in self.checks)


@dataclass(frozen=True)
class LeastTime:
    """Minimum time of some samples.

    Attributes:
        num_samples: number of samples, over all epochs.
        flop: FLOP of the forward and backward passes.
    """

    num_samples: int
    flop: int
    least_s: float


@dataclass(frozen=True)
class WorkView(Document):
    """Work of training a network, and its minimum time.

    Attributes:
        title: the workload and its settings.
        num_samples: size of the training set; None: unknown.
        peak_flop_per_s: peak of the hardware.
        peak_source: source of the peak.
    """

    kind = "work"
    shown = (
        "workload title num_parameters=work.num_parameters layers=work.layers macs_forward=work.macs_forward "
        "macs=work.macs flop=work.flop peak_flop_per_s peak_source iteration epochs training"
    )
    workload: str
    title: str
    work: Work
    batch_size: int
    epochs: int
    num_samples: int | None
    peak_flop_per_s: float
    peak_source: str

    @property
    def iteration(self) -> LeastTime:
        """One batch."""
        return self._least(self.batch_size)

    @property
    def training(self) -> LeastTime | None:
        """All epochs; None if the size of the training set is unknown."""
        return None if self.num_samples is None else self._least(self.epochs * self.num_samples)

    def _least(self, num_samples: int) -> LeastTime:
        flop = self.work.flop * num_samples
        return LeastTime(num_samples, flop, flop / self.peak_flop_per_s)


def print_work(console: Console, view: WorkView) -> None:
    """Print weights, work by type of layer, and the minimum time of an iteration and of the training."""
    line, work = partial(print_line, console), view.work
    size = " × ".join(map(str, work.input_shape)) or "1"
    line(f"{view.title}: {units.count(work.num_parameters)} weights; input of one sample: {size}")
    what = {True: "multiply-accumulates", False: "operations in layers without multiply-accumulates"}
    for is_of_macs, counted in what.items():
        layers = [layer for layer in work.layers if layer.is_of_macs is is_of_macs]
        if layers or is_of_macs:
            line(f"\n{counted}, per sample:")
            print_table(console, _layer_columns(layers))
    times = units.number(work.macs / work.macs_forward, 3) if work.macs_forward else units.MISSING
    line(
        f"\nforward and backward: {scaled(work.macs, 'MAC')} = {scaled(work.flop, 'FLOP')} per sample, "
        f"{times} times the forward pass"
    )
    line(f"peak: {scaled(view.peak_flop_per_s, 'FLOP/s')} ({view.peak_source})")
    least = {f"an iteration of {units.counted(view.batch_size, 'sample')}": view.iteration}
    if view.training is not None:
        of_samples = f"{units.counted(view.epochs, 'epoch')} of {units.counted(view.num_samples or 0, 'sample')}"
        least[f"training, {of_samples}"] = view.training
    for whole, each in least.items():
        line(f"{whole}: {scaled(each.flop, 'FLOP')}, at least {units.seconds(each.least_s)}")
    if view.training is None:
        line("training: the size of the training set is unknown; give it with --samples N")


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
