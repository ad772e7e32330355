"""Scaling of a study or of a CSV file: numbers by worker count, and the laws fitted to them.

Speedup S(N) is the rate of N workers over that of N0, the baseline; parallel efficiency is S(N) · N0 / N. In strong
scaling every worker count does the same work, so that rates are 1 / time; in weak scaling N workers do N times the
work of one, so that rates are N / time. A throughput is a rate as it stands.

A study's rates are samples per second of the timed region, or trainings per second where raypar can't look into the
training. They need no factor, for an epoch is the same number of samples whatever the worker count: in weak scaling
(``per_worker_batch_size`` fixed) it has fewer steps. Twice the samples per second on two workers are a speedup of 2
either way; only the law differs that is fitted to it. A study's speedups are those of `raypar.analysis.points`, with
the same simultaneous intervals.

The laws' intervals are percentiles of a bootstrap over the repeats of each worker count (Efron 1979), drawn on their
own: what disturbed a whole block makes the intervals wider, never narrower. Simulated with 3 % noise and six worker
counts, intervals hold the truth in about 95 % of cases from three repeats on, with two in about 80 %.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path

import numpy as np

from raypar import units
from raypar.analysis.laws import LAWS, Fit, Law, Refused, Scaling, better_law, fit_law
from raypar.analysis.pairwise import Family, family_of
from raypar.analysis.question import PointKey, PointSamples, Question, point_key
from raypar.analysis.stats import Estimate, Floats, median_estimate, ratio_estimate, reference, spread_medians
from raypar.errors import Mistake, RayparError
from raypar.study.space import Value
from raypar.study.trial import point_label


class Quantity(StrEnum):
    """Measured quantity of a table."""

    TIME = "time"  # seconds
    THROUGHPUT = "throughput"  # work per second, in whatever unit


@dataclass(frozen=True)
class Runs:
    """Measurements by worker count: one value greater than 0 for each repeat, at least one."""

    values: Mapping[int, tuple[float, ...]]
    quantity: Quantity = Quantity.TIME


NUM_RESAMPLES = 1000
BOOTSTRAP_SEED = 19670418


@dataclass(frozen=True)
class ScalingPoint:
    """Numbers of one worker count; its speedup is over `baseline` workers."""

    num_workers: int
    baseline: int
    measured: Estimate
    speedup: Estimate

    @property
    def efficiency(self) -> Estimate:
        return self.speedup.scaled(self.baseline / self.num_workers)

    @property
    def karp_flatt(self) -> Estimate | None:
        """Serial fraction with the interval that the speedup's gives; None for the baseline, which shows none."""
        if self.num_workers == self.baseline:
            return None
        ratio, num_workers = self.speedup, self.num_workers / self.baseline
        # The fraction falls as the speedup grows.
        bounds = sorted(karp_flatt(s, num_workers) for s in (ratio.low, ratio.high) if s is not None)
        low, high = bounds or (None, None)
        return replace(ratio, value=karp_flatt(ratio.value, num_workers), low=low, high=high)


@dataclass(frozen=True)
class ScalingAnalysis:
    """Scaling of some runs.

    Attributes:
        baseline: the worker count that speedups are over.
        points: one for each worker count, from the smallest.
        laws: those of this way to scale, fitted or refused.
        better: the law that predicts left-out points better; None where neither does significantly.
        why_no_better: the reason where it is None.
        why_no_interval: why the laws' parameters have no intervals; empty where they have them.
    """

    scaling: Scaling
    quantity: Quantity
    baseline: int
    points: tuple[ScalingPoint, ...]
    laws: tuple[Fit | Refused, ...]
    better: Law | None
    why_no_better: str
    why_no_interval: str


def analyse_scaling(
    runs: Runs,
    scaling: Scaling = Scaling.STRONG,
    baseline: int | None = None,
    *,
    speedups: Mapping[int, Estimate] | None = None,
    num_resamples: int = NUM_RESAMPLES,
) -> ScalingAnalysis:
    """Estimate speedups, and fit the laws of this way to scale. The same runs give the same numbers.

    Args:
        runs: of one worker count at least.
        scaling: what grows with the workers.
        baseline: the worker count to compare with; None: the smallest.
        speedups: over the baseline, of every worker count, where more is known of them than `runs` say (which repeats
            belong together); None: from the repeats as independent samples.
        num_resamples: how often the repeats are drawn for an interval.

    Raises:
        RayparError: there are no runs of the baseline.
    """
    counts = sorted(runs.values)
    base = counts[0] if baseline is None else baseline
    if base not in runs.values:
        hint = f"worker counts that have runs: {', '.join(map(str, counts))}"
        raise RayparError(f"no run with {base} workers to compare with", hint=hint)
    single = [n for n in counts if len(runs.values[n]) < 2]
    logs = {n: _log_rates(runs, scaling, n) for n in counts}
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    # A row for each draw, a column for each worker count.
    draws = None if single else np.stack([spread_medians(logs[n], num_resamples, rng) for n in counts], axis=1)
    laws = tuple(fit_law(law, logs, base, draws) for law in LAWS[scaling])
    better, why = better_law(laws)
    return ScalingAnalysis(
        scaling=scaling,
        quantity=runs.quantity,
        baseline=base,
        points=_points(runs, base, speedups or {n: _speedup(runs, scaling, n, base) for n in counts}),
        laws=laws,
        better=better,
        why_no_better=why,
        why_no_interval=f"{', '.join(map(str, single))} workers ran only once" if single else "",
    )


def karp_flatt(speedup: float, num_workers: float) -> float:
    """Return the serial fraction that a speedup shows, (1/S - 1/N) / (1 - 1/N), for N other than 1.

    After Karp and Flatt, "Measuring Parallel Processor Performance", CACM 33(5), 1990. Against a baseline of N0
    workers, N is N / N0 and the fraction one of the baseline's time. It is below 0 where the speedup exceeds N.
    """
    return (1 / speedup - 1 / num_workers) / (1 - 1 / num_workers)


def _speedup(runs: Runs, scaling: Scaling, num_workers: int, base: int) -> Estimate:
    values, base_values = runs.values[num_workers], runs.values[base]
    if num_workers == base:
        return reference(len(values))
    is_time = runs.quantity is Quantity.TIME
    tops, bottoms = (base_values, values) if is_time else (values, base_values)
    # Nothing says which repeats belong together.
    ratio = ratio_estimate(tops, bottoms, paired=False)
    return ratio.scaled(num_workers / base) if is_time and scaling is Scaling.WEAK else ratio


def _points(runs: Runs, base: int, speedups: Mapping[int, Estimate]) -> tuple[ScalingPoint, ...]:
    return tuple(ScalingPoint(n, base, median_estimate(runs.values[n]), speedups[n]) for n in sorted(runs.values))


def _log_rates(runs: Runs, scaling: Scaling, num_workers: int) -> Floats:
    logs = np.log(np.asarray(runs.values[num_workers], dtype=np.float64))
    if runs.quantity is Quantity.THROUGHPUT:
        return logs
    return (math.log(num_workers) if scaling is Scaling.WEAK else 0.0) - logs


# ---- groups of a study

SAMPLES_PER_S = "samples/s"
TRAININGS_PER_S = "trainings/s"  # whole trainings: of train loops, whose samples raypar can't count
# Fewer than for a file: a study has many groups. Bounds move by less than a tenth of an interval's width.
NUM_GROUP_RESAMPLES = 300


@dataclass(frozen=True)
class WorkerGroup:
    """Points that differ only in ``num_workers``, two or more with finished trials.

    Attributes:
        point: the other swept hyperparameters, which they share.
        scaling: weak where the config fixes ``per_worker_batch_size``.
        runs: the rates of the finished trials.
        unit: of the rates.
        baseline: the worker count that speedups are over: the study's, else the smallest that has finished trials.
        speedups: over the baseline, by worker count, from the smallest; 1 for the baseline itself.
        excluded: worker counts without a finished trial, and what became of theirs.
    """

    point: Mapping[str, Value]
    scaling: Scaling
    runs: Runs
    unit: str
    baseline: int
    speedups: Mapping[int, Estimate]
    excluded: Mapping[int, str]

    @property
    def label(self) -> str:
        """``batch_size=64``; empty where nothing else is swept."""
        return point_label(self.point) if self.point else ""

    @property
    def points(self) -> tuple[ScalingPoint, ...]:
        """Numbers of each worker count, from the smallest."""
        return _points(self.runs, self.baseline, self.speedups)

    @cached_property
    def analysis(self) -> ScalingAnalysis:
        """Result of `analyse`, made once."""
        return self.analyse()

    def analyse(self, num_resamples: int = NUM_GROUP_RESAMPLES) -> ScalingAnalysis:
        """Estimate its numbers and fit the laws, which takes about a millisecond for each resample."""
        return analyse_scaling(
            self.runs, self.scaling, self.baseline, speedups=self.speedups, num_resamples=num_resamples
        )


def worker_groups(
    question: Question, gathered: Sequence[PointSamples], baseline: int | None = None, family: Family | None = None
) -> tuple[WorkerGroup, ...]:
    """Return the groups of a study, in the order of their points.

    Args:
        question: what the study asks.
        gathered: the trials of each point.
        baseline: the worker count to compare with; None: the study's.
        family: of the study's comparisons, if it is known already.

    Raises:
        RayparError: a group has no finished trial with `baseline` workers.
    """
    by_rest: dict[PointKey, dict[int, PointSamples]] = {}
    for samples in gathered:
        if "num_workers" in samples.point and samples.num_workers is not None:
            by_rest.setdefault(point_key(samples.rest), {})[samples.num_workers] = samples
    family = family or family_of(question, gathered)
    groups = (_group(question, dict(sorted(by_count.items())), baseline, family) for by_count in by_rest.values())
    return tuple(filter(None, groups))


def _group(
    question: Question, by_count: Mapping[int, PointSamples], baseline: int | None, family: Family
) -> WorkerGroup | None:
    """Return the group of points; None for fewer than two worker counts with finished trials."""
    timed = {n: samples for n, samples in by_count.items() if samples.times}
    if len(timed) < 2:
        return None
    first = next(iter(timed.values()))
    asked = question.baseline.get("num_workers") if baseline is None else baseline
    base = asked if isinstance(asked, int) and asked in timed else min(timed)
    if baseline is not None and base != baseline:
        at = f" at {point_label(first.rest)}" if first.rest else ""
        raise RayparError(
            f"no finished trial with {baseline} workers{at} to compare with",
            hint=f"worker counts that have some: {', '.join(map(str, timed))}",
        )
    ratios = {n: reference(len(s.samples)) if n == base else family.speedup(timed[base], s) for n, s in timed.items()}
    speedups = {n: ratio for n, ratio in ratios.items() if ratio is not None}
    counts_samples = all(s.throughput is not None for p in timed.values() for s in p.samples.values())
    rates = {
        n: s.all_of("throughput") if counts_samples else [1 / time_s for time_s in s.times.values()]
        for n, s in timed.items()
    }
    return WorkerGroup(
        point=first.rest,
        scaling=Scaling.STRONG if first.config.get("per_worker_batch_size") is None else Scaling.WEAK,
        runs=Runs({n: tuple(rates[n]) for n in speedups}, Quantity.THROUGHPUT),
        unit=SAMPLES_PER_S if counts_samples else TRAININGS_PER_S,
        baseline=base,
        speedups=speedups,
        excluded={n: _why_no_time(samples) for n, samples in by_count.items() if n not in speedups},
    )


def _why_no_time(samples: PointSamples) -> str:
    return samples.outcome or ("finished without a time" if samples.results else "not run yet")


# ---- tables from elsewhere

WORKER_COLUMNS = ("workers", "num_workers")
TIME_COLUMNS = ("time", "time_s", "seconds")
RATE_COLUMNS = ("throughput",)
DELIMITERS = ",;\t"
MAX_WORKERS = 1_000_000
# Seconds, or work per second, beyond which a number can only be a slip; ratios of two stay far within a float.
MIN_VALUE, MAX_VALUE = 1e-15, 1e15
MAX_MISTAKES = 20  # reported one by one
# Of a table, whose laws are fitted within seconds.
MAX_BYTES, MAX_LINES, MAX_COUNTS = 5_000_000, 5_000, 200
TOO_LARGE = "keep some repeats of some worker counts: a few dozen lines fit a law as well"
EXAMPLE = "a table is, line by line: workers,time   1,100.5   2,52.1   4,28.7"


def read_table(path: Path) -> Runs:
    """Read the runs in a CSV file, in the order of its lines; cells are separated by commas, semicolons or tabs.

    The first line names the columns: one for the number of workers, one for the time or the throughput; others are
    ignored. Lines with the same worker count are repeats. Empty lines and those that start with ``#`` are skipped.

    Raises:
        RayparError: the file can't be read, or has mistakes, which it lists.
    """
    rows = _rows(path)
    if not rows:
        raise RayparError(f"{path}: the table is empty", hint=EXAMPLE)
    mistakes: list[Mistake] = []
    (head_line, head), *rows = rows
    names = [cell.lower() for cell in head]
    columns: list[int] = []
    for what, accepted in (
        ("how many workers", WORKER_COLUMNS),
        ("how long they took", (*TIME_COLUMNS, *RATE_COLUMNS)),
    ):
        matches = [i for i, name in enumerate(names) if name in accepted]
        columns += matches[:1]
        if len(matches) != 1:
            shown = ",".join(head[i] for i in matches or range(len(head)))
            problem = f"{len(matches)} columns say {what}" if matches else f"no column says {what}"
            hint = "keep one of them, or give the others another name"
            hint = hint if matches else f"name a column {' or '.join(accepted)}"
            mistakes.append(Mistake(f"line {head_line}, head", shown, problem, hint))
    if mistakes:
        raise _error(path, mistakes)
    values: dict[int, list[float]] = {}
    for line, cells in rows:
        if any(cells[len(head) :]):
            problem = f"has {len(cells)} cells, the head {len(head)}"
            hint = "write numbers with a point, such as 12.5, and name every column"
            mistakes.append(Mistake(f"line {line}", ",".join(cells), problem, hint))
            continue
        numbers = []
        for column, parse in zip(columns, (_workers, _value), strict=True):
            cell = cells[column] if column < len(cells) else ""
            try:
                numbers.append(parse(cell))
            except ValueError as error:  # its problem and hint
                mistakes.append(Mistake(f"line {line}, {head[column]}", cell, *error.args))
        if len(numbers) == len(columns):
            values.setdefault(int(numbers[0]), []).append(numbers[1])
    if mistakes:
        raise _error(path, mistakes)
    if not values:
        raise RayparError(f"{path}: the table has a head and no runs below it", hint=EXAMPLE)
    if len(values) > MAX_COUNTS:
        raise RayparError(f"{path}: the table has {len(values):,} worker counts, over {MAX_COUNTS}", hint=TOO_LARGE)
    quantity = Quantity.THROUGHPUT if names[columns[1]] in RATE_COLUMNS else Quantity.TIME
    return Runs({workers: tuple(repeats) for workers, repeats in values.items()}, quantity)


def _rows(path: Path) -> list[tuple[int, list[str]]]:
    """Return each line's number, from 1, and its cells."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES or content.count(b"\n") > MAX_LINES:
            limits = f"{MAX_LINES:,} lines or {MAX_BYTES // 10**6} MB"
            raise RayparError(f"{path}: the table is longer than {limits}", hint=TOO_LARGE)
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        raise RayparError(f"{path}: there is no such file", hint="name a CSV file") from None
    except OSError as error:
        raise RayparError(f"{path}: can't be read: {error.strerror}", hint="name a CSV file") from None
    except UnicodeDecodeError as error:
        message = f"{path}: is not text in UTF-8, at byte {error.start}"
        raise RayparError(message, hint="save the table as CSV in UTF-8") from None
    # Line by line: a quote that is never closed would swallow all that follows, line numbers included.
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip() and not line.startswith("#")]
    if not lines:
        return []
    delimiter = max(DELIMITERS, key=lines[0][1].count)
    try:
        rows = [(i, [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter))]) for i, line in lines]
    except csv.Error as error:
        raise RayparError(f"{path}: is no CSV file: {error}", hint=EXAMPLE) from None
    return [(i, cells) for i, cells in rows if any(cells)]


def _workers(cell: str) -> float:
    number = _number(cell)
    # Tools with one kind of number write 4 workers as 4.0.
    if number is not None and number.is_integer() and 1 <= number <= MAX_WORKERS:
        return number
    problem = f"is no whole number from 1 to {MAX_WORKERS:,}" if cell else "is missing"
    raise ValueError(problem, "write the worker count, such as 4")


def _value(cell: str) -> float:
    number = _number(cell)
    if not cell:
        raise ValueError("is missing", "leave out the line of a run that failed")
    if number is None:
        raise ValueError("is no number", "write it without a unit and with a point, such as 12.5")
    if number <= 0:
        raise ValueError("is not greater than 0", "leave out the line of a run that failed")
    if not MIN_VALUE <= number <= MAX_VALUE:
        raise ValueError(f"is not within {MIN_VALUE:g} to {MAX_VALUE:g}", "write times in seconds")
    return number


def _number(cell: str) -> float | None:
    """Return the number in a cell; None for words, infinity and NaN among them, and for Python's own ``1_000``."""
    try:
        number = float(cell)
    except ValueError:
        return None
    return number if math.isfinite(number) and "_" not in cell else None


def _error(path: Path, mistakes: Sequence[Mistake]) -> RayparError:
    head = f"{path}: {units.counted(len(mistakes), 'mistake')} in the table"
    lines = [head, *(f"  {mistake}" for mistake in mistakes[:MAX_MISTAKES])]
    if more := units.and_more(len(mistakes) - MAX_MISTAKES):
        lines.append(f" {more}")
    return RayparError("\n".join(lines))
