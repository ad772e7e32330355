"""Sentences on effects, scaling and batch sizes that every report shares.

A law takes three worker counts or more. With two, there is one serial fraction for each group, in a line of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias, TypeVar

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.effects import Effects, Interaction, LevelEffect, MainEffect
from raypar.analysis.goodput import BatchGroup
from raypar.analysis.laws import AMDAHL, LAWS, USL, Fit, Law, Refused, Scaling
from raypar.analysis.scaling import ScalingAnalysis, WorkerGroup
from raypar.analysis.stats import Estimate
from raypar.report.fit import about_workers, excluded_line, interval_caveat, parameter, ratio
from raypar.study.space import Value
from raypar.study.trial import point_label

MIN_COUNTS = min(law.min_counts for laws in LAWS.values() for law in laws)
MAX_SCALING_GROUPS = 4  # one by one

IndentedLine: TypeAlias = tuple[int, str]  # how far it is indented, and its text


def scaling_lines(study_name: str, groups: Sequence[WorkerGroup]) -> tuple[IndentedLine, ...]:
    """The section of a report; empty where no two points differ only in their workers. Fits the laws."""
    many = [group for group in groups if len(group.speedups) >= MIN_COUNTS]
    few = [group for group in groups if len(group.speedups) < MIN_COUNTS]
    lines = [line for group in many[:MAX_SCALING_GROUPS] for line in _section(group, group.analysis)]
    if len(many) > MAX_SCALING_GROUPS:
        more = units.counted(len(many) - MAX_SCALING_GROUPS, "more group")
        lines.append((0, f"{more} of points that differ only in num_workers: `raypar fit {study_name}` shows all."))
    return (*lines, *((0, line) for line in _fractions(few)))


def _section(group: WorkerGroup, analysis: ScalingAnalysis) -> Iterator[IndentedLine]:
    base = units.counted(analysis.baseline, "worker")
    kept = "the batch" if analysis.scaling is Scaling.STRONG else "each worker's batch"
    at = f" at {group.label}" if group.label else ""
    yield 0, f"Scaling{at} ({analysis.scaling}: {kept} is fixed), over {base}:"
    shares = [(p.num_workers, units.percent(p.karp_flatt.value, 1)) for p in analysis.points if p.karp_flatt]
    others = "".join(f", {share} with {n}" for n, share in shares[1:])
    yield 2, f"Karp–Flatt serial fraction: {shares[0][1]} with {units.counted(shares[0][0], 'worker')}{others}."
    for law in analysis.laws:
        yield 2, f"{law.law.name}{_refused(law) if isinstance(law, Refused) else ': ' + _fitted(law, analysis)}"
    fits = [law for law in analysis.laws if isinstance(law, Fit)]
    if len(fits) > 1:
        yield 2, _better(fits, analysis)
    if fits and (caveat := interval_caveat(analysis)):
        yield 2, caveat
    if group.excluded:
        yield 2, excluded_line(group)


def _refused(refused: Refused) -> str:
    return f" is not fitted: {refused.reason}."


def _fitted(fit: Fit, analysis: ScalingAnalysis) -> str:
    """The parameters, and what they mean for more workers."""
    if fit.law is USL:
        named = zip(fit.law.parameters, fit.parameters, fit.law.orders, strict=True)
        return f"{', '.join(parameter(*each) for each in named)}; {_peak(fit, analysis)}."
    fraction = fit.parameters[0]
    text = f"{units.percent_interval(fraction.value, fraction.low, fraction.high, 1)} serial, "
    if fit.law is not AMDAHL:
        return f"{text}so that each worker more adds {units.percent(1 - fraction.value)} of what one does alone."
    if fit.limit is None:
        return text + "which can't be told from none: no limit is known."
    base = units.counted(analysis.baseline, "worker")
    return f"{text}no more than {ratio(fit.limit)} as fast as {base} with however many."


def _peak(fit: Fit, analysis: ScalingAnalysis) -> str:
    if fit.peak is None or fit.peak_speedup is None:
        return "no peak can be told"
    if fit.peak.value < 1:
        return "one worker is the fastest"
    beyond = ", extrapolated" if fit.peak.value > analysis.points[-1].num_workers else ""
    return f"fastest with {about_workers(fit.peak)} ({ratio(fit.peak_speedup)}{beyond})"


def _better(fits: Sequence[Fit], analysis: ScalingAnalysis) -> str:
    errors = " and ".join(f"{units.percent(fit.cv_error, 1)} ({_short(fit.law)})" for fit in fits)
    if analysis.better is None:
        return f"Which law predicts left-out worker counts better can't be told: off by {errors}."
    return f"{analysis.better.name} predicts left-out worker counts better: off by {errors}."


def _short(law: Law) -> str:
    return law.name.split("'")[0]


def _fractions(groups: Sequence[WorkerGroup]) -> list[str]:
    """Return the serial fractions of groups of two worker counts."""
    fractions = [(group, n, fraction) for group in groups for n, fraction in group.karp_flatt.items()]
    if len(fractions) <= MAX_SCALING_GROUPS:
        return [_one_fraction(group, n, fraction) for group, n, fraction in fractions]
    ends = [pick(fractions, key=lambda entry: entry[2].value) for pick in (min, max)]
    extremes = " to ".join(f"{units.percent(f.value, 1)} ({units.counted(n, 'worker')}, {g.label})" for g, n, f in ends)
    return [f"Karp–Flatt serial fraction: {extremes}."]


def _one_fraction(group: WorkerGroup, num_workers: int, fraction: Estimate) -> str:
    at = f" at {group.label}" if group.label else ""
    shown = units.percent_interval(fraction.value, fraction.low, fraction.high, 1)
    text = f"Karp–Flatt serial fraction of {units.counted(num_workers, 'worker')}{at}: {shown}."
    return f"{text} {excluded_line(group)}" if group.excluded else text


MAX_GOODPUT_GROUPS = 2


def batch_lines(group: BatchGroup) -> Iterator[str]:
    """Yield the effect of the batch size on throughput, progress per sample, and their product."""
    at = f" at {point_label(group.rest)}" if group.rest else ""
    yield f"Against {group.key}={group.base}{at}: samples/s × progress per sample = speed towards the target."
    for batch in group.batches:
        if batch.batch_size != group.base:
            parts = f"{_shown(batch.throughput)} × {_shown(batch.progress)} = {_shown(batch.goodput)}"
            yield f"- {group.key}={batch.batch_size}: {parts}{_qualifier(batch.goodput)}"


def goodput_lines(analysis: StudyAnalysis) -> list[IndentedLine]:
    """The section of a report; empty where no two batch sizes reached a target in all their trials."""
    if analysis.target is None or not analysis.batches:
        return []
    target = analysis.target
    reached = f"{target.metric} {units.score(target.metric, target.value)}"
    lines = [(0, f"What the batch size does on the way to {reached}, the best that every trial reached:")]
    for group in analysis.batches[:MAX_GOODPUT_GROUPS]:
        first, *others = batch_lines(group)
        lines += [(2, first), *((4, line) for line in others)]
    if (more := len(analysis.batches) - MAX_GOODPUT_GROUPS) > 0:
        lines.append((2, f"`raypar recommend {analysis.question.study_name} --target …` shows {more} more."))
    return lines


def _shown(ratio: Estimate) -> str:
    return units.ratio_interval(ratio.value, ratio.low, ratio.high)


def _qualifier(goodput: Estimate) -> str:
    if goodput.low is None:
        return ", by one trial each"
    return "" if goodput.excludes(1.0) else ", which can't be told from 1×"


MAX_LEVELS = 3  # shown of a hyperparameter whose values are no numbers
MIN_RATIO = 0.005  # off 1: less is shown as 1.00×
MIN_SHARE = 0.0005  # off 0: less is shown as 0.0 points

Leveled = TypeVar("Leveled", LevelEffect, Interaction)


def effect_lines(analysis: StudyAnalysis) -> tuple[IndentedLine, ...]:
    """The section of a report; empty where fewer than two hyperparameters are swept."""
    effects = analysis.effects
    if effects is None:
        return ()
    main = _main(effects, analysis.question.metric)
    return (*main, *_interactions(effects), *((0, f"{why}.") for why in effects.omitted))


def _main(effects: Effects, metric: str) -> Iterator[IndentedLine]:
    if effects.main:
        in_one = " (one block: no intervals)" if effects.num_blocks == 1 else ""
        yield 0, f"What each hyperparameter does, at equal values of the others{in_one}:"
    for effect in effects.main:
        levels = _shown_levels(effect.levels, effect.reference, is_ordered=effect.is_ordered)
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


def _interactions(effects: Effects) -> Iterator[IndentedLine]:
    """Yield the speedups that depend on a level, by how much; the others in one line, each with its largest change."""
    is_ordered = {effect.key: effect.is_ordered for effect in effects.main}
    tied: list[str] = []
    for key in dict.fromkeys(i.key for i in effects.interactions):
        levels = [i for i in effects.interactions if i.key == key]
        shown = _shown_levels(levels, levels[0].reference, is_ordered=is_ordered.get(key, False))
        differing = [i for i in shown if i.change.low is not None and not _is_tied(i.change, 1.0, MIN_RATIO)]
        if not differing:
            widest = max(shown, key=lambda i: abs(math.log(i.change.value))).change
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


def _shown_levels(levels: Sequence[Leveled], reference: Value, *, is_ordered: bool) -> Sequence[Leveled]:
    """Return the lowest and highest of ordered levels; of others all, or the first and the last."""
    if is_ordered:
        numbers = [float(v) for v in (reference, *(of.level for of in levels)) if isinstance(v, (int, float))]
        return [of for of in levels if of.level in (min(numbers), max(numbers))]
    return levels if len(levels) <= MAX_LEVELS else (levels[0], levels[-1])


def _is_tied(estimate: Estimate, neutral: float, floor: float) -> bool:
    """Return whether the interval includes `neutral`, or the difference is too small to show; False without one."""
    if estimate.low is None:
        return False
    return not estimate.excludes(neutral) or abs(estimate.value - neutral) < floor
