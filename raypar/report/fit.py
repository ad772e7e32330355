"""Scaling of a training: `print_groups` with a table and a paragraph for each law, `scaling_lines` in short.

A law takes three worker counts or more. With two, there is one serial fraction for each group, in a line of its own.
Formulas and names keep to plain characters, so that they read the same on every console.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from rich.console import Console

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.laws import AMDAHL, LAWS, USL, Fit, Refused, Scaling
from raypar.analysis.scaling import Quantity, ScalingAnalysis, WorkerGroup
from raypar.analysis.stats import Estimate
from raypar.report.sentences import IndentedLine, effect_lines, goodput_lines
from raypar.report.text import Column, print_line, print_paragraph, print_table

MIN_COUNTS = min(law.min_counts for laws in LAWS.values() for law in laws)
MAX_SCALING_GROUPS = 4  # one by one
INTERVALS = "Intervals: about 95 %, the laws' by bootstrap over the repeats."
FEW_REPEATS = 3  # with fewer, the laws' intervals promise too much, see analysis.scaling


def print_groups(console: Console, study_name: str, groups: Sequence[WorkerGroup]) -> None:
    """Print what a study says about scaling: each group of points that differ only in their workers."""
    for group in groups:
        print_line(console, f"{study_name}: {group.label}" if group.label else study_name, "bold")
        console.print()
        print_scaling(console, group.analyse(), group.unit)
        if group.excluded:
            print_paragraph(console, _excluded_line(group))
            console.print()


def print_scaling(console: Console, analysis: ScalingAnalysis, unit: str = "") -> None:
    """Print what some runs say about scaling; `unit`: of their throughput, where it is known."""
    print_table(console, _columns(analysis, unit or analysis.quantity.value))
    laws = [_law(law, analysis, unit or "per second") for law in analysis.laws]
    console.print()
    for text in (_legend(analysis), *laws, _better(analysis)):
        print_paragraph(console, text)
        console.print()


def details(analysis: StudyAnalysis) -> dict[str, Sequence[IndentedLine]]:
    """Return the sections of a report beside its verdicts, by their headings."""
    return {
        "Scaling": scaling_lines(analysis.question.study_name, analysis.worker_groups),
        "Effects of the hyperparameters": effect_lines(analysis),
        "Batch sizes: throughput and progress": goodput_lines(analysis),
    }


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
    kept = "the batch" if analysis.scaling is Scaling.STRONG else "each worker's batch"
    yield 0, f"Scaling{_at(group)} ({analysis.scaling}: {kept} is fixed), over {_base(analysis)}:"
    shares = [(p.num_workers, units.percent(p.karp_flatt.value, 1)) for p in analysis.points if p.karp_flatt]
    others = "".join(f", {share} with {n}" for n, share in shares[1:])
    yield 2, f"Karp–Flatt serial fraction: {shares[0][1]} with {units.counted(shares[0][0], 'worker')}{others}."
    for law in analysis.laws:
        text = f" is not fitted: {law.reason}." if isinstance(law, Refused) else f": {_in_short(law, analysis)}"
        yield 2, law.law.name + text
    fits = _fits(analysis)
    if len(fits) > 1:
        names = [fit.law.name.split("'")[0] for fit in fits]
        errors = [f"{units.percent(fit.cv_error, 1)} ({name})" for fit, name in zip(fits, names, strict=True)]
        text = "Which law predicts left-out worker counts better can't be told"
        if analysis.better is not None:
            text = f"{analysis.better.name} predicts left-out worker counts better"
        yield 2, f"{text}: off by {' and '.join(errors)}."
    if fits and (caveat := _interval_caveat(analysis)):
        yield 2, caveat
    if group.excluded:
        yield 2, _excluded_line(group)


def _in_short(fit: Fit, analysis: ScalingAnalysis) -> str:
    """The parameters, and what they mean for more workers."""
    if fit.law is USL:
        peak = "no peak can be told"
        if fit.peak is not None and fit.peak_speedup is not None:
            beyond = ", extrapolated" if _is_beyond(fit.peak, analysis) else ""
            peak = f"fastest with {_about_workers(fit.peak)} ({units.ratio_interval(fit.peak_speedup)}{beyond})"
            peak = "one worker is the fastest" if fit.peak.value < 1 else peak
        return f"{', '.join(_parameters(fit))}; {peak}."
    fraction = fit.parameters[0]
    text = f"{units.percent_interval(fraction, 1)} serial, "
    if fit.law is not AMDAHL:
        return f"{text}so that each worker more adds {units.percent(1 - fraction.value)} of what one does alone."
    if fit.limit is None:
        return text + "which can't be told from none: no limit is known."
    return f"{text}no more than {units.ratio_interval(fit.limit)} as fast as {_base(analysis)} with however many."


def _fractions(groups: Sequence[WorkerGroup]) -> list[str]:
    """Return the serial fractions of groups of two worker counts."""
    fractions = [(g, p.num_workers, p.karp_flatt) for g in groups for p in g.points if p.karp_flatt]
    if len(fractions) > MAX_SCALING_GROUPS:
        ends = [pick(fractions, key=lambda entry: entry[2].value) for pick in (min, max)]
        both = [f"{units.percent(f.value, 1)} ({units.counted(n, 'worker')}, {g.label})" for g, n, f in ends]
        return [f"Karp–Flatt serial fraction: {' to '.join(both)}."]
    lines = []
    for group, n, f in fractions:
        shown = units.percent_interval(f, 1)
        excluded = f" {_excluded_line(group)}" if group.excluded else ""
        lines.append(f"Karp–Flatt serial fraction of {units.counted(n, 'worker')}{_at(group)}: {shown}.{excluded}")
    return lines


def _at(group: WorkerGroup) -> str:
    return f" at {group.label}" if group.label else ""


def _base(analysis: ScalingAnalysis) -> str:
    return units.counted(analysis.baseline, "worker")


def _fits(analysis: ScalingAnalysis) -> list[Fit]:
    return [law for law in analysis.laws if isinstance(law, Fit)]


def _parameters(fit: Fit) -> list[str]:
    """Shares as percent; what grows with the square of the workers is too small for that."""
    shown = []
    for name, p, order in zip(fit.law.parameters, fit.parameters, fit.law.orders, strict=True):
        brackets = "" if p.low is None or p.high is None else f" [{_small(p.low)}, {_small(p.high)}]"
        percent = units.percent_interval(p, 2)
        shown.append(f"{name} = {percent if order < 2 else _small(p.value) + brackets}")
    return shown


def _about_workers(count: Estimate) -> str:
    """``about 22 [18, 30] workers``: a worker count as a law has it."""
    bounds = "" if count.low is None or count.high is None else f" [{count.low:.0f}, {count.high:.0f}]"
    return f"about {count.value:.0f}{bounds} workers"


def _is_beyond(peak: Estimate, analysis: ScalingAnalysis) -> bool:
    return peak.value > analysis.points[-1].num_workers


def _interval_caveat(analysis: ScalingAnalysis) -> str:
    """Return the caveat on the laws' intervals; empty where there is none."""
    if analysis.why_no_interval:
        return f"The laws' parameters have no intervals: {analysis.why_no_interval}."
    if min(point.measured.num_samples for point in analysis.points) < FEW_REPEATS:
        return "The laws' intervals, by bootstrap, are too narrow with two repeats: about 80 %, not 95 %."
    return ""


def _excluded_line(group: WorkerGroup) -> str:
    """Return the worker counts without a finished trial, and why."""
    counts = [f"{units.counted(n, 'worker')} ({fate})" for n, fate in group.excluded.items()]
    return f"Left out: {', '.join(counts)}."


def _columns(analysis: ScalingAnalysis, measured: str) -> list[Column]:
    points = analysis.points
    show = units.seconds_interval if analysis.quantity is Quantity.TIME else partial(units.rate_interval, unit="")
    others = [None if p.num_workers == analysis.baseline else p for p in points]
    cells = {
        "workers": [str(p.num_workers) for p in points],
        "n": [str(p.measured.num_samples) for p in points],
        measured: [show(p.measured) for p in points],
        "speedup": [units.ratio_interval(p.speedup) if p else "baseline" for p in others],
        "eff.": [units.percent(p.efficiency.value if p else None) for p in others],
        "Karp–Flatt": [units.percent(p.karp_flatt.value if p.karp_flatt else None, 1) for p in points],
    }
    return [Column(head, each, True) for head, each in cells.items()]


def _legend(analysis: ScalingAnalysis) -> str:
    base = _base(analysis)
    if analysis.scaling is Scaling.STRONG:
        text = f"Strong scaling: every worker count does the same work. Speedups are over {base}"
    else:
        text = f"Weak scaling: N workers do N times the work of one. Speedups are of the rates, over {base}"
    text += "; eff.: the speedup over that of perfect scaling; Karp–Flatt: the serial fraction that a speedup shows."
    if not _fits(analysis):
        return text
    return f"{text} {_interval_caveat(analysis) or INTERVALS}"


def _law(law: Fit | Refused, analysis: ScalingAnalysis, unit: str) -> str:
    """The law with its parameters, how far off it is, and what more workers would bring."""
    text = f"{law.law.name} ({law.law.formula})"
    if isinstance(law, Refused):
        return f"{text} is not fitted: {law.reason}."
    rate = units.rate_interval(law.rate, unit)
    parameters = [*_parameters(law), *([f"rate of one worker {rate}"] if law.law is USL else [])]
    worst = max(law.residuals, key=lambda n: abs(law.residuals[n]))
    off = f"{units.percent(abs(law.residuals[worst]), 1)} (at {units.counted(worst, 'worker')})"
    ahead = ", ".join(f"{n} workers {units.ratio_interval(speedup)}" for n, speedup in law.extrapolated.items())
    return f"{text}: {', '.join(parameters)}; off by at most {off}.{_bound(law, analysis)} Extrapolated: {ahead}."


def _small(value: float) -> str:
    return units.number(value, 2) if value else "0"


def _bound(fit: Fit, analysis: ScalingAnalysis) -> str:
    """Return the worker count from which more don't help, as far as the law has one."""
    if fit.limit is not None:
        return f" No worker count is more than {units.ratio_interval(fit.limit)} as fast (extrapolated)."
    if fit.peak is not None and fit.peak_speedup is not None:
        if fit.peak.value < 1:
            return " More workers never help: one is the fastest."
        beyond = " (extrapolated)" if _is_beyond(fit.peak, analysis) else ""
        peak = f"{_about_workers(fit.peak)} with {units.ratio_interval(fit.peak_speedup)}{beyond}"
        return f" It peaks at {peak}; more than that are slower."
    if fit.law is not USL and analysis.scaling is not Scaling.STRONG:
        return ""
    return f" It has no {'peak' if fit.law is USL else 'limit'}: {fit.law.parameters[-1]} can't be told from 0."


def _better(analysis: ScalingAnalysis) -> str:
    fits = _fits(analysis)
    errors = ", ".join(f"{fit.law.name} {units.percent(fit.cv_error, 1)}" for fit in fits)
    text = f"Which law fits better can't be told: {analysis.why_no_better}."
    if analysis.better is not None:
        text = f"{analysis.better.name} fits better: it predicts a left-out worker count best."
    return f"{text} Off on average: {errors}." if len(fits) > 1 else text
