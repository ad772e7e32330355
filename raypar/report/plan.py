"""How a plan and a list of studies are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from raypar import units
from raypar.study.study import Study
from raypar.study.trial import Placement, TrialResult, TrialSpec, TrialState, point_label


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
