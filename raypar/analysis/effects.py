"""Effects of each swept hyperparameter on time and metric, and on the speedup of more workers.

The points of a grid are a factorial design (Box, Hunter and Hunter, "Statistics for Experimenters", 2005, chapter 5).
A level is compared with the reference level at equal values of all other hyperparameters: times by the ratio of their
geometric means over those points, metrics by the difference of means. Each block gives one such number. The intervals
are over blocks, because a disturbance of a block affects all its points. Times are not corrected for unequal work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from raypar import units
from raypar.analysis.finding import named
from raypar.analysis.pairwise import Family
from raypar.analysis.question import PointSamples, Question, point_key
from raypar.analysis.stats import Estimate, Floats, prior_of_mean
from raypar.study.space import Value
from raypar.study.trial import point_label

WORKERS = "num_workers"
MIN_SHARE = 2 / 3  # of the points of a grid, of a block, and of a level, that must be complete
TOO_FEW = "Too few points have all their trials for"


@dataclass(frozen=True)
class LevelEffect:
    """Effect of one value of a hyperparameter against its reference, at equal values of all others.

    Attributes:
        num_points: number of compared pairs of points.
        speedup: over the reference, geometric mean over these points.
        metric_change: change of the study's metric, mean over these points; None if it is missing.
    """

    level: Value
    num_points: int
    speedup: Estimate
    metric_change: Estimate | None


@dataclass(frozen=True)
class MainEffect:
    """Effect of one hyperparameter.

    Attributes:
        reference: value that others are compared with: the baseline's, or the first one.
        is_ordered: whether its values are numbers.
        levels: the other values, in order.
    """

    key: str
    reference: Value
    is_ordered: bool
    levels: tuple[LevelEffect, ...]


@dataclass(frozen=True)
class Interaction:
    """Speedup of more workers at one value of a hyperparameter against that at the reference value.

    Attributes:
        level: value of `key`.
        reference: value that it is compared with.
        num_workers: number of workers of the speedup over `base_workers`.
        speedup: at the level, geometric mean over all other hyperparameters.
        reference_speedup: at the reference.
        change: ratio of both; 1 if the level changes nothing.
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
    """Effects in a study of at least two swept hyperparameters.

    Attributes:
        num_blocks: number of blocks of trials.
        main: effects of each hyperparameter, in the study's order.
        interactions: of each level of every other hyperparameter with the largest number of workers.
        omitted: sentences, without a full stop, on effects that can't be estimated.
    """

    num_blocks: int
    main: tuple[MainEffect, ...]
    interactions: tuple[Interaction, ...]
    omitted: tuple[str, ...]


@dataclass(frozen=True)
class Importances:
    """Importance of each swept hyperparameter for the metric of a search.

    Attributes:
        num_points: number of points with a metric.
        shares: importance of each hyperparameter, the largest first, sum 1; empty if the points don't show it.
    """

    num_points: int
    shares: Mapping[str, float]


@dataclass(frozen=True)
class _Grid:
    """Trials of a grid.

    Attributes:
        keys: the hyperparameters, one for each axis but the last.
        levels: values along these axes.
        references: index of each reference value.
        log_times: logarithms of seconds, ``[level of each key …, block]``; NaN if missing.
        metrics: the study's metric, in the same shape.
    """

    keys: tuple[str, ...]
    levels: tuple[tuple[Value, ...], ...]
    references: tuple[int, ...]
    log_times: Floats
    metrics: Floats

    def others(self, axis: int) -> list[tuple[int, Value]]:
        """Return the levels of an axis except its reference, each with its index."""
        return [(i, level) for i, level in enumerate(self.levels[axis]) if i != self.references[axis]]

    def compared(self, axis: int, level: int, grids: Sequence[Floats]) -> list[Floats] | None:
        """Return the points of the reference in each of these grids, then those of the level: ``[point, block]``.

        Points that are incomplete in any of them are left out. None if too few are complete.
        """
        parts = [np.take(grid, [at], axis) for at in (self.references[axis], level) for grid in grids]
        flat = [part.reshape(-1, part.shape[-1]) for part in parts]
        complete = np.logical_and.reduce([np.isfinite(part).all(axis=1) for part in flat])
        return [part[complete] for part in flat] if complete.any() and complete.mean() >= MIN_SHARE else None


def effects_of(question: Question, gathered: Sequence[PointSamples], family: Family) -> Effects | None:
    """Estimate the effects; None if fewer than two hyperparameters are swept, or no trial has a time."""
    listed = {point_key(p) for p in question.points}
    placed = [p for p in gathered if not listed or point_key(p.point) in listed]
    swept = {key: values for key in question.space_keys if len(values := _levels(key, placed)) > 1}
    if len(swept) < 2 or not any(p.times for p in placed):
        return None
    if question.is_search:
        return _none("the points are drawn, not a grid")
    if (size := math.prod(map(len, swept.values()))) * MIN_SHARE > len(placed):
        return _none(f"{units.counted(len(placed), 'point')} are too few of a grid of {units.count(size)}")
    grid = _grid(question, placed, swept)
    if not grid.log_times.shape[-1]:
        return _none(f"no block has finished trials of {units.percent(MIN_SHARE)} of the points")
    main, incomplete = _main_effects(grid, family.secondary)
    interactions, incomplete_pairs = _interactions(grid, family.secondary)
    missing = (("the effect of", incomplete), ("the dependence of the speedup on", incomplete_pairs))
    omitted = tuple(f"{TOO_FEW} {what} {named(levels)}" for what, levels in missing if levels)
    return Effects(grid.log_times.shape[-1], main, interactions, omitted)


def _none(reason: str) -> Effects:
    return Effects(0, (), (), (f"No effects of the hyperparameters are estimated: {reason}",))


def _levels(key: str, gathered: Sequence[PointSamples]) -> tuple[Value, ...]:
    """Return the different values of a hyperparameter, in order."""
    return tuple({point_key({key: p.point[key]}): p.point[key] for p in gathered if key in p.point}.values())


def _grid(question: Question, gathered: Sequence[PointSamples], swept: Mapping[str, tuple[Value, ...]]) -> _Grid:
    """Return the trials of the blocks that are nearly complete."""
    places = {key: {point_key({key: v}): i for i, v in enumerate(values)} for key, values in swept.items()}
    repeats = {repeat for p in gathered for repeat in (*p.samples, *p.times)}
    blocks = {repeat: i for i, repeat in enumerate(sorted(repeats))}
    log_times = np.full((*map(len, swept.values()), len(blocks)), np.nan)
    metrics = log_times.copy()
    for p in gathered:
        place = [places[key].get(point_key({key: p.point.get(key)})) for key in swept]
        if None not in place:
            for repeat, time_s in p.times.items():
                log_times[(*place, blocks[repeat])] = math.log(time_s)
            for repeat, metric in p.by_repeat("metric").items():
                metrics[(*place, blocks[repeat])] = metric
    complete = np.isfinite(log_times).mean(axis=tuple(range(len(swept)))) >= MIN_SHARE
    bases = ({key: question.baseline[key]} if key in question.baseline else {} for key in swept)
    references = tuple(places[key].get(point_key(base), 0) for key, base in zip(swept, bases, strict=True))
    return _Grid(tuple(swept), tuple(swept.values()), references, log_times[..., complete], metrics[..., complete])


def _main_effects(grid: _Grid, family: Family) -> tuple[tuple[MainEffect, ...], list[str]]:
    """Return the effects, and the levels with too few complete points."""
    effects: list[MainEffect] = []
    incomplete: list[str] = []
    for axis, key in enumerate(grid.keys):
        levels: list[LevelEffect] = []
        for i, level in grid.others(axis):
            times, scores = (grid.compared(axis, i, [values]) for values in (grid.log_times, grid.metrics))
            if times is None:
                incomplete.append(point_label({key: level}))
                continue
            num_pairs, num_blocks, change = len(times[0]), times[0].shape[1], None
            if scores:
                prior = prior_of_mean(family.metrics, num_blocks, num_pairs, family.metric_level(num_blocks))
                change = family.metric_shift((scores[1] - scores[0]).mean(axis=0).tolist(), prior=prior)
            reference, this = map(_mean, times)
            prior = prior_of_mean(family.times, num_blocks, num_pairs, family.time_level(num_blocks))
            levels.append(LevelEffect(level, num_pairs, family.log_ratio(reference - this, prior), change))
        if levels:
            values = grid.levels[axis]
            is_ordered = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
            effects.append(MainEffect(key, values[grid.references[axis]], is_ordered, tuple(levels)))
    return tuple(effects), incomplete


def _interactions(grid: _Grid, family: Family) -> tuple[tuple[Interaction, ...], list[str]]:
    """Return the interactions with the largest number of workers, and the levels with too few complete points."""
    if WORKERS not in grid.keys:
        return (), []
    workers = grid.keys.index(WORKERS)
    most, num_workers = grid.others(workers)[-1]
    base_workers = grid.levels[workers][grid.references[workers]]
    assert isinstance(num_workers, int) and isinstance(base_workers, int)
    by_workers = [np.take(grid.log_times, [n], workers) for n in (grid.references[workers], most)]
    interactions: list[Interaction] = []
    incomplete: list[str] = []
    for axis, key in enumerate(grid.keys):
        reference = grid.levels[axis][grid.references[axis]]
        for i, level in grid.others(axis) if axis != workers else ():
            if (parts := grid.compared(axis, i, by_workers)) is None:
                incomplete.append(point_label({key: level}))
                continue
            base_then, most_then, base_now, most_now = map(_mean, parts)
            now, then = base_now - most_now, base_then - most_then
            prior = prior_of_mean(family.times, len(now), len(parts[0]), family.time_level(len(now)))
            of_four = replace(prior, variance=2 * prior.variance)
            estimates = [family.log_ratio(*each) for each in ((now, prior), (then, prior), (now - then, of_four))]
            interactions.append(Interaction(key, level, reference, num_workers, base_workers, *estimates))
    return tuple(interactions), incomplete


def _mean(log_times: Floats) -> Floats:
    return np.asarray(log_times.mean(axis=0))


# ---- importances

MIN_POINTS = 10
# Explained share of the variance of points that a tree was not fitted to. Of n points without an effect, more than
# MIN_EXPLAINED + CHANCE / n is explained in 2 to 5 % of simulated searches.
MIN_EXPLAINED, CHANCE = 0.1, 4.0
NUM_TREES = 200


def importances_of(question: Question, points: Sequence[PointSamples]) -> Importances | None:
    """Estimate the importance of each hyperparameter of a search for the metric, by permutation.

    A random forest learns the metric from the hyperparameters. The importance of one is the loss of fit when its values
    are shuffled (L. Breiman, Machine Learning 45, 2001). There are none if the forest hardly predicts points that it
    was not fitted to.

    Returns:
        None for fewer than `MIN_POINTS` points with a metric, or for one hyperparameter.
    """
    scored = [(p, p.searched_metrics[0]) for p in points if p.searched_metrics]
    keys = [key for key in question.space_keys if len({point_key({key: p.point.get(key)}) for p, _ in scored}) > 1]
    if len(scored) < MIN_POINTS or len(keys) < 2:
        return None
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance

    columns = np.column_stack([_numbers([p.point.get(key) for p, _ in scored]) for key in keys])
    metrics = [metric for _, metric in scored]
    forest = RandomForestRegressor(NUM_TREES, oob_score=True, random_state=0).fit(columns, metrics)
    if not forest.oob_score_ > MIN_EXPLAINED + CHANCE / len(scored):
        return Importances(len(scored), {})
    losses = permutation_importance(forest, columns, metrics, n_repeats=10, random_state=0).importances_mean.clip(0)
    ranked = sorted(zip(keys, losses / losses.sum(), strict=True), key=lambda entry: -entry[1])
    return Importances(len(scored), {key: float(share) for key, share in ranked})


def _numbers(values: Sequence[Value | None]) -> Floats:
    """Return the values as numbers, texts by their rank."""
    if all(isinstance(value, (int, float)) for value in values):
        return np.array(values, dtype=float)
    return np.unique([str(value) for value in values], return_inverse=True)[1].astype(float)
