"""Scaling of a training in a terminal: a row for each worker count, a paragraph for each law, which one fits better.

Formulas and names keep to plain characters, so that they read the same on every console.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from raypar import units
from raypar.analysis.laws import USL, Fit, Refused, Scaling
from raypar.analysis.scaling import Quantity, ScalingAnalysis, WorkerGroup
from raypar.analysis.stats import Estimate
from raypar.report.points import rate_interval
from raypar.report.text import Column, print_line, print_paragraph, print_table

FEW_REPEATS = 3  # with fewer, the laws' intervals promise too much, see analysis.scaling


def print_groups(console: Console, study_name: str, groups: Sequence[WorkerGroup]) -> None:
    """Print what a study says about scaling: each group of points that differ only in their workers."""
    for group in groups:
        print_line(console, f"{study_name}: {group.label}" if group.label else study_name, "bold")
        console.print()
        print_scaling(console, group.analyse(), group.unit)
        if group.excluded:
            print_paragraph(console, excluded_line(group))
            console.print()


def print_scaling(console: Console, analysis: ScalingAnalysis, unit: str = "") -> None:
    """Print what some runs say about scaling; `unit`: of their throughput, where it is known."""
    print_table(console, _columns(analysis, unit or analysis.quantity.value))
    laws = [
        _refused(law) if isinstance(law, Refused) else _fitted(law, analysis, unit or "per second")
        for law in analysis.laws
    ]
    console.print()
    for text in (_legend(analysis), *laws, _better(analysis)):
        print_paragraph(console, text)
        console.print()


def parameter(name: str, value: Estimate, order: int) -> str:
    """A law's parameter. Shares as percent; what grows with the square of the workers is too small for that."""
    bounds = (value.value, value.low, value.high)
    if order < 2:
        return f"{name} = {units.percent_interval(*bounds, 2)}"
    brackets = "" if value.low is None or value.high is None else f" [{_small(value.low)}, {_small(value.high)}]"
    return f"{name} = {_small(value.value)}{brackets}"


def about_workers(count: Estimate) -> str:
    """``about 22 [18, 30] workers``: a worker count as a law has it."""
    bounds = "" if count.low is None or count.high is None else f" [{count.low:.0f}, {count.high:.0f}]"
    return f"about {count.value:.0f}{bounds} workers"


def ratio(estimate: Estimate) -> str:
    """``7.60× [7.10, 8.02]``."""
    return units.ratio_interval(estimate.value, estimate.low, estimate.high)


def interval_caveat(analysis: ScalingAnalysis) -> str:
    """Return the caveat on the laws' intervals; empty where there is none."""
    if analysis.why_no_interval:
        return f"The laws' parameters have no intervals: {analysis.why_no_interval}."
    if min(point.measured.num_samples for point in analysis.points) < FEW_REPEATS:
        return "The laws' intervals, by bootstrap, are too narrow with two repeats: about 80 %, not 95 %."
    return ""


def excluded_line(group: WorkerGroup) -> str:
    """Return the worker counts without a finished trial, and why."""
    return (
        "Left out: " + ", ".join(f"{units.counted(n, 'worker')} ({fate})" for n, fate in group.excluded.items()) + "."
    )


def _columns(analysis: ScalingAnalysis, measured: str) -> list[Column]:
    points = analysis.points
    bases = [p.num_workers == analysis.baseline for p in points]
    show = units.seconds_interval if analysis.quantity is Quantity.TIME else rate_interval
    values = [show(p.measured.value, p.measured.low, p.measured.high) for p in points]
    efficiencies = [units.percent(p.efficiency.value) for p in points]
    cells = {
        "workers": [str(p.num_workers) for p in points],
        "n": [str(p.measured.num_samples) for p in points],
        measured: values,
        "speedup": ["baseline" if base else ratio(p.speedup) for p, base in zip(points, bases, strict=True)],
        "eff.": [units.MISSING if base else each for each, base in zip(efficiencies, bases, strict=True)],
        "Karp–Flatt": [units.percent(p.karp_flatt.value if p.karp_flatt else None, 1) for p in points],
    }
    return [Column(head, each, True) for head, each in cells.items()]


def _legend(analysis: ScalingAnalysis) -> str:
    base = units.counted(analysis.baseline, "worker")
    if analysis.scaling is Scaling.STRONG:
        text = f"Strong scaling: every worker count does the same work. Speedups are over {base}"
    else:
        text = f"Weak scaling: N workers do N times the work of one. Speedups are of the rates, over {base}"
    text += "; eff.: the speedup over that of perfect scaling; Karp–Flatt: the serial fraction that a speedup shows."
    if not any(isinstance(law, Fit) for law in analysis.laws):
        return text
    if caveat := interval_caveat(analysis):
        return f"{text} {caveat}"
    return text + " Intervals: about 95 %, the laws' by bootstrap over the repeats."


def _refused(refused: Refused) -> str:
    return f"{refused.law.name} ({refused.law.formula}) is not fitted: {refused.reason}."


def _fitted(fit: Fit, analysis: ScalingAnalysis, unit: str) -> str:
    """The law with its parameters, how far off it is, and what more workers would bring."""
    parameters = [
        parameter(name, p, order)
        for name, p, order in zip(fit.law.parameters, fit.parameters, fit.law.orders, strict=True)
    ]
    if fit.law is USL:
        rate = fit.rate
        parameters.append("rate of one worker " + units.rate_interval(rate.value, rate.low, rate.high, unit))
    worst = max(fit.residuals, key=lambda n: abs(fit.residuals[n]))
    off = units.percent(abs(fit.residuals[worst]), 1)
    text = f"{fit.law.name} ({fit.law.formula}): {', '.join(parameters)}; "
    text += f"off by at most {off} (at {units.counted(worst, 'worker')})."
    ahead = ", ".join(f"{n} workers {ratio(speedup)}" for n, speedup in fit.extrapolated.items())
    return f"{text}{_bound(fit, analysis)} Extrapolated: {ahead}."


def _small(value: float) -> str:
    return units.number(value, 2) if value else "0"


def _bound(fit: Fit, analysis: ScalingAnalysis) -> str:
    """Return the worker count from which more don't help, as far as the law has one."""
    if fit.limit is not None:
        return f" No worker count is more than {ratio(fit.limit)} as fast (extrapolated)."
    if fit.peak is not None and fit.peak_speedup is not None:
        return _peak(fit.peak, fit.peak_speedup, analysis)
    name = fit.law.parameters[-1]
    if fit.law is USL:
        return f" It has no peak: {name} can't be told from 0."
    if analysis.scaling is Scaling.STRONG:
        return f" It has no limit: {name} can't be told from 0."
    return ""


def _peak(peak: Estimate, speedup: Estimate, analysis: ScalingAnalysis) -> str:
    if peak.value < 1:
        return " More workers never help: one is the fastest."
    beyond = " (extrapolated)" if peak.value > analysis.points[-1].num_workers else ""
    return f" It peaks at {about_workers(peak)} with {ratio(speedup)}{beyond}; more than that are slower."


def _better(analysis: ScalingAnalysis) -> str:
    fits = [law for law in analysis.laws if isinstance(law, Fit)]
    errors = ", ".join(f"{fit.law.name} {units.percent(fit.cv_error, 1)}" for fit in fits)
    if analysis.better is not None:
        return (
            f"{analysis.better.name} fits better: it predicts a left-out worker count best. Off on average: {errors}."
        )
    text = f"Which law fits better can't be told: {analysis.why_no_better}."
    return f"{text} Off on average: {errors}." if len(fits) > 1 else text
