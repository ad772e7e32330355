"""Scaling of a training: a table, a paragraph for each law, and where to stop; `scaling_lines` is for reports.

A law needs at least three worker counts. Groups with two counts get a line with one serial fraction. Formulas and names
are ASCII, so that they look the same on every console.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

from rich.console import Console

from raypar import units
from raypar.analysis.laws import AMDAHL, LAWS, USL, Fit, Refused, Scaling
from raypar.analysis.scaling import WORTHWHILE, Measurement, Runs, ScalingAnalysis, Step, WorkerGroup, analyse_scaling
from raypar.analysis.stats import LEVEL, Estimate
from raypar.analysis.table import Table
from raypar.reporting.documents import Document
from raypar.reporting.sentences import IndentedLine, distrust
from raypar.reporting.text import Column, print_line, print_paragraph, print_table
from raypar.study.space import Value

MIN_COUNTS = min(law.min_counts for laws in LAWS.values() for law in laws)
MAX_SCALING_GROUPS = 4  # shown individually
FRACTIONS = {Scaling.STRONG: "Karp–Flatt", Scaling.WEAK: "Gustafson"}  # definitions of the serial fraction


@dataclass(frozen=True)
class ScalingView:
    """Scaling of runs that differ only in their number of workers.

    Attributes:
        label: values that the runs share, such as ``batch_size=64``; empty if nothing else varies.
        group: the study's points; None: runs of a file.
        doubt: why times can't be trusted, so that there is no worker count to stop at; empty if they can be.
    """

    shown: ClassVar = (
        "label point scaling=analysis.scaling quantity=analysis.quantity unit baseline=analysis.baseline "
        "points=analysis.points steps=analysis.steps laws=analysis.laws texts better_law better "
        "why_no_interval=analysis.why_no_interval answer excluded"
    )
    label: str
    analysis: ScalingAnalysis
    unit: str
    group: WorkerGroup | None = None
    doubt: str = ""

    @classmethod
    def of(cls, group: WorkerGroup, analysis: ScalingAnalysis, doubt: str = "") -> ScalingView:
        """Return the view of a study's points."""
        return cls(group.label, analysis, group.unit, group, doubt)

    @property
    def point(self) -> Mapping[str, Value]:
        """Other swept hyperparameters; empty for a file."""
        return self.group.point if self.group else {}

    @property
    def excluded(self) -> Mapping[int, str]:
        """Worker counts without a finished trial, and why."""
        return self.group.excluded if self.group else {}

    @cached_property
    def texts(self) -> list[str]:
        """A paragraph on each law."""
        return [_law(law, self.analysis) for law in self.analysis.laws]

    @property
    def better_law(self) -> str:
        """Name of the law that predicts left-out worker counts significantly better; empty if there is none."""
        return self.analysis.better.name if self.analysis.better and not self.doubt else ""

    @property
    def better(self) -> str:
        """Sentence on which law fits better; empty if that is not known."""
        return _better(self.analysis, self.doubt)

    @property
    def answer(self) -> str:
        """Sentence on where to stop."""
        return _where_to_stop(self.analysis, self.doubt)


@dataclass(frozen=True)
class FitView(Document):
    """Scaling of a study or a file.

    Attributes:
        source: name of the study, or path of the file.
        groups: one for each set of runs that is fitted separately.
        reading: how the columns of a file were read, in a sentence.
        doubt: why times can't be trusted; empty if they can be.
        excluded: a sentence on trials of other settings; empty if there are none.
    """

    kind = "fit"
    source: str
    groups: Sequence[ScalingView]
    reading: str = ""
    doubt: str = ""
    excluded: str = ""

    @classmethod
    def of_study(cls, name: str, groups: Sequence[WorkerGroup], doubt: str = "", excluded: str = "") -> FitView:
        """Return the view of a study's points that differ only in their workers."""
        level = _level(len(groups))
        views = [ScalingView.of(group, group.analyse(level), doubt) for group in groups]
        return cls(name, views, doubt=doubt, excluded=excluded)

    @classmethod
    def of_table(cls, source: str, table: Table, baseline: int | None = None) -> FitView:
        """Return the view of a file's runs.

        Args:
            baseline: worker count to compare with; None: the smallest of each.
        """
        level = _level(len(table.runs))
        views = [
            ScalingView(label, analyse_scaling(runs, table.scaling, baseline, level=level), _unit(runs))
            for label, runs in table.runs.items()
        ]
        return cls(source, views, table.reading)


def _unit(runs: Runs) -> str:
    return "s" if runs.quantity is Measurement.TIME else runs.unit


def print_fit(console: Console, view: FitView) -> None:
    """Print how a file was read, and the scaling of each group."""
    for text in filter(None, (view.reading, distrust(view.doubt) if view.doubt else "")):
        print_paragraph(console, text)
        console.print()
    for group in view.groups:
        heading = group.label
        if group.group is not None:
            heading = f"{view.source}: {group.label}" if group.label else view.source
        if heading:
            print_line(console, heading, "bold")
            console.print()
        _print_scaling(console, group)
        if group.excluded:
            print_paragraph(console, _excluded_line(group.excluded))
            console.print()
    if view.excluded:
        print_paragraph(console, view.excluded)


def _level(num_groups: int) -> float:
    """Return the confidence of each group's intervals for a joint 95 % over all groups."""
    return 1 - (1 - LEVEL) / num_groups


def _print_scaling(console: Console, view: ScalingView) -> None:
    analysis = view.analysis
    measured = view.unit if analysis.quantity is Measurement.THROUGHPUT and view.unit else analysis.quantity.value
    print_table(console, _columns(analysis, measured))
    console.print()
    for text in filter(None, (_legend(analysis), _missing_fractions(analysis), *view.texts, view.better)):
        print_paragraph(console, text)
        console.print()
    print_line(console, "Where to stop", "bold")
    console.print()
    if analysis.steps:
        print_table(console, _step_columns(analysis))
        console.print()
    print_paragraph(console, view.answer)
    console.print()


def scaling_lines(study_name: str, groups: Sequence[WorkerGroup]) -> list[IndentedLine]:
    """Fit the laws; return the lines for a report, none if no two points differ only in their workers."""
    many = [group for group in groups if len(group.speedups) >= MIN_COUNTS]
    few = [group for group in groups if len(group.speedups) < MIN_COUNTS]
    views = [ScalingView.of(group, group.analysis) for group in many[:MAX_SCALING_GROUPS]]
    lines = [line for view in views for line in _section(view)]
    if len(many) > MAX_SCALING_GROUPS:
        more = units.counted(len(many) - MAX_SCALING_GROUPS, "more group")
        lines.append(
            (0, f"{more} of points that differ only in num_workers: `raypar model fit {study_name}` shows all.")
        )
    return [*lines, *((0, line) for line in _fractions(few))]


def _section(view: ScalingView) -> Iterator[IndentedLine]:
    analysis = view.analysis
    kept = "the batch" if analysis.scaling is Scaling.STRONG else "each worker's batch"
    yield 0, f"Scaling{_at(view.label)} ({analysis.scaling}: {kept} is fixed), over {_base(analysis)}:"
    shares = [(p.num_workers, units.percent(p.serial_fraction.value, 1)) for p in analysis.points if p.serial_fraction]
    if shares:
        others = "".join(f", {share} with {n}" for n, share in shares[1:])
        name, first = FRACTIONS[analysis.scaling], f"{shares[0][1]} with {units.counted(shares[0][0], 'worker')}"
        yield 2, f"{name} serial fraction: {first}{others}."
    notes = _interval_note(analysis), _excluded_line(view.excluded)
    texts = (_missing_fractions(analysis), *view.texts, view.better, *notes)
    yield from ((2, text) for text in texts if text)


def _fractions(groups: Sequence[WorkerGroup]) -> list[str]:
    """Return the serial fractions of groups with two worker counts."""
    fractions = [(g, p.num_workers, p.serial_fraction) for g in groups for p in g.points if p.serial_fraction]
    if len(fractions) > MAX_SCALING_GROUPS:
        ends = [pick(fractions, key=lambda entry: entry[2].value) for pick in (min, max)]
        both = [f"{units.percent(f.value, 1)} ({units.counted(n, 'worker')}, {g.label})" for g, n, f in ends]
        names = " or ".join(dict.fromkeys(FRACTIONS[g.scaling] for g, _, _ in fractions))
        return [f"{names} serial fraction: {' to '.join(both)}."]
    return [
        f"{FRACTIONS[g.scaling]} serial fraction of {units.counted(n, 'worker')}{_at(g.label)}: "
        f"{units.percent_interval(f, 1)}. {_excluded_line(g.excluded)}".rstrip()
        for g, n, f in fractions
    ]


def _missing_fractions(analysis: ScalingAnalysis) -> str:
    """Return a sentence on worker counts without a serial fraction; empty if all have one."""
    by_reason: dict[str, list[int]] = {}
    for point in analysis.points:
        if point.why_no_fraction:
            by_reason.setdefault(point.why_no_fraction, []).append(point.num_workers)
    reasons = [
        f"with {units.listed(map(str, counts), len(counts), word='and')} workers ({reason})"
        for reason, counts in by_reason.items()
    ]
    return f"No serial fraction {', '.join(reasons)}." if reasons else ""


def _at(label: str) -> str:
    return f" at {label}" if label else ""


def _base(analysis: ScalingAnalysis) -> str:
    return units.counted(analysis.baseline, "worker")


def _fits(analysis: ScalingAnalysis) -> list[Fit]:
    return [law for law in analysis.laws if isinstance(law, Fit)]


def _parameters(fit: Fit) -> list[str]:
    """Return the parameters, in percent except for second-order ones, for which percent is too coarse."""
    shown = []
    for name, p, order in zip(fit.law.parameters, fit.parameters, fit.law.orders, strict=True):
        brackets = "" if p.low is None or p.high is None else f" [{_small(p.low)}, {_small(p.high)}]"
        percent = units.percent_interval(p, 2)
        shown.append(f"{name} = {percent if order < 2 else _small(p.value) + brackets}")
    return shown


def _about_workers(count: Estimate) -> str:
    """``about 22 [18, 30] workers``: a law's estimate of a worker count."""
    bounds = "" if count.low is None or count.high is None else f" [{count.low:.0f}, {count.high:.0f}]"
    return f"about {count.value:.0f}{bounds} workers"


def _peak(fit: Fit, analysis: ScalingAnalysis) -> str:
    """Return where a law has its highest rate, if the measurements show one."""
    if fit.peak is None or fit.peak_speedup is None or fit.peak.high is None:
        return _no_bound(fit)
    if fit.peak.high < 1.5:
        return "one worker is the fastest"
    most = analysis.points[-1].num_workers
    where = f"{_about_workers(fit.peak)} ({units.ratio_interval(fit.peak_speedup)})"
    if fit.peak.value > most:
        return f"if this law holds beyond {units.counted(most, 'worker')}, the peak is at {where}"
    return f"the peak is at {where}; more are slower"


def _no_bound(fit: Fit) -> str:
    """Return why a law has no limit or no peak."""
    bound, parameter = ("peak", "k") if fit.law is USL else ("limit", "f")
    if fit.parameters[-1].low is None:
        return f"no {bound}: at least two runs of each worker count are needed"
    return f"no {bound}: {parameter} is not significantly above 0"


def _misfit(fit: Fit) -> str:
    worst, off = _worst(fit)
    return f"does not hold (at {units.counted(worst, 'worker')}, its rate is off by {units.percent(off, 1)})"


def _worst(fit: Fit) -> tuple[int, float]:
    """Return the worker count with the largest error of a law, and the relative error."""
    worst = max(fit.residuals, key=lambda n: abs(fit.residuals[n]))
    return worst, abs(fit.residuals[worst])


def _interval_note(analysis: ScalingAnalysis) -> str:
    """Return a sentence on the confidence of the laws' intervals, or why there are none; empty without a fit."""
    if not (fits := _fits(analysis)):
        return ""
    if analysis.why_no_interval:
        return f"The laws' parameters have no intervals: {analysis.why_no_interval}."
    return f"The laws' intervals have {units.level(fits[0].parameters[0].level or 0.0)} confidence."


def _excluded_line(excluded: Mapping[int, str]) -> str:
    """Return a sentence on worker counts without a finished trial, and why; empty if there are none."""
    counts = [f"{units.counted(n, 'worker')} ({fate})" for n, fate in excluded.items()]
    return f"Excluded: {', '.join(counts)}." if counts else ""


def _columns(analysis: ScalingAnalysis, measured: str) -> list[Column]:
    points = analysis.points
    show = units.seconds_interval if analysis.quantity is Measurement.TIME else partial(units.rate_interval, unit="")
    others = [None if p.num_workers == analysis.baseline else p for p in points]
    cells = {
        "workers": [str(p.num_workers) for p in points],
        "n": [str(p.measured.num_samples) for p in points],
        measured: [show(p.measured) for p in points],
        "speedup": [units.ratio_interval(p.speedup) if p else "baseline" for p in others],
        "eff.": [units.percent(p.efficiency.value if p else None) for p in others],
        FRACTIONS[analysis.scaling]: [
            units.percent(p.serial_fraction.value if p.serial_fraction else None, 1) for p in points
        ],
    }
    return [Column(head, each, True) for head, each in cells.items()]


def _legend(analysis: ScalingAnalysis) -> str:
    base = _base(analysis)
    if analysis.scaling is Scaling.STRONG:
        text = f"Strong scaling: every worker count does the same work. Speedups and serial fractions are over {base}"
    else:
        text = f"Weak scaling: N workers do N times the work of one. Speedups (of rates) and fractions are over {base}"
    name = FRACTIONS[analysis.scaling]
    text += f"; eff.: speedup relative to perfect scaling; {name}: serial fraction that a speedup implies."
    if not _fits(analysis):
        return text
    if analysis.baseline > 1:
        text += f" In the laws, N is the number of workers divided by {analysis.baseline}."
    return f"{text} {_interval_note(analysis)}"


def _law(law: Fit | Refused, analysis: ScalingAnalysis) -> str:
    """Return a paragraph on a law: parameters, largest error, and speedups of more workers."""
    text = f"{law.law.name} ({law.law.formula})"
    if isinstance(law, Refused):
        return f"{text} is not fitted: {law.reason}."
    if not law.holds:
        return f"{text}: {_misfit(law)}."
    worst, off = _worst(law)
    text = f"{text}: {', '.join(_parameters(law))}; off by at most {units.percent(off, 1)}"
    text += f" (at {units.counted(worst, 'worker')}).{_bound(law, analysis)}"
    if not law.extrapolated:
        return text
    ahead = ", ".join(f"{n} workers {units.ratio_interval(speedup)}" for n, speedup in law.extrapolated.items())
    return f"{text} Extrapolated: {ahead}."


def _small(value: float) -> str:
    return units.number(value, 2) if value else "0"


def _bound(fit: Fit, analysis: ScalingAnalysis) -> str:
    """Return a sentence on the law's limit or peak, or on what another worker adds."""
    if fit.limit is not None:
        return f" Any number of workers reaches at most {units.ratio_interval(fit.limit)} (extrapolated)."
    if fit.law in (USL, AMDAHL):
        text = _peak(fit, analysis) if fit.law is USL else _no_bound(fit)
        return f" {text[0].upper()}{text[1:]}."
    alone = "the rate of one worker" if analysis.baseline == 1 else f"the rate per worker with {_base(analysis)}"
    return f" Each additional worker adds {units.percent(1 - fit.parameters[0].value)} of {alone}."


def _better(analysis: ScalingAnalysis, doubt: str = "") -> str:
    """Return which law fits better; empty if fewer than two are fitted, none holds, or times can't be trusted."""
    fits = _fits(analysis)
    if doubt or len(fits) < 2 or not any(fit.holds for fit in fits):
        return ""
    errors = ", ".join(f"{fit.law.author} {units.percent(fit.cv_error, 1)}" for fit in fits)
    if analysis.better is not None:
        text = f"{analysis.better.name} fits better"
    elif analysis.why_no_interval:
        text = "Single runs don't show which law fits better"
    elif fits[0].holds:
        text = "The simpler law fits as well, within noise"
    else:
        text = "Neither law fits significantly better"
    return f"{text}. Errors at left-out worker counts: {errors}."


# ---- where to stop


def _step_columns(analysis: ScalingAnalysis) -> list[Column]:
    steps = analysis.steps
    cells = {
        "workers": [f"{s.start} → {s.end}" for s in steps],
        "gain per doubling": [units.ratio_interval(s.gain) for s in steps],
        "worker time": [f"{100 * (s.cost - 1):+.0f} %" for s in steps],
    }
    if analysis.quantity is Measurement.TIME and analysis.scaling is Scaling.STRONG:
        first = analysis.points[0]  # the others follow from their speedups, like the worker time
        base_s = first.measured.value * first.speedup.value
        costs = {p.num_workers: units.compact(p.num_workers * base_s / p.speedup.value) for p in analysis.points}
        cells["worker-seconds"] = [f"{costs[s.start]} → {costs[s.end]}" for s in steps]
    return [Column(head, each, True) for head, each in cells.items()]


def _where_to_stop(analysis: ScalingAnalysis, doubt: str = "") -> str:
    """Return the worker count beyond which doubling gains too little, or why it is unknown."""
    if doubt:
        return f"Where to stop is inconclusive: {doubt}."
    if not analysis.steps:
        return "No worker count is twice another: measure doublings, such as 1, 2, 4 and 8 workers."
    enough = units.number(WORTHWHILE, 2) + "×"
    if analysis.why_no_interval:
        return f"Where to stop is unknown without repeats: {analysis.why_no_interval}."
    if (last := analysis.last_step) is not None:
        start = units.counted(last.start, "worker")
        if last.gain.high is not None and last.gain.high < 1:
            return f"Stop at {start}: {last.end} workers are slower ({_gain(last)})."
        return f"Beyond {start}, doubling gains less than {enough} ({_gain(last)})."
    good = [i for i, s in enumerate(analysis.steps) if s.gain.low is not None and s.gain.low >= WORTHWHILE]
    unclear = analysis.steps[max(good, default=-1) + 1 :]
    if unclear:
        gain = f"the gain of {_gain(unclear[0])} workers"
        return f"Where to stop is inconclusive: {gain} includes {enough}. Run more repeats."
    last = analysis.steps[-1]
    most = units.counted(last.end, "worker")
    return f"Up to {most}, doubling gains {enough} or more ({_gain(last)}). Larger counts were not measured."


def _gain(step: Step) -> str:
    """``1.12× [1.05, 1.20] from 4 to 8``."""
    return f"{units.ratio_interval(step.gain)} from {step.start} to {step.end}"
