"""What a study's report says of scaling: the serial fractions, and a sentence for each law.

A law takes three worker counts or more. With two, there is one serial fraction for each group, in a line of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from raypar import units
from raypar.analysis.laws import AMDAHL, LAWS, USL, Fit, Law, Refused, Scaling
from raypar.analysis.scaling import ScalingAnalysis, WorkerGroup
from raypar.analysis.stats import Estimate
from raypar.report.laws import about_workers, interval_caveat, left_out, parameter, ratio

MIN_COUNTS = min(law.min_counts for laws in LAWS.values() for law in laws)
MAX_GROUPS = 4  # told one by one

Line: TypeAlias = tuple[int, str]  # how far it is indented, and its text


def scaling_lines(study_name: str, groups: Sequence[WorkerGroup]) -> tuple[Line, ...]:
    """The section of a report; empty where no two points differ only in their workers. Fits the laws."""
    many = [group for group in groups if len(group.speedups) >= MIN_COUNTS]
    few = [group for group in groups if len(group.speedups) < MIN_COUNTS]
    lines = [line for group in many[:MAX_GROUPS] for line in _section(group, group.analysis)]
    if len(many) > MAX_GROUPS:
        more = units.counted(len(many) - MAX_GROUPS, "more group")
        lines.append((0, f"{more} of points that differ only in num_workers: `raypar fit {study_name}` shows all."))
    return (*lines, *((0, line) for line in _fractions(few)))


def _section(group: WorkerGroup, analysis: ScalingAnalysis) -> Iterator[Line]:
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
    if group.left_out:
        yield 2, left_out(group)


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
    errors = " and ".join(f"{units.percent(fit.left_out_error, 1)} ({_short(fit.law)})" for fit in fits)
    if analysis.better is None:
        return f"Which law predicts left-out worker counts better can't be told: off by {errors}."
    return f"{analysis.better.name} predicts left-out worker counts better: off by {errors}."


def _short(law: Law) -> str:
    return law.name.split("'")[0]


def _fractions(groups: Sequence[WorkerGroup]) -> list[str]:
    """The serial fractions of groups of two worker counts."""
    found = [(group, n, fraction) for group in groups for n, fraction in group.karp_flatt.items()]
    if len(found) <= MAX_GROUPS:
        return [_one_fraction(group, n, fraction) for group, n, fraction in found]
    ends = [pick(found, key=lambda entry: entry[2].value) for pick in (min, max)]
    told = " to ".join(f"{units.percent(f.value, 1)} ({units.counted(n, 'worker')}, {g.label})" for g, n, f in ends)
    return [f"Karp–Flatt serial fraction: {told}."]


def _one_fraction(group: WorkerGroup, num_workers: int, fraction: Estimate) -> str:
    at = f" at {group.label}" if group.label else ""
    shown = units.percent_interval(fraction.value, fraction.low, fraction.high, 1)
    text = f"Karp–Flatt serial fraction of {units.counted(num_workers, 'worker')}{at}: {shown}."
    return f"{text} {left_out(group)}" if group.left_out else text
