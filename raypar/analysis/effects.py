"""What each swept hyperparameter does to runtime and metric by itself, and whether it changes what workers bring.

The points of a grid are a factorial design (Box, Hunter and Hunter, "Statistics for Experimenters", 2005, chapter 5).
A level is compared with the reference level at equal values of all other hyperparameters: times by the ratio of their
geometric means over those points, which is the mean contrast of the logarithms, so that long trials don't drown short
ones; the metric by the difference of means. Each block gives one such number, and the intervals are over blocks: what
disturbs a block disturbs all of its points, so points are not taken for repeats.

Times are compared as they are: a level that makes a trial longer by more work takes longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from raypar import units
from raypar.analysis.checks import named
from raypar.analysis.question import PointKey, PointSamples, Question, point_key
from raypar.analysis.stats import Estimate, median_estimate, ratio_estimate
from raypar.study.space import Value
from raypar.study.trial import point_label

WORKERS = "num_workers"
MIN_SHARE = 2 / 3  # of a grid, of a block, of the points to match: with fewer they are no longer a design
TOO_FEW = "Too few points have all their trials to tell"

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class LevelEffect:
    """What one value of a hyperparameter does against its reference, at equal values of all others.

    Attributes:
        num_points: how many points of the level were matched with one of the reference.
        speedup: how many times as fast the level is as the reference, in the geometric mean over those points.
        metric_change: how much higher the study's metric is, in the mean over those points; None where it is missing.
    """

    level: Value
    num_points: int
    speedup: Estimate
    metric_change: Estimate | None


@dataclass(frozen=True)
class MainEffect:
    """What a hyperparameter does.

    Attributes:
        key: its name.
        reference: what its other values are compared with: the baseline's, or the first one.
        is_ordered: whether its values are numbers, so that the first and the last one are its ends.
        levels: the other values, in their order.
    """

    key: str
    reference: Value
    is_ordered: bool
    levels: tuple[LevelEffect, ...]


@dataclass(frozen=True)
class Interaction:
    """Whether the speedup of more workers is another one at another value of a hyperparameter.

    Attributes:
        key: the hyperparameter.
        level: one of its values.
        reference: the value that this is compared with.
        num_workers: of the speedup.
        base_workers: what the speedup is over.
        speedup: at the level, in the geometric mean over all others.
        reference_speedup: at the reference.
        change: the first over the second; 1 where the level changes nothing.
    """

    key: str
    level: Value
    reference: Value
    num_workers: int
    base_workers: int
    speedup: Estimate
    reference_speedup: Estimate
    change: Estimate


@dataclass(frozen=True)
class Effects:
    """The effects in a study of at least two swept hyperparameters.

    Attributes:
        num_blocks: how many blocks of trials they rest on.
        main: what each hyperparameter does, in the order of the study's.
        interactions: of each level of every other hyperparameter with the most workers.
        omitted: what is not told, and why, in sentences without a full stop.
    """

    num_blocks: int
    main: tuple[MainEffect, ...]
    interactions: tuple[Interaction, ...]
    omitted: tuple[str, ...]


@dataclass(frozen=True)
class _Grid:
    """Every trial of a grid in its place.

    Attributes:
        keys: the hyperparameters, one for each axis but the last.
        levels: the values along those axes.
        references: of each, the index of the value that others are compared with.
        log_times: logarithms of seconds, ``[level of each key …, block]``; NaN where there is none.
        metrics: the study's metric, likewise.
    """

    keys: tuple[str, ...]
    levels: tuple[tuple[Value, ...], ...]
    references: tuple[int, ...]
    log_times: Floats
    metrics: Floats

    def others(self, axis: int) -> Iterator[tuple[int, Value]]:
        """The levels of an axis but its reference."""
        return ((i, level) for i, level in enumerate(self.levels[axis]) if i != self.references[axis])


def effects_of(question: Question, gathered: Sequence[PointSamples]) -> Effects | None:
    """The effects; None where fewer than two hyperparameters are swept, or no trial has a time.

    Args:
        question: what the study asks.
        gathered: the trials of each point, in the order of their values.
    """
    listed = {point_key(p) for p in question.points}
    placed = [p for p in gathered if not listed or point_key(p.point) in listed]
    levels = {key: _levels(key, placed) for key in question.space_keys}
    swept = {key: values for key, values in levels.items() if len(values) > 1}
    if len(swept) < 2 or not any(p.all_of("time_s") for p in placed):
        return None
    if question.is_search:
        return _untold("the points are drawn, not a grid")
    if (size := math.prod(map(len, swept.values()))) * MIN_SHARE > len(placed):
        return _untold(f"{units.counted(len(placed), 'point')} are too few of a grid of {units.count(size)}")
    grid = _grid(question, placed, swept)
    if not grid.log_times.shape[-1]:
        return _untold(f"no block has finished trials of {units.percent(MIN_SHARE)} of the points")
    main, lacking = _main_effects(grid)
    interactions, lacking_too = _interactions(grid)
    omitted = []
    if lacking:
        omitted.append(f"{TOO_FEW} the effect of {named(lacking)}")
    if lacking_too:
        omitted.append(f"{TOO_FEW} whether the speedup depends on {named(lacking_too)}")
    return Effects(grid.log_times.shape[-1], main, interactions, tuple(omitted))


def _untold(reason: str) -> Effects:
    return Effects(0, (), (), (f"Effects of the hyperparameters are not told: {reason}",))


def _levels(key: str, gathered: Sequence[PointSamples]) -> tuple[Value, ...]:
    """The values of a hyperparameter, in the order in which points are sorted."""
    values: dict[PointKey, Value] = {}
    for samples in gathered:
        if key in samples.point:
            values.setdefault(point_key({key: samples.point[key]}), samples.point[key])
    return tuple(values.values())


def _grid(question: Question, gathered: Sequence[PointSamples], swept: Mapping[str, tuple[Value, ...]]) -> _Grid:
    """The trials in their places; of the blocks, those that are nearly whole."""
    places = {key: {point_key({key: v}): i for i, v in enumerate(values)} for key, values in swept.items()}
    repeats = sorted({repeat for p in gathered for repeat in p.samples})
    log_times = np.full((*map(len, swept.values()), len(repeats)), np.nan)
    metrics = log_times.copy()
    for samples in gathered:
        place = [places[key].get(point_key({key: samples.point.get(key)})) for key in swept]
        for block, repeat in enumerate(repeats):
            sample = samples.samples.get(repeat)
            if sample is None or None in place:
                continue
            where = (*place, block)
            log_times[where] = math.nan if sample.time_s is None else math.log(sample.time_s)
            metrics[where] = math.nan if sample.metric is None else sample.metric
    whole = np.isfinite(log_times).mean(axis=tuple(range(len(swept)))) >= MIN_SHARE
    bases = ({key: question.baseline[key]} if key in question.baseline else {} for key in swept)
    references = tuple(places[key].get(point_key(base), 0) for key, base in zip(swept, bases, strict=True))
    return _Grid(tuple(swept), tuple(swept.values()), references, log_times[..., whole], metrics[..., whole])


def _main_effects(grid: _Grid) -> tuple[tuple[MainEffect, ...], list[str]]:
    """The effects, and the levels too few of whose points are whole."""
    effects: list[MainEffect] = []
    lacking: list[str] = []
    for axis, key in enumerate(grid.keys):
        found: list[LevelEffect] = []
        reference = grid.references[axis]
        for i, level in grid.others(axis):
            times = _matched([np.take(grid.log_times, at, axis) for at in (reference, i)])
            if times is None:
                lacking.append(point_label({key: level}))
                continue
            scores = _matched([np.take(grid.metrics, at, axis) for at in (reference, i)])
            change = _difference(*scores) if scores else None
            found.append(LevelEffect(level, len(times[0]), _ratio(*map(_geometric_mean, times)), change))
        if found:
            values = grid.levels[axis]
            is_ordered = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
            effects.append(MainEffect(key, values[reference], is_ordered, tuple(found)))
    return tuple(effects), lacking


def _interactions(grid: _Grid) -> tuple[tuple[Interaction, ...], list[str]]:
    """Of every other hyperparameter with the most workers, and the levels too few of whose points are whole."""
    if WORKERS not in grid.keys:
        return (), []
    workers = grid.keys.index(WORKERS)
    base = grid.references[workers]
    most, num_workers = list(grid.others(workers))[-1]
    base_workers = grid.levels[workers][base]
    assert isinstance(num_workers, int) and isinstance(base_workers, int)
    by_base, by_most = (np.take(grid.log_times, n, workers) for n in (base, most))
    found: list[Interaction] = []
    lacking: list[str] = []
    for axis, key in enumerate(grid.keys):
        if axis == workers:
            continue
        reference = grid.references[axis]
        left = axis if axis < workers else axis - 1  # the axis, once that of the workers is gone
        for i, level in grid.others(axis):
            parts = _matched([np.take(times, at, left) for at in (reference, i) for times in (by_base, by_most)])
            if parts is None:
                lacking.append(point_label({key: level}))
                continue
            base_then, most_then, base_now, most_now = map(_geometric_mean, parts)
            found.append(
                Interaction(
                    key,
                    level,
                    grid.levels[axis][reference],
                    num_workers,
                    base_workers,
                    speedup=_ratio(base_now, most_now),
                    reference_speedup=_ratio(base_then, most_then),
                    change=_ratio(base_now * most_then, most_now * base_then),
                )
            )
    return tuple(found), lacking


def _matched(parts: Sequence[Floats]) -> list[Floats] | None:
    """Of each part the same points, ``[point, block]``: those that are whole in all; None where these are too few."""
    flat = [part.reshape(-1, part.shape[-1]) for part in parts]
    whole = np.logical_and.reduce([np.isfinite(part).all(axis=1) for part in flat])
    return [part[whole] for part in flat] if whole.any() and whole.mean() >= MIN_SHARE else None


def _geometric_mean(log_times: Floats) -> Floats:
    """Of each block, over the points: seconds."""
    return np.asarray(np.exp(log_times.mean(axis=0)))


def _ratio(top: Floats, bottom: Floats) -> Estimate:
    """The ratio over the blocks."""
    return ratio_estimate(top.tolist(), bottom.tolist())


def _difference(before: Floats, after: Floats) -> Estimate:
    """The mean difference over the points, in the median over the blocks."""
    return median_estimate((after - before).mean(axis=0).tolist(), log_scale=False)
