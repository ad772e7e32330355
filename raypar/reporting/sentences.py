"""Sentences that all reports share: verdict, effects, batch sizes. Those on scaling are in `fit`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias, TypeVar

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.comparison import METRIC_CHANGE, SPEEDUP, Comparison, Outcome, Scale
from raypar.analysis.effects import Effects, Interaction, LevelEffect, MainEffect
from raypar.analysis.goodput import BatchGroup
from raypar.analysis.machines import MachineKind
from raypar.analysis.stats import Estimate
from raypar.analysis.verdict import BaselineComparison, Verdict
from raypar.reporting.text import Column
from raypar.study.metric import Metric
from raypar.study.space import Value
from raypar.study.trial import point_label

IndentedLine: TypeAlias = tuple[int, str]  # indentation and text


def distrust(doubt: str, times: str = "Times") -> str:
    """Return why times can't be trusted, and the fix."""
    return f"{times} can't be trusted: {doubt}. Rerun the study on an idle machine, with --fresh."


def comparison_columns(verdict: Verdict) -> list[Column]:
    """Return columns with points, speedup and outcome of each comparison; empty for a single one (see the answer)."""
    shown = verdict.comparisons
    if len(shown) < 2:
        return []
    subjects, settings = ({getattr(c, key) for c in shown} for key in ("who", "setting"))
    keys = ["setting"] * (len(settings) > 1) + ["who"] * (len(subjects) > 1 or settings == {""})
    labels = [Column("", [getattr(c, key) for c in shown]) for key in keys or ["who"]]
    ratios = Column("", [units.ratio_interval(c.point.speedup) for c in shown])
    return [*labels, ratios, Column("", [_outcome(verdict, c) for c in shown], is_prose=True)]


def _outcome(verdict: Verdict, comparison: BaselineComparison) -> str:
    """Return ``faster, 75 % efficient, accuracy 5.0 points below best``."""
    point, advice = comparison.point, verdict.recommendation
    parts = [str(comparison.outcome)]
    if comparison.outcome is Outcome.UNCONFIRMED:
        parts = ["1 trial each, unconfirmed"]
    if comparison.outcome is Outcome.FASTER and point.efficiency:
        parts.append(f"{units.percent(point.efficiency.value)} efficient")
    best = advice.best if advice else None
    candidate = next((c for c in advice.candidates if c.point == point.point), None) if advice else None
    if advice and best and best.metric and candidate and candidate.metric and candidate.is_metric_worse:
        name = advice.question.metric
        worse = advice.question.judged_by.show_difference(abs(best.metric.value - candidate.metric.value))
        side = "below" if advice.question.mode == "max" else "above"
        parts.append(f"{name} {worse} {side} best")
    return ", ".join(parts)


def reservation(comparison: Comparison) -> str:
    """Return the note after a ratio that shows no significant difference; empty if it shows one."""
    if comparison.outcome is Outcome.UNCONFIRMED:
        return " (1 trial each, unconfirmed)"
    return "" if comparison.is_settled else f", {comparison.outcome}"


MAX_GOODPUT_GROUPS = 2


def batch_lines(group: BatchGroup) -> Iterator[str]:
    """Yield the effect of the batch size on throughput, progress per sample, and their product."""
    at = f" at {point_label(group.rest)}" if group.rest else ""
    yield f"Against {group.key}={group.base}{at}: samples/s × progress per sample = speed towards the target."
    for batch in group.batches:
        if batch.batch_size != group.base:
            factors = " × ".join(map(units.ratio_interval, (batch.throughput, batch.progress)))
            parts = f"{factors} = {units.ratio_interval(batch.goodput)}"
            yield f"- {group.key}={batch.batch_size}: {parts}{reservation(Comparison(batch.goodput))}"


def goodput_lines(analysis: StudyAnalysis) -> list[IndentedLine]:
    """Return the section on batch sizes; empty unless two batch sizes reached a target in all their trials."""
    target = analysis.target
    if target is None or not analysis.batches:
        return []
    reached = f"{target.metric} {target.show(target.value)}"
    lines = [(0, f"Effect of the batch size on the way to {reached}, the best that every trial reached:")]
    for group in analysis.batches[:MAX_GOODPUT_GROUPS]:
        first, *others = batch_lines(group)
        lines += [(2, first), *((4, line) for line in others)]
    if (more := len(analysis.batches) - MAX_GOODPUT_GROUPS) > 0:
        lines.append((2, f"`raypar recommend {analysis.question.study_name} --target …` shows {more} more."))
    return lines


MAX_MACHINES = 8


def machine_lines(machines: Sequence[MachineKind]) -> list[IndentedLine]:
    """Return the section on machines: ``Ran on node1, node2 (2 cores, Xeon): 12 trials.``, a line for each kind."""
    lines = []
    for kind in machines:
        cores = units.counted(kind.num_cores, "core") if kind.num_cores else ""
        what = ", ".join(filter(None, (cores, kind.cpu_model, *kind.gpus)))
        nodes = units.listed(kind.nodes, MAX_MACHINES) + (f" ({what})" if what else "")
        lines.append((0, f"Ran on {nodes}: {units.counted(kind.num_trials, 'trial')}."))
    return lines


MAX_LEVELS = 3  # shown levels of a non-numeric hyperparameter
MIN_RATIO = 0.005  # smallest deviation from 1; less is shown as 1.00×

Leveled = TypeVar("Leveled", LevelEffect, Interaction)


def effect_lines(analysis: StudyAnalysis) -> tuple[IndentedLine, ...]:
    """Return the section on effects; empty if fewer than two hyperparameters are swept."""
    effects = analysis.effects
    if effects is None:
        return ()
    main = _main(effects, analysis.question.judged_by)
    return (*main, *_interactions(effects), *((0, f"{why}.") for why in effects.omitted))


def _main(effects: Effects, metric: Metric) -> Iterator[IndentedLine]:
    if effects.main:
        in_one = " (1 block, unconfirmed)" if effects.num_blocks == 1 else ""
        yield 0, f"Effect of each hyperparameter{in_one}:"
    for effect in effects.main:
        levels = _shown_levels(effect.levels, effect.reference, is_ordered=effect.is_ordered)
        yield 2, f"{effect.key}: {'; '.join(_level(effect, level, metric) for level in levels)}."


def _level(effect: MainEffect, of: LevelEffect, metric: Metric) -> str:
    level, reference = units.value_of(of.level), units.value_of(effect.reference)
    shown = units.ratio_interval(of.speedup)
    if (outcome := Comparison(of.speedup).outcome) is Outcome.UNCONFIRMED:
        text = f"{level} against {reference}: {shown}"
    elif _is_tied(of.speedup, SPEEDUP, MIN_RATIO):
        text = f"{level} against {reference}: no significant difference in time ({shown})"
    else:
        text = f"{level} is {outcome} than {reference}: {shown}"
    return f"{text}, {_change(of.metric_change, metric)}" if of.metric_change else text


def _change(change: Estimate, metric: Metric) -> str:
    """Return ``accuracy -2.1 points [-2.4, -1.8]``."""
    text = metric.show_change(change)
    if not _is_tied(change, METRIC_CHANGE, metric.smallest_shown):
        return f"{metric.name} {text}"
    if not any((change.value, change.low, change.high)):
        return f"{metric.name} the same"
    return f"no significant difference in {metric.name} ({text})"


def _interactions(effects: Effects) -> Iterator[IndentedLine]:
    """Yield how much speedups depend on levels; the independent ones are in one line, each with its largest change."""
    is_ordered = {effect.key: effect.is_ordered for effect in effects.main}
    tied: list[str] = []
    for key in dict.fromkeys(i.key for i in effects.interactions):
        levels = [i for i in effects.interactions if i.key == key]
        shown = _shown_levels(levels, levels[0].reference, is_ordered=is_ordered.get(key, False))
        differing = [i for i in shown if i.change.low is not None and not _is_tied(i.change, SPEEDUP, MIN_RATIO)]
        if not differing:
            widest = max(shown, key=lambda i: abs(math.log(i.change.value))).change
            tied.append(f"{key} ({units.ratio_interval(widest)})")
            continue
        first = differing[0]
        then = f"{units.ratio(first.reference_speedup.value)} at {units.value_of(first.reference)}"
        at_levels = [
            f"{units.ratio(i.speedup.value)} at {units.value_of(i.level)} ({units.ratio_interval(i.change)} as large)"
            for i in differing
        ]
        yield 0, f"{_speedup(first)} depends on {key}: {', '.join([then, *at_levels])}."
    if tied:
        yield 0, f"{_speedup(effects.interactions[0])} does not depend significantly on {' or '.join(tied)}."


def _speedup(of: Interaction) -> str:
    workers = units.counted(of.num_workers, "worker")
    return f"The speedup of {workers} over {of.base_workers}"


def _shown_levels(levels: Sequence[Leveled], reference: Value, *, is_ordered: bool) -> Sequence[Leveled]:
    """Return the lowest and highest of ordered levels; for others all, or the first and the last."""
    if is_ordered:
        numbers = [float(v) for v in (reference, *(of.level for of in levels)) if isinstance(v, (int, float))]
        return [of for of in levels if of.level in (min(numbers), max(numbers))]
    return levels if len(levels) <= MAX_LEVELS else (levels[0], levels[-1])


def _is_tied(estimate: Estimate, scale: Scale, floor: float) -> bool:
    """Return whether there is no significant difference, or one too small to print; False without an interval."""
    outcome = Comparison(estimate, scale).outcome
    is_small = abs(estimate.value - scale.neutral) < floor
    return outcome is Outcome.INCONCLUSIVE or (outcome is not Outcome.UNCONFIRMED and is_small)
