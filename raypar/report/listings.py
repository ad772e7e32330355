"""Listings: plans, studies, workloads and the work of a network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from raypar import units
from raypar.study.options import OPTIONS, known_options
from raypar.study.study import Study
from raypar.study.trial import Placement, TrialResult, TrialSpec, TrialState, point_label
from raypar.study.workload import Workload

if TYPE_CHECKING:
    from raypar.train.flops import LayerWork, Work


def print_plan(
    console: Console,
    study: Study,
    missing: Sequence[TrialSpec],
    *,
    num_trials: int,
    num_missing: int,
    placements: Iterable[Placement],
    num_cpus: float,
    estimated_s: float | None,
    isolation: str,
) -> None:
    """What a study would do: points, trials, gangs, order, resources, time."""
    if study.description:
        console.print(Text(study.description, style="italic"))
    what = [f"workload {study.workload.name}"]
    if study.is_search:
        what.append(f"a search of {units.counted(num_trials, 'trial')}")
    else:
        points = units.counted(len(study.points()), "point")
        what.append(f"{points} × {units.counted(study.num_repeats, 'repeat')} = {units.counted(num_trials, 'trial')}")
    console.print(Text(f"{study.name}: " + ", ".join(what)), highlight=False)
    if study.baseline:
        console.print(Text(f"compared with: {point_label(study.baseline)}"), highlight=False)
    gangs = list(placements)
    if gangs:
        kind = "warm, kept between trials" if isolation == "warm" else "fresh for every trial"
        console.print(Text(f"gangs ({kind}): " + "; ".join(map(str, gangs))), highlight=False)
        most = max(gang.num_cpus for gang in gangs)
        console.print(Text(f"cores: {most:g} at a time of {num_cpus:g}"), highlight=False)
    if num_missing < num_trials:
        console.print(Text(f"done already: {num_trials - num_missing}; to run: {num_missing}"), highlight=False)
    told = f"about {units.seconds(estimated_s)}" if estimated_s is not None else "not known before the first trials"
    console.print(Text(f"time for what is to run: {told}"), highlight=False)
    if missing:
        table = Table("order", "block", "workers", *study.space, box=None, header_style="bold", pad_edge=False)
        for spec in missing:
            values = [units.value_of(spec.point[key]) for key in study.space]
            table.add_row(str(spec.order + 1), str(spec.repeat + 1), str(spec.placement.num_workers), *values)
        console.print(table)


def print_failures(console: Console, failures: Sequence[TrialResult], log_dir: Path) -> None:
    """Each failed trial with its last words and where its log is."""
    for result in failures:
        failure = result.failure
        assert failure is not None
        console.print(Text(f"failed: {result.spec.label}: {failure.message}", style="red"), highlight=False)
        if failure.traceback:
            last = [line for line in failure.traceback.strip().splitlines() if line.strip()][-3:]
            console.print(Text("\n".join(f"    {line}" for line in last)), highlight=False)
        if failure.log_path:
            console.print(Text(f"    log: {failure.log_path}"), highlight=False, soft_wrap=True)
    console.print(Text(f"all logs of this execution: {log_dir}"), highlight=False, soft_wrap=True)


def print_studies(console: Console, studies: Sequence[tuple[str, int, int, int, float]]) -> None:
    """One line per study: name, executions, finished and failed trials, when it was last used (Unix time)."""
    table = Table(
        "study", "executions", "finished", "failed", "last used", box=None, header_style="bold", pad_edge=False
    )
    for name, num_executions, num_finished, num_failed, last_used_at in studies:
        when = datetime.fromtimestamp(last_used_at).strftime("%Y-%m-%d %H:%M")
        table.add_row(name, str(num_executions), str(num_finished), str(num_failed), when)
    console.print(table)


def print_trials(console: Console, results: Sequence[TrialResult], metric: str) -> None:
    """One line per trial of a study, with the metric that it looks at."""
    keys = list(dict.fromkeys(key for result in results for key in result.spec.point))
    table = Table(*keys, "#", "state", "train time", "wall", metric, box=None, header_style="bold", pad_edge=False)
    for result in sorted(results, key=lambda r: (r.spec.repeat, r.spec.order)):
        values = [units.value_of(result.spec.point.get(key)) for key in keys]
        state = result.state.value if result.state is not TrialState.FAILED else f"failed: {_reason(result)}"
        score = result.final.get(metric)
        table.add_row(
            *values,
            str(result.spec.repeat + 1),
            state,
            units.seconds(result.train_time_s),
            units.seconds(result.wall_s),
            units.score(metric, score) if score is not None else units.MISSING,
        )
    console.print(table)


def _reason(result: TrialResult) -> str:
    return result.failure.message.splitlines()[0][:60] if result.failure else ""


def print_workloads(console: Console, workloads: Iterable[Workload]) -> None:
    """One row each: name, data set with its size, metric, what it is."""
    table = Table("workload", "data set", "metric", "what", box=None, header_style="bold", pad_edge=False)
    for workload in workloads:
        table.add_row(workload.name, workload.dataset, workload.metric, workload.description)
    console.print(table)


def print_workload(console: Console, workload: Workload) -> None:
    """One workload with its own options and what raypar's are for it."""
    for text in (f"{workload.name}: {workload.description}", f"data set: {workload.dataset}"):
        console.print(Text(text), highlight=False)
    goal = "the larger the better" if workload.mode == "max" else "the smaller the better"
    console.print(Text(f"metric: {workload.metric}, {goal}"), highlight=False)
    table = Table("option", "default", "what", box=None, header_style="bold", pad_edge=False)
    known = known_options(workload)
    for key in (*workload.options, *(key for key in OPTIONS if key not in workload.options)):
        option = known[key]
        table.add_row(key, units.MISSING if option.default is None else units.value_of(option.default), option.doc)
    console.print(table)


_LARGE = ((1e18, "E"), (1e15, "P"), (1e12, "T"))


@dataclass(frozen=True)
class WorkAssumptions:
    """What training is reckoned with.

    Attributes:
        num_samples: of the training set; None: unknown.
        peak_flops: FLOP/s that the hardware reaches at most.
        peak_source: where that is from, for people.
    """

    batch_size: int
    epochs: int
    num_samples: int | None
    peak_flops: float
    peak_source: str


def print_work(console: Console, title: str, work: Work, assumed: WorkAssumptions) -> None:
    """Weights, work by type of layer, and the least time of an iteration and of the training."""

    def line(text: str) -> None:
        console.print(Text(text), highlight=False, soft_wrap=True)

    line(f"{title}: {units.count(work.num_parameters)} weights")
    of_macs = [layer for layer in work.layers if layer.is_of_macs]
    others = [layer for layer in work.layers if not layer.is_of_macs]
    line("\nof one sample, multiply-accumulates:")
    console.print(_table(of_macs))
    if others:
        line("\nof one sample, operations of layers without multiply-accumulates:")
        console.print(_table(others))
    times = units.number(work.macs / work.macs_forward, 3) if work.macs_forward else units.MISSING
    line(
        f"\nforward and backward: {scaled(work.macs, 'MAC')} = {scaled(work.flop, 'FLOP')} a sample, "
        f"{times} times the forward pass"
    )
    line(f"peak: {scaled(assumed.peak_flops, 'FLOP/s')} ({assumed.peak_source})")
    _print_time(
        line, f"an iteration of {units.counted(assumed.batch_size, 'sample')}", work, assumed, assumed.batch_size
    )
    if assumed.num_samples is None:
        line("training: the size of the training set is not known; give it with --samples N")
        return
    what = f"training, {units.counted(assumed.epochs, 'epoch')} of {units.counted(assumed.num_samples, 'sample')}"
    _print_time(line, what, work, assumed, assumed.epochs * assumed.num_samples)


def scaled(value: float, unit: str) -> str:
    """Three significant digits with a prefix: ``4.09 GMAC``, ``112 TFLOP/s``."""
    for factor, prefix in _LARGE:
        if value >= factor * 0.9995:
            return f"{units.number(value / factor, 3)} {prefix}{unit}"
    text = units.compact(value)
    return f"{text[:-1]} {text[-1]}{unit}" if text[-1].isalpha() else f"{text} {unit}"


def _print_time(line: Callable[[str], None], what: str, work: Work, assumed: WorkAssumptions, num_samples: int) -> None:
    flop = scaled(work.flop * num_samples, "FLOP")
    line(f"{what}: {flop}, at least {units.seconds(work.min_time_s(num_samples, assumed.peak_flops))}")


def _table(layers: list[LayerWork]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("layers")
    for name in ("forward", "by weights", "by inputs"):
        table.add_column(name, justify="right")
    rows = {layer.kind: [layer.forward, layer.by_weights, layer.by_inputs] for layer in layers}
    rows["total"] = [sum(counts[i] for counts in rows.values()) for i in range(3)]
    for kind, counts in rows.items():
        table.add_row(kind, *(units.compact(count) if count >= 1000 else str(count) for count in counts))
    return table
