"""What a study's report says of the effects of its hyperparameters: a line for each, and one for each interaction."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.effects import Effects, Interaction, LevelEffect, MainEffect
from raypar.analysis.stats import Estimate
from raypar.report.scaling import Line
from raypar.study.space import Value

MAX_LEVELS = 3  # told of a hyperparameter whose values are no numbers
MIN_RATIO = 0.005  # off 1: less is shown as 1.00×
MIN_SHARE = 0.0005  # off 0: less is shown as 0.0 points

Leveled = TypeVar("Leveled", LevelEffect, Interaction)


def effect_lines(analysis: StudyAnalysis) -> tuple[Line, ...]:
    """The section of a report; empty where fewer than two hyperparameters are swept."""
    effects = analysis.effects
    if effects is None:
        return ()
    return (*_main(effects, analysis.metric), *_interactions(effects), *((0, f"{why}.") for why in effects.left_out))


def _main(effects: Effects, metric: str) -> Iterator[Line]:
    if effects.main:
        in_one = " (one block: no intervals)" if effects.num_blocks == 1 else ""
        yield 0, f"What each hyperparameter does, at equal values of the others{in_one}:"
    for effect in effects.main:
        levels = _told(effect.levels, effect.reference, is_ordered=effect.is_ordered)
        yield 2, f"{effect.key}: {'; '.join(_level(effect, level, metric) for level in levels)}."


def _level(effect: MainEffect, of: LevelEffect, metric: str) -> str:
    level, reference = units.value_of(of.level), units.value_of(effect.reference)
    shown = units.ratio_interval(of.speedup.value, of.speedup.low, of.speedup.high)
    if _is_tied(of.speedup, 1.0, MIN_RATIO):
        text = f"{level} and {reference} can't be told apart in time ({shown})"
    else:
        text = f"{level} trains {shown} as fast as {reference}"
    return f"{text}, {_change(of.metric_change, metric)}" if of.metric_change else text


def _change(change: Estimate, metric: str) -> str:
    """``accuracy -2.1 points [-2.4, -1.8]``."""
    is_share = units.is_share(metric)

    def show(value: float) -> str:
        if is_share:
            return f"{round(100 * value, 1) + 0.0:+.1f}"  # + 0.0: no "-0.0"
        return ("+" if value >= 0 else "") + units.number(value)

    text = show(change.value) + (" points" if is_share else "")
    if change.low is not None and change.high is not None:
        text += f" [{show(change.low)}, {show(change.high)}]"
    if not _is_tied(change, 0.0, MIN_SHARE if is_share else 0.0):
        return f"{metric} {text}"
    if {show(value) for value in (change.value, change.low, change.high) if value is not None} == {show(0.0)}:
        return f"{metric} the same"
    return f"{metric} can't be told apart ({text})"


def _interactions(effects: Effects) -> Iterator[Line]:
    """Where the speedup depends on the level, by how much; the rest in one line, each with its largest change."""
    is_ordered = {effect.key: effect.is_ordered for effect in effects.main}
    tied: list[str] = []
    for key in dict.fromkeys(i.key for i in effects.interactions):
        levels = [i for i in effects.interactions if i.key == key]
        told = _told(levels, levels[0].reference, is_ordered=is_ordered.get(key, False))
        differing = [i for i in told if i.change.low is not None and not _is_tied(i.change, 1.0, MIN_RATIO)]
        if not differing:
            widest = max(told, key=lambda i: abs(math.log(i.change.value))).change
            tied.append(f"{key} ({units.ratio_interval(widest.value, widest.low, widest.high)})")
            continue
        first = differing[0]
        then = f"{units.ratio(first.reference_speedup.value)} at {units.value_of(first.reference)}"
        yield 0, f"{_speedup(first)} depends on {key}: {then}, {', '.join(map(_at_level, differing))}."
    if tied:
        yield 0, f"Whether {_speedup(effects.interactions[0], 't')} depends on {' or '.join(tied)} can't be told."


def _speedup(of: Interaction, article: str = "T") -> str:
    workers = units.counted(of.num_workers, "worker")
    return f"{article}he speedup of {workers} over {of.base_workers}"


def _at_level(of: Interaction) -> str:
    change = units.ratio_interval(of.change.value, of.change.low, of.change.high)
    return f"{units.ratio(of.speedup.value)} at {units.value_of(of.level)} ({change} as large)"


def _told(levels: Sequence[Leveled], reference: Value, *, is_ordered: bool) -> Sequence[Leveled]:
    """The ends of what has an order, so that none is chosen for its size; of other levels all, or first and last."""
    if is_ordered:
        numbers = [float(v) for v in (reference, *(of.level for of in levels)) if isinstance(v, (int, float))]
        return [of for of in levels if of.level in (min(numbers), max(numbers))]
    return levels if len(levels) <= MAX_LEVELS else (levels[0], levels[-1])


def _is_tied(estimate: Estimate, neutral: float, floor: float) -> bool:
    """Whether there is an interval, and it can't tell the value from `neutral`, or not by what is shown."""
    if estimate.low is None:
        return False
    return not estimate.excludes(neutral) or abs(estimate.value - neutral) < floor
