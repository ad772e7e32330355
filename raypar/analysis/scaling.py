"""Scaling of a study or of a CSV file: numbers by worker count, the laws fitted to them, gains of each doubling.

Speedup S(N) is the rate of N workers over that of N0, the baseline; parallel efficiency is S(N) · N0 / N. In strong
scaling every worker count does the same work, so that rates are 1 / time; in weak scaling N workers do N times the
work of one, so that rates are N / time. A throughput is a rate as it stands. Serial fractions, by Karp and Flatt and
by the laws, are over the baseline too.

A study's rates are samples per second of the timed region, or trainings per second where raypar can't look into the
training. They need no factor, for an epoch is the same number of samples whatever the worker count: in weak scaling
(``per_worker_batch_size`` fixed) it has fewer steps. Twice the samples per second on two workers are a speedup of 2
either way; only the law differs that is fitted to it. A study's speedups are those of `raypar.analysis.points`, with
the same simultaneous intervals.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from raypar import units
from raypar.analysis.laws import LAWS, Fit, Law, LogRates, Refused, Scaling, better_law, fit_law, log_rates
from raypar.analysis.pairwise import Family, family_of
from raypar.analysis.question import PointKey, PointSamples, Question, point_key
from raypar.analysis.stats import LEVEL, Estimate, Floats, median_estimate, ratio_estimate, reference
from raypar.errors import Mistake, RayparError
from raypar.study.space import Value
from raypar.study.trial import point_label


class Quantity(StrEnum):
    """Measured quantity of a table."""

    TIME = "time"  # seconds
    THROUGHPUT = "throughput"  # work per second, in whatever unit


@dataclass(frozen=True)
class Runs:
    """Measurements by worker count: one value greater than 0 for each repeat, at least one.

    Attributes:
        are_paired: whether the i-th values of all worker counts come from one block.
    """

    values: Mapping[int, tuple[float, ...]]
    quantity: Quantity = Quantity.TIME
    are_paired: bool = False


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
        """Serial fraction with the interval that the speedup's gives; None where `why_no_fraction` says why."""
        return None if self.num_workers == self.baseline or self.why_no_fraction else self._fraction

    @property
    def why_no_fraction(self) -> str:
        """Reason why a fraction between 0 and 1 doesn't describe the speedup; empty where one does."""
        if self.num_workers == self.baseline:
            return ""
        fraction = self._fraction
        low, high = fraction.low, fraction.high
        if high is not None and high < 0:
            return "faster than perfect scaling"
        if low is not None and low > 1:
            return f"{'slower' if self.num_workers > self.baseline else 'faster'} than {self._base}"
        spans = low is not None and high is not None and low <= 0 and high >= 1
        return "inconclusive, needs more repeats" if spans or not 0 <= fraction.value <= 1 else ""

    @property
    def _base(self) -> str:
        return units.counted(self.baseline, "worker")

    @property
    def _fraction(self) -> Estimate:
        ratio, num_workers = self.speedup, self.num_workers / self.baseline
        # The fraction falls as the speedup grows.
        bounds = sorted(karp_flatt(s, num_workers) for s in (ratio.low, ratio.high) if s is not None)
        low, high = bounds or (None, None)
        return replace(ratio, value=karp_flatt(ratio.value, num_workers), low=low, high=high)


@dataclass(frozen=True)
class Step:
    """Step from one measured worker count to the next that is at least twice as large.

    Attributes:
        start: workers before.
        end: workers after.
        gain: the rate over that before, of one doubling: a step from 1 to 4 workers is two. Its interval holds together
            with those of the other steps.
    """

    start: int
    end: int
    gain: Estimate

    @property
    def cost(self) -> float:
        """Time of all workers together for the same work, over that before."""
        num_doublings = math.log2(self.end / self.start)
        return float((2 / self.gain.value) ** num_doublings)


WORTHWHILE = 1.3  # the gain of a doubling below which workers are better used elsewhere: each new one at 30 %


@dataclass(frozen=True)
class ScalingAnalysis:
    """Scaling of some runs.

    Attributes:
        baseline: the worker count that speedups are over.
        points: one for each worker count, from the smallest.
        steps: doublings, or more, from the smallest worker count on.
        laws: those of this way to scale, fitted or refused.
        better: the law that predicts left-out points better; None where neither does significantly.
        why_no_interval: why the laws' parameters have no intervals; empty where they have them.
    """

    scaling: Scaling
    quantity: Quantity
    baseline: int
    points: tuple[ScalingPoint, ...]
    steps: tuple[Step, ...]
    laws: tuple[Fit | Refused, ...]
    better: Law | None
    why_no_interval: str

    @property
    def last_step(self) -> Step | None:
        """First step that brings less than `WORTHWHILE`, where no later one brings more; both significantly."""
        poor = [i for i, s in enumerate(self.steps) if s.gain.high is not None and s.gain.high < WORTHWHILE]
        good = [i for i, s in enumerate(self.steps) if s.gain.low is not None and s.gain.low >= WORTHWHILE]
        later = [i for i in poor if i > max(good, default=-1)]
        return self.steps[later[0]] if later else None


def analyse_scaling(
    runs: Runs,
    scaling: Scaling = Scaling.STRONG,
    baseline: int | None = None,
    *,
    speedups: Mapping[int, Estimate] | None = None,
    level: float = LEVEL,
) -> ScalingAnalysis:
    """Estimate speedups, and fit the laws of this way to scale.

    Args:
        runs: of one worker count at least.
        scaling: what grows with the workers.
        baseline: the worker count to compare with; None: the smallest.
        speedups: over the baseline, of every worker count, where more is known of them than `runs` say (which repeats
            belong together); None: from the repeats as independent samples.
        level: of each law's intervals, and of those of all steps together.

    Raises:
        RayparError: there are no runs of the baseline.
    """
    counts = sorted(runs.values)
    base = counts[0] if baseline is None else baseline
    if base not in runs.values:
        hint = f"worker counts that have runs: {', '.join(map(str, counts))}"
        raise RayparError(f"no run with {base} workers to compare with", hint=hint)
    single = [n for n in counts if len(runs.values[n]) < 2]
    rates = log_rates({n: _log_rates(runs, scaling, n) for n in counts}, are_paired=runs.are_paired)
    laws = tuple(fit_law(law, rates, base, level) for law in LAWS[scaling])
    return ScalingAnalysis(
        scaling=scaling,
        quantity=runs.quantity,
        baseline=base,
        points=_points(runs, base, speedups or {n: _speedup(runs, scaling, n, base) for n in counts}),
        steps=tuple(_steps(counts, rates, level)),
        laws=laws,
        better=better_law(laws),
        why_no_interval=f"{', '.join(map(str, single))} workers ran only once" if single else "",
    )


def _steps(counts: Sequence[int], rates: LogRates, level: float) -> Iterator[Step]:
    ends = [counts[0]]
    while (following := next((n for n in counts if n >= 2 * ends[-1]), None)) is not None:
        ends.append(following)
    for start, end in pairwise(ends):
        ratio = rates.ratio(start, end, 1 - (1 - level) / (len(ends) - 1))
        value, low, high = (
            None if v is None else v ** (1 / math.log2(end / start)) for v in (ratio.value, ratio.low, ratio.high)
        )
        yield Step(start, end, replace(ratio, value=value or 0.0, low=low, high=high))


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
        level: of the laws' intervals in the study's report.
    """

    point: Mapping[str, Value]
    scaling: Scaling
    runs: Runs
    unit: str
    baseline: int
    speedups: Mapping[int, Estimate]
    excluded: Mapping[int, str]
    level: float = LEVEL

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
        """Result of `analyse` with `level`, made once."""
        return self.analyse(self.level)

    def analyse(self, level: float) -> ScalingAnalysis:
        """Estimate its numbers and fit the laws."""
        return analyse_scaling(self.runs, self.scaling, self.baseline, speedups=self.speedups, level=level)


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
    sorted_counts = (dict(sorted(by_count.items())) for by_count in by_rest.values())
    groups = [g for by_count in sorted_counts if (g := _group(question, by_count, baseline, family)) is not None]
    num_blocks = min((len(v) for g in groups for v in g.runs.values.values()), default=0)
    return tuple(replace(g, level=family.law_level(len(groups), num_blocks)) for g in groups)


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
    if base != question.baseline.get("num_workers") or question.compared_keys() != ("num_workers",):
        family = family.secondary  # elsewhere these are the speedups of the points
    ratios = {n: reference(len(s.samples)) if n == base else family.speedup(timed[base], s) for n, s in timed.items()}
    speedups = {n: ratio for n, ratio in ratios.items() if ratio is not None}
    counts_samples = all(s.throughput is not None for p in timed.values() for s in p.samples.values())
    rates = {
        n: s.by_repeat("throughput") if counts_samples else {r: 1 / time_s for r, time_s in s.times.items()}
        for n, s in timed.items()
        if n in speedups
    }
    return WorkerGroup(
        point=first.rest,
        scaling=Scaling.STRONG if first.config.get("per_worker_batch_size") is None else Scaling.WEAK,
        runs=Runs(
            {n: tuple(of_count.values()) for n, of_count in rates.items()},
            Quantity.THROUGHPUT,
            are_paired=len({tuple(of_count) for of_count in rates.values()}) == 1,
        ),
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
REPEAT_COLUMNS = ("repeat", "rep", "run", "trial", "block", "iteration", "seed", "timestamp", "date")  # of one thing
DELIMITERS = ",;\t"
MAX_WORKERS = 1_000_000
# Seconds, or work per second, beyond which a number can only be a slip; ratios of two stay far within a float.
MIN_VALUE, MAX_VALUE = 1e-15, 1e15
MAX_MISTAKES = 20  # reported one by one
# Of a table, whose laws are fitted within seconds.
MAX_BYTES, MAX_LINES, MAX_COUNTS = 5_000_000, 5_000, 200
TOO_LARGE = "keep some repeats of some worker counts: a few dozen lines fit a law as well"
EXAMPLE = "a table is, line by line: workers,time   1,100.5   2,52.1   4,28.7"


def read_table(path: Path, by: Sequence[str] = ()) -> dict[str, Runs]:
    """Read the runs in a CSV file, in the order of its lines; cells are separated by commas, semicolons or tabs.

    The first line names the columns: one for the number of workers, one for the time or the throughput. Lines with the
    same worker count are repeats. Empty lines and those that start with ``#`` are skipped.

    Args:
        path: of the file.
        by: names of columns whose values tell runs apart.

    Returns:
        The runs of each assignment of `by`, under its label; all runs under an empty one where `by` is empty.

    Raises:
        RayparError: the file can't be read, or has mistakes, which it lists.
    """
    rows = _rows(path)
    if not rows:
        raise RayparError(f"{path}: the table is empty", hint=EXAMPLE)
    head, *rows = rows
    names = [cell.lower() for cell in head[1]]
    measured, by_columns, mistakes = _columns_of(*head, by)
    if mistakes:
        raise _error(path, mistakes)
    groups: dict[str, dict[int, list[float]]] = {}
    lines: list[_Line] = []
    for line, cells in rows:
        if any(cells[len(names) :]):
            problem = f"has {len(cells)} cells, the head {len(names)}"
            hint = "write numbers with a point, such as 12.5, and name every column"
            mistakes.append(Mistake(f"line {line}", ",".join(cells), problem, hint))
            continue
        padded = [*cells, *[""] * (len(names) - len(cells))]
        numbers = []
        for column, parse in zip(measured, (_workers, _value), strict=True):
            try:
                numbers.append(parse(padded[column]))
            except ValueError as error:  # its problem and hint
                mistakes.append(Mistake(f"line {line}, {head[1][column]}", padded[column], *error.args))
        if len(numbers) == len(measured):
            label = " ".join(f"{head[1][column]}={padded[column]}" for column in by_columns)
            groups.setdefault(label, {}).setdefault(int(numbers[0]), []).append(numbers[1])
            lines.append(_Line(line, label, int(numbers[0]), padded))
    ignored = {i for i, name in enumerate(names) if name in REPEAT_COLUMNS} | {*measured, *by_columns}
    mistakes += _mixed_columns(head[1], lines, ignored)
    if mistakes:
        raise _error(path, mistakes)
    if not groups:
        raise RayparError(f"{path}: the table has a head and no runs below it", hint=EXAMPLE)
    if (num_counts := sum(map(len, groups.values()))) > MAX_COUNTS:
        raise RayparError(f"{path}: the table has {num_counts:,} worker counts, over {MAX_COUNTS}", hint=TOO_LARGE)
    quantity = Quantity.THROUGHPUT if names[measured[1]] in RATE_COLUMNS else Quantity.TIME
    return {label: Runs({n: tuple(v) for n, v in values.items()}, quantity) for label, values in groups.items()}


@dataclass(frozen=True)
class _Line:
    """Line of a table: its number, group and worker count, and a cell for each column."""

    number: int
    label: str
    num_workers: int
    cells: list[str]


def _columns_of(line: int, head: Sequence[str], by: Sequence[str]) -> tuple[list[int], list[int], list[Mistake]]:
    """Return the columns of workers and of what was measured, those that `by` names, and the mistakes."""
    names, mistakes, measured = [cell.lower() for cell in head], list[Mistake](), list[int]()
    for what, accepted in (
        ("how many workers", WORKER_COLUMNS),
        ("how long they took", (*TIME_COLUMNS, *RATE_COLUMNS)),
    ):
        matches = [i for i, name in enumerate(names) if name in accepted]
        measured += matches[:1]
        if len(matches) != 1:
            shown = ",".join(head[i] for i in matches or range(len(head)))
            problem = f"{len(matches)} columns give {what}" if matches else f"no column gives {what}"
            hint = "keep one of them, or give the others another name"
            hint = hint if matches else f"name a column {' or '.join(accepted)}"
            mistakes.append(Mistake(f"line {line}, head", shown, problem, hint))
    others = [name for i, name in enumerate(names) if i not in measured]
    for name in by:
        if name.lower() not in others:
            problem = "no such column" if name.lower() not in names else "is what was measured"
            hint = f"columns to group by: {', '.join(others)}" if others else "leave out --by"
            mistakes.append(Mistake("--by", name, problem, hint))
    return measured, [names.index(name.lower()) for name in by if name.lower() in others], mistakes


def _mixed_columns(head: Sequence[str], lines: Sequence[_Line], ignored: Collection[int]) -> Iterator[Mistake]:
    """Yield the columns with several values at one worker count of a group: its lines are no repeats of one run."""
    for column in sorted(set(range(len(head))) - set(ignored)):
        first: dict[tuple[str, int], _Line] = {}
        for line in lines:
            before, cell = first.setdefault((line.label, line.num_workers), line), line.cells[column]
            if before.cells[column] != cell:
                workers = units.counted(line.num_workers, "worker")
                problem = f"differs from {before.cells[column]!r} in line {before.number}, which has {workers} too"
                hint = f"fit each value on its own with --by {head[column]}, or delete the column"
                yield Mistake(f"line {line.number}, {head[column]}", cell, problem, hint)
                break


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
