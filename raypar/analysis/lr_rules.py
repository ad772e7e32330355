"""Rules that scale the learning rate with the batch, compared at each batch: ``lr_scaling``.

The best rule needs the fewest samples to a target that all its trials reach. The target is the best value of the metric
that all trials of the rule with the best metric reached, less the margin of equivalence. If these reached it at their
first report, the rules are compared by the metric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb
from typing import NamedTuple

import numpy as np

from raypar import units
from raypar.analysis.comparison import TIME_RATIO, Comparison, Outcome
from raypar.analysis.goodput import best_reached, needed_ratios, runs_to_target
from raypar.analysis.pairwise import Family
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import PointKey, Question, point_key
from raypar.analysis.time_to_target import Target, TargetStatus, time_to_target
from raypar.study.space import Value
from raypar.study.trial import gain, point_label

RULE = "lr_scaling"
MAX_LINES = 4


class Missed(NamedTuple):
    """Trials of a rule that missed the target.

    Attributes:
        metric: its metric at the end against the best rule's.
        is_confirmed: whether it is shown to miss it more often than the best rule.
    """

    num_missed: int
    num_trials: int
    metric: Comparison
    is_confirmed: bool


@dataclass(frozen=True)
class RuleComparison:
    """Rules at one setting of all other hyperparameters.

    Attributes:
        rest: the other hyperparameters that the study sweeps.
        best: the best rule.
        target: value of the metric that it reaches with the fewest samples; None: it has the best metric.
        others: the other rules compared with it, by the ratio of samples or the difference of metrics.
        missed: rules of which a trial missed the target.
        diverged: rules with a trial that diverged.
    """

    rest: Mapping[str, Value]
    best: str
    target: Target | None
    others: Mapping[str, Comparison]
    missed: Mapping[str, Missed]
    diverged: tuple[str, ...]

    @property
    def leaders(self) -> set[str]:
        """The best rule, and those that are not shown to be worse."""
        tied = [rule for rule, comparison in self.others.items() if not comparison.differs]
        return {self.best, *tied, *(rule for rule, missed in self.missed.items() if not missed.is_confirmed)}


def compare_rules(question: Question, points: Sequence[PointAnalysis], family: Family) -> list[RuleComparison]:
    """Compare the rules at every setting at which they differ."""
    groups: dict[PointKey, dict[str, PointAnalysis]] = {}
    for p in points:
        if RULE in p.point:
            rest = {key: value for key, value in p.point.items() if key != RULE}
            groups.setdefault(point_key(rest), {})[str(p.point[RULE])] = p
    compared = (_compared(question, rules, family) for rules in groups.values())
    return [each for each in compared if each is not None]


def _compared(question: Question, rules: Mapping[str, PointAnalysis], family: Family) -> RuleComparison | None:
    diverged = tuple(rule for rule, p in rules.items() if p.unusable)
    metrics = {rule: p.metric.value for rule, p in rules.items() if p.metric is not None and not p.unusable}
    if len(metrics) < 2:
        return None
    best = max(metrics, key=lambda rule: gain(question.mode, metrics[rule]))
    rest = {key: value for key, value in rules[best].point.items() if key != RULE}
    if len({_reported(question, rules[rule]) for rule in metrics}) == 1:  # the batch that lr is meant for
        return None
    if (target := best_reached(question, [rules[best]])) is None:
        against = {rule: family.compare_metrics(rules[best], rules[rule]) for rule in metrics if rule != best}
        return RuleComparison(rest, best, None, against, {}, diverged)
    margin = question.judged_by.margin(metrics[best])
    target = replace(target, value=gain(question.mode, gain(question.mode, target.value) - margin))
    runs = {rule: of for rule in metrics if (of := runs_to_target(rules[rule], target))}
    best = min(runs, key=lambda rule: float(np.median([run[0] for run in runs[rule].values()])), default="")
    if not best:  # the samples are unknown
        return None
    others = {rule: Comparison(ratio, TIME_RATIO) for rule, ratio in needed_ratios(runs, best, family).items()}
    missed = {rule: _missed(rules[rule], rules[best], target, family) for rule in metrics if rule not in runs}
    return RuleComparison(rest, best, target, others, missed, diverged)


def _reported(question: Question, p: PointAnalysis) -> tuple[object, ...]:
    trials = sorted(p.measured, key=lambda result: result.spec.repeat)
    return tuple(tuple(report.get(question.metric) for report in result.reports) for result in trials)


def _missed(p: PointAnalysis, best: PointAnalysis, target: Target, family: Family) -> Missed:
    trials = time_to_target(p, target).trials
    num_missed = sum(trial.status is TargetStatus.MISSED for trial in trials)
    metric, num_best = family.compare_metrics(best, p), len(best.measured)
    # Fisher's exact test: all misses fall to this rule by chance.
    p_value = comb(len(trials), num_missed) / comb(len(trials) + num_best, num_missed)
    level = family.time_level(min(len(trials), num_best))
    return Missed(num_missed, len(trials), metric, metric.differs or p_value < 1 - level)


def rule_lines(question: Question, points: Sequence[PointAnalysis], family: Family) -> list[str]:
    """Return the advice on the rule, and then why: a sentence for each setting."""
    compared = compare_rules(question, points, family)
    if not compared:
        return []
    lines = [_sentence(question, each) for each in compared]
    if (more := len(lines) - MAX_LINES) > 0:
        lines = [*lines[:MAX_LINES], f"{units.counted(more, 'more setting')} of {RULE} compared in the table."]
    return [_advice(compared), *lines]


def _advice(compared: Sequence[RuleComparison]) -> str:
    always = set.intersection(*(each.leaders for each in compared))
    if len(always) == 1:
        settings = f" at any of {len(compared)} settings" if len(compared) > 1 else ""
        return f"Use {RULE}={always.pop()}: no other rule beats it{settings}."
    if len(compared) > 1 and not always:
        best = [f"{' or '.join(sorted(each.leaders))} at {point_label(each.rest)}" for each in compared]
        return f"Use {RULE}={units.listed(best, MAX_LINES, separator='; ')}."
    return f"Which {RULE} is best is inconclusive: nothing beats {units.listed(sorted(always), MAX_LINES, word='or')}."


def _sentence(question: Question, of: RuleComparison) -> str:
    at = f"At {point_label(of.rest)}, " if of.rest else ""
    parts = []
    for rule, comparison in of.others.items():
        if (estimate := comparison.estimate) is not None and of.target is not None:
            parts.append(f"{rule} needs {units.ratio_interval(estimate)} as many{_note(comparison)}")
        elif estimate is not None:
            parts.append(f"{rule} ends {question.judged_by.show_change(estimate)}{_note(comparison)}")
    for rule, (num_missed, num_trials, metric, is_confirmed) in of.missed.items():
        parts.append(f"{rule} misses it in {units.count(num_missed)} of {units.counted(num_trials, 'trial')}")
        if metric.estimate is not None:
            parts[-1] += f" and ends {question.judged_by.show_change(metric.estimate)}"
        parts[-1] += "" if is_confirmed else " (inconclusive)"
    parts += [f"{rule} diverges" for rule in of.diverged]
    goal = f"has the best {question.metric}"
    if of.target is not None:
        goal = f"needs the fewest samples to {of.target.metric} {of.target.show(of.target.value)}"
    return f"{at}{RULE}={of.best} {goal}: {'; '.join(parts)}."


def _note(comparison: Comparison) -> str:
    if comparison.outcome is Outcome.UNCONFIRMED:
        return " (1 trial each, unconfirmed)"
    return "" if comparison.differs else f" ({comparison.outcome})"
